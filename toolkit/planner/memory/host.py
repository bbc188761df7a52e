"""Memory of the host, per node, and bytes on its drives: the only formulas of how large a checkpoint is.

A run asks here whether its disk and its NVMe drive will do, so that it is refused by the figures that its plan shows.
Sizes follow from the states of all ranks together in the dtypes that engines save; they were within 3% of real
checkpoints, with FSDP's headers of a kilobyte per tensor within 8%.
"""

from __future__ import annotations

from toolkit.distributed import BatchLayout, Dtypes, dtypes
from toolkit.distributed.engines import loads_on_first_process
from toolkit.planner.hardware import Hardware
from toolkit.planner.memory.device import memory
from toolkit.planner.memory.offload import offloaded, offloaded_activations
from toolkit.planner.memory.states import WIDTH, Division, division, parameter_width, states, stored_bytes, whole_model
from toolkit.planner.plan import Disk, Host
from toolkit.planner.trace.types import Trace
from toolkit.recipe import Recipe

_PROCESS = 2_500 * 2**20
"""Resident memory of a process on a GPU beside what is listed: Python, torch, the host's side of CUDA and NCCL,
Transformers, TRL, the tokenizer, pages of the data."""
_CPU_PROCESS = 600 * 2**20
"""The same where there is no CUDA; 0.55 GiB were measured."""
_SMALL_FILES = 2**25
"""Bytes of a checkpoint's tokenizer, random states and logs: seen up to 20 MB."""


def host(recipe: Recipe, layout: BatchLayout, hardware: Hardware, trace: Trace) -> Host:
    """RAM of one node.

    On a CPU the tensors of all its processes are host memory too.
    """
    types = dtypes(recipe)
    over = division(recipe, layout.world_size, hardware.devices_per_node)
    local = min(hardware.devices_per_node, layout.world_size)
    on_cpu = hardware.device.kind == "cpu"
    held = states(recipe, types, trace, over)
    parts = {"processes": float(local * (_CPU_PROCESS if on_cpu else _PROCESS))}
    if on_cpu:
        ranks = memory(recipe, layout, hardware, trace)
        every = (ranks[0], *[ranks[-1]] * (local - 1))
        parts["tensors"] = float(sum(each.allocated for each in every))
        parts["fragmentation"] = sum(each.reserved.value - each.allocated for each in every)
    else:
        away = offloaded(recipe, types, trace, over, held, layout.gradient_accumulation_steps > 1)
        parts |= {name: local * value for name, value in away.items()}
        if recipe.activation_checkpointing.mode == "offload":
            parts["activations"] = local * offloaded_activations(recipe, layout, trace)
    # Loading comes before training and saving beside it; both at once they never are.
    parts["loading"], parts["saving"] = 0.0, 0.0
    if not on_cpu:
        parts["loading"] = _loading(recipe, types, trace, local)
        if recipe.strategy.shards_parameters:
            parts["saving"] = whole_model(recipe, types, trace)
        elif recipe.method.name == "full":
            parts["saving"] = trace.elements() * WIDTH[types.export] * 1.0
    training = sum(value for name, value in parts.items() if name not in ("loading", "saving"))
    peak = max(parts["processes"] + parts["loading"], training + parts["saving"])
    return Host(parts={name: int(value) for name, value in parts.items() if value >= 1}, peak=int(peak))


def disk(recipe: Recipe, layout: BatchLayout, hardware: Hardware, trace: Trace) -> Disk:
    """Bytes on drives.

    A checkpoint of mixed precision holds 14 bytes per parameter: the weight, the fp32 master and two moments.
    """
    types = dtypes(recipe)
    strategy = recipe.strategy
    whole = states(recipe, types, trace, Division())
    trained_only = recipe.method.name == "lora"
    weights = whole_model(recipe, types, trace)
    if strategy.zero_stage == 3:
        # Its weights are the masters; beside them lie only those that are not trained.
        weights = sum(
            each.count * stored_bytes(each, parameter_width(each, types), recipe.method.double_quantization)
            for each in trace.tensors
            if not each.trained and not trained_only
        )
    if strategy.name == "fsdp" and not trained_only:
        weights += _tied(types, trace)  # It writes a weight with two names twice.
    checkpoint = weights + whole.masters + whole.optimizer
    published = sum(
        each.numel * each.count * WIDTH[types.master if trained_only else types.export]
        for each in trace.tensors
        if each.trained or not trained_only
    )
    kept = recipe.checkpoint.save_total_limit + 1
    saves = recipe.checkpoint.save_steps or recipe.checkpoint.save_epochs
    return Disk(
        checkpoint=int(checkpoint),
        kept=int(checkpoint * kept) if saves else 0,
        model=int(published),
        nvme=int(_nvme(recipe, types, layout, hardware, trace)),
    )


def run_folder_bytes(recipe: Recipe, drives: Disk) -> int:
    """What a run needs for its checkpoints and its final model."""
    saves = recipe.checkpoint.save_steps or recipe.checkpoint.save_epochs
    # While rotating there is one more than the limit; an interrupted run saves one in any case.
    checkpoints = recipe.checkpoint.save_total_limit + 1 if saves else 1
    return drives.model + checkpoints * (drives.checkpoint + _SMALL_FILES)


def _tied(types: Dtypes, trace: Trace) -> float:
    """Bytes of embeddings that the output head shares: the head has no matrix of its own."""
    matrices = [each for each in trace.tensors if len(each.shape) > 1]
    if any(each.place == "head" for each in matrices):
        return 0.0
    vocabulary = max((each.numel for each in matrices if each.place == "embeddings"), default=0)
    return float(vocabulary * WIDTH[types.local])


def _nvme(recipe: Recipe, types: Dtypes, layout: BatchLayout, hardware: Hardware, trace: Trace) -> float:
    """Per node: masters, moments and, while they wait, gradients (Rajbhandari et al. 2021); and weights."""
    strategy = recipe.strategy
    held = states(recipe, types, trace, division(recipe, layout.world_size, hardware.devices_per_node))
    local = min(hardware.devices_per_node, layout.world_size)
    need = 0.0
    if strategy.offload_optimizer == "nvme":
        need += held.masters + held.optimizer + held.gradients
    if strategy.offload_param == "nvme":
        need += held.parameters + held.adapters
    return need * local


def _loading(recipe: Recipe, types: Dtypes, trace: Trace, processes: int) -> float:
    """Weights on their way to the devices of one node.

    They lie in 16 bits in files that are mapped into memory, once for all processes. Those that are held in 32 bits are
    converted there by each process; under ZeRO-3 and FSDP only the first one reads them.
    """
    alone = loads_on_first_process(recipe) or recipe.strategy.zero_stage == 3
    converts = WIDTH[types.load] > 2 and recipe.method.quantization == "none"
    readers = (1 if alone else processes) if converts else 0
    return trace.elements() * (2.0 + 4.0 * readers)
