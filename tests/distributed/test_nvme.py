"""Offloading to NVMe: the files that really appear, equal losses, and what is checked before anything is loaded."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import losses, write_jsonl, write_recipe
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
ON_DRIVE = "extra.deepspeed.zero_optimization.offload_param.max_in_cpu=0"
NVME = ["strategy=zero3_nvme", "strategy.param_persistence_threshold=0", "strategy.pin_memory=false"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a Llama whose matrices are larger than the 1 MiB under which DeepSpeed swaps nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer, model = tiny_tokenizer(), tmp_path / "model"
    size = LlamaConfig(hidden_size=512, intermediate_size=2304, num_hidden_layers=2, num_attention_heads=8)
    size.update({"vocab_size": len(tokenizer), "max_position_embeddings": 256})
    LlamaForCausalLM(size).save_pretrained(model)
    tokenizer.save_pretrained(model)
    write_jsonl(tmp_path / "chat.jsonl", chat_rows(20))
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


def test_runs_that_one_shell_starts_leave_each_other_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all that tells them apart is the same, as in containers that share a host and a drive."""
    monkeypatch.setattr(nvme, "_load_op", lambda: None)
    with nvme.swap_folder(recipe(), World(), lambda: 1000) as alone:
        assert alone and alone.name.endswith(f"-{os.getpid()}"), "its parent may start others"
        (alone / "weights.swp").touch()
        with pytest.raises(UserError, match="another run uses"), nvme.swap_folder(recipe(), World(), lambda: 1000):
            pass
        assert (alone / "weights.swp").is_file()
    folders = set()
    for port in ("29500", "29501"):
        monkeypatch.setenv("MASTER_PORT", port)
        with nvme.swap_folder(recipe(), World(0, 0, 2, 2), lambda: 1000) as folder:
            folders.add(folder)
    assert len(folders) == 2


def test_too_small_a_drive_is_refused_before_anything_is_loaded(place: Path) -> None:
    with (
        pytest.raises(UserError, match=r"takes 8\.19 TiB") as caught,
        nvme.swap_folder(recipe(), World(0, 0, 4, 2), lambda: 9000 * 10**9),
    ):
        pass
    assert "cpu" in caught.value.change
    assert not any((place / "drive").iterdir())


def test_path_that_cannot_be_written_is_refused(place: Path) -> None:
    (place / "drive").write_text("a file")
    with pytest.raises(UserError, match=r"strategy\.nvme_path"), nvme.swap_folder(recipe(), World(), lambda: 1):
        pass


@pytest.mark.parametrize(
    ("compatible", "what", "change"),
    [
        (False, "needs libaio and a C++ compiler", "apt install libaio-dev g++"),
        (True, "cannot be built", "libaio's headers"),
    ],
)
def test_without_what_compiles_the_op_it_is_said_how_to_get_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, compatible: bool, what: str, change: str
) -> None:
    def fail() -> None:
        raise RuntimeError("c++ failed")

    builder = SimpleNamespace(name="async_io", is_compatible=lambda: compatible, load=fail)
    module = SimpleNamespace(AsyncIOBuilder=lambda: builder)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", module)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(place))
    with pytest.raises(UserError) as refused, nvme.swap_folder(recipe(), World(), lambda: 1):
        pass
    assert what in refused.value.what and change in refused.value.change
    assert not any((place / "drive").iterdir())


def test_without_nvme_there_is_no_folder_and_who_is_not_first_leaves_it_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "_load_op", lambda: None)
    with nvme.swap_folder(recipe("strategy.offload_optimizer=cpu", "strategy.offload_param=cpu"), World(), int) as none:
        assert none is None and not (place / "drive").exists()
    for only in ("strategy.offload_optimizer=cpu", "strategy.offload_param=cpu"):
        with nvme.swap_folder(recipe(only), World(3, 1, 4, 2), lambda: 10**18) as folder:
            assert folder and (folder / "rank3").is_dir() and not (folder / ".lock").exists()
    assert folder.is_dir(), "its launcher's first process removes it"


def compiled_or_skip() -> None:
    """DeepSpeed's `async_io`: compiled once, in minutes on busy cores, which is not a training's time."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io does not compile here: libaio's headers or a C++ compiler are missing")
    nvme._load_op()


@pytest.mark.parametrize(
    ("processes", "own"),
    [
        (2, ["method=lora", "max_steps=4"]),
        (2, [ON_DRIVE, "activation_checkpointing=full", "evaluation.every_steps=1", "data.eval_split=0.2"]),
        (1, [ON_DRIVE, "activation_checkpointing=full", "micro_batch_size=1"]),
    ],
    ids=["frozen", "evaluated", "alone"],
)
def test_weights_that_come_from_a_drive_are_those_that_went_there(
    processes: int, own: list[str], place: Path, ranks: Ranks
) -> None:
    """More of them than there are buffers, and larger than buffers are at first; DeepSpeed by itself ends there."""
    plain = ranks.run(place, "recipe=small", "output.name=plain", *(each for each in own if each != ON_DRIVE))
    assert plain.returncode == 0, plain.stderr[-2000:]
    run = ["recipe=small", "output.name=nvme", *NVME, "strategy.nvme_path=drive", *own]
    swapped = ranks.run(place, *run, processes=processes, entry="nvme_files")
    assert swapped.codes == [0] * processes, swapped.stderr[-3000:]
    assert losses(place / "runs" / "nvme") == pytest.approx(losses(place / "runs" / "plain"), rel=1e-6)


@pytest.mark.matrix
def test_parameters_and_optimizer_lie_on_the_drive_and_losses_are_the_same(place: Path, ranks: Ranks) -> None:
    compiled_or_skip()
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


@pytest.mark.matrix
@pytest.mark.parametrize(("method", "parameters"), [("full", "nvme"), ("full", "none"), ("lora", "none")])
def test_a_training_goes_on_with_what_lay_on_the_drive(method: str, parameters: str, place: Path, ranks: Ranks) -> None:
    """Masters, moments and the count of steps; also of groups too small for the drive, such as norms and adapters."""
    compiled_or_skip()
    own = ["recipe=small", "max_steps=5", f"method={method}", *NVME, "strategy.nvme_path=drive"]
    own += [
        f"strategy.offload_param={parameters}",
        "schedule.name=constant",
        "optimizer.learning_rate=1e-3",
        "checkpoint.save_steps=2",
    ]
    straight = ranks.run(place, *own, "output.name=straight", processes=2, entry=ON_CPU)
    assert straight.codes == [0, 0], straight.stderr[-3000:]
    killed = ranks.run(place, *own, "output.name=killed", processes=2, entry="faults", FAULTS="4 all kill")
    assert killed.codes == [-signal.SIGKILL] * 2
    done = ranks.run(place, *own, "output.name=killed", processes=2, entry=ON_CPU)
    assert done.codes == [0, 0], done.stderr[-3000:]
    assert losses(place / "runs" / "killed") == losses(place / "runs" / "straight")
    assert not any((place / "drive").iterdir()), "what the killed one left is gone"
