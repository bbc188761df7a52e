"""A teacher written as a recipe of its own, so that it is loaded and planned like any other model."""

from __future__ import annotations

from toolkit.recipe.distillation import published
from toolkit.recipe.parallel import Parallel, Strategy
from toolkit.recipe.schema import Model, Recipe
from toolkit.recipe.sections import ActivationCheckpointing, Extra, Method


def of_teacher(recipe: Recipe) -> Recipe | None:
    """The recipe of a student's teacher: frozen, and whole on each process; None for an objective without one."""
    teacher = recipe.distillation.teacher
    if teacher is None or not recipe.distills:
        return None
    keys = teacher.model_dump(exclude={"path", "quantization", "double_quantization", "offload"})
    stored = {key: getattr(teacher, key) for key in ("quantization", "double_quantization")}
    return recipe.with_values(
        {
            "objective": "sft",
            "model": Model(path=published(teacher.path), attention=recipe.model.attention, **keys),
            "method": Method(name="lora", **stored),
            "precision": recipe.engine_precision,
            "strategy": Strategy(),
            "parallel": Parallel(),
            "activation_checkpointing": ActivationCheckpointing(),
            "extra": Extra(),
            "compile": "off",
        }
    )
