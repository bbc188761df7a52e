"""Trainings on a GPU that computes with the host's CPU: what is written for GPUs alone runs, gives the losses of a CPU,
and has the host wait for the device in no step."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flash_stand_ins
import host_gpu
import pytest
import small
from harness import SUPPORT, environment, losses, metrics, write_jsonl
from tiny import chat_rows, labelled_rows, pair_rows, tagged_rows, tiny_encoder, tiny_model

from toolkit.models.attention import varlen
from toolkit.train.main import main

PAIRS = ["data.sources=[preferences.jsonl]", "data.columns={instruction: prompt}"]
JUDGED = ["data.sources=[judged.jsonl]", "data.columns={instruction: prompt, output: completion}"]
TEACHER = ["objective=distillation", "distillation.teacher.path=deep"]
ANSWERS = [
    *("data.sources=[prompts.jsonl]", "data.over_long=drop", "rollout.num_generations=4"),
    *("rollout.max_completion_tokens=6", "rewards.length.max_tokens=3", "rewards.length.soft=6"),
]
CORE = {
    "fp32": ["precision=fp32", "model.attention=sdpa"],
    "adapters": small.LORA,
    "products in fp8": ["precision=fp8", "model.path=deep"],
    "pairs": ["objective=dpo", *PAIRS, *small.LORA],
    "classes": ["precision=fp32", "objective=classification", "model.path=bert", "data.sources=[texts.jsonl]"],
    "teacher on the host": [*TEACHER, "distillation.teacher.offload=true"],
    "rewards": ["objective=grpo", *ANSWERS, *small.LORA, "policy.beta=0.1"],
    "FlashAttention 4": small.LORA,
}
FULL = {
    "FlashAttention 3": [],
    "full": [],
    "packed": ["data.packing=true", "data.over_long=drop"],
    "recomputed": ["activation_checkpointing=full"],
    "activations on the host": [*small.LORA, "activation_checkpointing=offload"],
    "attention kept": ["activation_checkpointing=selective"],
    "fp16": ["precision=fp16"],
    "pure bf16": ["precision=pure_bf16"],
    "base in fp8": small.FP8,
    "base in nf4": small.NF4,
    "base in int4": small.INT4,
    "experts": ["model.path=moe"],
    "judged": ["objective=kto", *JUDGED],
    "scores": ["precision=fp32", "objective=reward", *PAIRS],
    "vectors": ["precision=fp32", "learning_rate=1e-4", "objective=embedding", "data.sources=[texts of pairs.jsonl]"],
    "encoder-decoder": ["precision=fp32", *small.SEQ2SEQ],
    "teacher": TEACHER,
    "rewards without groups": ["objective=rloo", *ANSWERS, *small.LORA],
    "pairs by odds": ["objective=orpo", *PAIRS, *small.LORA],
    "pairs by length": ["objective=simpo", *PAIRS, *small.LORA],
    "pairs alone": ["objective=cpo", *PAIRS],
    "words": [
        *("precision=fp32", "objective=token_classification", "model.path=bert"),
        *("data.sources=[words.jsonl]", "data.packing=false"),
    ],
    "own answers": [*TEACHER, "distillation.on_policy=0.5", "rollout.max_completion_tokens=6"],
    "DoRA": [*small.LORA, "method.use_dora=true"],
    "8-bit AdamW": ["optimizer=adamw_8bit"],
    "Muon": ["optimizer=muon", "precision=fp32"],
    "other masks": ["model.path=gemma", "precision=fp32"],
    "sdpa": ["model.attention=sdpa"],
    "eager": ["model.attention=eager"],
    "new tokens": [*small.LORA, 'model.new_tokens=["<call>","</call>"]'],
    "learned positions": ["model.path=gpt2"],
}
DISTURBED = {
    # Ten steps of five epochs, with metrics of every third, and whatever else happens between steps.
    "interrupted": [
        *("data.max_samples=10", "max_steps=10", "logging.every_steps=3", "data.eval_split=0.2"),
        *("evaluation.every_steps=4", "checkpoint.save_steps=5"),
    ],
    "diverging": ["learning_rate=1e30", "max_steps=6"],
}
SAID = ("step", "epoch", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens", "padding")
CASES = CORE | FULL | {name: ["precision=fp32", "model.attention=sdpa", *each] for name, each in DISTURBED.items()}
ON_CPU = {"activations on the host": {"activation_checkpointing": "none"}, "fp16": {"precision": "bf16"}}
"""What a CPU does instead."""
DRAWN = ("rewards", "rewards without groups", "own answers")
"""Answers are drawn from probabilities of other rounding, and may be other ones."""
WRITES = "own answers"
"""Its rows are made anew before each step, in memory that the device cannot read by itself."""
WAITS_BETWEEN = (*DRAWN, "experts")
"""Answers of a step are shown beside its metrics, and so is what routers did."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gpu")
    small.populate(folder, "llama", "moe", "blenderbot", "gemma", "gpt2")
    tiny_model(small.MODELS["llama"], folder / "deep", seed=7, layers=3)
    tiny_encoder("bert", folder / "bert")
    answers = itertools.pairwise(pair_rows(41, "prompt", "chosen"))
    pairs = [row | {"rejected": f"never {other['chosen']}"} for row, other in answers]
    judged = [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 4 else "rejected"], "label": number % 4 > 0}
        for number, row in enumerate(pairs)
    ]
    prompts = [{"prompt": row["messages"][0]["content"]} for row in chat_rows(40)]
    files = {
        "preferences": pairs,
        "judged": judged,
        "texts": labelled_rows(40),
        "prompts": prompts,
        "words": tagged_rows(40),
    }
    files["texts of pairs"] = pair_rows(40, "anchor", "positive")
    for name, rows in files.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    flash_stand_ins.place(folder / "packages", *varlen.PACKAGES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def command(name: str, where: str, **other: str) -> list[str]:
    common = ["recipe=small", "compile=off", f"output.dir={where}", f"output.name={name}"]
    settings = (
        {"precision": "bf16", "learning_rate": "1e-3", "max_steps": "4"}
        | dict(each.split("=", 1) for each in CASES[name])
        | other
    )
    return [*common, *(f"{key}={value}" for key, value in settings.items())]


def on_gpu(*names: str) -> Any:
    """What came of some cases, in one process."""
    environ = environment() | host_gpu.environment()
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], str(SUPPORT), "packages"])
    commands = {name: command(name, "gpu") for name in names}
    run = [sys.executable, host_gpu.__file__, "found.json", json.dumps(commands)]
    ended = subprocess.run(run, env=environ, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    return {name: each | {"said": ended.stderr[-3000:]} for name, each in found.items()}


@pytest.fixture(scope="module")
def core(place: Path) -> Any:
    return on_gpu(*CORE, *DISTURBED)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORE)
