"""A packed batch computes exactly what its documents compute alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    CTRLConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from recipes import recipe_of
from toolkit.common import UserError
from toolkit.data.batching.collate import Collator, isolates, mask_of
from toolkit.data.batching.part_batches import PartCollator
from toolkit.data.rows import IGNORE
from toolkit.models.attention import attention_kernels
from toolkit.train import batching

SIZE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ISOLATING = {
    "llama": LlamaConfig(**ROPE, **TOKENS),
    "qwen3": Qwen3Config(**ROPE, **TOKENS),
    "gemma": GemmaConfig(**ROPE, **TOKENS),
    "sliding_window": MistralConfig(**ROPE, **TOKENS, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, **NO_DROPOUT, **TOKENS),
}
LEAKING = {
    "alibi": BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4, **TOKENS),
    "recurrent": MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, **TOKENS),
    # Takes position_ids, yet attends across documents.
    "positions_only": OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, **TOKENS),
}
PACKED = [[5, 1, 9], [3, 7]]  # lengths of the documents in each row; the second row is padded


@pytest.fixture(autouse=True)
def documents_are_found() -> None:
    """As in a run with packed rows, whatever ran before."""
    attention_kernels.find_documents(by_positions=True)


def model_of(config: PreTrainedConfig, attention: str = "eager") -> PreTrainedModel:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float()
    for parameter in model.parameters():  # weights large enough that what a token sees shows in the logits
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def documents() -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(1, 97, (n,), generator=generator).tolist() for n in row] for row in PACKED]


def example(*parts: list[int]) -> dict[str, Any]:
    return {
        "input_ids": [token for part in parts for token in part],
        "labels": [label for part in parts for label in (IGNORE, *part[1:])],
        "seq_lengths": [len(part) for part in parts],
    }


def logits_and_gradients(model: PreTrainedModel, batches: list[dict[str, Any]]) -> tuple[list, list]:
    """Logits of every batch, and the gradients of the loss summed over all trained tokens of all batches."""
    model.zero_grad()
    logits = []
    for batch in batches:
        labels = batch.pop("labels")
        logits.append(model(**batch).logits)
        shifted = logits[-1][:, :-1].reshape(-1, 97)
        torch.nn.functional.cross_entropy(shifted, labels[:, 1:].reshape(-1), reduction="sum").backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [part.detach() for part in logits], gradients


def split(logits: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each document of the packed batch; those of padding are left out."""
    return [part for row, n in zip(logits, PACKED, strict=True) for part in row[: sum(n)].split(n)]


