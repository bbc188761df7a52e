"""Parts of layers (`tensor_parallel`) that FSDP2 shards over the processes that have the same ones.

FSDP2 takes a parameter that is a DTensor over one dimension of a device mesh, and shards it over another: what is
saved, gathered and read back then is whole, whoever did. The layers compute with plain parts, as without it: a module
hands out its own part of what FSDP2 has gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from toolkit.common import UserError
from toolkit.models.parallel.layer_sums import dividing
from toolkit.models.parallel.tensor_parallel import is_part, is_partial

REPLICAS, LAYERS = "replicas", "layers"
"""Dimensions of the mesh: processes that have the same parts, and those that divide layers."""


@functools.cache
def mesh_of_parts(device: torch.device) -> DeviceMesh:
    """All processes by what they have; one mesh, however often it is asked for. All processes call this."""
    size = dividing()
    return init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=(REPLICAS, LAYERS))


@contextmanager
def sharding_parts(mesh: DeviceMesh) -> Iterator[None]:
    """Has FSDP2 find DTensors over the processes that divide layers in each unit that it is about to shard.

    A DTensor lies on the mesh's device. Made for a unit at a time, no more than that is there whole.
    """
    shard = torch.distributed.fsdp.fully_shard
    made: dict[int, torch.nn.Parameter] = {}

    def shard_parts(unit: Any, **settings: Any) -> Any:
        for module in unit if isinstance(unit, list) else [unit]:
            as_parts_of_mesh(module, mesh, made)
        return shard(unit, **settings)

    torch.distributed.fsdp.fully_shard = shard_parts  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.distributed.fsdp.fully_shard = shard


def as_parts_of_mesh(model: Any, mesh: DeviceMesh, made: dict[int, torch.nn.Parameter]) -> None:
    """Makes the parameters of a module, whose layers have been divided, DTensors over the processes that divide them.

    `hand_out_parts` must follow before the model computes.

    Args:
        made: What has become of other parameters, by `id`; that of tied ones is the same.
    """
    for module in list(model.modules()):
        partial = set()
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue  # It is one already, or is sharded.
            if id(parameter) not in made:
                placement = _placement(parameter)
                whole = DTensor.from_local(parameter.data, mesh[LAYERS], [placement], run_check=False)
                made[id(parameter)] = torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)
            if is_partial(parameter):
                partial.add(name)
            module._parameters[name] = made[id(parameter)]
        module.__dict__.setdefault("_partial_gradients", frozenset(partial))


def _placement(parameter: Any) -> Shard | Replicate:
    if not is_part(parameter):
        return Replicate()
    if len(parameter.divided.blocks) > 1:
        raise UserError(
            "strategy.name=fsdp does not shard parts of projections that are several in one, as this model's are",
            "set strategy.name=ddp, or remove parallel.tensor",
        )
    return Shard(parameter.divided.dimension)


def hand_out_parts(model: Any) -> None:
    """Has modules compute with the parts of this process; FSDP must have seen before which parameters are tied."""
    for module in list(model.modules()):
        if module._parameters:
            kind = type(module)
            module.__class__ = type(kind.__name__, (_HandsOutParts, kind), {})


class _HandsOutParts:
    """A module whose parameters are this process's parts, where they are whole but for that."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        if not isinstance(value, DTensor) or value.device_mesh.mesh_dim_names != (LAYERS,):
            return value
        partial = name in self.__dict__["_partial_gradients"]
        return value.to_local(grad_placements=[Partial()] if partial else None)


class ShardsReplicas:
    """Stands for accelerate's `ParallelismConfig` while it prepares FSDP2: what to shard over."""

    fsdp_dim_names = (REPLICAS,)


def divides(model: Any) -> int:
    """Over how many processes the layers of a model really are divided, by what lies in its parameters; 0 where they
    differ."""
    sizes = {size for parameter in model.parameters() if (size := _divided_over(parameter)) > 1}
    return max(sizes, default=1) if len(sizes) < 2 else 0


def _divided_over(parameter: Any) -> int:
    if is_part(parameter):
        return int(parameter.divided.size)
    names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    if LAYERS not in names or parameter.placements[names.index(LAYERS)].is_replicate():
        return 1
    return int(parameter.device_mesh.size(names.index(LAYERS)))
