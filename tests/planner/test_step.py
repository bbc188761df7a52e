"""Seconds of a step on a device of round figures, added up by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import Hardware, find
from toolkit.planner.hardware.specs import Rate
from toolkit.planner.plan import Disk
from toolkit.planner.speed.communication import HOST, NETWORK, NVME, Transfer, link_rate
from toolkit.planner.speed.compiled import FUSED
from toolkit.planner.speed.step import Step, newton_schulz_flops, peak_dtype
from toolkit.planner.trace.types import Amount, Pass, Tensors, Trace
from toolkit.planner.workload import Load, Workload
from toolkit.recipe import Recipe

# 100 tokens padded to 200; 3,000 pairs within documents, 4,000 attended, 5,000 of the grid; the longest has
# 20 tokens; 40 are trained.
LOAD = Load(100.0, 200.0, 3e3, 4e3, 5e3, 20.0, 40.0)
TRAINED = 2_000_000


def device(kind: str = "cuda", devices: int = 1, nodes: int = 1, **efficiency: Any) -> Hardware:
    """1 TFLOP/s in bf16, 1 TB/s, a link of 10 GB/s, a bus of 2 GB/s; half of each is reached."""
    on, half = find("h200"), Rate(0.5, 0.25, 1.0)
    rates = dict.fromkeys(("matmul", "attention", "bandwidth", "optimizer", "link", "pcie", "network"), half)
    rates |= {"launch_seconds": Rate(1e-9, 1e-10, 1e-8), "half": None, **efficiency}
    rates |= dict.fromkeys(("fp8", "bf16", "fp16", "tf32", "fp32"))
    flops = {"bf16": 1e12, "tf32": 5e11, "fp32": 1e11}
    update = {"kind": kind, "flops": flops, "bandwidth": 1e12, "link": 10e9, "pcie": 2e9}
    changed = on.device.model_copy(update=update | {"efficiency": on.device.efficiency.model_copy(update=rates)})
    node = on.node.model_copy(update={"network": 8e9, "nvme": 4e9, "cores": 100})
    return Hardware("round", changed, node, devices, nodes)


def each_pass(flops: float) -> Pass:
    """FLOPs for each token of a layer; of moved bytes 1e9 outside the layers and 2e9 in each."""
    return Pass(
        matmul=Amount((), (0.0, flops)),
        attention=Amount((), (0.0, 0.0, 2 * flops)),
        moved=Amount((1e9,), (2e9,)),
        launches=Amount((1000.0,), (0.0,)),
    )


def workload(on: Hardware, tensors: tuple[Tensors, ...] | None = None, passes: int = 4, **sections: Any) -> Workload:
    batch = {"seq_len": 20, "micro_batch_size": 10, "global_batch_size": 10 * passes * on.devices}
    base = {"model": {"path": "m"}, "data": {"sources": ["d"]}, "batch": batch, "precision": "bf16"}
    recipe = Recipe.model_validate({**base, **sections})
    tensors = tensors or (Tensors("layer", (1000, 1000), 2, True, "base"),)
    every = {"forward": each_pass(1e9), "backward": each_pass(2e9), "recompute": each_pass(0.0)}
    trace = Trace(2, tensors, (), every | {"evaluation": each_pass(1e9)}, Amount(), 0, None)
    return Workload(recipe, batch_layout(recipe, on.devices), on, trace)


def step(on: Hardware | None = None, sent: list[Transfer] | None = None, end: Any = "value", **kwargs: Any) -> Step:
    return Step(workload(on or device(), **kwargs), LOAD, sent or [], end)


# 200 padded tokens in two layers, of which each takes 1e9; 4,000 pairs in two layers, of which each takes 2e9; 5 GB are
# moved. Launches, 1,000 of a nanosecond, do not show beside.
FORWARD = 2 * 200 * 1e9 / 0.5e12 + 2 * 4e3 * 2e9 / 0.5e12 + 5e9 / 0.5e12
BACKWARD = 2 * 2 * 200 * 1e9 / 0.5e12 + 2 * 2 * 4e3 * 2e9 / 0.5e12 + 5e9 / 0.5e12
# Three sums of four gradients in fp32, each reading two and writing one.
SUMS = 3 * 3 * 4 * TRAINED / 0.5e12
# Masters read and written, gradients read by norm and optimizer and read and written by clipping, two moments read and
# written.
UPDATE = (2 * 4 + 4 * 4 + 2 * 8) * TRAINED / 0.5e12


def test_passes_sums_and_update_add_up() -> None:
    found = step()
    assert found.compute == pytest.approx(4 * (FORWARD + BACKWARD) + SUMS + UPDATE, rel=1e-9)
    assert found.seconds == found.compute and found.communication == found.offload == 0
    # Without clipping the norm alone is left out, and no micro-batch is added to a single one.
    unclipped = step(passes=1, optimizer={"max_grad_norm": 0})
    assert unclipped.compute == pytest.approx(FORWARD + BACKWARD + UPDATE - 3 * 4 * TRAINED / 0.5e12, rel=1e-9)
    # Four times the time at the lower end of all rates than at the upper.
    assert step(end="high").compute == pytest.approx(4 * step(end="low").compute, rel=1e-6)


def test_the_update_is_that_of_the_optimizer() -> None:
    def update(**sections: Any) -> float:
        return step(passes=1, **sections).compute - FORWARD - BACKWARD

    assert update() == pytest.approx(UPDATE, rel=1e-3)
    # Many kernels for one: 18 passes for 7 over masters, gradient and moments.
    foreach = UPDATE + 11 / 7 * (2 * 4 + 4 + 2 * 8) * TRAINED / 0.5e12
    assert update(optimizer={"name": "adamw_torch"}) == pytest.approx(foreach, rel=1e-3)
    # ZeRO writes a copy in bf16.
    zero = UPDATE + 2 * TRAINED / 0.5e12
    assert update(strategy={"name": "zero1"}) == pytest.approx(zero, rel=1e-3)
    # One momentum, and five iterations of 2 k k n + 2 k k k + 2 k k n for two matrices.
    muon = UPDATE - 2 * 4 * TRAINED / 0.5e12 + 5 * 2 * 6e9 / 0.5e12
    assert update(optimizer={"name": "muon"}) == pytest.approx(muon, rel=1e-3)
    wide = workload(device(), (Tensors("layer", (200, 100), 3, True, "base"),), optimizer={"name": "muon"})
    assert newton_schulz_flops(wide.recipe, wide.trace) == 5 * 3 * (4 * 100 * 100 * 200 + 2 * 100**3)


@pytest.mark.parametrize(
    ("name", "moved"),
    [("lion", 60), ("adamw_8bit", 280), ("lion_8bit", 140), ("ademamix_8bit", 420), ("adamw_torch_4bit", 770)],
)
def test_optimizers_with_kernels_for_gpus_alone_take_longer_on_a_cpu(name: str, moved: int) -> None:
    """Bytes for each parameter, as measured; what all optimizers read and write is the same on both."""

    def more(kind: str) -> float:
        one, adamw = (step(device(kind), passes=1, optimizer={"name": each}).compute for each in (name, "adamw"))
        return one - adamw

    assert more("cpu") - more("cuda") == pytest.approx(moved * TRAINED / 0.5e12, rel=1e-6)


def test_an_optimizer_on_the_host_runs_at_the_hosts_speed() -> None:
    offloads = {"name": "zero2", "offload_optimizer": "cpu"}
    found = step(passes=1, strategy=offloads)
    assert found.compute == pytest.approx(FORWARD + BACKWARD, rel=1e-9)
    assert found.offload == pytest.approx((2 * 4 + 4 * 4 + 2 + 2 * 8) * TRAINED / 100e9, rel=1e-9)
    # Few cores are slower than the host's memory, and the devices of a node share them.
    few = device(devices=2)
    few = dataclasses.replace(few, node=few.node.model_copy(update={"cores": 5}))
    assert step(few, passes=1, strategy=offloads).offload == pytest.approx(
        5 * found.offload
    )  # half the parameters, a tenth of the speed
    assert step(passes=1, strategy=offloads, end="high").offload == pytest.approx(2 * found.offload)
    fsdp = step(passes=1, strategy={"name": "fsdp", "offload_param": "cpu"})
    assert fsdp.compute == pytest.approx(FORWARD + BACKWARD, rel=1e-9) and fsdp.offload > 0
    # A CPU is its own host.
    on_cpu = step(device("cpu"), passes=1, strategy=offloads)
    assert on_cpu.offload == pytest.approx((2 * 4 + 4 * 4 + 2 + 2 * 8) * TRAINED / 0.5e12, rel=1e-9)


def test_launches_add_up_on_a_cpu_and_hide_on_a_gpu() -> None:
    launches = Rate(1e-2, 1e-3, 1e-1)
    waiting = 1000 * 1e-2
    on_cpu = step(device("cpu", launch_seconds=launches), passes=1)
    assert on_cpu.compute == pytest.approx(FORWARD + BACKWARD + UPDATE + 2 * waiting, rel=1e-9)
    on_gpu = step(device(launch_seconds=launches), passes=1)
    hidden = sum((kernels**4 + waiting**4) ** 0.25 for kernels in (FORWARD, BACKWARD))
    assert on_gpu.compute == pytest.approx(hidden + UPDATE, rel=1e-9)


def test_compiled_layers_move_less_within_themselves() -> None:
    saved = step(passes=1).compute - step(passes=1, compile="layers").compute
    assert saved == pytest.approx(2 * (1 - FUSED["value"]) * 4e9 / 0.5e12, rel=1e-6)


def test_the_products_of_adapters_move_what_goes_into_compiled_layers_and_comes_out() -> None:
    """Once forward and twice backward, whose synthetic products are two times the forward pass's: as if recomputed."""
    base = Tensors("layer", (1000, 3000), 2, False, "base")
    adapters = (Tensors("layer", (16, 3000), 2, True, "adapter"), Tensors("layer", (1000, 16), 2, True, "adapter"))
    # Of modules of other forms, and outside of layers.
    others = (Tensors("layer", (8,), 2, True, "adapter"), Tensors("other", (16, 500), 1, True, "adapter"))

    def moved(on: Hardware, tensors: tuple[Tensors, ...]) -> float:
        found = step(on, passes=1, tensors=tensors, compile="layers", method={"name": "lora"})
        return sum(found.passing.values()) * 0.5e12

    apart = moved(device(), (base, *adapters, *others)) - moved(device(), (base, *others))
    assert apart == pytest.approx((1 + 3) * 2 * 200 * 2 * (3000 + 1000), rel=1e-3)
    on_cpu = device("cpu")
    assert moved(on_cpu, (base, *adapters)) == pytest.approx(moved(on_cpu, (base,)), rel=1e-9)