@pytest.mark.parametrize(
    ("layout", "counted"),
    [("padded", [9, 9, 16]), ("packed", [9, 9, 16]), ("flat", [9, 9, 16]), ("pairs", [9, 12, 32])],
)
def test_tokens_of_a_batch_are_counted_without_padding(layout: Any, counted: list[int]) -> None:
    """Two rows of 6 and 3, with 2 and 1 trained, which of pairs are the targets; filled up to multiples of 8."""
    rows = [
        {"input_ids": [0, 2, 3, 4, 5, 0], "labels": [IGNORE, IGNORE, IGNORE, IGNORE, 5, 0]},
        {"input_ids": [2, 3, 4], "labels": [IGNORE, IGNORE, 4]},
    ]
    if layout == "pairs":
        rows = [row | {"labels": [each for each in row["labels"] if each != IGNORE]} for row in rows]
    collator = Collator(0, layout, 8)
    assert collator.tokens(collator(rows)).tolist() == counted


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ISOLATING)
def test_packed_equals_unpacked(name: str, attention: str) -> None:
    model = model_of(ISOLATING[name], attention)
    rows = documents()
    each = [example(document) for row in rows for document in row]
    packed, packed_gradients = logits_and_gradients(model, [Collator(0, "packed")([example(*row) for row in rows])])
    padded, padded_gradients = logits_and_gradients(model, [Collator(0, "padded")(each)])
    alone, alone_gradients = logits_and_gradients(model, [Collator(0, "padded")([one]) for one in each])
    lengths = [length for row in PACKED for length in row]
    for one, in_pack, in_padding, length in zip(alone, split(packed[0]), padded[0], lengths, strict=True):
        torch.testing.assert_close(in_pack, one[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(in_padding[:length], one[0], atol=1e-5, rtol=1e-5)
    scale = max(gradient.abs().max() for gradient in alone_gradients)
    for one, in_pack, in_padding in zip(alone_gradients, packed_gradients, padded_gradients, strict=True):
        torch.testing.assert_close(in_pack / scale, one / scale, atol=1e-5, rtol=0)
        torch.testing.assert_close(in_padding / scale, one / scale, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:_compile flag:DeprecationWarning", "ignore:flex_attention called without")
@pytest.mark.parametrize(
    ("attention", "compiled"),
    [
        ("eager", False),
        ("sdpa", False),
        # The mask is the same function either way; only a compiler, of half a minute, is left out.
        ("flex_attention", False),
        pytest.param("flex_attention", True, marks=pytest.mark.matrix),
    ],
)
def test_a_document_does_not_see_its_neighbours(attention: str, compiled: bool) -> None:
    model = model_of(ISOLATING["llama"], attention)
    row, other = documents()
    changed = [[token % 96 + 1 for token in row[0]], *row[1:]]
    # Flex attention has no backward pass on the CPU.
    with torch.no_grad(), torch.compiler.set_stance("default" if compiled else "force_eager"):
        before, after = (
            model(**Collator(0, "packed")([example(*first), example(*other)])).logits for first in (row, changed)
        )
    (first, *rest), (first_changed, *rest_changed) = split(before), split(after)
    assert not torch.allclose(first, first_changed, atol=1e-2)
    for one, same in zip(rest, rest_changed, strict=True):
        torch.testing.assert_close(one, same, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_isolation_is_measured_on_the_model(attention: str) -> None:
    for name, config in ISOLATING.items():
        model = model_of(config, attention)
        assert isolates(model, Collator(0, "packed")), name
        assert model.training and all(parameter.grad is None for parameter in model.parameters())
    for name, config in LEAKING.items():
        if attention == "eager":
            assert not isolates(model_of(config, attention), Collator(0, "packed")), name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_isolation_with_frozen_weights_and_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(ISOLATING["llama"]), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert isolates(model, Collator(0, "packed"))


def test_isolation_of_code_that_writes_into_embeddings() -> None:
    model = model_of(CTRLConfig(n_layer=2, n_embd=32, dff=64, n_head=4, vocab_size=128))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert isolates(model, Collator(0, "packed"))


def test_a_layout_that_the_backend_does_not_read_does_not_isolate() -> None:
    # With a cache, Transformers makes no mask from positions, and eager attention reads no lengths.
    assert not isolates(model_of(ISOLATING["llama"]), Collator(0, "flat"))


def test_weights_that_are_no_numbers_are_not_said_to_let_documents_see_each_other() -> None:
    model = model_of(ISOLATING["llama"])
    with torch.no_grad():
        next(model.parameters())[3] = float("nan")
    with pytest.raises(UserError, match="gives NaN or infinite numbers before it is trained"):
        isolates(model, Collator(0, "packed"))


def test_flat_layout_states_boundaries_as_host_integers() -> None:
    rows = documents()
    batch = Collator(0, "flat")([example(*row) for row in rows])
    lengths = [5, 1, 9, 3, 7]
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, 25)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 6, 15, 18, 25]
    assert batch["cu_seq_lens_k"].dtype == torch.int32
    assert type(batch["max_length_q"]) is int and batch["max_length_q"] == batch["max_length_k"] == 9
    assert batch["position_ids"][0].tolist() == [p for n in lengths for p in range(n)]
    for start in batch["cu_seq_lens_q"][:-1]:
        assert batch["labels"][0, start] == IGNORE
    plain = [{"input_ids": row[0], "labels": example(row[0])["labels"]} for row in rows]
    without_lengths = Collator(0, "flat")(plain)
    assert without_lengths["cu_seq_lens_q"].tolist() == [0, 5, 8]
    assert set(without_lengths) == set(batch) and "attention_mask" not in batch


def test_padded_layout() -> None:
    batch = Collator(7, "padded")([example([1, 2, 3]), example([4, 5, 6, 7, 8])])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 7], [4, 5, 6, 7, 8]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"][0].tolist() == [IGNORE, 2, 3] + [IGNORE] * 2
    assert set(batch) == {"input_ids", "attention_mask", "labels", "label_positions"}
    # Where nothing is padded nobody has to look whether a mask hides anything.
    alike = Collator(7, "padded")([example([1, 2, 3]), example([4, 5, 6])])
    assert set(alike) == {"input_ids", "labels", "label_positions"} and mask_of(alike).tolist() == [[1] * 3] * 2
    # T5Gemma and DPR take tokens for padding by their id, where there is no mask.
    pairs = {pad: Collator(pad, "pairs")([example([1, 2, 3]), example([4, 5, 6])]) for pad in (3, 7)}
    assert "attention_mask" not in pairs[7] and pairs[3]["attention_mask"].all()


@pytest.mark.parametrize("name", ISOLATING)
def test_beginnings_that_stand_once_give_the_losses_and_gradients_of_all(name: str) -> None:
    rng = np.random.default_rng(5)
    base, rows = rng.integers(1, 97, 40).tolist(), []
    for begin in (20, 20, 0, 33, 33, 12, 20):
        ids = base[:begin] + rng.integers(1, 97, rng.integers(2, 12)).tolist()
        start = int(rng.integers(max(begin, 1), len(ids)))
        rows.append({"input_ids": ids, "labels": [IGNORE] * start + ids[start:]})
    pair = [{key: rows[0][key] + rows[1][key] for key in rows[0]}]  # Of packed rows, too.
    pair[0]["seq_lengths"] = [len(row["input_ids"]) for row in rows[:2]]
    attention_kernels.register()
    model = model_of(ISOLATING[name], "torch_varlen")
    sharing, apart = Collator(0, "flat", 8, shares=True), Collator(0, "flat", 8)
    assert isolates(model, sharing)
    for examples in (rows, pair + rows[2:], rows[:1]):
        found = []
        for collator in (apart, sharing):
            batch = collator(examples)
            tokens, examples_of = batch["input_ids"].shape[1], collator.examples_of(examples, batch)
            labels, positions = batch.pop("labels").roll(-1)[0], batch.pop("label_positions")
            batch.pop("text_counts", None)
            model.zero_grad()
            losses = torch.nn.functional.cross_entropy(model(**batch).logits[0], labels, reduction="none")
            trained = labels[positions] != IGNORE
            places, first = np.unique(positions[trained].numpy(), return_index=True)
            of_each = torch.zeros(len(examples)).index_add(0, examples_of[trained][first], losses[torch.tensor(places)])
            of_each.sum().backward()
            found.append((tokens, of_each.detach(), [each.grad.clone() for each in model.parameters()]))
        assert found[1][0] < found[0][0] or len(examples) == 1
        torch.testing.assert_close(found[1][1], found[0][1])
        for one, other in zip(found[1][2], found[0][2], strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["padded", "packed", "flat"])
def test_positions_of_labels_are_those_before_trained_tokens(layout: Any) -> None:
    rows = [example([1, 2, 3, 4]), example([5, 6, 7, 8, 9, 10])]
    rows[1]["labels"][1:3] = [IGNORE, IGNORE]
    batch = Collator(0, layout)(rows)
    positions, following = batch["label_positions"], batch["labels"].flatten().roll(-1)
    trained = (following != IGNORE).nonzero().flatten()
    assert positions[: len(trained)].equal(trained) and len(trained) == 6
    assert len(positions) == 16 and (following[positions[len(trained) :]] == IGNORE).all()

    rows[0]["labels"], rows[1]["labels"] = [IGNORE] * 4, [IGNORE] * 6
    untrained = Collator(0, layout)(rows)
    assert (untrained["labels"].flatten().roll(-1)[untrained["label_positions"]] == IGNORE).all()
    assert len(untrained["label_positions"]) == 16


def test_rows_are_filled_up_to_a_multiple() -> None:
    row = example([1, 2, 3], [4, 5])
    packed = Collator(7, "packed", 8)([row])
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 5, 7, 7, 7]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed["labels"][0, 5:].tolist() == [IGNORE] * 3
    assert packed["text_counts"].tolist() == [[True] * 5 + [False] * 3]
    assert "text_counts" not in Collator(7, "packed", 5)([row])
    padded = Collator(7, "padded", 8)([example([1] * 9)])
    assert padded["input_ids"].shape == (1, 16) and padded["attention_mask"].sum() == 9
    assert isolates(model_of(ISOLATING["llama"]), Collator(0, "packed", 16))


