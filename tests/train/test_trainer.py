"""The loss curve of a recipe against a plain PyTorch loop on the same batches, and the order of rows."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from ranks import Ranks
from small import set_up
from tiny import chat_rows, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback
from trl import SFTTrainer

from toolkit import data
from toolkit.data.batching.collate import mask_of
from toolkit.data.prepare import prepare
from toolkit.models.load import ModelSource
from toolkit.recipe import load
from toolkit.train.callbacks import CleanStop
from toolkit.train.main import main

STEPS, GLOBAL_BATCH, SEQ_LEN, LEARNING_RATE, WARMUP = 20, 4, 256, 3e-3, 5
RECIPE = """
description: A small full fine-tune
model: {path: MODEL}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
optimizer: {learning_rate: 3.0e-3, weight_decay: 0.1, beta2: 0.95}
schedule: {name: linear, max_steps: 20, warmup_ratio: 0.25}
batch: {seq_len: 256, global_batch_size: 4}
evaluation: {num_prompts: 0}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a tiny Llama, chat data and a recipe."""
    model = tiny_model("meta-llama/Llama-3.2-1B", tmp_path / "model")
    write_jsonl(tmp_path / "chat.jsonl", chat_rows(60))
    write_recipe(tmp_path, "small", RECIPE.replace("MODEL", str(model)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plain_loop(place: Path, overrides: list[str]) -> list[float]:
    """The same training by hand: documents one by one, summed loss over trained tokens, AdamW, clipping, schedule."""
    recipe = load("small", overrides).recipe
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    rows = prepare(recipe, tokenizer, source.stop_tokens(tokenizer)).train
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32, attn_implementation="eager")
    model.train()
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1]
    spared = [p for name, p in model.named_parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    curve = []
    for step in range(STEPS):
        chosen = []
        for position in range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH):
            epoch, offset = divmod(position, len(rows))
            chosen.append(rows[int(np.random.default_rng([42, epoch]).permutation(len(rows))[offset])])
        documents = [part for row in chosen for part in unpacked(row)]
        trained = sum(label != -100 for _, labels in documents for label in labels)
        loss = torch.zeros(())
        for ids, labels in documents:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / trained
        share = step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * share
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def unpacked(row: dict) -> list[tuple[list[int], list[int]]]:
    """The documents of a row."""
    ends = np.cumsum(row.get("seq_lengths") or [len(row["input_ids"])]).tolist()
    starts = [0, *ends[:-1]]
    return [(row["input_ids"][a:b], row["labels"][a:b]) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.micro_batch_size=4"],
        ["batch.micro_batch_size=1"],
        ["batch.micro_batch_size=4", "data.packing=true"],
        ["batch.micro_batch_size=2", "data.packing=true"],
    ],
    ids=["whole", "accumulated", "packed", "packed-accumulated"],
)
def test_loss_curve_equals_a_plain_loop(place: Path, overrides: list[str]) -> None:
    assert main(["recipe=small", *overrides]) == 0
    assert losses(place / "runs" / "small") == pytest.approx(plain_loop(place, overrides), rel=1e-5, abs=1e-5)


def test_micro_batches_are_weighed_by_their_tokens_whatever_the_models_class_says(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's says that its loss takes no count."""
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    assert main(["recipe=small", "batch.micro_batch_size=1"]) == 0
    assert losses(place / "runs" / "small") == pytest.approx(plain_loop(place, []), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_loss_curve_of_two_processes_equals_a_plain_loop(place: Path, packing: str, ranks: Ranks) -> None:
    overrides = ["batch.micro_batch_size=1", f"data.packing={packing}"]
    done = ranks.run(place, "recipe=small", *overrides, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(place / "runs" / "small") == pytest.approx(plain_loop(place, overrides), rel=1e-5, abs=1e-5)


def test_held_out_loss_is_a_mean_over_tokens_whatever_the_batch(place: Path) -> None:
    results = []
    for number, size in enumerate((1, 3, 6)):
        assert main(["recipe=small", f"evaluation.batch_size={size}", "max_steps=1", f"output.name=e{number}"]) == 0
        results.append([row["eval_loss"] for row in metrics(place / "runs" / f"e{number}") if "eval_loss" in row])
    recipe = load("small").recipe
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    held_out = prepare(recipe, tokenizer, source.stop_tokens(tokenizer)).eval
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    total, count = 0.0, 0
    for row in held_out:
        labels = torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        count += int(labels.ne(-100).sum())
    for before, after in results:
        assert before == pytest.approx(total / count, rel=1e-5)
        assert after == pytest.approx(results[0][1], rel=1e-5)
        assert math.exp(after) == pytest.approx(math.exp(results[0][1]), rel=1e-4)


@pytest.mark.parametrize(("workers", "streaming"), [(2, []), (1, ["streaming=true", "data.eval_split=null"])])
def test_workers_change_no_loss_nor_where_a_run_goes_on(place: Path, workers: int, streaming: list[str]) -> None:
    curves = []
    for number in (0, workers):
        run = [f"output.name=w{number}", f"data.num_workers={number}", "micro_batch_size=1", *streaming]
        if number:
            # It stops while workers are ahead of it, and goes on.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(CleanStop, "on_step_end", _stop_after_five)
                assert main(["recipe=small", "max_steps=10", *run]) == 0
        assert main(["recipe=small", "max_steps=10", *run]) == 0
        curves.append(losses(place / "runs" / f"w{number}"))
    manifest = json.loads((place / "runs" / f"w{workers}" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["effective"]["num_workers"] == workers and manifest["resumed_from"].endswith("checkpoint-5")
    assert len(curves[0]) == 10 and curves[0] == curves[1]


def _stop_after_five(self: CleanStop, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    self.stopped = control.should_save = control.should_training_stop = state.global_step == 5


@pytest.mark.parametrize("packing", ["false", "true"])
def test_tokens_of_a_stream_are_those_of_its_rows(place: Path, packing: str) -> None:
    """As many as were read, not as fit; also after it was stopped, and over steps that share a line."""
    run = ["recipe=small", "streaming=true", "data.eval_split=null", f"data.packing={packing}", "max_steps=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CleanStop, "on_step_end", _stop_after_five)
        assert main(run) == 0
    assert main([*run, "logging.every_steps=3"]) == 0
    trainer = set_up(*run[1:], "output.name=again", "data.num_workers=0").trainer
    batches = iter(trainer.get_train_dataloader())
    by_step, computed, padded = [], [], []
    for _ in range(8):
        each, _ = trainer.get_batch_samples(batches, trainer.args.gradient_accumulation_steps, trainer.args.device)
        shown = [batch["text_counts"] if "text_counts" in batch else mask_of(batch) for batch in each]
        by_step.append(sum(int(mask.sum()) for mask in shown))
        # What rows begin with alike is computed once.
        computed.append(sum(int((mask > 0).sum()) for mask in shown))
        padded.append(sum(mask.numel() for mask in shown))
    rows = {row["step"]: row for row in metrics(place / "runs" / "small") if "loss" in row}
    assert list(rows) == [1, 2, 3, 4, 5, 6, 8]
    for step, row in rows.items():
        since = 6 if step == 8 else step - 1
        assert row["tokens"] == sum(by_step[:step])
        share = 1 - sum(computed[since:step]) / sum(padded[since:step])
        assert row["padding"] == pytest.approx(share, abs=1e-4)
        seconds = row["step_seconds"] * (step - since)
        assert row["tokens_per_second"] == pytest.approx(sum(by_step[since:step]) / seconds, rel=0.02)
    assert sum(by_step) < 0.9 * 8 * GLOBAL_BATCH * SEQ_LEN


@pytest.mark.parametrize("streaming", [[], ["streaming=true", "data.eval_split=null"]], ids=["rows", "stream"])
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_workers_go_on_when_all_processes_are_asked_to_stop(
    place: Path, ranks: Ranks, sent: signal.Signals, streaming: list[str]
) -> None:
    """As torch's elastic agent asks, and terminals and batch systems: the step after which a run saves needs them."""
    arguments = ["recipe=small", "max_steps=100000", "data.num_workers=1", "checkpoint.rehearse=false", *streaming]
    launch = ranks.start(place, *arguments)
    rows = place / "runs" / "small" / "metrics.jsonl"
    while not (rows.is_file() and rows.read_text().count("\n") > 2):
        assert launch.running(), launch.wait()
        time.sleep(0.05)
    (training,) = (psutil.Process(pid) for pid in launch.pids)
    workers = training.children()
    assert len(workers) > 1
    for process in (*workers, training):
        process.send_signal(sent)
    done = launch.wait(60)
    assert done.codes == [0], done.stderr[-2000:]
    assert done.stderr.count("Stopping after this step") + done.stdout.count("Stopping after this step") == 1
    assert len(list((place / "runs" / "small" / "checkpoints").glob("checkpoint-*"))) == 1
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.usefixtures("in_foreground")
def test_a_signal_in_the_middle_of_a_line_stops_training_all_the_same() -> None:
    """Python's streams refuse a second write then, which would end the training before it has saved."""

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, text: object) -> int:
            if len(text) > 99:  # type: ignore[arg-type]
                os.kill(os.getpid(), signal.SIGHUP)
            return len(text)  # type: ignore[arg-type]

    line = io.TextIOWrapper(io.BufferedWriter(Terminal()))
    stop = CleanStop(SimpleNamespace(num_processes=1), lambda text: print(text, file=line, flush=True))
    stop.on_train_begin(None, None, None)
    print("step 1 " * 99, file=line, flush=True)
    stop.restore()
    assert stop.asked()


def test_workers_of_held_out_rows_go_on_too(place: Path) -> None:
    batches = set_up("data.num_workers=1", "data.eval_split=0.5").trainer.get_eval_dataloader()
    before, rows = psutil.Process().children(), iter(batches)
    next(rows)
    (worker,) = [each for each in psutil.Process().children() if each not in before]
    # Who asks is another process than the one for which it works.
    subprocess.run(["kill", str(worker.pid)], check=True)
    assert len([*rows]) == len(batches) - 1 > 0


def test_a_row_that_ends_a_run_is_told_alike_of_a_worker(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(data.prepare, "AUDITED_ROWS", 10)
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "word " * 900}]}
    rows = [*chat_rows(20), long, long]
    write_jsonl(place / "chat.jsonl", rows)
    told = []
    for number in (0, 1):
        run = [f"output.name=w{number}", f"data.num_workers={number}", "streaming=true", "data.eval_split=null"]
        assert main(["recipe=small", "max_steps=9", "shuffle=false", *run]) == 1
        told.append(capfd.readouterr().err.partition("error: ")[2])
    assert told[0] == told[1] and "chat.jsonl:21 has" in told[0] and "Traceback" not in told[0]


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).split(".")[1] in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_micro_batch_does_not_wait_for_the_device(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one or two questions by which Transformers decides what mask a batch needs."""
    trainer = set_up().trainer
    batches = iter(trainer.get_train_dataloader())
    (first, _), tokens = trainer.get_batch_samples(batches, 2, trainer.args.device)
    trainer.current_gradient_accumulation_steps = 2
    monkeypatch.setattr(trainer.accelerator, "gather", lambda value: pytest.fail("processes wait for each other"))
    with Waits() as waits:
        trainer.training_step(trainer.model, first, tokens)
    assert len(waits.seen) <= 2


def test_a_step_does_not_walk_through_all_modules(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them take milliseconds: to say again that they are trained, to drop gradients, to count FLOPs."""
    calls: list[str] = []
    for name in ("train", "named_modules"):
        function = getattr(torch.nn.Module, name)

        def noted(*args: Any, _name: str = name, _function: Any = function, **kwargs: Any) -> Any:
            calls.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(torch.nn.Module, name, noted)

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            walks.append(calls.copy())
            calls.clear()

    walks: list[list[str]] = []
    trainer = set_up("max_steps=4", "batch.micro_batch_size=2").trainer
    trainer.add_callback(Steps())
    trainer.train()
    assert walks[2:] == [[], []], "the first two have theirs"
    inputs = {"input_ids": torch.zeros(2, 3)}
    assert trainer.floating_point_ops(inputs) == SFTTrainer.floating_point_ops(trainer, inputs) > 0
    trainer.model.eval()
    assert not any(each.training for each in trainer.model.modules())
    trainer.model.train()
    assert all(each.training for each in trainer.model.modules())
    trainer.model.zero_grad()
    assert all(each.grad is None for each in trainer.model.parameters())
