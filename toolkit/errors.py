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
    first = first_line(error)
    kind = type(error).__name__
    return kind if first == kind else f"{kind}: {first}"


def first_line(error: BaseException) -> str:
    """The first line of somebody else's error, with the next where it only announces that; its kind if it is silent."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
