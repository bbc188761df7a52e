"""How long autocast's 16-bit copies of fp32 weights stay, by the recipe; without torch, so that a plan may ask.

`models.step_casts` has them stay longer or shorter than autocast does by itself: until a forward pass ends.
"""

from __future__ import annotations

from toolkit.distributed.engines import dtypes
from toolkit.recipe import Recipe


def keeps_casts(recipe: Recipe) -> bool:
    """Whether copies stay for a step in which there are any.

    They cost 16 bits of every trained parameter, so adapters alone are kept; and in a pipeline, whose micro-batches on
    their way would have a copy each of what is not recomputed, all weights.
    """
    piped = recipe.parallel.pipeline > 1 and not recipe.activation_checkpointing.of_all_layers
    return piped or recipe.method.name == "lora"


def drops_casts(recipe: Recipe) -> bool:
    """Whether the copies that a layer makes in training go when its forward pass ends.

    A layer that is recomputed casts its weights anew, and of another the backward pass holds what it reads. All others
    together are 16 bits of every parameter, beside the gradient of the output head, which the forward pass forms.
    """
    return dtypes(recipe).autocast is not None and recipe.activation_checkpointing.of_layers and not keeps_casts(recipe)
