"""How commands are registered.

A command's docstring is its help. What it needs is imported inside it, so that a cheap command answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[[argparse.Namespace], int | None]
"""Returns an exit code; None is success."""
Option = tuple[str, dict[str, Any]]
"""A name and what argparse is told of it."""

COMMANDS: dict[Command, tuple[Option, ...]] = {}
"""Every command with its options, in the order of the help."""


def option(name: str, metavar: str, help: str | None, **settings: Any) -> Option:
    """One that takes a value; `settings` are argparse's."""
    return name, {"metavar": metavar, "help": help, **settings}


def flag(name: str, help: str) -> Option:
    """One that is there or not."""
    return name, {"help": help, "action": "store_true"}


def command(*options: Option) -> Callable[[Command], Command]:
    """Makes a function a command."""

    def register(command: Command) -> Command:
        COMMANDS[command] = options
        return command

    return register
