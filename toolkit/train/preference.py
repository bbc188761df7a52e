"""Training on pairs of answers: any causal model and any engine, with a loss of pairs in place of one of tokens.

The two answers of a pair are two rows of one micro-batch, so that one pass scores both. A reference costs no memory: it
is the model as it is before its first step, and its log-probabilities are known by then (`reference`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from trl.trainer.utils import disable_dropout_in_model

from toolkit.models.head_choice import HeadChoice
from toolkit.models.layer_sums import dividing
from toolkit.models.preference import pair_losses
from toolkit.recipe.preference import Preference
from toolkit.train.trainer import CausalTrainer

OF_PAIRS = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy", "logp_chosen", "logp_rejected")
"""What is said of the pairs of a step or an evaluation, on average: rewards (see `pair_losses`), by how much that of
the chosen answer is higher, in what share of pairs it is (half of those where neither is), and log-probabilities of
whole answers."""

ROUNDING = 1e-6
"""Of log-probabilities in fp32, relative to themselves."""


class PreferenceTrainer(CausalTrainer):
    """A causal model that learns which answer of a pair is preferred. Set `objective` and `settings` once it is made.

    Dropout is off, as in TRL: its noise would pass for a change of log-probability.
    """

    objective: str
    settings: Preference
    reference: torch.Tensor | None = None
    """(rows, 2) log-probabilities of both answers of each pair by the reference, where the objective has one."""
    _seen: torch.Tensor | None = None
    _tokens: Any = 0

    def __init__(self, model: Any, args: Any, choice: HeadChoice, **kwargs: Any) -> None:
        disable_dropout_in_model(model)
        super().__init__(model, args, choice, **kwargs)
        self.output_head.alike = False

    def answers(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: log-probabilities (pairs, 2) of both answers, their trained tokens (pairs, 2), and the routers'
        balance loss."""
        counts = inputs["answer_tokens"]
        outputs, balance = self.scores(
            model, {name: inputs[name] for name in inputs if name not in ("pairs", "answer_tokens")}
        )
        # Beyond their sum are positions that fill up. The host knows where answers end: no device is waited for.
        parts = outputs.log_probs[0].double()[: sum(counts)].split(counts)
        log_probs = torch.stack([part.sum() for part in parts]).view(-1, 2)
        return log_probs, torch.tensor(counts, device=log_probs.device).view(-1, 2), balance

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: the sum of the pairs' losses, their number, and the routers' balance loss."""
        total, sums, balance = self._judged(model, inputs)
        if model.training:
            self._seen = sums if self._seen is None else self._seen + sums
        return total.float(), sums[1].float(), balance

    def measure(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        return self._judged(model, inputs)[1]

    def figures(self, sums: list[float]) -> dict[str, float]:
        """What an evaluation says.

        Returns:
            `eval_loss` (per pair), `eval_pairs`, and what `OF_PAIRS` names.
        """
        total, pairs, *others = sums
        return {"eval_loss": total / pairs, "eval_pairs": int(pairs)} | {
            f"eval_{name}": value for name, value in _of_pairs(pairs, others).items()
        }

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the pairs of the steps since the last time were like. All processes call this."""
        if "loss" in logs and self._seen is not None:
            _, pairs, *others = self.accelerator.reduce(self._seen, reduction="sum").tolist()
            logs = {**logs, **_of_pairs(pairs, others)}
            self._seen = None
        super().log(logs, *args, **kwargs)

    def trained_tokens(self, count: Any) -> Any:
        return self._tokens

    def _judged(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The sum of the losses; sums of losses, pairs and what `OF_PAIRS` is made of; and the balance loss."""
        log_probs, tokens, balance = self.answers(model, inputs)
        known = None if self.reference is None else self.reference[inputs["pairs"]]
        losses, rewards = pair_losses(self.objective, self.settings, log_probs, tokens, known)
        margins, total = rewards[:, 0] - rewards[:, 1], losses.sum()
        # What rounding explains is no preference: before the first step neither answer has gained anything.
        noise = ROUNDING * self.settings.beta * log_probs.detach().abs().sum(1)
        won = (0.5 + 0.5 * margins.where(margins.abs() > noise, 0).sign()).sum()
        number = torch.tensor(float(len(losses)), dtype=torch.float64, device=losses.device)
        return total, torch.stack([total.detach(), number, *rewards.sum(0), won, *log_probs.detach().sum(0)]), balance

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Theirs counts trained tokens; a loss is one of pairs, of which every step has as many."""
        copies = dividing()
        tokens = super()._get_num_items_in_batch(batch_samples, device)
        self._tokens = 0 if tokens is None else tokens // copies
        assert self.batches is not None, "pairs are not streamed"
        return torch.tensor(self.batches.global_batch_size * copies, device=device)


def numbered(train: Any, held_out: Any) -> tuple[Any, Any]:
    """Data sets of pairs with the column `row`, which counts the training rows and then those held out."""
    first = len(train)
    train = train.add_column("row", np.arange(first))
    return train, held_out and held_out.add_column("row", np.arange(first, first + len(held_out)))


def _of_pairs(pairs: float, sums: list[float]) -> dict[str, float]:
    chosen, rejected, won, *log_probs = (each / pairs for each in sums)
    return dict(zip(OF_PAIRS, (chosen, rejected, chosen - rejected, won, *log_probs), strict=True))
