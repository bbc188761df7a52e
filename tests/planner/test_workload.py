"""A recipe divided over devices: what each strategy divides, and how a step is put together."""

from __future__ import annotations

from typing import Any

import pytest
from arithmetic import recipe

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.trace.types import Amount, Tensors, Trace
from toolkit.planner.workload import Division, Workload

TENSORS = (Tensors("layer", (10, 8), 2, True, "base"), Tensors("layer", (4, 8), 2, False, "base"))


def workload(hardware: str, strategy: dict[str, Any], **sections: Any) -> Workload:
    on, made = find(hardware), recipe(strategy=strategy, **sections)
    return Workload(made, batch_layout(made, on.devices), on, Trace(2, TENSORS, (), {}, Amount(), 0, None))


@pytest.mark.parametrize(
    ("strategy", "over"),
    [
        ({"name": "ddp"}, Division(1, 1, 1)),
        ({"name": "zero1"}, Division(1, 1, 16)),
        ({"name": "zero2"}, Division(1, 16, 16)),
        ({"name": "zero3"}, Division(16, 16, 16)),
        ({"name": "fsdp"}, Division(16, 16, 16)),
        ({"name": "fsdp", "sharding": "shard_grad_op"}, Division(16, 16, 16)),
        ({"name": "fsdp", "sharding": "hybrid_shard"}, Division(8, 8, 8)),
    ],
    ids=str,
)
def test_what_two_nodes_of_eight_divide(strategy: dict[str, Any], over: Division) -> None:
    made = workload("h100x8x2", strategy, batch={"global_batch_size": 64, "micro_batch_size": 1})
    assert made.over == over and made.trained == 160 and made.owned == 160 / over.optimizer
    assert made.processes_per_node == 8 and not made.on_cpu
    assert (made.shape.layers, made.shape.batch, made.shape.seq_len, made.shape.tokens) == (2, 1, 4096, 4096)


@pytest.mark.parametrize(
    ("strategy", "size", "accumulates", "reductions"),
    [
        ({"name": "fsdp"}, 16, True, 1),
        ({"name": "fsdp", "sync_each_batch": True}, 16, True, 4),
        ({"name": "fsdp", "sync_each_batch": True}, 4, False, 1),
        ({"name": "ddp"}, 8, True, 1),
    ],
    ids=str,
)
def test_how_often_a_step_reduces(strategy: dict[str, Any], size: int, accumulates: bool, reductions: int) -> None:
    made = workload("h100x4", strategy, batch={"global_batch_size": size, "micro_batch_size": 1})
    assert (made.accumulates, made.reductions) == (accumulates, reductions)


def test_bytes_of_parameters_between_steps() -> None:
    frozen, trained, adapter = (
        Tensors("layer", (4, 8), 1, trained, kind)  # type: ignore[arg-type]
        for trained, kind in ((False, "base"), (True, "base"), (True, "adapter"))
    )
    mixed = workload("h100", {"name": "ddp"}, precision="bf16", method={"name": "lora"})
    assert [mixed.width(each) for each in (frozen, trained, adapter)] == [2, 4, 4]
    zero = workload("h100", {"name": "zero2"}, precision="bf16", method={"name": "lora"})
    assert [zero.width(each) for each in (frozen, trained, adapter)] == [2, 2, 2]
    assert workload("cpux2", {"name": "ddp"}).on_cpu and workload("cpux2", {"name": "ddp"}).processes_per_node == 2