def test_transfers_hide_behind_the_passes_they_belong_to() -> None:
    on = device(devices=2)

    def exposed(*sent: Transfer) -> float:
        return step(on, list(sent)).communication

    size = 5e9  # One second over the link.
    # Two layers: half is seen, and of the other half what computing does not take.
    short, long = 0.5, 0.5 * 200 + 0.5 * (200 - FORWARD)
    assert FORWARD > 1 and BACKWARD < 200
    assert exposed(Transfer("step", 1, {"NVLink": size}, hidden=False)) == pytest.approx(1)
    assert exposed(Transfer("backward", 4, {"NVLink": size}, hidden=False)) == pytest.approx(4)
    assert exposed(Transfer("backward", 1, {"NVLink": size})) == pytest.approx(short)
    assert exposed(Transfer("backward", 4, {"NVLink": size})) == pytest.approx(4 * short)
    assert exposed(Transfer("forward", 4, {"NVLink": 200 * size})) == pytest.approx(4 * long)
    # Both in the last micro-batch, one of them in the others.
    both = (Transfer("backward", 4, {"NVLink": size}), Transfer("backward", 1, {"NVLink": size}))
    assert exposed(*both) == pytest.approx(3 * short + 2 * short)
    assert exposed(Transfer("step", 1, {"NVLink": size}, False, latency=0.25)) == pytest.approx(1.25)
    # Links work at the same time; what goes to the host counts as offloading.
    slow = step(on, [Transfer("step", 1, {HOST: 3e9, NVME: 2e9}, hidden=False)])
    assert (slow.communication, slow.offload) == (0, pytest.approx(3))


