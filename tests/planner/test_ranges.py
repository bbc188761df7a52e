"""Plans that rest on less than a trace and all rows say so by wider ranges, around the same estimate."""

from __future__ import annotations

from example_plan import example_plan

from toolkit.planner.plan import Memory, Range
from toolkit.planner.ranges import less_sure, slower_or_faster, up_to


def memory(high: float = 120.0, **parts: int) -> Memory:
    kept = Range(value=100.0, low=90.0, high=high)
    total = Range(value=200.0, low=180.0, high=2 * high)
    phases = {"backward": {"parameters": 1000, **parts}, "step": {"activations": 5000}}
    return Memory(
        ranks="every rank", phases=phases, peak_phase="backward", allocated=0, reserved=kept, context=0, total=total
    )


def test_only_what_formulas_stand_for_is_unsure() -> None:
    """What depends on the model's code at the fullest moment; weights and states are counted."""
    found = less_sure(memory(activations=60, casts=30, logits=10))
    assert (found.reserved, found.total) == (
        Range(value=100.0, low=90.0 - 35, high=120.0 + 35),
        Range(value=200.0, low=180.0 - 35, high=240.0 + 35),
    )
    assert less_sure(memory(gradients=60)) == memory(gradients=60)


def test_a_sample_may_lack_the_longest_row_and_no_more() -> None:
    few, full = memory(), memory(high=300.0, activations=7)
    found = up_to(few, full)
    assert (found.reserved.high, found.total.high) == (300.0, 600.0)
    assert (found.reserved.value, found.reserved.low, found.phases) == (100.0, 90.0, few.phases)
    assert up_to(full, few) == full


def test_time_of_formulas_is_as_unsure() -> None:
    work = example_plan().work.model_copy(update={"total_seconds": Range(value=10.0, low=8.0, high=20.0)})
    found = slower_or_faster(work)
    for name in ("compute_seconds", "step_seconds", "total_seconds"):
        before, after = getattr(work, name), getattr(found, name)
        assert after == Range(value=before.value, low=0.65 * before.low, high=1.35 * before.high)
    unknown = slower_or_faster(work.model_copy(update={"total_seconds": None}))
    assert unknown.total_seconds is None and unknown.step_seconds == found.step_seconds
