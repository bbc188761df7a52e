"""What a run puts into the environment: threads, network interface, process group, memory of CUDA."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from toolkit.distributed.environment import environment, segments_grow
from toolkit.distributed.layout import World
from toolkit.recipe import Recipe

LAUNCHED = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
ON_CPU, ON_GPU = {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}
ONE, FOUR, OF_TWO_NODES = World(), World(1, 1, 4, 4), World(5, 1, 8, 4, "10.0.0.1", 20_001)


def recipe(**strategy: Any) -> Recipe:
    sections = {"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, "strategy": {"name": "ddp", **strategy}}
    return Recipe.model_validate(sections)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores, and the device files of an NVIDIA GPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr("pathlib.Path.glob", lambda folder, pattern: [folder] if pattern == "nvidia[0-9]*" else [])


@pytest.mark.parametrize(
    ("made", "world", "variables", "threads"),
    [
        pytest.param({}, ONE, {}, None, id="one process takes all cores by itself"),
        pytest.param({}, FOUR, {}, "4", id="unsaid, a node's processes share its cores"),
        pytest.param({}, OF_TWO_NODES, {}, "4", id="those of one node, not of all"),
        pytest.param({}, World(0, 0, 40, 40), {}, "1", id="never none"),
        pytest.param({}, FOUR, {"OMP_NUM_THREADS": "3"}, None, id="the user's word counts"),
        pytest.param({}, FOUR, {"OMP_NUM_THREADS": "1"}, None, id="also that for one, without a launcher"),
        pytest.param({}, FOUR, {**LAUNCHED, **ON_GPU}, None, id="a GPU needs no more than a launcher's one"),
        pytest.param({}, FOUR, {**LAUNCHED, **ON_CPU}, "4", id="a CPU does, under torchrun"),
        pytest.param({}, ONE, {**LAUNCHED, "CUDA_VISIBLE_DEVICES": "-1"}, "16", id="and with GPUs hidden by -1"),
        pytest.param(
            *({}, ONE, {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}, "16"), id="and under accelerate --cpu"
        ),
        pytest.param(
            *({}, ONE, {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "false", **ON_GPU}, None), id="not without"
        ),
        pytest.param(
            *({"name": "zero2", "offload_optimizer": "cpu"}, FOUR, {**LAUNCHED, **ON_GPU}, "4"), id="ZeRO's offloading"
        ),
        pytest.param(
            *({"name": "fsdp", "offload_param": "cpu"}, FOUR, {**LAUNCHED, **ON_GPU}, "4"), id="FSDP's offloading"
        ),
        pytest.param(
            *({"name": "fsdp"}, FOUR, {**LAUNCHED, **ON_GPU}, None), id="FSDP without offloading computes on the GPU"
        ),
        pytest.param({}, OF_TWO_NODES, {"SLURM_CPUS_PER_TASK": "7"}, "7", id="Slurm has bound each task to its own"),
        pytest.param({}, FOUR, {"SLURM_CPUS_PER_TASK": "7"}, "4", id="but not those of torchrun within its task"),
    ],
)
def test_threads_of_a_process(
    made: dict[str, Any], world: World, variables: dict[str, str], threads: str | None
) -> None:
    assert environment(recipe(**made), world, variables).get("OMP_NUM_THREADS") == threads


def test_without_a_gpus_device_files_the_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "OMP_NUM_THREADS" not in environment(recipe(), ONE, LAUNCHED)
    monkeypatch.setattr("pathlib.Path.glob", lambda folder, pattern: [])
    for present in ("dxg", "kfd", "null"):
        monkeypatch.setattr("pathlib.Path.exists", lambda file, present=present: file.name == present)
        assert ("OMP_NUM_THREADS" in environment(recipe(), ONE, LAUNCHED)) == (present == "null")


@pytest.mark.parametrize(
    ("own", "variables", "interface"),
    [
        ("10.0.0.7", {}, "eth1"),
        ("10.0.0.7", {"MASTER_ADDR": "10.0.0.2"}, "eth1"),
        ("127.0.0.1", {}, None),
        ("10.9.9.9", {}, None),
        ("fd77::7", {"MASTER_ADDR": "fd77::1"}, "eth1"),
        ("fe80::1%eth1", {"MASTER_ADDR": "fe80::2%eth1"}, "eth1"),
        ("::1", {}, None),
        (None, {}, None),
    ],
    ids=[
        *("by the way to the first node", "as the launcher names it", "loopback", "of no interface", "IPv6"),
        *("of a link alone", "loopback of IPv6", "no way"),
    ],
)
def test_several_nodes_use_the_interface_that_leads_to_the_first(
    monkeypatch: pytest.MonkeyPatch, own: str | None, variables: dict[str, str], interface: str | None
) -> None:
    asked = []

    class Socket:
        def __init__(self, family: int, kind: int) -> None:
            assert kind == socket.SOCK_DGRAM
            self.family = family

        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *error: Any) -> None: ...

        def connect(self, address: tuple[str, int]) -> None:
            asked.append(address[0])
            if own is None or self.family != (socket.AF_INET6 if ":" in own else socket.AF_INET):
                raise OSError

        def getsockname(self) -> tuple[str | None, int]:
            return own, 9

    cards = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "eth1": ["fe80::1%eth1", "10.0.0.7", "fd77::7"]}
    monkeypatch.setattr(socket, "socket", Socket)
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {card: [SimpleNamespace(address=each) for each in addresses] for card, addresses in cards.items()},
    )
    made = environment(recipe(), OF_TWO_NODES, variables)
    assert {*asked} == {variables.get("MASTER_ADDR", "10.0.0.1")}
    expected = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface and f"={interface}"}
    assert {key: made.get(key) for key in expected} == expected
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & environment(recipe(), FOUR, variables).keys()
    said = environment(recipe(), OF_TWO_NODES, {"GLOO_SOCKET_IFNAME": "mine", **variables})
    assert said.get("GLOO_SOCKET_IFNAME", "mine") == "mine"


def test_a_process_group_where_one_is_needed() -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert environment(recipe(), FOUR, {}).items() >= {
        *ranks.items(),
        *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")),
    }
    given = {"MASTER_ADDR": "h", "MASTER_PORT": "5", "RANK": "1"}
    assert environment(recipe(), FOUR, given).items() >= given.items()
    for strategy in ("single", "ddp"):
        assert "RANK" not in environment(recipe(name=strategy), ONE, {})
    for strategy in ("zero1", "fsdp"):
        made = environment(recipe(name=strategy), ONE, {})
        assert (made["RANK"], made["WORLD_SIZE"], made["MASTER_PORT"]) == ("0", "1", "0")
        assert "RANK" not in environment(recipe(name=strategy), ONE, {"LOCAL_RANK": "0"})


def test_what_other_engines_were_told_is_taken_away_and_all_else_stays() -> None:
    left_over = (
        *("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_GRADIENT_CLIPPING"),
        *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM", "FSDP_VERSION"),
        *("ACCELERATE_USE_PARALLELISM_CONFIG", "MEGATRON_LM_TP_DEGREE", "PARALLELISM_CONFIG_CP_SIZE"),
    )
    kept = ("ACCELERATE_MIXED_PRECISION", "HOME", "NCCL_DEBUG", "MY_FSDP_NOTES")
    made = environment(recipe(), ONE, dict.fromkeys((*left_over, *kept), "1"))
    assert {key for key, value in made.items() if value is None} == set(left_over)
    assert not set(kept) & made.keys()


def test_numbers_of_gpus_are_those_of_the_driver_unless_the_user_says_otherwise() -> None:
    assert environment(recipe(), ONE, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment(recipe(), ONE, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_segments_of_cudas_memory_grow_unless_the_user_says_otherwise() -> None:
    grows = "expandable_segments:True"
    assert environment(recipe(), ONE, {})["PYTORCH_CUDA_ALLOC_CONF"] == grows
    assert environment(recipe(), ONE, {"PYTORCH_CUDA_ALLOC_CONF": "x"})["PYTORCH_CUDA_ALLOC_CONF"] == "x"
    assert segments_grow({}) and segments_grow({"PYTORCH_CUDA_ALLOC_CONF": f"a:b,{grows.lower()}"})
    assert not segments_grow({"PYTORCH_ALLOC_CONF": "a:b", "PYTORCH_CUDA_ALLOC_CONF": grows})
    assert not segments_grow({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1"})


_SECOND_LAYER = """
import itertools
import torch
from toolkit.models.attention.document_attention import document_attention

ends = torch.tensor([0, *itertools.accumulate(range(40, 72))], dtype=torch.int32)
heads = [torch.randn(each, int(ends[-1]), 64, dtype=torch.bfloat16, requires_grad=True) for each in (9, 3, 3)]
sizes = [(16 * number, 576) for number in range(1, 33)]
weights = [torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
for layer in range(2):
    print(f"layer {layer}", flush=True)
    document_attention(*heads, ends, ends, 0.1, 0).sum().backward()
    hidden = torch.randn(int(ends[-1]), 576, dtype=torch.bfloat16, requires_grad=True)
    sum(torch.nn.functional.linear(hidden, weight).sum() for weight in weights).backward()
"""


def test_what_one_layer_has_compiled_the_next_one_finds() -> None:
    """oneDNN's kernels of 32 documents of other lengths, and of as many matrices, forward and backward."""
    import torch

    wanted = environment(recipe(), ONE, {})["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    variables = {**os.environ, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(wanted), "ONEDNN_VERBOSE": "profile_create"}
    done = subprocess.run(
        [sys.executable, "-c", _SECOND_LAYER], env=variables, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.split("layer 1")
    assert "create:cache_miss" in first or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert "create:cache_miss" not in second
