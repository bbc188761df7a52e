"""Types of command-line options for argparse, which say what is wrong and exit with code 2."""

from __future__ import annotations

import argparse
import ipaddress
import math
import os
import re
import sys
from pathlib import Path

from toolkit.files import is_stream, not_writable, too_long
from toolkit.recipe.dotted import split_outside


def count(text: str, least: int = 0, most: int = sys.maxsize) -> int:
    """A whole number."""
    if not text.isdecimal() or not least <= int(text) <= most:
        up_to = "" if most == sys.maxsize else f" to {most}"
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least}{up_to}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    return count(text, 1)


def port(text: str) -> int:
    """A TCP port."""
    return count(text, 1, 65535)


def host(text: str) -> str:
    """The name or address of a machine, without what belongs to a URL or a socket."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9]([\w.-]*\w)?\.?", text, re.ASCII):
            raise argparse.ArgumentTypeError(
                f"{text or 'an empty text'} is not the name or address of a machine, such as node0 or 10.0.0.1; "
                "--port takes its port"
            ) from None
    return text


def time_limit(text: str) -> str:
    """A time limit as Slurm takes it, which leaves time to train: `4:00` is four minutes."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return text
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is not a time as Slurm takes it, such as 4:00:00")
    days, first, second, third = (int(part or 0) for part in found.groups())
    # The first part is hours behind days and before two others, and minutes otherwise.
    with_hours = found[1] or found[4]
    seconds = days * 86_400 + (first * 3600 + second * 60 + third if with_hours else first * 60 + second)
    if 0 < seconds <= TO_SAVE:  # 0 is no limit.
        raise argparse.ArgumentTypeError(
            f"{text} is {seconds} seconds to Slurm, and {TO_SAVE} before the limit a run stops to save: write "
            "hours:minutes:seconds, such as 4:00:00"
        )
    return text


TO_SAVE = 300
"""Seconds before the time limit at which a batch script has its run save and stop."""


def new_file(text: str) -> Path:
    """A file that can be written, in a folder that need not be there: what goes into it may take minutes to find."""
    file = Path(os.path.expanduser(text))
    if too_long(file):
        reason = not_writable(file)
    elif is_stream(file):
        reason = "" if os.access(file, os.W_OK) else f"{file} is read-only, or another user's"
    else:
        reason = f"{file} is a folder" if file.is_dir() else not_writable(Path(os.path.realpath(file)).parent)
    if reason:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {reason}")
    return file


def new_folder(text: str) -> Path:
    """A folder that is made. Of `--output=~/merged` no shell has filled in the home folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text names no folder")
    return Path(os.path.expanduser(text))


def price(text: str) -> float:
    """An amount of money."""
    return _number(text, math.inf, f"{text} is not a price, such as 2.5")


def temperature(text: str) -> float:
    """What logits are divided by before sampling; 0 for greedy decoding."""
    return _number(text, math.inf, f"{text} is not a temperature: 0, or a number above it such as 0.7")


def share(text: str) -> float:
    """A part of the whole."""
    number = _number(text, 1 + sys.float_info.epsilon, f"{text} is not a number above 0 and up to 1, such as 0.9")
    if not number:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and up to 1, such as 0.9")
    return number


def weights(text: str) -> list[float]:
    """Numbers with commas between them."""
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers, such as 0.7,0.3")
    return numbers


def _number(text: str, below: float, wrong: str) -> float:
    """A number from 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < below:
        raise argparse.ArgumentTypeError(wrong)
    return number


def values_of_key(text: str) -> tuple[str, list[str]]:
    """`KEY=V1,V2,…`: a key and its values. Commas inside brackets and quotes belong to a value."""
    key, equals, rest = (part.strip() for part in text.partition("="))
    values = list(dict.fromkeys(value.strip() for value in split_outside(rest, ",")))
    if not key or not equals or not all(values):
        raise argparse.ArgumentTypeError(f"{text} is not KEY=V1,V2,… such as seq_len=2048,4096")
    return key, values
