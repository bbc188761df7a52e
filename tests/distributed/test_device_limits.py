"""What does not train on a CPU is refused with what to set instead; all else passes."""

from __future__ import annotations

from typing import Any

import pytest

from recipes import recipe
from toolkit.common import UserError
from toolkit.distributed.device_limits import check_cpu, check_device, check_engine


@pytest.mark.parametrize(
    ("sections", "what", "change", "changed"),
    [
        ({"precision": "fp16"}, "precision=fp16", "precision=bf16 or fp32", {"precision": "bf16"}),
        (
            {"precision": "fp16", "strategy": {"name": "fsdp"}},
            "precision=fp16",
            "precision=bf16 or fp32",
            {"precision": "fp32"},
        ),
        (
            {"precision": "fp16", "strategy": {"name": "auto"}},
            "precision=fp16",
            "precision=bf16 or fp32",
            {"precision": "bf16"},
        ),
        (
            {"activation_checkpointing": {"mode": "offload"}},
            "activation_checkpointing.mode=offload",
            "activation_checkpointing.mode=full",
            {"activation_checkpointing": {"mode": "full"}},
        ),
        (
            {"optimizer": {"name": "galore_adamw_8bit"}},
            "optimizer.name=galore_adamw_8bit needs a GPU",
            "optimizer.name=adamw or adamw_8bit",
            {"optimizer": {"name": "adamw_8bit"}},
        ),
    ],
)
def test_what_needs_a_gpu_is_refused_and_its_change_is_accepted(
    sections: dict[str, Any], what: str, change: str, changed: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as caught:
        check_cpu(recipe(**sections))
    assert what in caught.value.what and caught.value.change == f"set {change}"
    check_cpu(recipe(**sections | changed))


@pytest.mark.parametrize(
    ("kind", "capability", "change"),
    [("cuda", "7.5", "fp16"), ("cuda", "8.0", "bf16"), ("cuda", "8.6", "bf16"), ("rocm", "9.4", "bf16")],
)
def test_products_in_fp8_need_units_for_them(kind: str, capability: str, change: str) -> None:
    for precision in ("fp8", "fp8_rowwise", "pure_fp8"):
        made = recipe(precision=precision)
        wanted = change.replace("bf16", made.in_bf16)
        with pytest.raises(UserError, match=f"precision={precision}: This has no units for fp8") as caught:
            check_device(made, kind, capability, "This")
        assert caught.value.change == f"set precision={wanted}"
        check_device(made.with_values({"precision": wanted}), kind, capability, "This")
        for able in ("8.9", "9.0", "10.0", None):
            check_device(made, "cuda", able, "That")
        check_cpu(made)


def test_graphs_need_a_gpu_that_triton_knows() -> None:
    made = recipe(precision="fp32", activation_checkpointing={"mode": "elementwise"})
    with pytest.raises(UserError, match=r"from compute capability 7\.0 on, and not for This") as caught:
        check_device(made, "cuda", "6.1", "This")
    assert caught.value.change == "set activation_checkpointing.mode=full"
    check_device(made.with_values({"activation_checkpointing.mode": "full"}), "cuda", "6.1", "This")
    for kind, capability in (("cuda", "7.0"), ("cuda", None), ("rocm", "9.4"), ("cpu", None)):
        check_device(made, kind, capability, "That")


@pytest.mark.parametrize("mode", ["none", "elementwise", "full", "selective"])
def test_what_trains_on_a_cpu_passes(mode: str) -> None:
    for precision in ("fp32", "bf16", "pure_bf16", "pure_fp8"):
        check_cpu(recipe(precision=precision, activation_checkpointing={"mode": mode}))


def test_deepspeed_decides_itself_whether_it_takes_fp16() -> None:
    made = recipe(precision="fp16", strategy={"name": "zero2"})
    check_cpu(made)
    with pytest.raises(UserError, match="precision=fp16"):
        check_cpu(made, deepspeed_takes_fp16=False)


def test_engines_that_accelerate_has_on_gpus_only() -> None:
    for name, processes, trains in (("zero2", 1, True), ("zero2", 2, False), ("fsdp", 1, False), ("ddp", 2, True)):
        made = recipe(strategy={"name": name})
        check_engine(made, "cuda", processes)
        if trains:
            check_engine(made, "cpu", processes)
        else:
            with pytest.raises(UserError, match=f"strategy.name={name}") as caught:
                check_engine(made, "cpu", processes)
            assert caught.value.change == "set strategy=ddp"
