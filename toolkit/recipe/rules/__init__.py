"""Combinations that cannot work or would train something else than was asked. Each rule says why and what to do.

The rules look at the recipe and, where it is known, at the model's `config.json`. They import no torch.
"""

from toolkit.recipe.rules.check import RULES, check, load_checked, warnings_of_length

__all__ = ["RULES", "check", "load_checked", "warnings_of_length"]
