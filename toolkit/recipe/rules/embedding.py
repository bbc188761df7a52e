"""Rules on the objective that learns vectors of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.embedding import COSENT
from toolkit.recipe.errors import Rule
from toolkit.recipe.heads import EMBEDDING
from toolkit.recipe.schema import Recipe


def _set(recipe: Recipe) -> Iterable[str]:
    return [f"embedding.{key}" for key in recipe.embedding.changed()]


def _too_wide(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    width = model_configs.width(config)
    return recipe.embeds and width is not None and max(recipe.embedding.dims, default=0) > width


def _embeds(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    return Rule(path, lambda r, _: r.embeds and bool(broken(r)), why, change)


def embedding_figures(recipe: Recipe) -> dict[str, str]:
    """What the texts of these rules may name in braces."""
    return {"embedding_keys": ", ".join(_set(recipe)), "ordered_dims": str(sorted({*recipe.embedding.dims})[::-1])}


EMBEDDING_RULES = {
    "embedding-objective": Rule(
        "embedding",
        lambda r, _: not r.embeds and r.embedding.changed(),
        "objective {r.objective} learns no vectors of texts",
        f"remove {{embedding_keys}}, or set objective={EMBEDDING}",
        keys=_set,
    ),
    "embedding-scored-negatives": _embeds(
        "embedding.negatives",
        lambda r: r.embedding.loss == COSENT and r.embedding.negatives,
        "the loss cosent orders pairs by their scores, and reads no negatives",
        "remove embedding.negatives, or set embedding.loss=multiple_negatives_ranking",
    ),
    "embedding-alone": _embeds(
        "batch.global_batch_size",
        lambda r: r.batch.global_batch_size == 1 and (r.embedding.loss == COSENT or not r.embedding.negatives),
        "a row by itself has nothing to be told from: negatives and other scores are those of the other rows of a step",
        "set batch.global_batch_size=64",
    ),
    "embedding-dims": Rule(
        "embedding.dims",
        _too_wide,
        "this model's vectors have {width} numbers, fewer than the largest of {r.embedding.dims}",
        "set embedding.dims to numbers up to the model's width, or to [] for whole vectors alone",
    ),
    "embedding-dims-order": _embeds(
        "embedding.dims",
        lambda r: r.embedding.dims != sorted({*r.embedding.dims}, reverse=True),
        "are to be written once each, the largest first",
        "set 'embedding.dims={ordered_dims}'",
    ),
}
