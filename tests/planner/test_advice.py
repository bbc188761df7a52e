"""What is advised, by plans whose best setting is known; and that advice can be taken as it stands."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import yaml
from arithmetic import Arithmetic, recipe

from toolkit.common import UserError, seconds_text
from toolkit.data.statistics import DataStatistics
from toolkit.planner.advice import MOST, _notes, _other_trainings, _with_devices, advise
from toolkit.planner.auto import resolve
from toolkit.planner.build import estimate
from toolkit.planner.hardware import Hardware, find
from toolkit.planner.plan import Advice, Plan
from toolkit.planner.search import explore, fastest
from toolkit.recipe import Recipe, load
from toolkit.recipe.rules import check

FULL = {"activation_checkpointing": {"mode": "full"}}
LORA = {"method": {"name": "lora"}}


def advice(billions: float, hardware: str, **sections: Any) -> list[Advice]:
    plans, machine, made = Arithmetic(billions), find(hardware), recipe(**sections)
    plan = plans(made, machine)
    assert plan is not None
    return advise(made, machine, plan, plans)


def decided(made: Recipe, machine: Hardware, plans: Arithmetic) -> Plan:
    """The plan of what `auto` takes."""
    plan = plans(resolve(made, machine, plans)[0] if made.undecided else made, machine)
    assert plan is not None
    return plan


def taken(made: Recipe, changes: dict[str, str]) -> Recipe:
    """The recipe with the changes as they would be typed."""
    return made.with_values({path: yaml.safe_load(text) for path, text in changes.items() if path != "hardware"})


@pytest.mark.usefixtures("formulas")
def test_a_cpu_that_is_slow_in_bf16_gets_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.planner.hardware.detect._cpuinfo", lambda *keys: "avx2" if "flags" in keys else "")
    loaded = load("smollm2_135m_lora_demo", ["precision=bf16"])
    plan = estimate(loaded.recipe, loaded.name, find("cpu"))
    assert any(each.changes.get("precision") == "fp32" for each in plan.advice)


LORA_INSTEAD = [{"method.name": "lora"}, {"method.name": "lora", "method.quantization": "nf4"}]
EIGHT_BITS, PURE = {"optimizer.name": "adamw_8bit"}, {"precision": "pure_bf16"}


@pytest.mark.parametrize(
    ("hardware", "sections", "expected"),
    [
        ("h200", {"precision": "bf16"}, [EIGHT_BITS, *LORA_INSTEAD, PURE]),
        ("h200", {"precision": "pure_bf16"}, [EIGHT_BITS, *LORA_INSTEAD]),
        ("h200", {"precision": "fp8"}, [EIGHT_BITS, *LORA_INSTEAD, {"precision": "pure_fp8"}]),
        *(("h200", {"precision": each}, [EIGHT_BITS, *LORA_INSTEAD]) for each in ("fp8_rowwise", "pure_fp8")),
        ("h200", {"precision": "fp16"}, [EIGHT_BITS, *LORA_INSTEAD]),
        ("h200", {"precision": "fp32"}, [EIGHT_BITS, *LORA_INSTEAD, {"precision": "bf16"}]),
        ("h200", {"optimizer": {"name": "adamw_8bit"}, "precision": "bf16"}, [*LORA_INSTEAD, PURE]),
        ("h200", {"strategy": {"name": "fsdp"}, **LORA, "precision": "fp16"}, [{"optimizer.name": "adamw_torch_8bit"}]),
        ("h200", {**LORA, "precision": "bf16"}, [EIGHT_BITS, {"method.quantization": "nf4"}]),
        ("h200", {"method": {"name": "lora", "quantization": "int8"}, "precision": "bf16"}, [EIGHT_BITS]),
        (
            *("h200", {"method": {"name": "lora", "quantization": "fp8"}, "precision": "bf16"}),
            [EIGHT_BITS, {"method.quantization": "nf4"}],
        ),
        ("t4", {**LORA, "precision": "fp32"}, [EIGHT_BITS, {"method.quantization": "nf4"}, {"precision": "fp16"}]),
        ("t4", {**LORA, "precision": "fp16"}, [EIGHT_BITS, {"method.quantization": "nf4"}]),
        (
            *("h200", {"model": {"path": "m", "attention": "sdpa"}, **LORA, "precision": "bf16"}),
            [EIGHT_BITS, {"method.quantization": "nf4"}, {"model.attention": "auto"}],
        ),
    ],
    ids=str,
)
def test_what_else_may_be_trained(hardware: str, sections: dict[str, Any], expected: list[dict[str, str]]) -> None:
    made = recipe(**sections)
    found = list(_other_trainings(made, find(hardware)))
    quantized = {"method.quantization": "nf4"}
    assert [each for each in found if each != quantized] == [each for each in expected if each != quantized]
    assert (quantized in found) == (made.method.name == "lora" and made.method.quantization in ("none", "fp8"))


CASES: list[tuple[float, str, dict[str, Any]]] = [
    (8, "h200", {}),
    (8, "h200x8", FULL),
    (1, "h200x8", {**FULL, "batch": {"micro_batch_size": 1}}),
    (70, "h200x8", {"strategy": {"name": "zero3", "reduce_bucket_size": 7}}),
    (70, "h200", {}),
    (8, "rtx3090", LORA),
    (30, "h200x8x2", {"strategy": {"name": "fsdp", "sharding": "hybrid_shard"}}),
    (1, "cpux2", FULL),
    (3, "h200", {"strategy": {"name": "single"}}),
    (8, "h200", {"strategy": {"name": "zero3", "offload_param": "nvme", "nvme_path": "/scratch"}}),
    (70, "rtx4090x4", LORA),
    (3, "t4", {"precision": "fp32", "method": {"name": "lora", "quantization": "int8"}}),
]


@pytest.mark.parametrize(("billions", "hardware", "sections"), CASES, ids=[f"{b}-{h}" for b, h, _ in CASES])
def test_advice_can_be_taken(billions: float, hardware: str, sections: dict[str, Any]) -> None:
    """Every entry keeps the rules, fits as it says, and has the figures of the recipe with its changes."""
    made, plans, machine = recipe(**sections), Arithmetic(billions), find(hardware)
    entries = advise(made, machine, decided(made, machine, plans), plans)
    assert entries and len(entries) <= MOST
    assert len({str(each.changes) for each in entries}) == len(entries)
    assert entries == advise(made, machine, decided(made, machine, plans), plans)
    for each in entries:
        changed = taken(made, each.changes)
        assert check(changed) == [], each.changes
        plan = decided(changed, find(each.changes.get("hardware", hardware)), plans)
        assert (plan.fit.answer, plan.work.step_seconds.value) == (each.fits, pytest.approx(each.step_seconds))
        assert each.fits != "no"
        if each.kind != "option":
            assert changed.method == made.method and changed.precision == made.precision
            assert changed.optimizer == made.optimizer
            assert changed.batch.sequences_per_step == made.batch.sequences_per_step
    # What was asked stands as a measure; of the rest nothing is worse in everything than what trains the same.
    same = [each for each in entries if each.kind != "option"]
    for one in entries[1:]:
        for other in same:
            better = (other.step_seconds, other.total, other.gpu_seconds_per_token)
            assert one is other or any(
                mine < theirs
                for mine, theirs in zip((one.step_seconds, one.total, one.gpu_seconds_per_token), better, strict=True)
            )


def test_no_allowed_setting_that_fits_is_faster() -> None:
    """Against every combination that the rules allow, tried one by one."""
    plans, machine, made = Arithmetic(8), find("h200x8"), recipe(**FULL)
    times = []
    for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp"):
        for mode in ("none", "selective", "full", "offload"):
            for every in (1, 2):
                for size in (1, 2):
                    changed = made.with_values(
                        {
                            "strategy.name": strategy,
                            "activation_checkpointing.mode": mode,
                            "activation_checkpointing.every_n_layers": every,
                            "batch.micro_batch_size": size,
                        }
                    )
                    plan = plans(changed, machine)
                    if check(changed) == [] and plan and plan.fit.answer == "yes":
                        times.append(plan.work.step_seconds.value)
    best = next(each for each in advice(8, "h200x8", **FULL) if each.kind == "fastest")
    assert best.step_seconds <= min(times) * 1.03


def test_what_does_not_fit_begins_with_the_smallest_change() -> None:
    """The weights of these adapters' base nearly fill the card."""
    first, *_ = advice(10, "rtx3090", **LORA)
    assert first.kind == "nearest" and first.buys.startswith("fits: needs ")
    assert first.changes == {"batch.micro_batch_size": "1"}
    # Nothing that trains the same fits.
    first, *_ = advice(70, "h200")
    assert first.kind == "option" and first.changes == {"method.name": "lora", "method.quantization": "nf4"}


