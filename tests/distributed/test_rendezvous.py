"""Trainings over two nodes with their own addresses, started as a user starts them on each."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, RUN, SUPPORT, losses
from nodes import Node, two_nodes
from ranks import ON_CPU, Ranks
from small import populate
from transformers import AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.distributed.layout import World
from toolkit.distributed.rendezvous import Rendezvous

OVERRIDES = ["recipe=small", "schedule.max_steps=3", "batch.micro_batch_size=1", "checkpoint.save_steps=2"]
PORT = "29500"
CPU_ENGINES = SUPPORT / "cpu_engines.py"


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as pair:
        yield pair


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Path:
    """A user's folder, as both nodes see it, and the same training by one process."""
    folder = tmp_path_factory.mktemp("place")
    populate(folder, "llama")
    alone = ranks.run(folder, *OVERRIDES, "output.name=alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    return folder


def accelerate(node: int, nodes: tuple[Node, Node], processes: int, script: Path) -> list[str]:
    """The documented command for this node."""
    return [
        *f"{sys.executable} -m accelerate.commands.launch --multi_gpu --num_machines 2".split(),
        *f"--num_processes {processes} --machine_rank {node} --main_process_ip {nodes[0].address}".split(),
        *f"--main_process_port {PORT} --mixed_precision no --dynamo_backend no {script}".split(),
    ]


def without_launcher(node: int, nodes: tuple[Node, Node]) -> dict[str, str]:
    """What srun or a script of the user's own puts into the environment."""
    world = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return world | {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": PORT}


def wait(started: list[subprocess.Popen[str]], seconds: float = 240) -> list[str]:
    """What each printed. Both are read at once, so that neither waits for room in its pipe."""
    printed = [""] * len(started)

    def read(index: int) -> None:
        printed[index] = started[index].communicate(timeout=seconds)[0]

    readers = [threading.Thread(target=read, args=(index,)) for index in range(len(started))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes", "launched"),
    [
        pytest.param(["fsdp"], 2, False, id="fsdp-without-launcher"),
        pytest.param(["zero2"], 2, True, id="zero2", marks=pytest.mark.matrix),
        pytest.param(["fsdp", "strategy.sharding=hybrid_shard"], 4, True, id="hybrid_shard", marks=pytest.mark.matrix),
        pytest.param(["fsdp"], 2, True, id="fsdp", marks=pytest.mark.matrix),
    ],
)
def test_two_nodes_train_as_one_process_does(
    nodes: tuple[Node, Node], place: Path, ranks: Ranks, strategy: list[str], processes: int, launched: bool
) -> None:
    name = strategy[-1].replace("strategy.sharding=", "") + ("" if launched else "-without-launcher")
    arguments = [*OVERRIDES, f"output.name={name}", f"strategy.name={strategy[0]}", *strategy[1:]]
    if launched:
        commands = [accelerate(index, nodes, processes, CPU_ENGINES) for index in range(2)]
        started = [node.start(place, [*commands[index], *arguments]) for index, node in enumerate(nodes)]
        printed = wait(started)
        codes = [process.returncode for process in started]
    else:
        forked = [
            node.fork(ranks, place, *arguments, entry=ON_CPU, **without_launcher(index, nodes))
            for index, node in enumerate(nodes)
        ]
        ended = [launch.wait() for launch in forked]
        codes, printed = [each.returncode for each in ended], [each.stderr for each in ended]
    assert codes == [0, 0], "\n".join(each[-3000:] for each in printed)
    run = place / "runs" / name
    assert losses(run) == pytest.approx(losses(place / "runs" / "alone"), rel=1e-6)
    alone, together = (
        AutoModelForCausalLM.from_pretrained(place / "runs" / each / "final").state_dict() for each in ("alone", name)
    )
    assert alone.keys() == together.keys()
    for key, weights in alone.items():
        # Adam enlarges the rounding of gradients that are nearly zero.
        assert (together[key] - weights).norm() <= 1e-5 * weights.norm(), key
    print(f"{name}: losses {losses(run)}, one process {losses(place / 'runs' / 'alone')}")


@pytest.mark.matrix
def test_a_node_with_another_recipe_and_other_packages_stops_both(
    nodes: tuple[Node, Node], place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "peft-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 9.9.9\n", encoding="utf-8")
    command = [sys.executable, str(RUN), *OVERRIDES, "strategy.name=ddp", "output.name=differing"]
    own = [without_launcher(0, nodes), without_launcher(1, nodes) | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}]
    started = [
        nodes[0].start(place, command, own[0]),
        nodes[1].start(place, [*command, "optimizer.learning_rate=0.5"], own[1]),
    ]
    printed = wait(started)
    first, second = (f"rank {index} ({node.host} {node.address})" for index, node in enumerate(nodes))
    for process, text in zip(started, printed, strict=True):
        assert process.returncode == 1, text[-3000:]
        assert f"optimizer.learning_rate is 0.01 on {first} but 0.5 on {second}" in text
        assert f"but 9.9.9 on {second}" in text
        assert "Traceback" not in text


CONNECT = """
import sys, time
from pathlib import Path
from toolkit.distributed import rendezvous
from toolkit.distributed.layout import World

def main(arguments):
    rendezvous.TIMEOUT_SECONDS, rendezvous._BEAT_SECONDS = 3.0, 0.2
    try:
        with rendezvous.connect(World.from_environment()) as connected:
            print("connected", flush=True)
            while not Path("cut").exists():
                time.sleep(0.05)
            connected.exchange("later", None, lambda values: {})
    except rendezvous.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
"""


def test_a_node_that_never_starts_is_named(nodes: tuple[Node, Node], tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "connecting.py").write_text(CONNECT)
    first = nodes[0].fork(ranks, tmp_path, entry="connecting", **without_launcher(0, nodes)).wait(60)
    assert first.returncode == 1
    assert "error: rank 1 (host unknown) did not answer within 3 s" in first.stderr


STORE = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def test_a_launcher_that_dies_with_its_store_ends_its_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout
        port = launcher.stdout.readline().strip()
        agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in agent.items():
            monkeypatch.setenv(name, value)
        rendezvous = Rendezvous(World(0, 0, 2, 2))
        launcher.kill()
    with pytest.raises(UserError, match="rank 0 has ended"):
        rendezvous.exchange("tokenised", 0, dict)
    rendezvous.stop()


def test_two_nodes_that_lose_each_other_both_say_so(nodes: tuple[Node, Node], tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "connecting.py").write_text(CONNECT)
    started = [
        node.fork(ranks, tmp_path, entry="connecting", **without_launcher(index, nodes))
        for index, node in enumerate(nodes)
    ]
    end = time.monotonic() + 60
    while not all(launch.printed() == "connected\n" for launch in started):
        assert time.monotonic() < end and all(launch.running() for launch in started)
        time.sleep(0.05)
    nodes[1].cut_off()
    (tmp_path / "cut").touch()
    ended = [launch.wait(60) for launch in started]
    assert [each.returncode for each in ended] == [1, 1]
    assert f"error: rank 1 ({nodes[1].host} {nodes[1].address}) stopped answering" in ended[0].stderr
    assert f"error: rank 0 ({nodes[0].host} {nodes[0].address}) stopped answering" in ended[1].stderr
