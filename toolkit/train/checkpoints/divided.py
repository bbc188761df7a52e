"""What training needs to know of layers that several processes divide (`models.parallel.tensor_parallel`), and how
what is divided of layers or experts is saved.

Each of them has the whole loss, and gradients of its own parts; they are averaged over the processes that have the same
parts. What is saved is whole, as one process would save it, so that any number of processes goes on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs

from toolkit.files import write_json
from toolkit.models.parallel.layer_sums import dividing, layer_group, replicas
from toolkit.models.parallel.parts import holds_parts, is_part, whole_of, whole_shape, whole_state
from toolkit.models.parallel.sharded_parts import ShardsReplicas, hand_out_parts, mesh_of_parts, sharding_parts
from toolkit.train.checkpoints.saved_state import PARTS


class OverReplicas(DistributedDataParallelKwargs):
    """Has DDP average over the processes that have the same parts, instead of over all."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "process_group": replicas()}


class ZeroGroups:
    """The `mpu` of `deepspeed.initialize`: ZeRO divides and averages over the processes that have the same parts (its
    data parallelism), and counts parts of all that divide layers, and what is whole once, in the norm of gradients."""

    def get_data_parallel_group(self) -> Any:
        return replicas()

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(replicas())

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(replicas())

    def get_model_parallel_group(self) -> Any:
        return layer_group()

    def get_model_parallel_world_size(self) -> int:
        return dividing()

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(layer_group())


class Divided:
    """Of a trainer, how what divided layers train is counted and saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if dividing() == 1:
            return
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if self.is_fsdp_enabled:  # type: ignore[attr-defined]
            accelerator._prepare_fsdp2 = _over_replicas(accelerator)
        elif self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            accelerator._prepare_deepspeed = _with_groups(accelerator._prepare_deepspeed)
        else:
            accelerator.ddp_handler = OverReplicas(**accelerator.ddp_handler.to_dict())

    @property
    def _writes_whole(self) -> bool:
        """Whether parts are put together before they are saved. What FSDP shards it saves in shards, or gathers; of
        ZeRO every process saves what it has."""
        return holds_parts() and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)  # type: ignore[attr-defined]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Theirs counts the trained tokens of all processes, also of those that read the same."""
        batches, count = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        return batches, count if count is None else count // dividing()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._writes_whole:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        first = self.args.should_save  # type: ignore[attr-defined]
        state = whole_parameters(self.model, first)  # type: ignore[attr-defined]
        if first:
            self._save(output_dir, state)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer  # type: ignore[attr-defined]
        if not self._writes_whole:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            if self.is_deepspeed_enabled and holds_parts() and self.args.should_save:  # type: ignore[attr-defined]
                write_json(Path(output_dir) / PARTS, divisions(self.model))  # type: ignore[attr-defined]
            return
        with answering(optimizer, whole_optimizer(optimizer, self.args.should_save)):  # type: ignore[attr-defined]
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def _over_replicas(accelerator: Any) -> Callable[..., Any]:
    """Accelerate's preparing of FSDP2, sharding over the processes that have the same parts. It would do so of what
    Transformers has divided alone; to all else of it processes are data-parallel as ever."""
    prepare, state = accelerator._prepare_fsdp2, accelerator.state
    # It warns of two steps where parameters are gathered, which is for a save.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    def over_replicas(*args: Any) -> Any:
        before = state.parallelism_config, state.device_mesh
        state.parallelism_config, state.device_mesh = ShardsReplicas(), mesh_of_parts(accelerator.device)
        try:
            with sharding_parts(mesh_of_parts(accelerator.device)):
                prepared = prepare(*args)
            for each in prepared:
                if isinstance(each, torch.nn.Module):
                    hand_out_parts(each)
            return prepared
        finally:
            state.parallelism_config, state.device_mesh = before

    return over_replicas


def _with_groups(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Accelerate's preparing of DeepSpeed, which tells it of groups only where sequences are DeepSpeed's to divide."""
    import deepspeed

    initialize = deepspeed.initialize

    def told(model: Any, config_params: dict[str, Any], **kwargs: Any) -> Any:
        for each in model.parameters():
            each.model_parallel = is_part(each)
        config = {**config_params, "train_batch_size": config_params["train_batch_size"] // dividing()}
        return initialize(model=model, config_params=config, mpu=ZeroGroups(), **kwargs)

    def prepared(*args: Any) -> Any:
        deepspeed.initialize = told
        try:
            return prepare(*args)
        finally:
            deepspeed.initialize = initialize

    return prepared


def divisions(model: Any) -> dict[str, dict[str, Any]]:
    """How each trained parameter is divided of which processes have parts, for `saved_state` to find it whole again:
    its whole shape, the dimension, and the widths of what lies side by side in it."""
    return {
        name: {"shape": [*whole_shape(each)], "dimension": each.divided.dimension, "blocks": [*each.divided.blocks]}
        for name, each in model.named_parameters()
        if each.requires_grad and is_part(each)
    }


def whole_parameters(model: Any, first: bool) -> dict[str, torch.Tensor]:
    """What is saved of a model with divided layers or experts: all of it, or its adapters. See `whole_state`."""
    adapter = hasattr(model, "peft_config")
    return whole_state(model, lambda parameter: parameter.requires_grad or not adapter, first)


def whole_optimizer(optimizer: Any, first: bool) -> dict[str, Any]:
    """An optimizer's state as one process would have it, in host memory of the first process; nothing on the others."""
    saved = optimizer.state_dict()
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        for kind, value in saved["state"].get(number, {}).items():
            whole = whole_of(parameter, value) if torch.is_tensor(value) else value
            if first:
                state.setdefault(number, {})[kind] = whole.cpu() if torch.is_tensor(whole) else whole
    return {**saved, "state": state} if first else {}


@contextmanager
def answering(optimizer: Any, state: dict[str, Any]) -> Iterator[None]:
    """Has an optimizer name this as its state."""
    optimizer.state_dict = lambda: state
    try:
        yield
    finally:
        del optimizer.state_dict
