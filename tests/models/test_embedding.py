"""Vectors of texts: pooling, and losses written out and sentence-transformers' own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_encoder
from torch.nn import functional as F

from toolkit.common import UserError
from toolkit.models.load import ModelSource
from toolkit.models.losses.embedding import losses_and_gradient, pooled, ranks
from toolkit.models.sentence_files import check_base, pooling_of
from toolkit.recipe import Recipe
from toolkit.recipe.embedding import Embedding


def drawn(rows: int, texts: int = 2, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and keys of texts that all differ."""
    generator = torch.Generator().manual_seed(rows + texts)
    vectors = F.normalize(torch.randn(rows, texts, width, generator=generator, dtype=torch.float64), dim=-1)
    return vectors, torch.arange(rows * texts).view(rows, texts)


def settings(**values: Any) -> Embedding:
    return Embedding.model_validate(values)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_part_of_a_vector(side: str) -> None:
    hidden = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0] if side == "right" else [0, 0, 1, 1, 1]])
    real = hidden[1, :3] if side == "right" else hidden[1, 2:]
    for pooling, wanted in (("mean", real.mean(0)), ("cls", real[0]), ("last", real[-1])):
        found = pooled(hidden, mask, pooling)
        assert torch.allclose(found[1], wanted / wanted.norm(), atol=1e-6), pooling
        assert torch.allclose(found.norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("texts", [2, 4])
@pytest.mark.parametrize("dims", [[], [12, 5]])
def test_the_ranking_loss_and_its_gradient_are_those_written_out(texts: int, dims: list[int]) -> None:
    vectors, keys = drawn(6, texts)
    asked = settings(temperature=0.1, dims=dims, negatives=texts - 2)
    losses, gradient = losses_and_gradient(asked, vectors, keys, torch.zeros(6))
    leaf = vectors.clone().requires_grad_()
    wanted = []
    for row in range(6):
        total = torch.zeros((), dtype=torch.float64)
        for size in dims or [12]:
            cut = leaf[:, :, :size] / leaf[:, :, :size].norm(dim=-1, keepdim=True)
            candidates = [cut[other, 1] for other in range(6)]
            candidates += [cut[other, place] for other in range(6) for place in range(2, texts)]
            weights = torch.stack([torch.exp(cut[row, 0] @ each / 0.1) for each in candidates])
            total = total - torch.log(weights[row] / weights.sum())
        wanted.append(total)
    torch.stack(wanted).sum().backward()
    assert torch.allclose(losses, torch.stack(wanted).detach(), rtol=1e-12)
    assert leaf.grad is not None and torch.allclose(gradient, leaf.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("texts", [2, 3])
def test_the_ranking_loss_is_that_of_sentence_transformers(texts: int) -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    vectors, keys = drawn(7, texts)
    own, gradient = losses_and_gradient(settings(negatives=texts - 2), vectors, keys, torch.zeros(7))
    leaf = vectors.clone().requires_grad_()
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity()).compute_loss_from_embeddings(
        [leaf[:, place] for place in range(texts)], None
    )
    theirs.backward()
    assert own.mean().item() == pytest.approx(theirs.item(), rel=1e-9)
    assert leaf.grad is not None and torch.allclose(gradient / 7, leaf.grad, rtol=1e-6, atol=1e-9)


def test_the_loss_of_scores_is_cosent_written_out_and_sentence_transformers() -> None:
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    vectors, keys = drawn(8)
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.3, 0.9], dtype=torch.float64)
    own, gradient = losses_and_gradient(settings(loss="cosent"), vectors, keys, scores)
    cosines = [float(one @ other) for one, other in vectors]
    wanted = math.log(
        1 + sum(math.exp(20 * (cosines[i] - cosines[j])) for i in range(8) for j in range(8) if scores[i] < scores[j])
    )
    assert own.tolist() == pytest.approx([wanted] * 8, rel=1e-9)
    leaf = vectors.clone().requires_grad_()
    theirs = losses.CoSENTLoss(torch.nn.Identity()).compute_loss_from_embeddings([leaf[:, 0], leaf[:, 1]], scores)
    theirs.backward()
    assert wanted == pytest.approx(theirs.item(), rel=1e-6)
    assert leaf.grad is not None and torch.allclose(gradient / 8, leaf.grad, rtol=1e-5, atol=1e-8)


def test_what_belongs_to_an_anchor_is_no_negative_of_it() -> None:
    """Rows 0 and 1 share their positive, rows 2 and 3 their anchor, the positive of 4 is the anchor of 5, and a
    negative of row 5 is the positive of row 0."""
    vectors, keys = drawn(6, 3)
    keys[1, 1] = keys[0, 1]
    keys[3, 0] = keys[2, 0]
    keys[4, 1] = keys[5, 0]
    keys[5, 2] = keys[0, 1]
    losses, _ = losses_and_gradient(settings(negatives=1), vectors, keys, torch.zeros(6))
    places = [(row, 1) for row in range(6)] + [(row, 2) for row in range(6)]
    left_out = {0: [(1, 1), (5, 2)], 1: [(0, 1), (5, 2)], 2: [(3, 1)], 3: [(2, 1)], 4: [], 5: [(4, 1)]}
    for row in range(6):
        others = [place for place in places if place not in left_out[row]]
        weights = [math.exp(20 * float(vectors[row, 0] @ vectors[place])) for place in others]
        own = math.exp(20 * float(vectors[row, 0] @ vectors[row, 1]))
        assert losses[row].item() == pytest.approx(-math.log(own / sum(weights)), rel=1e-9), row