def test_a_training_is_that_of_a_cpu_and_waits_in_no_step(name: str, core: Any, formulas: None) -> None:
    check(name, core[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTURBED)
def test_metrics_that_are_read_late_are_those_of_a_cpu(name: str, core: Any, formulas: None) -> None:
    assert main(command(name, "cpu")) == core[name]["status"] == (name == "diverging")
    own, others = (
        [{key: row[key] for key in SAID if key in row} for row in metrics(Path(where, name))]
        for where in ("gpu", "cpu")
    )
    assert [row["step"] for row in own] == ([0, 3, 4, 4, 5, 6, 8, 8, 9, 10, 10] if name == "interrupted" else [1, 2])
    # On GPUs torch sums norms in fp32.
    assert own == [pytest.approx(row, rel=1e-5, nan_ok=True) for row in others]


@pytest.mark.matrix
@pytest.mark.parametrize("name", FULL)
def test_other_trainings_are_too(name: str, formulas: None) -> None:
    check(name, on_gpu(name)[name])


def check(name: str, found: dict[str, Any]) -> None:
    assert found["status"] == 0, found["said"]
    own = losses(Path("gpu", name))
    assert len(own) == 4
    assert found["package"] == (name if name in varlen.PACKAGES else varlen.OWN)
    asked = command(name, "cpu", **ON_CPU.get(name, {}))
    assert main(asked) == 0
    if name not in DRAWN:
        exact = "precision=fp32" in asked
        assert own == pytest.approx(losses(Path("cpu", name)), rel=1e-6 if exact else 2e-3)
    manifest = json.loads(Path("gpu", name, "manifest.json").read_text(encoding="utf-8"))
    assert (name in varlen.PACKAGES) == (f"{name} computes attention" in str(manifest["chosen"]))
    assert manifest["hardware"]["gpus"] and manifest["plan"]["hardware"] == "h100"
    # From the third step on nothing is made for the first time.
    places = {step: {*found["waits"].get(step, ())} for step in ("3", "4", "-3")}
    within = places["3"] | places["4"]
    assert name == WRITES or not _ours(within)
    if name in ("adapters", "products in fp8", "pairs", "teacher on the host"):
        assert not within
    # The metrics of a step are read while the next one is computed, those of the last at once.
    assert name in WAITS_BETWEEN or not _ours(places["-3"])
    assert any("_maybe_log_save_evaluate" in place for place in found["waits"]["-4"]), "waits are seen"


def _ours(places: set[str]) -> list[str]:
    """Without what packages that compute on a CPU copy there."""
    return [place for place in places if "flash_stand_ins" not in place]
