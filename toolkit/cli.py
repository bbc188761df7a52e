"""The console script `toolkit`: parses, calls, prints. Commands take `recipe=NAME key=value …` like the runner."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit import __version__
from toolkit.errors import UserError
from toolkit.options import count, port, positive, price, sweep
from toolkit.terminal import quiet_libraries

Command = Callable[[argparse.Namespace], int]


_EPILOG = """\
examples:
  toolkit init                                        start a recipe folder here
  toolkit cp recipe=qwen3_0_6b_lora mine seq_len=1024  a recipe of your own, as a diff
  toolkit validate recipe=mine                        every problem at once
  toolkit plan recipe=mine hardware=h100x8            does it fit, how long, what cost
  toolkit launch recipe=mine                          train it on all GPUs of this machine
"""


_SLURM = {
    "output": "where it is written (RECIPE.sbatch)",
    "time": "time limit, such as 4:00:00; the run is queued again until it is finished",
    "partition": "Slurm partition",
    "account": "Slurm account",
    "cores": "CPU cores of each machine (8 per process)",
}
"""Options of `launch` that only a batch script has."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for a failure, 2 for a wrong recipe or usage."""
    parser = _parser()
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    # argparse takes positional arguments in one block; here they may stand on both sides of an option.
    if any(argument.startswith("-") for argument in rest) or (rest and "arguments" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.arguments += rest
    quiet_libraries()
    try:
        status = options.command(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `toolkit ls | head` closes the pipe early; Python would complain once more while shutting down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        print(f"error: cannot use{place}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="toolkit",
        allow_abbrev=False,
        description="Recipes for fine-tuning on Hugging Face Accelerate.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, help: str, recipe: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=command)
        if recipe:
            sub.add_argument("arguments", nargs="*", metavar="recipe=NAME key=value")
        return sub

    def with_folder(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--recipes", metavar="DIR", help="the folder of your recipes (default: ./recipes)")
        return sub

    with_folder(add("ls", _ls, "list recipes, yours first"))
    with_folder(add("show", _show, "print the resolved recipe with the origin of every value", recipe=True))
    check = with_folder(add("validate", _validate, "report every problem of a recipe", recipe=True))
    check.add_argument("--all", action="store_true", help="validate all your recipes (without any: the shipped ones)")
    schema = add("schema", _schema, "print the JSON Schema of a recipe, for editors")
    schema.add_argument("--markdown", action="store_true", help="print all keys as Markdown instead")
    schema.add_argument("--output", metavar="FILE", help="write it to a file")
    with_folder(add("init", _init, "start a recipe folder in this repository"))
    with_folder(
        add("cp", _cp, "write a recipe of your own as a diff: toolkit cp recipe=PARENT NEW key=value", recipe=True)
    )
    add("doctor", _doctor, "versions, devices and kernels that really work, to paste into a bug report")
    plan = with_folder(add("plan", _plan, "memory, time and cost before anything is rented, and advice", recipe=True))
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")
    plan.add_argument("--schema", action="store_true", help="print the JSON Schema of --json")
    plan.add_argument("--price", type=price, metavar="P", help="price of a GPU-hour")
    plan.add_argument("--html", metavar="FILE", help="write a page as well")
    others = "further recipes, or 'NAME key=value' as one text"
    plan.add_argument("--compare", nargs="+", action="extend", default=[], metavar="NAME", help=others)
    values = "a plan for each value; several sweeps are combined"
    plan.add_argument("--sweep", type=sweep, action="append", default=[], metavar="KEY=V1,V2", help=values)
    calibrate = add("calibrate", _calibrate, "measure this device, for better plans")
    calibrate.add_argument("--seconds", type=positive, default=60, metavar="N", help="about how long (60)")
    launch = with_folder(add("launch", _launch, "train a recipe on the GPUs of one machine or many", recipe=True))
    launch.add_argument("--gpus", type=count, metavar="N", help="GPUs of each machine, a process each (default: all)")
    launch.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of machines (1)")
    launch.add_argument("--rank", type=count, metavar="R", help="this machine's number; the one with 0 is the head")
    launch.add_argument("--head", metavar="HOST", help="name or address of the head, the same on every machine")
    launch.add_argument("--port", type=port, metavar="P", help="port at which the processes meet")
    launch.add_argument("--print", action="store_true", help="only print what would be started")
    launch.add_argument("--force", action="store_true", help="also run what would not fit by the plan")
    launch.add_argument("--slurm", action="store_true", help="write an sbatch file instead; the options below are its")
    for option, text in _SLURM.items():
        kind = {"type": positive, "metavar": "N"} if option == "cores" else {"metavar": option.upper()}
        launch.add_argument(f"--{option}", help=text, **kind)
    render = with_folder(add("render", _render, "write accelerate_configs/ and deepspeed_configs/, one per strategy"))
    render.add_argument("--check", action="store_true", help="write nothing; fail if a file is not as it would be")
    data = with_folder(add("data", _data, "prepare and audit the data of a recipe", recipe=True))
    data.add_argument("--show", type=positive, default=0, metavar="N", help="print N rows, trained tokens coloured")
    report = add("report", _report, "write a run's report.html again")
    report.add_argument("run", help="the run folder")
    generate = add("generate", _generate, "sample from a run; interactive without --prompt")
    generate.add_argument("run", help="the run folder")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    generate.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="longest answer (256)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="with a temperature: nucleus sampling")
    generate.add_argument("--seed", type=int, default=42, metavar="N", help="seed of the sampling (42)")
    merge = add("merge", _merge, "merge a run's adapter into its base and prove it equal")
    merge.add_argument("run", help="the run folder")
    merge.add_argument("--output", metavar="DIR", help="where the merged model goes (default: RUN/merged)")
    return parser


def _ls(options: argparse.Namespace) -> int:
    from toolkit.recipe import list_recipes, recipe_folders, shipped_recipes
    from toolkit.recipe.view import description

    folders = recipe_folders(options.recipes)
    found = list_recipes(folders)
    width = max((len(name) for name in found), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    shipped = shipped_recipes().resolve()
    blocks = {"yours": [], "shipped": []} if len(folders) > 1 else {"shipped": []}  # type: dict[str, list[str]]
    for name, file in found.items():
        block = blocks["shipped" if file.is_relative_to(shipped) or len(blocks) == 1 else "yours"]
        line = f"{name:<{width}}  {description(file)}".rstrip()
        block.append(line if len(line) <= columns else line[: columns - 1] + "…")
    if len(blocks) == 1:
        print("\n".join(blocks["shipped"]))
        return 0
    print(f"# yours, in {options.recipes or 'recipes'}", *blocks["yours"], sep="\n")
    print(f"\n# shipped, in {shipped}", *blocks["shipped"], sep="\n")
    return 0


def _show(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.recipe.view import with_origins

    print(with_origins(loaded))
    return 0


def _validate(options: argparse.Namespace) -> int:
    from toolkit.recipe import list_recipes, recipe_folders
    from toolkit.rules import load_checked

    if not options.all:
        loaded = _load(options)
        print(f"recipe {loaded.name}: valid")
        return 0
    if any(argument.startswith("recipe=") for argument in options.arguments):
        raise UserError("--all validates all recipes, recipe=… one", "give one of them")
    found = list_recipes(recipe_folders(options.recipes)[:1])
    errors = []
    for name in found:
        try:
            load_checked(name, options.arguments, options.recipes)
        except UserError as error:
            errors.append(error)
            print(f"error: {error}\n", file=sys.stderr)
    print(f"{len(found)} recipes checked, {len(errors) or 'none'} with problems")
    return max((error.exit_code for error in errors), default=0)


def _schema(options: argparse.Namespace) -> int:
    from toolkit.recipe.document import json_schema, markdown

    text = markdown() if options.markdown else json.dumps(json_schema(), indent=2) + "\n"
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def _init(options: argparse.Namespace) -> int:
    from toolkit.recipe.document import json_schema

    folder = Path(options.recipes or "recipes")
    recipe, schema = folder / "mine.yaml", folder / "schema.json"
    if recipe.exists():
        raise UserError(
            f"{recipe} exists already", "nothing was written; edit it, or name another folder with --recipes"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("first_recipe.yaml"), recipe)
    if not schema.exists():
        schema.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
    named = f" --recipes {options.recipes}" if options.recipes else ""
    print(f"wrote {recipe}, and {schema} for your editor")
    print(f"check it:  toolkit validate recipe=mine{named}")
    print(f"train it:  accelerate launch -m toolkit.run recipe=mine{named}")
    return 0


def _cp(options: argparse.Namespace) -> int:
    from toolkit.recipe import split_arguments
    from toolkit.recipe.diff import write_diff
    from toolkit.rules import load_checked

    names = [argument for argument in options.arguments if "=" not in argument and not argument.startswith("~")]
    if len(names) != 1:
        raise UserError("cp needs the parent and one new name", "write: toolkit cp recipe=PARENT NEW key=value …")
    parent, overrides = split_arguments([argument for argument in options.arguments if argument not in names])
    exists = Path(options.recipes or "recipes").is_dir()
    load_checked(parent, overrides, options.recipes if exists else None)
    print(f"wrote {write_diff(parent, overrides, names[0].removesuffix('.yaml'), options.recipes)}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from toolkit.doctor import collect, render

    print(render(collect()))
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.schema:
        from toolkit.plan.result import json_schema

        print(json.dumps(json_schema(), indent=2))
        return 0
    from toolkit import plan_rows, plan_text

    rows = plan_rows.questions(options.arguments, options.compare, options.sweep)
    where = (options.recipes, options.price)
    plans: list[Any]
    if options.compare or options.sweep:
        plans = plan_rows.answers(rows, *where)
        text, figures = plan_text.comparison_text(plans, plan_text.width()), [row.model_dump() for row in plans]
    else:
        plans = [plan_rows.answer(rows[0], *where)]
        text, figures = plan_text.plan_text(plans[0], plan_text.width()), plans[0].model_dump()
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        plan_text.show(text)
    if options.html:
        from toolkit.plan_page import plan_page

        Path(options.html).write_text(plan_page(plans), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from toolkit.calibrate import calibrate, describe

    print(describe(calibrate(options.seconds)))
    return 0


def _launch(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit import launch

    recipe, arguments = loaded.recipe, list(options.arguments)
    if options.recipes:
        arguments += ["--recipes", options.recipes]
    if options.force:
        arguments.append("--force")
    if not options.slurm and (unread := [key for key in _SLURM if getattr(options, key) is not None]):
        raise UserError(f"--{' and --'.join(unread)} would be ignored", "add --slurm, or leave them out")
    where = (options.gpus, options.nodes, options.head, options.port, options.rank, options.slurm)
    cluster = launch.cluster(recipe, *where)
    launch.check(recipe, cluster, options.recipes)
    if options.slurm:
        name = re.sub(r"[^\w.-]+", "-", recipe.output.name or loaded.name)
        job = launch.Job(name, options.time, options.partition, options.account, options.cores)
        text = launch.sbatch(recipe, cluster, job, arguments)
        print(text if options.print else launch.save(text, Path(options.output or f"{name}.sbatch")))
    elif options.print:
        ranks = range(cluster.nodes) if options.rank is None else [options.rank]
        print("\n".join(launch.shell_line(cluster, rank, arguments) for rank in ranks))
    else:
        launch.run(cluster, options.rank, arguments)
    return 0


def _render(options: argparse.Namespace) -> int:
    from toolkit.policy.render import render, stale, write
    from toolkit.recipe import recipe_folders

    files = render(recipe_folders(options.recipes), Path())
    if not options.check:
        write(files, Path())
    wrong = stale(files, Path())
    if wrong:
        left = "remove those whose strategy is gone, and keep files of your own in other folders"
        left += "; `toolkit render` writes the others" * options.check
        raise UserError(f"not as recipes/strategy/ says: {', '.join(wrong)}", left)
    print(f"{len(files)} files of {len(files)} are current" if options.check else "\n".join(files))
    return 0


def _data(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.data.audit import DataError, check_batch, render
    from toolkit.data.prepare import prepare
    from toolkit.data.show import show
    from toolkit.model import load_tokenizer, stop_tokens

    tokenizer = load_tokenizer(loaded.recipe)
    try:
        prepared = prepare(loaded.recipe, tokenizer, stop_tokens(loaded.recipe, tokenizer))
    except DataError as error:
        print(render(error.audit))
        raise
    print(render(check_batch(prepared.audit, loaded.recipe.batch.sequences_per_step)))
    if options.show:
        print("\n" + show(prepared, tokenizer, options.show, color=sys.stdout.isatty()))
    return 0


def _report(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    from toolkit.report import write_report

    print(write_report(run))
    return 0


def _generate(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    if options.top_p != 1.0 and not options.temperature:
        raise UserError("--top-p has no effect without --temperature", "add --temperature 0.7, or leave it out")
    from toolkit.export import chat

    sample = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else None
    chat(run, options.prompt, options.max_new_tokens, sample, options.seed)
    return 0


def _merge(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    from toolkit.export import merge

    print(merge(run, Path(options.output) if options.output else run / "merged"))
    return 0


def _load(options: argparse.Namespace) -> Any:
    from toolkit.recipe import split_arguments
    from toolkit.rules import load_checked

    return load_checked(*split_arguments(options.arguments), options.recipes)


def _run_folder(text: str) -> Path:
    run = Path(text)
    if not run.is_dir():
        raise UserError(f"there is no folder {text}", "name a run folder such as runs/NAME")
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{text} is not a run folder: it has no recipe.yaml", "name a folder such as runs/NAME")
    return run
