"""Objectives that train a head of their own in place of the one that scores the vocabulary."""

from __future__ import annotations

REWARD = "reward"
"""The objective whose head gives each answer one number, higher for the better one of a pair."""
CLASSIFYING = ("classification", "token_classification")
"""Objectives whose head has an output for each class: of a text, or of each of its words."""
HEADED = (REWARD, *CLASSIFYING)
OF_TEXTS = (REWARD, "classification")
"""Those whose head scores a text as a whole."""
