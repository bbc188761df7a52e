"""What a run may use of a host's memory: the machine's, or what the tightest limit leaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import ROOT

from toolkit.planner.hardware.host_memory import HostMemory, host_memory

GIB = 2**30
TOTAL = HostMemory(psutil.virtual_memory().total)
GROUPS = Path("/sys/fs/cgroup")
SHOWN = "from toolkit.planner.hardware.detect import cpu; node = cpu(2).node; print(node.ram, node.ram_limit)"


def machine(root: Path, groups: str, files: dict[str, int | str]) -> Path:
    """A machine whose process is in these control groups, with these files below /sys/fs/cgroup."""
    for name, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"memory.max": GIB}, "memory.max of the control group /"),
        ("0::/job/step", {"job/step/memory.max": GIB}, "memory.max of the control group /job/step"),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": GIB}, "memory.max of the control group /job"),
        ("0::/job", {"job/memory.max": 2 * GIB, "memory.max": GIB}, "memory.max of the control group /"),
        ("0::/job", {"unified/job/memory.max": GIB}, "memory.max of the control group /job"),
        ("0::/docker/of_the_host", {"memory.max": GIB}, "memory.max of the control group /"),
        (
            "5:cpu:/\n4:cpuacct,memory:/job:1/step\n0::/",
            {"memory/job:1/step/memory.limit_in_bytes": 2**63 - 4096, "memory/job:1/memory.limit_in_bytes": GIB},
            "memory.limit_in_bytes of the control group /job:1",
        ),
        ("4:memory:/docker/x", {"memory/memory.limit_in_bytes": GIB}, "memory.limit_in_bytes of the control group /"),
    ],
)
def test_the_tightest_control_group_counts(
    tmp_path: Path, groups: str, files: dict[str, int | str], limit: str
) -> None:
    assert host_memory(root=machine(tmp_path, groups, files), environment={}) == HostMemory(GIB, limit)


@pytest.mark.parametrize("content", ["max", str(2**63 - 4096), "", "-1"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, content: str) -> None:
    files: dict[str, int | str] = {"memory.max": content, "memory/memory.limit_in_bytes": content}
    root = machine(tmp_path, "4:memory:/\n0::/", files)
    assert host_memory(root=root, environment={}) == host_memory(root=tmp_path / "none", environment={}) == TOTAL


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_MEM_PER_NODE": "1024"}, HostMemory(GIB, "SLURM_MEM_PER_NODE")),
        ({"SLURM_MEM_PER_NODE": "0"}, TOTAL),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "2"}, HostMemory(GIB, "SLURM_MEM_PER_CPU")),
        ({"SLURM_MEM_PER_GPU": "256", "SLURM_GPUS_ON_NODE": "4"}, HostMemory(GIB, "SLURM_MEM_PER_GPU")),
        ({"SLURM_MEM_PER_CPU": "512"}, TOTAL),
        ({"SLURM_MEM_PER_NODE": str(2**40)}, TOTAL),
    ],
)
def test_what_a_job_asked_slurm_for_counts(tmp_path: Path, environment: dict[str, str], expected: HostMemory) -> None:
    assert host_memory(root=tmp_path, environment=environment) == expected


@pytest.mark.parametrize(("option", "untouched"), [("-v", 7 * 2**28), ("-d", 2**27)])
def test_limits_of_a_process_count_for_each(option: str, untouched: int) -> None:
    shell = f'ulimit {option} 4194304 && exec "$@"'
    command = ["bash", "-c", shell, "-", sys.executable, "-c", SHOWN]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout == f"{2 * (4 * GIB - untouched)} `ulimit {option}`\n"


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group of 400 MB, of whichever version this machine has."""
    mount = next((each for each in (GROUPS / "memory", GROUPS) if each.is_dir()), GROUPS)
    folder = mount / "toolkit_test"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if mount.name == "memory" else "memory.max")).write_text("400M")
    except OSError:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip("needs the right to make control groups")
    yield folder
    folder.rmdir()


def test_a_run_in_a_control_group_that_is_too_small_is_refused_instead_of_killed(group: Path) -> None:
    shell = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["bash", "-c", shell, "-", sys.executable, "toolkit/run.py", "recipe=smollm2_135m_lora_demo"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) <= 5, answer.stderr
    assert (
        "600 MiB of host RAM" in answer.stderr and "of the control group /toolkit_test leaves 400 MiB" in answer.stderr
    )
