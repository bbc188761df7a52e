"""The console script `toolkit`: parses, calls, prints. Commands take `recipe=NAME key=value …` like the runner."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from toolkit.common import UserError

SLURM_OPTIONS = {
    "output": "where it is written (RECIPE.sbatch)",
    "time": "time limit, such as 4:00:00; the run is queued again until it is finished",
    "partition": "Slurm partition",
    "account": "Slurm account",
    "cores": "CPU cores of each machine (8 per process)",
}
"""Options of `launch` that only a batch script has."""


def ls(options: argparse.Namespace) -> int:
    from toolkit.recipe import list_recipes, recipe_folders, shipped_recipes
    from toolkit.recipe.show import description

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


def show(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.recipe.show import with_origins

    print(with_origins(loaded))
    return 0


def validate(options: argparse.Namespace) -> int:
    from toolkit.recipe import list_recipes, recipe_folders
    from toolkit.recipe.rules import load_checked

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


def schema(options: argparse.Namespace) -> int:
    from toolkit.recipe.show import json_schema, markdown

    text = markdown() if options.markdown else json.dumps(json_schema(), indent=2) + "\n"
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


def init(options: argparse.Namespace) -> int:
    from toolkit.recipe.show import json_schema

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


def cp(options: argparse.Namespace) -> int:
    from toolkit.recipe import split_arguments
    from toolkit.recipe.rules import load_checked
    from toolkit.recipe.show import write_diff

    names = [argument for argument in options.arguments if "=" not in argument and not argument.startswith("~")]
    if len(names) != 1:
        raise UserError("cp needs the parent and one new name", "write: toolkit cp recipe=PARENT NEW key=value …")
    parent, overrides = split_arguments([argument for argument in options.arguments if argument not in names])
    exists = Path(options.recipes or "recipes").is_dir()
    load_checked(parent, overrides, options.recipes if exists else None)
    print(f"wrote {write_diff(parent, overrides, names[0].removesuffix('.yaml'), options.recipes)}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from toolkit.cli.doctor import collect, render

    print(render(collect()))
    return 0


def plan(options: argparse.Namespace) -> int:
    if options.schema:
        from toolkit.planner.plan import json_schema

        print(json.dumps(json_schema(), indent=2))
        return 0
    from toolkit.cli import plan
    from toolkit.report import plan_text

    rows = plan.questions(options.arguments, options.compare, options.sweep)
    where = (options.recipes, options.price)
    plans: list[Any]
    if options.compare or options.sweep:
        plans = plan.answers(rows, *where)
        text, figures = plan_text.comparison_text(plans, plan_text.width()), [row.model_dump() for row in plans]
    else:
        plans = [plan.answer(rows[0], *where)]
        text, figures = plan_text.plan_text(plans[0], plan_text.width()), plans[0].model_dump()
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        plan_text.show(text)
    if options.html:
        from toolkit.report.plan_page import plan_page

        Path(options.html).write_text(plan_page(plans), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    return 0


def calibrate(options: argparse.Namespace) -> int:
    from toolkit.planner.hardware.calibrate import calibrate
    from toolkit.planner.hardware.calibration import describe

    print(describe(calibrate(options.seconds)))
    return 0


def launch(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.cli import launch

    recipe, arguments = loaded.recipe, list(options.arguments)
    if options.recipes:
        arguments += ["--recipes", options.recipes]
    arguments += [f"--{name}" for name in ("force", "verbose", "quiet") if getattr(options, name)]
    if not options.slurm and (unread := [key for key in SLURM_OPTIONS if getattr(options, key) is not None]):
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


def render(options: argparse.Namespace) -> int:
    from toolkit.distributed.render import render, stale, write
    from toolkit.recipe import recipe_folders

    files = render(recipe_folders(options.recipes))
    if not options.check:
        write(files, Path())
    wrong = stale(files, Path())
    if wrong:
        left = "remove those whose strategy is gone, and keep files of your own in other folders"
        left += "; `toolkit render` writes the others" * options.check
        raise UserError(f"not as recipes/strategy/ says: {', '.join(wrong)}", left)
    print(f"{len(files)} files of {len(files)} are current" if options.check else "\n".join(files))
    return 0


def data(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.data.audit import DataError, check_batch
    from toolkit.data.prepare import prepare
    from toolkit.data.preview import render, show
    from toolkit.models.load import ModelSource

    source = ModelSource.open(loaded.recipe)
    tokenizer = source.tokenizer()
    try:
        prepared = prepare(loaded.recipe, tokenizer, source.stop_tokens(tokenizer))
    except DataError as error:
        print(render(error.audit))
        raise
    print(render(check_batch(prepared.audit, loaded.recipe.batch.sequences_per_step)))
    if options.show:
        print("\n" + show(prepared, tokenizer, options.show, color=sys.stdout.isatty()))
    return 0


def report(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    from toolkit.report.run_page import write_report

    print(write_report(run))
    return 0


def generate(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    if options.top_p != 1.0 and not options.temperature:
        raise UserError("--top-p has no effect without --temperature", "add --temperature 0.7, or leave it out")
    from toolkit.train.export import chat

    sample = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else None
    chat(run, options.prompt, options.max_new_tokens, sample, options.seed)
    return 0


def merge(options: argparse.Namespace) -> int:
    run = _run_folder(options.run)
    from toolkit.train.export import merge

    print(merge(run, Path(options.output) if options.output else run / "merged"))
    return 0


def _load(options: argparse.Namespace) -> Any:
    from toolkit.recipe import split_arguments
    from toolkit.recipe.rules import load_checked

    return load_checked(*split_arguments(options.arguments), options.recipes)


def _run_folder(text: str) -> Path:
    run = Path(text)
    if not run.is_dir():
        raise UserError(f"there is no folder {text}", "name a run folder such as runs/NAME")
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{text} is not a run folder: it has no recipe.yaml", "name a folder such as runs/NAME")
    return run
