"""What never ends is ended, and nothing else."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from toolkit.common import UserError, in_background
from toolkit.recipe.time_limit import TimeLimit


def test_endless_work_is_ended_in_any_thread_and_only_it() -> None:
    def endless() -> None:
        with TimeLimit(0.3, lambda: UserError("too long")):
            while True:
                with contextlib.suppress(Exception):
                    sum(range(1000))

    def waits() -> str:
        with TimeLimit(0.3, lambda: UserError("too long")):
            time.sleep(1)
        return "done"

    for _ in range(2):
        with pytest.raises(UserError, match="too long"):
            endless()
    idle = in_background(waits)
    with pytest.raises(UserError, match="too long"):
        in_background(endless).result(timeout=30)
    assert idle.result(timeout=30) == "done"
    # The limit around counts on after one inside it.
    with pytest.raises(UserError, match="outer"), TimeLimit(0.5, lambda: UserError("outer")):
        with TimeLimit(60, lambda: UserError("inner")):
            pass
        endless_loop = iter(int, 1)
        for _ in endless_loop:
            pass


def test_what_takes_long_on_its_way_out_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second end would come after the block, where nobody expects it."""
    nap = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: nap(min(seconds, 0.005)))

    def endless(_: object) -> None:
        while True:
            pass

    for _ in range(4):
        held = [iter([[] for _ in range(10**6)])]  # Takes a while to be freed, with no Python code in between.
        with pytest.raises(UserError, match="too long"), TimeLimit(0.3, lambda: UserError("too long")):
            list(map(endless, held.pop()))


def test_what_swallows_its_end_is_ended_again() -> None:
    with pytest.raises(UserError, match="too long"), TimeLimit(0.2, lambda: UserError("too long")):
        for _ in range(2):
            with contextlib.suppress(BaseException):
                while True:
                    pass


def test_a_forked_process_has_limits_of_its_own() -> None:
    with TimeLimit(60, lambda: UserError("never")):
        process = os.fork()
        if not process:
            try:
                with TimeLimit(0.3, lambda: UserError("too long")):
                    while True:
                        pass
            except UserError:
                os._exit(7)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
