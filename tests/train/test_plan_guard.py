"""A run and its plan: printed, kept, set against what came, and used to refuse and to explain."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from harness import RUN, environment, leave_unmeasured
from ranks import Ranks
from small import populate

from toolkit.distributed.layout import World
from toolkit.planner.hardware import find
from toolkit.planner.hardware.detect import Gpu
from toolkit.planner.plan import Plan
from toolkit.planner.trace import store
from toolkit.planner.trace.analytic import estimated
from toolkit.recipe.rules import load_checked
from toolkit.train.main import main
from toolkit.train.plan_guard import PlanGuard, plan_run

if TYPE_CHECKING:
    from toolkit.models.load import ModelSource

TOO_LARGE = ["batch.global_batch_size=65536", "batch.micro_batch_size=65536"]


@pytest.fixture
def planned() -> None:
    """From traces, as a user's runs are."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one."""
    populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / "small" / "manifest.json").read_text(encoding="utf-8"))
    return found


def test_a_run_prints_its_plan_and_keeps_it_beside_what_came(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "powercap" / "intel-rapl:0"
    package.mkdir(parents=True)
    for file, value in (("name", "package-0"), ("energy_uj", 0), ("max_energy_range_uj", 3_600_000_000)):
        (package / file).write_text(f"{value}\n")
    monkeypatch.setattr("toolkit.train.energy.POWERCAP", folder / "powercap")
    assert main(["recipe=small", "schedule.max_steps=4"]) == 0

    printed = capsys.readouterr().out
    assert "FITS" in printed and "Memory" in printed
    kept = manifest(folder)
    plan, measured = Plan.model_validate(kept["plan"]), kept["measured"]
    assert plan.origin == "traced"
    assert plan.work.steps == 4 and plan.work.tokens_from == "counted"
    assert measured["tokens"] == pytest.approx(plan.work.tokens, rel=0.25)
    assert measured["step_seconds"] > 0 and measured["total_seconds"] > measured["step_seconds"]
    report = (folder / "runs" / "small" / "report.html").read_text(encoding="utf-8")
    assert "Planned and measured" in report
    assert measured["energy_kwh"] == 0
    for shown in (printed, report, (folder / "runs" / "small" / "final" / "README.md").read_text(encoding="utf-8")):
        assert re.search(r"energy.*\b0 Wh", shown, re.DOTALL)


def test_a_run_is_planned_with_the_devices_of_the_folder_that_was_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "recipes").rename(folder / "mine")
    (folder / "mine" / "_hardware.yaml").write_text("devices: {ours: {like: h100, reported: [Our GPU]}}\n")
    memory = find("h100").device.memory
    monkeypatch.setattr("toolkit.planner.hardware.detect.visible_gpus", lambda *_: [Gpu("Our GPU", memory)])
    guard = plan_run(load_checked("small", [], "mine"), World(), cast("ModelSource", None))
    assert guard.hardware.device.name == "ours"


def test_modules_that_the_model_lacks_are_refused_before_weights_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("toolkit.models.load.ModelSource.load", lambda *_: pytest.fail("the weights were loaded"))
    assert main(["recipe=small", "method.name=lora", "method.target_modules=[q_prj]"]) == 2
    assert "did you mean 'q_proj'?" in capsys.readouterr().err


def test_a_finished_run_keeps_the_plan_it_was_measured_against(folder: Path, ranks: Ranks) -> None:
    assert main(["recipe=small"]) == 0
    before = manifest(folder)

    done = ranks.run(folder, "recipe=small", processes=2)

    assert done.returncode == 0 and "This run is finished" in done.stdout, done.stderr
    assert manifest(folder) == before


