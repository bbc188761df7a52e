"""Host memory and drives: what is moved there, how large checkpoints are, and who reads the weights."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.memory.device import memory
from toolkit.planner.memory.host import disk, host
from toolkit.planner.memory.offload import offloaded
from toolkit.planner.memory.states import states
from toolkit.planner.trace.types import Amount, Moment, Tensors, Trace
from toolkit.planner.workload import Workload
from toolkit.recipe import Recipe

MILLION, MIB = 1_000_000, 2**20
EMBEDDINGS = Tensors("embeddings", (500, 1000), 1, True, "base")
LAYERS = Tensors("layer", (1000, 1000), 4, True, "base")
FULL, P = (EMBEDDINGS, LAYERS), 4_500_000
ADAPTED = (
    Tensors("embeddings", (500, 1000), 1, False, "base"),
    Tensors("layer", (1000, 1000), 4, False, "base"),
    Tensors("layer", (16, 1000), 8, True, "adapter"),
)
A = 8 * 16_000


def workload(
    hardware: str = "h100x8", of: tuple[Tensors, ...] = FULL, passes: int = 1, keeps: float = 10.0, **sections: Any
) -> Workload:
    """Four layers, which keep some bytes of each token."""
    on = find(hardware)
    batch = {"seq_len": 1000, "micro_batch_size": 1, "global_batch_size": passes * on.devices}
    strategy = {"reduce_bucket_size": 100_000, "prefetch_bucket_size": 100_000, **sections.pop("strategy", {})}
    base = {"model": {"path": "m"}, "data": {"sources": ["d"]}, "batch": batch, "precision": "bf16"}
    if not all(each.trained for each in of) and "method" not in sections:
        sections["method"] = {"name": "lora"}
    recipe = Recipe.model_validate({**base, "strategy": strategy, **sections})
    kept = Amount((), (0.0, keeps))
    moments = tuple(
        Moment(phase, place, accumulating, kept, Amount(), Amount(), Amount())  # type: ignore[arg-type]
        for accumulating in (False, True)
        for phase, place in (("forward", "head"), ("backward", "first_layer"))
    )
    return Workload(recipe, batch_layout(recipe, on.devices), on, Trace(4, of, moments, {}, Amount(), 0, None))


def moved(passes: int = 2, **sections: Any) -> dict[str, float]:
    """Bytes of each of a rank's parameters that are on the host instead."""
    found = workload(passes=passes, **sections)
    return {part: size / (P / 8) for part, size in offloaded(found, states(found)).items()}


def cpu(name: str, **strategy: Any) -> dict[str, Any]:
    return {"name": name, "offload_optimizer": "cpu", **strategy}


@pytest.mark.parametrize(
    ("passes", "sections", "gradients"),
    [
        # One beside each master; and what is accumulated, where that is in the dtype in which gradients are made.
        (1, {"strategy": cpu("zero2")}, 4),
        (2, {"strategy": cpu("zero2")}, 4),
        (1, {"strategy": cpu("zero2"), "precision": "fp32"}, 4),
        (2, {"strategy": cpu("zero2"), "precision": "fp32"}, 4 + 4),
        (2, {"strategy": cpu("zero2", reduce_dtype="bf16")}, 4 + 2),
        (1, {"strategy": cpu("zero2"), "precision": "pure_bf16"}, 2),
        (2, {"strategy": cpu("zero1"), "precision": "pure_bf16"}, 2 + 2),
        # Stage 3 has a flat vector of them in any case.
        (1, {"strategy": cpu("zero3")}, 4 + 4),
        (2, {"strategy": cpu("zero3", reduce_dtype="bf16")}, 4 + 2),
    ],
    ids=str,
)
def test_gradients_of_an_offloaded_optimizer(passes: int, sections: dict[str, Any], gradients: float) -> None:
    found = moved(passes, **sections)
    pure = sections.get("precision") == "pure_bf16"
    wide = 2 if pure else 4
    assert (found["masters"], found["optimizer"], found["gradients"]) == (wide, 2 * wide, gradients)
    # Stages 1 and 2 copy through pinned buffers: their part, and the largest parameter.
    local = 4 if sections.get("precision") == "fp32" else 2
    staging = None if sections["strategy"]["name"] == "zero3" else local * (1 + MILLION / (P / 8))
    assert found.get("staging") == (None if staging is None else pytest.approx(staging))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"name": "ddp"}, {}),
        ({"name": "zero3", "offload_param": "cpu"}, {"parameters": 2}),
        ({"name": "fsdp", "offload_param": "cpu"}, {"parameters": 4, "optimizer": 8, "gradients": 4}),
        # Four buffers of what is updated at a time, and five of the largest weight; what is trained stays as it fits.
        ({"name": "zero3", "offload_optimizer": "nvme", "nvme_path": "/x"}, {"staging": 4 * 4, "gradients": 4}),
        (
            {"name": "zero3", "offload_param": "nvme", "nvme_path": "/x"},
            {"staging": 5 * MILLION / 8 * 2 / (P / 8), "parameters": 2},
        ),
        (
            {"name": "zero3", "offload_optimizer": "nvme", "offload_param": "cpu", "nvme_path": "/x"},
            {"staging": 4 * 4, "gradients": 4, "parameters": 2},
        ),
    ],
    ids=str,
)
def test_what_else_is_moved_off_the_device(strategy: dict[str, Any], expected: dict[str, float]) -> None:
    assert moved(strategy=strategy) == pytest.approx(expected, rel=2e-3)  # A row of 500 is an eighth of 4,000 rows.