def test_kernels_are_slower_beside_collectives() -> None:
    on, second = device(devices=2), {"NVLink": 5e9}

    def slower(*sent: Transfer, on: Hardware = on, end: Any = "value") -> float:
        return step(on, list(sent), end).contention - step(on, end=end).contention

    assert slower(Transfer("backward", 1, second)) == pytest.approx(0.16)
    assert slower(Transfer("backward", 4, second), Transfer("backward", 1, second)) == pytest.approx(5 * 0.16)
    # At the high end the link is half as fast, too; at the low end nothing is lost.
    assert slower(Transfer("forward", 1, second), end="high") == pytest.approx(2 * 0.29)
    assert slower(Transfer("forward", 1, second), end="low") == 0
    # What computing does not hide is waited for, by the device and not by its kernels.
    long = {"NVLink": (FORWARD + 2) * 5e9}
    assert slower(Transfer("forward", 1, long)) == pytest.approx(0.16 * (FORWARD + 2) - 2)
    assert slower(Transfer("forward", 1, {"NVLink": 2 * FORWARD * 5e9})) == 0
    # Copies to the host have engines of their own, and nothing runs beside what is waited for.
    assert slower(Transfer("forward", 1, {HOST: 5e9}), Transfer("step", 1, second, hidden=False)) == 0
    assert slower(Transfer("forward", 1, {"memory": 5e9}), on=device("cpu", devices=2)) == 0


