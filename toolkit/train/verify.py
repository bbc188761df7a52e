"""What really runs, read back from the live objects, and compared with what the recipe asks for.

Libraries drop or replace settings in silence, each in its own way and from one version to the next. So engine, dtypes,
sharding, optimizer, clipping and attention are read from the built engine before the first step and after it, which
costs milliseconds; a difference ends the run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from toolkit.common import UserError
from toolkit.data.batches import MicroBatches
from toolkit.data.collate import isolates
from toolkit.data.encode import IGNORE
from toolkit.distributed.engine_state import EngineState, expected_state
from toolkit.distributed.engines import fsdp_mesh
from toolkit.models import attention, attention_kernels, compiled_layers, coverage, device, head_choice, liger_kernels
from toolkit.models.parts import sizes as parts
from toolkit.models.pipeline import chain
from toolkit.models.shared_rows import sizes
from toolkit.models.tiled_mlp import tiles_of
from toolkit.train.distillation import DistillationTrainer, check_heads, state_of
from toolkit.train.evaluate import evaluating
from toolkit.train.heads import check_padding
from toolkit.train.optimizer import inner_optimizer, moments_of, not_updated, updated_by
from toolkit.train.session import Session
from toolkit.train.trainer import CausalTrainer

_log = logging.getLogger("toolkit.train")
_SCORED = 128
"""Tokens of each row that both output heads score before the first step."""


class Verify(TrainerCallback):
    """Compares before the first step, and once more after it, when the optimizer has its state."""

    def __init__(self, session: Session) -> None:
        self._session, self._has_stepped, self._graphs = session, False, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session.recipe.headed:
            check_padding(self._session)
        else:
            check_output_head(self._session)
        if self._session.recipe.distills:
            check_heads(self._session, _first_rows(self._session))
        self._check()
        if self._session.recipe.data.packing or self._session.attention in attention.VARLEN:
            check_isolation(self._session)
        if self._session.layout.sharing > 1:
            check_parts(self._session)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._check()
            self._check_compiled()
        self._check_graphs(state.global_step)

    def _check_compiled(self) -> None:
        compiled = self._session.compiled
        if compiled is None or compiled.graphs:
            return
        what = "layers run as they are: torch's compiler takes none of them (TORCH_LOGS=dynamo tells why)"
        if self._session.recipe.activation_checkpointing.mode == "elementwise":
            raise UserError(
                f"activation_checkpointing.mode=elementwise: {what}", "set activation_checkpointing.mode=full"
            )
        if self._session.leads:
            _log.warning("%s", what)

    def _check_graphs(self, step: int) -> None:
        """Says so where batches of other shapes have the layers compiled again, which costs more than it saves."""
        compiled = self._session.compiled
        if compiled is None or compiled.graphs == self._graphs:
            return
        if self._graphs and self._session.leads:
            _log.warning("step %d: layers were compiled again, %d graphs so far", step, compiled.graphs)
        self._graphs = compiled.graphs

    def _check(self) -> None:
        session = self._session
        recipe, (kind, _) = session.recipe, session.trainer.optimizer_cls_and_kwargs
        attends = attention_kernels.implementation(session.attention)
        expected = expected_state(recipe, session.layout, kind.__name__, attends)
        if recipe.strategy.name == "fsdp":
            mesh = fsdp_mesh(recipe, session.world)
            replicas = session.layout.world_size // session.layout.tensor
            expected.sharded_over = mesh["dp_shard_size"] if mesh else replicas
        expected.compile = "layers" if session.compiled else "off"
        if own := chain():
            expected.stages = {stage: list(own.split.between(stage)) for stage in own.split.stages(own.place)}
        reshard(session.trainer.model_wrapped)
        state = read(session.trainer)
        if session.compiled:
            state.compiled_graphs = session.compiled.graphs
        verify(expected, state)
        if session.leads:
            session.folder.update_manifest(effective=state)


def verify(expected: EngineState, state: EngineState) -> None:
    """Stops a run that is not what was asked for.

    Args:
        expected: See `engine_state.expected_state`. What cannot be read yet (moments, before the first step) is not
            compared.
        state: See `read`.

    Raises:
        UserError: With every difference.
    """
    runs = state.model_dump()
    different = [
        f"{key}: the recipe asks for {value}, {runs[key]} runs"
        for key, value in expected.model_dump().items()
        if key in runs and runs[key] != value
    ]
    if different:
        raise UserError(
            "what was set up is not what the recipe asks for:\n  " + "\n  ".join(different),
            "this is a fault of the toolkit or of a library's version: `toolkit doctor` prints what to report",
        )


def check_isolation(session: Session) -> None:
    """Asks the model itself, on its device and in its precision, whether documents of a batch are kept apart.

    Of a pipeline each process asks its own stages.

    Raises:
        UserError: If they see each other.
    """
    place, backend, autocast = session.trainer.args.device, session.attention, session.dtypes.autocast
    flat, collator = backend in attention.VARLEN, session.trainer.data_collator.whole
    if pipeline := session.trainer.pipeline:
        isolated = pipeline.isolates()
    else:
        with torch.autocast(place.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext():
            isolated = isolates(session.module, collator, place)
    if isolated and session.recipe.distills:
        isolated = isolates(session.trainer.teacher.model, collator, place)
    if not isolated:
        ways = ["data.packing=false"] * session.recipe.data.packing + ["model.attention=sdpa"] * flat
        raise UserError(
            f"{type(session.module).__name__} with attention {backend} lets documents of a batch see each other",
            f"set {' and '.join(ways)}",
        )


def check_parts(session: Session) -> None:
    """Asks the model itself whether parts of a row, on the processes that share it, get the logits of the whole row.

    Raises:
        UserError: If they do not, on any process.
    """
    trainer, size = session.trainer, session.layout.sharing
    collator, model = trainer.data_collator, trainer.model_wrapped
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * size
    row = {"input_ids": ids, "labels": [IGNORE] * len(ids), "seq_lengths": [len(ids) // 2] * 2}
    with torch.no_grad(), evaluating(model):
        whole, part = (
            model(**trainer.output_head.plain(send_to_device(collate([row]), trainer.args.device))).logits[0].double()
            for collate in (collator.whole, collator)
        )
    mine = torch.cat([whole[first:end] for first, end in collator.pieces(len(whole))])
    difference = ((part - mine).norm() / mine.norm()).reshape(1)
    largest = trainer.accelerator.gather(difference).max().item()
    # Rounding in another order; tokens that other parts do not see are off by as much as the logits are large.
    exact = session.dtypes.compute == "float32" and not device.computes_tf32()
    if not largest < (1e-4 if exact else 0.1):
        raise UserError(
            f"{type(session.module).__name__} computes other logits for parts of rows than for whole ones: they differ "
            f"by {largest:.1g} of their size",
            f"remove {session.recipe.parallel.shares_by}",
        )


def _first_rows(session: Session) -> dict[str, Any]:
    """The beginning of the first two rows as a batch, all whose tokens are trained."""
    trainer, prepared = session.trainer, session.prepared
    rows = prepared.eval if session.recipe.data.streaming and prepared.eval is not None else prepared.train
    first = [{key: row[key][:_SCORED] for key in ("input_ids", "labels")} for row in itertools.islice(iter(rows), 2)]
    if session.recipe.objective != "seq2seq":
        first = [{"input_ids": row["input_ids"], "labels": [IGNORE, *row["input_ids"][1:]]} for row in first]
    return send_to_device(trainer.data_collator.whole(first), trainer.args.device)


def check_output_head(session: Session) -> None:
    """Asks the model itself, on its first rows, its device and in its precision, whether labels are scored as its own
    forward does. If not, on any process, all go on with its own forward, and with all logits if need be."""
    trainer = session.trainer
    head = trainer.output_head
    batch = _first_rows(session)
    compute = getattr(torch, session.dtypes.compute)

    def equal(fused: bool) -> tuple[bool, str]:
        with trainer.pipeline.at_last(batch) if trainer.pipeline else contextlib.nullcontext(batch) as given:
            # Of a pipeline the process with the last stage compares.
            difference, reason = 0.0, ""
            if given is not None:
                difference, reason = head_choice.compare(trainer.model_wrapped, given, head, compute, fused)
        largest = trainer.accelerator.gather(torch.tensor([difference], device=trainer.args.device)).max().item()
        return largest <= 1, reason

    if head.fused:
        head.fused, reason = equal(fused=True)
        if session.leads and not head.fused:
            _log.warning(
                "the model's own forward scores the labels: the fused output head is not what this model computes "
                "(%s). The plan does not count it, as the architecture does not show it",
                reason or "as another process found",
            )
    if head.selects and not head.fused:
        head.selects, _ = equal(fused=False)


def read(trainer: Any) -> EngineState:
    """The effective state of a trainer whose engine is built. Reads attributes only; nothing is communicated."""
    engine, loader = trainer.model_wrapped, trainer.callback_handler.train_dataloader
    model = trainer.accelerator.unwrap_model(engine)
    deepspeed = engine if trainer.is_deepspeed_enabled else None
    optimizer = inner_optimizer(trainer.optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    state: dict[str, Any] = {
        "engine": _engine(engine, deepspeed),
        "device": str(trainer.args.device),
        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        **sizes(),
        **parts(model),
        **(trainer.pipeline.effective() if trainer.pipeline else {"pipeline": 1}),
        "optimizer": type(optimizer).__name__,
        "attention": str(model.config._attn_implementation),
        "activation_checkpointing": _checkpointing(model),
        "mlp_tiles": tiles_of(model),
        "parameters": _spread(trained + frozen),
        "trained_parameters": sum(_numel(parameter) for parameter in trained),
        "frozen_parameters": sum(_numel(parameter) for parameter in frozen),
        "trained_dtype": _dtypes(trained),
        "quantization": coverage.stored_form(model),
        "tf32": device.computes_tf32(),
        "fp8_products": next((each.fp8_scaling for each in model.modules() if hasattr(each, "fp8_scaling")), "none"),
        "compile": "layers" if compiled_layers.compiled(model) else "off",
        "liger_modules": liger_kernels.modules_with(model),
        "micro_batch_size": _micro_batch_size(loader.batch_sampler),
        "num_workers": loader.num_workers,
        "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
    }
    if isinstance(trainer, CausalTrainer):
        state["output_head"] = "fused" if trainer.output_head.fused else "own"
    if frozen:
        state["frozen_dtype"] = _dtypes(frozen)
    if isinstance(trainer, DistillationTrainer):
        state |= state_of(trainer.teacher.model)
    if moments := moments_of(optimizer):
        state["moments_dtype"] = _dtypes(moments)
    if deepspeed:
        in_engine = _deepspeed(deepspeed, optimizer, trained)
        for key in ("micro_batch_size", "gradient_accumulation_steps"):
            if state[key] != in_engine[key]:
                in_engine[key] = f"{in_engine[key]} in DeepSpeed and {state[key]} in the trainer"
        return EngineState(**state | in_engine)
    state |= {
        "not_updated": not_updated(trained, updated_by(optimizer)),
        "max_grad_norm": trainer.args.max_grad_norm,
        "gradients": _spread(trained),
        "optimizer_state": _spread(updated_by(optimizer)),
        "master_dtype": _dtypes(updated_by(optimizer)),
        "autocast": _autocast(trainer.accelerator, model),
    }
    if isinstance(model, FSDPModule):
        accumulation = trainer.accelerator.gradient_state.plugin_kwargs
        state |= _fsdp(model) | {"sync_each_batch": accumulation.get("sync_each_batch", False)}
    return EngineState(**state)


def _micro_batch_size(sampler: Any) -> int:
    """Rows of a micro-batch, on average, of what accelerate divides among processes where there are several."""
    sampler = getattr(sampler, "batch_sampler", sampler)
    return sampler.micro_batch_size if isinstance(sampler, MicroBatches) else sampler.batch_size


def _engine(engine: Any, deepspeed: Any) -> str:
    if deepspeed:
        return "deepspeed"
    if isinstance(engine, FSDPModule):
        return "fsdp2"
    # Of one process it replicates nothing.
    return "ddp" if isinstance(engine, DistributedDataParallel) and torch.distributed.get_world_size() > 1 else "none"


def _deepspeed(engine: Any, optimizer: Any, trained: list[Any]) -> dict[str, Any]:
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    # Stage 3 lends its optimizer one group of masters at a time.
    masters = getattr(zero, "fp32_partitioned_groups_flat", None) or updated_by(optimizer)
    total = sum(_numel(parameter) for parameter in trained)
    whole = engine.dp_world_size == 1 or sum(master.numel() for master in masters) >= total
    offloaded = {
        "offload_optimizer": getattr(engine.zero_offload_optimizer(), "device", None),
        "offload_param": getattr(engine.zero_offload_param(), "device", None),
    }
    gradients = stage == 3 or getattr(zero, "partition_gradients", False)
    # Named differently by each of DeepSpeed's optimizers; their masters are these laid end to end.
    names = ("fp16_groups", "bit16_groups", "bf16_groups")
    groups = next(getattr(zero, name) for name in names if hasattr(zero, name))
    return {
        "not_updated": not_updated(trained, [parameter for group in groups for parameter in group]),
        "zero_stage": stage,
        "sharded_over": torch.distributed.get_world_size(zero.dp_process_group),
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "max_grad_norm": float(engine.gradient_clipping()),
        "gradients": "sharded" if gradients and engine.dp_world_size > 1 else "whole",
        # The size of what this process updates, with padding, not a setting.
        "optimizer_state": "whole" if whole else "sharded",
        "master_dtype": _dtypes(masters),
        "reduce_dtype": _name(engine.communication_data_type),
        "autocast": "none",
        **{key: getattr(device, "value", device) or "none" for key, device in offloaded.items()},
    }


def _fsdp(model: Any) -> dict[str, Any]:
    groups = [
        group for module in model.modules() if isinstance(module, FSDPModule) for group in _parameter_groups(module)
    ]
    outermost = _parameter_groups(model)
    policies = {_name(group.mp_policy.reduce_dtype) for group in groups if group.mp_policy.reduce_dtype}
    return {
        "compute_dtype": "+".join(sorted({_name(group.mp_policy.param_dtype) for group in groups})),
        "reduce_dtype": "+".join(sorted(policies)),
        "sharded_over": max(group.mesh_info.shard_mesh_size for group in groups),
        # Of all but the outermost unit, which FSDP itself keeps gathered from the first forward pass on.
        "reshard_after_forward": any(group._reshard_after_forward for group in groups if group not in outermost),
        "offload_param": "cpu" if any(isinstance(each.offload_policy, CPUOffloadPolicy) for each in groups) else "none",
        "fsdp_units": len(groups),
    }


def reshard(model: Any) -> None:
    """Returns FSDP's units to their shards after forward passes that no backward pass followed.

    FSDP keeps the outermost one gathered. Before torch 2.13 it also takes a unit to be within its forward pass until
    each of its modules was called; the fused output head never calls `lm_head`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._modules_to_run_forward.clear()
            for part in (state, *_parameter_groups(module)):
                part._training_state = TrainingState.IDLE
            module.reshard()


