"""`auto` in a recipe: what it becomes on which hardware, why, and in a real run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from arithmetic import Arithmetic, recipe
from harness import environment, losses, write_recipe
from ranks import Ranks
from small import RECIPE, populate

from toolkit.cli.main import main as toolkit
from toolkit.common import UserError
from toolkit.distributed.layout import batch_layout, micro_batch_sizes
from toolkit.planner.auto import fastest_precision, resolve
from toolkit.planner.build import estimate
from toolkit.planner.hardware import Rate, find
from toolkit.planner.plan import Plan
from toolkit.planner.search import TIE
from toolkit.recipe import Recipe, RecipeError, load
from toolkit.recipe.rules import check, load_checked
from toolkit.recipe.sections import ActivationCheckpointing
from toolkit.train.main import main

AUTO = {
    "strategy": {"name": "auto"},
    "activation_checkpointing": {"mode": "auto"},
    "batch": {"micro_batch_size": "auto"},
}
GIB = 2**30
ON_THE_LINE = ["strategy=auto", "micro_batch_size=auto", "activation_checkpointing=auto"]


def decided(made: Recipe) -> tuple[object, ...]:
    strategy, checkpointing = made.strategy, made.activation_checkpointing
    return strategy.name, strategy.offload_optimizer, checkpointing.mode, made.batch.micro_batch_size


@pytest.mark.parametrize(
    ("billions", "hardware", "expected"),
    [
        # All of it fits: nothing is sharded or recomputed.
        (1, "h200", ("ddp", "none", "none", 4)),
        (1, "h200x8", ("ddp", "none", "none", 2)),
        # 16 bytes per parameter do not fit on one device; the lightest sharding that does is as fast as any.
        (8, "h200x8", ("zero1", "none", "none", 2)),
        # One device has nobody to share with, so the host takes the optimizer.
        (8, "h200", ("zero2", "cpu", "none", 4)),
        # A small card: the activations of four sequences would take 3.8 GiB, and recomputing costs more than smaller
        # micro-batches.
        (1, "rtx3090", ("ddp", "none", "none", 4)),
    ],
)
def test_the_fastest_that_fits(billions: float, hardware: str, expected: tuple[object, ...]) -> None:
    made, chosen = resolve(recipe(**AUTO), find(hardware), Arithmetic(billions))
    assert decided(made) == expected
    assert not made.undecided and check(made) == []
    batch_layout(made, find(hardware).devices)
    for path, text in chosen.items():
        section, _, key = path.partition(".")
        assert text.startswith(f"{getattr(getattr(made, section), key)}: ")


def test_a_cpu_takes_the_smallest_micro_batch_that_is_about_as_fast() -> None:
    # Steps with passes of 4, 2 and 1 rows take 1.39, 1.47 and 1.63 s.
    made, plans = recipe(), Arithmetic(1)
    found, chosen = resolve(made, find("cpu"), plans)
    assert found.batch.micro_batch_size == 2
    assert "4 would be 5% faster at most and take 0.2 GiB more" in chosen["batch.micro_batch_size"]
    assert resolve(made, find("h200"), plans)[0].batch.micro_batch_size == 4


def test_what_the_recipe_says_stands() -> None:
    hardware, plans = find("h200x8"), Arithmetic(8)
    asked = recipe(strategy={"name": "auto", "sharding": "shard_grad_op"})
    made, chosen = resolve(asked, hardware, plans)
    assert (made.strategy.name, made.strategy.sharding) == ("fsdp", "shard_grad_op")
    assert chosen.keys() == {"strategy.name", "batch.micro_batch_size"}
    made, _ = resolve(recipe(strategy={"name": "auto", "offload_optimizer": "cpu"}), hardware, plans)
    assert (made.strategy.name, made.strategy.offload_optimizer) == ("zero2", "cpu")
    asked = recipe(activation_checkpointing={"mode": "auto", "every_n_layers": 3})
    made, _ = resolve(asked, find("h200x2"), Arithmetic(1))
    assert (made.activation_checkpointing.mode, made.activation_checkpointing.every_n_layers) == ("full", 3)
    made, chosen = resolve(recipe(method={"name": "lora"}), hardware, plans)
    assert decided(made) == ("ddp", "none", "none", 2) and chosen.keys() == {"batch.micro_batch_size"}


def test_by_default_the_micro_batch_fits_the_card() -> None:
    asked = recipe(method={"name": "lora"})
    sizes = {
        name: resolve(asked, find(name), Arithmetic(10.5))[0].batch.micro_batch_size for name in ("h200", "rtx4090")
    }
    assert sizes == {"h200": 4, "rtx4090": 1}
    # What fits in no way is planned with the least, and the plan says what is missing.
    made, chosen = resolve(recipe(), find("rtx4090"), Arithmetic(8))
    assert made.batch.micro_batch_size == 1
    assert re.match(r"1: 4 would not fit \(\d+\.\d of 23\.\d GiB of device memory\)", chosen["batch.micro_batch_size"])


def test_reasons_name_what_does_not_fit_and_what_is_slower() -> None:
    _, chosen = resolve(recipe(**AUTO), find("h200x8"), Arithmetic(8))
    assert re.match(
        r"zero1: ddp might not fit \(up to 1[4-9]\d\.\d of 139\.\d GiB of device memory\);", chosen["strategy.name"]
    )
    assert "zero2 would be no faster" in chosen["strategy.name"]
    _, chosen = resolve(recipe(**AUTO), find("h200"), Arithmetic(8))
    assert chosen["strategy.offload_optimizer"] == "cpu: goes with strategy"
    assert "fsdp with offload_param=cpu" in chosen["strategy.name"]


def test_reasons_name_an_engine_before_its_settings(only_shipped_traces: None) -> None:
    words = ["strategy=auto", "data.streaming=true", "schedule.max_steps=100", "batch.global_batch_size=2048"]
    loaded = load("gpt2_xl_clm", [*words, "precision=bf16"])
    plan = estimate(loaded.recipe, loaded.name, find("mi300xx8"), advice=False)
    assert "fsdp with sync_each_batch=true" in plan.chosen["strategy.name"]


def test_the_answer_does_not_depend_on_what_was_planned_before() -> None:
    """Processes of one launch may find different traces in the cache."""
    for known in (Arithmetic(8), Arithmetic(8, without=("full", "selective", "none"))):
        made, chosen = resolve(recipe(**AUTO), find("h200x8"), known)
        assert made.strategy.name == "zero1"
    assert chosen == resolve(recipe(**AUTO), find("h200x8"), Arithmetic(8))[1]


@pytest.mark.parametrize(
    ("hardware", "cpu_factor", "expected"),
    [("h100", None, "bf16"), ("t4", None, "fp16"), ("mi300x", None, "bf16"), ("cpu", 4, "bf16"), ("cpu", 0.5, "fp32")],
)
def test_precision_is_what_the_device_computes_fastest(hardware: str, cpu_factor: float | None, expected: str) -> None:
    machine = find(hardware)
    if cpu_factor:
        flops = {"fp32": 2e11, "bf16": cpu_factor * 2e11}
        machine = dataclasses.replace(machine, device=machine.device.model_copy(update={"flops": flops}))
    made, chosen = fastest_precision(recipe(precision="auto"), machine)
    assert (made.precision, made.batch.micro_batch_size) == (expected, "auto")
    assert chosen["precision"].startswith(f"{expected}: ")
    stated = recipe(precision="fp32")
    assert fastest_precision(stated, machine) == (stated, {})


@pytest.mark.parametrize(
    ("reached", "nodes", "expected"),
    [
        (0.9, 1, "bf16: computed 2 times"),
        (0.4, 1, "bf16: computed 0.89 times as fast as fp32, in half the bytes"),
        (0.25, 1, "fp32: nothing shorter is faster"),
        (0.25, 2, "bf16: computed 2 times"),
    ],
)
def test_precision_of_a_cpu_is_what_was_measured_to_be_fastest(reached: float, nodes: int, expected: str) -> None:
    """Some CPUs with instructions for bf16 multiply in it at half the speed of fp32. Each node measures its own."""
    machine = find("cpu")
    device = machine.device.model_copy(update={"flops": {"fp32": 2e11, "bf16": 4e11, "fp16": 1e11}})
    by_dtype = {
        dtype: device.efficiency.model_copy(update={"matmul": Rate(share, share, share), dtype: None})
        for dtype, share in {"fp32": 0.9, "bf16": reached}.items()
    }
    machine = dataclasses.replace(machine, device=device, by_dtype=by_dtype, nodes=nodes)
    made, chosen = fastest_precision(recipe(precision="auto"), machine)
    assert chosen["precision"].startswith(expected) and expected.startswith(made.precision)


def test_precision_goes_with_the_rest_of_the_recipe() -> None:
    weights = {"model": {"path": "m", "dtype": "fp16"}, "method": {"name": "lora"}, "precision": "auto"}
    assert fastest_precision(recipe(**weights), find("h100"))[0].precision == "fp16"
    assert not check(recipe(**weights))


def test_nothing_fits() -> None:
    with pytest.raises(UserError) as caught:
        resolve(recipe(**AUTO), find("h200"), Arithmetic(70))
    assert "the least that is needed is" in caught.value.what and "strategy.offload_optimizer=cpu" in caught.value.what
    first, *others = caught.value.change.removeprefix("set ").split(", or ")
    assert first.startswith("method.name=lora method.quantization=nf4 (")
    assert others and all(re.match(r"hardware=h200x\d \(", other) for other in others)
    # What is said to fit does.
    changed = recipe(**AUTO, method={"name": "lora", "quantization": "nf4"})
    assert resolve(changed, find("h200"), Arithmetic(70))[0].strategy.name == "ddp"


@pytest.mark.parametrize(
    ("hardware", "stated"),
    [("cpu", "strategy.offload_optimizer=cpu"), ("h200", "strategy.sync_each_batch=true parallel.tensor=8")],
)
def test_keys_with_which_no_strategy_goes_are_named(hardware: str, stated: str) -> None:
    """The plan tries no strategy that lacks what the recipe says of it."""
    made = load("llama_3_1_8b_lora", ["strategy=auto", "activation_checkpointing=auto", *stated.split()]).recipe
    with pytest.raises(UserError, match="no setting goes with the rest of the recipe") as caught:
        resolve(made, find(hardware), Arithmetic(8))
    assert caught.value.change.startswith(f"leave out {stated.split()[0]}, which few strategies have, or set these")


def test_devices_that_cannot_take_the_batch() -> None:
    with pytest.raises(UserError, match="a global batch of 16 sequences does not divide into 3 processes"):
        resolve(recipe(**AUTO), find("h200x3"), Arithmetic(1))


def test_fewer_processes_are_those_that_divide_experts_too() -> None:
    sizes = ["parallel.expert=4", "batch.global_batch_size=12", "batch.micro_batch_size=1"]
    made = load("qwen3_30b_a3b_full_expert", sizes).recipe
    with pytest.raises(UserError, match="12 sequences does not divide into 8 processes") as caught:
        batch_layout(made, 8)
    assert "or start 4 processes" in caught.value.change
    assert batch_layout(made, 4).global_batch_size == 12


def test_a_recipe_that_was_not_checked_is_told_what_is_wrong_with_it() -> None:
    loaded = load("smollm2_135m_lora_demo", ["target_modules=[q_prj]"])
    with pytest.raises(RecipeError, match="this model has no module 'q_prj'"):
        estimate(loaded.recipe, loaded.name, find("cpu"))


def test_on_a_cpu_processes_are_replicas() -> None:
    made, _ = resolve(recipe(**AUTO), find("cpux2"), Arithmetic(0.01))
    assert made.strategy.name == "ddp" and made.activation_checkpointing.mode in ("none", "full", "selective")


MODES: tuple[dict[str, Any], ...] = (
    *({"mode": "full", "every_n_layers": each} for each in (4, 2)),
    *({"mode": each} for each in ("none", "elementwise", "full", "selective", "offload")),
)
SHIPPED = ("llama_3_1_8b_lora", "gemma_3_1b_full", "llama_3_2_1b_qlora")


@pytest.fixture
def only_shipped_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that is not shipped would be made in seconds."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("toolkit.planner.trace.store._trace_in_worker", lambda setting: pytest.fail(str(setting)))


def test_a_run_does_not_take_the_last_gib_for_a_few_percent(only_shipped_traces: None) -> None:
    """8B in full on an H200: nothing fits for sure, and four rows at a time would leave a third of a GiB."""

    def on(*words: str) -> Plan:
        loaded = load("llama_3_1_8b_full_8bit", ["optimizer.name=adamw", *words])
        return estimate(loaded.recipe, loaded.name, find("h200"), advice=False)

    chosen, fuller = on(), on("activation_checkpointing=full", "batch.micro_batch_size=4")
    assert (chosen.fit.answer, fuller.fit.answer) == ("tight", "tight")
    assert fuller.fit.margin < GIB < 8 * GIB < chosen.fit.margin
    assert 0.9 < fuller.work.step_seconds.value / chosen.work.step_seconds.value < 1
    why = chosen.chosen["batch.micro_batch_size"]
    assert re.match(r"1: 9% slower than 4, which leaves less room \(139\.\d of 139", why)


def undecided(name: str, seq_len: int) -> Recipe:
    batch = {"batch.seq_len": seq_len, "batch.micro_batch_size": "auto"}
    checkpointing = ActivationCheckpointing(mode="auto")
    return load(name).recipe.with_values({"strategy.name": "ddp", "activation_checkpointing": checkpointing, **batch})


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("hardware", ["rtx4090", "l40s", "h100", "h200x8"])
def test_no_explicit_recomputation_that_fits_is_faster(name: str, hardware: str, only_shipped_traces: None) -> None:
    on = find(hardware)
    for seq_len in (1024, 4096, 16384):
        asked, explicit = undecided(name, seq_len), []
        for mode in MODES:
            for size in micro_batch_sizes(asked, on.devices):
                stated = asked.with_values(
                    {"activation_checkpointing": ActivationCheckpointing(**mode), "batch.micro_batch_size": size}
                )
                explicit.append(estimate(stated, name, on, advice=False))
        there = [each for answer in ("yes", "tight") for each in explicit if each.fit.answer == answer]
        if not there:
            with pytest.raises(UserError, match="nothing that trains the same fits"):
                estimate(asked, name, on, advice=False)
            continue
        best = [each.work.step_seconds.value for each in there if each.fit.answer == there[0].fit.answer]
        chosen = estimate(asked, name, on, advice=False)
        assert chosen.fit.answer == there[0].fit.answer
        assert chosen.work.step_seconds.value <= min(best) * (1 + TIE)


@pytest.mark.parametrize(
    ("hardware", "change"), [("a10x2", "batch.micro_batch_size=2"), ("rtx3060x2", "activation_checkpointing.mode=full")]
)
def test_where_nothing_fits_the_smallest_change_that_trains_the_same_comes_first(
    hardware: str, change: str, only_shipped_traces: None
) -> None:
    """What the recipe states beside its `auto` may be what does not fit, and needs no other optimizer."""
    words = ["strategy=auto", "batch.micro_batch_size=4", "activation_checkpointing=none"]
    loaded = load("llama_3_2_1b_full", words)
    with pytest.raises(UserError, match=f"nothing fits as asked on {hardware}") as refused:
        estimate(loaded.recipe, loaded.name, find(hardware), advice=False)
    assert refused.value.change.startswith(f"set {change} (")
    cured = load("llama_3_2_1b_full", [*words, change])
    assert estimate(cured.recipe, cured.name, find(hardware), advice=False).fit.answer == "yes"


@pytest.mark.parametrize("name", SHIPPED)
def test_more_device_memory_is_never_slower(name: str, only_shipped_traces: None) -> None:
    asked, on, before = undecided(name, 4096), find("h200"), math.inf
    for gib in range(24, 192, 24):
        device = on.device.model_copy(update={"memory": gib * 2**30})
        try:
            chosen = estimate(asked, name, dataclasses.replace(on, device=device), advice=False)
        except UserError:
            assert before == math.inf, "something fitted in less"
            continue
        if chosen.fit.answer == "yes":
            assert chosen.work.step_seconds.value <= before * (1 + TIE)
            before = chosen.work.step_seconds.value
    assert before < math.inf


def test_the_reason_says_what_recomputing_costs_and_why_it_must_be(only_shipped_traces: None) -> None:
    as_they_are = undecided("llama_3_1_8b_lora", 4480).with_values({"compile": "off"})
    made = estimate(as_they_are, "x", find("l40s"), advice=False)
    assert re.match(
        r"full: 1?\d% slower than recomputing nothing, which might not fit "
        r"\(up to 4[4-9]\.\d of 44\.4 GiB of device memory\); "
        r"recomputing every 2nd layer would take 1\.\d\d times as long",
        made.chosen["activation_checkpointing.mode"],
    )
    assert made.chosen["activation_checkpointing.every_n_layers"] == "4: recomputing every 4th layer"
    compiled = estimate(undecided("llama_3_1_8b_lora", 5376), "x", find("l40s"), advice=False)
    assert compiled.chosen["activation_checkpointing.mode"].startswith(
        "elementwise: recomputing nothing might not fit (up to 4"
    )


@pytest.mark.matrix
def test_mlps_in_tiles_are_chosen_where_nothing_else_fits() -> None:
    """131,072 tokens of an 8B on one device of 48 GB."""
    one = ["parallel.sequence=1", "batch.global_batch_size=1"]
    made = estimate(load_checked("llama_3_1_8b_128k_lora", one).recipe, "x", find("l40s"), advice=False)
    assert made.fit.answer == "yes"
    assert made.chosen["activation_checkpointing.mlp_tiles"] == "8: goes with activation_checkpointing"
    less = load_checked("llama_3_1_8b_128k_lora", [*one, "activation_checkpointing=offload"]).recipe
    assert estimate(less, "x", find("l40s"), advice=False).fit.answer != "yes"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["strategy=auto"], ""),
        (["strategy=auto", "optimizer=adafactor"], ""),
        (["strategy=auto", "activation_checkpointing=auto", "every_n_layers=2"], ""),
        # No strategy reads it without offloading.
        (["strategy=auto", "nvme_path=/scratch"], "strategy.nvme_path"),
        (["micro_batch_size=auto", "tokens_per_step=100"], "must be a multiple of batch.seq_len"),
        (["micro_batch_size=0"], "> 0 or auto"),
    ],
)
def test_rules_know_what_could_be_chosen(place: Path, overrides: list[str], problem: str) -> None:
    if not problem:
        assert load_checked("small", overrides).recipe.undecided
        return
    with pytest.raises(ValueError, match=re.escape(problem)):
        load_checked("small", overrides)


def test_a_run_takes_it_and_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=small", *ON_THE_LINE]) == 0
    assert re.search(r"auto +strategy\.name=ddp: ", capsys.readouterr().out)
    run = place / "runs" / "small"
    manifest = json.loads((run / "manifest.json").read_text())
    kept = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (
        kept["strategy"]["name"] == "ddp" and kept["batch"]["micro_batch_size"] == manifest["batch"]["micro_batch_size"]
    )
    assert manifest["chosen"].keys() >= {"strategy.name", "batch.micro_batch_size", "activation_checkpointing.mode"}
    assert manifest["chosen"]["strategy.name"].startswith("ddp: ")
    # The same command finds the same run, and the choice moves no weight.
    assert main(["recipe=small", *ON_THE_LINE]) == 0
    assert "This run is finished" in capsys.readouterr().out
    capsys.readouterr()
    assert main(["recipe=small", "~batch.micro_batch_size", "output.name=default"]) == 0
    assert re.search(r"auto +batch\.micro_batch_size=4: ", capsys.readouterr().out)
    manifest = json.loads((place / "runs" / "default" / "manifest.json").read_text())
    assert manifest["batch"]["micro_batch_size"] == 4
    assert manifest["chosen"].keys() == {"batch.micro_batch_size", "data.num_workers"}
    assert losses(place / "runs" / "default") == pytest.approx(losses(run), rel=1e-5)
    # Precision is decided before the engine, and kept for whoever continues the run elsewhere.
    assert main(["recipe=small", "precision=auto", "output.name=precision"]) == 0
    manifest = json.loads((place / "runs" / "precision" / "manifest.json").read_text())
    kept = yaml.safe_load((place / "runs" / "precision" / "recipe.yaml").read_text())
    assert kept["precision"] in ("bf16", "fp32")
    assert manifest["chosen"]["precision"].startswith(f"{kept['precision']}: ")


def test_the_value_may_come_from_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a run keep interpolations as they stand, but not where they say `auto`."""
    monkeypatch.setenv("STRATEGY", "auto")
    write_recipe(place, "small", RECIPE + "strategy: {name: '${oc.env:STRATEGY}'}\n")
    assert main(["recipe=small"]) == 0
    assert yaml.safe_load((place / "runs" / "small" / "recipe.yaml").read_text())["strategy"]["name"] == "ddp"


@pytest.mark.slow
def test_all_processes_agree(place: Path, ranks: Ranks) -> None:
    done = ranks.run(place, "recipe=small", *ON_THE_LINE, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(place / "runs" / "small")) == 2


def test_launch_refuses_what_could_not_be_chosen(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["launch", "recipe=small", *ON_THE_LINE, "--print"]
    assert toolkit([*asked, "--force"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[-5:] == ["recipe=small", *ON_THE_LINE, "--force"]
    # Nothing is known of other machines but how the batch divides.
    assert toolkit([*asked, "--slurm", "--gpus", "4", "--nodes", "1"]) == 0
    assert toolkit([*asked, "--slurm", "--gpus", "3"]) == 1
    assert "does not divide into 3 processes" in capsys.readouterr().err


def test_launching_imports_no_framework(place: Path) -> None:
    code = "import sys; from toolkit.cli.main import main; main(sys.argv[1:]); print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "recipe=small", *ON_THE_LINE, "--print"],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())
