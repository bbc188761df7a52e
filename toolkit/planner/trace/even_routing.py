"""What processes that divide experts send each other when tokens are spread evenly over the experts."""

from __future__ import annotations

import torch

from toolkit.models.parallel.expert_parallel import Exchange
from toolkit.recipe.model_configs import meeting_share


class EvenExchange(Exchange):
    """Asks no other process, and no device."""

    def counts(self, experts: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> list[list[list[int]]]:
        """As many rows and pairs to and from each."""
        tokens, chosen = experts.shape
        rows = round(tokens * meeting_share(self.size * self.each, chosen, self.size))
        each = [[rows, tokens * chosen // self.size]] * self.size
        return [each, each]
