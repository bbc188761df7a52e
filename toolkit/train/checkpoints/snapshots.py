"""Weights of a model in mid-training, kept beside the checkpoints: any engine writes them, and none is needed to read.

They are what `save.publish` would write at that moment, by the names that they have in memory: full weights in the type
the model computes in, adapters as their masters. Writing them changes nothing of the training.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, broadcast_object_list
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from toolkit.cache import share
from toolkit.distributed.engines import Dtypes
from toolkit.models.adapters import kept_in_fp32
from toolkit.models.parallel.parts import part_of, whole_shape
from toolkit.models.parallel.pipeline import chain
from toolkit.models.parallel.sharded_parts import LAYERS
from toolkit.seal import seal
from toolkit.train.checkpoints.save import gathered
from toolkit.train.checkpoints.storage import flush, flush_all


def take(trainer: Any, dtypes: Dtypes) -> dict[str, torch.Tensor]:
    """The weights of a model as they are published, by name, in host memory of the first process.

    Every process must call this; the others get nothing.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    adapter = hasattr(model, "peft_config")
    state = gathered(trainer, model, adapter)
    if not trainer.accelerator.is_main_process:
        return {}
    if state is None and adapter:
        state = {name: each for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    state = dict(model.state_dict() if state is None else state)
    export = getattr(torch, dtypes.export)
    kept = (lambda _: True) if adapter else kept_in_fp32(model, export)
    for name in () if adapter else getattr(model, "all_tied_weights_keys", None) or ():
        state.pop(name, None)
    # One by one: a second copy of the weights would not fit beside them on a device.
    return {
        name: each.detach().to("cpu", export if each.is_floating_point() and not kept(name) else each.dtype, copy=True)
        for name, each in state.items()
    }


def write(state: Mapping[str, torch.Tensor], folder: Path, values: Mapping[str, Any]) -> None:
    """Writes what `take` returned; the folder is there as a whole or, after a kill, as it was."""
    partial = folder.with_name(f"{folder.name}.partial")
    for each in (partial, folder):
        shutil.rmtree(each, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_torch_state_dict(dict(state), partial)
        seal(partial, values)
        flush_all(partial)
    except Exception:
        # Checkpoints need the room.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    share(partial)
    partial.rename(folder)
    flush(folder.parent)


def mean(folders: list[Path]) -> dict[str, torch.Tensor]:
    """The mean of the weights of each name, added in fp32, in the type that they have; whole numbers as in the last."""
    with contextlib.ExitStack() as stack:
        files = [_opened(each, stack) for each in folders]
        state = {}
        for name, file in files[-1].items():
            newest = file.get_tensor(name)
            if newest.is_floating_point() and len(files) > 1:
                total = torch.zeros_like(newest, dtype=torch.float32)
                for each in files:
                    total += each[name].get_tensor(name)
                newest = (total / len(files)).to(newest.dtype)
            state[name] = newest
    return state


def _opened(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name to the file that holds the tensor."""
    files = [stack.enter_context(safe_open(file, framework="pt")) for file in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def put(trainer: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Has the model compute with these weights, however the engine holds it; training cannot go on from there, because
    the masters that some engines keep beside the weights stay as they are.

    Every process must call this; only the first one's `state` is read.
    """
    model, accelerator = trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.accelerator
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # After an evaluation the outermost one holds its parameters whole.
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    names = [sorted(state)]
    broadcast_object_list(names)
    if own := chain():
        _put_in_stages({own.name(name): each for name, each in held.items()}, state, names[0], accelerator)
        return
    zero3 = trainer.model_wrapped.optimizer if any(hasattr(each, "ds_shape") for each in model.parameters()) else None
    if zero3:
        zero3.checkpoint_event_prologue()  # Evaluations leave parameters that other modules read as if in use.
    for name in names[0]:
        place = held[name].detach()
        whole = getattr(held[name], "ds_shape", whole_shape(held[name]))
        value = torch.empty(whole, dtype=place.dtype, device=accelerator.device)
        if accelerator.is_main_process:
            value.copy_(state[name])
        if isinstance(place, DTensor) and LAYERS in (place.device_mesh.mesh_dim_names or ()):
            place.to_local().copy_(_own(broadcast(value), place))
            continue
        if isinstance(place, DTensor):
            # Sends each process its part.
            place.to_local().copy_(distribute_tensor(value, place.device_mesh, place.placements).to_local())
            continue
        with _gathered(held[name]):
            held[name].data.copy_(part_of(held[name], broadcast(value)))
    if zero3:
        zero3.checkpoint_event_epilogue()


@torch.no_grad()
def _put_in_stages(
    held: Mapping[str, Any], state: Mapping[str, torch.Tensor], names: list[str], accelerator: Any
) -> None:
    """Of a pipeline, each process takes what is in its own stages."""
    about = [[(state[name].shape, state[name].dtype) for name in names] if accelerator.is_main_process else None]
    broadcast_object_list(about)
    for name, (shape, dtype) in zip(names, about[0] or (), strict=True):
        first = accelerator.is_main_process
        value = (
            state[name].to(accelerator.device) if first else torch.empty(shape, dtype=dtype, device=accelerator.device)
        )
        whole = broadcast(value)
        if name in held:
            held[name].data.copy_(whole)


def _own(whole: torch.Tensor, place: DTensor) -> torch.Tensor:
    """What this process has of a parameter that is divided with its layer and sharded."""
    shape, offsets = compute_local_shape_and_global_offset(place.shape, place.device_mesh, place.placements)
    return whole[tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))]


def _gathered(parameter: Any) -> Any:
    """Around a change of all of a parameter: ZeRO-3 divides it anew when that is done."""
    if not hasattr(parameter, "ds_shape"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
