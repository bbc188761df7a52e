"""Training on answers that are judged one by one (KTO).

What an answer has gained is compared with how far the model has moved from the reference in all: by how much likelier
it makes answers that belong to other prompts, on average over the rows of a step. So all of these are scored before the
first micro-batch of a step, on all processes, without gradients; TRL takes the average of a micro-batch instead, by
which the loss would depend on how a step is divided.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.models.device import sent
from toolkit.models.losses.preference import judged_losses
from toolkit.models.parallel.layer_sums import dividing
from toolkit.train.evaluation.evaluate import evaluating
from toolkit.train.trainers.preference import ROUNDING, AnswerTrainer
from toolkit.train.trainers.told import Measurement


class JudgedTrainer(AnswerTrainer):
    """A causal model that learns which answers are good. Of a row's two answers the second is that of another row."""

    train_dataset: Any
    eval_dataset: Any
    _divergence: torch.Tensor | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)
        if batches:
            self._divergence = self._moved(batches)
        return batches, count

    def _moved(self, batches: list[Any]) -> torch.Tensor:
        """How far the model has moved from the reference, by the rows of a step; never less than nothing."""
        assert self.batches is not None and self.reference is not None
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        with evaluating(self.model_wrapped), torch.no_grad():
            for batch in batches:
                inputs: dict[str, Any] = self._prepare_inputs(batch)
                log_probs, _, _ = self.each(self.model_wrapped, inputs["others"])
                total += (log_probs - self.reference[inputs["rows"], 1]).sum()
        total = self.accelerator.reduce(total, reduction="sum") / dividing()
        return (total / self.batches.global_batch_size).clamp(min=0)

    def answers(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: log-probabilities (rows, 2) of its answers and of those of other rows, their trained tokens
        (rows, 2), and the routers' balance loss."""
        own, tokens, balance = self.each(model, inputs)
        others, of_others, _ = self.each(model, inputs["others"])
        return torch.stack([own, others], 1), torch.stack([tokens, of_others], 1), balance

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: the sum of the answers' losses, their number, and the routers' balance loss."""
        assert self._divergence is not None and self.reference is not None
        log_probs, _, balance = self.each(model, inputs)
        known, good = self.reference[inputs["rows"], 0], inputs["desirable"]
        losses = judged_losses(self.settings, log_probs - known, good, self._divergence)
        self.see(self._sums(log_probs.detach(), known, good, self._divergence))
        return losses.sum().float(), sent(float(len(losses)), losses.device), balance

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        """Log-probabilities (held-out rows x 2), of which those of the batch are filled in: no loss is known before all
        rows have said how far the model has moved."""
        log_probs, _, _ = self.answers(model, inputs)
        table = torch.zeros(len(self.eval_dataset), 2, dtype=torch.float64, device=log_probs.device)
        table[inputs["rows"] - len(self.train_dataset)] = log_probs
        return Measurement(table.flatten())

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says, of the log-probabilities of all held-out rows.

        Returns:
            `eval_loss` (per answer), `eval_answers`, and what is `told`.
        """
        log_probs, known, good = self._held_out(sums)
        divergence = (log_probs - known)[:, 1].mean().clamp(min=0)
        losses = judged_losses(self.settings, (log_probs - known)[:, 0], good, divergence)
        told = self.told(self._sums(log_probs[:, 0], known[:, 0], good, divergence).tolist())
        return {"eval_loss": losses.mean().item(), "eval_answers": len(good)} | {
            f"eval_{name}": value for name, value in told.items()
        }

    def row_losses(self, sums: list[float], rows: torch.Tensor | None) -> torch.Tensor:
        """Of each row also what it moves the losses of all by, through how far it says that the model has moved: to
        first order, so that intervals hold both. The sum of it is zero."""
        log_probs, known, good = self._held_out(sums)
        gains, moved = (log_probs - known).unbind(1)
        mean = moved.mean().requires_grad_()
        with torch.enable_grad():
            losses = judged_losses(self.settings, gains, good, mean.clamp(min=0))
            (slope,) = torch.autograd.grad(losses.mean(), mean)
        each = losses.detach() + slope * (moved - moved.mean())
        return torch.stack([each, torch.ones_like(each)], 1)

    def _held_out(self, sums: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of all held-out rows (rows, 2) log-probabilities by the model and by the reference, and which are good."""
        assert self.reference is not None
        known, good = self.reference[len(self.train_dataset) :].cpu(), self.eval_dataset["desirable"][:]
        return torch.tensor(sums, dtype=torch.float64).view(-1, 2), known, torch.tensor(good)

    def _sums(
        self, log_probs: torch.Tensor, known: torch.Tensor, good: torch.Tensor, divergence: torch.Tensor
    ) -> torch.Tensor:
        """Over rows (B,), each of good answers and of others: their number, rewards, log-probabilities; how many are
        judged rightly, half of those of which rounding would decide; and the divergence, as often as there are rows."""
        gains, good = log_probs - known, good.double()
        lead = gains - divergence
        right = (0.5 + 0.5 * lead.where(lead.abs() > ROUNDING * log_probs.abs(), 0).sign() * (2 * good - 1)).sum()
        each = torch.stack([torch.ones_like(gains), self.settings.beta * gains, log_probs])
        parts = torch.stack([(each * kind).sum(1) for kind in (good, 1 - good)])
        return torch.cat([parts.flatten(), torch.stack([right, divergence * len(gains)])])

    def told(self, sums: list[float]) -> dict[str, float]:
        """What is said of answers: as of pairs, with good answers for the chosen ones, as far as there are both; and
        `kl`, how far the model has moved, in nats."""
        found: dict[str, float] = {}
        for kind, (number, reward, log_prob) in (("chosen", sums[:3]), ("rejected", sums[3:6])):
            if number:
                found |= {f"reward_{kind}": reward / number, f"logp_{kind}": log_prob / number}
        if {"reward_chosen", "reward_rejected"} <= found.keys():
            found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        rows = sums[0] + sums[3]
        return {**found, "accuracy": sums[6] / rows, "kl": sums[7] / rows}
