"""What every part of the recipe is made of."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A part of the recipe: unknown keys are errors, values keep their types, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    main_key: ClassVar[str | None] = None
    """The key that `section=value` on the command line means (`optimizer=sgd` is `optimizer.name=sgd`)."""
