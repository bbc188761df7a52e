"""The state that an engine must be in before the first step, and the state it is found in.

`expected_state` is what the recipe asks for; `train/live_state.py` reads the other side from live objects.
"""

from __future__ import annotations

from typing import Any, Literal

from toolkit.common import Partial
from toolkit.distributed.engines import dtypes, reshards_after_forward, teacher_dtype
from toolkit.distributed.layout import BatchLayout
from toolkit.distributed.stages import runs_as
from toolkit.recipe import Recipe
from toolkit.recipe.precisions import FP8_SCALING
from toolkit.recipe.teaching import of_teacher

Spread = Literal["whole", "sharded"]
_RECOMPUTED_BY = {"none": "none", "elementwise": "graphs"}
"""Who recomputes in which mode of activation checkpointing; in all others the model's own layers."""


class EngineState(Partial):
    """How an engine holds a model and what it does to it: as the recipe asks for it, or as it really is.

    What does not apply, or cannot be read yet, is not set.
    """

    engine: str | None = None
    device: str | None = None
    world_size: int | None = None
    optimizer: str | None = None
    """Name of its class."""
    attention: str | None = None
    """Transformers' name of the implementation."""
    output_head: Literal["fused", "own"] | None = None
    """Whether TRL's fused head scores labels, or the model's own forward; encoder-decoders have their own."""
    activation_checkpointing: str | None = None
    """Who recomputes: the `model`, the `engine`, the `graphs` of its layers, several of them, or `none`."""
    mlp_tiles: int | None = None
    """In how many tiles of a row's tokens the MLPs compute; 0 where layers differ."""
    parameters: Spread | None = None
    trained_parameters: int | None = None
    frozen_parameters: int | None = None
    trained_dtype: str | None = None
    quantization: str | None = None
    micro_batch_size: int | str | None = None
    """A text where engine and trainer disagree."""
    gradient_accumulation_steps: int | str | None = None
    """A text where engine and trainer disagree."""
    frozen_dtype: str | None = None
    moments_dtype: str | None = None
    not_updated: int | None = None
    """Trained parameters that the optimizer does not have."""
    zero_stage: int | None = None
    max_grad_norm: float | None = None
    gradients: Spread | None = None
    optimizer_state: Spread | None = None
    master_dtype: str | None = None
    reduce_dtype: str | None = None
    compute_dtype: str | None = None
    autocast: str | None = None
    fp8_products: str | None = None
    """What has a scale in products in fp8: `tensorwise` or `rowwise`; `none` without such products."""
    tf32: bool | None = None
    """Whether products of fp32 matrices are computed in TF32."""
    offload_optimizer: str | None = None
    offload_param: str | None = None
    sequence: int | None = None
    """Processes that share each row by exchanging heads."""
    context: int | None = None
    """Processes that share each row by gathering keys and values."""
    tensor: int | None = None
    """Processes that divide each layer."""
    expert: int | None = None
    """Processes that divide the experts of each layer."""
    pipeline: int | None = None
    """Processes that the layers are spread over."""
    schedule: str | None = None
    """In which order they take micro-batches, see `parallel.schedule`."""
    stages: dict[int, list[int]] | None = None
    """Stage to its first layer and the one after its last, for those of this process."""
    sharded_over: int | None = None
    """Processes over which FSDP shards, or ZeRO averages."""
    reshard_after_forward: bool | None = None
    sync_each_batch: bool | None = None
    """Whether FSDP reduces gradients after every micro-batch."""
    fsdp_units: int | None = None
    compile: str | None = None
    """Whether the layers are compiled, as `compile` of the recipe says it."""
    liger_modules: int | None = None
    """Modules whose forward is one of Liger's kernels."""
    num_workers: int | None = None
    """Processes that make batches ahead."""
    teacher_dtype: str | None = None
    """Type of the embeddings of a teacher."""
    teacher_quantization: str | None = None
    teacher_offload: bool | None = None
    """Whether layers of a teacher wait on the host, of which no device but a GPU knows anything."""
    teacher_trained: int | None = None
    """Parameters of a teacher that get gradients, or are in training mode."""
    compiled_graphs: int | None = None
    """How many graphs that took so far."""


def expected_state(recipe: Recipe, layout: BatchLayout, optimizer: str, attention: str) -> EngineState:
    """The state that the recipe asks for.

    Args:
        optimizer: Name of the optimizer's class, see `optimizer.optimizer_class`.
        attention: Transformers' name of the attention implementation.

    Returns:
        What must hold. What `live_state.read` reports beyond it is for the record only.
    """
    strategy, types, parallel = recipe.strategy, dtypes(recipe), recipe.parallel
    several = layout.world_size > 1
    # Over which ZeRO divides; FSDP's tensors know of parts of layers too.
    replicas = layout.world_size // (layout.tensor if strategy.zero_stage else 1)
    stage = 3 if strategy.name == "fsdp" else strategy.zero_stage

    def spread(from_stage: int) -> Spread:
        return "sharded" if replicas > 1 and stage >= from_stage else "whole"

    state: dict[str, Any] = {
        "engine": "ddp" if several else "none",
        "world_size": layout.world_size,
        "sequence": layout.sequence,
        "context": layout.context,
        "tensor": layout.tensor,
        "expert": layout.expert,
        "pipeline": layout.pipeline,
        "micro_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        "num_workers": recipe.data.decided_workers,
        "max_grad_norm": recipe.optimizer.max_grad_norm,
        "optimizer": optimizer,
        "attention": attention,
        "activation_checkpointing": _RECOMPUTED_BY.get(recipe.activation_checkpointing.mode, "model"),
        "mlp_tiles": recipe.activation_checkpointing.mlp_tiles,
        "parameters": spread(3),
        "gradients": spread(2),
        "optimizer_state": spread(1),
        "trained_dtype": types.local,
        "quantization": recipe.method.quantization,
        "not_updated": 0,
        "autocast": types.autocast or "none",
        "fp8_products": FP8_SCALING.get(recipe.precision, "none"),
        "master_dtype": types.master,
    }
    if strategy.zero_stage:
        state |= {"engine": "deepspeed", "zero_stage": strategy.zero_stage, "reduce_dtype": types.reduce}
        state["sharded_over"] = replicas
        state |= {key: getattr(strategy, key) for key in ("offload_optimizer", "offload_param")}
    elif strategy.name == "fsdp":
        state |= {"engine": "fsdp2", "reduce_dtype": types.reduce, "compute_dtype": types.compute}
        state |= {"offload_param": strategy.offload_param, "reshard_after_forward": reshards_after_forward(recipe)}
        state["sync_each_batch"] = strategy.sync_each_batch
    if parallel.pipeline > 1:
        state |= {"engine": "pipeline"}
        state["schedule"] = runs_as(parallel.schedule, parallel.stages, layout.gradient_accumulation_steps)
    if teaches := of_teacher(recipe):
        state |= {"teacher_dtype": teacher_dtype(teaches), "teacher_quantization": teaches.method.quantization}
        state["teacher_trained"] = 0
    if recipe.tf32 != "auto":
        state["tf32"] = recipe.tf32
    traits = recipe.optimizer.traits
    if traits.bits == 32 and traits.module in ("torch", "bitsandbytes"):
        state["moments_dtype"] = traits.state_dtype(types.master)
    return EngineState(**state)
