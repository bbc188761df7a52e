"""Offloading to NVMe: the files that really appear, equal losses, and what is checked before anything is loaded."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import losses, write_recipe
from ranks import ON_CPU, Ranks
from tiny import chat_rows, tiny_tokenizer

from toolkit.common import UserError
from toolkit.distributed import nvme
from toolkit.distributed.layout import World
from toolkit.recipe import load

RECIPE = """
model: {path: MODEL}
data: {sources: [chat.jsonl]}
precision: fp32
schedule: {max_steps: 3}
batch: {seq_len: 128, global_batch_size: 4}
evaluation: {num_prompts: 0}
"""
NVME = ["strategy=zero3_nvme", "strategy.param_persistence_threshold=0", "strategy.pin_memory=false"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a Llama whose matrices are larger than the 1 MiB under which DeepSpeed swaps nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer, model = tiny_tokenizer(), tmp_path / "model"
    size = LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8)
    size.update({"vocab_size": len(tokenizer), "max_position_embeddings": 256})
    LlamaForCausalLM(size).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat_rows(20)), encoding="utf-8")
    write_recipe(tmp_path, "small", RECIPE.replace("MODEL", str(model)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(*overrides: str) -> Any:
    return load("small", [*NVME, "strategy.nvme_path=drive", *overrides]).recipe


def test_folder_is_this_launch_s_own_and_goes_with_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "_load_op", lambda: None)
    abandoned = place / "drive" / "toolkit-elsewhere-1"
    abandoned.mkdir(parents=True)
    (abandoned / ".lock").touch()
    (abandoned / "old.swp").write_text("of a launch that was killed")
    foreign = place / "drive" / "thesis.tex"
    foreign.write_text("years of work")
    with nvme.swap_folder(recipe(), World(0, 0, 2, 2), lambda: 1000) as first:
        assert first is not None and (first / "rank0").is_dir() and not abandoned.exists()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        with nvme.swap_folder(recipe(), World(0, 0, 2, 2), lambda: 1000) as second:
            assert second != first and first.is_dir(), "another launch on the same drive is left alone"
    assert [entry.name for entry in (place / "drive").iterdir()] == ["thesis.tex"]


def test_too_small_a_drive_is_refused_before_anything_is_loaded(place: Path) -> None:
    with (
        pytest.raises(UserError, match=r"takes 9000\.00 GB") as caught,
        nvme.swap_folder(recipe(), World(0, 0, 4, 2), lambda: 9000 * 10**9),
    ):
        pass
    assert "cpu" in caught.value.change
    assert not any((place / "drive").iterdir())


def test_path_that_cannot_be_written_is_refused(place: Path) -> None:
    (place / "drive").write_text("a file")
    with pytest.raises(UserError, match=r"strategy\.nvme_path"), nvme.swap_folder(recipe(), World(), lambda: 1):
        pass


@pytest.mark.matrix
def test_parameters_and_optimizer_lie_on_the_drive_and_losses_are_the_same(place: Path, ranks: Ranks) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io does not compile here: libaio's headers or a C++ compiler are missing")
    nvme._load_op()  # Compiled once, in minutes on busy cores, which is not the training's time.
    plain = ranks.run(place, "recipe=small", "output.name=plain")
    assert plain.returncode == 0, plain.stderr[-2000:]
    largest: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for file in (place / "drive").rglob("*.swp"):
                try:
                    largest[str(file.relative_to(place / "drive"))] = file.stat().st_size
                except FileNotFoundError:
                    continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    arguments = ["recipe=small", "output.name=nvme", "strategy.nvme_path=drive", *NVME]
    run = ranks.run(place, *arguments, processes=2, entry=ON_CPU)
    done.set()
    watcher.join()
    assert run.returncode == 0, run.stderr[-3000:]
    for kind in ("params", "optimizer"):
        for rank in ("rank0", "rank1"):
            written = [size for name, size in largest.items() if kind in name and f"/{rank}/" in name]
            assert sum(written) > 2**20, f"{kind} of {rank}: {largest}"
    assert losses(place / "runs" / "nvme") == pytest.approx(losses(place / "runs" / "plain"), rel=1e-6)
    assert not any((place / "drive").iterdir()), "nothing is left on the drive"
