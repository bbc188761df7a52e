"""The field's two worked examples, in fp16 with loss scaling as their recipes say, on tiny models of their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import metrics
from ranks import ON_CPU, Ranks
from tiny import pair_rows, text_rows, tiny_model, write_splits
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

pytestmark = pytest.mark.slow


def train(ranks: Ranks, folder: Path, processes: int, *arguments: str) -> Path:
    """Trains on CPU processes with the real engine; returns the run folder."""
    done = ranks.run(folder, *arguments, "output.name=run", processes=processes, entry=ON_CPU)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return folder / "runs" / "run"


def effective(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text(encoding="utf-8"))["effective"]


def test_blenderbot_on_two_processes_with_zero2(tmp_path: Path, ranks: Ranks) -> None:
    model = tiny_model("facebook/blenderbot-400M-distill", tmp_path / "model")
    data = write_splits(tmp_path / "data", pair_rows(520, "context", "response"))
    run = train(
        ranks, tmp_path, 2, "recipe=blenderbot_400m_seq2seq_zero2", f"model.path={model}", f"data.sources=[{data}]",
        "data.columns={source: context, target: response}", "schedule.max_steps=3", "eval_max_samples=51",
        "optimizer.learning_rate=3e-3", "max_new_tokens=4", "logging.every_steps=1",
    )  # fmt: skip
    state = effective(run)
    assert state["engine"] == "deepspeed" and state["zero_stage"] == 2 and state["optimizer"] == "AdamW"
    assert (state["trained_dtype"], state["master_dtype"]) == ("float16", "float32")
    assert (state["micro_batch_size"], state["gradient_accumulation_steps"]) == (200, 1)
    rows = metrics(run)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 3 and losses[-1] < losses[0]
    # Uneven: 26 rows on one process, 25 on the other.
    assert all("eval_bleu" in row for row in rows if "eval_loss" in row)
    AutoModelForSeq2SeqLM.from_pretrained(run / "final")


def test_gpt2_xl_on_one_process_with_everything_offloaded(tmp_path: Path, ranks: Ranks) -> None:
    model = tiny_model("openai-community/gpt2-xl", tmp_path / "model")
    data = write_splits(tmp_path / "data", text_rows(400))
    run = train(
        ranks, tmp_path, 1, "recipe=gpt2_xl_clm_zero3_offload", f"model.path={model}", f"data.sources=[{data}]",
        "schedule.max_steps=4", "optimizer.learning_rate=3e-3", "schedule.warmup_ratio=0", "strategy.pin_memory=false",
    )  # fmt: skip
    state = effective(run)
    assert state["zero_stage"] == 3 and state["offload_optimizer"] == state["offload_param"] == "cpu"
    assert (state["trained_dtype"], state["master_dtype"]) == ("float16", "float32")
    assert state["micro_batch_size"] == 16
    losses = [row["loss"] for row in metrics(run) if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]
    AutoModelForCausalLM.from_pretrained(run / "final")
