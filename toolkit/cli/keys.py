"""`key=value` arguments of commands that take no recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from toolkit.common import UserError
from toolkit.recipe.spelling import did_you_mean


class Keys(BaseModel):
    """What a command may be given; a subclass names the keys, with their types and defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def problems(self) -> list[str]:
        """What is wrong with values that are each allowed."""
        return []


Given = TypeVar("Given", bound=Keys)


def read_keys(kind: type[Given], arguments: Sequence[str], page: str) -> Given:
    """Reads `key=value` arguments.

    Args:
        page: Where the keys are explained.

    Raises:
        UserError: With every problem.
    """
    problems, values = list[str](), dict[str, str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            problems.append(f"`{argument}` is not key=value")
        elif key not in kind.model_fields:
            close = did_you_mean(key, kind.model_fields)
            problems.append(f"unknown key `{key}`" + (f", did you mean `{close}`?" if close else ""))
        else:
            values[key] = value
    try:
        found = kind.model_validate(values)
        problems += found.problems()
    except ValidationError as error:
        for each in error.errors():
            key, said = str(each["loc"][0]), each["msg"].removeprefix("Value error, ")
            problems.append(f"{key}={values[key]}: {said}" if key in values else _missing(kind, key))
    if problems:
        raise UserError("\n".join(problems), f"the keys are {', '.join(kind.model_fields)}: {page}")
    return found


def _missing(kind: type[Keys], key: str) -> str:
    """What is said of a key that has to be given, with what it may be where only few values are allowed."""
    values = kind.model_fields[key].annotation
    return f"{key} is missing" + (f": one of {', '.join(get_args(values))}" if get_origin(values) is Literal else "")
