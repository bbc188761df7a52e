"""The dtypes of a run: the same masters on every engine."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.recipe import Recipe

_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "pure_bf16": "bfloat16"}


@dataclass(frozen=True)
class Dtypes:
    """Names of torch dtypes (`float32`, …).

    Args:
        load: How weights are read into memory; for adapters, how the frozen base is stored.
        local: How trained parameters lie in the model between steps.
        compute: What matrix products are computed in.
        autocast: The dtype of `torch.autocast`, or None where parameters come to the computation in `compute`.
        reduce: What gradients are summed in, over micro-batches and processes.
        master: What the optimizer updates.
        export: How a fully trained model is published.
    """

    load: str
    local: str
    compute: str
    autocast: str | None
    reduce: str
    master: str
    export: str


def dtypes(recipe: Recipe) -> Dtypes:
    """Masters are fp32 unless `pure_bf16`, whatever the engine does by itself.

    Replicated and FSDP parameters are their own masters. DeepSpeed computes with 16-bit parameters and keeps fp32
    masters in its optimizer. Without an engine, gradients are summed in the dtype of the parameters they belong to.
    """
    compute = _NAMES[recipe.precision]
    master = "bfloat16" if recipe.precision == "pure_bf16" else "float32"
    zero = recipe.strategy.zero_stage > 0
    local = compute if zero else master
    load = _NAMES.get(recipe.model.dtype) or (local if recipe.method.name == "full" else compute)
    return Dtypes(
        load=load,
        local=local,
        compute=compute,
        # FSDP computes with gathered copies of this type; accelerate wraps no forward pass around it.
        autocast=None if zero or recipe.strategy.name == "fsdp" or compute == master else compute,
        reduce=_NAMES.get(recipe.strategy.reduce_dtype, master),
        master=master,
        export=compute,
    )
