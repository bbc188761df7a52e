"""FLOPs, traffic, time and money, against figures that papers and measurements give."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.statistics import DataStatistics
from toolkit.distributed.layout import batch_layout
from toolkit.planner.build import estimate
from toolkit.planner.hardware import Hardware, find
from toolkit.planner.plan import Disk, Work
from toolkit.planner.speed.communication import BUCKET, HOST, NETWORK, NVME, latency, transfers
from toolkit.planner.speed.step import Step
from toolkit.planner.speed.work import PFLOP_DAY, load_of, rule_flops, work
from toolkit.planner.trace import store
from toolkit.planner.trace.setting import setting_of
from toolkit.planner.trace.types import Amount, Pass, Tensors, Trace
from toolkit.planner.workload import Load, Workload
from toolkit.recipe import Recipe, load, model_configs, shipped_recipes

LLAMA_8B, PARAMETERS = "meta-llama/Llama-3.1-8B", 8_030_261_248
LLAMA_1B = "meta-llama/Llama-3.2-1B"
LINEAR = PARAMETERS - 128_256 * 4096 - 65 * 4096  # without the embedding, which is looked up, and the norms
ON_DRIVE = 1 - 8e9 / PARAMETERS  # each of eight processes keeps a billion trained weights in host memory
LENGTH = 2048


def recipe(strategy: str = "ddp", engine: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    sections["strategy"] = {"name": strategy, **(engine or {})}
    sections["batch"] = {"seq_len": LENGTH, "global_batch_size": 64, "micro_batch_size": 1, **sections.get("batch", {})}
    return Recipe.model_validate({"model": {"path": LLAMA_8B}, "data": {"sources": ["x.jsonl"]}, **sections})


def trace_of(wanted: Recipe) -> Trace:
    """Llama-3.1-8B as its paper describes it; with adapters, of rank 16 on all linear layers."""
    full, layers, width, narrow, inner, vocab = wanted.method.name == "full", 32, 4096, 1024, 14336, 128_256
    kind: Any = "base" if wanted.method.quantization == "none" else wanted.method.quantization
    shapes = [(width, width)] * 2 + [(narrow, width)] * 2 + [(inner, width)] * 2 + [(width, inner)]
    tensors = [Tensors("embeddings", (vocab, width), 1, full, "base"), Tensors("head", (vocab, width), 1, full, "base")]
    tensors += [Tensors("layer", shape, layers, full, kind) for shape in shapes]
    tensors += [Tensors("layer", (width,), 2 * layers, full, "base"), Tensors("other", (width,), 1, full, "base")]
    if not full:
        parts = [part for rows, columns in shapes for part in ((16, columns), (rows, 16))]
        tensors += [Tensors("layer", part, layers, True, "adapter") for part in parts]

    def passing(times: int) -> Pass:
        numbers = sum(math.prod(shape) for shape in shapes)
        layer, restored = 2.0 * times * numbers, 7.0 * times * numbers * (kind == "fp8")
        return Pass(
            matmul=Amount((0.0, 2.0 * times * vocab * width), (0.0, layer)),
            attention=Amount((), (0.0, 0.0, 4.0 * times * width)),
            moved=Amount((), (restored, 60.0 * times * width)),
            launches=Amount((), (50.0 * times,)),
        )

    again = wanted.activation_checkpointing.mode != "none"
    passes = {"forward": passing(1), "backward": passing(2 + again), "recompute": passing(1 if again else 0)}
    between = Amount((0.0, 2.0 * width))
    return Trace(layers, tuple(tensors), (), {**passes, "evaluation": passing(1)}, between, 0, None)


def plan(
    wanted: Recipe, hardware: Hardware | str = "h200", counted: DataStatistics | None = None, **kwargs: Any
) -> Work:
    on = find(hardware) if isinstance(hardware, str) else hardware
    # Torch's own kernels from Ampere on.
    usual = "torch_varlen" if on.device.kind == "cuda" and float(on.device.capability or 0) >= 8 else "sdpa"
    backend = usual if wanted.model.attention == "auto" else wanted.model.attention
    return work(
        Workload(wanted, batch_layout(wanted, on.devices), on, trace_of(wanted)), counted, attention=backend, **kwargs
    )


def sent(wanted: Recipe, hardware: str) -> dict[str, float]:
    """Bytes of one rank in a step, by link."""
    return {link.name: link.bytes for link in plan(wanted, hardware).links}


def figures(lengths: list[int], eval_rows: int = 0) -> DataStatistics:
    """Unpacked sequences of these lengths."""
    tokens, squares = sum(lengths), sum(length**2 for length in lengths)
    spread = tuple(float(length) for length in sorted(lengths))
    return DataStatistics(len(lengths), tokens, tokens, len(lengths), squares, spread, eval_rows, eval_rows * 100)


def test_rules_of_thumb() -> None:
    gpt3 = rule_flops(175_000_000_000, 175_000_000_000, 300e9)
    assert gpt3 / PFLOP_DAY == pytest.approx(3640, rel=0.003)  # Brown et al. 2020, table D.1
    full = plan(recipe(objective="language_modelling"))
    assert full.parameters == full.trained_parameters == PARAMETERS
    assert full.rule_flops_per_step == 6 * PARAMETERS * 64 * LENGTH
    assert full.chinchilla_tokens == 20 * PARAMETERS
    lora = plan(recipe(method={"name": "lora"}, objective="language_modelling"))
    adapters = lora.trained_parameters
    assert lora.parameters == PARAMETERS + adapters
    assert lora.rule_flops_per_step == (4 * PARAMETERS + 6 * adapters) * 64 * LENGTH
    assert lora.chinchilla_tokens is None


def test_of_a_mixture_the_rule_of_thumb_counts_the_experts_that_a_token_meets() -> None:
    answered = estimate(
        load("qwen3_30b_a3b_lora", (), shipped_recipes()).recipe, "moe", find("h200"), advice=False
    ).work
    assert answered.rule_flops_per_step / (4 * answered.tokens_per_step) == pytest.approx(3.35e9, rel=0.01)


def test_model_flops_are_those_of_the_palm_paper() -> None:
    """Chowdhery et al. 2022, appendix B: 6 N + 12 L H Q T per token, of which a causal mask hides half the second."""
    per_token = 6 * LINEAR + 12 * 32 * 4096 * LENGTH / 2
    assert plan(recipe()).model_flops_per_step == pytest.approx(per_token * 64 * LENGTH, rel=1e-6)


def test_recomputing_counts_for_the_hardware_only() -> None:
    kept, again = plan(recipe()), plan(recipe(activation_checkpointing={"mode": "full"}))
    assert again.model_flops_per_step == kept.model_flops_per_step
    assert again.hardware_flops_per_step == pytest.approx(kept.hardware_flops_per_step * 4 / 3)
    assert again.mfu < kept.mfu


def test_the_output_head_is_for_trained_tokens() -> None:
    every = figures([1024] * 64)
    some = dataclasses.replace(every, trained_tokens=every.tokens // 4)
    product = 2 * 128_256 * 4096 * every.tokens
    whole, part = plan(recipe(), counted=every), plan(recipe(), counted=some)
    assert whole.model_flops_per_step - part.model_flops_per_step == pytest.approx(3 * 0.75 * product)
    assert whole.hardware_flops_per_step - part.hardware_flops_per_step == pytest.approx(3 * 0.75 * product)
    assert whole.step_seconds.value > part.step_seconds.value


def test_attention_is_within_documents_and_padding_is_no_model_flop() -> None:
    lengths = [256] * 32 + [1024] * 32
    full, short = plan(recipe()), plan(recipe(), counted=figures(lengths))
    assert short.tokens_per_step == sum(lengths)
    assert short.model_flops_per_step == pytest.approx(
        sum(length * 6 * LINEAR + 6 * 32 * 4096 * length**2 for length in lengths), rel=1e-6
    )
    assert full.tokens_from == "upper bound" and short.tokens_from == "counted"
    batch = {"global_batch_size": 64, "micro_batch_size": 16}
    flat = plan(recipe(batch=batch), counted=figures(lengths))
    padded = plan(recipe(batch=batch, model={"path": LLAMA_8B, "attention": "sdpa"}), counted=figures(lengths))
    assert padded.model_flops_per_step == flat.model_flops_per_step == pytest.approx(short.model_flops_per_step)
    assert flat.hardware_flops_per_step == pytest.approx(flat.model_flops_per_step)
    # Long sequences lie beside long ones; drawn at random nearly every 16 would be padded from 640 tokens to 1,024.
    assert flat.hardware_flops_per_step < padded.hardware_flops_per_step < 1.1 * flat.hardware_flops_per_step
    assert 0.9 * flat.tokens_per_second < padded.tokens_per_second < flat.tokens_per_second


@pytest.mark.parametrize(
    ("backend", "size", "packing", "share"),
    [
        ("torch_varlen", 4, True, 0.5),
        ("flex", 4, True, 0.5),
        ("sdpa", 1, False, 0.5),
        ("sdpa", 4, False, 1.0),
        ("sdpa", 1, True, 1.0),
        ("eager", 1, False, 1.0),
    ],
)
def test_pairs_that_the_kernel_works_through(backend: str, size: int, packing: bool, share: float) -> None:
    load = load_of(recipe(data={"sources": ["x"], "packing": packing}), backend, size, 64.0, 64.0**2)
    assert load.attended == share * size * 64**2


def test_answers_to_one_prompt_are_rows_that_a_mask_pads() -> None:
    rewarded = recipe(
        objective="grpo", data={"sources": ["x"], "packing": False}, rewards={"length": {"max_tokens": 9}}
    )
    assert load_of(rewarded, "sdpa", 1, 64.0, 64.0**2).attended == 64**2


def test_ring_all_reduce_sends_twice_all_but_one_part() -> None:
    gradients = 4 * PARAMETERS
    assert sent(recipe(), "h200x8") == {"NVLink": pytest.approx(2 * 7 / 8 * gradients)}
    nodes = sent(recipe(), "h200x8x2")
    assert nodes[NETWORK] == pytest.approx(2 * gradients / 2 / 8)
    assert sum(nodes.values()) == pytest.approx(2 * 15 / 16 * gradients)
    assert sent(recipe(), "h200") == {}


def test_links_are_called_what_connects_the_devices() -> None:
    links = {hardware: set(sent(recipe(), hardware)) for hardware in ("h200x8", "l4x8", "mi300xx8", "cpux2", "l4x8x2")}
    assert links == {
        **{"h200x8": {"NVLink"}, "l4x8": {"PCIe"}, "mi300xx8": {"xGMI"}, "cpux2": {"memory"}},
        "l4x8x2": {"PCIe", NETWORK},
    }


def test_zero_volumes_are_those_of_the_paper() -> None:
    """Rajbhandari et al. 2020, section 7: stage 2 sends what data parallelism does, stage 3 half as much again."""
    one: dict[str, Any] = {"batch": {"global_batch_size": 8}, "precision": "pure_bf16"}
    exact: dict[str, Any] = {"param_persistence_threshold": 0, "max_reuse_distance": 0}
    ddp = sent(recipe(**one), "h200x8")["NVLink"]
    assert sent(recipe("zero3", engine=exact, **one), "h200x8")["NVLink"] == pytest.approx(1.5 * ddp)
    # The head is not released between the passes.
    fsdp = sent(recipe("fsdp", **one), "h200x8")["NVLink"]
    assert fsdp == pytest.approx(1.5 * ddp - 7 / 8 * 2 * 128_256 * 4096)
    kept = sent(recipe("fsdp", engine={"sharding": "shard_grad_op"}, **one), "h200x8")["NVLink"]
    assert kept == pytest.approx(ddp)
    # DeepSpeed reduces to all ranks where a part would do, and then gathers what was updated.
    assert sent(recipe("zero2", **one), "h200x8")["NVLink"] == pytest.approx(1.5 * ddp)


@pytest.mark.parametrize(
    ("strategy", "gathers", "reductions"),
    [("ddp", 0, 2), ("zero1", 1, 2), ("zero2", 1, 2 * 8), ("zero3", 2 * 8, 8), ("fsdp", 2 * 8, 1), ("each", 2 * 8, 8)],
)
def test_what_accumulation_repeats(strategy: str, gathers: int, reductions: int) -> None:
    """Eight micro-batches: gradients are summed in fp32, parameters gathered in bf16 (ZeRO and FSDP)."""
    exact: dict[str, Any] = {"param_persistence_threshold": 0, "max_reuse_distance": 0} if strategy == "zero3" else {}
    if strategy == "each":
        strategy, exact = "fsdp", {"sync_each_batch": True}
    parts = 7 / 8 * PARAMETERS
    kept = 7 / 8 * 2 * 128_256 * 4096 * 8 if strategy == "fsdp" else 0
    found = sent(recipe(strategy, exact), "h200x8")["NVLink"]
    assert found == pytest.approx(parts * (2 * gathers + 4 * reductions) - kept)


def test_frozen_bases_are_gathered_and_not_reduced() -> None:
    lora: dict[str, Any] = {"method": {"name": "lora"}, "batch": {"global_batch_size": 8}}
    trained = plan(recipe(**lora)).trained_parameters
    assert sent(recipe(**lora), "h200x8")["NVLink"] == pytest.approx(2 * 7 / 8 * 4 * trained)
    assert sent(recipe("zero3", **lora), "h200x8")["NVLink"] > 2 * 7 / 8 * 2 * 0.9 * PARAMETERS
    quantized: dict[str, Any] = {**lora, "method": {"name": "lora", "quantization": "nf4"}}
    assert (
        sent(recipe("zero3", **quantized), "h200x8")["NVLink"] < 0.5 * sent(recipe("zero3", **lora), "h200x8")["NVLink"]
    )


def test_a_base_in_fp8_is_multiplied_at_the_peak_of_fp8_where_there_is_one() -> None:
    """All but the head and the adapters; a device without such units, or another precision, gains nothing."""
    lora: dict[str, Any] = {"method": {"name": "lora"}, "precision": "bf16", "objective": "language_modelling"}
    stored = lora | {"method": {"name": "lora", "quantization": "fp8"}}

    def gain(hardware: str, **other: Any) -> float:
        before, after = (plan(recipe(**each, **other), hardware).step_seconds.value for each in (lora, stored))
        return before / after

    device = find("h200").device
    rates = device.efficiency.matmul_in("bf16").value, device.efficiency.matmul_in("fp8").value
    most = rates[1] * device.flops["fp8"] / (rates[0] * device.flops["bf16"])
    assert 1.1 < gain("h200") < most
    assert gain("a100") < 1 and gain("mi300x") < 1, "each weight is restored"
    lora["precision"] = stored["precision"] = "fp16"
    assert gain("h200") < 1


def test_trained_layers_in_fp8_gain_but_for_the_first_and_the_last() -> None:
    def gain(hardware: str, precision: str = "fp8", plain: str = "bf16", compiles: str = "layers") -> float:
        asked = (recipe(precision=each, compile=compiles) for each in (plain, precision))
        seconds = [plan(each, hardware).step_seconds.value for each in asked]
        return seconds[0] / seconds[1]

    device = find("h200").device
    rates = device.efficiency.matmul_in("bf16").value, device.efficiency.matmul_in("fp8").value
    most = rates[1] * device.flops["fp8"] / (rates[0] * device.flops["bf16"])
    assert 1.05 < gain("h200") == gain("h200", "fp8_rowwise") < most
    # Without masters the rest of a step is shorter.
    assert gain("h200") < gain("h200", "pure_fp8", "pure_bf16") < most
    # Casts that are operations of their own take most of it.
    assert gain("h200", compiles="off") < gain("h200")
    assert gain("a100") == gain("a100", "pure_fp8", "pure_bf16") == 1


def test_hybrid_sharding_sends_little_between_nodes() -> None:
    full, hybrid = (
        sent(recipe("fsdp", engine={"sharding": kind}, batch={"global_batch_size": 256}), "h200x8x4")
        for kind in ("full_shard", "hybrid_shard")
    )
    assert hybrid[NETWORK] == pytest.approx(2 * 3 / 4 * 4 * PARAMETERS / 8)
    assert full[NETWORK] > 3 * hybrid[NETWORK]


def test_more_devices_are_faster_and_never_as_much_as_there_are_more() -> None:
    """A ring is as long as it has ranks: what is gained by doubling them shrinks, and messages take their time."""
    for strategy in ("ddp", "zero2", "zero3", "fsdp"):
        each = [
            plan(recipe(strategy, batch={"global_batch_size": 8192}), f"h100x8x{nodes}").tokens_per_second
            for nodes in (1, 4, 16, 64, 256)
        ]
        gains = [later / before for before, later in itertools.pairwise(each)]
        assert all(gain < 4 for gain in gains), strategy
    ddp = [plan(recipe(batch={"global_batch_size": 8000}), f"h100x8x{nodes}").tokens_per_second for nodes in (1, 1000)]
    assert ddp[1] < 0.9 * 1000 * ddp[0]


def test_latency_is_that_of_nccls_model() -> None:
    """8.4 us to begin with, and per step 3.4 us over NVLink and 14 us over the network."""
    assert latency(find("h100")) == 0
    assert latency(find("h100x8")) == pytest.approx(8.4e-6 + 7 * 3.4e-6)
    assert latency(find("h100x8x4")) == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 3 * 14e-6)
    # Of many nodes an all-reduce takes a tree: chains of eight, and ten levels.
    assert latency(find("h100x8x1024"), reduces=True) == pytest.approx(8.4e-6 + 2 * (7 * 4e-6 + 10 * 14e-6))


def test_an_optimizer_of_many_kernels_takes_longer_than_a_fused_one() -> None:
    one: dict[str, Any] = {"batch": {"global_batch_size": 1}}
    fused, foreach = (
        plan(recipe(optimizer={"name": name}, **one)).compute_seconds.value for name in ("adamw", "adamw_torch")
    )
    # 44 more bytes of each parameter at 80% of 4.8 TB/s.
    assert foreach - fused == pytest.approx(44 * PARAMETERS / (0.8 * 4800e9), rel=0.01)


def test_offloaded_state_crosses_the_bus() -> None:
    one: dict[str, Any] = {"batch": {"global_batch_size": 8}}
    kept, offloaded = (
        plan(recipe("zero2", engine={"offload_optimizer": where}, **one), "h200x8") for where in ("none", "cpu")
    )
    traffic = {link.name: link.bytes for link in offloaded.links}
    assert traffic[HOST] == pytest.approx((4 + 2) * PARAMETERS / 8, rel=1e-6)  # gradients there, parameters back
    assert offloaded.step_seconds.value > kept.step_seconds.value and kept.offload_seconds == 0
    nvme = sent(recipe("zero3", engine={"offload_optimizer": "nvme", "nvme_path": "/x"}, **one), "h200x8")
    assert nvme[NVME] == pytest.approx(2 * (12 + 4) * PARAMETERS / 8, rel=1e-6)


def test_frozen_weights_that_are_offloaded_to_nvme_come_from_it_in_every_pass() -> None:
    nvme = {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/x", "param_persistence_threshold": 0}
    adapted = transfers_of(recipe("zero3", nvme, method={"name": "lora"}), "h200x8")
    read = {during: size for during, _, link, size, hidden, _ in adapted if link == NVME and hidden}
    assert read == pytest.approx({"forward": 2 / 8, "backward": 2 / 8}, rel=1e-3)


def test_communication_hides_behind_layers_and_not_without_a_link() -> None:
    fast, slow = plan(recipe("fsdp"), "h200x8"), plan(recipe("fsdp", batch={"global_batch_size": 8}), "l4x8")
    assert 0 < fast.communication_seconds < 0.05 * fast.compute_seconds.value
    assert slow.communication_seconds > 0.2 * slow.compute_seconds.value
    waiting = plan(recipe("zero2", engine={"overlap_comm": False}), "h200x8")
    assert waiting.communication_seconds > 2 * plan(recipe("zero2"), "h200x8").communication_seconds


def test_ranges_are_wider_on_more_devices() -> None:
    large = recipe("fsdp", batch={"global_batch_size": 128})
    steps = [plan(large, name).step_seconds for name in ("h200", "h200x2", "h200x8", "h200x8x16")]
    widths = [(each.high - each.low) / each.value for each in steps]
    assert widths == sorted(set(widths))


def test_small_kernels_take_as_long_as_their_launches() -> None:
    wanted, hardware = recipe(), find("h200")
    layout = batch_layout(wanted, 1)
    found = trace_of(wanted)
    tiny = Load(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    many = {
        name: dataclasses.replace(each, launches=Amount((1e6, 0.0, 0.0))) for name, each in found.passes.items()
    }  # fmt: skip
    step = Step(Workload(wanted, layout, hardware, dataclasses.replace(found, passes=many)), tiny, [])
    launching = hardware.device.efficiency.launch_seconds.value
    assert step.compute > layout.gradient_accumulation_steps * 2e6 * launching


@pytest.mark.parametrize("hardware", ["h200", "cpu"])
def test_layers_are_compiled_where_that_saves_more_than_it_takes(hardware: str) -> None:
    batch = {"seq_len": 16, "global_batch_size": 1} if hardware == "cpu" else {}
    off, layers = (
        plan(recipe(compile=value, schedule={"max_steps": 1000}, batch=batch), hardware) for value in ("off", "layers")
    )
    saved = off.step_seconds.value - layers.step_seconds.value
    assert saved > 0 and off.compile_seconds == 0 < layers.compile_seconds
    assert layers.total_seconds and off.total_seconds
    assert off.total_seconds.value - layers.total_seconds.value == pytest.approx(1000 * saved - layers.compile_seconds)
    enough = math.ceil(layers.compile_seconds / saved)
    for steps, may_compile, wanted in ((enough + 1, True, layers), (enough - 1, True, off), (enough + 1, False, off)):
        auto = plan(recipe(schedule={"max_steps": steps}, batch=batch), hardware, may_compile=may_compile)
        assert (auto.step_seconds, auto.compile_seconds) == (wanted.step_seconds, wanted.compile_seconds)


def test_products_of_few_rows_and_narrow_layers_are_slower() -> None:
    """As published: a step of an 8B model has its full speed from some thousand rows on, and 1B models never."""
    rates = []
    for length in (128, 512, 2048, 8192, 32768):
        batch = {"seq_len": length, "global_batch_size": 1}
        hardware = find("a100")
        layout = batch_layout(recipe(batch=batch), 1)
        workload = Workload(recipe(batch=batch), layout, hardware, trace_of(recipe()))
        rates.append(Step(workload, Load(length, length, 0, 0, 0, length, length), [])._products(length))
    assert rates == sorted(rates) and rates[0] < 0.6 and rates[2] < 0.97 < rates[3] < rates[4] < 1.1
    narrow = dataclasses.replace(workload.trace, tensors=(Tensors("layer", (2048, 2048), 64, True, "base"),))
    assert Step(dataclasses.replace(workload, trace=narrow), Load(1, 1, 0, 0, 0, 1, 1), [])._products(16384) < 0.95


def test_all_steps_evaluations_and_checkpoints_take_time() -> None:
    counted = figures([LENGTH] * 640, eval_rows=128)
    bare = recipe(evaluation={"at_start": False}, schedule={"num_epochs": 2})
    plain = plan(bare, "h200x8", dataclasses.replace(counted, eval_rows=0), price=3.0)
    assert plain.steps == 20 and plain.total_seconds is not None and plain.gpu_hours is not None
    assert plain.saves == 1 and 0 < plain.save_seconds < 0.2  # However small it is.
    assert plain.total_seconds.value == pytest.approx(20 * plain.step_seconds.value + plain.save_seconds)
    assert plain.tokens == 2 * counted.tokens
    assert plain.pflop_days == pytest.approx(20 * plain.model_flops_per_step / 8.64e19)
    assert plain.cost == pytest.approx(3.0 * 8 * plain.total_seconds.value / 3600)
    assert plain.energy_kwh == pytest.approx(0.7 * plain.gpu_hours) and plain.co2_kg is None
    clean = dataclasses.replace(find("h200x8"), node=find("h200x8").node.model_copy(update={"co2": 40.0}))
    assert plan(bare, clean, counted).co2_kg == pytest.approx(0.04 * (plan(bare, clean, counted).energy_kwh or 0))

    evaluated = plan(bare.model_copy(update={"evaluation": recipe().evaluation}), "h200x8", counted)
    often = plan(recipe(evaluation={"every_steps": 5}, schedule={"num_epochs": 2}), "h200x8", counted)
    assert evaluated.total_seconds is not None and often.total_seconds is not None
    once = (evaluated.total_seconds.value - plain.total_seconds.value) / 2  # before training and after it
    assert once > 0
    assert often.total_seconds.value - plain.total_seconds.value == pytest.approx(5 * once)
    saving = recipe(evaluation={"at_start": False}, schedule={"num_epochs": 2}, checkpoint={"save_steps": 10})
    drives = Disk(checkpoint=10**11, part=10**11, writer=10**11, kept=0, model=10**10, nvme=0)
    without = dataclasses.replace(counted, eval_rows=0)
    saved = plan(saving, "h200x8", without, drives=drives)
    assert saved.total_seconds is not None and saved.snapshots == 0
    assert saved.total_seconds.value > plain.total_seconds.value + 20
    for kept, more in ((3, {}), (2, {"checkpoint": {"average_last": 2, "save_steps": 10}})):
        chosen = {"schedule": {"num_epochs": 2}, "checkpoint": {"keep_best": "eval_loss", "save_steps": 10}, **more}
        every = {"evaluation": {"at_start": False, "every_steps": 7}, **chosen}
        choosing = plan(recipe(**every), "h200x8", without, drives=drives)
        assert choosing.snapshots == kept and choosing.snapshot_seconds > 0 and choosing.total_seconds is not None
        taken = choosing.total_seconds.value - saved.total_seconds.value
        assert taken == pytest.approx(kept * choosing.snapshot_seconds)


def test_ranges_hold_the_estimate_and_unknown_lengths_stay_unknown() -> None:
    unknown = plan(recipe("zero3", engine={"offload_optimizer": "cpu"}), "h200x8", price=1.0)
    for figure in (unknown.compute_seconds, unknown.step_seconds):
        assert 0 < figure.low < figure.value < figure.high
    assert (unknown.steps, unknown.tokens, unknown.total_seconds, unknown.cost) == (None,) * 4
    hours = 8 * 1e6 / unknown.tokens_per_second / 3600
    assert unknown.cost_per_million_tokens == pytest.approx(1.0 * hours)
    given = plan(recipe(schedule={"max_steps": 50}), price=1.0)
    assert given.steps == 50 and given.cost


def test_every_transfer_is_counted_once() -> None:
    wanted, hardware = recipe("zero3", engine={"offload_param": "cpu", "offload_optimizer": "cpu"}), find("h200x8")
    layout, found = batch_layout(wanted, 8), trace_of(wanted)
    all_sent = transfers(Workload(wanted, layout, hardware, found), 0.0, 0.0, 0.0)
    links = plan(wanted, hardware).links
    for link in links:
        assert link.bytes == round(sum(each.times * each.sent.get(link.name, 0.0) for each in all_sent))
    assert {link.name for link in links} == {"NVLink", HOST}


# During what, how often, on which link, bytes for each parameter, whether it is hidden, and how many collectives wait:
# 32 layers, 161 buckets of 50 million of 8.03 billion parameters, 280 of the reductions' latency.
KEPT = 2 * 7 / 8 * (1 - 128_256 * 4096 / PARAMETERS)
SENT: dict[str, tuple[str, dict[str, Any], list[tuple[str, int, str, float, bool, float]]]] = {
    "ddp": ("ddp", {}, [("backward", 1, "NVLink", 7.0, True, 2132.174)]),
    "zero1": (
        "zero1",
        {},
        # Whole gradients in fp32 after the last backward pass, half a billion at a time.
        [("backward", 1, "NVLink", 7.0, False, 280 / 161 * 17), ("step", 1, "NVLink", 1.75, False, 161)],
    ),
    "zero1, summed in bf16": (
        "zero1",
        {"reduce_dtype": "bf16"},
        [("backward", 1, "NVLink", 3.5, True, 280), ("step", 1, "NVLink", 1.75, False, 161)],
    ),
    "zero2 one after the other": (
        "zero2",
        {"overlap_comm": False},
        [("backward", 8, "NVLink", 7.0, False, 280), ("step", 1, "NVLink", 1.75, False, 161)],
    ),
    "zero3 without prefetching": (
        "zero3",
        {"param_persistence_threshold": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 0},
        [
            ("forward", 8, "NVLink", 1.75, False, 32),
            ("backward", 8, "NVLink", 1.75, False, 32),
            ("backward", 8, "NVLink", 3.5, True, 161),
        ],
    ),
    "zero3": (
        "zero3",
        {},
        [
            ("forward", 8, "NVLink", 1.75, True, 161),
            # A billion elements are used again before they would be released.
            ("backward", 8, "NVLink", 1.75 * (1 - 0.5e9 / PARAMETERS), True, 161 * (1 - 0.5e9 / PARAMETERS)),
            ("backward", 8, "NVLink", 3.5, True, 161),
            ("step", 1, "NVLink", 1.75 * 65 * 4096 / PARAMETERS, False, 1),
        ],
    ),
    "fsdp that releases": (
        "fsdp",
        {},
        [
            ("forward", 8, "NVLink", 1.75, True, 34),
            ("backward", 8, "NVLink", KEPT, True, 34),
            ("backward", 1, "NVLink", 3.5, True, 34),
        ],
    ),
    "fsdp that keeps": (
        "fsdp",
        {"sharding": "shard_grad_op"},
        [("forward", 8, "NVLink", 1.75, True, 34), ("backward", 1, "NVLink", 3.5, True, 34)],
    ),
    "fsdp offloaded": (
        "fsdp",
        {"offload_param": "cpu", "sharding": "shard_grad_op"},
        [
            ("forward", 8, "NVLink", 1.75, True, 34),
            ("backward", 1, "NVLink", 3.5, True, 34),
            ("forward", 8, HOST, 0.5, True, 0),
            ("backward", 8, HOST, 0.5, True, 0),
            ("backward", 1, HOST, 0.5, True, 0),
        ],
    ),
    "zero2 offloaded": (
        "zero2",
        {"offload_optimizer": "cpu"},
        [
            ("backward", 8, "NVLink", 7.0, True, 280),
            ("step", 1, "NVLink", 1.75, False, 161),
            ("backward", 1, HOST, 0.5, True, 0),
            ("step", 1, HOST, 0.25, False, 0),
        ],
    ),
    # Sums of gradients lie on the host unless they are summed in fp32 beside a computation in 16 bits, and come back
    # with each micro-batch.
    "zero2 offloaded, summed in bf16": (
        "zero2",
        {"offload_optimizer": "cpu", "reduce_dtype": "bf16"},
        [
            ("backward", 8, "NVLink", 3.5, True, 280),
            ("step", 1, "NVLink", 1.75, False, 161),
            ("backward", 8, HOST, 0.5, True, 0),
            ("backward", 1, HOST, 0.5, True, 0),
            ("step", 1, HOST, 0.25, False, 0),
        ],
    ),
    "zero3 with its optimizer on the host": (
        "zero3",
        {"offload_optimizer": "cpu", "param_persistence_threshold": 0, "max_reuse_distance": 0},
        [
            ("forward", 8, "NVLink", 1.75, True, 161),
            ("backward", 8, "NVLink", 1.75, True, 161),
            ("backward", 8, "NVLink", 3.5, True, 161),
            ("backward", 8, HOST, 1.0, True, 0),
            ("backward", 1, HOST, 0.5, True, 0),
            ("step", 1, HOST, 0.25, False, 0),
        ],
    ),
    "zero3 with its parameters on the host": (
        "zero3",
        {"offload_param": "cpu", "param_persistence_threshold": 0, "max_reuse_distance": 0},
        [
            ("forward", 8, "NVLink", 1.75, True, 161),
            ("backward", 8, "NVLink", 1.75, True, 161),
            ("backward", 8, "NVLink", 3.5, True, 161),
            ("forward", 8, HOST, 0.25, True, 0),
            ("backward", 8, HOST, 0.25, True, 0),
        ],
    ),
    "fsdp that sums divided": (
        "fsdp",
        {"sync_each_batch": True, "offload_param": "cpu"},
        [
            ("forward", 8, "NVLink", 1.75, True, 34),
            ("backward", 8, "NVLink", KEPT, True, 34),
            ("backward", 8, "NVLink", 3.5, True, 34),
            ("forward", 8, HOST, 0.5, True, 0),
            ("backward", 8, HOST, 0.5, True, 0),
            ("backward", 8, HOST, 0.5, True, 0),
        ],
    ),
    "zero3 on NVMe": (
        "zero3",
        {
            **{"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/x", "prefetch_bucket_size": 0},
            **{"param_persistence_threshold": 0, "max_reuse_distance": 0},
        },
        [
            ("forward", 8, "NVLink", 1.75, False, 32),
            ("backward", 8, "NVLink", 1.75, False, 32),
            ("backward", 8, "NVLink", 3.5, True, 161),
            ("backward", 8, HOST, 1.0, True, 0),
            ("backward", 1, HOST, 0.5, True, 0),
            ("step", 1, NVME, 4.0, False, 0),
            ("forward", 8, HOST, 0.25, True, 0),
            ("forward", 8, NVME, 0.25 * ON_DRIVE, True, 0),
            ("backward", 8, HOST, 0.25, True, 0),
            ("backward", 8, NVME, 0.25 * ON_DRIVE, True, 0),
            ("step", 1, NVME, 0.25 * ON_DRIVE, False, 0),
        ],
    ),
}


def transfers_of(wanted: Recipe, hardware: str) -> list[tuple[str, int, str, float, bool, float]]:
    """Each link of each transfer as in `SENT`."""
    on = find(hardware)
    workload = Workload(wanted, batch_layout(wanted, on.devices), on, trace_of(wanted))
    return [
        (each.during, each.times, link, size / PARAMETERS, each.hidden, each.latency / latency(on))
        for each in transfers(workload, 1e6, 0.0, 0.0)
        for link, size in each.sent.items()
        if size
    ]


@pytest.mark.parametrize("case", SENT)
def test_each_transfer_of_an_engine_and_when_it_happens(case: str) -> None:
    """Eight micro-batches on eight GPUs of one node."""
    strategy, engine, expected = SENT[case]
    found = transfers_of(recipe(strategy, engine), "h200x8")
    for one, other in zip(found, expected, strict=True):
        assert one == (*other[:3], pytest.approx(other[3], rel=1e-3), other[4], pytest.approx(other[5], rel=1e-3))


def test_collectives_wait_for_no_more_processes_than_take_part() -> None:
    """Of eight GPUs two divide each layer, and four have the same parts."""
    for strategy, count in (("ddp", math.ceil(4 * PARAMETERS / BUCKET)), ("fsdp", 34)):
        found = transfers_of(recipe(strategy, parallel={"tensor": 2}), "h200x8")
        (gradients,) = (each for each in found if each[:2] == ("backward", 1))
        each = latency(find("h200x4"), reduces=strategy == "ddp") / latency(find("h200x8"))
        assert gradients[5] == pytest.approx(count * each)


def test_less_is_kept_from_the_forward_pass_where_layers_are_recomputed() -> None:
    """Weights that follow a layer are used a third time before its backward pass."""
    wanted = recipe("zero3", activation_checkpointing={"mode": "full"})
    _, backward, *_ = transfers_of(wanted, "h200x8")
    assert backward[3] == pytest.approx(1.75 * (1 - 1e9 / 3 / PARAMETERS), rel=1e-3)


@pytest.mark.parametrize(("passes", "precision", "again"), [(1, "fp32", 0), (2, "fp32", 1.0), (2, "pure_bf16", 0.5)])
def test_a_single_micro_batch_has_no_sums_to_come_back(passes: int, precision: str, again: float) -> None:
    wanted = recipe("zero1", {"offload_optimizer": "cpu"}, precision=precision, batch={"global_batch_size": 8 * passes})
    to_host = [each for each in transfers_of(wanted, "h200x8") if each[2] == HOST]
    width = 4 if precision == "fp32" else 2
    sums = [("backward", passes, HOST, pytest.approx(again), True, 0)] if again else []
    assert to_host == [
        *sums,
        ("backward", 1, HOST, pytest.approx(width / 8), True, 0),
        ("step", 1, HOST, pytest.approx(width / 8), False, 0),
    ]


def test_hybrid_sharding_gathers_within_nodes_and_adds_up_across_them() -> None:
    hybrid = recipe("fsdp", {"sharding": "hybrid_shard"}, batch={"global_batch_size": 256})
    within = latency(find("h200x8x4"), across=False) / latency(find("h200x8x4"))
    across = latency(find("h200x8x4"), reduces=True, within=False) / latency(find("h200x8x4"))
    assert within == latency(find("h200x8")) / latency(find("h200x8x4"))
    assert across == (8.4e-6 + 2 * 2 * 14e-6) / latency(find("h200x8x4"))  # of four nodes, by a tree
    assert transfers_of(hybrid, "h200x8x4") == [
        ("forward", 8, "NVLink", pytest.approx(1.75), True, pytest.approx(34 * within)),
        ("backward", 8, "NVLink", pytest.approx(KEPT), True, pytest.approx(34 * within)),
        ("backward", 1, "NVLink", pytest.approx(3.5), True, pytest.approx(34 * within)),
        ("backward", 1, NETWORK, pytest.approx(2 * 4 / 8 * 3 / 4), True, pytest.approx(34 * across)),
    ]


def test_latency_needs_a_known_link_and_someone_at_its_other_end() -> None:
    assert latency(find("h200x1x2")) == pytest.approx(8.4e-6 + 14e-6)
    assert latency(find("l4x8")) == pytest.approx(8.4e-6 + 7 * 5.7e-6)
    assert latency(find("mi300xx8")) == latency(find("h200x8"))
    assert latency(find("h200x8x4"), within=False, across=False) == latency(find("cpux2")) == 0


def test_activations_on_the_host_cross_the_bus_both_ways() -> None:
    """Of 32 layers every third keeps its input: eleven. They are copied on the stream that computes."""
    wanted = recipe(activation_checkpointing={"mode": "offload", "every_n_layers": 3})
    _, *found = transfers_of(wanted, "h200x8")
    assert found == [(phase, 8, HOST, pytest.approx(11e6 / PARAMETERS), False, 0) for phase in ("forward", "backward")]


LORA_16 = {"method": {"name": "lora", "r": 16}}
OWN_ROWS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    # Tokens per second, model, rows of a step, and what else the recipe says, from
    # benchmarks/results/throughput-2026-11-26-h200.md.
    "1.2B full": (64_400, LLAMA_1B, 4, {"precision": "pure_bf16"}),
    "1.2B LoRA": (71_200, LLAMA_1B, 4, LORA_16),
    "1.2B LoRA, layers recomputed": (52_800, LLAMA_1B, 4, LORA_16 | {"activation_checkpointing": {"mode": "full"}}),
    "8B LoRA": (15_400, LLAMA_8B, 2, LORA_16),
}


def planned_speed(attention: str, model: str, rows: int, sections: dict[str, Any]) -> float:
    """Tokens per second on an H200 of rows of 4096, packed with documents of 700 tokens (lognormal)."""
    wanted = recipe(
        **{"activation_checkpointing": {"mode": "none"}}
        | sections
        | {
            "batch": {"seq_len": 4096, "global_batch_size": rows, "micro_batch_size": rows},
            "data": {"sources": ["x"], "packing": True},
            "model": {"path": model, "attention": attention},
        }
    )
    layout = batch_layout(wanted, 1)
    setting = setting_of(wanted, model_configs.bundled()[model].config, "cuda", attention, layout)  # type: ignore[arg-type]
    found = store.obtain(setting, "in_process")
    assert found.origin == "traced"
    documents = 1000 * 4096 // 700
    squares = int(documents * 700**2 * math.exp(0.8**2))
    counted = DataStatistics(1000, 1000 * 4096, 1000 * 4096, documents, squares, (4096.0, 4096.0))
    return work(Workload(wanted, layout, find("h200"), found), counted, attention=attention).tokens_per_second  # type: ignore[arg-type]


@pytest.mark.parametrize("row", OWN_ROWS)
def test_measured_steps_on_an_h200(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs with compiled layers and torch's variable-length attention, by traces that are shipped.

    In these runs the output head formed its logits a second time in the backward pass, of 4,096 tokens at a time.
    """
    monkeypatch.setattr("toolkit.planner.speed.step.head_chunk", lambda *args: 4096)
    measured, model, rows, sections = OWN_ROWS[row]
    planned = planned_speed("torch_varlen", model, rows, sections | {"compile": "layers"})
    config, device = model_configs.bundled()[model].config, find("h200").device
    again = 2 * config["vocab_size"] * config["hidden_size"] / (0.64 * device.flops["bf16"])
    assert 0.98 * measured < 1 / (1 / planned + again) < 1.1 * measured


