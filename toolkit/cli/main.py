"""The console script `toolkit`: parses, calls, prints. Commands take `recipe=NAME key=value …` like the runner."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from toolkit import __version__
from toolkit.cli import commands
from toolkit.cli.options import count, port, positive, price, sweep
from toolkit.common import UserError, add_verbosity, quiet_libraries, start_logging

Command = Callable[[argparse.Namespace], int]


_EPILOG = """\
examples:
  toolkit init                                        start a recipe folder here
  toolkit cp recipe=qwen3_0_6b_lora mine seq_len=1024  a recipe of your own, as a diff
  toolkit validate recipe=mine                        every problem at once
  toolkit plan recipe=mine hardware=h100x8            does it fit, how long, what cost
  toolkit launch recipe=mine                          train it on all GPUs of this machine
"""


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
    start_logging(options)
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
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Command, help: str, recipe: bool = False) -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=command)
        add_verbosity(sub)
        if recipe:
            sub.add_argument("arguments", nargs="*", metavar="recipe=NAME key=value")
        return sub

    def with_folder(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("--recipes", metavar="DIR", help="the folder of your recipes (default: ./recipes)")
        return sub

    with_folder(add("ls", commands.ls, "list recipes, yours first"))
    with_folder(add("show", commands.show, "print the resolved recipe with the origin of every value", recipe=True))
    check = with_folder(add("validate", commands.validate, "report every problem of a recipe", recipe=True))
    check.add_argument("--all", action="store_true", help="validate all your recipes (without any: the shipped ones)")
    schema = add("schema", commands.schema, "print the JSON Schema of a recipe, for editors")
    schema.add_argument("--markdown", action="store_true", help="print all keys as Markdown instead")
    schema.add_argument("--output", metavar="FILE", help="write it to a file")
    with_folder(add("init", commands.init, "start a recipe folder in this repository"))
    with_folder(
        add(
            "cp",
            commands.cp,
            "write a recipe of your own as a diff: toolkit cp recipe=PARENT NEW key=value",
            recipe=True,
        )
    )
    add("doctor", commands.doctor, "versions, devices and kernels that really work, to paste into a bug report")
    plan = with_folder(
        add("plan", commands.plan, "memory, time and cost before anything is rented, and advice", recipe=True)
    )
    plan.add_argument("--json", action="store_true", help="print all figures as JSON")
    plan.add_argument("--schema", action="store_true", help="print the JSON Schema of --json")
    plan.add_argument("--price", type=price, metavar="P", help="price of a GPU-hour")
    plan.add_argument("--html", metavar="FILE", help="write a page as well")
    others = "further recipes, or 'NAME key=value' as one text"
    plan.add_argument("--compare", nargs="+", action="extend", default=[], metavar="NAME", help=others)
    values = "a plan for each value; several sweeps are combined"
    plan.add_argument("--sweep", type=sweep, action="append", default=[], metavar="KEY=V1,V2", help=values)
    calibrate = add("calibrate", commands.calibrate, "measure this device, for better plans")
    calibrate.add_argument("--seconds", type=positive, default=60, metavar="N", help="about how long (60)")
    launch = with_folder(
        add("launch", commands.launch, "train a recipe on the GPUs of one machine or many", recipe=True)
    )
    launch.add_argument("--gpus", type=count, metavar="N", help="GPUs of each machine, a process each (default: all)")
    launch.add_argument("--nodes", type=positive, default=1, metavar="N", help="number of machines (1)")
    launch.add_argument("--rank", type=count, metavar="R", help="this machine's number; the one with 0 is the head")
    launch.add_argument("--head", metavar="HOST", help="name or address of the head, the same on every machine")
    launch.add_argument("--port", type=port, metavar="P", help="port at which the processes meet")
    launch.add_argument("--print", action="store_true", help="only print what would be started")
    launch.add_argument("--force", action="store_true", help="also run what would not fit by the plan")
    launch.add_argument("--slurm", action="store_true", help="write an sbatch file instead; the options below are its")
    for option, text in commands.SLURM_OPTIONS.items():
        kind = {"type": positive, "metavar": "N"} if option == "cores" else {"metavar": option.upper()}
        launch.add_argument(f"--{option}", help=text, **kind)
    render = with_folder(
        add("render", commands.render, "write accelerate_configs/ and deepspeed_configs/, one per strategy")
    )
    render.add_argument("--check", action="store_true", help="write nothing; fail if a file is not as it would be")
    data = with_folder(add("data", commands.data, "prepare and audit the data of a recipe", recipe=True))
    data.add_argument("--show", type=positive, default=0, metavar="N", help="print N rows, trained tokens coloured")
    report = add("report", commands.report, "write a run's report.html again")
    report.add_argument("run", help="the run folder")
    generate = add("generate", commands.generate, "sample from a run; interactive without --prompt")
    generate.add_argument("run", help="the run folder")
    generate.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    generate.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="longest answer (256)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy, the default")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="with a temperature: nucleus sampling")
    generate.add_argument("--seed", type=int, default=42, metavar="N", help="seed of the sampling (42)")
    merge = add("merge", commands.merge, "merge a run's adapter into its base and prove it equal")
    merge.add_argument("run", help="the run folder")
    merge.add_argument("--output", metavar="DIR", help="where the merged model goes (default: RUN/merged)")
    return parser
