"""The console script `toolkit`: parses, runs one command, and turns its errors into a line and an exit code.

Commands take `recipe=NAME key=value …` like the runner.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence

from toolkit import __version__
from toolkit.cli import commands, run_commands  # noqa: F401  They register what they hold.
from toolkit.cli.registry import COMMANDS
from toolkit.common import UserError, given_up, panicked
from toolkit.output import add_help, add_verbosity, open_streams, quiet_libraries, start_logging, unprinted
from toolkit.train.process import Terminated, told_to_stop

_EPILOG = """\
examples:
  toolkit init                              start a folder here, with recipe mine
  toolkit cp recipe=qwen3_0_6b_lora larger  another of your own, as a diff
  toolkit validate recipe=mine              every problem at once
  toolkit plan recipe=mine hardware=h100x8  does it fit, how long, what cost
  toolkit launch recipe=mine                train it on all GPUs of this machine
"""
_OTHER_WORDS = {
    "launch": "train run fit finetune fine-tune tune sft start submit resume continue",
    "evaluate": "eval test score benchmark bench",
    "generate": "infer inference predict sample complete",
    "validate": "check lint verify",
    "plan": "estimate memory cost",
    "data": "audit preview prepare preprocess tokenize dataset",
    "ls": "list recipes",
    "show": "print cat config view",
    "cp": "copy extend",
    "init": "new create",
    "doctor": "env info diagnose",
    "sweep": "search hpo optuna",
    "compare": "diff",
    "push": "upload publish",
    "export": "quantize convert",
}
"""Each command, and what it is called elsewhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for a failure, 2 for a wrong recipe or usage."""
    open_streams()
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if meant := _misspelt(arguments[:1]):
        parser.error(f"there is no command {arguments[0]}; did you mean `{meant}`?")
    options, rest = parser.parse_known_args(_joined(arguments))
    # argparse takes positional arguments in one block; here they may stand on both sides of an option.
    if any(argument.startswith("-") for argument in rest) or (rest and "arguments" not in options):
        parser.error(_unknown(rest, arguments, [name for name, _ in COMMANDS[options.command]]))
    if rest:
        options.arguments += rest
    quiet_libraries()
    start_logging(options)
    try:
        with told_to_stop():
            status = options.command(options)
        if lost := unprinted():
            change = "free space there, or print somewhere else; files that were written are there"
            print(f"error: {UserError(lost, change)}", file=sys.stderr)
        return status or int(bool(lost))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        print(f"error: {UserError(f'cannot use{place}: {error.strerror or error}')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        told = str(error) or "stopped by Ctrl-C"
        print(f"{told}: nothing unfinished is left; the same command starts again", file=sys.stderr)
        return error.exit_code if isinstance(error, Terminated) else 128 + signal.SIGINT
    except BaseException as error:
        if not panicked(error):
            raise
        print(f"error: {given_up(error)}", file=sys.stderr)
        return 1


def _joined(arguments: Sequence[str]) -> list[str]:
    """The arguments, with each value that begins with a negative number joined to its option: argparse takes one number
    for a value, but `-0.5,1.5` for an option of its own."""
    joined = list[str]()
    for argument in arguments:
        last = joined[-1] if joined else ""
        if re.match(r"-\.?\d", argument) and last.startswith("--") and "=" not in last:
            joined[-1] = f"{last}={argument}"
        else:
            joined.append(argument)
    return joined


def _misspelt(first: Sequence[str]) -> str:
    """The command that the first word may mean; empty where it is one, or is like none."""
    from toolkit.recipe import did_you_mean

    names = [command.__name__ for command in COMMANDS]
    others = {word: name for name, words in _OTHER_WORDS.items() for word in words.split()}
    wrong = (word for word in first if word not in names and not word.startswith("-"))
    return next((did_you_mean(word, names) or others.get(word, "") for word in wrong), "")


def _unknown(rest: Sequence[str], arguments: Sequence[str], names: Sequence[str]) -> str:
    """What is said of options that a command does not have: which of its own is meant, what Hydra's do, and keys of a
    recipe or of other tools.

    Args:
        names: Of the command's options.
    """
    from toolkit.recipe import did_you_mean
    from toolkit.recipe.hydra_habits import refuse_flags
    from toolkit.recipe.other_tools import translation
    from toolkit.recipe.schema import Recipe, leaf_paths

    try:
        refuse_flags(arguments)
    except UserError as error:
        return str(error)
    keys = [text.lstrip("-").replace("-", "_").partition("=")[0] for text in rest if text.startswith("--")]
    known = [key for key in keys if key.split(".")[0] in (*leaf_paths(), *Recipe.model_fields)]
    hint = f"; keys of a recipe are written without dashes: {' '.join(f'{key}=VALUE' for key in known)}" * bool(known)
    others = ((key, translation(key, "VALUE", "VALUE")) for key in keys if key not in known)
    hint += "".join(f"; for {key}: {answer}" for key, answer in others if answer)
    own = [name.lstrip("-") for name in (*names, "--verbose", "--quiet") if name.startswith("--")]
    meant = [did_you_mean(key, own) for key in keys if key not in known]
    hint += "".join(f"; did you mean --{name}?" for name in meant if name)
    return f"unrecognized arguments: {' '.join(rest)}{hint}"


def _keys() -> str:
    from toolkit.recipe.show import keys_text

    return keys_text()


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
    for command, settings in COMMANDS.items():
        description = command.__doc__ or ""
        help = description[:1].lower() + description[1:].removesuffix(".")
        lists_keys = command.__name__ == "show"
        sub = subparsers.add_parser(
            command.__name__, help=help, description=description, allow_abbrev=False, add_help=not lists_keys
        )
        if lists_keys:
            add_help(sub, _keys)
        sub.set_defaults(command=command)
        add_verbosity(sub)
        for name, setting in settings:
            sub.add_argument(name, **setting)
    return parser
