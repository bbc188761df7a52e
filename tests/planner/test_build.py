"""How a plan is put together: what decides whether it fits, what counted data changes, when advice traces more."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from arithmetic import recipe

from toolkit.common import UserError, bytes_text
from toolkit.data.statistics import DataStatistics
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.notes import _reached
from toolkit.planner.plan import Disk, Host, Memory, Plan, Range, Work
from toolkit.planner.question import fit
from toolkit.planner.speed.communication import HOST, link_rate
from toolkit.planner.trace import store
from toolkit.planner.trace.analytic import estimated
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.types import Trace
from toolkit.recipe import load
from toolkit.recipe.rules import load_checked

GIB = 2**30
CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}  # fmt: skip


def trace(setting: Setting, tracing: str = "worker") -> Trace:
    """The usual transformer, as if it had been traced."""
    return dataclasses.replace(estimated(setting, ""), origin="traced")


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model's code is the usual transformer."""
    monkeypatch.setattr(store, "obtain", trace)


def device_memory(low: float, value: float, high: float) -> list[Memory]:
    """One rank that needs so many GiB."""
    total = Range(value=value * GIB, low=low * GIB, high=high * GIB)
    phases = {"backward": {"parameters": int(value * GIB), "workspace": 1}}
    return [
        Memory(
            ranks="every rank", phases=phases, peak_phase="backward", allocated=int(value * GIB), reserved=total,
            context=0, total=total,
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("needed", "share_of_ram", "answer", "where"),
    [
        ((70, 75, 78), 0.5, "yes", "device memory"),
        ((70, 76, 85), 0.99, "tight", "device memory"),
        ((70, 78, 85), 1.01, "no", "host RAM"),
        ((70, 95, 99), 1.01, "no", "device memory"),
    ],
)
def test_the_place_that_may_run_out_decides(
    needed: tuple[float, float, float], share_of_ram: float, answer: str, where: str
) -> None:
    """Host RAM has no range: nearly full it fits, where a device that is less full may not."""
    hardware = find("h100")
    ram = int(share_of_ram * hardware.node.ram)
    found = fit(
        hardware,
        device_memory(*needed),
        Host(parts={"loading": ram, "saving": 1}, peak=ram),
        Disk(checkpoint=0, kept=0, model=0, nvme=0),
    )
    assert (found.answer, found.where) == (answer, where)
    assert found.decides == {"device memory": "parameters", "host RAM": "loading"}[where]
    assert found.margin == found.available - found.needed


@pytest.mark.parametrize(("held", "lost", "context", "largest"), [(5, 6, 2, "fragmentation"), (5, 1, 8, "context")])
def test_what_is_largest_may_lie_beside_what_is_allocated(held: int, lost: int, context: int, largest: str) -> None:
    """Of a tiny model, or where segments cannot grow."""
    reserved, total = (Range(value=size, low=size, high=size) for size in (held + lost, held + lost + context))
    rank = Memory(
        ranks="every rank", phases={"backward": {"parameters": 3, "activations": 2}}, peak_phase="backward",
        allocated=held, reserved=reserved, context=context, total=total,
    )  # fmt: skip
    found = fit(find("h100"), [rank], Host(parts={"processes": 1}, peak=1), Disk(checkpoint=0, kept=0, model=0, nvme=0))
    assert found.decides == largest


def test_processes_on_a_cpu_share_the_memory_that_their_host_has() -> None:
    hardware = find("cpu")
    for share, answer in ((0.5, "yes"), (0.96, "tight"), (1.01, "no")):
        peak = int(share * hardware.device.memory)
        found = fit(
            hardware,
            device_memory(90, 100, 105),  # Five percent more at most.
            Host(parts={"tensors": peak}, peak=peak),
            Disk(checkpoint=0, kept=0, model=0, nvme=10**18),
        )
        assert (found.answer, found.where, found.needed) == (answer, "host RAM", peak)
        assert (found.available, found.decides) == (hardware.device.memory, "parameters")


@pytest.mark.parametrize(("stored", "answer"), [(0, "yes"), (999, "yes"), (1001, "no")])
def test_drives_are_full_at_once(stored: int, answer: str) -> None:
    node = find("h100").node.model_copy(update={"nvme_bytes": 1000})
    hardware = dataclasses.replace(find("h100"), node=node)
    found = fit(
        hardware,
        device_memory(1, 2, 3),
        Host(parts={"processes": 1, "optimizer": 2}, peak=3),
        Disk(checkpoint=0, kept=0, model=0, nvme=stored),
    )
    assert found.answer == answer and (found.where == "NVMe") == (stored > 100)
    assert found.decides == ("optimizer" if stored else "parameters")


@pytest.mark.parametrize(
    ("strategy", "title"),
    [
        ({"name": "ddp"}, "ddp"),
        ({"name": "zero2", "offload_optimizer": "cpu"}, "zero2, optimizer on cpu"),
        ({"name": "fsdp", "offload_param": "cpu"}, "fsdp, parameters on cpu"),
        (
            {"name": "zero3", "offload_optimizer": "nvme", "offload_param": "cpu", "nvme_path": "/x"},
            "zero3, optimizer on nvme, parameters on cpu",
        ),
    ],
)
def test_a_plan_names_what_its_strategy_offloads(traced: None, strategy: dict[str, str], title: str) -> None:
    plan = estimate(recipe(strategy=strategy), "any", find("h100x8"), config=CONFIG, advice=False)
    assert plan.strategy == title


def test_experts_are_known_beside_what_is_trained_and_is_no_adapter_of_a_matrix() -> None:
    """Vectors of DoRA, and modules that are trained in full, which may be the experts."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    method = {"name": "lora", "target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["input_layernorm"]}
    plan = estimate(recipe(method=method), "any", find("h100"), config=config, advice=False)
    assert [note for note in plan.notes if "adapters do not reach the experts" in note]
    assert _reached((4, 96, 64), {(16, 64), (64, 16), (4, 96, 64), (4, 64, 48)}), "trained in full"


def test_what_a_plan_rests_on_is_noted(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(hardware: str = "h100", **sections: object) -> str:
        sections = {"precision": "bf16", "compile": "off", **sections}
        return "; ".join(estimate(recipe(**sections), "any", find(hardware), config=CONFIG, advice=False).notes)

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    quiet = notes()
    for words in ("int8", "nf4", "PYTORCH_CUDA_ALLOC_CONF", "layers are compiled", "could not be traced", "adapters"):
        assert words not in quiet
    assert "layers are compiled" in notes(compile="layers")
    quantized = notes(method={"name": "lora", "quantization": "nf4"})
    # 16 layers of 60.8 million of 1.24 billion.
    assert "nf4: 78.7% of the base is quantized" in quantized and "int8" not in quantized
    assert "inputs too large for 8 bits" in notes(method={"name": "lora", "quantization": "int8"})
    assert "H200" not in quantized
    assert "fp8: times rest on what was measured on an H200" in notes(method={"name": "lora", "quantization": "fp8"})
    assert "int4: no such training was measured" in notes(method={"name": "lora", "quantization": "int4"})
    assert "`toolkit calibrate` there measures them" in notes("rtx3090")
    for times, precision, said in ((0.5, "bf16", True), (0.5, "fp32", False), (0.9, "bf16", False)):
        machine = find("cpu")
        device = machine.device.model_copy(update={"flops": {"fp32": 2e11, "bf16": times * 2e11}})
        machine = dataclasses.replace(machine, device=device, by_dtype={})
        plan = estimate(recipe(precision=precision), "any", machine, config=CONFIG, advice=False)
        slower = "another precision is faster: this CPU multiplies 2 times as fast in fp32; set precision=fp32, or auto"
        assert (slower in plan.notes) == said, (times, precision)
    often = {"schedule": {"max_steps": 1000}, "checkpoint": {"save_steps": 2}}
    waits = "training waits for checkpoints 66% of the time"
    assert waits in (found := notes(**often)) and "checkpoint.save_steps" in found and "checkpoint.staging" in found
    in_memory = {**often, "checkpoint": {"save_steps": 2, "staging": "/dev/shm"}}
    assert waits in notes(**in_memory) and "checkpoint.staging" not in notes(**in_memory)
    rarely = {**often, "checkpoint": {"save_steps": 1000}}
    assert "training waits" not in quiet and "training waits" not in notes(**rarely)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_CUDA_ALLOC_CONF is set without expandable_segments" in notes()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in notes("cpu")


def test_rows_that_were_counted_bound_the_largest_micro_batch(traced: None) -> None:
    """A recipe may allow far longer sequences than its data has."""
    short = DataStatistics(1000, 100_000, 100_000, 1000, 12_000_000, (50.0, 100.0, 200.0))
    asked = recipe(batch={"seq_len": 8192, "micro_batch_size": 4, "global_batch_size": 8})
    stated = recipe(batch={"seq_len": 200, "micro_batch_size": 4, "global_batch_size": 8})
    plans = [
        estimate(
            each.with_values({"model.attention": "sdpa"}),
            "short",
            find("h200"),
            config=CONFIG,
            statistics=statistics,
            advice=False,
        )
        for each, statistics in ((asked, None), (asked, short), (stated, None))
    ]
    full, counted, same = (plan.memory[0].phases["backward"]["activations"] for plan in plans)
    assert counted == same < full / 20


def test_documents_end_to_end_are_planned_for_the_fullest_batch_of_an_epoch(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "find", trace)
    lengths = (*[100.0] * 1000, 4000.0)
    spread = DataStatistics(100_000, 12_000_000, 1, 100_000, 1, lengths)
    asked = recipe(batch={"seq_len": 4096, "micro_batch_size": 16, "global_batch_size": 16}, precision="bf16")
    padded, flat = (
        estimate(
            asked.with_values({"model.attention": backend}),
            "",
            find("h200"),
            config=CONFIG,
            statistics=spread,
            advice=False,
        )
        for backend in ("sdpa", "torch_varlen")
    )
    activations, fewer = (plan.memory[0].phases["backward"]["activations"] for plan in (padded, flat))
    assert fewer < activations / 3
    assert "for rows of 120 tokens, the longest rows together " in flat.notes[0]
    assert flat.notes[0].endswith("; the fullest that an epoch is expected to have decides")


def test_rows_dealt_by_length_take_less_memory_and_time_than_the_longest_together(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long row is by itself, so that only its own tokens are held."""
    monkeypatch.setattr(store, "find", trace)
    few_long = DataStatistics(100_000, 10_400_000, 1, 100_000, 1, (*[100.0] * 1000, 4000.0, 4000.0))
    batch = {"seq_len": 4096, "micro_batch_size": 4, "global_batch_size": 64}
    asked = recipe(batch=batch, model={"path": "m", "attention": "sdpa"}, precision="bf16")
    dealt, whole = (
        estimate(asked, "", find("h200"), config=CONFIG, statistics=statistics, advice=False)
        for statistics in (few_long, None)
    )
    held, full = (plan.memory[0].phases["backward"]["activations"] for plan in (dealt, whole))
    assert full / 5 < held < full / 3
    assert dealt.work.hardware_flops_per_step < 1.4 * dealt.work.model_flops_per_step


@pytest.mark.parametrize(("batch_size", "held_out"), [(1, 381_000), (4, 381_000), (4, 20_000), (4, 0)])
@pytest.mark.parametrize("backend", ["torch_varlen", "sdpa"])
def test_an_evaluation_is_planned_for_the_longest_rows_together(
    traced: None, batch_size: int, held_out: int, backend: str
) -> None:
    """It begins with them, where training draws them among others; end to end they are no more than all held out.
    They may be longer than any that is trained on."""
    spread = DataStatistics(10_000, 3_000_000, 1, 10_000, 1, (*[300.0] * 990, *[4096.0] * 11))
    counted = dataclasses.replace(
        spread, eval_rows=held_out and 1000, eval_tokens=held_out, longest_eval=held_out and 8192
    )
    asked = recipe(
        batch={"seq_len": 8192, "micro_batch_size": 4, "global_batch_size": 4},
        model={"path": "m", "attention": backend},
        evaluation={"batch_size": batch_size},
        precision="bf16",
    )
    full, planned = (
        estimate(asked, "", find("h200"), config=CONFIG, statistics=statistics, advice=False).memory[0].phases
        for statistics in (None, counted)
    )
    assert planned["backward"]["activations"] < full["backward"]["activations"]
    share = planned["evaluation"]["activations"] / full["evaluation"]["activations"]
    flat = backend == "torch_varlen"
    # Without rows that are held out nothing is evaluated.
    least = spread.dealt(4, 1, flat).fullest / 4 / 8192
    assert share == pytest.approx(max(least, min(1, held_out / batch_size / 8192 if flat else held_out)), rel=0.01)


def test_short_targets_of_pairs_take_less_memory() -> None:
    """The field's worked example: 200 rows at a time on two cards of 24 GB, which is too much for full rows."""
    loaded = load_checked("blenderbot_400m_seq2seq_zero2", ["compile=off"])
    spread = DataStatistics(100_000, 8_000_000, 1, 100_000, 1, (80.0, 128.0))
    answers = {}
    for target in (128, 64):
        counted = dataclasses.replace(spread, longest_target=target)
        plan = estimate(loaded.recipe, "", find("rtx3090x2"), statistics=counted, advice=False)
        answers[target] = (plan.fit.answer, plan.memory[0].phases["backward"]["activations"])
    full = estimate(loaded.recipe, "", find("rtx3090x2"), advice=False).memory[0].phases["backward"]["activations"]
    assert answers[128][0] == "no" and 0.9 * full < answers[128][1] < full
    assert answers[64][0] == "yes" and 0.4 * full < answers[64][1] < 0.7 * full


def test_what_does_not_fit_is_traced_once_more_for_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that was never planned before only the recipe as it stands is known."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    asked = recipe(method={"name": "lora"}, activation_checkpointing={"mode": "none"}, batch={"seq_len": 8192})
    asked = asked.with_values({"precision": "fp16"})

    def obtain(setting: Setting, tracing: str) -> Trace:
        store.keep(setting, trace(setting))
        return trace(setting)

    monkeypatch.setattr(store, "obtain", obtain)
    plan = estimate(asked, "long", find("t4"), config=CONFIG)
    assert plan.fit.answer == "no"
    first = plan.advice[0]
    assert first.kind == "nearest" and first.fits == "yes" and "activation_checkpointing.mode" in first.changes


@pytest.mark.parametrize(("name", "kept"), [("t4", 2 * 8.125 * 2**20), ("a100", 2 * 8.125 * 2**20), ("h200", 2**26)])
def test_a_gpu_keeps_workspaces_of_its_generation(traced: None, name: str, kept: float) -> None:
    answered = estimate(recipe(precision="fp16"), "any", find(name), config=CONFIG, advice=False)
    assert answered.memory[0].phases["backward"]["workspace"] == kept


@pytest.mark.parametrize("length", [128, 4096])
def test_a_cpu_keeps_what_comes_and_goes_up_to_a_gib(traced: None, length: int) -> None:
    asked = recipe(batch={"seq_len": length, "micro_batch_size": 1}, precision="fp32", method={"name": "lora"})
    answered = estimate(asked, "any", find("cpu"), config=CONFIG, advice=False)
    (rank,) = answered.memory
    goes = rank.allocated - sum(rank.phases["resume"].values())
    assert (goes < GIB) == (length == 128)
    assert answered.host.parts["fragmentation"] == pytest.approx(min(goes, GIB), abs=2)
    assert answered.host.peak == pytest.approx(rank.total.value, abs=4)


@pytest.mark.parametrize("way", ["eva", "loftq"])
def test_what_is_done_before_step_1_is_said(traced: None, way: str) -> None:
    method = {"name": "lora", "init_lora_weights": way, "quantization": "nf4"}
    plan = estimate(recipe(method=method), "any", find("h200"), config=CONFIG, advice=False)
    (note,) = (each for each in plan.notes if "before step 1" in each)
    assert "that time is not counted" in note


def test_why_there_is_no_trace_is_said_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    error = "ValueError: unknown model type, should be one of " + ", ".join(f"model_{each}" for each in range(300))
    monkeypatch.setattr(store, "obtain", lambda setting, tracing: estimated(setting, error))
    plan = estimate(recipe(), "new", find("h200"), config=CONFIG, advice=False)
    (note,) = (each for each in plan.notes if "could not be traced" in each)
    assert "unknown model type" in note and len(note) < 320
    # Estimates are less sure than traces.
    monkeypatch.setattr(store, "obtain", trace)
    traced = estimate(recipe(), "known", find("h200"), config=CONFIG, advice=False)
    assert plan.memory[0].total.high > traced.memory[0].total.high
    assert plan.work.step_seconds.high > traced.work.step_seconds.high


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["method.target_modules=[q_prj,v_proj]"], ["method.target_modules", "'q_prj'", "did you mean 'q_proj'"]),
        (["method.modules_to_save=[lm_haed]"], ["method.modules_to_save", "'lm_haed'"]),
        (["~method", "method.freeze=['model.layer.*']"], ["method.freeze", "'model.layer.*'"]),
        (["~method", "method.freeze=['*']"], ["method.freeze leaves nothing to train"]),
    ],
)
def test_names_that_match_nothing_are_refused(changes: list[str], words: list[str]) -> None:
    loaded = load("smollm2_135m_lora_demo", ["micro_batch_size=2", *changes])
    with pytest.raises(UserError) as caught:
        estimate(loaded.recipe, "demo", find("h100"), tracing="in_process")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_pattern_of_one_deep_layer_is_planned() -> None:
    """The models that are traced have few layers; the names are those of the whole model."""
    loaded = load_checked("smollm2_135m_lora_demo", ["~method", "method.freeze=['model.layers.20.*']"])
    assert estimate(loaded.recipe, "demo", find("h100"), tracing="in_process", advice=False).fit.answer == "yes"