def test_a_setting_that_is_best_stays() -> None:
    first, *others = advice(1, "h200", **LORA)
    assert (first.kind, first.changes, first.buys, first.costs) == ("as asked", {}, "nothing", "nothing")
    assert {each.kind for each in others} <= {"option"}


def test_words_state_the_difference_with_figures() -> None:
    entries = advice(8, "h200", **LORA, **FULL, batch={"micro_batch_size": 1})
    first, best = entries[:2]
    assert best.kind == "fastest"
    assert best.changes == {"activation_checkpointing.mode": "none", "batch.micro_batch_size": "4"}
    assert f"{seconds_text(best.step_seconds)} a step instead of {seconds_text(first.step_seconds)}" in best.buys
    assert f"{first.step_seconds / best.step_seconds:.2f} times as fast" in best.buys
    assert f"{(best.total - first.total) / 2**30:.1f} GiB more memory on a device" in best.costs
    quantized = next(each for each in entries if each.changes.get("method.quantization") == "nf4")
    assert "less memory" in quantized.buys and "rounded to 4 bits" in quantized.costs


@pytest.mark.parametrize(
    ("changes", "costs"),
    [
        ({"method.name": "lora"}, "only adapters are trained"),
        ({"method.quantization": "nf4"}, "rounded to 4 bits"),
        ({"precision": "pure_bf16"}, "no fp32 masters"),
        ({"precision": "pure_fp8"}, "no fp32 masters"),
        ({"precision": "bf16"}, "8 significant bits"),
        ({"precision": "fp32"}, "of twice the size"),
        ({"precision": "fp16"}, "loss scaling"),
        ({"activation_checkpointing.mode": "full"}, "layers are computed twice"),
        (
            {"activation_checkpointing.mode": "full", "activation_checkpointing.every_n_layers": 4},
            "every 4th layer is computed twice",
        ),
        ({"activation_checkpointing.mode": "elementwise"}, "is written to memory twice"),
        ({"activation_checkpointing.mode": "selective"}, "all but attention is computed twice"),
        ({"activation_checkpointing.mode": "offload"}, "cross to the host and back"),
        ({"activation_checkpointing.mode": "none"}, ""),
        ({"batch.micro_batch_size": 4, "method.name": "lora", "precision": "bf16"}, "adapters; 8 significant"),
    ],
    ids=str,
)
def test_what_a_setting_costs_beside_its_figures(changes: dict[str, Any], costs: str) -> None:
    told = "; ".join(_notes(changes))
    assert all(part in told for part in costs.split("; ")) and bool(told) == bool(costs)
    assert told.count("; ") == costs.count("; ")


