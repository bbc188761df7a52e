"""The console script `toolkit`: parses, calls, prints. Every command takes `recipe=NAME key=value …` like the runner."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for a failure, 2 for a wrong recipe or usage."""
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        return options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # `toolkit ls | head` closes the pipe early; Python would complain once more while shutting down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="toolkit", description="Recipes for fine-tuning on Hugging Face Accelerate.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, help: str, recipe: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=command)
        sub.add_argument("--recipes", metavar="DIR", help="the folder of your recipes (default: ./recipes)")
        if recipe:
            sub.add_argument("arguments", nargs="*", metavar="recipe=NAME key=value")
        return sub

    add("ls", _ls, "list recipes")
    add("show", _show, "print the resolved recipe with the origin of every value", recipe=True)
    check = add("validate", _validate, "report every problem of a recipe", recipe=True)
    check.add_argument("--all", action="store_true", help="validate every recipe")
    schema = add("schema", _schema, "print the JSON Schema of a recipe, for editors")
    schema.add_argument("--output", metavar="FILE", help="write it to a file")
    add("init", _init, "start a recipe folder in this repository")
    copy = add("cp", _cp, "start a recipe of your own as a diff of another: toolkit cp recipe=PARENT NEW", recipe=True)
    copy.set_defaults(command=_cp)
    add("doctor", _doctor, "versions, devices and kernels that really work, to paste into a bug report")
    data = add("data", _data, "prepare and audit the data of a recipe", recipe=True)
    data.add_argument("--show", type=int, default=0, metavar="N", help="print N rows, trained tokens coloured")
    report = add("report", _report, "write a run's report.html again")
    report.add_argument("run", help="the run folder")
    generate = add("generate", _generate, "sample from a run; interactive without --prompt")
    generate.add_argument("run", help="the run folder")
    generate.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    generate.add_argument("--max-new-tokens", type=int, default=256)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=42)
    merge = add("merge", _merge, "merge a run's adapter into its base and prove it equal")
    merge.add_argument("run", help="the run folder")
    merge.add_argument("--output", metavar="DIR", help="where the merged model goes (default: RUN/merged)")
    return parser


def _ls(options: argparse.Namespace) -> int:
    from toolkit.recipe import list_recipes, recipe_folders
    from toolkit.recipe.view import description

    found = list_recipes(recipe_folders(options.recipes))
    width = max((len(name) for name in found), default=0)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    for name, file in found.items():
        print(f"{name:<{width}}  {description(file)}"[:columns].rstrip())
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
    worst = 0
    found = list_recipes(recipe_folders(options.recipes))
    for name in found:
        try:
            load_checked(name, options.arguments, options.recipes)
        except UserError as error:
            worst = max(worst, error.exit_code)
            print(f"error: {error}\n", file=sys.stderr)
    print(f"{len(found)} recipes checked")
    return worst


def _schema(options: argparse.Namespace) -> int:
    from toolkit.recipe import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.output:
        Path(options.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


_FIRST_RECIPE = """\
# yaml-language-server: $schema=schema.json
description: Quick LoRA on my own data

defaults:
  - model: smollm2_135m_builtin
  - data: stdlib_docstrings
  - method: lora
  - _self_

# Everything not written here has its default; `toolkit show recipe=mine` prints all of it.
# For your own data remove `- data: …` above and write:
# data:
#   sources: [data/train.jsonl]
#   eval_split: 0.05
optimizer:
  learning_rate: 2e-4
schedule:
  max_steps: 20
batch:
  seq_len: 512
  global_batch_size: 8
data:
  over_long: drop
"""


def _init(options: argparse.Namespace) -> int:
    from toolkit.recipe import json_schema

    folder = Path(options.recipes or "recipes")
    recipe, schema = folder / "mine.yaml", folder / "schema.json"
    if recipe.exists():
        raise UserError(f"{recipe} exists already", "nothing was written; edit it, or name another folder with --recipes")
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(_FIRST_RECIPE, encoding="utf-8")
    schema.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
    print(f"wrote {recipe} and {schema} (for your editor)\ntrain it:  python -m toolkit.run recipe=mine")
    return 0


def _cp(options: argparse.Namespace) -> int:
    import yaml

    from toolkit.recipe import split_arguments
    from toolkit.recipe.load import as_diff
    from toolkit.rules import load_checked

    named = [argument for argument in options.arguments if "=" not in argument]
    if len(named) != 1:
        raise UserError("cp needs the parent and one new name", "write: toolkit cp recipe=PARENT NEW key=value …")
    parent, overrides = split_arguments([argument for argument in options.arguments if "=" in argument])
    loaded = load_checked(parent, overrides, options.recipes)
    groups, values = as_diff(parent, overrides, options.recipes)
    file = Path(options.recipes or "recipes") / f"{named[0].removesuffix('.yaml')}.yaml"
    if file.exists():
        raise UserError(f"{file} exists already", "choose another name")
    content: dict[str, Any] = {
        "description": f"{loaded.recipe.description} (from {loaded.name})".strip(),
        "defaults": [f"/{loaded.name}", *[{f"override /{key}": option} for key, option in groups.items()], "_self_"],
        **values,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    print(f"wrote {file}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from toolkit.doctor import collect, render

    print(render(collect()))
    return 0


def _data(options: argparse.Namespace) -> int:
    loaded = _load(options)
    from toolkit.data.audit import check_batch, render
    from toolkit.data.prepare import prepare
    from toolkit.data.show import show
    from toolkit.model import load_tokenizer, stop_tokens
    from toolkit.policy import batch_layout

    tokenizer = load_tokenizer(loaded.recipe)
    prepared = prepare(loaded.recipe, tokenizer, stop_tokens(loaded.recipe, tokenizer))
    print(render(check_batch(prepared.audit, batch_layout(loaded.recipe, 1).global_batch_size)))
    if options.show:
        print(show(prepared, tokenizer, options.show, color=sys.stdout.isatty()))
    return 0


def _report(options: argparse.Namespace) -> int:
    from toolkit.report import write_report

    print(write_report(_run_folder(options.run)))
    return 0


def _generate(options: argparse.Namespace) -> int:
    from toolkit.export import chat

    sample = {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else None
    chat(_run_folder(options.run), options.prompt, options.max_new_tokens, sample, options.seed)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from toolkit.export import merge

    run = _run_folder(options.run)
    print(merge(run, Path(options.output) if options.output else run / "merged"))
    return 0


def _load(options: argparse.Namespace) -> Any:
    from toolkit.recipe import split_arguments
    from toolkit.rules import load_checked

    return load_checked(*split_arguments(options.arguments), options.recipes)


def _run_folder(text: str) -> Path:
    run = Path(text)
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{text} is not a run folder: it has no recipe.yaml", "name a folder such as runs/NAME")
    return run
