"""Held-out loss per token, and answers that do not depend on how prompts are batched."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from harness import metrics
from head_products import HeadProducts
from small import LORA, NF4, SEQ2SEQ, place_with, set_up, with_callbacks
from tiny import tiny_kind
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit.train.evaluation.evaluate import answer, generate, generated_metrics, held_out_loss
from toolkit.train.evaluation.generation import inputs_on
from toolkit.train.main import main

place = place_with("llama", "moe", "gpt2", "blenderbot")


LAYOUTS = [
    ("llama", "padded", ["model.attention=sdpa"]),
    ("llama", "packed", ["data.packing=true", "model.attention=sdpa"]),
    ("llama", "flat", ["data.packing=true"]),
    ("moe", "flat", []),
    ("gpt2", "padded", []),
    ("blenderbot", "pairs", SEQ2SEQ),
]


@pytest.mark.parametrize(("model", "layout", "kind"), LAYOUTS)
def test_held_out_loss_is_the_mean_over_trained_tokens(model: str, layout: str, kind: list[str]) -> None:
    """And is known of each row; also for a mixture of experts, whose training loss has the routers' auxiliary loss in
    it."""
    training = set_up(f"model.path={model}", *kind, "data.eval_split=0.2")
    assert training.trainer.data_collator.layout == layout
    training.trainer.model.train()
    found, rows = held_out_loss(training.trainer, 3, lambda batch, total: None)
    assert training.trainer.model.training
    network = training.trainer.model.eval()
    totals, counts = [], []
    for row in training.prepared.eval:
        labels = torch.tensor(row["labels"])
        with torch.no_grad():
            if model == "blenderbot":
                logits = network(input_ids=torch.tensor([row["input_ids"]]), labels=labels[None]).logits[0]
            else:
                logits, labels = network(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1], labels[1:]
        totals.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item())
        counts.append(int(labels.ne(-100).sum()))
    assert rows is not None and rows[1] == counts and rows[0] == pytest.approx(totals, rel=1e-5)
    total, count = sum(totals), sum(counts)
    x, n = torch.tensor(totals, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)
    variance = (x - total / count * n).square().sum() * 8 / 7 / count**2
    assert len(counts) == 8 and found["eval_loss_plus_minus"] == pytest.approx(
        2.36462 * variance.item() ** 0.5, rel=1e-3
    )
    assert found["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert found["eval_tokens"] == count
    notes = training.folder.manifest().notes
    assert len(notes) == (model == "moe") and all("routers' balance loss" in note for note in notes)


def test_logits_of_decoders_are_never_all_built() -> None:
    """The held-out pass runs the output head over trained tokens alone."""
    training = set_up("data.eval_split=0.2")
    with HeadProducts(training.trainer.model.config.vocab_size) as head:
        scored, _ = held_out_loss(training.trainer, 4, lambda batch, total: None)
    assert scored["eval_tokens"] <= sum(head.rows) < scored["eval_tokens"] + 16 * len(head.rows)


@pytest.mark.parametrize("kind", [LORA, [*LORA, "precision=bf16"], NF4])
def test_adapters_that_add_nothing_yet_are_not_computed_before_training(kind: list[str]) -> None:
    training, callbacks = with_callbacks(*kind, "data.eval_split=0.2", "evaluation.num_prompts=1")
    ran: list[str] = []
    for name, module in training.trainer.model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    state = training.trainer.state
    callbacks.samples.on_train_begin(None, state, None)
    with training.trainer.accelerator.autocast():  # The engine, which a training prepares, has it around each pass.
        callbacks.evaluator.on_train_begin(None, state, None)
        assert not ran and callbacks.samples.rows[0].before is not None
        with_all, _ = held_out_loss(training.trainer, training.layout.micro_batch_size, lambda batch, total: None)
    assert ran and with_all == callbacks.evaluator.first


@pytest.mark.parametrize("kind", [["model.path=llama"], ["model.path=moe"], SEQ2SEQ, [*LORA, "precision=bf16"], NF4])
def test_answers_do_not_depend_on_the_other_prompts_of_the_batch(kind: list[str]) -> None:
    training = set_up(*kind)
    model, tokenizer = training.trainer.model, training.tokenizer
    autocast = "bfloat16" if "precision=bf16" in kind else None
    prompts = [list(range(10, 30)), [40, 41, 42], [50]]
    model.train()
    together = answer(model, tokenizer, prompts, 5, frozenset(), autocast)
    alone = [answer(model, tokenizer, [prompt], 5, frozenset(), autocast)[0] for prompt in prompts]
    assert together == alone
    assert model.training


@pytest.mark.parametrize("kind", ["llama", "roberta", "data2vec-text"])
def test_answers_are_what_the_model_finds_likeliest(kind: str, tmp_path: Path) -> None:
    """RoBERTa's and its kin's positions begin after that of padding, which `generate` does not know."""
    folder = tiny_kind(models_doc.stated(kind, "sft"), tmp_path / kind)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [[10, 11, 12, 13], [20, 21, 22, 23, 24, 25, 26]]
    answers = generate(model, AutoTokenizer.from_pretrained(folder), prompts, 4, frozenset())
    for prompt, written in zip(prompts, answers.tolist(), strict=True):
        tokens = list(prompt)
        for _ in written:
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        assert written == tokens[len(prompt) :]


class Attention(TorchDispatchMode):
    """Notes (heads, tokens) of what attends, and (heads, tokens) of what it attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key = args[:2]
            self.seen.append((*query.shape[1:3], *key.shape[1:3]))
        return func(*args, **(kwargs or {}))


