"""How near an exported model is to the run's: the same rows through both, compared by what the objective is for.

Of language models these are predictions of the next token, of heads the scores of texts, answers or words, of
embeddings the vectors. Rows are the run's own, held-out ones where it has any; each text goes through by itself, so
that nothing is padded.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from toolkit.data.batching.answer_batches import answers_of
from toolkit.data.prepare import prepare
from toolkit.data.rows import IGNORE
from toolkit.models.load import ModelSource
from toolkit.models.losses.embedding import pooled
from toolkit.recipe.heads import EMBEDDING, REWARD
from toolkit.train.finished.merge import proof_rows

_ROWS, _HEADED_ROWS = 8, 32
"""Rows that are compared: of words, and of heads and vectors, where a row says little."""

Outputs = list[torch.Tensor]
"""(places, outputs) of each text, in fp32 on the host."""


@dataclass(frozen=True)
class Probe:
    """Texts that two models are asked.

    Args:
        recipe: The run's.
        texts: The columns that a model reads, and `labels`.
        rows: How many rows they belong to.
        held_out: Whether the run did not train on them.
        pooling: Of vectors.
    """

    recipe: Any
    texts: Sequence[dict[str, Any]]
    rows: int
    held_out: bool
    pooling: str = ""

    @classmethod
    def of(cls, source: ModelSource, tokenizer: Any) -> Probe:
        """That of a run."""
        recipe = source.recipe
        if not recipe.headed:
            texts = proof_rows(source, tokenizer, _ROWS)
            return cls(recipe, texts, len(texts), False)
        prepared = prepare(recipe, tokenizer, source.stop_tokens(tokenizer), vocab_size=source.vocab_size)
        rows = list(itertools.islice(prepared.train if prepared.eval is None else prepared.eval, _HEADED_ROWS))
        several = recipe.objective in (REWARD, EMBEDDING)
        texts = [text for row in rows for text in (answers_of(row) if several else [row])]
        pooling = source.pooling if recipe.embeds else ""
        return cls(recipe, texts, len(rows), prepared.eval is not None, pooling)

    def outputs(self, model: Any, autocast: str | None = None) -> Outputs:
        """What a model makes of the texts: logits of tokens or words, scores, or vectors."""
        context = torch.autocast(model.device.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        with torch.no_grad(), context:
            return [self._output(model, text).float().cpu() for text in self.texts]

    def _output(self, model: Any, text: dict[str, Any]) -> torch.Tensor:
        inputs = self._inputs(model, text)
        if not self.recipe.headed:
            if model.config.is_encoder_decoder:
                inputs["labels"] = torch.tensor([text["labels"]], device=model.device)
            logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
            return logits
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        outputs = model(**inputs)
        if self.recipe.embeds:
            return pooled(outputs.last_hidden_state, inputs["attention_mask"], self.pooling)
        if self.recipe.objective == "token_classification":
            words: torch.Tensor = outputs.logits[0][torch.tensor(text["labels"]) != IGNORE]
            return words
        scores: torch.Tensor = outputs.logits
        return scores

    def _inputs(self, model: Any, text: dict[str, Any]) -> dict[str, torch.Tensor]:
        # Of one text there are no types of tokens.
        names = ["input_ids", *(["token_type_ids"] if text.get("token_type_ids") else [])]
        return {name: torch.tensor([text[name]], device=model.device) for name in names}

    def sentence_vectors(self, model: Any) -> Outputs:
        """The vectors that a `SentenceTransformer` makes of the same tokens."""
        found = []
        with torch.no_grad():
            for text in self.texts:
                ids = torch.tensor([text["input_ids"]], device=model.device)
                made = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
                found.append(made["sentence_embedding"].float().cpu())
        return found

    def compared(self, wanted: Outputs, found: Outputs) -> dict[str, Any]:
        """How far outputs are from those of the run's model; `distance` is relative to the largest of them."""
        before, after = torch.cat(wanted), torch.cat(found)
        figures: dict[str, Any] = {"distance": distance(wanted, found)}
        if not self.recipe.headed:
            divergence = functional.kl_div(
                after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none"
            )
            figures["divergence"] = float(divergence.sum(-1).mean())
            return figures | {"same_token": _same(before.argmax(-1), after.argmax(-1))}
        figures |= {"held_out": self.held_out, "texts": len(self.texts)}
        if self.recipe.embeds:
            cosines = functional.cosine_similarity(before, after)
            return figures | {"smallest_cosine": float(cosines.min()), "mean_cosine": float(cosines.mean())}
        apart = (before - after).abs()
        figures |= {"largest_difference": float(apart.max()), "mean_difference": float(apart.mean())}
        if self.recipe.objective == REWARD:
            pairs = before.view(-1, 2), after.view(-1, 2)
            figures["spread"] = float(before.std(correction=0))
            return figures | {"same_preference": _same(*((each[:, 0] - each[:, 1]).sign() for each in pairs))}
        return figures | {"places": len(before), "same_class": _same(before.argmax(-1), after.argmax(-1))}

    def sentence(self, proof: dict[str, Any]) -> str:
        """What was compared, and how near it is, in words."""
        if not self.recipe.headed:
            return (
                f"of {proof['tokens']} tokens of {self.rows} rows, the most likely next one is the run's for "
                f"{proof['same_token']:.1%}; KL divergence {proof['divergence']:.4f} nats a token, logits differ by "
                f"{proof['distance']:.1e} of the largest"
            )
        rows = f"{self.rows} {'held-out' if self.held_out else 'training'} {'pairs' if self.recipe.pairs else 'rows'}"
        if self.recipe.embeds:
            return (
                f"vectors of {proof['texts']} texts of {rows}: cosine with the run's at least "
                f"{proof['smallest_cosine']:.6f}, {proof['mean_cosine']:.6f} on average"
            )
        apart = f"differ by at most {proof['largest_difference']:.3g}, {proof['mean_difference']:.3g} on average"
        if self.recipe.objective == REWARD:
            return (
                f"of {rows}, {proof['same_preference']:.1%} have the same better answer as by the run's model; rewards "
                f"{apart}, and spread by {proof['spread']:.3g}"
            )
        of = f"{proof['places']} words of {rows}" if self.recipe.objective == "token_classification" else rows
        return f"of {of}, {proof['same_class']:.1%} have the same class as by the run's model; logits {apart}"


def distance(wanted: Outputs, found: Outputs) -> float:
    """The largest difference, relative to the largest output."""
    largest = max(float(each.abs().max()) for each in wanted if each.numel())
    pairs = zip(wanted, found, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs if one.numel()) / largest


def _same(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one == other).float().mean())
