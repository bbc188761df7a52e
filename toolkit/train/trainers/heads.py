"""Training of models whose head scores texts or words: reward models, classifiers of texts and of tokens.

The model's own forward runs, so that what is trained is what Transformers computes of the saved model: of a decoder the
score of a text is read at its last token that is no padding, on whichever side it is padded. Losses are sums over rows
or words, divided by how many the global batch has, and do not depend on how these fall into micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.nn import functional as F
from transformers import Trainer
from trl.trainer.utils import disable_dropout_in_model

from toolkit.common import UserError
from toolkit.data.batching.batches import ALIGNED
from toolkit.data.batching.head_batches import HeadCollator, apart, texts_of, tokens_of
from toolkit.data.rows import IGNORE
from toolkit.models import device
from toolkit.models.heads import read_at
from toolkit.models.losses.preference import reward_losses
from toolkit.recipe.preference import Preference
from toolkit.train.evaluation.evaluate import evaluating
from toolkit.train.evaluation.generation import reading_masks
from toolkit.train.session import Session
from toolkit.train.trainers.classes import MOST_CONFUSED, class_figures, entity_counts, entity_figures, entity_types
from toolkit.train.trainers.preference import OF_ANSWERS
from toolkit.train.trainers.told import Measurement, Telling
from toolkit.train.trainers.trainer import _ExactMixin

OF_REWARDS = ("reward_mean", "reward_std")
"""What is said of rewards beside what is said of all pairs."""
BESIDE = ("labels", "words", "rows", "keys", "scores", "share", "read_at")
"""What a batch has beside what the model reads."""

Scored = tuple[torch.Tensor, torch.Tensor, None]


class HeadTrainer(Telling, _ExactMixin, Trainer):
    """A model with a head of the objective's own. Set `settings` and `classes` once it is made."""

    said: tuple[str, ...] = (*OF_ANSWERS, *OF_REWARDS)
    settings: Preference
    model: Any
    classes: Sequence[str] = ()
    of_tokens = False
    """Whether tokens are scored, each by itself, and not texts."""
    _tokens: Any = 0

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        super().__init__(model=model, args=args, **kwargs)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Nothing is generated, and caches would hold keys and values of every evaluation.
        base.config.get_text_config().use_cache = False
        self.head: Any = getattr(base, "score", None)

    def logits(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Scores of a batch: (rows, outputs), or of tokens (rows, seq, outputs)."""
        read = {name: inputs[name] for name in inputs if name not in BESIDE}
        if "read_at" not in inputs or self.of_tokens:
            return model(**read).logits
        with read_at(self.head, inputs["read_at"]):
            return model(**read).logits.view(texts_of(inputs), -1)

    def score(self, model: Any, inputs: dict[str, Any]) -> Scored:
        """Of a batch: the sum of the losses, how many these are, and no loss of routers."""
        losses, measured = self.scored(model, inputs)
        if model.training:
            self.see(measured.sums)
        return losses.sum().float(), measured.sums[1].float(), None

    def scored(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Measurement]:
        """The losses (N,) of a batch in double precision; and without gradients their sum, their number and what else
        `told` and `figures` are made of."""
        raise NotImplementedError

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        return self.scored(model, inputs)[1]

    def trained_tokens(self, count: Any) -> Any:
        return self._tokens

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Theirs counts labels where the model's forward takes them."""
        own = [torch.stack([tokens_of(batch), self.items(batch)]) for batch in batch_samples]
        sums = torch.stack(own).sum(0).double().to(device)
        tokens, items = self.accelerator.reduce(sums, reduction="sum")
        self._tokens = tokens
        return items.float()

    def items(self, batch: dict[str, Any]) -> torch.Tensor:
        """How many losses there are in a batch; a tensor, so that no device is waited for."""
        return (batch["labels"] != IGNORE).sum()


class RewardTrainer(HeadTrainer):
    """A model that gives the chosen answer of a pair more than the rejected one. Dropout is off, as in TRL."""

    def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
        disable_dropout_in_model(model)
        super().__init__(model, args, **kwargs)

    def items(self, batch: dict[str, Any]) -> torch.Tensor:
        return device.sent(texts_of(batch) // 2, batch["input_ids"].device)

    def scored(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Measurement]:
        rewards = self.logits(model, inputs).view(-1, 2).double()
        losses, rewards = reward_losses(self.settings, rewards), rewards.detach()
        margins = rewards[:, 0] - rewards[:, 1]
        won = (0.5 + 0.5 * margins.sign()).sum()
        number = device.sent(len(losses), losses.device, torch.float64)
        sums = torch.stack([losses.detach().sum(), number, *rewards.sum(0), won, rewards.square().sum()])
        return losses, Measurement.of(sums, losses, torch.ones_like(losses))

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says.

        Returns:
            `eval_loss` (per pair), `eval_pairs`, and what is `told`.
        """
        total, pairs, *_ = sums
        return {"eval_loss": total / pairs, "eval_pairs": int(pairs)} | {
            f"eval_{name}": value for name, value in self.told(sums).items()
        }

    def told(self, sums: list[float]) -> dict[str, float]:
        """What is said of pairs: rewards of both answers, by how much that of the chosen one is higher, in what share
        of pairs it is (half of those where both are equal), and mean and standard deviation over all answers."""
        _, pairs, *others = sums
        chosen, rejected, won, squares = (each / pairs for each in others)
        mean = (chosen + rejected) / 2
        return {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            "accuracy": won,
            "reward_mean": mean,
            "reward_std": math.sqrt(max(0.0, squares / 2 - mean**2)),
        }


class ClassTrainer(HeadTrainer):
    """A model that tells the class of each text."""

    def scored(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, Measurement]:
        logits, labels = self.logits(model, inputs).float(), inputs["labels"]
        outputs = logits.shape[-1]
        flat, wanted = logits.reshape(-1, outputs), labels.reshape(-1)
        losses = F.cross_entropy(flat, wanted, ignore_index=IGNORE, reduction="none").double()
        kept = wanted != IGNORE
        found = flat.detach().argmax(-1)
        told = ((wanted, kept & (found == wanted)), (found, kept), (wanted, kept))
        counts = torch.stack([_counted(places, each, outputs) for places, each in told], 1)
        # Row by row what each class was taken for, of which nothing is said in training. DeepSpeed's engine does not
        # know whether its module is evaluated.
        confuses = outputs <= MOST_CONFUSED and not self.model.training
        confusion = [_counted(wanted * outputs + found, kept, outputs**2)] if confuses else []
        head = torch.stack([losses.detach().sum(), kept.sum().double()])
        sums = torch.cat([head, counts.flatten(), *confusion, *self.further(found.view(labels.shape), inputs)])
        return losses, Measurement.of(sums, losses, kept)

    def further(self, found: torch.Tensor, inputs: dict[str, Any]) -> list[torch.Tensor]:
        """Other sums over a batch, of which it is known what class each place was taken for."""
        return []

    def told(self, sums: list[float]) -> dict[str, float]:
        counts, *_ = self._parted(sums)
        return {"accuracy": sum(row[0] for row in counts) / max(sum(row[2] for row in counts), 1)}

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, Any]:
        """What an evaluation says.

        Returns:
            `eval_loss` (per label), `eval_labels`, `eval_accuracy`, `eval_macro_f1`; `eval_classes` with precision,
            recall, F1 and the number of each class, and for up to `MOST_CONFUSED` classes `eval_confusion`, a row for
            each with how often it was taken for which.
        """
        total, labels, *_ = sums
        counts, confusion, _ = self._parted(sums)
        found = {"eval_loss": total / labels, "eval_labels": int(labels), **class_figures(counts, self.classes)}
        return found | ({"eval_confusion": confusion} if confusion else {})

    def _parted(self, sums: list[float]) -> tuple[list[list[int]], list[list[int]], list[float]]:
        """Of each class its labels that were told, how often it was told, and its labels; what those of each were taken
        for; and what is `further`."""
        size, whole = len(self.classes), iter(sums[2:])

        def table(width: int) -> list[list[int]]:
            return [[int(each) for each in itertools.islice(whole, width)] for _ in range(size)]

        return table(3), table(size) if size <= MOST_CONFUSED else [], [*whole]


def _counted(places: torch.Tensor, kept: torch.Tensor, size: int) -> torch.Tensor:
    """(size,) how often each place is met among those that are kept."""
    counts = torch.zeros(size + 1, dtype=torch.float64, device=places.device)
    places = torch.where(kept, places, size)
    return counts.scatter_add(0, places, torch.ones_like(places, dtype=torch.float64))[:-1]


class TokenTrainer(ClassTrainer):
    """A model that tells the class of each word, at its first token."""

    of_tokens = True

    def further(self, found: torch.Tensor, inputs: dict[str, Any]) -> list[torch.Tensor]:
        types = entity_types(self.classes)
        if self.model.training or not types:
            return []
        names = [*self.classes]
        counts = torch.zeros(len(types), 3, dtype=torch.float64)
        texts = (map(torch.Tensor.tolist, apart(each, inputs)) for each in (inputs["labels"], found))
        for wanted, taken in zip(*texts, strict=True):
            words = [place for place, label in enumerate(wanted) if label != IGNORE]
            there, said = ([names[side[place]] for place in words] for side in (wanted, taken))
            counts += torch.tensor(entity_counts(there, said, types))
        return [counts.flatten().to(found.device)]

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, Any]:
        """As of classes; where these are tags of entities also `eval_entity_f1`, `eval_entity_precision`,
        `eval_entity_recall`, and `eval_entities` with those of each type."""
        types = entity_types(self.classes)
        *_, counts = self._parted(sums)
        table = [[int(each) for each in counts[3 * n : 3 * n + 3]] for n in range(len(types))]
        found = entity_figures(dict(zip(types, table, strict=True))) if types else {}
        return super().figures(sums, rows) | found


def check_padding(session: Session) -> None:
    """Asks the model itself, on its first rows, whether it scores a row alike by itself and beside a longer one, or end
    to end with another.

    Of a decoder the score is read at the last token that is no padding, which its config must name.

    Raises:
        UserError: If it does not, on any process.
    """
    trainer = session.trainer
    first = list(itertools.islice(iter(trainer.train_dataset), 2))
    flat = trainer.data_collator.layout == "flat"
    as_they_are = _padded(trainer.data_collator, 1)
    wider = _padded(trainer.data_collator, as_they_are(first)["input_ids"].shape[1] + ALIGNED)

    def scores(batch: dict[str, Any]) -> torch.Tensor:
        given = send_to_device(batch, trainer.args.device)
        found = trainer.logits(trainer.model_wrapped, given).double()
        return found if found.dim() == 2 else found[given["labels"] != IGNORE]

    with torch.no_grad(), evaluating(trainer.model_wrapped):
        together = scores((trainer.data_collator if flat else wider)(first))
        with reading_masks(session.module):
            alone = torch.cat([scores(as_they_are([row])) for row in first])
    difference = ((together - alone).norm() / alone.norm().clamp(min=1e-6)).reshape(1)
    largest = trainer.accelerator.gather(difference).max().item()
    exact = session.dtypes.compute == "float32" and not device.computes_tf32()
    if not largest < (1e-3 if exact else 0.1):
        beside = "end to end with others" if flat else "beside longer ones"
        raise UserError(
            f"{type(session.module).__name__} scores rows otherwise {beside} than by themselves: scores differ by "
            f"{largest:.1g} of their size",
            "set model.attention=sdpa" if flat else "set model.path to a model that Transformers pads right",
        )


def _padded(collator: HeadCollator, multiple: int) -> HeadCollator:
    """Rows filled up to a multiple of this length."""
    whole = dataclasses.replace(collator.whole, layout="padded", pad_to_multiple_of=multiple)
    return dataclasses.replace(collator, whole=whole)
