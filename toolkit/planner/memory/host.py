"""Memory of the host, per node, and bytes on its drives: the only formulas of how large a checkpoint is.

A run asks here whether its disk and its NVMe drive will do, so that it is refused by the figures that its plan shows.
Sizes follow from the states of all ranks together in the dtypes that engines save; they were within 3% of real
checkpoints, with FSDP's headers of a kilobyte per tensor within 8%.
"""

from __future__ import annotations

import dataclasses

from toolkit.distributed.engines import loads_on_device, loads_on_first_process, reads_gguf
from toolkit.planner.memory.device import each_process, memory
from toolkit.planner.memory.offload import offloaded, offloaded_activations
from toolkit.planner.memory.states import states, weights, whole_model
from toolkit.planner.memory.teacher import streamed
from toolkit.planner.plan import Disk, Host
from toolkit.planner.workload import WIDTH, Division, Workload
from toolkit.recipe import Recipe

_PROCESS, _COLLECTIVES = 1_200 * 2**20, 1_200 * 2**20
"""Resident memory of a process on a GPU beside what is listed: Python, torch, the host's side of CUDA, Transformers,
TRL, the tokenizer, pages of the data (1.0 to 1.4 GiB on an H100); and of NCCL (1.1 to 1.2 GiB)."""
CPU_PROCESS = 600 * 2**20
"""Resident memory of a process without CUDA; 0.55 GiB were measured."""
_KERNELS = 100 * 2**20
"""Those that oneDNN compiles for rows of some lengths; 0.1 to 0.3 GiB were measured of many lengths."""
_WORKER = 50 * 2**20
"""What a process that makes batches holds beside what it shares with the process that it was forked from: 14 MiB were
measured with prepared rows, 41 MiB with a stream."""
_SMALL_FILES = 2**25
"""Bytes of a checkpoint's tokenizer, random states and logs: seen up to 20 MB."""