@pytest.mark.parametrize(
    "changes", [["precision=fp16"], ["activation_checkpointing=offload"], ["optimizer=paged_adamw_8bit"]]
)
def test_what_needs_a_gpu_is_not_planned_on_a_cpu(changes: list[str]) -> None:
    loaded = load_checked("smollm2_135m_lora_demo", changes)
    with pytest.raises(UserError, match="GPU"):
        estimate(loaded.recipe, "demo", find("cpu"), advice=False)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({}, "rows are taken to be full, 2,048 tokens, until"),
        ({"data": {"sources": [{"path": "d"}], "packing": True}}, ""),
    ],
    ids=["padded", "packed"],
)
def test_what_is_taken_for_the_rows_lengths_stands_beside_what_follows(
    sections: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full rows may be twice as long as any there is, so the plan says what rows half as long need."""
    for name in ("find", "obtain"):
        monkeypatch.setattr(store, name, trace)
    asked = recipe(batch={"seq_len": 2048, "micro_batch_size": 2}, precision="bf16", **sections)
    answered = estimate(asked, "any", find("h100"), config=CONFIG, advice=False)
    assert answered.lengths.startswith(said) and bool(answered.lengths) == bool(said)
    half = estimate(asked.with_values({"batch.seq_len": 1024}), "any", find("h100"), config=CONFIG, advice=False)
    share = half.work.step_seconds.value / answered.work.step_seconds.value
    needs = f"rows of 1,024 need {bytes_text(half.memory[0].total.value)} and {share:.0%} of the time"
    assert (needs in answered.lengths) == bool(said)


def test_a_pair_of_answers_is_planned_as_two_rows_and_its_reference_as_an_evaluation(traced: None) -> None:
    counted = DataStatistics(1000, 200_000, 80_000, 1000, 40_000_000, (200.0,) * 1001)
    pairs = DataStatistics(500, 200_000, 80_000, 1000, 40_000_000, (200.0,) * 1001)
    steps = {"schedule.max_steps": 10, "batch.micro_batch_size": 8, "batch.global_batch_size": 16}
    rows = recipe().with_values(steps)
    halves = {"batch.micro_batch_size": 4, "batch.global_batch_size": 8}

    def plan(given: Any, statistics: DataStatistics) -> Any:
        return estimate(given, "r", find("h100"), config=CONFIG, statistics=statistics, advice=False)

    as_rows = plan(rows, counted)
    orpo, dpo = (plan(rows.with_values({**halves, "objective": each}), pairs) for each in ("orpo", "dpo"))
    for each in (orpo, dpo):
        assert each.memory[0].allocated == as_rows.memory[0].allocated
        assert each.work.tokens_per_step == as_rows.work.tokens_per_step and each.answers == 2
        assert each.work.model_flops_per_step == as_rows.work.model_flops_per_step
        # The backward pass forms the logits of what is trained once more.
        again = each.work.hardware_flops_per_step - as_rows.work.hardware_flops_per_step
        assert again == pytest.approx(2 * 2048 * 128256 * 0.4 * each.work.tokens_per_step)
        assert as_rows.work.step_seconds.value < each.work.step_seconds.value < 1.05 * as_rows.work.step_seconds.value
    # 80 pairs are drawn, and scored once before.
    reference = dpo.work.total_seconds.value - orpo.work.total_seconds.value
    assert 0 < reference < 10 * dpo.work.step_seconds.value


def test_the_answers_that_judged_rows_borrow_are_planned_as_evaluations(traced: None) -> None:
    counted = DataStatistics(1000, 200_000, 80_000, 1000, 40_000_000, (200.0,) * 1001)
    steps = {"schedule.max_steps": 10, "batch.micro_batch_size": 8, "batch.global_batch_size": 16}
    rows = recipe().with_values(steps)

    def plan(given: Any) -> Any:
        return estimate(given, "r", find("h100"), config=CONFIG, statistics=counted, advice=False)

    sft, kto = plan(rows), plan(rows.with_values({"objective": "kto"}))
    assert kto.memory[0].allocated == sft.memory[0].allocated and kto.answers == 1
    assert kto.work.tokens_per_step == sft.work.tokens_per_step
    assert kto.work.model_flops_per_step == sft.work.model_flops_per_step
    # Of three passes, one forward, another forward makes at most a half more.
    assert 1.1 < kto.work.step_seconds.value / sft.work.step_seconds.value < 1.5
    assert 1.1 < kto.work.hardware_flops_per_step / sft.work.hardware_flops_per_step < 1.5
    # 160 rows are drawn, and scored twice before: their own answers, and those that they borrow.
    reference = kto.work.total_seconds.value - 10 * kto.work.step_seconds.value
    before = sft.work.total_seconds.value - 10 * sft.work.step_seconds.value
    assert 0 < reference - before < 10 * kto.work.step_seconds.value


def test_the_config_of_a_teacher_is_asked_for_once_in_a_plan(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That in a GGUF file takes a process a second to read, and a plan tries dozens of settings."""
    asked = []
    monkeypatch.setattr(store, "config_of", lambda of: asked.append(of.model.path) or CONFIG)
    taught = recipe(objective="distillation", distillation={"teacher": {"path": "of/nobody"}})
    estimate(taught, "r", find("h100x8"), config=CONFIG)
    assert asked == ["of/nobody"]


def test_a_teacher_is_counted_whole_on_each_device_with_its_pass() -> None:
    """Qwen3 8B: 8.19 billion parameters in 16 bits, or its layers in 4; the student may be sharded, it is not."""
    name, alone = "qwen3_0_6b_distill_from_8b", ["objective=sft", "~distillation.teacher"]

    def planned(*overrides: str, hardware: str = "h100x8") -> Plan:
        return estimate(load_checked(name, overrides).recipe, name, find(hardware), advice=False)

    whole, quantized = planned(), planned("distillation.teacher.quantization=nf4")
    sharded, without = planned("strategy.name=zero3"), planned(*alone)
    for plan in (whole, sharded):
        assert all(phase["teacher"] >= 2 * 8.19e9 for phase in plan.memory[0].phases.values())
        assert plan.memory[0].phases["resume"]["teacher"] == pytest.approx(2 * 8.19e9, rel=0.01)
    # 0.52 bytes of 6.95 billion in layers, and two bytes of 1.24 billion in embeddings and head.
    stored = 0.516 * 6.95e9 + 2 * 1.24e9
    assert quantized.memory[0].phases["resume"]["teacher"] == pytest.approx(stored, rel=0.02)
    assert "teacher" in whole.memory[0].phases and "teacher" not in without.memory[0].phases
    # One layer of 36 on each device and all of them on the host, for each of eight devices; they cross the bus.
    away = planned("distillation.teacher.offload=true")
    layers = 2 * 6.95e9
    assert away.memory[0].phases["resume"]["teacher"] == pytest.approx(2 * 1.24e9 + layers / 36, rel=0.01)
    assert away.host.parts["teacher"] == pytest.approx(8 * layers, rel=0.01) and "teacher" not in whole.host.parts
    fetching = away.work.step_seconds.value - whole.work.step_seconds.value
    micro_batches = away.gradient_accumulation_steps
    assert fetching == pytest.approx(micro_batches * layers / link_rate(HOST, find("h100x8")), rel=0.01)
    # Two FLOPs for each parameter and token, but for embeddings; attention comes on top.
    asked = whole.work.hardware_flops_per_step - without.work.hardware_flops_per_step
    assert 1.0 < asked / (2 * (8.19e9 - 0.62e9) * whole.work.tokens_per_step) < 1.15
    assert whole.work.model_flops_per_step == without.work.model_flops_per_step
    assert whole.work.step_seconds.value > 1.5 * without.work.step_seconds.value


def test_answers_that_a_student_writes_are_counted_by_their_share() -> None:
    name = "qwen3_0_6b_distill_from_8b"

    def planned(*overrides: str) -> Plan:
        recipe = load_checked(name, ["data.packing=false", *overrides]).recipe
        return estimate(recipe, name, find("h100x8"), advice=False)

    none, every, half = planned(), planned("distillation.on_policy=1"), planned("distillation.on_policy=0.5")
    longer = planned("distillation.on_policy=1", "rollout.max_completion_tokens=512")
    caches = [plan.memory[0].phases.get("generation", {}).get("cache", 0) for plan in (none, half, every)]
    assert caches[0] == 0 < caches[1] <= caches[2]
    seconds = [plan.work.generation_seconds or 0.0 for plan in (none, half, every, longer)]
    assert seconds[0] == 0 < seconds[1] <= seconds[2] and seconds[3] == pytest.approx(2 * seconds[2], rel=0.1)
    assert every.work.step_seconds.value - none.work.step_seconds.value == pytest.approx(seconds[2], rel=0.05)
    # The teacher answers nothing: it is asked once, as without.
    assert every.work.hardware_flops_per_step == none.work.hardware_flops_per_step
    parts = every.memory[0].phases
    assert parts["generation"]["teacher"] == parts["teacher"]["teacher"] and "evaluation" in parts


def test_what_is_computed_of_answers_that_are_rewarded() -> None:
    name = "smollm2_135m_grpo_demo"

    def work(*overrides: str) -> Work:
        recipe = load_checked(name, ["data.max_samples=99", *overrides]).recipe
        return estimate(recipe, name, find("h100"), advice=False).work

    none, once, twice = (work(*more) for more in ([], ["policy.beta=0.1"], ["policy.beta=0.1", "objective=rloo"]))
    asked = once.hardware_flops_per_step - none.hardware_flops_per_step
    # The reference, and of RLOO the policy too.
    assert 0 < asked == pytest.approx((twice.hardware_flops_per_step - none.hardware_flops_per_step) / 2)
    assert once.model_flops_per_step == none.model_flops_per_step
    # The gradient of a trained head, and its logits once more, as tokens count by advantages that come later.
    full = "method.name=full"
    trained, frozen = work(full), work(full, "method.freeze=[model.embed_tokens.weight]")
    product = 2 * 49_152 * 576 * trained.tokens_per_step
    assert trained.hardware_flops_per_step - frozen.hardware_flops_per_step == pytest.approx(2 * product)


def test_the_first_pass_over_texts_is_planned_where_a_step_has_several_micro_batches(traced: None) -> None:
    counted = DataStatistics(1000, 400_000, 2_000, 2000, 80_000_000, (200.0,) * 1001)
    steps = {"schedule.max_steps": 10, "batch.global_batch_size": 16, "objective": "embedding"}

    def plan(size: int) -> Any:
        given = recipe().with_values({**steps, "batch.micro_batch_size": size})
        return estimate(given, "r", find("h100"), config=CONFIG, statistics=counted, advice=False)

    once, twice = plan(16), plan(8)
    assert once.answers == twice.answers == 2 and once.texts
    assert once.work.model_flops_per_step == pytest.approx(twice.work.model_flops_per_step)
    # Of three passes, one forward, another forward makes at most a half more.
    assert 1.1 < twice.work.hardware_flops_per_step / once.work.hardware_flops_per_step < 1.5
    assert 1.1 < twice.work.step_seconds.value / once.work.step_seconds.value < 1.6