@pytest.mark.parametrize(("devices", "nodes", "largest"), [(2, 1, 0.5642), (8, 1, 1.4236), (8, 16, 2.5946)])
def test_a_step_waits_for_the_slowest_device(devices: int, nodes: int, largest: float) -> None:
    """The expected largest of so many normally distributed numbers is from tables of order statistics."""
    found = step(device(devices=devices, nodes=nodes))
    assert found.contention == pytest.approx(0.025 * largest * 4 * (FORWARD + BACKWARD), rel=0.05)
    assert found.seconds == found.compute + found.contention
    assert step().contention == step(device("cpu", devices=devices)).contention == 0


def test_rates_of_links() -> None:
    on = device(devices=2)
    # Half of each, but of drives, whose figure is what is reached; a node's devices share network and drives.
    rates = {name: link_rate(name, on) for name in ("NVLink", HOST, NETWORK, NVME)}
    assert rates == {"NVLink": 5e9, HOST: 1e9, NETWORK: 2e9, NVME: 2e9}
    assert [link_rate("NVLink", on, end) for end in ("low", "high")] == [2.5e9, 10e9]  # type: ignore[arg-type]
    unlinked = dataclasses.replace(on, device=on.device.model_copy(update={"link": None}))
    assert link_rate("PCIe", unlinked) == 1e9


def test_answers_are_written_by_whole_weights_and_caches_that_grow() -> None:
    def seconds(name: str, cache: int = 0) -> float:
        made = dataclasses.replace(workload(device(devices=8), strategy={"name": name}), cache=cache)
        return Step(made, LOAD, []).generation_seconds(3, 100.0)

    # However an engine divides weights, a token is computed with all of them: DDP's in fp32, the others' in bf16.
    assert seconds("zero3") == pytest.approx(seconds("zero1")) == pytest.approx(seconds("fsdp"))
    tokens = 256
    assert seconds("ddp") - seconds("zero3") == pytest.approx(tokens * (4 - 2) * TRAINED / 0.5e12)
    # Of 100 tokens at first and 356 in the end.
    read = tokens * 3 * 1e9 * (100 + 128) / (100 + 256) / 0.5e12
    assert seconds("ddp", cache=10**9) - seconds("ddp") == pytest.approx(read)


