"""The repeated layers of a model."""

from __future__ import annotations

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer


def layers_of(model: Any) -> list[Any]:
    """The modules that Transformers marks as layers, in order; empty for a model whose code marks none."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
