"""Starts a recipe on one machine or many: the `accelerate launch` line of each node, or an sbatch file for Slurm.

The launcher only starts processes: the line names neither engine nor precision, which the recipe decides. Under Slurm
one such launcher runs per node, and the job queues itself again until the run is finished.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import StrictUndefined, Template

from toolkit.cli.option_types import TO_SAVE
from toolkit.common import UserError
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import World
from toolkit.distributed.placement import placement
from toolkit.files import write_named
from toolkit.planner.hardware import visible_gpus
from toolkit.recipe import Loaded, Recipe

_CONFIG = Path(__file__).with_name("launch.yaml")
_PORT = 29500
_CORES_PER_GPU = 8

_log = logging.getLogger("toolkit.cli")


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    Args:
        gpus: GPUs on each, with a process each; 0 for one process without a GPU.
        nodes: How many.
        head: Name or address of the first, which holds the rendezvous; None for a single machine.
        port: The rendezvous' port there.
        elsewhere: Whether they are other machines than this one, of which nothing is known here.
    """

    gpus: int
    nodes: int = 1
    head: str | None = None
    port: int | None = None
    elsewhere: bool = False

    @property
    def world(self) -> World:
        """Its processes, as the first of them sees them."""
        per_node = max(1, self.gpus)
        return World(0, 0, self.nodes * per_node, per_node)


def cluster(
    recipe: Recipe, gpus: int | None, nodes: int, head: str | None, port: int | None, rank: int | None, slurm: bool
) -> Cluster:
    """The machines as the command line describes them.

    Raises:
        UserError: If something is missing that cannot be known here, or is said that would be ignored.
    """
    if slurm and gpus is None:
        raise UserError("the GPUs of Slurm's nodes are not known here", "say how many each has with --gpus")
    if slurm and (head, rank) != (None, None):
        raise UserError("Slurm numbers the machines and names the head itself", "leave out --head and --rank")
    if not slurm and nodes > 1 and head is None:
        raise UserError(f"--nodes {nodes}: the machines must know where to meet", "name the first with --head HOST")
    if nodes == 1 and (head or rank):
        # Without this every machine would train a run of its own.
        raise UserError("--head and --rank are for several machines", "say how many there are with --nodes")
    if rank is not None and rank >= nodes:
        raise UserError(f"--rank {rank} is not one of {nodes} machines", _ranks(nodes))
    if gpus is None:
        gpus = 1 if recipe.strategy.name == "single" and gpu_names() else len(gpu_names())
    # Without --print this machine is one of them; what is printed may be meant for others.
    unlike = 0 < gpus > len(gpu_names())
    return Cluster(gpus, nodes, head, port, elsewhere=slurm or unlike)


def check(recipe: Recipe, cluster: Cluster, folder: str | Path | None = None) -> None:
    """Refuses what cannot work before anything is started, and says which processes will divide what.

    Args:
        folder: The user's recipes folder.

    Raises:
        UserError: If the recipe's strategy or batch does not fit the machines; or if nothing would that the recipe
            leaves to the plan.
    """
    # Processes are started alike for every precision and micro-batch.
    if set(recipe.undecided) - {"precision", "batch.micro_batch_size"} and not cluster.elsewhere:
        from toolkit.planner.launch import decide_engine, launched_on

        environment = os.environ if cluster.gpus else {"ACCELERATE_USE_CPU": "true"}
        recipe, _ = decide_engine(recipe, launched_on(cluster.world, folder, environment))
    # Of other machines it is only certain how the batch divides over them.
    plainest = {"precision": "bf16", "strategy.name": "ddp", "activation_checkpointing.mode": "none"}
    values = {key: value for key, value in plainest.items() if key in recipe.undecided}
    check_launch(recipe.with_values(values), cluster.world, {})
    for text, crosses in placement(recipe, cluster.world):
        _log.log(logging.WARNING if crosses else logging.INFO, text)


