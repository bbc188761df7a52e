"""A rough plan from a recipe alone, so that tests of the search know what it should find."""

from __future__ import annotations

from typing import Any

from example_plan import GIB, example_plan

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import Hardware
from toolkit.planner.plan import Plan
from toolkit.recipe import Recipe

_RECOMPUTED = {"none": 0.0, "selective": 0.7, "full": 1.0, "offload": 1.0}


def recipe(**sections: Any) -> Recipe:
    """A recipe of defaults with 4 sequences of 4,096 tokens to a micro-batch and a global batch of 16."""
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"sources": ["d"]},
        "batch": {"seq_len": 4096, "global_batch_size": 16},
    }
    batch = {**base["batch"], **sections.pop("batch", {})}
    return Recipe.model_validate({**base, **sections, "batch": batch})


class Arithmetic:
    """Bytes and seconds of a decoder with so many billion parameters; counts how often it is asked.

    Args:
        without: Modes of activation checkpointing whose plans are unknown unless tracing is allowed.
    """

    def __init__(self, billions: float, without: tuple[str, ...] = ()) -> None:
        self.billions, self.without = billions, without
        self.asked = 0

    def __call__(self, recipe: Recipe, hardware: Hardware, may_trace: bool = False) -> Plan | None:
        assert recipe.knows_engine
        mode, every = recipe.activation_checkpointing.mode, recipe.activation_checkpointing.every_n_layers
        if mode in self.without and not may_trace:
            return None
        self.asked += 1
        devices, strategy, layout = hardware.devices, recipe.strategy, batch_layout(recipe, hardware.devices)
        recomputed = _RECOMPUTED[mode] / every
        # 30 KiB per token and billion parameters; layers that are recomputed keep a twelfth.
        activations = self.billions * 30 * 2**10 * layout.micro_batch_size * 4096 * (1 - recomputed * 11 / 12)
        weights, trained = self._states(recipe)
        optimizer = trained * {"adamw": 8, "adamw_8bit": 2, "adamw_torch_8bit": 2}[recipe.optimizer.name]
        gradients, masters = trained * 4, trained * 4
        parts = {"zero1": (1, 1, devices), "zero2": (1, devices, devices), "zero3": (devices,) * 3}
        by_weights, by_gradients, by_states = {**parts, "fsdp": (devices,) * 3}.get(strategy.name, (1, 1, 1))
        on_host = strategy.offload_optimizer == "cpu" or strategy.offload_param == "cpu"
        states = (optimizer + masters) / by_states
        need = weights / by_weights + gradients / by_gradients + activations + (0 if on_host else states)
        passes = layout.gradient_accumulation_steps
        compute = self.billions * layout.tokens_per_step / devices * 2e-5 * (1 + recomputed / 3) + 0.02 * passes
        link = {"single": 0, "ddp": 1, "zero1": 1, "zero2": 1.0 + 0.1 * passes}.get(strategy.name, 1 + passes)
        traffic = 0.02 * self.billions * link * (devices > 1)
        seconds = compute + traffic + (trained * 20 / 25e9 / devices if on_host else 0)
        return _plan(hardware, int(need), seconds, compute, layout, int(states * devices) if on_host else 0)

    def _states(self, recipe: Recipe) -> tuple[float, float]:
        """Bytes of the weights beside the masters, and trained parameters."""
        parameters = self.billions * 1e9
        if recipe.method.name == "full":
            return 2 * parameters, parameters
        return parameters * (0.55 if recipe.method.quantization == "nf4" else 2), parameters / 200


def _plan(hardware: Hardware, need: int, seconds: float, compute: float, layout: Any, host: int) -> Plan:
    available, high = hardware.device.memory, need * 1.1
    answer = "no" if need > available else "tight" if high > available else "yes"
    if host > hardware.node.ram:
        answer = "no"
    total = {"value": need, "low": need, "high": high}
    example = example_plan()
    time = type(example.work.step_seconds)
    return example.model_copy(
        update={
            "hardware": hardware.name,
            "devices": hardware.devices,
            "memory": [example.memory[0].model_copy(update={"total": type(example.memory[0].total)(**total)})],
            "host": example.host.model_copy(update={"peak": host + 10 * GIB}),
            "fit": example.fit.model_copy(
                update={"answer": answer, "needed": need, "available": available, "margin": available - need}
            ),
            "work": example.work.model_copy(
                update={
                    "step_seconds": time(value=seconds, low=seconds, high=seconds),
                    "compute_seconds": time(value=compute, low=compute, high=compute),
                    "tokens_per_step": float(layout.tokens_per_step),
                }
            ),
            "advice": [],
        }
    )
