"""A plan for the terminal: one screen, 80 columns, plain text where there is no terminal.

Blocks are `rich.text.Text`, which has colours and can be cut and measured. `rich.table` lays out none of them: its rows
would hold neither the bars that begin where the one above ends, nor the lines of reasons and parts between two rows.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from toolkit.planner.plan import Memory, Plan, Refused
from toolkit.report import plan_view as view

WIDEST = 100
STYLES = {"yes": "bold green", "tight": "bold yellow", "no": "bold red"}
LETTERS = {
    "parameters": ("P", "blue"),
    "adapters": ("D", "bright_blue"),
    "masters": ("M", "cyan"),
    "gradients": ("G", "bright_red"),
    "optimizer": ("O", "magenta"),
    "activations": ("A", "green"),
    "casts": ("C", "bright_cyan"),
    "logits": ("L", "yellow"),
    "engine": ("E", "bright_magenta"),
    "batch": ("B", "white"),
    "workspace": ("W", "white"),
    "fragmentation": ("F", "bright_black"),
    "context": ("X", "bright_black"),
}
"""A letter and a colour for each part in stacked bars, so that they can be read without colours too."""
_NAME = 14
_LINE = "│"


def show(text: Text, stream: TextIO | None = None) -> None:
    """Writes a text of this module, with colours on a terminal only."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(text)
    else:
        encoding = stream.encoding or "utf-8"
        stream.write(text.plain.encode(encoding, "replace").decode(encoding) + "\n")


def width() -> int:
    """Columns to write in."""
    return max(60, min(shutil.get_terminal_size().columns, WIDEST))


def plan_text(plan: Plan, columns: int = 80) -> Text:
    """The whole plan."""
    blocks = [
        _headline(plan, columns),
        _rows("", view.setting_rows(plan), columns),
        memory_text(plan, columns),
        _phases(plan.memory[0], columns),
        _rows("Host and disk", view.store_rows(plan), columns),
        _rows("Work", view.work_rows(plan), columns),
        _rows("Traffic of a rank in a step", view.link_rows(plan), columns),
        _advice(plan, columns),
        _notes(plan, columns),
    ]
    return Text("\n\n").join(block for block in blocks if block.plain)


def brief_text(plan: Plan, columns: int = 80) -> Text:
    """What a run prints at its start."""
    blocks = [_headline(plan, columns), _rows("", view.chosen_rows(plan), columns), memory_text(plan, columns)]
    return Text("\n").join(block for block in blocks if block.plain)


def memory_text(plan: Plan, columns: int = 80) -> Text:
    """The parts at the peak, each bar beginning where the one above ends, against the device's line."""
    memory = plan.memory[0]
    unit = view.Unit.of(plan.device_memory)
    parts = view.parts_at_peak(memory)
    room = columns - _NAME - 2 - 20
    scale = max(plan.device_memory, memory.total.value)
    text = Text()
    ranks = "" if memory.ranks == "every rank" else f" ({memory.ranks})"
    text.append(f"Memory of one device{ranks}, {unit.name}, at its peak ({memory.peak_phase})", "bold")
    start = 0.0
    line = round(plan.device_memory / scale * room)
    rows = [(name, amount, LETTERS[name][1]) for name, amount in parts.items()]
    for name, amount, style in rows:
        text.append(f"\n  {name:<{_NAME}}")
        text.append_text(_bar(start, start + amount, scale, room, line, style))
        text.append(f"{unit.text(amount):>8}")
        start += amount
    text.append(f"\n  {'total':<{_NAME}}", "bold")
    text.append_text(_bar(0, memory.total.value, scale, room, line, STYLES[plan.fit.answer]))
    text.append(f"{unit.text(memory.total.value):>8}", "bold").append(f" of {unit.text(plan.device_memory)}")
    reserved, total = memory.reserved, memory.total
    figures = f"allocated {unit.text(memory.allocated)}, "
    # A CPU's allocator gives back what it does not need.
    if reserved.high > memory.allocated:
        figures += f"reserved {unit.text(reserved.value)} ({unit.text(reserved.low)} to {unit.text(reserved.high)}), "
    text.append(f"\n  {figures}total {unit.text(total.low)} to {unit.text(total.high)}", "dim")
    for ranks, peak in view.other_ranks(plan):
        text.append(f"\n  {ranks}: {peak}", "dim")
    return text


