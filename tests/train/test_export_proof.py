"""Exports of models with a head and of vectors: loaded by the libraries alone, and as far from the run as they say."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from harness import write_jsonl, write_recipe
from safetensors.torch import load_file
from small import MODELS, trained
from tiny import labelled_rows, pair_rows, tagged_rows, tiny_encoder, tiny_model
from transformers import AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.data.prepare import prepare
from toolkit.models.losses.embedding import pooled
from toolkit.recipe.rules import load_checked
from toolkit.train.finished.export import load_trained, opened

RECIPE = """
description: A small training
model: {path: llama}
data: {sources: [texts.jsonl], eval_split: 0.2}
objective: classification
precision: fp32
optimizer: {learning_rate: 1.0e-2, eps: 1.0e-5}
schedule: {max_steps: 4}
batch: {seq_len: 96, global_batch_size: 4, micro_batch_size: 2}
"""
ROWS = {"classification": "texts", "reward": "pairs", "token_classification": "words", "embedding": "vectors"}
HEADS = {"score", "classifier", "head", "pooler"}
LORA = ["method=lora", "method.r=4"]
NEAR = {"int8": 0.05, "fp8": 0.2, "nf4": 0.6, "int4": 0.6}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with tiny decoders and encoders, rows of four kinds and a recipe."""
    folder = tmp_path_factory.mktemp("exported")
    for name in ("llama", "qwen"):
        tiny_model(MODELS[name], folder / name)
    for name in ("bert", "modernbert"):
        tiny_encoder(name, folder / name)
    answers = itertools.pairwise(pair_rows(41, "prompt", "chosen"))
    pairs = [row | {"rejected": f"never {other['chosen']}"} for row, other in answers]
    vectors = [
        row | {"positive": f"{n} {row['positive']}"} for n, row in enumerate(pair_rows(40, "anchor", "positive"))
    ]
    rows = {"pairs": pairs, "texts": labelled_rows(40), "words": tagged_rows(40), "vectors": vectors}
    for name, each in rows.items():
        write_jsonl(folder / f"{name}.jsonl", each)
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def run_of(objective: str, model: str, method: list[str]) -> Path:
    name = f"{objective}-{model}-{len(method)}"
    rows = [f"objective={objective}", f"data.sources=[{ROWS[objective]}.jsonl]", f"model.path={model}"]
    return Path("runs") / name if (Path("runs") / name).exists() else trained(name, *rows, *method)


def said(model: Any, run: Path) -> torch.Tensor:
    """What a model says of the held-out rows, one text after the other: (places, outputs)."""
    source = opened(run)
    tokenizer = source.tokenizer(saved=run / "final")
    rows = prepare(source.recipe, tokenizer, source.stop_tokens(tokenizer), vocab_size=source.vocab_size).eval
    found = []
    for row in rows or ():
        several = source.recipe.objective in ("reward", "embedding")
        lengths = row["seq_lengths"] if several else [len(row["input_ids"])]
        for ids in torch.tensor(row["input_ids"]).split(lengths):
            with torch.no_grad():
                output = model.eval()(input_ids=ids[None])
            if source.recipe.embeds:
                found.append(pooled(output.last_hidden_state, torch.ones_like(ids[None]), source.pooling))
            elif source.recipe.objective == "token_classification":
                found.append(output.logits[0][[label != -100 for label in row["labels"]]])
            else:
                found.append(output.logits)
    return torch.cat(found)


def run_line(shown: str) -> str:
    """Executes the last line that was printed, as it stands; returns what it prints."""
    line = shown.strip().splitlines()[-1]
    program, option, code = shlex.split(line[line.index("python -c ") :])
    assert (program, option) == ("python", "-c")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue()


AUTO = {"classification": "AutoModelForSequenceClassification", "reward": "AutoModelForSequenceClassification"}
AUTO |= {"token_classification": "AutoModelForTokenClassification", "embedding": "AutoModel"}
FAST = [
    ("classification", "bert", LORA, "int8"),
    ("token_classification", "modernbert", [], "int4"),
    ("reward", "qwen", [], "nf4"),
    ("embedding", "bert", [], "int4"),
    ("embedding", "llama", LORA, "fp8"),
]
PRODUCT = itertools.product(ROWS, ("llama", "qwen", "bert", "modernbert"), ([], LORA), NEAR)


