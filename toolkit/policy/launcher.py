"""The environment: what a launcher left in it is compared with the recipe, and what libraries read there is set."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from toolkit.errors import UserError
from toolkit.policy.engines import fsdp_config
from toolkit.policy.layout import World
from toolkit.recipe import Recipe

_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


def check_launch(recipe: Recipe, world: World, environment: Mapping[str, str] = os.environ) -> None:
    """Compares what the launcher put into the environment with the recipe. The recipe owns the strategy.

    Raises:
        UserError: If they differ; names both sides.
    """
    name = recipe.strategy.name
    if name == "single" and world.world_size > 1:
        raise UserError(
            f"the recipe says strategy.name=single, the launcher started {world.world_size} processes",
            "set strategy.name=ddp, or launch one process",
        )
    for variable, engine in _ENGINES.items():
        if environment.get(variable, "false").lower() in ("true", "1"):
            raise UserError(
                f"the recipe says strategy.name={name}, the launcher says {engine} ({variable} is set)",
                "launch without an engine in `accelerate launch` or its default config; the recipe selects it",
            )
    compiler = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if compiler.lower() != "no":
        raise UserError(
            f"the recipe does not compile the model, the launcher says --dynamo_backend {compiler.lower()}",
            "launch with --dynamo_backend no, or remove it from accelerate's default config",
        )
    launched = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    wanted = {"fp32": "no", "pure_bf16": "no"}.get(recipe.precision, recipe.precision)
    # A bare `accelerate launch` says "no" for want of anything else.
    if launched not in ("no", wanted):
        same = f"set precision={launched}, or " if launched in ("bf16", "fp16") else ""
        raise UserError(
            f"the recipe says precision={recipe.precision}, the launcher says --mixed_precision {launched}",
            f"{same}launch without --mixed_precision",
        )


def environment(recipe: Recipe, world: World) -> dict[str, str]:
    """Variables that libraries read at import; the runner sets those that the user has not set."""
    values = {
        # The tokenizer's own threads fight with the processes that tokenise and with data loader workers.
        "TOKENIZERS_PARALLELISM": "false",
        # Grows segments in place: less fragmentation where sequence lengths vary.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # On a CPU every new sequence length adds compiled kernels for every layer; oneDNN's default of 1,024 let the
        # demo grow by a GiB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
    if recipe.strategy.name == "fsdp":
        # Accelerate and Transformers look here before any arguments exist: for the process group's backends (offloading
        # clips gradients on the host), and for whether only one process reads the weights.
        config = fsdp_config(recipe)
        values |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_OFFLOAD_PARAMS": str(config["cpu_offload"]).lower(),
            "FSDP_STATE_DICT_TYPE": config["state_dict_type"],
            "FSDP_CPU_RAM_EFFICIENT_LOADING": str(config["cpu_ram_efficient_loading"]).lower(),
        }
    if recipe.strategy.name not in ("single", "ddp") and world.world_size == 1:
        # An engine needs a process group even for one process; without RANK DeepSpeed looks for MPI.
        values |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return values


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
