"""Merging with proof, sampling from runs, and what a finished model looks like on disk."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import INT8, LORA, NF4, SEQ2SEQ, populate, with_callbacks
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.common import UserError
from toolkit.data.prepare import prepare
from toolkit.train import train
from toolkit.train.export import load_trained, merge
from toolkit.train.main import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    populate(folder, "llama", "moe", "gemma", "gpt2", "blenderbot", "qwen")
    return folder


@pytest.fixture(autouse=True)
def place(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(models)
    return models


def trained(name: str, *overrides: str) -> Path:
    assert main(["recipe=small", "max_steps=4", f"output.name={name}", *overrides]) == 0
    return Path("runs") / name


def logits_of(model: Any, row: dict[str, Any]) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([row["input_ids"]])}
    if model.config.is_encoder_decoder:
        inputs["labels"] = torch.tensor([row["labels"]])
    with torch.no_grad():
        return model.eval()(**inputs).logits.float()


MERGES = {
    "lora": LORA,
    "lora-bf16": [*LORA, "precision=bf16"],
    "rslora": [*LORA, "method.use_rslora=true"],
    "dora": [*LORA, "method.use_dora=true"],
    "tied-embeddings": [*LORA, "method.modules_to_save=[embed_tokens, lm_head]"],
    "untied-head": [*LORA, "method.modules_to_save=[lm_head]", "model.path=qwen"],
    "norms": [*LORA, "method.modules_to_save=[input_layernorm]"],
    "nf4": [*NF4, "model.path=moe"],
    "nf4-dora": [*NF4, "method.use_dora=true"],
    "int8": INT8,
    "gpt2": [*LORA, "model.path=gpt2"],
    "moe": [*LORA, "model.path=moe"],
    "gemma": [*LORA, "model.path=gemma"],
    "seq2seq": [*LORA, *SEQ2SEQ],
    "seq2seq-nf4": [*NF4, *SEQ2SEQ],
}


@pytest.mark.parametrize("kind", MERGES)
def test_merged_files_say_what_the_adapter_says(kind: str) -> None:
    run = trained(kind, *MERGES[kind])
    assert cli(["merge", str(run)]) == 0
    proof = json.loads((run / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-5 < 1e-2 < proof["effect"]
    source, adapted, _ = load_trained(run)
    recipe = source.recipe
    bf16 = "precision=bf16" in MERGES[kind]
    auto = AutoModelForSeq2SeqLM if recipe.objective == "seq2seq" else AutoModelForCausalLM
    merged = auto.from_pretrained(run / "merged", attn_implementation="eager")
    assert merged.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert merged.config.use_cache is True
    assert not hasattr(merged.config, "quantization_config")
    row = prepare(recipe, *_tokens(recipe)).train[0]
    expected = logits_of(adapted, row)
    distance = float((logits_of(merged.float(), row) - expected).abs().max() / expected.abs().max())
    # The quantized base itself computes in bf16 (and int8 quantizes its inputs too).
    assert distance < (5e-2 if bf16 else 1e-5)
    if kind == "tied-embeddings":
        assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert list((run / "merged").glob("tokenizer.json"))


def _tokens(recipe: Any) -> tuple[Any, frozenset[int]]:
    from toolkit.models.load import ModelSource

    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    return tokenizer, source.stop_tokens(tokenizer)


@pytest.mark.parametrize("weakly", [False, True])
def test_merge_that_is_not_equal_is_refused_and_leaves_nothing(weakly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that loses the adapter, also when the adapter changes the logits by less than any fixed tolerance."""
    from peft.tuners.lora.layer import Linear

    run = trained(f"corrupt-{weakly}", *LORA, *(["optimizer.learning_rate=1e-7"] if weakly else []))
    delta = Linear.get_delta_weight
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "get_delta_weight", lambda self, adapter: 0 * delta(self, adapter))
        with pytest.raises(UserError, match="differs from the adapter"):
            merge(run, run / "merged")
    assert not [file.name for file in run.iterdir() if "merged" in file.name]
    merge(run, run / "merged")
    with pytest.raises(UserError, match="exists already"):
        merge(run, run / "merged")


def test_broken_adapter_and_full_model_are_refused() -> None:
    from safetensors.torch import save_file

    run = trained("broken", *LORA)
    file = run / "final" / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match="nothing was written"):
        merge(run, run / "merged")
    assert not (run / "merged").exists()
    with pytest.raises(UserError, match="no adapter to merge"):
        merge(trained("whole"), Path("runs/whole/merged"))


def test_adapter_names_its_base_by_the_recipe() -> None:
    config = json.loads((trained("named", *LORA) / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "llama"


@pytest.mark.parametrize("model", ["llama", "moe", "gemma", "gpt2", "blenderbot"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_final_model_is_what_was_trained(model: str, precision: str) -> None:
    kind = SEQ2SEQ if model == "blenderbot" else [f"model.path={model}"]
    training, callbacks = with_callbacks(
        *kind, f"precision={precision}", "activation_checkpointing.mode=full", f"output.name={model}-{precision}"
    )
    training.trainer.train()
    train.finish(training, callbacks)
    final = training.folder.final
    auto = AutoModelForSeq2SeqLM if model == "blenderbot" else AutoModelForCausalLM
    loaded, info = auto.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == (torch.float32 if precision == "fp32" else torch.bfloat16)
    in_memory = training.trainer.accelerator.unwrap_model(training.trainer.model)
    row = training.prepared.train[0]
    assert torch.equal(logits_of(loaded, row), logits_of(in_memory, row))
    before, after = (json.loads(Path(at, "config.json").read_text(encoding="utf-8")) for at in (model, final))
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert changed <= {"dtype"}
    tied = before.get("tie_word_embeddings", True)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied
    generation = [json.loads(Path(at, "generation_config.json").read_text(encoding="utf-8")) for at in (model, final)]
    assert generation[0] == generation[1]
    assert not (final / "training_args.bin").exists()


COMPLETIONS = "{path: pairs.jsonl, columns: {prompt: source, completion: target}, format: prompt_completion}"
CHAT, PLAIN = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "Hello"


@pytest.mark.parametrize(
    ("name", "overrides", "rendered"),
    [
        ("chat-lora", LORA, CHAT),
        ("chat-full", [], CHAT),
        ("text-lora", [*LORA, "data.sources=[text.jsonl]", "objective=language_modelling"], PLAIN),
        ("completion", [*LORA, f"data.sources=[{COMPLETIONS}]"], PLAIN),
        ("pairs", SEQ2SEQ, "Hello<|im_end|>"),
    ],
)  # fmt: skip
def test_prompts_are_rendered_as_the_training_rows_were(
    name: str, overrides: list[str], rendered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["evaluation.prompts=[Hello]", "evaluation.num_prompts=1"]
    run = trained(name, *overrides, *prompts)
    (sample,) = json.loads((run / "samples.json").read_text(encoding="utf-8"))
    assert AutoTokenizer.from_pretrained(run / "final").decode(sample["input_ids"]) == rendered
    capsys.readouterr()
    assert cli(["generate", str(run), "--prompt", "Hello", "--max-new-tokens", "4"]) == 0
    answer = capsys.readouterr().out
    # The trained model answers the same from its files as it did at the end of training.
    assert answer.strip() == sample["after"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nHello\n"))
    assert cli(["generate", str(run), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.count(answer.strip()) >= 2


def test_unfinished_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("unfinished", *LORA)
    (run / "final").rename(run / "moved")
    assert cli(["generate", str(run), "--prompt", "x"]) == 1
    assert "not finished" in capsys.readouterr().err