def test_rows_are_not_filled_up_beyond_the_longest_or_where_no_mask_would_be_needed() -> None:
    collator = Collator(7, "padded", 8, longest=12, lone=False)
    nine, ten = example([1] * 9), example([1] * 10)
    assert collator([nine, ten])["input_ids"].shape == (2, 12)
    assert collator([nine, example([1] * 3)])["labels"].shape == (2, 12)
    assert collator([nine])["input_ids"].shape == (1, 9) and "attention_mask" not in collator([nine])
    assert collator.width(np.array([1, 8, 9, 12, 14])).tolist() == [8, 8, 12, 12, 14]


def test_first_token_of_a_document_must_not_be_trained() -> None:
    row = example([1, 2], [3, 4])
    row["labels"][2] = 3
    with pytest.raises(AssertionError, match="first token"):
        Collator(0, "packed")([row])
    with pytest.raises(AssertionError, match="isolation"):
        Collator(0, "padded")([example([1, 2], [3, 4])])


def test_padding_of_sources_and_targets_does_not_change_the_loss() -> None:
    torch.manual_seed(0)
    size = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=97, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, **size)
    ).eval()
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 2]}, {"input_ids": [9, 2], "labels": [11, 12, 13, 2]}]
    collator = Collator(1, "pairs")
    batch = collator(rows)
    assert batch["labels"].tolist() == [[8, 2, IGNORE, IGNORE], [11, 12, 13, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    alone = sum(model(**collator([row])).loss * len(row["labels"]) for row in rows)
    torch.testing.assert_close(model(**batch).loss * 6, alone)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_of_a_row_are_the_row_and_each_label_is_in_one(size: int) -> None:
    random = np.random.default_rng(size)
    rows = []
    for _ in range(3):
        ids, documents = random.integers(1, 97, 30), [11, 19]
        labels = np.where(random.random(30) < 0.6, ids, IGNORE)
        labels[[0, 11]] = IGNORE
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": documents})
    flat = Collator(0, "flat", pad_to_multiple_of=4 * size)
    whole, parts = flat(rows), [PartCollator(flat, index, size)(rows) for index in range(size)]
    tokens = whole["input_ids"].shape[1]
    assert whole["text_counts"][0, :90].all() and not whole["text_counts"][0, 90:].any()
    for key in ("input_ids", "position_ids", "text_counts"):
        assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
    # Rolled by one they follow their tokens, within parts as in the whole.
    following = torch.cat([part["labels"].roll(-1) for part in parts], 1)
    assert torch.equal(following, whole["labels"].roll(-1))
    for part in parts:
        assert part["row_tokens"] == tokens and part["input_ids"].shape[1] == tokens // size
        assert torch.equal(part["cu_seq_lens_q"], whole["cu_seq_lens_q"])
        scored = part["labels"].roll(-1)[0, part["label_positions"]]
        assert (scored != IGNORE).sum() == (part["labels"] != IGNORE).sum()


def test_a_part_in_which_every_token_is_trained_scores_each_once() -> None:
    row = {"input_ids": np.arange(1, 25), "labels": np.append(IGNORE, np.arange(2, 25)), "seq_lengths": [24]}
    first = PartCollator(Collator(0, "flat"), 0, 2)([row])
    assert first["label_positions"].tolist() == list(range(12))


def test_a_part_of_two_pieces_is_told_what_each_of_them_sees() -> None:
    row = {"input_ids": list(range(16)), "labels": [IGNORE, *range(1, 16)], "seq_lengths": [3, 9, 4]}
    row["labels"][3] = row["labels"][12] = IGNORE
    whole = Collator(0, "flat", 4)
    parts = [PartCollator(whole, index, 2, 2)([row]) for index in range(2)]
    assert [part["input_ids"][0].tolist() for part in parts] == [
        [0, 1, 2, 3, 12, 13, 14, 15],
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    # Of each token the label that follows it, rolled by one.
    assert parts[0]["labels"][0].roll(-1).tolist() == [1, 2, IGNORE, 4, 13, 14, 15, IGNORE]
    front, end = parts[0]["row_chunks"]
    assert (front["first"], front["end"], end["first"], end["end"]) == (0, 4, 12, 16)
    assert front["cu_seq_lens_q"].tolist() == front["cu_seq_lens_k"].tolist() == [0, 3, 4]
    front, end = parts[1]["row_chunks"]
    # Tokens 4 to 7 and 8 to 11 of the document that begins at 3.
    assert (front["first"], front["end"], end["first"], end["end"]) == (3, 8, 3, 12)
    assert (front["cu_seq_lens_q"].tolist(), front["cu_seq_lens_k"].tolist()) == ([0, 4], [0, 5])
    assert (end["max_length_q"], end["max_length_k"]) == (4, 9)


def test_tokens_of_a_flat_batch_fill_the_units_of_fp8_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching.device, "kind", lambda: "cuda")
    rows = [{"input_ids": [5] * length, "labels": [IGNORE] + [5] * (length - 1)} for length in (9, 4)]
    for precision, tokens in (("bf16", 13), ("fp8", 16), ("fp8_rowwise", 16), ("pure_bf16", 13), ("pure_fp8", 16)):
        recipe = recipe_of("data.packing=true", f"precision={precision}")
        batch = batching.collator(recipe, "torch_varlen", SimpleNamespace(pad_token_id=0), compiles=True)(rows)
        assert batch["input_ids"].shape == (1, tokens)
        # What fills it up is a document of its own.
        assert batch["cu_seq_lens_q"].tolist() == [0, 9, 13, *([16] if tokens > 13 else [])]


def of_themselves(lengths: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of documents whose tokens all are the row's number, every second of which is trained."""
    rows = []
    for number, documents in enumerate(lengths, start=1):
        ids = np.full(sum(documents), number)
        labels = np.where(np.arange(len(ids)) % 2, ids, IGNORE)
        labels[np.cumsum(documents) - documents] = IGNORE
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": documents})
    return rows


@pytest.mark.parametrize("layout", ["padded", "packed", "flat", "pairs"])
def test_the_row_of_each_loss_is_known(layout: Any) -> None:
    rows = of_themselves([[7], [3], [12], [4]] if layout in ("padded", "pairs") else [[4, 3], [3], [6, 2, 4], [4]])
    collator = Collator(0, layout, pad_to_multiple_of=8)
    batch = collator(rows)
    labels = batch["labels"].flatten() if layout == "pairs" else batch["labels"].flatten().roll(-1)
    scored = labels[batch["label_positions"]]
    of = collator.examples_of(rows, batch)
    assert of.shape == scored.shape and of.min() >= 0 and of.max() < len(rows)
    assert torch.equal(of[scored != IGNORE] + 1, scored[scored != IGNORE])


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_the_row_of_each_loss_is_known_where_processes_have_parts_of_rows(size: int, chunks: int) -> None:
    rows = of_themselves([[4, 3], [13], [6, 2, 4], [4]])
    whole = Collator(0, "flat", size * chunks)
    found = torch.zeros(4, dtype=torch.long)
    for index in range(size):
        collator = PartCollator(whole, index, size, chunks)
        batch = collator(rows)
        scored = batch["labels"].flatten().roll(-1)[batch["label_positions"]]
        of = collator.examples_of(rows, batch)
        assert torch.equal(of[scored != IGNORE] + 1, scored[scored != IGNORE])
        found += torch.bincount(of[scored != IGNORE], minlength=4)
    assert found.tolist() == [(row["labels"] != IGNORE).sum() for row in rows]