def test_heads_that_share_keys_attend_together_while_tokens_are_written() -> None:
    """Heads by heads, torch takes three times as long for 500 tokens."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained("llama").eval(), AutoTokenizer.from_pretrained("llama")
    config = model.config
    rows = config.num_attention_heads // config.num_key_value_heads
    assert rows > 1
    with Attention() as attention:
        generate(model, tokenizer, [[10, 11, 12], [20, 21, 22]], 3, frozenset())
    layers = config.num_hidden_layers
    wanted = [(config.num_key_value_heads, rows, config.num_key_value_heads, 3 + token) for token in (1, 2)]
    assert attention.seen[layers:] == [each for each in wanted for _ in range(layers)]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


@pytest.mark.parametrize("kind", ["llama", "blenderbot"])
def test_what_a_generation_config_asks_of_answers_is_left_out(kind: str) -> None:
    """Penalties, a least length, an end at the limit and a top-k; how an answer begins stays."""
    auto = AutoModelForSeq2SeqLM if kind == "blenderbot" else AutoModelForCausalLM
    model, tokenizer = auto.from_pretrained(kind).eval(), AutoTokenizer.from_pretrained(kind)
    prompts = [[10, 11, 12, 13], [20, 21, 22, 23, 24, 25, 26]]
    begin = {"decoder_start_token_id": model.generation_config.decoder_start_token_id}
    begin |= {"forced_bos_token_id": 42} if kind == "blenderbot" else {}
    model.generation_config = GenerationConfig(**begin)

    def written() -> list[list[list[int]]]:
        torch.manual_seed(0)
        drawn = generate(model, tokenizer, prompts, 6, frozenset([11]), None, {"temperature": 1.5, "top_p": 0.99})
        beams = generate(model, tokenizer, prompts, 6, frozenset([11]), num_beams=2)
        return [each.tolist() for each in (generate(model, tokenizer, prompts, 6, frozenset([11])), drawn, beams)]

    alone = written()
    torch.manual_seed(0)
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    if kind == "llama":  # Of the whole vocabulary.
        drawn = model.generate(
            **batch, max_new_tokens=6, do_sample=True, temperature=1.5, top_p=0.99, top_k=0, eos_token_id=11,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        assert alone[1] == drawn[:, batch["input_ids"].shape[1] :].tolist()
    else:
        assert all(row[1] == 42 for rows in alone for row in rows)
    model.generation_config = config = GenerationConfig(
        **begin, do_sample=True, top_k=1, min_p=0.9, repetition_penalty=9.0, no_repeat_ngram_size=1, min_length=40,
        forced_eos_token_id=11, num_return_sequences=2,
    )  # fmt: skip
    assert written() == alone
    assert model.generation_config is config


@pytest.mark.parametrize(("kind", "written"), [("gpt2", 9), ("roberta", 9), ("blenderbot", 19), ("llama", 9)])
def test_answers_end_where_positions_end(kind: str, written: int, tmp_path: Path) -> None:
    """Beyond them some models have no embeddings, which was told as an architecture that cannot write."""
    seq2seq = kind == "blenderbot"
    folder = tmp_path / kind
    if seq2seq:
        shutil.copytree(kind, folder)
    else:
        tiny_kind(models_doc.stated(kind, "sft"), folder)
    config = json.loads((folder / "config.json").read_text())
    most = 20 + (config["pad_token_id"] + 1 if kind == "roberta" else 0)
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": most, "n_positions": most}))
    auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
    model = auto.from_pretrained(folder, ignore_mismatched_sizes=True)
    found = generate(model, AutoTokenizer.from_pretrained(folder), [[7] * 11, [7] * 3], 50, frozenset())
    assert found.shape[1] - seq2seq == written


def test_what_is_saved_in_bf16_is_evaluated_with_its_tables_of_positions(tmp_path: Path) -> None:
    """XGLM adds them to embeddings; they are in no file, and were made in fp32."""
    model = tiny_kind(models_doc.stated("xglm", "sft"), tmp_path / "xglm")
    keys = [f"model.path={model}", "precision=bf16", "data.eval_split=0.2", "output.name=xglm"]
    assert main(["recipe=small", *keys]) == 0
    assert math.isfinite(metrics(Path("runs/xglm"))[-1]["eval_loss"])


def test_inputs_go_where_the_model_computes(place: Path) -> None:
    """Under FSDP's offload that is not where the parameters are."""
    adapted = set_up(*LORA).trainer.model
    seen = []
    adapted.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].device.type))
    with inputs_on(adapted, torch.device("meta")), contextlib.suppress(NotImplementedError, RuntimeError):
        adapted.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=1)
    adapted.get_base_model()(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert seen == ["meta", "cpu"]


def test_generation_metrics_score_text_against_references() -> None:
    """A model that always says one sentence, against references of which half are that sentence."""
    training = set_up(*SEQ2SEQ)
    tokenizer = training.tokenizer
    said = "return string"
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]

    class Parrot(torch.nn.Module):
        config, device = training.module.config, torch.device("cpu")

        def generate(self, input_ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
            return torch.tensor([ids] * len(input_ids))

    rows = [{"input_ids": [5, 6], "labels": ids if n % 2 else [9, 10, 11]} for n in range(6)]
    training.trainer.model_wrapped, training.trainer.eval_dataset = Parrot(), rows
    found = generated_metrics(training, 4)
    assert found["eval_exact_match"] == 0.5
    assert 0 < found["eval_chrf"] < 100


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_metrics_are_written_at_every_evaluation(beams: int) -> None:
    overrides = [*SEQ2SEQ, "data.eval_split=0.2", "evaluation.generation_metrics=true", f"evaluation.num_beams={beams}"]
    assert main(["recipe=small", *overrides, "evaluation.every_steps=1", f"output.name=beams{beams}"]) == 0
    rows = [row for row in metrics(Path("runs") / f"beams{beams}") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"eval_bleu", "eval_chrf", "eval_exact_match", "eval_perplexity"} <= row.keys() for row in rows)
