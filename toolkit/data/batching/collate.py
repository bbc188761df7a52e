"""Rows to the tensors of one batch, in the layout in which the attention backend keeps documents apart.

Backends that take lengths (`flat`) compute no padding between rows, those that mask (`packed`) need a mask of (L, L),
and `padded` works with every model. Lengths are made on the host: Transformers would derive them from the positions on
the device, and wait for it. Many models take positions and ignore them, so `isolates` asks the model itself.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.common import UserError
from toolkit.data.batching.shared_prefixes import Row, documents_in
from toolkit.data.rows import IGNORE

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

Layout = Literal["padded", "packed", "flat", "pairs"]
TWO_DOCUMENTS = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "labels": [IGNORE] * 8, "seq_lengths": [4, 4]}
"""A row of two documents, for the test whether they are kept apart."""
_TWO_ALIKE = {"input_ids": [*range(1, 11), *range(1, 9), 12, 13], "labels": [IGNORE] * 20, "seq_lengths": [10, 10]}
"""A row of two documents that share their first eight tokens."""
_POSITIONS = 16
"""Few different sizes: kernels are made anew for each, and tensor cores want a multiple of 8."""


def isolates(model: PreTrainedModel | PeftModel, collator: Collator, device: torch.device | None = None) -> bool:
    """Whether documents packed into one sequence cannot see each other, measured on the model itself.

    Many models take `position_ids` and still look across documents (OPT, Falcon, models with recurrent layers), so
    this asks the model: the gradient of the second document's logits with respect to the first document's embeddings
    must be exactly zero. Where what documents share stands once, the second must see that, and still not the first's
    own. It runs a forward and backward pass over some tokens and leaves no gradients behind.
    Call it under the autocast that training uses: FlashAttention's kernels take half precision only.

    Args:
        model: a causal language model with its attention backend set. If an engine has sharded it, every process must
            call this.
        collator: how packed rows reach the model: `packed` for backends that mask, `flat` for those that take lengths.
        device: where the model computes, if that is not where its embeddings are.

    Raises:
        UserError: Its weights are not numbers.
    """
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return False
    whole = _gradient(model, base, collator([TWO_DOCUMENTS]), 4, device)
    isolated = bool((whole[:4] == 0).all() and (whole[4:8] != 0).any())
    if isolated and collator.shares:
        shared = _gradient(model, base, collator([_TWO_ALIKE]), 10, device)
        isolated = bool((shared[8:10] == 0).all() and (shared[7] != 0).any() and (shared[10:12] != 0).any())
    return isolated


def _gradient(model: Any, base: Any, batch: dict[str, Any], start: int, device: torch.device | None) -> torch.Tensor:
    """(tokens, width) the gradient of the logits of the two or four tokens from `start` on by the embeddings."""
    embeddings = base.get_input_embeddings()
    for name in ("labels", "label_positions", "text_counts"):
        batch.pop(name, None)
    device = device or embeddings.weight.device
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    embedded: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.requires_grad_())
        return output.clone()  # Code may write into what it got, as CTRL's does, but not into a leaf.

    handle = embeddings.register_forward_hook(keep)
    training = model.training
    model.eval()  # dropout would draw from the generator of the run
    try:
        with torch.enable_grad():
            logits = model(**batch).logits[0].float()
            if not logits.isfinite().all():  # Whose gradients would say nothing.
                raise UserError(
                    "the model gives NaN or infinite numbers before it is trained",
                    "set model.path to a model whose weights are whole, or precision=fp32 where 16 bits do not hold "
                    "what it computes",
                )
            (gradient,) = torch.autograd.grad(logits[start : start + 4].square().sum(), embedded[0])
    finally:
        handle.remove()
        model.train(training)
    return gradient[0]


@dataclass(frozen=True)
class Collator:
    """Batches rows; what they look like is the layout.

    Layouts (B examples, L the longest of them, T their sum):
        padded: `input_ids`, `labels` and, where anything is padded, `attention_mask`, each (B, L), padded on the right.
        packed: `input_ids`, `labels`, `position_ids`, each (B, L). Positions restart at every document and no
            attention mask is given: from that, Transformers makes a mask that isolates the documents. Padding is a
            document of its own. `use_cache` is off, because Transformers looks for documents only without a cache.
        flat: all documents in one row, `input_ids`, `labels`, `position_ids`, each (1, T), with `cu_seq_lens_q`,
            `cu_seq_lens_k` (documents + 1,) int32 and `max_length_q`, `max_length_k` as host integers, which saves
            every layer a wait for the device. With `shares`, beginnings that documents have in common stand once, see
            `shared_prefixes`: what is end to end are segments, `cu_seq_lens_k` and `max_length_k` are of the keys that
            each attends to, and `key_places` (sum of these,) says where in the row they are.
        pairs: as `padded`, for encoder-decoder rows: `labels` (B, longest target) have a length of their own, and the
            model shifts them into decoder inputs itself.

    Where padding is a document of its own, or tokens stand for those of several documents, there is `text_counts` (as
    `input_ids`): for how many each stands, none for padding. Models do not get it: routers of mixtures are balanced by
    text alone, and by all of it.

    All have `label_positions`: those in the flattened batch whose next token is trained, a multiple of `_POSITIONS` of
    them, filled up with the last one, which has none; of `pairs` those that are trained. The output head needs no
    others; known on the host, they need not be asked of the device.

    Args:
        pad_token_id: Fills up rows; never trained, never seen by other tokens.
        layout: One of the above.
        pad_to_multiple_of: Rows are filled up to a multiple of this.
        longest: But not beyond so many tokens: some models have no more positions.
        lone: Whether a row by itself is filled up too. Without padding no mask is needed, and CUDA's kernels without
            one are twice as fast.
        shares: Whether what documents of a `flat` row have in common stands once.
    """

    pad_token_id: int
    layout: Layout
    pad_to_multiple_of: int = 1
    longest: int | None = None
    lone: bool = True
    shares: bool = False

    @property
    def whole(self) -> Collator:
        """The collator of whole rows: this one; for a `PartCollator` the one that it divides."""
        return self

    def width(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """What rows of these lengths are filled up to."""
        wide = -(-lengths // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return wide if self.longest is None else np.maximum(lengths, np.minimum(wide, self.longest))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Tensors for rows with `input_ids`, `labels` and, where packed, `seq_lengths`."""
        ids = [np.asarray(example["input_ids"], dtype=np.int64) for example in examples]
        labels = [np.asarray(example["labels"], dtype=np.int64) for example in examples]
        lengths = [
            np.asarray(example.get("seq_lengths", [len(row)])) for example, row in zip(examples, ids, strict=True)
        ]
        if self.layout != "pairs":
            for row, documents in zip(labels, lengths, strict=True):
                assert documents.sum() == len(row), "seq_lengths do not add up to the row"
                assert (row[documents.cumsum() - documents] == IGNORE).all(), "the first token of a document is trained"
        shared = Row.of(documents_in(examples)) if self.shares else None
        if shared:
            ids, labels, lengths = [shared.ids], [shared.labels], [shared.lengths]
        elif self.layout == "flat":
            ids, labels, lengths = ([np.concatenate(each)] for each in (ids, labels, lengths))
        assert self.layout != "padded" or all(len(each) == 1 for each in lengths), "packed rows need isolation"

        batch: dict[str, Any] = {
            "input_ids": self.padded(ids, self.pad_token_id),
            "labels": self.padded(labels, IGNORE),
        }
        batch["label_positions"] = label_positions(batch["labels"].numpy(), self.layout == "pairs")
        if self.layout in ("padded", "pairs"):
            return batch | self.mask(ids, guessed=self.layout == "pairs")
        pads = [batch["labels"].shape[1] - len(row) for row in ids]
        lengths = [np.append(each, pad) if pad else each for each, pad in zip(lengths, pads, strict=True)]
        if shared:
            batch["text_counts"] = self.padded([shared.counts], 0).to(torch.int32)
        elif any(pads):
            batch["text_counts"] = self.padded([np.ones_like(row) for row in ids], 0).bool()
        batch["position_ids"] = torch.from_numpy(np.stack([_positions(each) for each in lengths]))
        if self.layout == "packed":
            batch["use_cache"] = False
            return batch
        keys = lengths[0]
        if shared:
            (pad,), end = pads, len(shared.ids)
            keys = np.append(shared.keys, pad) if pad else shared.keys
            batch["position_ids"][0, :end] = torch.from_numpy(shared.positions)
            batch["key_places"] = torch.from_numpy(np.append(shared.places, np.arange(end, end + pad)))
        for side, each in (("q", lengths[0]), ("k", keys)):
            batch[f"cu_seq_lens_{side}"] = torch.from_numpy(np.append(0, each.cumsum()).astype(np.int32))
            batch[f"max_length_{side}"] = int(each.max())
        return batch

    def tokens(self, batch: dict[str, Any]) -> torch.Tensor:
        """(3,) of a batch: the tokens of its rows, of pairs those of the sources; all that are computed; and these with
        padding."""
        ids, counts = batch["input_ids"], batch.get("attention_mask", batch.get("text_counts"))
        counts = torch.ones_like(ids) if counts is None else counts
        pairs = self.layout == "pairs"
        targets = (batch["labels"] != IGNORE).sum() if pairs else 0
        padded = ids.new_tensor(ids.numel() + (batch["labels"].numel() if pairs else 0))
        return torch.stack([counts.sum(), (counts > 0).sum() + targets, padded])

    def examples_of(self, examples: list[dict[str, Any]], batch: dict[str, Any]) -> torch.Tensor:
        """The example that each of a batch's `label_positions` belongs to, known on the host."""
        return self.example_at(batch["label_positions"], examples, batch["labels"].shape[1])

    def example_at(self, places: torch.Tensor, examples: list[dict[str, Any]], width: int) -> torch.Tensor:
        """The example at each place of a flattened batch whose rows have this width; padding at the end belongs to the
        last one."""
        if self.layout != "flat":
            return places // width
        ends = torch.tensor([len(example["input_ids"]) for example in examples]).cumsum(0)
        if self.shares:
            last = np.cumsum([len(example.get("seq_lengths", [0])) for example in examples]) - 1
            ends = torch.from_numpy(Row.of(documents_in(examples)).ends[last])
        return torch.bucketize(places, ends, right=True).clamp(max=len(examples) - 1)

    def mask(self, rows: list[NDArray[np.int64]], guessed: bool) -> dict[str, torch.Tensor]:
        """`attention_mask` (B, L) of rows, 0 for padding; without any there is none, see
        `attention_kernels.trust_masks`.

        Args:
            guessed: Whether models without a mask may take a token for padding by its id, as some encoders do (T5Gemma,
                DPR): then there is one where a row has such a token.
        """
        mask = self.padded([np.ones_like(row) for row in rows], 0)
        mistakable = guessed and any((row == self.pad_token_id).any() for row in rows)
        return {} if mask.all() and not mistakable else {"attention_mask": mask}

    def padded(self, rows: list[NDArray[np.int64]], value: int) -> torch.Tensor:
        """The rows, padded on the right to the longest and on to its width."""
        longest = np.array(max(map(len, rows)))
        padded = np.full((len(rows), int(self.width(longest) if len(rows) > 1 or self.lone else longest)), value)
        for number, row in enumerate(rows):
            padded[number, : len(row)] = row
        return torch.from_numpy(padded)