def test_fewer_devices_are_cheaper_where_links_cost() -> None:
    cheapest = next(each for each in advice(1, "h200x8") if each.kind == "cheapest")
    assert cheapest.changes["hardware"] in ("h200", "h200x2", "h200x4")
    assert "less device time per token" in cheapest.buys and "times as long" in cheapest.costs


def test_eight_bits_are_those_the_engine_can_use() -> None:
    sharded = advice(8, "h200x8", strategy={"name": "fsdp"})
    assert {"optimizer.name": "adamw_torch_8bit"} in [each.changes for each in sharded]
    assert {"optimizer.name": "adamw_8bit"} in [each.changes for each in advice(8, "h200")]


def test_hardware_that_is_advised_can_be_asked_for() -> None:
    """A workstation holds four cards: eight are two of them."""
    made, machine = recipe(**LORA, batch={"micro_batch_size": 1}), find("rtx4090")
    named = [
        each.changes["hardware"] for count in (2, 4, 8) for each in _with_devices(made, machine, Arithmetic(8), count)
    ]
    assert set(named) == {"rtx4090x2", "rtx4090x4", "rtx4090x4x2"}
    for name in named:
        assert find(name).name == name


def test_a_card_without_bf16_is_offered_fp16() -> None:
    """Also instead of fp32; what is not traced in either is judged by its trace in bf16."""
    loaded = load("llama_3_1_8b_qlora")
    with pytest.raises(UserError, match="set precision=fp16"):
        estimate(loaded.recipe, loaded.name, find("t4"))
    loaded = load("llama_3_1_8b_qlora", ["precision=fp32", "activation_checkpointing=full"])
    plan = estimate(loaded.recipe, loaded.name, find("t4"))
    (half,) = [each for each in plan.advice if each.changes.get("precision") == "fp16"]
    assert half.fits == "yes" and half.step_seconds < plan.work.step_seconds.value / 3