def _parameter_groups(module: Any) -> list[Any]:
    """What FSDP gathers together for a module; before torch 2.13 that was one group at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [group for group in [state._fsdp_param_group] if group]


def _numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def _spread(parameters: Iterable[Any]) -> str:
    """Whether this process holds all of these tensors, by what lies in its memory."""
    local = total = 0
    for parameter in parameters:
        total += _numel(parameter)
        if hasattr(parameter, "ds_tensor"):
            local += parameter.ds_tensor.ds_numel
        else:
            local += parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()
    return "sharded" if local < total else "whole"


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return "+".join(sorted({_name(tensor.dtype) for tensor in tensors}))


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _autocast(accelerator: Any, model: Any) -> str:
    """The type in which the model's forward pass runs, if accelerate has wrapped it."""
    names = {"bf16": "bfloat16", "fp16": "float16"}
    return names.get(accelerator.mixed_precision, "none") if hasattr(model, "_original_forward") else "none"


def _checkpointing(model: Any) -> str:
    """Who recomputes activations: the `model`'s own layers, the `engine`'s wrappers around them, `graphs` of compiled
    layers, several of these, or none."""
    recomputed_by = {"graphs"} if compiled_layers.recomputes_elementwise(model) else set()
    for module in model.modules():
        if isinstance(module, CheckpointWrapper):
            recomputed_by.add("engine")
        elif getattr(module, "gradient_checkpointing", False):
            recomputed_by.add("model")
    return "+".join(sorted(recomputed_by)) or "none"