def comparison_text(rows: Sequence[Plan | Refused], columns: int = 80) -> Text:
    """Several plans: a table, and below each row its memory by part against its device's line."""
    plans = [row for row in rows if isinstance(row, Plan)]
    labels = view.labels(rows)
    most = columns - 53
    wide = max((len(label) for label in labels if len(label) <= most), default=0)
    priced = any(plan.work.cost is not None for plan in plans)
    scale = max((max(plan.memory[0].total.value, plan.device_memory) for plan in plans), default=1)
    unit = view.Unit.of(scale)
    head = f"{'':<{wide}}  {'fits':<6}{unit.name:>7}{'a step':>10}{'tokens/s':>10}{'in all':>9}"
    text = Text(head + (f"{'costs':>9}" if priced else ""), "bold")
    for label, row in zip(labels, rows, strict=True):
        if len(label) > most:
            text.append("\n" + textwrap.fill(label, columns, subsequent_indent="  ", break_on_hyphens=False))
        text.append(f"\n{label if len(label) <= most else '':<{wide}}  ")
        if isinstance(row, Refused):
            text.append("refused", STYLES["no"])
            text.append(_indented(row.reason, columns, "  "), "dim")
            continue
        text.append(f"{row.fit.answer:<6}", STYLES[row.fit.answer])
        text.append(
            "".join(f"{cell:>{size}}" for cell, size in zip(_cells(row, unit), (7, 10, 10, 9, 9), strict=False))
        )
        text.append("\n  ").append_text(_stack(row, scale, columns - 4))
    used = {part for plan in plans for part in view.parts_at_peak(plan.memory[0])}
    if used:
        names = [f"{_LINE} the device's memory", *(f"{LETTERS[part][0]} {part}" for part in LETTERS if part in used)]
        # Lines break between entries, not inside one.
        key = textwrap.fill(", ".join(name.replace(" ", "\0") for name in names), columns)
        text.append("\n" + key.replace("\0", " "), "dim")
    return text


def _cells(plan: Plan, unit: view.Unit) -> list[str]:
    work = plan.work
    whole = view.duration(work.total_seconds.value) if work.total_seconds is not None else "?"
    cells = [unit.text(plan.memory[0].total.value), view.seconds_text(work.step_seconds.value)]
    cells += [view.compact(work.tokens_per_second), whole]
    return cells + ([view.money_text(work.cost)] if work.cost is not None else [])


def _headline(plan: Plan, columns: int) -> Text:
    named = " ".join([plan.recipe, *plan.overrides])
    text = Text("\n".join(textwrap.wrap(f"{named} on {plan.hardware}", columns, break_on_hyphens=False)), "bold")
    verdict = view.ANSWERS[plan.fit.answer].upper()
    body = textwrap.wrap(f"{verdict}: {view.fit_text(plan)}", columns, subsequent_indent="  ")
    text.append(f"\n{body[0][: len(verdict)]}", STYLES[plan.fit.answer]).append(body[0][len(verdict) :], "not bold")
    for line in [*body[1:], *textwrap.wrap(view.time_text(plan), columns, subsequent_indent="  ")]:
        text.append(f"\n{line}", "not bold")
    return text


def _rows(title: str, rows: Iterable[tuple[str, str]], columns: int) -> Text:
    text = Text()
    for name, value in rows:
        if title and not text.plain:
            text.append(title, "bold")
        lines = textwrap.wrap(value, columns - _NAME - 2, break_on_hyphens=False) or [""]
        start = "\n" if text.plain else ""
        # A name too long for its column has a line of its own.
        head = f"  {name:<{_NAME}}" if len(name) < _NAME else f"  {name}\n  {'':<{_NAME}}"
        text.append(f"{start}{head}{lines[0]}")
        for line in lines[1:]:
            text.append(f"\n  {'':<{_NAME}}{line}")
    return text