def test_the_host_memory_of_a_run_is_about_what_was_planned(folder: Path) -> None:
    command = [sys.executable, str(RUN), "recipe=small"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    kept = manifest(folder)
    assert kept["plan"]["host"]["peak"] == pytest.approx(kept["measured"]["host"], rel=0.4)


def test_what_would_not_fit_is_refused_before_the_weights_load(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Reading them would be an error of its own.
    (folder / "llama" / "model.safetensors").write_bytes(b"")

    assert main(["recipe=small", *TOO_LARGE]) == 1
    refused = capsys.readouterr().err
    assert main(["recipe=small", *TOO_LARGE, "--force"]) == 1
    forced = capsys.readouterr().err

    assert "would not fit" in refused and "--force" in refused
    assert "batch.micro_batch_size=" in refused
    assert "would not fit" not in forced and "cannot be loaded" in forced


LIMITED = """
import re, resource
from toolkit.train.main import main as train

def main(arguments):
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20,) * 2)
    return train(arguments)
"""


def test_memory_that_runs_out_is_explained_by_the_plan(folder: Path, ranks: Ranks) -> None:
    """A limit on the process stands for a device that others use too: the plan cannot know of it."""
    (folder / "limited.py").write_text(LIMITED)
    large = ["batch.global_batch_size=512", "batch.micro_batch_size=512", "model.attention=eager"]

    done = ranks.run(folder, "recipe=small", *large, entry="limited")

    assert done.returncode == 1, done.stderr
    assert "out of memory" in done.stderr
    assert "held:" in done.stderr and "planned:" in done.stderr and "logits" in done.stderr
    # Which change comes first depends on what has been traced on this machine; with nothing, no figure goes with it.
    keys = r"(batch\.micro_batch_size=|activation_checkpointing|model\.attention=auto)"
    change = rf"^  (set .*{keys}|nothing .* lower batch\.micro_batch_size )"
    assert re.search(change, done.stderr, re.MULTILINE), done.stderr
    assert manifest(folder)["status"] == "failed"
    assert "Traceback" not in done.stderr


def test_a_micro_batch_that_auto_chose_is_lowered_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the memory that there was `auto` would choose a smaller one, which is the change to name."""
    for name in ("find", "obtain"):
        monkeypatch.setattr(store, name, lambda setting, *_: replace(estimated(setting, ""), origin="traced"))
    asked = ["batch.micro_batch_size=auto", "batch.seq_len=2048", "activation_checkpointing.mode=none"]
    loaded = load_checked("smollm2_135m_lora_demo", [*asked, "batch.global_batch_size=64"])
    # The config of a built-in model is known before any file is read.
    source: Any = None
    guard = PlanGuard(loaded, source, find("h200"), None)

    answer = guard.out_of_memory(MemoryError("no memory"))

    changed = re.match(r"set batch\.micro_batch_size=(\d+) ", answer.change)
    assert changed and int(changed[1]) < guard.plan.micro_batch_size, answer


def test_a_model_whose_code_cannot_be_traced_still_trains(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(folder / "cache"))
    leave_unmeasured(folder / "cache")
    # Batches of some shapes only, as with a model that checks its inputs.
    (folder / "llama" / "modeling_odd.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\n"
        "def check(module, args, kwargs):\n"
        "    assert kwargs['input_ids'].shape[1] <= 128, 'too long for this model'\n\n\n"
        "class OddForCausalLM(LlamaForCausalLM):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.model.register_forward_pre_hook(check, with_kwargs=True)\n"
    )
    config = json.loads((folder / "llama" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    (folder / "llama" / "config.json").write_text(json.dumps(config))

    assert main(["recipe=small", "model.trust_remote_code=true", "model.attention=sdpa"]) == 0

    plan = Plan.model_validate(manifest(folder)["plan"])
    assert plan.origin == "formulas"
    assert any("could not be traced" in note and "too long for this model" in note for note in plan.notes)


def test_the_environment_of_a_launch_does_not_reach_the_tracing(tmp_path: Path) -> None:
    """A plan inside a launch of several processes must not wait for them."""
    populate(tmp_path, "llama")
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "plan", "recipe=small", "hardware=h100", "--json"],
        env=environment() | variables | {"TOOLKIT_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["origin"] == "traced"
    assert os.listdir(tmp_path / "cache" / "traces")
