"""Heads and vectors of decoders, asked of texts that lie end to end: as by Transformers of each text by itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models_doc import stated
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from toolkit.data.batching.collate import Collator
from toolkit.data.batching.head_batches import HeadCollator, apart, texts_of, tokens_of
from toolkit.data.rows import IGNORE
from toolkit.models.attention import backends
from toolkit.models.attention.attention_kernels import register
from toolkit.models.heads import read_at, with_labels
from toolkit.models.losses.embedding import pooled, pooled_flat
from toolkit.models.tiny import tiny_model
from toolkit.recipe.model_configs import _SCORED_FLAT, scored_flat

PAD = 0
TEXTS = [[5, 6, 7, 8, 9, PAD], [11, 12], [21] * 19, [PAD, 31, 32, PAD, PAD]]
"""Some end with what their model takes for padding, as those do whose tokenizer pads with its end of a text."""
CASES = [
    (kind, objective)
    for objective, kinds in (
        ("reward", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("classification", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
        ("token_classification", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
        ("embedding", MODEL_MAPPING_NAMES),
    )
    for kind in sorted(_SCORED_FLAT.intersection(kinds))
]


def model_of(kind: str, objective: str) -> Any:
    config = stated(kind, "sft")
    for name in backends._ATTENTION_DROPOUT:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    if objective != "embedding":
        labels = ["reward"] if objective == "reward" else ["a", "b", "c"]
        config = with_labels(config, labels, PAD, objective != "token_classification")
    assert scored_flat(config.to_dict()) and not backends.unfit("torch_varlen", config.to_dict(), "float32")
    model = tiny_model(config, objective)
    model.config.get_text_config().use_cache = False
    return model


def rows_of(objective: str) -> list[dict[str, Any]]:
    """The texts in rows of the objective: by themselves, or two of them each."""
    if objective == "token_classification":
        return [{"input_ids": ids, "labels": [1, *[IGNORE] * (len(ids) - 2), 2]} for ids in TEXTS]
    if objective == "classification":
        return [{"input_ids": ids, "labels": [1]} for ids in TEXTS]
    rows = []
    for number, pair in enumerate([TEXTS[:2], TEXTS[2:]]):
        ids, lengths = [*itertools.chain(*pair)], [*map(len, pair)]
        row = {"input_ids": ids, "labels": [IGNORE] * len(ids), "seq_lengths": lengths}
        rows.append(row | {"row": number, "keys": [2 * number, 2 * number + 1], "score": 1.0})
    return rows


def answers(model: Any, batch: dict[str, Any], objective: str, pooling: str) -> torch.Tensor:
    """Scores or vectors of texts, (texts, outputs), or scores of words."""
    read = {name: each for name, each in batch.items() if name not in ("labels", "rows", "keys", "scores", "read_at")}
    if objective == "embedding":
        hidden = model(**read).last_hidden_state
        if "read_at" in batch:
            return pooled_flat(hidden, batch["cu_seq_lens_q"], texts_of(batch), pooling)
        return pooled(hidden, torch.ones_like(batch["input_ids"]), pooling)
    if objective == "token_classification":
        return model(**read).logits[batch["labels"] != IGNORE]
    if "read_at" not in batch:
        return model(**read).logits
    with read_at(model.score, batch["read_at"]):
        return model(**read).logits.view(texts_of(batch), -1)


def gradients(model: Any, found: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    (found * weights).sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize(("kind", "objective"), CASES)
def test_texts_end_to_end_are_scored_as_each_by_itself(kind: str, objective: str) -> None:
    model = model_of(kind, objective)
    register()
    batch = HeadCollator(Collator(PAD, "flat", 8), objective)(rows_of(objective))
    assert batch["input_ids"].shape == (1, 32) and texts_of(batch) == 4 and tokens_of(batch) == 32
    of_words = objective == "token_classification"
    alone = HeadCollator(Collator(PAD, "padded"), objective if of_words else "classification")
    each = [alone([row]) for row in rows_of("token_classification" if of_words else "classification")]
    for pooling in ["mean", "cls", "last"] if objective == "embedding" else [""]:
        model.set_attn_implementation("torch_varlen")
        flat = answers(model, batch, objective, pooling)
        found = gradients(model, flat)
        model.set_attn_implementation("eager")
        by_themselves = torch.cat([answers(model, one, objective, pooling) for one in each])
        torch.testing.assert_close(flat, by_themselves, rtol=2e-5, atol=2e-5)
        wanted = gradients(model, by_themselves)
        assert len(found) == len(wanted) > 0
        largest = max(gradient.abs().max() for gradient in wanted)
        assert all((one - other).abs().max() < 2e-5 * largest for one, other in zip(found, wanted, strict=True))


def test_words_are_told_apart_text_by_text() -> None:
    batch = HeadCollator(Collator(PAD, "flat", 8), "token_classification")(rows_of("token_classification"))
    parts = apart(batch["labels"], batch)
    assert [len(each) for each in parts] == [*map(len, TEXTS)]
    assert [each[0].item() for each in parts] == [1] * 4 and [each[-1].item() for each in parts] == [2] * 4


@pytest.mark.parametrize("changes", [{"use_bidirectional_attention": True}, {"is_causal": False}, {"auto_map": {}}])
def test_models_that_look_both_ways_read_padded_rows(changes: dict[str, Any]) -> None:
    config = stated("qwen3", "sft").to_dict()
    available = dict.fromkeys(backends.IMPLEMENTATIONS, "ok")
    assert backends.resolve("auto", config, "bfloat16", available, headed=True) == "torch_varlen"
    assert backends.resolve("auto", config | changes, "bfloat16", available, headed=True) == "sdpa"
    assert backends.resolve("auto", config | changes, "bfloat16", available) == "torch_varlen"
