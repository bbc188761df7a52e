"""What plans say of compiled layers that compute element-wise work again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.distributed.layout import BatchLayout
from toolkit.planner.build import estimate
from toolkit.planner.compiled import of_elementwise
from toolkit.planner.hardware import Hardware, find
from toolkit.planner.plan import Plan
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.types import NOTHING, Amount, Moment, Pass, Trace
from toolkit.recipe.rules import load_checked

LONG = ["seq_len=16384", "max_steps=1000"]


def plan(*overrides: str, hardware: str = "h100") -> Plan:
    loaded = load_checked("llama_3_1_8b_lora", [*LONG, *overrides])
    return estimate(loaded.recipe, loaded.name, find(hardware), advice=False)


def test_element_wise_work_is_computed_again_before_every_4th_layer_is() -> None:
    """8B, LoRA, rows of 16,384 tokens on a card of 80 GB."""
    chosen = plan("activation_checkpointing=auto")
    assert chosen.fit.answer == "yes"
    assert chosen.chosen["activation_checkpointing.mode"].startswith("elementwise: recomputing nothing would not fit")
    kept, again, fourth = (
        plan(*each)
        for each in (
            ["activation_checkpointing=none"],
            ["activation_checkpointing=elementwise"],
            ["activation_checkpointing={mode: full, every_n_layers: 4}"],
        )
    )
    assert chosen.memory == again.memory and chosen.work == again.work
    assert kept.fit.answer == "no" and again.work.compile_seconds
    slower, layers = (each.work.step_seconds.value / kept.work.step_seconds.value - 1 for each in (again, fourth))
    assert 0.005 < slower < 0.03 < layers
    # Nothing is multiplied twice.
    assert again.work.hardware_flops_per_step == kept.work.hardware_flops_per_step
    activations = [each.memory[0].phases["backward"]["activations"] for each in (kept, again)]
    assert 0.6 < activations[1] / activations[0] < 0.75


@pytest.mark.parametrize("overrides", [["compile='off'"], ["strategy=fsdp"]])
def test_layers_that_stay_as_they_are_compute_whole_layers_again(overrides: list[str]) -> None:
    chosen = plan("activation_checkpointing=auto", *overrides)
    assert chosen.fit.answer == "yes" and "element-wise" not in chosen.chosen["activation_checkpointing.mode"]
    assert chosen.chosen["activation_checkpointing.mode"].startswith("full")


def test_a_machine_without_a_compiler_is_planned_as_it_will_run() -> None:
    loaded = load_checked("llama_3_1_8b_lora", [*LONG, "activation_checkpointing=auto"])
    here = dataclasses.replace(find("h100"), lacks="there is no C compiler (gcc)")

    def on(hardware: Hardware, *overrides: str) -> Plan:
        recipe = load_checked("llama_3_1_8b_lora", [*LONG, *overrides]).recipe
        return estimate(recipe, loaded.name, hardware, advice=False)

    for compiles in ("auto", "layers"):
        made = on(here, "activation_checkpointing=none", f"compile={compiles}")
        left = on(find("h100"), "activation_checkpointing=none", "compile='off'")
        assert made.notes[0] == "layers are not compiled: there is no C compiler (gcc)" and left.notes == made.notes[1:]
        assert made.memory == left.memory and made.work == left.work
    assert on(here, "activation_checkpointing=auto").chosen["activation_checkpointing.mode"].startswith("full")
    with pytest.raises(UserError, match="compiled layers, and on this machine there is no C compiler") as caught:
        on(here, "activation_checkpointing=elementwise")
    assert caught.value.change == "install it, or set activation_checkpointing.mode=full"


def setting(mode: str) -> Setting:
    recipe = load_checked("llama_3_1_8b_lora", [f"activation_checkpointing={mode}"]).recipe
    return setting_of(recipe, {"model_type": "llama"}, "cuda", "sdpa", BatchLayout(1, 1, 1, 1, 8))


def trace(kept: float, casts: float = 0.0, origin: Any = "traced") -> Trace:
    begins = Moment(
        "backward", "head", False, Amount((7.0,), (0.0, kept)), Amount((), (casts,)), NOTHING, NOTHING
    )  # fmt: skip
    passes = {"backward": Pass(NOTHING, NOTHING, NOTHING, NOTHING)}
    return Trace(2, (), (begins,), passes, NOTHING, 0, None, origin)


def test_what_is_not_kept_is_written_once_more_and_read() -> None:
    base, device = setting("none"), find("h100").device
    traces = {"none": trace(100.0, casts=10.0), "elementwise": trace(60.0)}

    def find_trace(setting: Any) -> Trace | None:
        assert setting.compiled and setting.every_n_layers == 1
        return traces.get(setting.checkpointing)

    found = of_elementwise(trace(150.0), base, device, find_trace)
    assert found is not None
    held, again = found
    assert held.moments == traces["elementwise"].moments
    # Two layers of five tokens: 40 bytes less of each token and copies of 10 bytes, both written and read.
    assert again.of(2, 5.0, 0.0) == 2 * 2 * (5 * 40 + 10)
    traces["elementwise"] = trace(60.0, origin="formulas")
    assert of_elementwise(trace(150.0), base, device, find_trace) == (trace(150.0), NOTHING)
    del traces["elementwise"]
    assert of_elementwise(trace(150.0), base, device, find_trace) is None


def test_graphs_that_recompute_have_traces_of_their_own_and_others_keep_theirs() -> None:
    settings = {mode: setting(mode) for mode in ("none", "elementwise", "full")}
    assert settings["elementwise"] == settings["none"] != settings["full"]
    compiled = dataclasses.replace(settings["none"], compiled=True)
    assert dataclasses.replace(compiled, checkpointing="elementwise").key() != compiled.key()