def test_evaluations_and_checkpoints() -> None:
    sent = [Transfer("forward", 4, {"NVLink": 5e9}), Transfer("backward", 4, {"NVLink": 5e9})]
    assert step(device(devices=2), sent).evaluation_seconds(LOAD) == pytest.approx(FORWARD + 0.5)

    def saving(end: Any = "value", nodes: int = 1, **strategy: Any) -> float:
        on = device(devices=2, nodes=nodes)
        return step(on, end=end, strategy=strategy).save_seconds(saved)

    # The process that writes most: 2 GB/s of what is whole, 1.2 under FSDP, 0.4 under DeepSpeed; the drives of a node
    # take 4. To that comes what each save takes.
    saved = Disk(
        checkpoint=12_000_000_000, part=12_000_000_000, writer=6_000_000_000, kept=0, model=4_000_000_000, nvme=0
    )
    assert saving(name="ddp") == pytest.approx(3.015)
    assert [saving(end, name="ddp") for end in ("low", "high")] == pytest.approx([1.5075, 6.03])
    assert saving(name="fsdp") == pytest.approx(5.1) and saving(name="zero1") == pytest.approx(15.03)
    saved = saved.model_copy(update={"writer": 1_000_000_000})
    assert saving(name="ddp") == pytest.approx(3.015) and saving(name="fsdp") == pytest.approx(3.1)
    in_memory = step(
        on := device(devices=2), checkpoint={"save_steps": 5, "staging": "/dev/shm"}, strategy={"name": "ddp"}
    )
    assert in_memory.save_seconds(saved) == pytest.approx(0.515)
    # A model to choose from comes over the device's link, of 2 GB/s by half, into the host's memory.
    assert in_memory.snapshot_seconds(saved) == pytest.approx(4.0)
    # Without staging it is written before the next step, at 2 GB/s.
    assert step(on).snapshot_seconds(saved) == pytest.approx(6.0)


def test_short_and_narrow_products_are_slower() -> None:
    half = Rate(1000.0, 500.0, 2000.0)
    layer = Tensors("layer", (1000, 3000), 2, True, "base")
    on = device(half=half)

    def speed(*tensors: Tensors, rows: float = 4000, experts: tuple[int, int] = (1, 1)) -> float:
        return Step(workload(on, tensors), LOAD, [], experts=experts)._products(rows)

    reference = 16384 / 17384 * (4096 / 5096) ** 2
    # d / (d + 1000) for rows, columns and inner size.
    assert speed(layer) == pytest.approx(4 / 5 * 1 / 2 * 3 / 4 / reference)
    # Norms and adapters are no part of it, nor are embeddings beside a head; tied, they are the head, in chunks.
    others = (
        Tensors("layer", (1000,), 2, True, "base"),
        Tensors("layer", (1000, 8), 2, True, "adapter"),
        Tensors("embeddings", (1, 1000), 1, True, "base"),
        Tensors("head", (1000, 3000), 1, True, "base"),
    )
    assert speed(layer, *others) == pytest.approx(4 / 5 * 1 / 2 * 3 / 4 / reference)
    tied = Tensors("embeddings", (1000, 3000), 2, True, "base")
    mixed = 2 / (1 / (8000 / 9000 * 3 / 8) + 1 / (4096 / 5096 * 3 / 8)) / reference
    assert speed(layer, tied, rows=8000) == pytest.approx(mixed)
    # Each of eight experts sees a quarter of the tokens.
    experts = Tensors("layer", (8, 1000, 3000), 2, True, "base")
    assert speed(experts, experts=(8, 2)) == pytest.approx(1 / 2 * 1 / 2 * 3 / 4 / reference)
    assert speed(experts) == pytest.approx(4 / 5 * 1 / 2 * 3 / 4 / reference)
    assert speed(Tensors("layer", (1000,), 2, True, "base")) == 1.0


@pytest.mark.parametrize(
    ("kind", "precision", "tf32", "expected"),
    [
        ("cuda", "bf16", "auto", "bf16"),
        ("cuda", "fp16", "auto", "fp32"),  # This device has no units for it.
        ("cuda", "fp32", True, "tf32"),
        ("cuda", "fp32", False, "fp32"),
        ("rocm", "fp32", True, "fp32"),
    ],
)
def test_the_peak_that_products_run_at(kind: str, precision: str, tf32: Any, expected: str) -> None:
    assert peak_dtype(workload(device(kind), precision=precision, tf32=tf32)) == expected
