"""Objectives that train a model whose outputs are not scores of the vocabulary: a head of their own, or vectors."""

from __future__ import annotations

REWARD = "reward"
"""The objective whose head gives each answer one number, higher for the better one of a pair."""
EMBEDDING = "embedding"
"""The objective whose model gives each text a vector, which is pooled from the outputs of its tokens; no head is
trained."""
CLASSIFYING = ("classification", "token_classification")
"""Objectives whose head has an output for each class: of a text, or of each of its words."""
HEADED = (REWARD, *CLASSIFYING, EMBEDDING)
OF_TEXTS = (REWARD, "classification")
"""Those whose head scores a text as a whole."""
