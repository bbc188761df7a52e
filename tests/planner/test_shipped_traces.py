"""The traces that come with the package: there for every shipped recipe, and still what tracing would say."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

import pytest
from ship_traces import settings

from toolkit.planner.build import estimate
from toolkit.planner.compiled import of_compiled, of_elementwise
from toolkit.planner.hardware import find
from toolkit.planner.plan import Plan
from toolkit.planner.trace.fit import trace
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.store import SHIPPED
from toolkit.planner.trace.types import Phase, Shape, Trace
from toolkit.recipe import load

PHASES: tuple[Phase, ...] = ("forward", "backward")


def test_every_setting_of_the_shipped_recipes_is_traced_and_nothing_else() -> None:
    """After a change of what is traced, of recipes or of versions: `make traces`."""
    shipped = {key for file in SHIPPED.glob("*.json.gz") for key in json.loads(gzip.decompress(file.read_bytes()))}

    assert shipped == settings().keys()


@pytest.mark.parametrize(
    ("method", "index"), [("full", 0), ("lora", 0), pytest.param("lora", -1, marks=pytest.mark.matrix)]
)
def test_a_shipped_trace_is_what_tracing_says(method: str, index: int) -> None:
    each = [
        each
        for each in settings().values()
        if (each.config.get("num_hidden_layers"), each.method["name"]) == (16, method)
    ][index]
    shipped = json.loads(gzip.decompress((SHIPPED / f"{each.architecture()}.json.gz").read_bytes()))

    assert Trace.from_json(shipped[each.key()]) == trace(each)


def test_compiled_layers_are_never_planned_to_hold_more_than_uncompiled_ones() -> None:
    """For short rows and long ones: a fit of graphs that differ would say anything."""
    shipped: dict[str, Any] = {}
    for file in SHIPPED.glob("*.json.gz"):
        shipped |= json.loads(gzip.decompress(file.read_bytes()))

    def known(setting: Setting) -> Trace:
        return Trace.from_json(shipped[setting.key()])

    device, less = find("h200").device, 0
    found = {key: each for key, each in settings().items() if each.compiled and each.checkpointing == "none"}
    for compiled in found.values():
        setting = dataclasses.replace(compiled, compiled=False)
        plain = known(setting)
        elementwise = of_elementwise(plain, setting, device, known)
        assert elementwise
        for graphs in (of_compiled(plain, setting, device, known), elementwise[0]):
            less += graphs is not plain
            for batch, length in ((1, 512), (3, 2048), (1, 16384)):
                shape = Shape(plain.layers, batch, length)
                for phase in PHASES:
                    assert graphs.peak(shape, phase) <= 1.1 * plain.peak(shape, phase), (setting, shape, phase)
    # All but mixtures.
    assert less > 0.9 * 2 * len(found)


def test_shipped_traces_are_small() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.glob("*.json.gz")) < 1_000_000


def _plan(name: str, hardware: str, *overrides: str) -> Plan:
    loaded = load(name, ["batch.micro_batch_size=1", "batch.global_batch_size=64", *overrides])
    return estimate(loaded.recipe, loaded.name, find(hardware), advice=False)


@pytest.mark.parametrize("name", [pytest.param("llama_3_1_8b_lora", marks=pytest.mark.matrix), "llama_3_2_1b_full"])
def test_what_grows_with_what(name: str) -> None:
    """More tokens at a time take more memory and less time for each; a better card is never slower."""

    def planned(hardware: str, *overrides: str) -> Plan:
        # Recomputed or not: of its own accord a plan would go from one to the other.
        return _plan(name, hardware, f"activation_checkpointing={'full' if 'lora' in name else 'none'}", *overrides)

    def rising(figures: list[float]) -> bool:
        return figures == sorted(figures)

    sizes = [planned("h200", f"batch.micro_batch_size={size}") for size in (1, 2, 4, 8, 16)]
    assert rising([each.memory[0].allocated for each in sizes])
    assert rising([each.work.tokens_per_second for each in sizes])
    lengths = [planned("h200", f"batch.seq_len={length}") for length in (256, 1024, 4096)]
    assert rising([each.memory[0].allocated for each in lengths])
    for cards in (("t4", "a10g", "l40s", "a100", "h100", "h200", "b200"), ("rtx3090", "rtx4090", "rtx5090")):
        half = {"t4": ["precision=fp16"]}  # It has no bf16.
        assert rising([planned(card, *half.get(card, [])).work.tokens_per_second for card in cards])
    devices = [planned(f"h200x{count}") for count in (2, 4, 8)]
    assert rising([each.work.tokens_per_second for each in devices])
    assert rising([-each.work.tokens_per_second / each.devices for each in devices])


@pytest.mark.parametrize("hardware", ["rtx4090x2", "l40sx4", "a100_pciex2"])
@pytest.mark.parametrize("strategy", ["fsdp_offload", "zero3_offload"])
def test_what_passes_over_one_link_takes_turns(strategy: str, hardware: str) -> None:
    """Without NVLink weights from the host and from neighbours come over the same lanes, one after the other."""
    work = _plan("llama_3_1_8b_lora", hardware, f"strategy={strategy}", "batch.seq_len=2048").work
    sending = [link.seconds for link in work.links]
    assert max(sending) < 2 * work.compute_seconds.value < 4 * sum(sending)
    taking = work.compute_seconds.value + work.communication_seconds + work.offload_seconds
    assert taking > sum(sending)


def test_what_is_true_though_it_looks_wrong() -> None:
    """What ZeRO-3 gathers of a 1B model is more than the share of weights that it saves; docs/plan.md says so."""
    two, three = (
        _plan("llama_3_2_1b_full", "h200x2", f"strategy={name}", "batch.global_batch_size=2")
        for name in ("zero2", "zero3")
    )
    assert three.memory[0].allocated > two.memory[0].allocated


@pytest.mark.parametrize(
    "name",
    [
        *("llama_3_1_8b_lora", "llama_3_1_8b_qlora", "gemma_2_2b_lora", "blenderbot_400m_seq2seq"),
        pytest.param("qwen3_30b_a3b_lora", marks=pytest.mark.matrix),
    ],
)
def test_what_is_recomputed_is_no_flop_of_the_model(name: str) -> None:
    """Experts, attention, an encoder and quantized layers are counted once, however often they are computed, and the
    gradient of what frozen embeddings give the first layer whether it is formed or not."""
    useful, done = [], []
    for mode in ("none", "full"):
        loaded = load(name, [f"activation_checkpointing.mode={mode}", "batch.micro_batch_size=2"])
        work = estimate(loaded.recipe, loaded.name, find("h200"), advice=False).work
        useful.append(work.model_flops_per_step)
        done.append(work.hardware_flops_per_step)
    assert useful[1] == pytest.approx(useful[0], rel=1e-6)
    assert done[1] > 1.2 * done[0]


def test_a_full_fine_tuning_of_8b_fits_where_layers_are_recomputed_and_moved() -> None:
    """On an H200, which has 139.8 GiB: its copies of all weights beside its gradients were planned at 142.4 GiB."""
    loaded = load(
        "llama_3_1_8b_full_8bit", ["optimizer.name=adamw", "activation_checkpointing=offload", "micro_batch_size=4"]
    )
    (device,) = estimate(loaded.recipe, loaded.name, find("h200"), advice=False).memory
    assert device.peak_phase == "backward" and device.total.value < 132 * 2**30
    # At the end of a forward pass, which holds a copy of the output head alone.
    assert device.phases["forward"]["casts"] == pytest.approx(2 * 128_256 * 4096)
