"""Sampling from runs, and what a finished model looks like on disk."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import LORA, SEQ2SEQ, logits_of, place_with, trained, with_callbacks
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.train import train
from toolkit.train.finished.export import opened, with_adapter

place = place_with("llama", "moe", "gemma", "gpt2", "blenderbot", "qwen")


def test_adapter_names_its_base_by_the_recipe() -> None:
    config = json.loads((trained("named", *LORA) / "final" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == "llama"


def test_an_adapter_names_the_commit_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads it by PEFT gets the weights that it was trained on, not what its base has become since."""
    from huggingface_hub import constants
    from peft import PeftConfig

    snapshot = tmp_path / "models--org--tiny" / "snapshots" / ("c" * 40)
    shutil.copytree("llama", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    run = trained("pinned", *LORA, "model.path=org/tiny", f"model.revision={snapshot.name}")
    config = PeftConfig.from_pretrained(str(run / "final"))
    assert (config.base_model_name_or_path, config.revision) == ("org/tiny", snapshot.name)
    assert f"from_pretrained(base, revision='{snapshot.name}')" in (run / "final" / "README.md").read_text()


@pytest.mark.parametrize(
    ("precision", "model"),
    [
        *itertools.product(("fp32", "pure_bf16"), ("llama", "moe", "gemma", "gpt2", "blenderbot")),
        *(("bf16", model) for model in ("llama", "gpt2", "blenderbot")),
        *(pytest.param("bf16", model, marks=pytest.mark.matrix) for model in ("moe", "gemma")),
    ],
)
def test_final_model_is_what_was_trained(model: str, precision: str) -> None:
    kind = SEQ2SEQ if model == "blenderbot" else [f"model.path={model}"]
    # What reads the final model has no other attention, and other kernels round otherwise.
    same = [f"model.attention={'eager' if model == 'gemma' else 'sdpa'}", "activation_checkpointing.mode=full"]
    training, callbacks = with_callbacks(*kind, *same, f"precision={precision}", f"output.name={model}-{precision}")
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


def test_an_answer_ends_with_the_positions_that_the_model_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 has no embeddings for further ones."""
    run = trained("positions", *LORA, "model.path=gpt2")
    capsys.readouterr()
    assert cli(["generate", str(run), "--prompt", "Hello", "--max-new-tokens", "1024"]) == 0
    assert cli(["generate", str(run), "--prompt", "Hello " * 1100]) == 1
    error = capsys.readouterr().err
    assert "tokens, and the model reads 1,024" in error and "shorten it" in error and "evaluation." not in error
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'Hello ' * 1100}\nHello\n"))
    assert cli(["generate", str(run), "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert "the model reads 1,024" in printed and printed.count("> ") == 3


def test_a_terminal_gets_no_flood_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("long", *LORA)
    monkeypatch.setattr("toolkit.train.finished.export.answer", lambda *_: ["word\n" * 5000])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    capsys.readouterr()
    assert cli(["generate", str(run), "--prompt", "Hello"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and lines[-1] == "all of it: the same command with `| less`"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert cli(["generate", str(run), "--prompt", "Hello"]) == 0
    assert capsys.readouterr().out.count("word\n") == 5000


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are any bytes there alone")
def test_a_folder_whose_name_is_no_text_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("named", *LORA)
    other = run.rename(Path(os.fsdecode(os.fsencode(run.parent) + b"/na\xefve")))
    capsys.readouterr()
    for command in (["generate", str(other), "--prompt", "Hello"], ["merge", str(other)]):
        assert cli(command) == 1
        error = capsys.readouterr().err
        assert "is no name in UTF-8" in error and "rename the folder" in error and len(error.splitlines()) == 2
    assert cli(["report", str(other)]) == 0


def test_a_prompt_that_is_no_text_is_refused_and_asked_for_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("asked", *LORA)
    asked = run.rename(run.with_name("as\x1bked"))
    capsys.readouterr()
    for prompt in ("a\udcff", "\ud800", "x" * 5000 + "\udcff"):
        assert cli(["generate", str(asked), "--prompt", "Hello", "--prompt", prompt]) == 1
        printed = capsys.readouterr()
        assert not printed.out and len(printed.err) < 300
        assert "holds bytes that are no UTF-8" in printed.err and "write it in UTF-8" in printed.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nHello\n"), "utf-8", "strict"))
    assert cli(["generate", str(asked), "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert "the prompt `a\\udcff` holds bytes" in printed.out and printed.out.count("> ") == 3
    assert "as\\x1bked: write a prompt" in printed.out and "\x1b" not in printed.out


def test_an_adapter_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """PEFT warns, and would leave these layers as adapters begin."""
    run = trained("lacking", "method.name=lora")
    folder = shutil.copytree(run / "final", tmp_path / "final")
    weights = load_file(folder / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    source = opened(run)
    with pytest.raises(UserError, match=r"lacks weights of its adapters, or has them under other names"):
        with_adapter(source, str(folder))
    files = source.in_files(dtypes(source.recipe), tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 weights of its adapters, or has them under other names"):
        files.adapted({folder: 1.0})


def test_unfinished_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("unfinished", *LORA)
    audit = (run / "audit.json").read_bytes()
    (run / "audit.json").write_bytes(b"\xef\xbb\xbf" + audit)
    assert cli(["generate", str(run), "--prompt", "x"]) == 1
    assert "audit.json, which says how prompts are written, cannot be read" in capsys.readouterr().err
    (run / "final").rename(run / "moved")
    assert cli(["generate", str(run), "--prompt", "x"]) == 1
    assert "not finished" in capsys.readouterr().err


def test_a_full_model_answers_where_its_run_was_copied_to_without_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("moved")
    asked = ["--prompt", "what does str.title do?", "--max-new-tokens", "4"]
    assert cli(["generate", str(run), *asked]) == 0
    there = capsys.readouterr().out.splitlines()[-1:]
    shutil.copytree(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert cli(["generate", "moved", *asked]) == 0
    assert capsys.readouterr().out.splitlines()[-1:] == there
