"""The final model of every engine: files that Transformers and PEFT load, and that say what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import models_doc
import pytest
import torch
from matrix import ENGINES, METHODS
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file, save_file
from small import SEQ2SEQ, populate
from tiny import tiny_kind, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.train.checkpoints import save
from toolkit.train.main import main as train

# Adam moves weights whose gradient is nearly zero either way.
SGD = ["optimizer.name=sgd", "optimizer.learning_rate=0.3"]
SHORT = ["max_steps=2", "precision=bf16", "evaluation.num_prompts=1", "evaluation.prompts=[Hello]"]
MODELS = {"llama": [], "gpt2": ["model.path=gpt2"], "blenderbot": SEQ2SEQ}
# With layers for images, whose names Transformers has changed.
OF_IMAGES = {"gemma3": ["model.path=gemma3"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder; runs stay for the other tests."""
    folder = tmp_path_factory.mktemp("publish")
    populate(folder, *MODELS)
    for kind in OF_IMAGES:
        tiny_kind(models_doc.stated(kind, "sft"), folder / kind)
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
        ("zero3", "gemma3"),
        ("fsdp", "llama"),
        pytest.param("zero2", "gpt2", marks=pytest.mark.slow),
        pytest.param("zero2", "blenderbot", marks=pytest.mark.matrix),
        pytest.param("zero3", "gpt2", marks=pytest.mark.matrix),
        pytest.param("fsdp", "gpt2", marks=pytest.mark.matrix),
    ],
)
def test_final_model_has_the_same_files_on_every_engine(ranks: Ranks, home: Path, engine: str, model: str) -> None:
    finals = [run(ranks, home, each, model, *(MODELS | OF_IMAGES)[model], *SGD) / "final" for each in ("ddp", engine)]
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


@pytest.mark.parametrize(
    "engine", ["fsdp", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("ddp", "zero2", "zero3"))]
)
def test_what_balances_experts_is_trained_and_saved_as_it_is(ranks: Ranks, home: Path, engine: str) -> None:
    """A buffer in fp32: in bf16 the router would choose other experts."""
    bias = _with_bias(home)
    kept = _weights(run(ranks, home, engine, "biased", "model.path=biased") / "final")
    saved = dict(kept)[_BIAS]
    assert saved.dtype == torch.float32 and torch.equal(saved, bias)


def test_what_balances_experts_is_merged_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch, formulas: None) -> None:
    bias = _with_bias(home)
    monkeypatch.chdir(home)
    assert train(["recipe=small", *SHORT, *METHODS["lora"], "model.path=biased", "output.name=one"]) == 0
    assert cli(["merge", "runs/one"]) == 0
    assert torch.equal(dict(_weights(Path("runs/one/merged")))[_BIAS], bias)


_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def _with_bias(home: Path) -> torch.Tensor:
    """Saves a tiny DeepSeek-V3 with figures as in a trained one: large, and apart by less than bf16 resolves."""
    file, bias = home / "biased" / "model.safetensors", 13.01 + torch.arange(8) / 100
    if not file.exists():
        sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        others = {"v_head_dim": 8, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
        tiny_model({"model_type": "deepseek_v3", **sizes, **ranks, **heads, **others}, home / "biased")
        save_file(load_file(file) | {_BIAS: bias}, file, metadata={"format": "pt"})
    return bias


def _weights(final: Path) -> list[tuple[str, torch.Tensor]]:
    (file,) = final.glob("*.safetensors")
    return sorted(load_file(file).items())


@pytest.mark.parametrize("damage", ["flipped", "cut"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_disk_that_gives_back_something_else_is_noticed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], method: str, damage: str
) -> None:
    """The file is changed between writing and reading it back, and saved right by the second start."""
    monkeypatch.chdir(home)
    written, broken = save.flush, []

    def change(file: Path) -> None:
        if file.suffix == ".safetensors":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content[:-8] if damage == "cut" else content)
            broken.append(file)
        written(file)

    monkeypatch.setattr(save, "flush", change)
    arguments = ["recipe=small", *SHORT, *METHODS[method], "checkpoint.save_steps=1", f"output.name={method}-{damage}"]
    assert train(arguments) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert (
        broken and f"{broken[0]} {'cannot be read back' if damage == 'cut' else 'does not hold what was saved'}" in said
    )
    folder = home / "runs" / f"{method}-{damage}"
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["status"] == "failed"
    monkeypatch.setattr(save, "flush", written)
    assert train(arguments) == 0
    assert _weights(folder / "final")


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_all_groups_wait_as_long_for_the_process_that_writes(ranks: Ranks, home: Path, engine: str) -> None:
    """DeepSpeed gathers weights in a group of its own, where NCCL gives up after ten minutes unless it is told."""
    name = f"output.name=limits-{engine}"
    done = ranks.run(home, "recipe=small", *ENGINES[engine], *SHORT, name, processes=2, entry="group_limits")
    assert done.returncode == 0, done.stderr[-6000:]
    limits = [json.loads(line.partition("wait ")[2]) for line in done.stdout.splitlines() if "groups wait" in line]
    assert limits and all(each == 86_400 for group in limits for each in group)
    assert engine == "fsdp" or min(map(len, limits)) > 1
