"""What the processes of a run tell each other before they train. Each rank is a process forked from this one."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import populate

from toolkit.common import UserError
from toolkit.distributed import rendezvous as rendezvous_module
from toolkit.distributed.layout import World
from toolkit.distributed.rendezvous import Rendezvous, connect
from toolkit.models.load import ModelSource
from toolkit.models.parallel import expert_parallel
from toolkit.recipe import Recipe
from toolkit.recipe.parallel import Parallel
from toolkit.recipe.rules import load_checked
from toolkit.train import preflight
from toolkit.train.run_folder import RunFolder

Body = Callable[[Rendezvous, int], Any]
TIMEOUT, PATIENT = 2.0, 30.0
"""Seconds: where silence is what is tested, and where a busy machine must not be taken for it."""
FOLDER = Path("runs/small")


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: what its body returned, or what a user would read."""

    exit_code: int | None
    result: Any
    error: str
    printed: str


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., dict[int, Outcome]]:
    """Runs a body on every rank of a launch; those in `absent` are never started, others may give a false number."""

    def one(world: World, body: Body, port: int, report: Path, patience: float) -> None:
        sys.stderr = report.with_suffix(".err").open("w", encoding="utf-8")
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.world_size)}
        rendezvous_module.TIMEOUT_SECONDS = rendezvous_module.GROUP_SECONDS = patience
        rendezvous_module._BEAT_SECONDS, preflight.VISIBLE_SECONDS = 0.2, 0.5
        result, error = None, ""
        try:
            with connect(world) as rendezvous:
                result = body(rendezvous, world.rank)
        except UserError as problem:
            error = str(problem)
        report.write_text(json.dumps([result, error]), encoding="utf-8")
        sys.stderr.flush()
        os._exit(0)

    def run(
        body: Body,
        processes: int = 2,
        per_node: int | None = None,
        absent: tuple[int, ...] = (),
        call_themselves: Mapping[int, int] | None = None,
        patience: float = TIMEOUT,
    ) -> dict[int, Outcome]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        width = per_node or processes
        started = {}
        for rank in range(processes):
            if rank not in absent:
                number = (call_themselves or {}).get(rank, rank)
                world = World(number, number % width, processes, width)
                report = tmp_path / f"rank{rank}.json"
                process = multiprocessing.get_context("fork").Process(
                    target=one, args=(world, body, port, report, patience)
                )
                process.start()
                started[rank] = process, report
        outcomes = {}
        for rank, (process, report) in started.items():
            # What ends one ends all of them, but one that is stopped.
            process.join(60 if not outcomes else 1)
            if process.exitcode is None:
                process.kill()
            result, error = json.loads(report.read_text(encoding="utf-8")) if report.exists() else (None, "")
            printed = report.with_suffix(".err").read_text(encoding="utf-8")
            outcomes[rank] = Outcome(process.exitcode, result, error, printed)
        return outcomes

    return run


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """The recipe `small`, with overrides; `runs/` is the folder of run folders."""
    populate(tmp_path, "llama")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: load_checked("small", overrides).recipe


def test_one_process_needs_nobody(recipe: Callable[..., Recipe]) -> None:
    with connect(World()) as rendezvous:
        assert preflight.check(rendezvous, recipe(), RunFolder(FOLDER)) == []
        preflight.agree(rendezvous, ModelSource.open(recipe()), "data")
        preflight.all_reduce(rendezvous, torch.device("cpu"))