@pytest.mark.slow
def test_measured_steps_of_another_program_on_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL 1.16 with flash-attn 2, eager, torch 2.11, layers recomputed. It waits for the device in every layer, which
    ours does not, so it may be slower than planned by a quarter, and faster by a twentieth at most."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    sections = {"precision": "pure_bf16", "activation_checkpointing": {"mode": "full"}}
    planned = planned_speed("flash_attention_2", LLAMA_1B, 4, sections)
    assert 0.95 * 40_943 < planned < 1.25 * 40_943


def test_muon_multiplies_each_matrix_of_a_layer_five_times():
    from toolkit.planner.speed.step import newton_schulz_flops
    from toolkit.planner.trace.types import Amount, Tensors, Trace
    from toolkit.recipe import Recipe

    none = Amount()
    # Embeddings, norms and experts are AdamW's; what is frozen is nobody's.
    shapes = (("embeddings", (9000, 512), True), ("layer", (512,), True), ("layer", (8, 64, 64), True))
    tensors = [Tensors(place, shape, 1, trained, "base") for place, shape, trained in shapes]  # type: ignore[arg-type]
    tensors += [Tensors("layer", (512, 2048), 3, True, "base"), Tensors("layer", (512, 512), 1, False, "base")]
    trace = Trace(1, tuple(tensors), (), {}, none, 0, None)

    def flops(**optimizer: object) -> float:
        sections = {"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, "optimizer": optimizer}
        return newton_schulz_flops(Recipe.model_validate(sections), trace)

    # X X^T, its square, and both times X.
    products = 2 * (512 * 512 * 2048 + 512**3 + 512 * 512 * 2048)
    assert flops(name="muon") == 3 * 5 * products
    assert flops(name="muon", args={"ns_steps": 2}) == 3 * 2 * products
    assert flops(name="adamw") == 0
