"""How long a training takes is planned before the first step, and measured from then on."""

from __future__ import annotations

from toolkit.train.time_left import TimeLeft


def test_time_left_is_planned_first_and_measured_after_ten_steps() -> None:
    left = TimeLeft(100, planned_step_seconds=2.0)
    assert left.after(0) == 200
    left.steps(1, 64.0)  # far from the plan, compiling or not
    assert left.after(1) == 64.0 * 99
    left.steps(1, 30.0)
    for _ in range(9):
        left.steps(1, 3.0)
    assert left.after(11) == 3.0 * 89
    left.steps(1, 50.0)  # one slow step among ten
    assert left.after(12) == 3.0 * 88


def test_time_left_without_a_plan_comes_from_what_there_is() -> None:
    left = TimeLeft(100)
    assert left.after(0) is None
    left.steps(1, 9.0)
    assert left.after(1) == 9.0 * 99
    left.steps(1, 5.0)
    left.steps(5, 10.0)  # logged every five steps
    assert left.after(7) == 2.0 * 93


def test_time_left_follows_a_machine_that_becomes_slower() -> None:
    left = TimeLeft(1000)
    left.steps(2, 2.0)
    left.steps(300, 300.0)
    left.steps(60, 240.0)
    assert left.after(362) == 4.0 * 638


def test_time_left_counts_pauses_to_come() -> None:
    left = TimeLeft(100, 1.0, evaluation_steps=20, save_steps=30)
    assert left.after(10) == 90  # nothing is known of them yet
    left.pause("evaluation", 7.0)
    left.pause("save", 5.0)
    assert left.after(60) == 40 + 2 * 7 + 1 * 5
    assert left.after(100) == 0
