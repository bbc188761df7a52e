"""Training of vectors of texts by what else is in the step: a row's negatives are the texts of all others.

So a loss reads the vectors of the whole global batch, which no pass has together. They are computed first, of one
micro-batch after the other and without gradients, and shared by all processes; each process computes the losses of all
rows, and from them the gradient of every vector. A second pass over each micro-batch sends these through the model
(GradCache, Gao et al. 2021, arXiv:2101.06983; sentence-transformers' CachedMultipleNegativesRankingLoss). Loss and
gradients then are those of the whole step, however it is divided. Where a process has one micro-batch in a step, its
pass with gradients is the only one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DistributedType

from toolkit.data.batching.collate import mask_of
from toolkit.data.batching.head_batches import texts_of
from toolkit.models.device import sent
from toolkit.models.losses.embedding import losses_and_gradient, pooled, pooled_flat
from toolkit.recipe.embedding import COSENT, Embedding
from toolkit.train.health.watchdog import beat
from toolkit.train.trainers.heads import BESIDE, HeadTrainer, Scored
from toolkit.train.trainers.retrieval import correlation_figures, retrieval_figures
from toolkit.train.trainers.told import Measurement


@dataclass(frozen=True)
class Drawn:
    """The state of the generators by which a pass drops out, for it to be taken again.

    Args:
        host: Of the host's.
        device: Of this process's device, where that has one of its own.
    """

    host: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls) -> Drawn:
        """What the next pass draws from."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """While this context lasts, the same is drawn; then, what would have been."""
        with torch.random.fork_rng(devices=[] if self.device is None else [torch.cuda.current_device()]):
            torch.set_rng_state(self.host)
            if self.device is not None:
                torch.cuda.set_rng_state(self.device)
            yield


@dataclass(frozen=True)
class Share:
    """What the losses of a step come to for one micro-batch.

    Args:
        loss: The sum of those of its rows.
        gradient: (texts, width) of the sum of all losses with respect to its vectors.
        drawn: With what its vectors were computed, where they are computed again.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    drawn: Drawn | None = None


class EmbeddingTrainer(HeadTrainer):
    """A model that gives texts vectors. Set `embedding`, `pooling` and `group` once it is made."""

    said = ()
    embedding: Embedding
    pooling: str
    group: int
    """Held-out rows that are each other's candidates in the held-out loss: as many as a step has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._measured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def logits(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """(texts, width) vectors of a batch."""
        read = {name: inputs[name] for name in inputs if name not in BESIDE}
        hidden = model(**read).last_hidden_state
        if "read_at" in inputs:
            return pooled_flat(hidden, inputs["cu_seq_lens_q"], texts_of(inputs), self.pooling)
        return pooled(hidden, mask_of(inputs), self.pooling)

    def items(self, batch: dict[str, Any]) -> torch.Tensor:
        return sent(len(batch["rows"]), batch["input_ids"].device)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step, each with its share where there are several."""
        batches, count = super().get_batch_samples(*args, **kwargs)
        if len(batches) < 2:
            return batches, count
        beat(f"embedding the texts of step {self.state.global_step + 1}")
        self.model_wrapped.train()
        vectors, drawn = [], []
        for batch in batches:
            drawn.append(Drawn.now())
            with torch.no_grad():
                inputs: Any = self._prepare_inputs(batch)
                vectors.append(self.logits(self.model_wrapped, inputs))
        shares = self._shares(vectors, batches)
        return [
            batch | {"share": Share(share.loss, share.gradient, state)}
            for batch, share, state in zip(batches, shares, drawn, strict=True)
        ], count

    def score(self, model: Any, inputs: dict[str, Any]) -> Scored:
        """Of a batch in training: the sum of its rows' losses, whose gradient is that of all rows of the step."""
        share: Share | None = inputs.get("share")
        with share.drawn.again() if share and share.drawn else contextlib.nullcontext():
            vectors = self.logits(model, inputs)
        if share is None:
            (share,) = self._shares([vectors.detach()], [inputs])
        through = (vectors * share.gradient.to(vectors.device)).sum()
        rows = sent(float(len(inputs["rows"])), vectors.device)
        return through - through.detach() + share.loss.to(through.dtype), rows, None

    def _shares(self, vectors: Sequence[torch.Tensor], batches: Sequence[dict[str, Any]]) -> list[Share]:
        """Those of this process's micro-batches of a step, by the vectors of all processes."""
        device = self.args.device
        own, keys, scores, rows = (
            torch.cat([each.to(device) for each in every])
            for every in (vectors, *([batch[name] for batch in batches] for name in ("keys", "scores", "rows")))
        )
        texts = keys.shape[1]
        every = [self._of_all(each) for each in (own.view(len(rows), texts, -1), keys, scores)]
        numbers = self._of_all(rows, fill=-1)
        # In one order, by which sums do not depend on who had which row; what fills up, beside other processes, is left
        # out.
        filled = int((numbers < 0).sum()) if len(numbers) > len(rows) else 0
        order = torch.argsort(numbers, stable=True)[filled:]
        losses, gradient = losses_and_gradient(self.embedding, *(each[order] for each in every))
        back = torch.empty_like(numbers)
        back[order] = torch.arange(len(order), device=device)
        first = self.accelerator.process_index * (len(numbers) // self.accelerator.num_processes)
        mine = back[first : first + len(rows)]
        counts = [len(batch["rows"]) for batch in batches]
        return [
            Share(loss.sum(), part.flatten(0, 1).to(own.dtype))
            for loss, part in zip(losses[mine].split(counts), gradient[mine].split(counts), strict=True)
        ]

    def _of_all(self, mine: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Rows of all processes behind each other, those of each filled up to as many."""
        if self.accelerator.distributed_type == DistributedType.NO:
            return mine
        whole: torch.Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(mine, pad_index=fill))
        return whole

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        """Keeps the vectors of held-out rows for `figures`: no row is measured without the others."""
        vectors = self.logits(model, inputs)
        self._measured.append((inputs["rows"].cpu(), vectors.view(*inputs["keys"].shape, -1).cpu()))
        return Measurement(torch.zeros(1, dtype=torch.float64))

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says, of the vectors of all held-out rows.

        Returns:
            `eval_loss` (of groups of as many rows as a step has, in the order of the data), `eval_rows`, and what
            `retrieval` says of pairs, or of scores.
        """
        first, held = len(self.train_dataset), self.eval_dataset.with_format("numpy")  # type: ignore[arg-type,union-attr]
        numbers = torch.cat([numbers for numbers, _ in self._measured]) - first
        mine = torch.cat([vectors for _, vectors in self._measured])
        self._measured = []
        count = len(held)
        table = torch.zeros(count, *mine.shape[1:])
        table[numbers] = mine
        times = torch.zeros(count).index_fill(0, numbers, 1.0)
        whole, times = (self.accelerator.reduce(each.to(self.args.device), reduction="sum") for each in (table, times))
        # A process may have had rows of another for nothing.
        vectors = whole / times.view(-1, 1, 1)
        keys, scores = (torch.as_tensor(held[name][:]).to(vectors.device) for name in ("keys", "score"))
        total = 0.0
        for part in torch.arange(count, device=vectors.device).split(self.group):
            losses, _ = losses_and_gradient(self.embedding, vectors[part], keys[part], scores[part])
            total += losses.sum().item()
        found = (
            correlation_figures(vectors, scores) if self.embedding.loss == COSENT else retrieval_figures(vectors, keys)
        )
        return {"eval_loss": total / count, "eval_rows": count, **found}