def test_equal_processes_pass_and_exchange_data(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> list[str]:
        warnings = preflight.check(rendezvous, recipe(), RunFolder(FOLDER))
        preflight.agree(rendezvous, ModelSource.open(recipe()), "data")
        torch.distributed.init_process_group("gloo")
        preflight.all_reduce(rendezvous, torch.device("cpu"))
        assert rendezvous.group_deadline is None
        # Nothing shows any more that a process is only slow.
        with pytest.raises(AssertionError, match="the rendezvous is over: late"):
            rendezvous.exchange("late", None, lambda values: None)
        torch.distributed.destroy_process_group()
        return warnings

    outcomes = ranks(body)
    assert [(each.exit_code, each.result, each.error) for each in outcomes.values()] == [(0, [], "")] * 2
    assert not list(tmp_path.rglob(".preflight-*"))


def test_differences_are_named_by_rank_and_host_on_every_process(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "peft-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 9.9.9\n", encoding="utf-8")

    def body(rendezvous: Rendezvous, rank: int) -> None:
        if rank == 3:
            sys.path.insert(0, str(other.parent))
        preflight.check(rendezvous, recipe(f"optimizer.learning_rate={0.02 if rank == 1 else 0.01}"), RunFolder(FOLDER))

    errors = {each.error for each in ranks(body, processes=4, per_node=2).values()}
    assert len(errors) == 1
    [error] = errors
    host = rf"{socket.gethostname()} 127.0.0.1"
    assert f"optimizer.learning_rate is 0.01 on ranks 0, 2-3 ({host}) but 0.02 on rank 1 ({host})" in error
    assert f"but 9.9.9 on rank 3 ({host})" in error


def test_a_missing_process_is_named(ranks: Callable[..., dict[int, Outcome]]) -> None:
    started = time.monotonic()
    outcomes = ranks(lambda rendezvous, rank: None, processes=4, per_node=1, absent=(2, 3))
    assert time.monotonic() - started < 10 * TIMEOUT
    for rank in (0, 1):
        assert f"ranks 2-3 (host unknown) did not answer within {TIMEOUT:g} s" in outcomes[rank].error
    # Whoever shares a node with it knows where it should have been.
    outcomes = ranks(lambda rendezvous, rank: None, processes=4, per_node=2, absent=(3,))
    assert f"rank 3 ({socket.gethostname()} 127.0.0.1) did not answer" in outcomes[1].error


def test_two_nodes_with_one_rank_are_told_apart_from_a_missing_one(ranks: Callable[..., dict[int, Outcome]]) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        raise AssertionError("the rendezvous is not complete")

    outcomes = ranks(body, processes=3, call_themselves={2: 1})
    assert {each.error.splitlines()[0] for each in outcomes.values()} == {
        f"two processes say that they are rank 1, one of them on {socket.gethostname()} 127.0.0.1"
    }


def test_a_missing_first_process_is_named(ranks: Callable[..., dict[int, Outcome]]) -> None:
    assert "rank 0 (127.0.0.1:" in ranks(lambda rendezvous, rank: None, absent=(0,))[1].error


def test_a_slow_process_is_not_missing_and_one_that_dies_is(ranks: Callable[..., dict[int, Outcome]]) -> None:
    def slow(rendezvous: Rendezvous, rank: int) -> dict[str, Any]:
        if rank == 0:
            time.sleep(2 * TIMEOUT)
        return rendezvous.exchange("tokenised", rank, lambda values: {"sum": sum(values.values())})

    assert [each.result for each in ranks(slow).values()] == [{"sum": 1}] * 2

    def dies(rendezvous: Rendezvous, rank: int) -> None:
        if rank == 1:
            os._exit(9)
        rendezvous.exchange("tokenised", rank, lambda values: {})

    assert "rank 1 stopped answering" in ranks(dies)[0].error


def test_what_fails_on_one_process_is_told_to_all(ranks: Callable[..., dict[int, Outcome]]) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        if rank == 2:
            raise UserError("data.sources: there is no file chat.jsonl", "write it")
        rendezvous.exchange("tokenised", rank, lambda values: {})

    outcomes = ranks(body, processes=3)
    assert outcomes[2].error.startswith("data.sources: there is no file")
    for rank in (0, 1):
        assert outcomes[rank].error == "rank 2: data.sources: there is no file chat.jsonl\n  write it"


@pytest.mark.parametrize("saves", [False, True])
def test_checkpoints_need_a_run_folder_that_every_node_sees(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe], tmp_path: Path, saves: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "runs").mkdir(parents=True)
    wanted = recipe(f"checkpoint.save_steps={1 if saves else 'null'}")

    def body(rendezvous: Rendezvous, rank: int) -> list[str]:
        if rank == 1:
            os.chdir(elsewhere)
        folder = RunFolder(FOLDER)
        warnings = preflight.check(rendezvous, wanted, folder)
        assert not folder.shared
        return warnings

    for outcome in ranks(body, per_node=1).values():
        assert ("does not see the run folder of rank 0" in outcome.error) is saves
        assert outcome.result == (None if saves else [])