def mask_of(batch: dict[str, Any]) -> torch.Tensor:
    """`attention_mask` of a padded batch, also where nothing is padded."""
    return batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])


def documents_of(batch: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows that a `Collator` has laid out, `padded` or `flat`, in order; padding, and beginnings that several
    share, may be further ones, untrained."""
    ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
    if "cu_seq_lens_k" in batch:
        places = batch["key_places"].cpu() if "key_places" in batch else torch.arange(ids.shape[1])
        parts = [(0, places[slice(*ends)]) for ends in itertools.pairwise(batch["cu_seq_lens_k"].tolist())]
    else:
        lengths = mask_of(batch).sum(1).tolist()
        parts = [(row, torch.arange(length)) for row, length in enumerate(lengths)]
    return [{"input_ids": ids[row][part].tolist(), "labels": labels[row][part].tolist()} for row, part in parts]


def label_positions(labels: NDArray[np.int64], pairs: bool) -> torch.Tensor:
    """Where the next token is trained. No row begins with a trained token, so rows may be laid end to end in a ring.

    Of pairs, those of the trained tokens: decoders of encoder-decoders see the token before.
    """
    if pairs:
        return torch.from_numpy(np.flatnonzero(labels != IGNORE))
    following = np.roll(labels, -1)
    trained, others = np.flatnonzero(following != IGNORE), np.flatnonzero(following == IGNORE)
    spare = -len(trained) % _POSITIONS if len(trained) else _POSITIONS
    # In a part of a row all may be trained.
    return torch.from_numpy(np.append(trained, np.full(spare if len(others) else 0, others[-1:])))


def _positions(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of tokens within their documents."""
    return np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