def test_swapped_state_goes_through_buffers_of_a_sub_group() -> None:
    """A billion elements at most."""
    huge = (Tensors("layer", (4_000_000, 1000), 4, True, "base"),)
    nvme = {"name": "zero3", "offload_optimizer": "nvme", "nvme_path": "/x"}
    found = workload(of=huge, strategy=nvme)
    assert offloaded(found, states(found))["staging"] == 4 * 4e9


def test_a_billion_trained_weights_of_a_process_stay_off_the_drive_and_the_others_go_there_by_sub_groups() -> None:
    nvme = {"name": "zero3", "offload_optimizer": "cpu", "offload_param": "nvme", "nvme_path": "/x"}
    many = (Tensors("layer", (4_000_000, 1000), 4, True, "base"),)
    adapted = (Tensors("layer", (4_000_000, 1000), 4, False, "base"), Tensors("layer", (16, 1000), 4, True, "adapter"))
    for of, kept, changed in ((many, 1e9, 1e9), (adapted, 4 * 16_000 / 8, 0.0)):
        found = workload(of=of, strategy=nvme)
        parts = offloaded(found, states(found))
        assert parts["parameters"] == 2 * kept
        assert parts["staging"] == 2 * (5 * 4e9 / 8 + changed)


def test_on_a_cpu_what_is_offloaded_stays_and_its_buffers_come_on_top() -> None:
    resumed = memory(workload("cpux2", strategy=cpu("zero2")))[0].phases["resume"]
    part = P // 2
    assert resumed == {
        **{"parameters": 2 * P, "masters": 4 * part, "optimizer": 8 * part, "gradients": 4 * part},
        "engine": 2 * (part + MILLION) + 2 * MILLION,
    }
    # FSDP has no buffers, and its gradients are the engine's to tell.
    plain, away = (
        memory(workload("cpux2", strategy={"name": "fsdp", "offload_param": where}))[0] for where in ("none", "cpu")
    )
    assert plain.phases["resume"] == away.phases["resume"]


@pytest.mark.parametrize(
    ("passes", "strategy", "on_device"),
    [
        (1, {}, False),
        (2, {}, True),  # Whole sums of earlier micro-batches.
        (2, {"sync_each_batch": True}, False),
    ],
)
def test_fsdp_sums_gradients_on_the_device_before_they_go_to_the_host(
    passes: int, strategy: dict[str, Any], on_device: bool
) -> None:
    away = workload(passes=passes, strategy={"name": "fsdp", "offload_param": "cpu", **strategy})
    phases = memory(away)[0].phases
    assert ("gradients" in phases["forward"]) == on_device
    assert not {"parameters", "masters", "optimizer"} & phases["step"].keys()


