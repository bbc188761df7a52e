"""The commands of `toolkit` on runs: the options of each, what it calls and what it prints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from toolkit.cli.keys import Keys, read_keys
from toolkit.cli.option_types import count, new_file, new_folder, positive, share, temperature, weights
from toolkit.cli.registry import command, option
from toolkit.common import PAGED, UserError, printable, table
from toolkit.files import write_named
from toolkit.hub_cache import use_own
from toolkit.recipe.base import Place

_RUN = option("run", "run", "the run folder")
_SAMPLING = (
    option("--temperature", "T", "0 is greedy, the default", type=temperature, default=0.0),
    option("--top-p", "P", "with a temperature: nucleus sampling", type=share, default=1.0),
    option("--seed", "N", "seed of the sampling (42)", type=count, default=42),
)


@command(_RUN)
def report(options: argparse.Namespace) -> None:
    """Write a run's report.html again."""
    run = _run_folder(options.run)
    from toolkit.report.run_page import write_report

    print(printable(str(write_report(run))))


@command(
    option("runs", "run", "run folders, at least two", nargs="+"),
    option("--html", "FILE", "write a page as well", type=new_file),
)
def compare(options: argparse.Namespace) -> None:
    """Print what differs between runs, and what came out of them."""
    runs = [_run_folder(run) for run in options.runs]
    if len(runs) < 2:
        raise UserError("one run is compared with nothing", "name two or more: toolkit compare RUN RUN")
    from toolkit.report import terminal
    from toolkit.report.comparison import compare, comparison_page, comparison_text
    from toolkit.report.plan_text import width

    compared = compare(runs)
    text = comparison_text(compared, width())
    terminal.write(text, terminal.console_of(sys.stdout), PAGED)
    if options.html:
        write_named(options.html, comparison_page(compared))
        print(f"wrote {options.html}", file=sys.stderr)


@command(
    _RUN, option("arguments", "key=value", "rows=64, metrics=…, tasks=…, …: docs/evaluate.md", nargs="*", default=[])
)
def evaluate(options: argparse.Namespace) -> None:
    """Score a run's answers to held-out rows, or benchmarks, against the base model's."""
    from toolkit.cli.evaluate import Questions, evaluate, keep

    run, asked = _run_folder(options.run), read_keys(Questions, options.arguments, "docs/evaluate.md")
    _use_own_caches(run)
    from toolkit.report import terminal
    from toolkit.report.evaluation import evaluation_text
    from toolkit.report.plan_text import width

    found, rows = evaluate(run, asked)
    try:
        page = keep(run, found, rows)
    finally:  # Hours of work are shown also where the disk is full.
        terminal.write(evaluation_text(found, width()), terminal.console_of(sys.stdout), PAGED)
    print(printable(f"\nreport: {page}"))


@command(
    _RUN,
    option("--prompt", "TEXT", "a prompt; may be given several times", action="append"),
    option("--max-new-tokens", "N", "longest answer (256)", type=positive, default=256),
    *_SAMPLING,
)
def generate(options: argparse.Namespace) -> None:
    """Sample from a run; interactive without --prompt."""
    run = _run_folder(options.run)
    sample = _sample(options)
    _use_own_caches(run)
    from toolkit.train.finished.export import answer_prompts

    answer_prompts(run, options.prompt, options.max_new_tokens, sample, options.seed)


@command(
    option("runs", "run", "run folders; several answer the same prompts side by side", nargs="+"),
    option("--system", "TEXT", "what the conversation begins with"),
    option("--max-new-tokens", "N", "longest answer (512)", type=positive, default=512),
    *_SAMPLING,
)
def chat(options: argparse.Namespace) -> None:
    """Talk with runs; reads a line for each turn where standard input is no terminal."""
    runs = [_run_folder(run) for run in options.runs]
    sample = _sample(options)
    _use_own_caches(*runs)
    from toolkit.train.finished.chat import chat

    chat(runs, options.system, options.max_new_tokens, sample, options.seed)