def host(workload: Workload) -> Host:
    """RAM of one node. On a CPU the tensors of all its processes are host memory too."""
    recipe, local, on_cpu = workload.recipe, workload.processes_per_node, workload.on_cpu
    grouped = workload.layout.world_size > 1 or recipe.strategy.zero_stage or recipe.strategy.name == "fsdp"
    process = CPU_PROCESS + _KERNELS if on_cpu else _PROCESS + _COLLECTIVES * bool(grouped)
    parts = {"processes": float(local * (process + recipe.data.decided_workers * _WORKER))}
    if on_cpu:
        if workload.stages:
            each = each_process(workload)
            every = [each[rank * workload.layout.pipeline // local] for rank in range(local)]
        else:
            ranks = memory(workload)
            every = [ranks[0], *[ranks[-1]] * (local - 1)]
        parts["tensors"] = float(sum(each.allocated for each in every))
        parts["fragmentation"] = sum(each.reserved.value - each.allocated for each in every)
    else:
        parts |= {name: local * value for name, value in offloaded(workload, states(workload)).items()}
        if recipe.activation_checkpointing.mode == "offload":
            parts["activations"] = local * offloaded_activations(workload)
        parts["teacher"] = local * streamed(workload)
    training, loading, saving = sum(parts.values()), 0.0, 0.0
    if not on_cpu:
        # One after the other.
        loading = max(_loading(each) for each in (workload, workload.teacher) if each)
        saving = _saving(dataclasses.replace(workload, trace=workload.trace.whole()))
    drives = disk(workload)
    if drives.snapshots:
        # Of one that is being written.
        saving = max(saving, drives.model)
    if recipe.checkpoint.in_memory:
        parts["staging"] = float(drives.part)
        training += drives.part
    # Loading comes before training and saving beside it; both at once they never are.
    peak = max(parts["processes"] + loading, training + saving)
    parts |= {"loading": loading, "saving": saving}
    return Host(parts={name: int(value) for name, value in parts.items() if value >= 1}, peak=int(peak))


def disk(workload: Workload) -> Disk:
    """Bytes on drives.

    A checkpoint of mixed precision holds 14 bytes per parameter: the weight, the fp32 master and two moments.
    """
    workload = dataclasses.replace(workload, trace=workload.trace.whole())
    recipe, types, strategy, trace = workload.recipe, workload.types, workload.strategy, workload.trace
    whole = states(workload, Division())
    trained_only = recipe.method.name == "lora"
    written = whole_model(workload)
    if strategy.zero_stage == 3:
        # Its weights are the masters; beside them lie only those that are not trained.
        written = weights(workload, (each for each in trace.tensors if not each.trained and not trained_only))
    if strategy.name == "fsdp" and not trained_only:
        written += _tied(workload)  # It writes a weight with two names twice.
    divided = whole.masters + whole.optimizer
    checkpoint = written + divided
    shards = strategy.zero_stage or (strategy.name == "fsdp" and strategy.state_dict_type == "sharded")
    # What every process has whole, or gets gathered, the first one writes.
    first = checkpoint if not shards else written if strategy.zero_stage in (1, 2) else 0.0
    # Under ZeRO every process that divides layers writes its own.
    writers = workload.layout.tensor if strategy.zero_stage else 1
    nodes, processes = workload.hardware.nodes, workload.layout.world_size
    model = trace.elements(trained=trained_only or None) * WIDTH[types.master if trained_only else types.export]
    return Disk(
        checkpoint=int(checkpoint),
        part=int(first + (checkpoint - first) / nodes),
        writer=int(first / writers + (checkpoint - first) / processes),
        kept=int(checkpoint * _checkpoints(recipe)),
        model=model,
        nvme=int(_nvme(workload)),
        snapshots=model * _snapshots(recipe),
    )


def run_folder_bytes(recipe: Recipe, drives: Disk) -> int:
    """What a run needs for its checkpoints, the models that it chooses from and its final one."""
    # An interrupted run saves one in any case.
    return drives.model + drives.snapshots + max(1, _checkpoints(recipe)) * (drives.checkpoint + _SMALL_FILES)


def _checkpoints(recipe: Recipe) -> int:
    """How many there are at once: while rotating one more than the limit."""
    settings = recipe.checkpoint
    return settings.save_total_limit + 1 if settings.saves else 0


def _snapshots(recipe: Recipe) -> int:
    """How many models there are at once, at most: those that would be published if training ended now or at one of the
    checkpoints, and the one being written."""
    settings = recipe.checkpoint
    chosen = settings.average_last or (2 if settings.keep_best else 0)
    return chosen + _checkpoints(recipe) if chosen else 0


def _tied(workload: Workload) -> float:
    """Bytes of embeddings that the output head shares: the head has no matrix of its own."""
    matrices = [each for each in workload.trace.tensors if len(each.shape) > 1]
    if any(each.place == "head" for each in matrices):
        return 0.0
    vocabulary = max((each.numel for each in matrices if each.place == "embeddings"), default=0)
    return float(vocabulary * WIDTH[workload.types.local])


def _nvme(workload: Workload) -> float:
    """Per node: masters, moments and, while they wait, gradients (Rajbhandari et al. 2021); and weights."""
    strategy, held = workload.strategy, states(workload)
    need = 0.0
    if strategy.offload_optimizer == "nvme":
        need += held.masters + held.optimizer + held.gradients
    if strategy.offload_param == "nvme":
        need += held.parameters + held.adapters
    return need * workload.processes_per_node


def _saving(workload: Workload) -> float:
    """The model on its way from the devices to a file, on the host of the first process, and what a checkpoint that is
    not written in shards gathers there."""
    recipe, types, full = workload.recipe, workload.types, workload.recipe.method.name == "full"
    if not (recipe.strategy.shards_parameters or recipe.parallel.divides):
        return float(workload.trace.elements() * WIDTH[types.export] * full)
    # All of it in the dtype of training, and as it is published beside that.
    casts = full and types.export != types.local
    model = whole_model(workload) * (1 + casts * WIDTH[types.export] / WIDTH[types.local])
    gathers = recipe.checkpoint.saves and recipe.strategy.name == "fsdp" and recipe.strategy.state_dict_type == "full"
    # Weights and moments one after the other (accelerate's `save_fsdp_model` and `save_fsdp_optimizer`).
    return max(model, states(workload, Division()).optimizer if gathers else 0.0)


def _loading(workload: Workload) -> float:
    """Weights on their way to the devices of one node.

    They lie in 16 bits in files that are mapped into memory, once for all processes. GPUs convert to 32 bits what they
    read themselves; under ZeRO-3 and FSDP the first process does it on the host, or every one of them, and processes
    that divide layers do with their parts. Every process takes a GGUF file apart in 16 bits before it is quantized.
    """
    recipe = workload.recipe
    alone = loads_on_first_process(recipe) or recipe.strategy.zero_stage == 3
    converts = WIDTH[workload.types.load] > 2 and not loads_on_device(recipe)
    readers = (1 if alone else workload.processes_per_node / workload.layout.tensor) if converts else 0
    apart = workload.processes_per_node if reads_gguf(recipe) and recipe.method.quantization != "none" else 0
    return workload.trace.whole().elements() * (2.0 + 4.0 * readers + 2.0 * apart)