def gpu_names() -> list[str]:
    """The GPUs of this machine that a process may use, as CUDA_VISIBLE_DEVICES names them, parts of one (MIG) too."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name and name != "-1"]
    return [str(index) for index in range(len(visible_gpus()))]


def variables(cluster: Cluster) -> dict[str, str]:
    """What the launcher itself has to find in its environment."""
    # After Ctrl-C or SIGTERM torch's launcher kills the processes, by default after 30 s: too soon for a checkpoint.
    changes = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")}
    gpus = gpu_names()
    # A single process that sees several GPUs would be taken for a forgotten launcher.
    if len(gpus) > cluster.gpus and cluster.gpus < 2:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: cluster.gpus])
    return changes


def command(cluster: Cluster, rank: int, arguments: Sequence[str]) -> list[str]:
    """The line that starts the processes of one machine.

    Args:
        rank: The machine's number; the head has 0.
        arguments: `recipe=NAME key=value …`.
    """
    config = _CONFIG.relative_to(Path.cwd()) if _CONFIG.is_relative_to(Path.cwd()) else _CONFIG
    processes, several = cluster.world.world_size, cluster.nodes > 1
    words = [_accelerate(), "launch", "--config_file", str(config), "--num_processes", str(processes)]
    # Any other way accelerate starts a single process where it sees no second GPU.
    words += ["--multi_gpu"] if processes > 1 else []
    words += ["--num_machines", str(cluster.nodes)]
    words += ["--machine_rank", str(rank), "--main_process_ip", str(cluster.head)] if several else []
    # 0: any free port, so that two runs on one machine do not collide.
    words += ["--main_process_port", str(cluster.port or (_PORT if several else 0))]
    return [*words, "-m", "toolkit.run", *arguments]


def shell_line(cluster: Cluster, rank: int, arguments: Sequence[str]) -> str:
    """The command as one would type it."""
    settings = [f"{key}={shlex.quote(value)}" for key, value in variables(cluster).items()]
    return " ".join([*settings, shlex.join(command(cluster, rank, arguments))])


def line(cluster: Cluster, rank: int | None, arguments: Sequence[str]) -> list[str]:
    """The same as what is printed, by a launcher whose own report of a failure does not bury the reason.

    Raises:
        UserError: If it is not known which of several machines this is, or if it has fewer GPUs than asked for.
    """
    if cluster.nodes > 1 and rank is None:
        raise UserError("--rank is not given", _ranks(cluster.nodes))
    # Without any GPU the processes train on the CPU.
    if 0 < (visible := len(gpu_names())) < cluster.gpus:
        raise UserError(f"--gpus {cluster.gpus}: {visible} can be seen here", f"set --gpus {visible}, or leave it out")
    alone = cluster.world.world_size == 1
    words = ["-m", "toolkit.run", *arguments] if alone else command(cluster, rank or 0, arguments)[2:]
    return [sys.executable, "-m", "toolkit.cli.start", *words]


def run(cluster: Cluster, rank: int | None, arguments: Sequence[str]) -> None:
    """Becomes the launcher; does not return.

    Raises:
        UserError: As `line`.
    """
    words = line(cluster, rank, arguments)
    sys.stdout.flush()
    os.execvpe(words[0], words, {**os.environ, **variables(cluster)})


def check_resume(recipe: Recipe, what: str) -> None:
    """Refuses a recipe that would start at the same place every time."""
    if recipe.checkpoint.resume != "auto":
        raise UserError(
            f"checkpoint.resume={recipe.checkpoint.resume}: {what} would start there every time",
            "set checkpoint.resume=auto",
        )


def _ranks(nodes: int) -> str:
    return f"number the machines with --rank 0 (the head) to --rank {nodes - 1}"


def sbatch(
    runs: Sequence[tuple[Loaded, Sequence[str]]],
    cluster: Cluster,
    name: str,
    cores: int | None,
    restarts: int = 0,
    at_once: int | None = None,
    **requests: str | None,
) -> str:
    """The text of a batch script for Slurm; of several runs each is a job of one array.

    Args:
        runs: Recipes, and what starts them: `recipe=NAME key=value …`.
        name: Of the job.
        cores: CPU cores of each machine.
        restarts: How often the job starts a failed training again before it is queued again.
        at_once: How many jobs of an array run at the same time at most.
        requests: Slurm's further options; None leaves one to the site's default.

    Raises:
        UserError: If a recipe would start again from the beginning after every requeue.
    """
    for loaded, _ in runs:
        check_resume(loaded.recipe, "a job that Slurm requeues")
    text = Path(__file__).with_name("launch.sbatch.j2").read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined).render(
        name=name,
        cluster=cluster,
        cores=cores or _CORES_PER_GPU * cluster.world.local_world_size,
        requests=requests,
        to_save=TO_SAVE,
        restarts=restarts,
        at_once=at_once,
        runs=[(shlex.quote(str(loaded.run_folder)), shlex.join(arguments)) for loaded, arguments in runs],
        python=shlex.quote(sys.executable),
        config=shlex.quote(str(_CONFIG)),
    )


def save(text: str, file: Path) -> str:
    """Writes a batch script, and says how it is used.

    Raises:
        UserError: If the file exists and says something else.
    """
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise UserError(f"{file} exists and says something else", "remove it, or name another file with --output")
    write_named(file, text)
    return f"wrote {file}\nstart it:  sbatch {shlex.quote(str(file))}"


def _accelerate() -> str:
    """The console script of this Python's accelerate, by name where the name means it."""
    script = Path(sys.executable).with_name("accelerate")
    first = shutil.which("accelerate")
    return "accelerate" if first and Path(first) == script else str(script)
