"""The final model of every engine: files that Transformers and PEFT load, and that say what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matrix import ENGINES, METHODS
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file
from small import SEQ2SEQ, populate
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli

# Adam moves weights whose gradient is nearly zero either way.
SGD = ["optimizer.name=sgd", "optimizer.learning_rate=0.3"]
SHORT = ["max_steps=2", "precision=bf16", "evaluation.num_prompts=1", "evaluation.prompts=[Hello]"]
MODELS = {"llama": [], "gpt2": ["model.path=gpt2"], "blenderbot": SEQ2SEQ}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder; runs stay for the other tests."""
    folder = tmp_path_factory.mktemp("publish")
    populate(folder, *MODELS)
    return folder


def run(ranks: Ranks, home: Path, engine: str, kind: str, *overrides: str) -> Path:
    """A finished run on an engine, started when it is asked for the first time."""
    folder = home / "runs" / f"{kind}-{engine}"
    if not folder.is_dir():
        arguments = [*ENGINES[engine], *SHORT, *overrides, f"output.name={folder.name}"]
        done = ranks.run(home, "recipe=small", *arguments, processes=2, entry=ON_CPU)
        assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        ("zero3", "blenderbot"),
        ("fsdp", "llama"),
        pytest.param("zero2", "gpt2", marks=pytest.mark.slow),
        pytest.param("zero2", "blenderbot", marks=pytest.mark.matrix),
        pytest.param("zero3", "gpt2", marks=pytest.mark.matrix),
        pytest.param("fsdp", "gpt2", marks=pytest.mark.matrix),
    ],
)
def test_final_model_has_the_same_files_on_every_engine(ranks: Ranks, home: Path, engine: str, model: str) -> None:
    finals = [run(ranks, home, each, model, *MODELS[model], *SGD) / "final" for each in ("ddp", engine)]
    wanted, found = (sorted(file.name for file in final.iterdir()) for final in finals)
    assert found == wanted
    wanted, found = ([(key, str(value.dtype), value.shape) for key, value in _weights(final)] for final in finals)
    assert found == wanted
    for name in ("config.json", "generation_config.json"):
        wanted, found = (json.loads((final / name).read_text(encoding="utf-8")) for final in finals)
        assert found == wanted
    kind = AutoModelForSeq2SeqLM if model == "blenderbot" else AutoModelForCausalLM
    ids = AutoTokenizer.from_pretrained(finals[1])("what does str.join do?", return_tensors="pt").input_ids
    logits = []
    for final in (home / model, *finals):
        loaded, info = kind.from_pretrained(final, output_loading_info=True)
        assert not any(info.values()), info
        inputs = {"input_ids": ids, "labels": ids} if model == "blenderbot" else {"input_ids": ids}
        logits.append(loaded.eval()(**inputs).logits.float())
    assert loaded.dtype == torch.bfloat16
    untrained, replicated, other = logits
    assert (other - replicated).abs().max() < 0.02 * replicated.abs().max() < 0.1 * (replicated - untrained).abs().max()


@pytest.mark.parametrize(
    "engine", ["zero2", "zero3", pytest.param("fsdp", marks=pytest.mark.slow)], ids=["zero2", "zero3", "fsdp"]
)
def test_adapter_of_every_engine_answers_and_merges(
    ranks: Ranks, home: Path, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(ranks, home, engine, "lora", *METHODS["lora"])
    assert {str(value.dtype) for _, value in _weights(folder / "final")} == {"torch.float32"}
    monkeypatch.chdir(home)
    (sample,) = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    assert cli(["generate", str(folder), "--prompt", "Hello", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip() == sample["after"]
    assert cli(["merge", str(folder)]) == 0
    proof = json.loads((folder / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-5 < proof["effect"]


def _weights(final: Path) -> list[tuple[str, torch.Tensor]]:
    (file,) = final.glob("*.safetensors")
    return sorted(load_file(file).items())