def test_a_cpu_has_its_processes_and_all_of_their_tensors() -> None:
    found = workload("cpux2")
    (rank,) = memory(found)
    assert host(found).parts == {
        "processes": 2 * 700 * MIB,
        "tensors": 2 * rank.allocated,
        "fragmentation": int(2 * (rank.reserved.value - rank.allocated)),
    }
    assert host(found).peak == pytest.approx(2 * (700 * MIB + rank.reserved.value), abs=2)
    # The first writes the whole model.
    saving = workload("cpux4", strategy={"name": "fsdp"}, keeps=1.0)
    first, others = memory(saving)
    assert (first.ranks, others.ranks, first.peak_phase) == ("rank 0", "other ranks", "save")
    assert first.allocated > others.allocated
    assert host(saving).parts["tensors"] == first.allocated + 3 * others.allocated
    # Where a moment of the training is fuller, all are alike, and alone there are no others.
    for alike in (workload("cpux4", strategy={"name": "fsdp"}, keeps=1e4), workload("cpu", keeps=1.0)):
        assert [each.ranks for each in memory(alike)] == ["every rank"]


def test_on_a_cpu_the_first_process_reads_all_weights_and_divides_them() -> None:
    """Where there are masters and gradients already in the end, they take the place of some of the weights."""
    zero3 = {"name": "zero3", "param_persistence_threshold": 0}
    for hardware, ranks in (("cpux2", 2), ("cpux8", 8)):
        (phases,) = (each.phases for each in memory(workload(hardware, precision="fp32", strategy=zero3))[:1])
        beside = 4 * P // ranks * 2 + 4 * 100_000
        largest, whole = 4 * MILLION, 4 * P
        assert phases["load"]["engine"] == 4 * 100_000 + max(largest, whole - beside)


@pytest.mark.parametrize(
    ("of", "sections", "checkpoint", "model"),
    [
        # Adapters of fp32 with their moments; they are published as they are.
        (ADAPTED, {}, 12 * A, 4 * A),
        (ADAPTED, {"precision": "pure_bf16"}, (2 + 4) * A, 2 * A),
        (ADAPTED, {"strategy": {"name": "fsdp"}}, 12 * A, 4 * A),
        (ADAPTED, {"strategy": {"name": "zero2"}}, (2 + 4 + 8) * A, 4 * A),
        (ADAPTED, {"strategy": {"name": "zero3"}}, (4 + 8) * A, 4 * A),
        # ZeRO-3 writes masters, and of frozen weights themselves.
        (
            (Tensors("embeddings", (500, 1000), 1, False, "base"), LAYERS),
            {"strategy": {"name": "zero3"}, "method": {"name": "full"}},
            2 * 500_000 + 12 * 4 * MILLION,
            2 * P,
        ),
        # A head of its own is written once.
        (
            (*FULL, Tensors("head", (500, 1000), 1, True, "base")),
            {"strategy": {"name": "fsdp"}},
            12 * (P + 500_000),
            2 * (P + 500_000),
        ),
        # A norm beside tied embeddings is no head.
        (
            (*FULL, Tensors("head", (1000,), 1, True, "base")),
            {"strategy": {"name": "fsdp"}},
            12 * (P + 1000) + 4 * 500_000,
            2 * (P + 1000),
        ),
    ],
)
def test_checkpoints_of_adapters_and_partly_trained_models(
    of: tuple[Tensors, ...], sections: dict[str, Any], checkpoint: int, model: int
) -> None:
    found = disk(workload(of=of, **sections))
    assert (found.checkpoint, found.model, found.nvme) == (checkpoint, model, 0)


def test_each_part_that_is_offloaded_to_nvme_takes_its_room_there() -> None:
    path = {"name": "zero3", "nvme_path": "/x"}
    for devices, node in (("h100", 1), ("h100x8", 1), ("h100x8x2", 2)):
        optimizer = disk(workload(devices, strategy={**path, "offload_optimizer": "nvme"})).nvme
        weights = disk(workload(devices, strategy={**path, "offload_optimizer": "cpu", "offload_param": "nvme"})).nvme
        assert (optimizer, weights) == (pytest.approx((4 + 8 + 4) * P / node), pytest.approx(2 * P / node))


