"""How processes find each other: trainings over two nodes with their own addresses, and every failure by threads."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, RUN, SUPPORT, losses
from nodes import Node, two_nodes
from ranks import ON_CPU, Ranks
from small import populate
from transformers import AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.distributed import rendezvous
from toolkit.distributed.layout import World
from toolkit.distributed.rendezvous import Rendezvous, SharedError, connect
from toolkit.train.process import Terminated

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
        met = Rendezvous(World(0, 0, 2, 2))
        launcher.kill()
    with pytest.raises(UserError, match="rank 0 has ended"):
        met.exchange("tokenised", 0, dict)
    met.stop()


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


Work = Callable[[Rendezvous], Any]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A free port, and no waiting but where a test asks for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, seconds in {"TIMEOUT_SECONDS": 60.0, "_BEAT_SECONDS": 0.05, "_LEAVE_SECONDS": 2.0}.items():
        monkeypatch.setattr(rendezvous, name, seconds)


def together(*works: Work | None, ranks: Sequence[int] | None = None) -> list[Any]:
    """What each of several processes, here threads of two per node, returns or raises; None stands for one that never
    starts."""
    results: list[Any] = [None] * len(works)

    def run(place: int, work: Work) -> None:
        rank = ranks[place] if ranks else place
        try:
            with connect(World(rank, rank % 2, len(works), 2)) as met:
                results[place] = work(met)
        except (UserError, KeyboardInterrupt) as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place, work)) for place, work in enumerate(works) if work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def fail(met: Rendezvous) -> None:
    raise UserError("the disk is full", "make room")


HERE = f"{platform.node()} 127.0.0.1"


@pytest.mark.usefixtures("quick")
def test_everyone_hears_the_first_ones_answer_to_all_values() -> None:
    def work(met: Rendezvous) -> tuple[Any, ...]:
        doubled = met.exchange("a", 2 * met.world.rank, lambda values: sorted(values.items()))
        return doubled, met.exchange("b", "x", lambda values: "".join(values.values())), met.name(3, 0, 1), met.alone

    answers = together(work, work, work, work)
    values = [[0, 0], [1, 2], [2, 4], [3, 6]]
    assert json.loads(json.dumps(answers)) == [[values, "xxxx", f"ranks 0-1, 3 ({HERE})", False]] * 4
    alone = Rendezvous(World())
    assert alone.alone and alone.exchange("a", 5, lambda values: values) == {0: 5}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_what_one_finds_wrong_ends_all(failing: int) -> None:
    wait_for_all: Work = lambda met: met.exchange("later", 1, dict)  # noqa: E731
    results = together(*(fail if rank == failing else wait_for_all for rank in range(4)))
    assert {type(result) for rank, result in enumerate(results) if rank != failing} == {SharedError}
    told = {result.what for rank, result in enumerate(results) if rank != failing}
    assert told == {f"rank {failing} ({HERE}): the disk is full"}
    assert {result.change for result in results} == {"make room"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize(
    ("by", "says", "code"),
    [(KeyboardInterrupt(), "stopped by Ctrl-C", 130), (Terminated(signal.SIGTERM), "stopped by SIGTERM", 75)],
)
def test_who_is_stopped_alone_ends_all(stopped: int, by: KeyboardInterrupt, says: str, code: int) -> None:
    """They would wait for as long as it may stay silent. SIGTERM may come of another process that was killed, after
    which a run is started again."""

    def stop(met: Rendezvous) -> None:
        raise by

    wait_for_all: Work = lambda met: met.exchange("later", 1, dict)  # noqa: E731
    results = together(*(stop if rank == stopped else wait_for_all for rank in range(4)))
    assert results.pop(stopped) is by
    assert [(each.what, each.exit_code) for each in results] == [(f"rank {stopped} ({HERE}): {says}", code)] * 3


@pytest.mark.usefixtures("quick")
def test_what_the_first_one_judges_wrong_is_wrong_for_all() -> None:
    def judge(values: Mapping[int, Any]) -> None:
        raise SharedError("they differ", "make them the same")

    results = together(*[lambda met: met.exchange("same", met.world.rank, judge)] * 2)
    assert [(type(each), each.what, each.change) for each in results] == [
        (SharedError, "they differ", "make them the same")
    ] * 2


@pytest.mark.usefixtures("quick")
def test_one_number_given_twice_is_told() -> None:
    wait_for_all: Work = lambda met: met.exchange("later", 1, dict)  # noqa: E731
    results = together(wait_for_all, wait_for_all, wait_for_all, ranks=[0, 1, 1])
    assert all(each.what == f"two processes say that they are rank 1, one of them on {HERE}" for each in results)
    assert all("--machine_rank" in each.change for each in results)


@pytest.mark.usefixtures("quick")
def test_who_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(met: Rendezvous) -> None:
        monkeypatch.setattr(rendezvous, "TIMEOUT_SECONDS", 1.0)
        met.stop()
        time.sleep(2)

    results = together(lambda met: met.exchange("later", 1, dict), silent)
    assert results[0].what == "rank 1 stopped answering 1 s ago"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("starts", "lives", "told"),
    [
        ((0, 1), True, "the processes are all there, but cannot exchange data: why"),
        ((0,), True, "rank 1 did not come to the first all-reduce: why"),
        ((1,), True, "the processes are all there, but cannot exchange data: why"),
        ((0, 1), False, "rank 1 stopped answering while the process group started"),
    ],
)
def test_why_a_group_did_not_start(starts: tuple[int, ...], lives: bool, told: str) -> None:
    def first(met: Rendezvous) -> UserError:
        if 0 in starts:
            met.comes_to("the first all-reduce")
        met.exchange("ready", 0, dict)
        time.sleep(0.1)
        return met.group_error("why")

    def other(met: Rendezvous) -> None:
        if 1 in starts:
            met.comes_to("the first all-reduce")
        met.exchange("ready", 0, dict)
        if not lives:
            met._closed.set()
        time.sleep(1)

    error, _ = together(first, other)
    assert error.what == told
    hint = "here the one with 127.0.0.1" if lives else "look at what was printed there last"
    assert hint in error.change


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("others", "told"),
    [
        # Groups of two: rank 3 did not come, for which rank 2 waits; the first group is through.
        ((4, 3, 2), "rank 3 did not come to the all-to-all: why"),
        ((4, 3, 3), "ranks 2-3 cannot exchange data in the all-to-all: why"),
        ((3, 0, 0), "ranks 2-3 did not come to the first all-reduce: why"),
    ],
)
def test_who_is_missing_in_another_group_is_named(others: tuple[int, ...], told: str) -> None:
    def comes(steps: int, met: Rendezvous) -> None:
        for step in range(steps):
            if step % 2:
                met.has_done()
            else:
                met.comes_to(("the first all-reduce", "the all-to-all", "nothing more")[step // 2])

    def first(met: Rendezvous) -> UserError:
        comes(4, met)
        met.exchange("ready", 0, dict)
        return met.group_error("why")

    def other(steps: int) -> Callable[[Rendezvous], None]:
        def come(met: Rendezvous) -> None:
            comes(steps, met)
            met.exchange("ready", 0, dict)
            time.sleep(1)

        return come

    what = together(first, *map(other, others))[0].what
    assert re.sub(r" \(.*?\)", "", what) == told  # Without the hosts.


@pytest.mark.usefixtures("quick")
def test_a_group_that_hangs_ends_its_processes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(rendezvous, "GROUP_SECONDS", 0.1)

    def hang(met: Rendezvous) -> None:
        met.begin_group()
        time.sleep(1.2)

    together(hang, hang)
    printed = capfd.readouterr().err
    assert codes == [os.EX_TEMPFAIL] * 2
    assert "error: the processes are all there, but cannot exchange data: nothing for 0.1 s" in printed
    assert "error on process 1: the processes are all there" in printed


@pytest.mark.usefixtures("quick")
def test_errors_of_the_group_are_told_as_such_only_while_it_starts() -> None:
    def lost(met: Rendezvous) -> None:
        met.begin_group()
        raise RuntimeError("[gloo] connection closed\nand pages more")

    results = together(lost, lambda met: met.exchange("later", 1, dict))
    assert [each.what.partition(":")[0] for each in results] == [
        "the processes are all there, but cannot exchange data"
    ] * 2
    assert "[gloo] connection closed" in results[0].what and "pages" not in results[0].what


@pytest.mark.usefixtures("quick")
def test_a_store_that_cannot_be_opened_or_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "TIMEOUT_SECONDS", 1.0)
    with pytest.raises(UserError, match=r"rank 0 \(127\.0\.0\.1:\d+\) did not answer within 1 s"):
        Rendezvous(World(1, 1, 2, 2))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        taken.listen()
        with pytest.raises(UserError, match=r"cannot be opened on 127\.0\.0\.1") as refused:
            Rendezvous(World(0, 0, 2, 2))
        assert "--main_process_port" in refused.value.change
    for missing in ("MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.setenv(missing, "")
        with pytest.raises(UserError, match="started 2 processes and set no MASTER_ADDR and MASTER_PORT"):
            Rendezvous(World(0, 0, 2, 2))