@command(
    option("runs", "run", "the run folder; of several, the adapters are added up", nargs="+"),
    option("--weights", "W1,W2,…", "how much of each adapter is added, such as 0.7,0.3", type=weights),
    option("--output", "DIR", "where the merged model goes (default: RUN/merged)", type=new_folder),
)
def merge(options: argparse.Namespace) -> None:
    """Merge adapters of runs into their base and prove it equal."""
    runs = [_run_folder(run) for run in options.runs]
    if len(runs) > 1 and not options.output:
        raise UserError("no folder is named for what several runs are merged into", "add --output DIR")
    _use_own_caches(*runs)
    from toolkit.train.finished.merge import merge

    output = options.output or runs[0] / "merged"
    print(merge(runs, output, options.weights))
    _print_serving(runs[0], output, output.resolve().name if len(runs) > 1 else runs[0].resolve().name)


def _named(path: str) -> str:
    if not path:
        raise ValueError("an empty text names no folder")
    return path


class Export(Keys):
    """The keys of `toolkit export`."""

    format: Literal["int8", "fp8", "nf4", "int4", "gguf", "gguf_q8_0"]
    output: Annotated[Place, AfterValidator(_named)] | None = None
    """The folder; by default that of the run with the format's name."""


@command(
    _RUN,
    option(
        "arguments",
        "key=value",
        "format=int8, fp8, nf4, int4, gguf or gguf_q8_0, output=DIR: docs/use.md",
        nargs="*",
        default=[],
    ),
)
def export(options: argparse.Namespace) -> None:
    """Write a run's model in fewer bits, and compare it with the run's."""
    run, wanted = _run_folder(options.run), read_keys(Export, options.arguments, "docs/use.md")
    _use_own_caches(run)
    from toolkit.train.finished.quantized import export

    output = Path(wanted.output or run / wanted.format)
    print(export(run, wanted.format, output))
    _print_serving(run, output, run.resolve().name, wanted.format)


@command(
    option("sweeps", "sweep", "folders of `toolkit sweep`, each of a model of its own size", nargs="+"),
    option("--for", "NAME", "the recipe that is to be trained", required=True, dest="target"),
    option("--recipes", "DIR", "your recipes folder (recipes/)"),
)
def transfer(options: argparse.Namespace) -> None:
    """Offer the learning rate that sweeps of small models found for a larger one."""
    from toolkit.cli.transfer import transfer
    from toolkit.recipe.rules import load_checked

    folders = [Path(each) for each in options.sweeps]
    print(printable(transfer(folders, load_checked(options.target, [], options.recipes), options.recipes)))


class Push(Keys):
    """The keys of `toolkit push`."""

    license: str | None = None
    """By the Hub's list; by default the base model's."""
    public: bool = False
    branch: str | None = None
    folder: Path | None = None
    """Of what was merged or exported, which is sent in place of the run's own model."""


@command(
    _RUN,
    option("repository", "OWNER/NAME", "on the Hugging Face Hub; it is made, private, if there is none"),
    option(
        "arguments",
        "key=value",
        "license=apache-2.0, public=true, branch=NAME, folder=DIR: docs/use.md",
        nargs="*",
        default=[],
    ),
)
def push(options: argparse.Namespace) -> None:
    """Publish a run's model on the Hub, once its card and licence are in order."""
    run, wanted = _run_folder(options.run), read_keys(Push, options.arguments, "docs/use.md")
    from toolkit.train.finished.push import push

    where = push(
        run,
        options.repository,
        wanted.license,
        wanted.public,
        wanted.branch,
        wanted.folder,
        lambda line: print(printable(line)),
    )
    print(printable(where))


def _print_serving(run: Path, folder: Path, name: str, form: str | None = None) -> None:
    from toolkit.recipe.load import load_resolved
    from toolkit.report.serving import serving

    if lines := serving(run, load_resolved(run / "recipe.yaml"), folder, name, form):
        print(f"\n{table(lines, indent=2).plain}")


def _sample(options: argparse.Namespace) -> dict[str, float] | None:
    """How answers are drawn; None for greedy ones."""
    if options.top_p != 1.0 and not options.temperature:
        raise UserError("--top-p has no effect without --temperature", "add --temperature 0.7, or leave it out")
    return {"temperature": options.temperature, "top_p": options.top_p} if options.temperature else None


def _use_own_caches(*runs: Path) -> None:
    from toolkit.recipe.load import load_resolved

    use_own(name for run in runs for name in load_resolved(run / "recipe.yaml").repositories)


def _run_folder(text: str) -> Path:
    run = Path(text)
    if not run.is_dir():
        raise UserError(f"there is no folder {text}", "name a run folder such as runs/NAME")
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{text} is not a run folder: it has no recipe.yaml", "name a folder such as runs/NAME")
    return run
