"""What trainers say of the rows of each step, beside its loss."""

from __future__ import annotations

from typing import Any

import torch


class Telling:
    """Adds up what rows are like over micro-batches and processes until the loop logs. Goes before a trainer."""

    _seen: torch.Tensor | None = None

    def told(self, sums: list[float]) -> dict[str, float]:
        """What is said of rows, given sums over them."""
        raise NotImplementedError

    def see(self, sums: torch.Tensor) -> None:
        """Adds sums over the rows of a micro-batch in training to those that are `told`."""
        self._seen = sums if self._seen is None else self._seen + sums

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the rows of the steps since the last time were like. All processes call this."""
        if "loss" in logs and self._seen is not None:
            sums = self.accelerator.reduce(self._seen, reduction="sum").tolist()  # type: ignore[attr-defined]
            logs = {**logs, **self.told(sums)}
            self._seen = None
        super().log(logs, *args, **kwargs)  # type: ignore[misc]