def test_options_leave_the_micro_batch_to_auto() -> None:
    """Of sampled rows the largest might not fit, which must not hide an option that does with fewer."""
    lengths = tuple(np.linspace(60, 600, 1001).tolist())
    rows = DataStatistics(3000, 990_000, 900_000, 3000, 400_000_000, lengths, sample="a sample")
    loaded = load("llama_3_1_8b_qlora", ["micro_batch_size=auto", "precision=fp32", "activation_checkpointing=full"])
    plan = estimate(loaded.recipe, loaded.name, find("t4"), statistics=rows)
    assert plan.micro_batch_size < 4
    assert {"precision": "fp16"} in [each.changes for each in plan.advice]


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(
    ("name", "hardware", "words"),
    [
        ("blenderbot_400m_seq2seq", "rtx2060", ["activation_checkpointing.mode=none", "precision=fp16"]),
        ("gemma_3_1b_full", "rtx4090", ["activation_checkpointing.mode=auto", "batch.global_batch_size=1024"]),
        ("llama_3_2_1b_full", "rtx4060tix4x16", ["strategy=auto", "batch.seq_len=1024", "batch.global_batch_size=64"]),
    ],
)
def test_a_line_that_is_typed_gives_its_figures(name: str, hardware: str, words: list[str]) -> None:
    """Also where the plan then decides anew what the recipe leaves to it."""
    loaded = load(name, words)
    advised = estimate(loaded.recipe, loaded.name, find(hardware), tracing="in_process").advice
    assert len(advised) >= 3
    for each in advised:
        typed = [f"{path}={text}" for path, text in each.changes.items() if path != "hardware"]
        machine = find(each.changes.get("hardware", hardware))
        made = load(name, [*words, *typed]).recipe
        plan = estimate(made, name, machine, advice=False, tracing="in_process")
        assert (plan.fit.answer, plan.work.step_seconds.value) == (each.fits, each.step_seconds), typed


@pytest.mark.parametrize(
    ("hardware", "optimizer"),
    [pytest.param("l40sx4", "adamw_torch_8bit", marks=pytest.mark.matrix), ("a100_40gbx8", "adamw")],
    ids=["alone", "beside zero3"],
)
def test_fsdp_that_sums_whole_gradients_is_told_to_reduce_each_time(hardware: str, optimizer: str) -> None:
    """Where nothing else on these devices fits without the host, and where another strategy does."""
    made = load("llama_3_1_8b_full_8bit", ["strategy=fsdp", f"optimizer.name={optimizer}"]).recipe
    made = made.with_values({"batch.micro_batch_size": 1, "batch.global_batch_size": 128})
    plan = estimate(made, "", find(hardware))
    assert plan.fit.answer == "no"
    nearest, *_ = plan.advice
    assert nearest.kind == "nearest" and nearest.changes["strategy.sync_each_batch"] == "true"


def test_who_reduces_each_time_without_need_is_told_so() -> None:
    made = recipe(strategy={"name": "fsdp", "sync_each_batch": True})
    tried = explore(made, find("h200x8"), Arithmetic(1), ("strategy.name",))
    assert {"strategy.sync_each_batch": False} in [each.changes for each in tried]