def test_a_cache_that_cannot_be_written_names_the_node(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        if rank == 1:
            os.environ["TOOLKIT_CACHE"] = str(tmp_path / "chat.jsonl" / "cache")
        preflight.check(rendezvous, recipe(), RunFolder(FOLDER))

    for outcome in ranks(body, per_node=1).values():
        assert f"cannot write to {tmp_path}/chat.jsonl/cache: Not a directory" in outcome.error
        assert "rank 1 (" in outcome.error and "TOOLKIT_CACHE" in outcome.error


def test_a_clock_that_is_off_is_a_warning(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe]
) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> list[str]:
        if rank == 1:
            right = time.time
            time.time = lambda: right() + 90
        return preflight.check(rendezvous, recipe(), RunFolder(FOLDER))

    for outcome in ranks(body).values():
        assert outcome.result == ["the clock of rank 1 is 90 s off"]


def test_other_data_or_another_model_is_named(
    ranks: Callable[..., dict[int, Outcome]], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    populate(elsewhere, "llama")
    weights = elsewhere / "llama" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    def body(rendezvous: Rendezvous, rank: int) -> None:
        if rank == 1:
            os.chdir(elsewhere)
        preflight.agree(rendezvous, ModelSource.open(recipe()), f"data{rank}")

    for outcome in ranks(body).values():
        assert "data (fingerprint) is data0 on rank 0 but data1 on rank 1" in outcome.error
        assert "model files is " in outcome.error


@pytest.mark.parametrize("how", ["late", "frozen", "alone"])
def test_a_group_that_hangs_says_who_is_missing(ranks: Callable[..., dict[int, Outcome]], how: str) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        rendezvous.begin_group()
        if rank == 1 and how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and how == "alone":
            time.sleep(60)
        torch.distributed.init_process_group("gloo")  # Hangs for half an hour if it is the only one, beyond any Python.
        if rank == 1:
            time.sleep(60)
        preflight.all_reduce(rendezvous, torch.device("cpu"))

    outcomes = ranks(body)
    wanted = {
        "late": f"error: rank 1 did not come to the first all-reduce: nothing for {TIMEOUT:g} s",
        "frozen": "error: rank 1 stopped answering while the process group started",
        "alone": f"error: the processes are all there, but cannot exchange data: nothing for {TIMEOUT:g} s",
    }[how]
    assert outcomes[0].printed.startswith(wanted)
    assert outcomes[0].exit_code == os.EX_TEMPFAIL
    if how != "frozen":
        assert outcomes[1].printed.strip() == wanted.replace("error:", "error on process 1:")
        assert outcomes[1].exit_code == os.EX_TEMPFAIL


def _came_to(way: str) -> str:
    """What processes that are divided so do first in their group."""
    return {
        "sequence": "the exchange of heads (parallel.sequence)",
        "context": "the gathering of keys and values (parallel.context)",
        "tensor": "the sum over divided layers (parallel.tensor)",
        "expert": "sending tokens to experts (parallel.expert)",
        "pipeline": "handing hidden states on and back (parallel.pipeline)",
    }[way]


@pytest.mark.parametrize("way", ["sequence", "context", "tensor", "expert", "pipeline"])
def test_what_groups_do_is_tried_and_who_does_not_come_is_named(
    ranks: Callable[..., dict[int, Outcome]], way: str
) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        rendezvous.begin_group()
        torch.distributed.init_process_group("gloo")
        comes_to = rendezvous.comes_to
        if rank == 1:
            rendezvous.comes_to = lambda what: time.sleep(60) if way in what else comes_to(what)
        preflight.all_reduce(rendezvous, torch.device("cpu"), Parallel(**{way: 2}))

    outcomes = ranks(body)
    assert outcomes[0].printed.startswith(f"error: rank 1 did not come to {_came_to(way)}: nothing for {TIMEOUT:g} s")


@pytest.mark.parametrize("way", ["sequence", "context", "tensor"])
def test_a_wrong_result_in_a_group_is_told_by_all(ranks: Callable[..., dict[int, Outcome]], way: str) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        name = {"sequence": "all_to_all_single", "context": "all_gather_into_tensor", "tensor": "all_reduce"}[way]
        real = getattr(torch.distributed, name)

        def damaged(received: torch.Tensor, *sent: torch.Tensor, group: Any = None) -> None:
            real(received, *sent, group=group)
            received += int(rank == 1 and group is not None)

        setattr(torch.distributed, name, damaged)
        try:
            preflight.all_reduce(rendezvous, torch.device("cpu"), Parallel(**{way: 2}))
        finally:
            torch.distributed.destroy_process_group()

    errors = [outcome.error for outcome in ranks(body, patience=PATIENT).values()]
    assert all("rank 1 got a wrong result of the" in error and f"(parallel.{way})" in error for error in errors), errors


def test_tokens_that_come_wrong_to_experts_are_told_by_all(ranks: Callable[..., dict[int, Outcome]]) -> None:
    def body(rendezvous: Rendezvous, rank: int, spoilt: bool = False) -> None:
        torch.distributed.init_process_group("gloo")
        with pytest.MonkeyPatch.context() as patched:
            if spoilt:
                send = expert_parallel._send
                patched.setattr(expert_parallel, "_send", lambda *args: send(*args) + (rank == 2))
            preflight.all_reduce(rendezvous, torch.device("cpu"), Parallel(expert=2))
        torch.distributed.destroy_process_group()

    assert [each.error for each in ranks(body, 4, patience=PATIENT).values()] == [""] * 4
    wrong = f"rank 2 got a wrong result of {_came_to('expert')}"
    assert [
        each.error.partition("\n")[0] for each in ranks(partial(body, spoilt=True), 4, patience=PATIENT).values()
    ] == [wrong] * 4


def test_what_is_handed_on_wrong_in_a_pipeline_is_told_by_all(ranks: Callable[..., dict[int, Outcome]]) -> None:
    def body(rendezvous: Rendezvous, rank: int) -> None:
        torch.distributed.init_process_group("gloo")
        real = torch.distributed.batch_isend_irecv

        def damaged(works: list[Any]) -> list[Any]:
            for each in works:
                if each.op is torch.distributed.isend and rank == 0:
                    each.tensor.add_(1)
            return real(works)

        torch.distributed.batch_isend_irecv = damaged
        try:
            preflight.all_reduce(rendezvous, torch.device("cpu"), Parallel(pipeline=2))
        finally:
            torch.distributed.batch_isend_irecv = real
            torch.distributed.destroy_process_group()

    errors = [outcome.error for outcome in ranks(body, patience=PATIENT).values()]
    assert all(f"rank 1 got a wrong result of {_came_to('pipeline')}" in error for error in errors), errors


def test_an_engine_that_is_for_gpus_only_is_refused_before_anything_is_loaded(recipe: Callable[..., Recipe]) -> None:
    for strategy, processes in (("strategy=fsdp", 1), ("strategy=zero2", 2)):
        with pytest.raises(UserError, match="on GPUs only\n  set strategy=ddp"):
            preflight.check_devices(recipe(strategy), World(0, 0, processes, processes))
