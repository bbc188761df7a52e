"""`Section`, the base class of all sections of a recipe, and which texts they may hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

SHELL_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060\u2066-\u2069\ufeff\ufffe\uffff]")
"""Characters that no editor shows: those that steer a device, spaces of no width, and what turns text round."""
_LINES = re.compile(r"[\t\n\r]")


def _place(path: str) -> str:
    """A path of a user's, with `~` filled in."""
    if SHELL_VARIABLE.search(path) and not os.path.lexists(path):
        raise PydanticCustomError("shell_variable", "names a variable of the shell")
    return os.path.expanduser(path)


Place = Annotated[str, AfterValidator(_place)]
"""A path, or a name that may be one."""
PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values keep their types, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    main_key: ClassVar[str | None] = None
    """The key that a section given as a word sets: `optimizer: sgd`, or `optimizer=sgd`, is `optimizer.name`."""
    _written: dict[str, str] = PrivateAttr(default_factory=dict)
    """Paths as they were written, by key, where they are followed from another folder, see `places`."""

    @field_validator("*")
    @classmethod
    def _legible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses texts that are empty, and characters that no editor shows."""
        prose = info.field_name in ("description", "prompts", "system", "query_prompt", "document_prompt")
        for text in _texts(value):
            if not text.strip() and info.field_name != "description":
                raise PydanticCustomError("empty_text", "is empty")
            if CONTROL.search(text) or (_LINES.search(text) and not prose):
                raise PydanticCustomError("control_character", "holds a control character")
        return value

    def changed(self) -> list[str]:
        """Keys whose value is not the default."""
        return [key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of a key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)
