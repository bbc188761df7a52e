"""A trace of every n-th layer recomputed, from those of none and of all."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from toolkit.distributed.layout import batch_layout
from toolkit.planner.trace import store
from toolkit.planner.trace.every import every_nth
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.types import Moment, Shape, Trace
from toolkit.recipe import load, model_configs

SHAPES = ((1, 512), (4, 4096), (1, 16384), (16, 128))


def setting(name: str) -> Setting:
    recipe = load(name, ["strategy.name=ddp", "activation_checkpointing=full"]).recipe
    config = model_configs.config_of(recipe.model)
    assert config
    return setting_of(recipe, config, "cuda", "torch_varlen", batch_layout(recipe, 1))


def known(wanted: Setting) -> Trace:
    found = store.find(wanted)
    assert found, "shipped"
    return found


def size(moment: Moment, shape: Shape) -> float:
    return sum(getattr(moment, part).at(shape) for part in ("activations", "casts", "logits", "gradients"))


@pytest.mark.parametrize(
    "name", ["llama_3_1_8b_lora", "llama_3_1_8b_full_8bit", "llama_3_2_1b_qlora", "gemma_3_1b_full", "qwen3_0_6b_full"]
)
def test_it_is_what_tracing_says(name: str) -> None:
    """Halves are shipped with a trace of their own."""
    every = setting(name)
    traced = known(dataclasses.replace(every, every_n_layers=2))
    made = every_nth(*map(known, every.ends()), 2)
    for batch, length in SHAPES:
        shape = Shape(traced.layers, batch, length)
        for kind in itertools.product(("forward", "backward"), (False, True)):
            peaks = [
                max(size(each, shape) for each in trace.moments if (each.phase, each.accumulating) == kind)
                for trace in (made, traced)
            ]
            assert peaks[0] == pytest.approx(peaks[1], rel=0.015)
        for key in ("forward", "backward", "recompute"):
            for part in ("matmul", "attention", "moved"):
                amounts = [getattr(trace.passes[key], part).at(shape) for trace in (made, traced)]
                assert amounts[0] == pytest.approx(amounts[1], rel=0.015)


def test_the_more_layers_are_recomputed_the_less_memory_and_the_more_work() -> None:
    every = setting("llama_3_1_8b_lora")
    traces = [known(each) for each in (every.ends()[0], *(_nth(every, n) for n in (32, 8, 4, 3)), every)]
    shape = Shape(traces[0].layers, 4, 4096)
    work = [trace.passes["backward"].matmul.at(shape) for trace in traces]
    held = [max(size(each, shape) for each in trace.moments if each.phase == "backward") for trace in traces]
    assert work == sorted(set(work)) and held == sorted(set(held), reverse=True)


def test_it_is_known_where_the_two_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Setting] = []

    def trace(wanted: Setting) -> Trace:
        asked.append(wanted)
        return known(setting("llama_3_1_8b_lora"))

    monkeypatch.setattr(store, "_trace_in_worker", trace)
    other = dataclasses.replace(_nth(setting("llama_3_1_8b_lora"), 4), attention="unknown")
    assert store.find(other) is None
    assert store.obtain(other).layers == 32
    assert [(each.checkpointing, each.every_n_layers) for each in asked] == [("none", 1), ("full", 1)]


def _nth(every: Setting, n: int) -> Setting:
    return dataclasses.replace(every, every_n_layers=n)
