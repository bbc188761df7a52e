"""The section of a recipe that says how vectors of texts are formed, and by which loss they are learnt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.recipe.base import Section

RANKING, COSENT = "multiple_negatives_ranking", "cosent"


class Embedding(Section):
    """How `objective: embedding` makes a vector of a text, and learns which texts belong together; the others read
    nothing here."""

    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """Of which tokens' outputs a text's vector is made: the mean of all (`mean`), the first one's (`cls`) or the last
    one's (`last`). `auto`: as the model's own `1_Pooling/config.json` says; without one `last` for decoders, whose last
    token alone sees the whole text, and `mean` for encoders."""
    loss: Literal["multiple_negatives_ranking", "cosent"] = "multiple_negatives_ranking"
    """By sentence-transformers' names: `multiple_negatives_ranking` (InfoNCE) has an anchor find its positive among the
    positives of all rows of the step, and their negatives; `cosent` orders pairs of texts by their scores."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """By what cosines are divided in the loss; 1 over sentence-transformers' `scale`."""
    negatives: Annotated[int, Field(ge=0)] = 0
    """Hard negatives of each row, which are candidates beside the positives of other rows."""
    dims: list[Annotated[int, Field(gt=0)]] = []
    """Learn vectors whose first so many numbers are vectors of their own, e.g. `[768, 256, 64]` (Matryoshka, Kusupati
    et al. 2022, arXiv:2205.13147): the loss is the sum over these. By default whole vectors alone are learnt."""
    query_prompt: str | None = None
    """What every anchor, or first text, begins with, e.g. `"query: "`; saved for `encode_query`."""
    document_prompt: str | None = None
    """What every other text begins with, saved for `encode_document`."""
