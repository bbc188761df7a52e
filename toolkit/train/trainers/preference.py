"""Training on answers of which it is known which are preferred: any causal model and any engine, with a loss of whole
answers in place of one of tokens. Here on pairs; on answers that are judged one by one in `judged`.

The two answers of a pair are two rows of one micro-batch, so that one pass scores both. A reference costs no memory: it
is the model as it is before its first step, and its log-probabilities are known by then (`reference`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from trl.trainer.utils import disable_dropout_in_model

from toolkit.models.device import sent
from toolkit.models.losses.preference import pair_losses, reward_scale
from toolkit.models.output_heads.head_choice import HeadChoice
from toolkit.models.parallel.layer_sums import dividing
from toolkit.recipe.preference import Preference
from toolkit.train.trainers.told import Measurement, Telling
from toolkit.train.trainers.trainer import CausalTrainer

OF_PAIRS = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy", "logp_chosen", "logp_rejected")
"""What is said of the pairs of a step or an evaluation, on average: rewards (see `pair_losses`), by how much that of
the chosen answer is higher, in what share of pairs it is (half of those where neither is), and log-probabilities of
whole answers."""
OF_ANSWERS = (*OF_PAIRS, "kl")
"""The same, and what is said of judged answers besides."""

ROUNDING = 1e-6
"""Of log-probabilities in fp32, relative to themselves."""
BESIDE = ("rows", "answer_tokens", "desirable", "others")
"""What a batch of answers has beside what the model reads."""


class AnswerTrainer(Telling, CausalTrainer):
    """A causal model that learns which answers are preferred. Set `objective` and `settings` once it is made.

    Dropout is off, as in TRL: its noise would pass for a change of log-probability.
    """

    said = OF_ANSWERS
    objective: str
    settings: Preference
    reference: torch.Tensor | None = None
    """(rows, 2) log-probabilities of both answers of each row by the reference, where the objective has one."""
    _tokens: Any = 0

    def __init__(self, model: Any, args: Any, choice: HeadChoice, **kwargs: Any) -> None:
        disable_dropout_in_model(model)
        super().__init__(model, args, choice, **kwargs)
        self.output_head.alike = False

    def each(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: log-probabilities (answers,), trained tokens (answers,), and the routers' balance loss."""
        counts = inputs["answer_tokens"]
        outputs, balance = self.scores(model, {name: inputs[name] for name in inputs if name not in BESIDE})
        # Beyond their sum are positions that fill up. The host knows where answers end: no device is waited for.
        parts = outputs.log_probs[0].double()[: sum(counts)].split(counts)
        log_probs = torch.stack([part.sum() for part in parts])
        return log_probs, sent(counts, log_probs.device), balance

    def trained_tokens(self, count: Any) -> Any:
        return self._tokens

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Theirs counts trained tokens; a loss is one of rows, of which every step has as many."""
        copies = dividing()
        tokens = super()._get_num_items_in_batch(batch_samples, device)
        self._tokens = 0 if tokens is None else tokens // copies
        assert self.batches is not None, "rows of preferences are not streamed"
        return sent(self.batches.global_batch_size * copies, device)


class PairTrainer(AnswerTrainer):
    """A causal model that learns which answer of a pair is preferred."""

    def answers(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: log-probabilities (pairs, 2) of both answers, their trained tokens (pairs, 2), and the routers'
        balance loss."""
        log_probs, tokens, balance = self.each(model, inputs)
        return log_probs.view(-1, 2), tokens.view(-1, 2), balance

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: the sum of the pairs' losses, their number, and the routers' balance loss."""
        losses, sums, balance = self._judged(model, inputs)
        if model.training:
            self.see(sums)
        return losses.sum().float(), sums[1].float(), balance

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        losses, sums, _ = self._judged(model, inputs)
        return Measurement.of(sums, losses, torch.ones_like(losses))

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says.

        Returns:
            `eval_loss` (per pair), `eval_pairs`, and what `OF_PAIRS` names.
        """
        total, pairs, *_ = sums
        return {"eval_loss": total / pairs, "eval_pairs": int(pairs)} | {
            f"eval_{name}": value for name, value in self.told(sums).items()
        }

    def told(self, sums: list[float]) -> dict[str, float]:
        _, pairs, *others = sums
        chosen, rejected, won, *log_probs = (each / pairs for each in others)
        return dict(zip(OF_PAIRS, (chosen, rejected, chosen - rejected, won, *log_probs), strict=True))

    def _judged(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The losses (pairs,); sums of losses, pairs and what `OF_PAIRS` is made of; and the balance loss."""
        log_probs, tokens, balance = self.answers(model, inputs)
        known = None if self.reference is None else self.reference[inputs["rows"]]
        losses, rewards = pair_losses(self.objective, self.settings, log_probs, tokens, known)
        margins = rewards[:, 0] - rewards[:, 1]
        # What rounding explains is no preference: before the first step neither answer has gained anything.
        scale = reward_scale(self.objective, self.settings, tokens)
        noise = ROUNDING * (scale * log_probs.detach().abs()).sum(1)
        won = (0.5 + 0.5 * margins.where(margins.abs() > noise, 0).sign()).sum()
        number = sent(len(losses), losses.device, torch.float64)
        sums = torch.stack([losses.detach().sum(), number, *rewards.sum(0), won, *log_probs.detach().sum(0)])
        return losses, sums, balance


def numbered(train: Any, held_out: Any) -> tuple[Any, Any]:
    """Data sets of preferences with the column `row`, which counts the training rows and then those held out."""
    first = len(train)
    train = train.add_column("row", np.arange(first))
    return train, held_out and held_out.add_column("row", np.arange(first, first + len(held_out)))
