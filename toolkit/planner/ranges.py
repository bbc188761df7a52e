"""Wider ranges for plans that rest on less than a trace of the model and figures of all rows."""

from __future__ import annotations

from toolkit.planner.plan import Memory, Range, Work

_FORMULAS_OFF = 0.35
"""By what share the formulas that stand in for a trace were off, for current decoders."""


def less_sure(memory: Memory) -> Memory:
    """Wider ranges for what was estimated from a config."""
    peak = memory.phases[memory.peak_phase]
    off = _FORMULAS_OFF * sum(peak.get(part, 0) for part in ("activations", "casts", "logits"))
    wider = {
        key: Range(value=kept.value, low=kept.low - off, high=kept.high + off)
        for key, kept in (("reserved", memory.reserved), ("total", memory.total))
    }
    return memory.model_copy(update=wider)


def up_to(memory: Memory, most: Memory) -> Memory:
    """A range that reaches to what full rows take: a sample need not have the longest row."""
    wider = {
        key: kept.model_copy(update={"high": max(kept.high, top.high)})
        for key, kept, top in (("reserved", memory.reserved, most.reserved), ("total", memory.total, most.total))
    }
    return memory.model_copy(update=wider)


def slower_or_faster(work: Work) -> Work:
    """Wider ranges of time for what was estimated from a config."""
    ranges = {key: getattr(work, key) for key in ("compute_seconds", "step_seconds", "total_seconds")}
    wider = {
        key: Range(value=kept.value, low=kept.low * (1 - _FORMULAS_OFF), high=kept.high * (1 + _FORMULAS_OFF))
        for key, kept in ranges.items()
        if kept is not None
    }
    return work.model_copy(update=wider)