def test_unknown_plans_are_not_guessed() -> None:
    """Settings without a trace are left out; the rest is advised."""
    made, machine = recipe(**FULL), find("h200x8")
    plans = Arithmetic(1, without=("none", "selective"))
    plan = plans(made, machine)
    assert plan is not None
    for each in advise(made, machine, plan, plans):
        assert each.changes.get("activation_checkpointing.mode", "full") == "full"

    def unknown(recipe: Recipe, hardware: object, may_trace: bool = False) -> Plan | None:
        return None

    (only,) = advise(made, machine, plan, unknown)
    assert only.kind == "as asked" and not only.changes


def test_the_search_asks_for_few_plans() -> None:
    plans = Arithmetic(8)
    found = explore(recipe(), find("h200x8"), plans, ("strategy.name", "activation_checkpointing.mode"))
    assert fastest(found) is not None and plans.asked < 40


def test_a_setting_near_the_edge_is_followed_by_one_with_room() -> None:
    entries = advice(8, "h200")
    assert [(each.kind, each.fits) for each in entries[:2]] == [("as asked", "tight"), ("fastest", "yes")]
    assert "may need more than the" in entries[0].costs
    assert all(each.fits == "yes" for each in entries[1:])


def test_steps_are_as_long_as_elsewhere_in_the_plan() -> None:
    """Days as days, and milliseconds as milliseconds."""
    texts = " ".join(each.buys + each.costs for each in advice(70, "t4x4", batch={"global_batch_size": 2**20}))
    assert re.search(r"\dd \d\dh a step instead of \d+d \d\dh", texts)


def test_rows_that_no_device_holds_are_shared_by_as_few_as_fit() -> None:
    overrides = ["batch.seq_len=131072", "batch.global_batch_size=24", "strategy.name=fsdp"]
    overrides += ["activation_checkpointing=offload", "activation_checkpointing.mlp_tiles=4"]
    loaded = load("llama_3_1_8b_lora", overrides)
    plan = estimate(loaded.recipe, loaded.name, find("rtx4080x4x2"))
    assert plan.fit.answer == "no"
    first = plan.advice[0]
    assert (first.kind, first.changes) == ("nearest", {"parallel.sequence": "2"})
    assert "devices that share a row exchange tensors" in first.costs
    loaded = load("llama_3_1_8b_lora", [*overrides, "parallel.sequence=2"])
    taken = estimate(loaded.recipe, loaded.name, find("rtx4080x4x2"), advice=False)
    assert taken.fit.answer == first.fits != "no"
    assert taken.sequence == 2
    # What already shares rows is not told to.
    shared = estimate(loaded.recipe, loaded.name, find("rtx4090x4x2"))
    assert not [each for each in shared.advice if any(path.startswith("parallel.") for path in each.changes)]


def test_where_no_number_of_devices_divides_the_heads_keys_and_values_are_gathered() -> None:
    """Three devices, and the nine heads of a model in which one device in three would hold a row."""
    made = recipe(model={"path": "builtin:smollm2-135m-instruct"}, **LORA, precision="bf16")
    plans, machine = _Shared(40), find("h100x4")
    plan = plans(made, machine)
    assert plan is not None and plan.fit.answer == "no"
    entry = advise(made, machine, plan, plans)[0]
    assert entry.kind == "nearest" and entry.changes["parallel.context"] in ("2", "4")
    assert plans.traced


class _Shared(Arithmetic):
    """Only where rows are shared does anything fit, and of gathered keys and values no plan is known."""

    traced = False

    def __call__(self, recipe: Recipe, hardware: Hardware, may_trace: bool = False) -> Plan | None:
        if recipe.parallel.context > 1 and not may_trace:
            return None
        self.traced |= recipe.parallel.context > 1
        plan = super().__call__(recipe, hardware, may_trace)
        assert plan is not None
        if recipe.parallel.sharing == 1:
            return plan.model_copy(update={"fit": plan.fit.model_copy(update={"answer": "no"})})
        fits = plan.fit.model_copy(update={"answer": "yes"})
        return plan.model_copy(update={"fit": fits})
