"""A plan, or several beside each other, as one HTML page that needs nothing from outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from toolkit.planner.plan import Memory, Plan, Refused
from toolkit.report import page
from toolkit.report import plan_view as view

STYLE = """
:root { --parameters: #0072b2; --adapters: #56b4e9; --masters: #3b5bbd; --casts: #8ab8de; --gradients: #d55e00;
  --optimizer: #8e5ba6; --activations: #009e73; --logits: #dba800; --engine: #cc79a7; --batch: #7a8594;
  --workspace: #a3abb7; --fragmentation: #b9bfc9; --context: #5f6875; }
@media (prefers-color-scheme: dark) { :root { --fragmentation: #4a525f; --context: #8c95a3; --parameters: #2b8fd0;
  --masters: #6a86e0; } }
.status.yes { color: var(--good); } .status.tight { color: var(--warn); } .status.no { color: var(--bad); }
.yes { color: var(--good); } .tight { color: var(--warn); } .no { color: var(--bad); }
.stacks { display: grid; gap: 16px; }
.stack .label { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; font-size: 14px;
  margin-bottom: 4px; overflow-wrap: anywhere; }
.stack .label > span:last-child { color: var(--soft); font-variant-numeric: tabular-nums; }
.track { position: relative; height: 26px; background: var(--grid); border-radius: 4px; }
.track i { position: absolute; top: 0; bottom: 0; min-width: 2px; background: var(--part);
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.track i:first-child { border-radius: 4px 0 0 4px; }
.track b { position: absolute; top: -5px; bottom: -5px; width: 0; border-left: 2px solid var(--ink); }
.track em { position: absolute; top: 12px; height: 2px; background: var(--soft); }
.track em::after { content: ""; position: absolute; right: 0; top: -5px; height: 12px; border-right: 2px solid
  var(--soft); }
.parts { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 16px 0 0; padding: 0; list-style: none;
  font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.parts i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px;
  background: var(--part); print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.parts .line i { width: 0; border-left: 2px solid var(--ink); border-radius: 0; background: none; margin-left: 5px; }
.parts .range i { height: 2px; background: var(--soft); vertical-align: 4px; }
.wide { overflow-x: auto; }
.wide table { min-width: 640px; }
.figures th, .figures td { width: auto; padding: 5px 0 5px 16px; text-align: right; white-space: nowrap;
  overflow-wrap: normal; }
.figures th:first-child { text-align: left; padding-left: 0; white-space: normal; min-width: 150px; }
.figures thead th { color: var(--soft); border: 0; }
.figures .sum > * { font-weight: 600; color: var(--ink); }
.figures .peak { color: var(--blue); }
.figures td.refused { text-align: left; white-space: pre-line; color: var(--bad); }
.words th { width: 128px; white-space: nowrap; }
.advice code { font: 13px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.advice td:first-child, .advice th:first-child { width: 96px; }
.advice small { display: block; color: var(--soft); font-size: 13px; }
.pair { columns: 2 340px; column-gap: 12px; }
details .body { padding: 4px 20px 16px; border-top: 1px solid var(--rule); }
details + details { margin-top: 8px; }
@media (max-width: 640px) { .words th { width: 96px; white-space: normal; } }
"""


def plan_page(rows: Sequence[Plan | Refused]) -> str:
    """The page of one plan, or of several to compare.

    Args:
        rows: At least one.
    """
    first = rows[0]
    if len(rows) == 1 and isinstance(first, Plan):
        body, title = _one(first), f"{first.recipe} on {first.hardware} · plan"
    else:
        body, title = _several(rows), f"{len(rows)} plans"
    return page.document(title, body, STYLE)


def stacks(plans: Sequence[tuple[str, Plan]], amounts: bool = False) -> str:
    """Memory of one device by part, one bar for each plan, against the device's line.

    Args:
        plans: At least one, with a label; all bars have the same scale.
        amounts: Whether the legend shows the bytes of each part; for a single plan.
    """
    scale = 1.02 * max(max(plan.memory[0].total.high, plan.device_memory) for _, plan in plans)
    unit = view.Unit.of(scale)
    bars = "".join(_stack(label, plan, scale, unit) for label, plan in plans)
    sums: dict[str, float] = {}
    for _, plan in plans:
        sums |= view.parts_at_peak(plan.memory[0])
    parts = "".join(
        f'<li title="{escape(words)}"><i style="--part:var(--{part})"></i>{part}'
        f"{f' {unit.text(sums[part])} {unit.name}' if amounts else ''}</li>"
        for part, words in view.ALL_PARTS.items()
        if part in sums
    )
    keys = '<li class="line"><i></i>memory of the device</li><li class="range"><i></i>up to where it may go</li>'
    return f'<div class="card"><div class="stacks">{bars}</div><ul class="parts">{parts}{keys}</ul></div>'


def _stack(label: str, plan: Plan, scale: float, unit: view.Unit) -> str:
    memory, start, pieces, spoken = plan.memory[0], 0.0, "", []
    for part, amount in view.parts_at_peak(memory).items():
        text = f"{part} {unit.text(amount)} {unit.name}"
        place = f"left:{start / scale:.3%};width:{amount / scale:.3%}"
        pieces += f'<i style="--part:var(--{part});{place}" title="{text}"></i>'
        spoken.append(text)
        start += amount
    pieces += f'<em style="left:{start / scale:.3%};width:{(memory.total.high - start) / scale:.3%}"></em>'
    pieces += f'<b style="left:{plan.device_memory / scale:.3%}"></b>'
    figures = f"{unit.text(memory.total.value)} of {unit.text(plan.device_memory)} {unit.name}"
    answer = f'<span class="{plan.fit.answer}">{view.ANSWERS[plan.fit.answer]}</span>'
    return (
        f'<div class="stack"><div class="label"><span>{escape(label)}</span><span>{answer} · {figures}</span></div>'
        f'<div class="track" role="img" aria-label="{escape(label)}: {figures}; {", ".join(spoken)}">'
        f"{pieces}</div></div>"
    )


def _one(plan: Plan) -> str:
    lead = " ".join([*plan.overrides, f"on {plan.hardware}"])
    return (
        f'<header><div class="head"><h1>{escape(plan.recipe)}</h1>'
        f'<span class="status {plan.fit.answer}">{view.ANSWERS[plan.fit.answer]}</span></div>'
        f'<p class="lead">{escape(lead)}</p><p class="lead">{escape(view.fit_text(plan))}</p></header>'
        f'<dl class="tiles">{_tiles(plan)}</dl>'
        f"<section><h2>Memory of one device at its peak, in {plan.memory[0].peak_phase}</h2>"
        f"{stacks([(plan.memory[0].ranks, plan)], amounts=True)}</section>"
        f"{_details(plan)}"
    )


def _several(rows: Sequence[Plan | Refused]) -> str:
    labels = view.labels(rows)
    plans = [(label, row) for label, row in zip(labels, rows, strict=True) if isinstance(row, Plan)]
    fitting = sum(plan.fit.answer == "yes" for _, plan in plans)
    recipes = ", ".join(dict.fromkeys(row.recipe for row in rows))
    hardware = ", ".join(dict.fromkeys(row.hardware for row in rows))
    more = "".join(
        f'<details><summary>{escape(label)}</summary><div class="body">{_details(plan)}</div></details>'
        for label, plan in plans
    )
    return (
        f'<header><div class="head"><h1>{len(rows)} plans</h1></div>'
        f'<p class="lead">{escape(recipes)} on {escape(hardware)}; {fitting} of {len(rows)} fit</p></header>'
        f"<section><h2>Memory of one device at its peak</h2>{stacks(plans) if plans else ''}</section>"
        f"<section><h2>Figures</h2>{_comparison(labels, rows)}</section><section><h2>Each plan</h2>{more}</section>"
    )


def _comparison(labels: Sequence[str], rows: Sequence[Plan | Refused]) -> str:
    plans = [row for row in rows if isinstance(row, Plan)]
    unit = view.Unit.of(max((plan.memory[0].total.value for plan in plans), default=1))
    priced = any(plan.work.cost is not None for plan in plans)
    heads = ["fits", unit.name, "reserved", "a step", "tokens/s", "MFU", "in all", *(["costs"] if priced else [])]
    lines = []
    for label, row in zip(labels, rows, strict=True):
        if isinstance(row, Refused):
            lines.append(
                f'<tr><th>{escape(label)}</th><td class="refused" colspan="{len(heads)}">{escape(row.reason)}</td></tr>'
            )
            continue
        work, memory = row.work, row.memory[0]
        cells = [unit.text(memory.total.value), unit.text(memory.reserved.value)]
        cells += [view.seconds_text(work.step_seconds.value), view.compact(work.tokens_per_second), f"{work.mfu:.1%}"]
        cells.append("?" if work.total_seconds is None else view.duration(work.total_seconds.value))
        cells += [] if work.cost is None else [view.money_text(work.cost)]
        answer = f'<td class="{row.fit.answer}">{row.fit.answer}</td>'
        lines.append(f"<tr><th>{escape(label)}</th>{answer}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return figures(heads, lines)


def _tiles(plan: Plan) -> str:
    work, memory = plan.work, plan.memory[0]
    unit = view.Unit.of(plan.device_memory)
    margin = f"{unit.text(abs(plan.device_memory - memory.total.value))} {unit.name} "
    margin += "free" if memory.total.value <= plan.device_memory else "too much"
    tiles = [
        (
            "Memory of a device",
            f"{unit.text(memory.total.value)} of {unit.text(plan.device_memory)} {unit.name}",
            f"{margin}; {unit.text(memory.total.low)} to {unit.text(memory.total.high)} expected",
        ),
        ("A step", view.seconds_text(work.step_seconds.value), view.shares_text(plan)),
        ("Tokens per second", view.compact(work.tokens_per_second), f"MFU {work.mfu:.1%}"),
    ]
    if work.total_seconds is not None and work.steps is not None:
        tiles.append(("In all", view.duration(work.total_seconds.value), f"{work.steps:,} steps"))
    if work.gpu_hours is not None:
        note = f"of {plan.devices} devices" if plan.devices > 1 else ""
        tiles.append((view.hours_name(plan), view.number_text(work.gpu_hours), note))
    if work.cost is not None:
        tiles.append(("Costs", view.money_text(work.cost), ""))
    return "".join(
        f'<div class="tile{" main" if index == 0 else ""}"><dt>{title}</dt>'
        f"<dd>{value}<small>{escape(note)}</small></dd></div>"
        for index, (title, value, note) in enumerate(tiles)
    )


def _details(plan: Plan) -> str:
    kinds = "".join(_phases(memory, f"Allocated by phase, {memory.ranks}") for memory in plan.memory)
    advice = f"<section><h2>What to change, at the same global batch</h2>{_advice(plan)}</section>" * bool(plan.advice)
    notes = f"<section><h2>Notes</h2>{page.notice(plan.notes, mild=True)}</section>" if plan.notes else ""
    pairs = _words("Setting", view.setting_rows(plan)) + _words("Work", view.work_rows(plan))
    pairs += _words("Host and disk", view.store_rows(plan))
    pairs += _words("Traffic of a rank in a step", view.link_rows(plan))
    return f'{kinds}<section><h2>Work and places</h2><div class="pair">{pairs}</div></section>{advice}{notes}'


def _phases(memory: Memory, title: str) -> str:
    phases, table = view.phase_table(memory)
    unit = view.Unit.of(memory.allocated)
    lines = []
    for part, row in table.items():
        is_sum = part == "allocated"
        cells = "".join(
            f"<td{' class=peak' if is_sum and phase == memory.peak_phase else ''}>"
            f"{unit.text(amount) if amount else '·'}</td>"
            for phase, amount in zip(phases, row, strict=True)
        )
        words = escape(view.ALL_PARTS.get(part, ""))
        lines.append(f'<tr{" class=sum" if is_sum else ""}><th title="{words}">{part}</th>{cells}</tr>')
    return f"<section><h2>{escape(title)}, {unit.name}</h2>{figures(phases, lines)}</section>"


def figures(heads: Iterable[str], lines: Iterable[str]) -> str:
    """A table of numbers in a card that scrolls sideways where it is narrow; `lines` are rows of HTML."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<div class="card wide"><table class="figures"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _words(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(words)}</td></tr>" for name, words in rows)
    return f'<div class="card"><h3>{title}</h3><table class="words">{lines}</table></div>' if rows else ""


def _advice(plan: Plan) -> str:
    unit = view.Unit.of(plan.device_memory)
    lines = []
    for advice in plan.advice:
        changes = f"<code>{escape(view.change_text(advice.changes))}</code>" if advice.changes else "no change"
        words = "".join(f"<small>{escape(text)}</small>" for text in view.trade_texts(advice))
        lines.append(
            f"<tr><td>{view.kind_text(advice)}</td><td>{changes}{words}"
            f'<small><span class="{advice.fits}">{view.ANSWERS[advice.fits]}</span>, {unit.text(advice.total)}'
            f" {unit.name}, {view.seconds_text(advice.step_seconds)} a step</small></td></tr>"
        )
    return f'<div class="card"><table class="advice">{"".join(lines)}</table></div>'