def test_a_positive_of_the_same_anchor_is_known_wherever_it_stands() -> None:
    """Rows 0 and 1 ask the same; the positive of row 1 is that of row 2, too, and a negative of row 3."""
    vectors, keys = drawn(4, 3)
    keys[1, 0], keys[2, 1], keys[3, 2] = keys[0, 0], keys[1, 1], keys[1, 1]
    vectors[2, 1] = vectors[3, 2] = vectors[1, 1] = vectors[0, 0]
    losses, _ = losses_and_gradient(settings(negatives=1), vectors, keys, torch.zeros(4))
    candidates = [(0, 1), (3, 1), (0, 2), (1, 2), (2, 2)]
    weights = [math.exp(20 * float(vectors[0, 0] @ vectors[place])) for place in candidates]
    assert losses[0].item() == pytest.approx(-math.log(weights[0] / sum(weights)), rel=1e-9)
    assert ranks(vectors, keys)[0] == 1 + sum(weight >= weights[0] for weight in weights[1:])
    # The text that belongs to anchor 0 comes first among the rows where it does not.
    order = [2, 3, 0, 1]
    assert ranks(vectors[order], keys[order])[2] == ranks(vectors, keys)[0]


def test_places_are_counted_among_different_texts() -> None:
    anchors = torch.eye(3, dtype=torch.float64)
    near = F.normalize(torch.tensor([[1.0, 0.1, 0], [0, 1, 0.1], [0.9, 0, 1]], dtype=torch.float64), dim=-1)
    negatives = F.normalize(torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 0, 1]], dtype=torch.float64), dim=-1)
    vectors = torch.stack([anchors, near, negatives], 1)
    keys = torch.tensor([[0, 1, 2], [3, 4, 2], [5, 6, 7]])
    # The negative of rows 0 and 1 is one text, nearer to anchor 0 than its positive; that of row 2 to anchor 2.
    assert ranks(vectors, keys).tolist() == [2, 1, 2]
    same = torch.ones_like(vectors) / math.sqrt(3)
    assert ranks(same, keys).tolist() == [5, 5, 5], "a model that tells nothing apart finds nothing"
    assert ranks(same * math.nan, keys).tolist() == [5, 5, 5], "nor does one whose numbers have broken"


@pytest.mark.parametrize("seed", range(8))
def test_rounding_finds_nothing_among_equal_vectors(seed: int) -> None:
    """In fp32, where sums of the same products differ by the order in which a kernel adds them up."""
    for width in (17, 64, 384, 576):
        vector = F.normalize(torch.randn(width, generator=torch.Generator().manual_seed(seed)), dim=-1)
        found = ranks(vector.expand(200, 2, width).contiguous(), torch.arange(400).view(200, 2))
        assert found.tolist() == [200] * 200


@pytest.mark.parametrize(
    ("asked", "told", "kind", "wanted"),
    [
        ("auto", None, "llama", "last"),
        ("auto", None, "bert", "mean"),
        ("auto", None, "modernbert", "mean"),
        ("auto", None, "mpnet", "mean"),
        ("auto", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "bert", "cls"),
        ("auto", {"pooling_mode": "lasttoken"}, "bert", "last"),
        ("mean", {"pooling_mode_cls_token": True}, "llama", "mean"),
    ],
)
def test_a_models_own_pooling_is_taken_over(asked: str, told: Any, kind: str, wanted: str, tmp_path: Any) -> None:
    from transformers import AutoConfig

    file = tmp_path / "config.json"
    file.write_text(json.dumps(told))
    recipe = Recipe.model_validate(
        {"model": {"path": "x"}, "data": {"sources": ["x"]}, "objective": "embedding", "embedding": {"pooling": asked}}
    )
    assert pooling_of(recipe, AutoConfig.for_model(kind), file if told else None) == wanted
    file.write_text('{"pooling_mode_max_tokens": true}')
    if asked == "auto":
        with pytest.raises(UserError, match="pools by pooling_mode_max_tokens"):
            pooling_of(recipe, AutoConfig.for_model(kind), file)


def test_what_a_base_does_beyond_pooling_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_encoder("bert", tmp_path / "bert")

    def base(*kinds: str, **prompts: str) -> None:
        modules = [{"idx": n, "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)]
        (tmp_path / "bert" / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "bert" / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    def check(**settings: Any) -> None:
        caplog.clear()
        keys = {"model": {"path": str(tmp_path / "bert")}, "data": {"sources": ["x"]}, "objective": "embedding"}
        source = ModelSource.open(Recipe.model_validate(keys | {"embedding": settings}))
        check_base(source.recipe, source.file)

    base("Transformer", "Pooling", "Normalize", query="", document="")
    check()
    assert not caplog.messages

    base("Transformer", "Pooling", "Dense", "Normalize")
    with pytest.raises(UserError, match="has Dense, which is neither read nor trained") as caught:
        check()
    assert "embedding.pooling" in str(caught.value)
    check(pooling="mean")
    assert "Dense" in caplog.text

    base("Transformer", "Pooling", query="find: ", document="text: ", sts="like: ")
    check()
    assert all(word in caplog.text for word in ("'find: '", "'text: '", "'like: '", "embedding.query_prompt"))
    check(query_prompt="find: ")
    assert "'text: '" in caplog.text and "'find: '" not in caplog.text
    check(query_prompt="find: ", document_prompt="text: ")
    assert not caplog.messages
