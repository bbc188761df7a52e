"""Environment variables that libraries read on import, set to what the recipe says.

Engines fill settings that are left open from it, and some read it at import only: so it is set first, before anything
imports torch. A user's own values stay, except those of the engines, which `check_launch` has compared with the recipe.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from toolkit.cache import cache_dir, own_folder
from toolkit.common import usable_cores
from toolkit.distributed.engines import fsdp_config
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe

# Accelerate's plugins fill every field that is left open from these.
_ENGINE = (
    "ACCELERATE_CONFIG_DS_FIELDS",
    "ACCELERATE_DEEPSPEED_",
    "ACCELERATE_GRADIENT_",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "FSDP_",
    "MEGATRON_LM_",
    "PARALLELISM_CONFIG_",
)


_GROWING = "expandable_segments:True"
"""Grows segments in place: less fragmentation where sequence lengths vary."""


def segments_grow(current: Mapping[str, str]) -> bool:
    """Whether a run with these variables lets CUDA's allocator grow its segments: a user's own setting stays."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    stated = next((current[name] for name in names if name in current), _GROWING)
    return _GROWING.lower() in stated.lower()


def environment(recipe: Recipe, world: World, current: Mapping[str, str]) -> dict[str, str | None]:
    """What is to change in the environment before any library is imported; None removes a variable."""
    wanted = {
        # The tokenizer's own threads fight with the processes that tokenise and with data loader workers.
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": _GROWING,
        # The numbers of nvidia-smi and of plans. CUDA's own begin with the fastest card, so that of unlike ones
        # CUDA_VISIBLE_DEVICES would mean another.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Of a repository without safetensors, Transformers would take what a bot has made of its pickles.
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        # A peer that ends is reported by us; torch's C++ side adds pages of its own stack.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # On a CPU every new sequence length adds compiled kernels; oneDNN's default of 1,024 let the demo grow by a
        # GiB. Those of one pass have to fit, three for each document and some for the layer: with 64, passes over 16
        # documents compiled all of them again in every layer, and took 1.4 times as long.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        # By content, so that the next run of the same layers starts warm; torch's own place is cleared at every boot.
        "TORCHINDUCTOR_CACHE_DIR": str(own_folder(cache_dir() / "compiled")),
        **_network(world, current),
    }
    changes: dict[str, str | None] = {key: None for key in current if key.startswith(_ENGINE)}
    changes |= {key: current.get(key, value) for key, value in wanted.items()}
    changes |= _engine(recipe) | _process_group(recipe, world, current)
    return changes | _devices(current) | _threads(recipe, world, current)


def _engine(recipe: Recipe) -> dict[str, str]:
    """What Accelerate and Transformers look for before any arguments exist.

    That is the process group's backends (offloading clips gradients on the host), and whether one process alone reads
    the weights.
    """
    if recipe.strategy.name != "fsdp":
        return {}
    config = fsdp_config(recipe)
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_OFFLOAD_PARAMS": str(config["cpu_offload"]).lower(),
        "FSDP_STATE_DICT_TYPE": config["state_dict_type"],
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(config["cpu_ram_efficient_loading"]).lower(),
    }


def _process_group(recipe: Recipe, world: World, current: Mapping[str, str]) -> dict[str, str]:
    """Ranks and the rendezvous address of the process group, where no launcher has written them down."""
    ranks = {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
    }
    if world.world_size > 1:
        point = {"MASTER_ADDR": world.master_addr or "127.0.0.1", "MASTER_PORT": str(world.master_port or 29500)}
        return {key: current.get(key, value) for key, value in (ranks | point).items()}
    if recipe.strategy.name in ("single", "ddp") or "LOCAL_RANK" in current:
        return {}
    # An engine needs a process group even for one process; without RANK DeepSpeed looks for MPI. An address left
    # over from elsewhere would be waited for in vain. Port 0 is any that is free.
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _network(world: World, current: Mapping[str, str]) -> dict[str, str]:
    """The network interface that leads to the first node, for a run on several.

    Gloo listens on the address of the machine's own name, which many distributions set to 127.0.1.1; NCCL takes the
    first interface it finds, be it a virtual bridge that leads nowhere. InfiniBand is not touched by this.
    """
    head = current.get("MASTER_ADDR", world.master_addr)
    if world.num_nodes < 2 or head is None:
        return {}
    own = _own_address(head)
    # Link-local addresses name their interface behind a %.
    cards = psutil.net_if_addrs().items()
    interfaces = [name for name, every in cards if own in (entry.address.partition("%")[0] for entry in every)]
    if not interfaces or own == "::1" or own.startswith("127."):
        return {}
    # NCCL takes a name for the beginning of names, unless told that it is whole.
    return {"GLOO_SOCKET_IFNAME": interfaces[0], "NCCL_SOCKET_IFNAME": f"={interfaces[0]}"}


def _own_address(head: str) -> str:
    """This node's address on the way to another one; empty if no way is known."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only asks for the route.
            probe.connect((head, 9))
            return str(probe.getsockname()[0].partition("%")[0])
    return ""


def _devices(current: Mapping[str, str]) -> dict[str, str]:
    """`accelerate launch --cpu` means the CPU, also where there are GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ""} if current.get("ACCELERATE_USE_CPU", "").lower() == "true" else {}


def _threads(recipe: Recipe, world: World, current: Mapping[str, str]) -> dict[str, str]:
    """Cores for processes that compute on the host: without a GPU, or where the optimizer is updated there.

    Launchers set OMP_NUM_THREADS=1 where the user says nothing, whatever the machine has, which starves them; without a
    launcher's or a user's value every process would take all cores.
    """
    given = current.get("OMP_NUM_THREADS")
    # Of torchrun, which leads several processes under accelerate too, and of accelerate's launcher for a single one.
    launched = "TORCHELASTIC_RUN_ID" in current or "ACCELERATE_USE_CPU" in current
    unsaid = given is None and world.local_world_size > 1
    if not (unsaid or (given == "1" and launched and _computes_on_host(recipe, current))):
        return {}
    cores = usable_cores()
    # Slurm has bound each task to cores of its own already.
    share = int(current.get("SLURM_CPUS_PER_TASK", "0")) if world.master_addr else 0
    return {"OMP_NUM_THREADS": str(share or max(1, cores // world.local_world_size))}


def _computes_on_host(recipe: Recipe, current: Mapping[str, str]) -> bool:
    if recipe.strategy.steps_on_host:
        return True
    hidden = current.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or _devices(current)
    # The device files of NVIDIA's driver (one per GPU), of WSL's and of AMD's.
    present = any(Path("/dev").glob("nvidia[0-9]*")) or any(Path(f"/dev/{name}").exists() for name in ("dxg", "kfd"))
    return bool(hidden) or not present
