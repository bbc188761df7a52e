"""Encoder-decoders score trained tokens alone, in chunks; what their own forward does around the head stays."""

from __future__ import annotations

from typing import Any

import models_doc
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.data.batching.collate import Collator
from toolkit.models.output_heads import head_chunk
from toolkit.models.output_heads.head_choice import add_output_head, choose
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.tiny import tiny_model

TARGETS = ([7, 9, 1], [8, 6, 11, 12, 13, 14, 15, 16, 1])


@pytest.mark.parametrize(
    ("kind", "head"), [("bart", "fused"), ("t5", "fused"), ("prophetnet", "own"), ("t5gemma", "own")]
)
def test_loss_and_gradients_are_those_of_a_plain_loop(kind: str, head: str) -> None:
    assert models_doc.look(kind, "seq2seq").trains == head


def batch() -> dict[str, torch.Tensor]:
    return Collator(0, "pairs")([{"input_ids": [5, 6, 7, 8, 1], "labels": each} for each in TARGETS])


def model(kind: str) -> Any:
    torch.manual_seed(0)
    return tiny_model(models_doc.stated(kind, "seq2seq"), "seq2seq")


class Largest(TorchDispatchMode):
    """The most tokens whose logits were scored at once."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "_log_softmax" in str(func):
            self.rows = max(self.rows, made[..., 0].numel())
        return made


def scored(kind: str, choice: HeadChoice) -> tuple[int, torch.Tensor, torch.Tensor]:
    """The most logits at once, the scores, and those of the whole logits."""
    one, rows = model(kind), batch()
    plain = {key: rows[key] for key in rows if key != "label_positions"}
    if hasattr(one, "final_logits_bias"):
        one.final_logits_bias.normal_()
    logits = one(**plain).logits.log_softmax(-1).flatten(0, 1)
    expected = logits.gather(1, rows["labels"].flatten().clamp(min=0)[:, None])[rows["labels"].flatten() != -100, 0]
    names = list(one.state_dict())
    add_output_head(one, choice, "seq2seq")
    with Largest() as largest:
        scores = one(**rows, fused_lm_head=True).log_probs[0]
    scores.sum().backward()
    assert list(one.state_dict()) == names
    again = one(**plain).logits.log_softmax(-1).flatten(0, 1)
    assert torch.equal(again, logits), "the bias behind the head is back"
    assert one.generate(rows["input_ids"], max_new_tokens=3).shape[0] == 2
    return largest.rows, scores, expected


@pytest.mark.parametrize("kind", ["bart", "t5", "mbart", "blenderbot", "m2m_100"])
def test_scores_are_of_trained_tokens_and_no_more_than_a_chunk_at_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_chunk, "ON_CPU", 4)
    assert choose(models_doc.stated(kind, "seq2seq"), objective="seq2seq").fused
    rows, scores, expected = scored(kind, HeadChoice())
    assert rows <= 4
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("selects", "most"), [(True, 12), (False, 18)])
def test_a_head_that_cannot_be_called_alone_gets_trained_positions_where_it_may(selects: bool, most: int) -> None:
    """T5Gemma caps its logits."""
    choice = choose(models_doc.stated("t5gemma", "seq2seq"), objective="seq2seq")
    assert (choice.fused, choice.selects) == (False, True)
    rows, scores, expected = scored("t5gemma", HeadChoice(fused=False, selects=selects))
    assert rows == most
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