def _phases(memory: Memory, columns: int) -> Text:
    phases, table = view.phase_table(memory)
    unit = view.Unit.of(memory.allocated)
    size = min(11, (columns - _NAME - 2) // max(len(phases), 1))
    text = Text(f"Allocated by phase, {unit.name}", "bold")
    short = {"evaluation": "eval", "forward": "fwd", "backward": "bwd", "resume": "resum"}
    names = [phase if len(phase) < size else short.get(phase, phase) for phase in phases]
    text.append(f"\n  {'':<{_NAME}}" + "".join(f"{name:>{size}}" for name in names), "dim")
    for part, row in table.items():
        text.append(f"\n  {part:<{_NAME}}", "bold" if part == "allocated" else "")
        for phase, amount in zip(phases, row, strict=True):
            at_peak = part == "allocated" and phase == memory.peak_phase
            text.append(f"{unit.text(amount) if amount else '·':>{size}}", "bold" if at_peak else "")
    return text


def _advice(plan: Plan, columns: int) -> Text:
    if not plan.advice:
        return Text()
    unit = view.Unit.of(plan.device_memory)
    text = Text("What to change, at the same global batch", "bold")
    for advice in plan.advice:
        head = f"\n  {view.kind_text(advice):<{_NAME - 4}}  "
        figures = f"  {view.ANSWERS[advice.fits]}, {unit.text(advice.total)} {unit.name}, "
        figures += f"{view.seconds_text(advice.step_seconds)} a step"
        changes = textwrap.wrap(
            view.change_text(advice.changes) or "no change", columns - _NAME, break_on_hyphens=False
        )
        text.append(head, "bold" if advice.kind in ("fastest", "cheapest") else "").append(changes[0], "cyan")
        for line in changes[1:]:
            text.append(f"\n  {'':<{_NAME - 2}}").append(line, "cyan")
        indent = " " * _NAME
        if len(changes[-1]) + len(figures) + _NAME <= columns:
            text.append(figures)
        else:
            text.append(f"\n{indent}{figures.strip()}")
        for trade in view.trade_texts(advice):
            text.append(_indented(trade, columns, indent), "dim")
    return text


def _notes(plan: Plan, columns: int) -> Text:
    text = Text()
    for note in plan.notes:
        lines = textwrap.wrap(note, columns, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        text.append(("\n" if text.plain else "") + "\n".join(lines), "dim")
    return text


def _indented(content: str, columns: int, indent: str) -> str:
    lines = [line for part in content.splitlines() for line in textwrap.wrap(part, columns - len(indent))]
    return "".join(f"\n{indent}{line}" for line in lines)


def _bar(start: float, end: float, scale: float, room: int, line: int, style: str) -> Text:
    """A bar between two amounts, with the device's line; eighths of a column at its end, so that small parts show."""
    first, last = start / scale * room, end / scale * room
    begin = min(int(first), room - 1)
    eighths = max(round((last - begin) * 8), 1)
    bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    text = Text(" " * begin).append(bar[: room - begin], style)
    cells = Text(text.plain.ljust(room + 1)[: room + 1], spans=text.spans)
    if cells.plain[min(line, room)] == " ":
        return Text.assemble(cells[: min(line, room)], _LINE, cells[min(line, room) + 1 :])
    # The bar goes beyond the device's memory: the line is drawn over it.
    return Text.assemble(cells[:line], (_LINE, "reverse"), cells[line + 1 :])


def _stack(plan: Plan, scale: float, room: int) -> Text:
    """All parts in one bar of letters, with the device's line."""
    text = Text()
    total = 0.0
    for part, amount in view.parts_at_peak(plan.memory[0]).items():
        total += amount
        letter, style = LETTERS[part]
        count = round(total / scale * room) - len(text.plain)
        text.append(letter * count, f"black on {style}")
    text.append(" " * (room + 1 - len(text.plain)))
    line = round(plan.device_memory / scale * room)
    stack = Text.assemble(text[:line], _LINE, text[line + 1 :])
    stack.rstrip()
    return stack
