"""The section of a recipe that says how texts are pooled into vectors, and with which loss they are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.recipe.base import Section

RANKING, COSENT = "multiple_negatives_ranking", "cosent"


class Embedding(Section):
    """How `objective: embedding` pools a text into a vector and learns which texts belong together; other objectives do
    not read this section."""

    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """Which tokens' outputs make a text's vector: the mean of all (`mean`), the first (`cls`) or the last (`last`).
    `auto`: as in the model's own `1_Pooling/config.json`, or else `last` for decoders, where only the last token sees
    the whole text, and `mean` for encoders."""
    loss: Literal["multiple_negatives_ranking", "cosent"] = "multiple_negatives_ranking"
    """By sentence-transformers' names: `multiple_negatives_ranking` (InfoNCE) has an anchor find its positive among the
    positives of all rows of the step, and their negatives; `cosent` orders pairs of texts by their scores."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Temperature by which cosines are divided in the loss; 1 / sentence-transformers' `scale`."""
    negatives: Annotated[int, Field(ge=0)] = 0
    """Number of hard negatives per row, which are candidates beside the positives of other rows."""
    dims: list[Annotated[int, Field(gt=0)]] = []
    """Lengths to which vectors can later be truncated, e.g. `[768, 256, 64]` (Matryoshka, Kusupati et al. 2022,
    arXiv:2205.13147): the loss is the sum over them. By default only whole vectors are trained."""
    query_prompt: str | None = None
    """Prefix of every anchor, or first text, e.g. `"query: "`; saved for `encode_query`."""
    document_prompt: str | None = None
    """Prefix of every other text; saved for `encode_document`."""
