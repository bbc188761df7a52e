"""What is measured around the steps."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from toolkit.data.batching.batches import FixedOrder, MicroBatches
from toolkit.distributed.layout import BatchLayout, Length, World
from toolkit.report.terminal import Progress
from toolkit.train import callbacks
from toolkit.train.callbacks import Meter, step_tokens
from toolkit.train.run_folder import RunFolder
from toolkit.train.startup import StartUp, process_seconds
from toolkit.train.trainers.trainer import Waiting


def session(folder: Path, length: Length, lengths: list[int], shuffle: bool = True, guard: Any = None) -> Any:
    """What a meter reads of a session: four rows of up to 25 tokens are a step."""
    columns = np.array(lengths)[:, None]
    order = FixedOrder(len(lengths), 1, shuffle)
    return SimpleNamespace(
        folder=RunFolder(folder),
        world=World(),
        length=length,
        layout=BatchLayout(4, 4, 1, 1, 25),
        trainer=SimpleNamespace(
            batches=MicroBatches(order, columns, columns, length.total_steps, 4, 1, 1) if lengths else None,
            waiting=Waiting(),
            row_time=None,
        ),
        prepared=SimpleNamespace(eval=[]),
        progress=Progress(),
        guard=guard,
        recipe=SimpleNamespace(evaluation=SimpleNamespace(every_steps=4), writes=False),
    )


@pytest.mark.parametrize("shuffle", [True, False])
def test_step_tokens_are_those_of_the_rows_drawn(shuffle: bool, tmp_path: Path) -> None:
    lengths = np.array([3, 5, 7, 11, 13])
    counted = session(tmp_path, Length(6, None, 0, None), lengths.tolist(), shuffle)
    tokens, rows = step_tokens(counted), counted.trainer.batches.order.between(0, 24)
    by_step = [int(lengths[rows[step * 4 : step * 4 + 4]].sum()) for step in range(6)]
    longest = [4 * int(lengths[rows[step * 4 : step * 4 + 4]].max()) for step in range(6)]
    assert [tokens(step, step + 1)[0] for step in range(6)] == by_step
    total, padding = tokens(1, 5)
    assert total == sum(by_step[1:5]) and padding == pytest.approx(1 - total / sum(longest[1:5]))
    assert tokens(2, 2)[0] == 0


def test_seconds_and_tokens_go_on_after_a_resume(tmp_path: Path) -> None:
    lines = ['{"step": 5, "seconds": 100.0, "loss": 2.0}', '{"step": 6, "seconds": 120.0}', '{"step": 7, "sec']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    meter = Meter(session(tmp_path, Length(20, 2.0, 0, None), [10] * 8))
    state = type("State", (), {"global_step": 5, "max_steps": 20, "log_history": []})()
    meter.on_train_begin(None, state, None)
    state.global_step = 6
    meter.on_log(None, state, None, logs={"loss": 1.5, "learning_rate": 1e-3, "grad_norm": 0.1})
    assert meter.last["tokens"] == 6 * 40
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert '"step": 6' in last and '"epoch": 3.0' in last and '"seconds": 100.' in last


def test_metrics_that_cannot_be_opened_for_a_moment_lose_no_line_and_this_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter(session(tmp_path, Length(20, None, 0, 5), [25] * 8))
    state = type("State", (), {"global_step": 0, "max_steps": 20, "log_history": []})()
    meter.on_train_begin(None, state, None)

    def closed(file: Path, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    for step in range(1, 6):
        with monkeypatch.context() as patch:
            if step in (3, 4):
                patch.setattr(Path, "open", closed)
            meter.write(step, {"loss": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    (said,) = caplog.messages
    assert "its disk does not answer" in said and "metrics from step 3 on are written when they can be" in said


def test_saving_and_evaluating_are_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    # By the plan a step has 50 tokens of 8 FLOPs each and takes a second, in which the device could do 1000 FLOPs.
    work = SimpleNamespace(
        step_seconds=SimpleNamespace(value=1.0), tokens_per_step=50.0, model_flops_per_step=400.0, mfu=0.4
    )
    plan = SimpleNamespace(work=work)
    meter = Meter(session(tmp_path, Length(20, None, 0, 5), [25] * 8, guard=SimpleNamespace(plan=plan)))
    state = type("State", (), {"global_step": 0, "max_steps": 20, "log_history": []})()
    meter.on_train_begin(None, state, None)
    for step in range(1, 13):
        now[0] += 2.0
        state.global_step = step
        meter._trainer.waiting.seconds += 0.5
        meter._trainer.waiting.trained += torch.tensor(40.0)
        meter.on_step_end(None, state, None)
        meter.on_log(None, state, None, logs={"loss": 1.0})
        if step % 4 == 0:
            now[0] += 30.0
            meter.evaluated(step, {"eval_loss": 1.0, "eval_perplexity": 2.7}, 30.0)
        if step % 5 == 0:
            now[0] += 11.0
            meter.on_save(None, state, None)
        assert meter.last["tokens_per_second"] == 50
        assert meter.last["trained_tokens_per_second"] == 20
        assert (meter.last["step_seconds"], meter.last["data_wait"]) == (2.0, 0.25)
        # 100 tokens in two seconds.
        assert (meter.last["model_flops"], meter.last["mfu"]) == (400.0, 0.4)
    assert meter.time_left.measured == 2.0
    assert meter.time_left.after(12) == 8 * 2.0 + 2 * 30.0 + 2 * 11.0


def test_start_up_is_split_into_stages_that_add_up() -> None:
    start_up = StartUp()
    reported: list[dict[str, float]] = []
    start_up.report = lambda seconds: reported.append(dict(seconds))
    start_up.ended("imports")
    assert start_up.seconds["imports"] == pytest.approx(time.time() - psutil.Process().create_time(), abs=1.5)
    start_up.ended("data")
    start_up.on_train_begin(None, None, None)
    time.sleep(0.05)
    for _ in range(2):
        start_up.on_step_end(None, None, None)
    (seconds,) = reported
    assert list(seconds) == ["imports", "data", "evaluation", "first_step"]
    assert seconds["first_step"] >= 0.04 and sum(seconds.values()) == pytest.approx(process_seconds(), abs=0.5)
