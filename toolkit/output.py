"""What a command says while it works: the toolkit's messages, those of libraries, and how much of them."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from toolkit.common import brief, concealed, printable


def open_streams() -> None:
    """Has what a process says pass through `_Shown`, and gives one that was started with closed standard streams, as by
    `>&-`, ones that lead nowhere.

    Python has none then, and the next file that is opened, which may be a checkpoint, would get what C code prints.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    _show_all()


def quiet_libraries() -> None:
    """Keeps what libraries say to their own developers out of the user's way; errors stay."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    # PEFT looks for them among modules, and experts are parameters. What matches nothing at all is refused.
    warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
    # An adapter's files name its base as the recipe does.
    warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path` was renamed")
    for name in (
        *("accelerate.big_modeling", "bitsandbytes", "torch.distributed.elastic"),
        *("torch.utils._pytree", "torchao"),
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Sets its own level when it is imported.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Adds `--verbose` and `--quiet`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--verbose", action="store_true", help="also tell what is chosen, and why")
    group.add_argument("--quiet", action="store_true", help="tell no more than results, warnings and errors")


def add_help(parser: argparse.ArgumentParser, more: Callable[[], str]) -> None:
    """Adds a `--help` that ends with a further text, to a parser that has none."""
    parser.add_argument("-h", "--help", action=_Help, const=more, help="show this, with all keys of a recipe")


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(f"{parser.format_help()}\n{self.const()}", end="")
        parser.exit()


def start_logging(options: argparse.Namespace, first: bool = True) -> None:
    """Shows on standard error what our packages log, each under its own name: `toolkit.train`, `toolkit.planner`, …

    Args:
        options: What `add_verbosity` has parsed.
        first: Whether this process talks to the user; of the others, only warnings and errors are shown.
    """
    _show_all()
    level = logging.WARNING if options.quiet or not first else logging.DEBUG if options.verbose else logging.INFO
    logger = logging.getLogger("toolkit")
    logger.handlers, logger.propagate = [_StandardError()], False
    logger.setLevel(level)


def _show_all() -> None:
    # What libraries print, and stack traces, pass through here too.
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _Shown):
            if isinstance(stream, io.TextIOWrapper):  # In a notebook it is not.
                # Of file names, as the system has them, not all are text.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, _Shown(stream))


def unprinted() -> str:
    """Why not all that was printed is where it should be, at the end of the work; empty where it is."""
    sys.stdout.flush()
    error = getattr(sys.stdout, "lost", None)
    return f"standard output cannot be written: {error.strerror}" if error else ""


_UNHEARD = (errno.EPIPE, errno.EIO)
"""What is said to nobody: the reader of a pipe has ended, as `head` does, or the terminal was closed."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Shown:
    """A stream of text to which everything goes `concealed`; all else is the stream's own.

    Work does not end because nobody hears of it any more, or because the disk of what is said is full.

    Attributes:
        lost: The error for which something that was said is on no disk.
    """

    lost: OSError | None = None

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._outliving():
            self._stream.write(concealed(text))
        return len(text)

    def flush(self) -> None:
        with self._outliving():
            self._stream.flush()

    @contextlib.contextmanager
    def _outliving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                self.lost = error
            elif error.errno in _UNHEARD:
                # Also for what libraries write; and Python would complain once more while shutting down.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            else:
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _StandardError(logging.StreamHandler[Any]):
    """Writes a message alone, except that a warning says that it is one."""

    def format(self, record: logging.LogRecord) -> str:
        text = brief(printable(super().format(record)))
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text

    def emit(self, record: logging.LogRecord) -> None:
        # Looked up at each message: a live line of progress takes standard error over.
        self.stream = sys.stderr
        super().emit(record)
