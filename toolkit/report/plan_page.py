"""A plan, or several beside each other, as one HTML page that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.common import count_text, seconds_text
from toolkit.planner.plan import Plan, Refused
from toolkit.report import page
from toolkit.report import plan_view as view
from toolkit.report.page import Tile


def plan_page(rows: Sequence[Plan | Refused]) -> str:
    """The page of one plan, or of several to compare; at least one."""
    first = rows[0]
    if len(rows) == 1 and isinstance(first, Plan):
        bars = stacks([(first.memory[0].ranks, first)], amounts=True)
        title = f"{first.recipe} on {first.hardware} · plan"
        return page.render("plan.html.j2", view=view, title=title, plan=first, tiles=_tiles(first), stacks=bars)
    labels = view.labels(rows)
    plans = [(label, row) for label, row in zip(labels, rows, strict=True) if isinstance(row, Plan)]
    recipes = ", ".join(dict.fromkeys(row.recipe for row in rows))
    hardware = ", ".join(dict.fromkeys(row.hardware for row in rows))
    fitting = sum(plan.fit.answer == "yes" for _, plan in plans)
    unit = view.Unit.of(max((plan.memory[0].total.value for _, plan in plans), default=1))
    return page.render(
        "plan.html.j2",
        view=view,
        title=f"{len(rows)} plans",
        plan=None,
        lead=f"{recipes} on {hardware}; {fitting} of {len(rows)} fit",
        stacks=stacks(plans) if plans else None,
        heads=["fits", *dict.fromkeys(head for _, plan in plans for head in view.comparison_figures(plan, unit))],
        unit=unit,
        rows=list(zip(labels, rows, strict=True)),
    )


def stacks(plans: Sequence[tuple[str, Plan]], amounts: bool = False) -> dict[str, Any]:
    """Memory of one device by part, one bar for each plan, against the device's line; for the macro `stacks`.

    Args:
        plans: At least one, with a label; all bars have the same scale.
        amounts: Whether the legend shows the bytes of each part; for a single plan.
    """
    scale = 1.02 * max(max(plan.memory[0].total.high, plan.device_memory) for _, plan in plans)
    unit = view.Unit.of(scale)
    sums: dict[str, float] = {}
    for _, plan in plans:
        sums |= plan.memory[0].parts_at_peak()
    legend = [
        (part, hint, f"{unit.text(sums[part])} {unit.name}" if amounts else "")
        for part, hint in view.ALL_PARTS.items()
        if part in sums
    ]
    return {"bars": [_stack(label, plan, scale, unit) for label, plan in plans], "parts": legend}


def _stack(label: str, plan: Plan, scale: float, unit: view.Unit) -> dict[str, Any]:
    """One bar; places and widths as CSS percentages of `scale` bytes."""
    memory, start, pieces = plan.memory[0], 0.0, []
    for part, amount in memory.parts_at_peak().items():
        text = f"{part} {unit.text(amount)} {unit.name}"
        pieces.append({"part": part, "left": f"{start / scale:.3%}", "width": f"{amount / scale:.3%}", "text": text})
        start += amount
    return {
        "label": label,
        "answer": plan.fit.answer,
        "verdict": view.ANSWERS[plan.fit.answer],
        "figures": f"{unit.text(memory.total.value)} of {unit.text(plan.device_memory)} {unit.name}",
        "pieces": pieces,
        "rest_left": f"{start / scale:.3%}",
        "rest_width": f"{(memory.total.high - start) / scale:.3%}",
        "device": f"{plan.device_memory / scale:.3%}",
    }


def _tiles(plan: Plan) -> list[Tile]:
    work, memory, unit = plan.work, plan.memory[0], view.Unit.of(plan.device_memory)
    margin = f"{unit.text(abs(plan.device_memory - memory.total.value))} {unit.name} "
    margin += "free" if memory.total.value <= plan.device_memory else "too much"
    tiles = [
        Tile(
            "Memory of a device",
            f"{unit.text(memory.total.value)} of {unit.text(plan.device_memory)} {unit.name}",
            (f"{margin}; {unit.text(memory.total.low)} to {unit.text(memory.total.high)} expected",),
            main=True,
        ),
        Tile("A step", seconds_text(work.step_seconds.value), (view.shares_text(plan),)),
        Tile("Tokens per second", view.compact(work.tokens_per_second), (f"MFU {work.mfu:.1%}",)),
    ]
    if work.total_seconds is not None and work.steps is not None:
        tiles.append(Tile("In all", view.duration(work.total_seconds.value), (count_text(work.steps, "step"),)))
    if work.gpu_hours is not None:
        note = (f"of {plan.devices} devices",) if plan.devices > 1 else ()
        tiles.append(Tile(view.hours_name(plan), view.number_text(work.gpu_hours), note))
    if work.cost is not None:
        tiles.append(Tile("Costs", view.money_text(work.cost)))
    return tiles
