"""The one exception that means: the user can mend this, and here is how."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user gave cannot work. Printed without a stack trace.

    Args:
        what: What is wrong, with the offending value and where it stands (file and line, row, key).
        change: What to change, naming the setting.
    """

    exit_code = 1

    def __init__(self, what: str, change: str = "") -> None:
        self.what = what
        self.change = change
        super().__init__(f"{what}\n  {change}" if change else what)


def in_a_line(error: BaseException) -> str:
    """Kind and first line of somebody else's error."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