@pytest.mark.parametrize(
    ("objective", "model", "method", "form"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.matrix) for case in PRODUCT if case not in FAST)],
)
def test_files_keep_the_head_and_are_as_near_to_the_run_as_they_say(
    objective: str, model: str, method: list[str], form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(objective, model, method)
    output = run / form
    shutil.rmtree(output, ignore_errors=True)
    capsys.readouterr()
    assert cli(["export", str(run), f"format={form}"]) == 0
    shown = capsys.readouterr().out
    proof = json.loads((output / "export_proof.json").read_text(encoding="utf-8"))
    wanted, exported = load_trained(run)[1], getattr(transformers, AUTO[objective]).from_pretrained(output)
    before, after = said(wanted, run), said(exported, run)
    assert proof["distance"] == pytest.approx(((before - after).abs().max() / before.abs().max()).item(), rel=1e-3)
    assert 0 < proof["distance"] < NEAR[form] and proof["distance_as_saved"] <= 1e-4
    assert proof["rows"] == 8 and "8 held-out" in shown and proof["bytes"] < proof["bytes_before"]
    if objective == "embedding":
        cosines = torch.nn.functional.cosine_similarity(before, after)
        assert proof["smallest_cosine"] == pytest.approx(cosines.min().item(), abs=1e-5)
        assert f"at least {proof['smallest_cosine']:.6f}" in shown and proof["distance_by_sentence_transformers"] < 1e-4
        assert run_line(shown).startswith("tensor([[")
        return
    apart = (before - after).abs()
    assert proof["largest_difference"] == pytest.approx(apart.max().item(), rel=1e-3)
    assert proof["mean_difference"] == pytest.approx(apart.mean().item(), rel=1e-3)
    if objective == "reward":
        won = [(each.view(-1, 2)[:, 0] > each.view(-1, 2)[:, 1]) for each in (before, after)]
        assert proof["same_preference"] == pytest.approx((won[0] == won[1]).float().mean().item())
        assert f"{proof['same_preference']:.1%} have the same better answer" in shown
    else:
        same = (before.argmax(-1) == after.argmax(-1)).float().mean().item()
        assert proof["same_class"] == pytest.approx(same) and f"{same:.1%} have the same class" in shown
    whole = {name: each for name, each in load_file(output / "model.safetensors").items() if {*name.split(".")} & HEADS}
    own = {name.replace("modules_to_save.default.", ""): each for name, each in wanted.named_parameters()}
    own = {name.removeprefix("base_model.model."): each for name, each in own.items()}
    assert whole and all(torch.equal(each, own[name]) for name, each in whole.items()), "the head is as it was trained"
    tokenizer = AutoTokenizer.from_pretrained(output)
    with torch.no_grad():
        logits = exported(**tokenizer("A text.", return_tensors="pt")).logits[0]
    found = eval(run_line(shown), {"np": np})
    if objective == "token_classification":  # The pipeline leaves out what is in no entity.
        assert {each["entity"] for each in found} == {
            *map(exported.config.id2label.get, logits.argmax(-1).tolist())
        } - {"O"}
        return
    (asked,) = found
    if objective == "reward":
        assert asked["score"] == pytest.approx(logits.item(), rel=1e-4)
    else:
        assert asked["label"] == exported.config.id2label[logits.argmax().item()]
        assert asked["score"] == pytest.approx(logits.softmax(-1).max().item(), rel=1e-4)


@pytest.mark.parametrize(("objective", "model"), [("reward", "llama"), ("embedding", "modernbert")])
def test_rounding_to_bf16_is_no_fault_of_the_files(objective: str, model: str) -> None:
    """It moves the few scores of a head, and vectors that another library pools, by more than it does logits."""
    run = run_of(objective, model, [*LORA, "precision=bf16"])
    assert cli(["merge", str(run)]) == 0
    proof = json.loads((run / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance_read_back"] < 1e-6 < proof["distance_as_saved"]
    assert cli(["export", str(run), "format=int8"]) == 0


def test_files_for_llama_cpp_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs/written")
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(load_checked("small", []).to_yaml(), encoding="utf-8")
    assert cli(["export", str(run), "format=gguf"]) == 1
    error = capsys.readouterr().err
    assert "no heads and no models of vectors from GGUF files" in error and "int8, fp8, nf4, int4" in error
    assert not (run / "gguf").exists()


@pytest.mark.parametrize("form", ["nf4", "int4"])
def test_experts_are_not_left_out_of_four_bits(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path("runs") / f"experts-{form}"
    run.mkdir(parents=True)
    if not Path("moe").exists():
        tiny_model(MODELS["moe"], Path("moe"))
    recipe = load_checked("small", ["model.path=moe", "objective=sft", "data.sources=[pairs.jsonl]"])
    (run / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    shutil.copytree("moe", run / "final")
    assert cli(["export", str(run), f"format={form}"]) == 1
    error = capsys.readouterr().err
    assert "experts of this model are no linear layers" in error and "format=int8" in error


def test_a_merged_head_says_how_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of("classification", "bert", LORA)
    assert cli(["chat", str(run)]) == 1
    error = capsys.readouterr().err
    assert f"toolkit merge {run}" in error
    assert cli(["merge", str(run)]) == 0
    assert f"vllm serve {run}/merged --served-model-name {run.name} --runner pooling --convert classify" in (
        shown := capsys.readouterr().out
    )
    assert run_line(error) == run_line(shown), "the line that was refused with"