@pytest.mark.parametrize(
    ("hardware", "sections", "each"),
    [
        # Bytes of each parameter: of the files, and of what is converted from them.
        ("h100x8", {"precision": "fp32"}, 2),  # By the GPUs.
        ("h100x8", {"precision": "fp32", "strategy": {"name": "zero3"}}, 2 + 4),
        ("h100x8", {"precision": "bf16", "strategy": {"name": "zero3"}}, 2),
        ("h100x8", {"strategy": {"name": "fsdp", "cpu_ram_efficient_loading": False}}, 2 + 8 * 4),
        ("h100x8x2", {"strategy": {"name": "fsdp", "cpu_ram_efficient_loading": False}}, 2 + 8 * 4),
        ("h100x8", {"strategy": {"name": "fsdp"}, "precision": "pure_bf16"}, 2),
        ("h100x8", {"model": {"path": "m.gguf"}, "precision": "fp32"}, 2 + 8 * 4),
        ("h100x8", {"model": {"path": "m.gguf"}, "method": {"name": "lora", "quantization": "nf4"}}, 2 + 8 * 2),
    ],
    ids=str,
)
def test_weights_on_their_way_to_the_devices(hardware: str, sections: dict[str, Any], each: int) -> None:
    found = host(workload(hardware, **sections))
    assert found.parts["loading"] == each * P
    assert found.peak >= found.parts["processes"] + found.parts["loading"]


def test_adapters_alone_are_published_from_the_device_and_sharded_ones_through_the_host() -> None:
    assert "saving" not in host(workload(of=ADAPTED)).parts
    assert host(workload(of=ADAPTED, strategy={"name": "fsdp"})).parts["saving"] == 4 * A
    assert host(workload(of=ADAPTED, strategy={"name": "zero3"})).parts["saving"] == 2 * A


@pytest.mark.parametrize(
    ("sections", "each"),
    [
        # Gathered as it is trained; what is published in another type is beside that.
        ({"strategy": {"name": "zero3"}}, 2),
        ({"strategy": {"name": "fsdp"}}, 4 + 2),
        ({"strategy": {"name": "fsdp"}, "precision": "fp32"}, 4),
        ({"strategy": {"name": "fsdp"}, "precision": "pure_bf16"}, 2),
        ({"parallel": {"tensor": 2}}, 4 + 2),
        # Moments of all processes go to the first one where checkpoints are not in shards.
        ({"strategy": {"name": "fsdp", "state_dict_type": "full"}}, 4 + 2),
        ({"strategy": {"name": "fsdp", "state_dict_type": "full"}, "checkpoint": {"save_steps": 5}}, 8),
        ({"strategy": {"name": "fsdp"}, "checkpoint": {"save_steps": 5}}, 4 + 2),
    ],
    ids=str,
)
def test_weights_on_their_way_to_a_file(sections: dict[str, Any], each: int) -> None:
    assert host(workload(**sections)).parts["saving"] == each * P


@pytest.mark.parametrize(
    ("strategy", "writer", "part"),
    [
        # Of the 2, 4 and 8 bytes of a parameter: weights, which one process writes, or each a sixteenth; the rest too.
        ({"name": "ddp"}, 12, 12),
        ({"name": "fsdp", "state_dict_type": "full"}, 12, 12),
        ({"name": "zero2"}, 2 + 12 / 16, 2 + 12 / 2),
        ({"name": "zero3"}, 12 / 16, 12 / 2),
        ({"name": "fsdp"}, 12 / 16, 12 / 2),
    ],
    ids=str,
)
def test_what_a_process_and_a_machine_write_of_a_checkpoint(strategy: dict[str, Any], writer: float, part: int) -> None:
    found = disk(workload("h100x8x2", strategy=strategy))
    whole = {"ddp": 12, "zero3": 12, "fsdp": 12, "zero2": 14}[strategy["name"]]
    assert found.checkpoint == pytest.approx(whole * P, rel=0.15)
    assert (found.writer, found.part) == pytest.approx((writer * P, part * P), rel=0.15)
    taken = {"save_steps": 5, "staging": "/dev/shm/mine"}
    for settings, more in ((taken, found.part), ({**taken, "staging": "/mnt/fast"}, 0), ({"staging": "/dev/shm"}, 0)):
        found = host(workload("h100x8x2", strategy=strategy, checkpoint=settings))
        loading, staging, saving = (found.parts.get(each, 0) for each in ("loading", "staging", "saving"))
        assert staging == more and found.peak == found.parts["processes"] + max(loading, staging + saving)
