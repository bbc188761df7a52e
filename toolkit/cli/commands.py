"""The commands of `toolkit` other than those on runs: the options of each, what it calls and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.cli.option_types import count, host, new_file, port, positive, price, time_limit, values_of_key
from toolkit.cli.registry import command, flag, option
from toolkit.common import LINES, PAGED, UserError, brief, fitted, on_screen, printable, table
from toolkit.files import as_json, write_named, write_new
from toolkit.hub_cache import use_own

_RECIPE = option("arguments", "recipe=NAME key=value", None, nargs="*", default=[])
_FOLDER = option("--recipes", "DIR", "the folder of your recipes (default: ./recipes)")
# Options of `launch` that only a batch script has.
_SLURM = (
    option("--output", "OUTPUT", "where it is written (RECIPE.sbatch)", type=new_file),
    option("--time", "TIME", "limit, such as 4:00:00; the run is queued again until it is finished", type=time_limit),
    option("--partition", "PARTITION", "Slurm partition"),
    option("--account", "ACCOUNT", "Slurm account"),
    option("--cores", "N", "CPU cores of each machine (8 per process)", type=positive),
)


@command(_FOLDER)
def ls(options: argparse.Namespace) -> None:
    """List recipes, yours first."""
    from toolkit.recipe import list_recipes, recipe_folders, shipped_recipes
    from toolkit.recipe.show import description

    folders = recipe_folders(options.recipes)
    recipes = list_recipes(folders)
    shipped = shipped_recipes().resolve()
    rows = [(name.replace("\n", "\\n"), description(file)) for name, file in recipes.items()]
    lines = table(rows).split("\n")
    yours, ours = list[str](), list[str]()
    for line, file in zip(lines, recipes.values(), strict=True):
        if sys.stdout.isatty():
            line.truncate(shutil.get_terminal_size().columns, overflow="ellipsis")
        (yours if len(folders) > 1 and not file.is_relative_to(shipped) else ours).append(line.plain)
    if len(folders) > 1:
        if sys.stdout.isatty():
            yours = fitted([yours], f"{options.recipes or 'recipes'}/").split("\n")
        print(f"# yours, in {options.recipes or 'recipes'}", *yours, f"\n# shipped, in {shipped}", sep="\n")
    print("\n".join(ours))


@command(_RECIPE, _FOLDER)
def show(options: argparse.Namespace) -> None:
    """Print the resolved recipe with the origin of every value."""
    loaded = _load(options)
    from toolkit.recipe.show import with_origins

    if sys.stdout.isatty():
        print(brief(printable(with_origins(loaded, LINES)), sys.maxsize))
    else:
        # A file, or another program, gets a recipe that is whole.
        print(printable(with_origins(loaded)))


@command(_RECIPE, _FOLDER, flag("--all", "validate all your recipes (without any: the shipped ones)"))
def validate(options: argparse.Namespace) -> int:
    """Report every problem of a recipe."""
    from toolkit.cli.local_data import local_problems
    from toolkit.recipe import RecipeError, list_recipes, recipe_folders

    def valid(arguments: list[str]) -> str:
        loaded = _load(argparse.Namespace(arguments=arguments, recipes=options.recipes))
        if problems := local_problems(loaded):
            raise RecipeError(loaded.name, problems)
        return printable(f"recipe {loaded.name}: valid")

    if not options.all:
        print(valid(options.arguments))
        return 0
    if any(argument.startswith("recipe=") for argument in options.arguments):
        raise UserError("--all validates all recipes, recipe=… one", "give one of them")
    recipes = list_recipes(recipe_folders(options.recipes)[:1])
    errors = []
    for name in recipes:
        try:
            valid([f"recipe={name}", *options.arguments])
        except UserError as error:
            errors.append(error)
    if errors:
        whole = "toolkit validate recipe=NAME"
        print(fitted([[*f"error: {error}".split("\n"), ""] for error in errors], whole), file=sys.stderr)
    print(f"{len(recipes)} recipes checked, {len(errors) or 'none'} with problems")
    return max((error.exit_code for error in errors), default=0)


@command(
    flag("--markdown", "print all keys as Markdown instead"),
    option("--output", "FILE", "write it to a file", type=new_file),
)
def schema(options: argparse.Namespace) -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from toolkit.recipe.show import json_schema, markdown

    text = markdown() if options.markdown else json.dumps(json_schema(), indent=2) + "\n"
    if options.output:
        write_named(options.output, text)
    else:
        sys.stdout.write(text)


@command(_FOLDER)
def init(options: argparse.Namespace) -> None:
    """Start a recipe folder in this repository."""
    from toolkit.recipe.show import json_schema

    folder = Path(options.recipes or "recipes")
    recipe, schema = folder / "mine.yaml", folder / "schema.json"
    try:
        if not (os.path.lexists(recipe) or os.path.lexists(schema)):
            write_new(schema, json.dumps(json_schema(), indent=2) + "\n")
        # The last: what was cut off before can start again.
        write_new(recipe, Path(__file__).with_name("first_recipe.yaml").read_bytes())
    except FileExistsError:
        change = "nothing was written; edit it, or name another folder with --recipes"
        raise UserError(f"{recipe} exists already", change) from None
    named = f" --recipes {shlex.quote(options.recipes)}" if options.recipes else ""
    print(f"wrote {recipe}, and {schema} for your editor")
    print(f"check it:  toolkit validate recipe=mine{named}\ntrain it:  toolkit launch recipe=mine{named}")


@command(_RECIPE, _FOLDER)
def cp(options: argparse.Namespace) -> None:
    """Write a recipe of your own as a diff: toolkit cp recipe=PARENT NEW key=value."""
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


@command()
def doctor(options: argparse.Namespace) -> None:
    """Versions, devices and kernels that really work, to paste into a bug report."""
    from toolkit.cli.doctor import collect, render

    print(render(collect()))


@command(
    _RECIPE,
    _FOLDER,
    flag("--json", "print all figures as JSON"),
    flag("--schema", "print the JSON Schema of --json"),
    option("--price", "P", "price of a GPU-hour", type=price),
    option("--serve", "TOKENS", "context length at which the trained model is to run (batch.seq_len)", type=positive),
    option("--html", "FILE", "write a page as well", type=new_file),
    option("--compare", "NAME", "further recipes, or 'NAME key=value' as one text", nargs="+", action="extend"),
    option(
        "--sweep",
        "KEY=V1,V2",
        "a plan for each value; several sweeps are combined",
        type=values_of_key,
        action="append",
    ),
    flag("--layouts", "a plan for each way to divide layers, rows and experts over the devices"),
)
def plan(options: argparse.Namespace) -> None:
    """Memory, time and cost before anything is rented, and advice."""
    if options.schema:
        from toolkit.planner.plan import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    from toolkit.cli import plan
    from toolkit.report import plan_text, terminal

    rows = plan.questions(options.arguments, options.compare, options.sweep)
    where = (options.recipes, options.price, options.serve)
    plans: list[Any]
    if options.layouts or options.compare or options.sweep:
        if options.layouts:
            plans = [each for row in rows for each in plan.layouts(row, *where)]
        else:
            plans = [*plan.answers_or_reasons(rows, *where)]
        text, figures = plan_text.comparison_text(plans, plan_text.width()), [row.model_dump() for row in plans]
    else:
        plans = [plan.answer(rows[0], *where)]
        columns, figures = plan_text.width(), plans[0].model_dump()
        text = plan_text.plan_text(plans[0], columns)
        if sys.stdout.isatty():
            text = plan_text.screen_text(plans[0], columns, PAGED)
    if options.json:
        print(as_json(figures, indent=2))
    else:
        several = PAGED if len(plans) > 1 else ""
        terminal.write(text, terminal.console_of(sys.stdout), several)
    if options.html:
        from toolkit.report.plan_page import plan_page

        write_named(options.html, plan_page(plans))
        print(f"wrote {options.html}", file=sys.stderr)


@command(option("--seconds", "N", "about how long (60)", type=positive, default=60))
def calibrate(options: argparse.Namespace) -> None:
    """Measure this device, for better plans."""
    from toolkit.planner.hardware.calibrate import calibrate
    from toolkit.planner.hardware.calibration import describe

    print(describe(calibrate(options.seconds)))


@command(
    _RECIPE,
    _FOLDER,
    option("--gpus", "N", "GPUs of each machine, one process per GPU (default: all; --slurm needs it)", type=count),
    option("--nodes", "N", "number of machines (1)", type=positive, default=1),
    option("--rank", "R", "this machine's number; the one with 0 is the head", type=count),
    option("--head", "HOST", "name or address of the head, the same on every machine", type=host),
    option("--port", "P", "port at which the processes meet", type=port),
    option("--restarts", "N", "start a failed run again from its last checkpoint, at most N times (0)", type=count),
    flag("--print", "only print what would be started"),
    flag("--force", "also run what would not fit by the plan"),
    flag("--slurm", "write an sbatch file instead; the options below are for it"),
    *_SLURM,
)
def launch(options: argparse.Namespace) -> int | None:
    """Train a recipe on the GPUs of one machine or many."""
    loaded = _load(options, warns=options.print or options.slurm)  # Otherwise the run says them.
    from toolkit.cli import launch
    from toolkit.train.continued import as_begun

    recipe, arguments = as_begun(loaded).recipe, list(options.arguments)
    if options.recipes:
        arguments += ["--recipes", options.recipes]
    arguments += [f"--{name}" for name in ("force", "verbose", "quiet") if getattr(options, name)]
    _check_slurm(options)
    if options.restarts and options.print and not options.slurm:
        raise UserError("--restarts is no part of the line that is printed", "leave out one of the two")
    where = (options.gpus, options.nodes, options.head, options.port, options.rank, options.slurm)
    cluster = launch.cluster(recipe, *where)
    launch.check(recipe, cluster, options.recipes)
    if options.slurm:
        _write_slurm(options, [(loaded, arguments)], cluster, recipe.output.name or loaded.name, options.restarts or 0)
    elif options.print:
        ranks = range(cluster.nodes) if options.rank is None else [options.rank]
        print("\n".join(launch.shell_line(cluster, rank, arguments) for rank in ranks))
    elif options.restarts:
        from toolkit.cli import restarts

        return restarts.run(loaded, cluster, options.rank, arguments, options.restarts, options.recipes)
    else:
        launch.run(cluster, options.rank, arguments)
    return None


def _check_slurm(options: argparse.Namespace, *further: str) -> None:
    """Refuses options of a batch script where none is written."""
    names = [name.removeprefix("--") for name, _ in _SLURM] + [*further]
    unread = [f"--{name}" for name in names if getattr(options, name) is not None]
    if unread and not options.slurm:
        raise UserError(f"{' and '.join(unread)} would be ignored", "add --slurm, or leave them out")


def _write_slurm(
    options: argparse.Namespace, runs: Sequence[Any], cluster: Any, name: str, restarts: int = 0, **settings: Any
) -> None:
    """Writes or prints a batch script, see `launch.sbatch`."""
    from toolkit.cli import launch

    name = re.sub(r"[^\w.-]+", "-", name)
    requests = {key: getattr(options, key) for key in ("time", "partition", "account")}
    text = launch.sbatch(runs, cluster, name, options.cores, restarts, **settings, **requests)
    print(text if options.print else launch.save(text, options.output or Path(f"{name}.sbatch")))


@command(
    _RECIPE,
    _FOLDER,
    option("--gpus", "N", "GPUs, one process per GPU (default: this machine's; --slurm and --ray need it)", type=count),
    option("--parallel", "N", "run N at once, each on its share of the GPUs (1; with --slurm all)", type=positive),
    option("--trials", "N", "train so many, with values that Optuna chooses", type=positive),
    flag("--prune", "with --trials: end those early that do worse than half of the others"),
    flag("--print", "only print what would be trained"),
    flag("--ray", "submit a job for each to a Ray cluster instead"),
    flag("--slurm", "write an sbatch file with a job for each instead; the options below are for it"),
    option("--nodes", "N", "number of machines of each (1)", type=positive),
    *_SLURM,
)
def sweep(options: argparse.Namespace) -> int:
    """Train every combination of values, or search among them: toolkit sweep recipe=NAME key=1,2."""
    from toolkit.cli import jobs, sweep
    from toolkit.report import terminal
    from toolkit.report.comparison import comparison_text
    from toolkit.report.plan_text import width

    _check_slurm(options, "nodes")
    if options.prune and not options.trials:
        raise UserError("--prune ends runs of a search early", "say how many it has with --trials N")
    elsewhere = [f"--{name}" for name in ("print", "slurm", "ray") if getattr(options, name)]
    if options.trials and elsewhere:
        what = elsewhere[0]
        raise UserError(f"{what}: what a search trains is chosen on the way", f"leave out {what} or --trials")
    if options.ray and (len(elsewhere) > 1 or options.parallel):
        what = "--parallel" if options.parallel else next(each for each in elsewhere if each != "--ray")
        raise UserError(
            f"--ray runs as many jobs at once as its machines can take; {what} is no part of it", f"leave out {what}"
        )
    if options.trials:
        from toolkit.cli.search import Search

        search = Search(options.arguments, options.recipes, options.trials, options.prune, sweep.told)
        status, folders = search.run(jobs.shares(options.parallel or 1, options.gpus))
    else:
        found = sweep.trials(options.arguments, options.recipes)
        folders = [each.folder for each in found]
        if options.slurm:
            runs = [(each.loaded, each.arguments) for each in found]
            cluster = sweep.nodes(found, options.gpus, options.nodes or 1)
            _write_slurm(options, runs, cluster, folders[0].parent.name, at_once=options.parallel)
            return 0
        if options.print:
            print(printable("\n".join(sweep.shell_lines(found))))
            return 0
        if options.ray:
            from toolkit.cli import ray_jobs

            ray_jobs.submit(found, options.gpus, lambda line: print(printable(line)))
            return 0
        status = sweep.run(found, jobs.shares(options.parallel or 1, options.gpus), sweep.told)
    if compared := sweep.compare_all(folders):
        page = folders[0].parent / sweep.PAGE
        print(f"\n{len(compared.names)} of {len(folders)} runs, the best first" if len(folders) > 4 else "")
        terminal.write(comparison_text(compared, width()), terminal.console_of(sys.stdout), str(page))
        print(printable(f"\npage: {page}"))
    return status


@command(_FOLDER, flag("--check", "write nothing; fail if a file is not as it would be"))
def render(options: argparse.Namespace) -> None:
    """Write accelerate_configs/ and deepspeed_configs/ for strategies, and for recipes that accelerate can divide."""
    from toolkit.distributed.config_files import render, stale, write
    from toolkit.recipe import recipe_folders

    files = render(recipe_folders(options.recipes))
    if not options.check:
        write(files, Path())
    wrong = stale(files, Path())
    if wrong:
        left = "remove those whose strategy or recipe is gone, and keep files of your own in other folders"
        left += "; `toolkit render` writes the others" * options.check
        raise UserError(f"not as recipes/ says: {', '.join(wrong)}", left)
    print(f"{len(files)} files of {len(files)} are current" if options.check else "\n".join(files))


@command(_RECIPE, _FOLDER, option("--show", "N", "print N rows, trained tokens coloured", type=positive, default=0))
def data(options: argparse.Namespace) -> None:
    """Prepare and audit the data of a recipe."""
    loaded = _load(options)
    use_own(loaded.recipe.repositories)
    from toolkit.data.auditing.audit import DataError
    from toolkit.data.auditing.problems import with_settings
    from toolkit.data.prepare import prepare
    from toolkit.data.preview import render, show
    from toolkit.models.load import ModelSource

    source = ModelSource.open(loaded.recipe)
    tokenizer = source.tokenizer()
    try:
        prepared = prepare(loaded.recipe, tokenizer, source.stop_tokens(tokenizer), vocab_size=source.vocab_size)
    except DataError as error:
        print(render(error.audit))
        raise
    whole = str(prepared.path / "audit.json")
    print(render(with_settings(prepared.audit, loaded.recipe, prepared.statistics), whole))
    if options.show:
        rows = show(prepared, tokenizer, options.show, color=sys.stdout.isatty())
        print(f"\n{on_screen(rows, PAGED)}")


def _load(options: argparse.Namespace, warns: bool = True) -> Any:
    from toolkit.recipe import split_arguments
    from toolkit.recipe.problem import warn
    from toolkit.recipe.rules import load_checked

    loaded = load_checked(*split_arguments(options.arguments), options.recipes)
    if warns:
        warn(loaded.warnings)
    return loaded
