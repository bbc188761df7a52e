"""What trainers say of rows: of each step, beside its loss, and of those held out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Measurement(NamedTuple):
    """What is measured of a batch of held-out rows.

    Args:
        sums: In double precision, of which `figures` are made when those of all batches have been added up.
        each: (N, 2 or more) of each loss in the batch, in the order of the collator's `examples_of`: the loss, and what
            it counts in the number by which losses are divided; and what else is summed by rows. None where a loss is
            not one of a row.
    """

    sums: torch.Tensor
    each: torch.Tensor | None = None

    @classmethod
    def of(cls, sums: torch.Tensor, *each: torch.Tensor) -> Measurement:
        """With columns (N,) of the matrix."""
        return cls(sums, torch.stack([column.detach().double() for column in each], 1))


class Measuring:
    """What a trainer measures of held-out rows, unless its objective says otherwise: the mean loss over their trained
    tokens. Goes before a trainer that has `scores`."""

    pipeline: Any

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        """Of a batch of held-out rows."""
        if self.pipeline and "input_ids" in inputs:
            return self.pipeline.measure(inputs)
        outputs, _ = self.scores(model, inputs)  # type: ignore[attr-defined]
        total, count = -outputs.log_probs.sum(), outputs.label_mask.sum()
        sums = torch.stack([total.double(), count.double()])
        return Measurement.of(sums, -outputs.log_probs[0], outputs.label_mask[0])

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says, of the sums over all held-out rows, and of those over each (rows, columns) of
        `Measurement.each`.

        Returns:
            `eval_loss` (nats per trained token), `eval_perplexity`, `eval_tokens`.
        """
        total, tokens = sums
        mean = total / tokens if tokens else math.nan
        return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0)), "eval_tokens": int(tokens)}

    def row_losses(self, sums: list[float], rows: torch.Tensor | None) -> torch.Tensor | None:
        """(rows, 2) sum of the losses of each held-out row, and what it is divided by; None where a loss is not one of
        a row."""
        return None if rows is None else rows[:, :2]


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
