"""A plan for the terminal: one screen, 80 columns, plain text where there is no terminal.

Blocks are `rich.text.Text`, most of them laid out by `common.table`. Bars are cells of such a table: those of
`rich.progress` can neither begin where another ends nor show the line at which the device is full.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from rich.text import Text

from toolkit.common import LINES, brief, bytes_text, table
from toolkit.planner.plan import Advice, Memory, Plan, Refused
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
    "teacher": ("T", "bright_yellow"),
    "cache": ("K", "bright_green"),
    "fragmentation": ("F", "bright_black"),
    "context": ("X", "bright_black"),
}
"""A letter and a colour for each part in stacked bars, so that they can be read without colours too."""
_NAME = 14
_LINE = "│"


def width() -> int:
    """Columns to write in."""
    return max(60, min(shutil.get_terminal_size().columns, WIDEST))


def plan_text(plan: Plan, columns: int = 80) -> Text:
    """The whole plan."""
    blocks = [_headline(plan, columns), *_blocks(plan, columns).values()]
    return _apart(*blocks)


def screen_text(plan: Plan, columns: int, whole: str) -> Text:
    """What of a plan fits on a screen: whether it fits, how long it takes, what fills the memory, what to change.

    Args:
        whole: How to see all of it, for a last line that says what was left out.
    """
    if _height(text := plan_text(plan, columns)) <= LINES:
        return text
    blocks, left_out = _blocks(plan, columns, short=True), list[str]()
    advice = [each for each in plan.advice if each.changes]

    def shown() -> tuple[Text, Text]:
        last = table([(Text(f"more: {', '.join(left_out)}; all of it: {whole}", "dim"),)], "l", columns=columns)
        blocks[_CHANGES] = _advice(plan, advice, columns)
        return _apart(_headline(plan, columns), *blocks.values(), last), last

    for name in _LEAST:
        if blocks[name]:
            text, last = shown()
            if _height(text) <= LINES:
                return text
            if name != _CHANGES:
                blocks.pop(name)
            elif not advice or advice[-1].kind != "option":
                continue
            left_out.append(_NAMES.get(name, name.lower()))
            while name == _CHANGES and advice and advice[-1].kind == "option" and _height(shown()[0]) > LINES:
                advice.pop()
    text, last = shown()
    return text if _height(text) <= LINES else _lines(*text.split("\n")[: LINES - _height(last)], last)


_SETTINGS, _MEMORY, _PHASES, _STORES, _WORK = "settings", "memory", "phases", "Host and disk", "Work"
_TRAFFIC, _SERVING, _CHANGES, _NOTES = "Traffic of a rank in a step", "serving", "changes", "notes"
_LEAST = (_PHASES, _SERVING, _TRAFFIC, _WORK, _STORES, _CHANGES, _NOTES, _SETTINGS)
"""Blocks in the order in which a screen does without them; of what to change without further options."""
_NAMES = {_PHASES: "memory by phase", _TRAFFIC: "traffic", _SERVING: "serving the result", _CHANGES: "options"}


def _blocks(plan: Plan, columns: int, short: bool = False) -> dict[str, Text]:
    """What stands below the headline, in order; in short with small parts of the memory as one."""
    return {
        _SETTINGS: _rows("", view.setting_rows(plan), columns),
        _MEMORY: memory_text(plan, columns, short),
        _PHASES: _phases(plan.memory[0], columns),
        _STORES: _rows(_STORES, view.store_rows(plan), columns),
        _WORK: _rows(_WORK, view.work_rows(plan), columns),
        _TRAFFIC: _rows(_TRAFFIC, view.link_rows(plan), columns),
        _SERVING: _rows(view.serving_title(plan), view.serving_rows(plan), columns),
        _CHANGES: _advice(plan, plan.advice, columns),
        _NOTES: table([("-", Text(brief(note), "dim")) for note in plan.notes], columns=columns, gap=1),
    }


def brief_text(plan: Plan) -> Text:
    """What a run prints at its start, whose log may not know how wide a terminal is."""
    columns = 80
    blocks = [_headline(plan, columns), _rows("", view.chosen_rows(plan), columns), memory_text(plan, columns)]
    return _lines(*(block for block in blocks if block))


def memory_text(plan: Plan, columns: int = 80, short: bool = False) -> Text:
    """The parts at the peak, each bar beginning where the one above ends, against the device's line.

    Args:
        short: Whether parts of less than a fiftieth are one.
    """
    memory = plan.memory[0]
    total, reserved, unit = memory.total, memory.reserved, view.Unit.of(plan.device_memory)
    room = columns - _NAME - 22
    scale = max(plan.device_memory, total.value)
    line = round(plan.device_memory / scale * room)
    ranks = "" if memory.ranks == "every rank" else f" ({memory.ranks})"
    title = Text(f"Memory of one device{ranks}, {unit.name}, at its peak ({memory.peak_phase})", "bold")
    start, rows = 0.0, list[tuple[Text, ...]]()
    parts = memory.parts_at_peak()
    if short and len(small := [name for name, amount in parts.items() if amount < total.value / 50]) > 1:
        parts["other"] = sum(parts.pop(name) for name in small)
    for name, amount in parts.items():
        bar = _bar(start, start + amount, scale, room, line, LETTERS.get(name, LETTERS["workspace"])[1])
        rows.append((Text(name), bar, Text(unit.text(amount))))
        start += amount
    bar = _bar(0, total.value, scale, room, line, STYLES[plan.fit.answer])
    rows.append(
        (Text("total", "bold"), bar, Text(unit.text(total.value), "bold"), Text(f"of {unit.text(plan.device_memory)}"))
    )
    figures = f"allocated {unit.text(memory.allocated)}, "
    # A CPU's allocator gives back what it does not need.
    if reserved.high > memory.allocated:
        figures += f"reserved {unit.text(reserved.value)} ({unit.text(reserved.low)} to {unit.text(reserved.high)}), "
    figures += f"total {unit.text(total.low)} to {unit.text(total.high)}"
    rest = [f"{each.ranks}: {bytes_text(each.total.value)}, most in {each.peak_phase}" for each in plan.memory[1:]]
    return _lines(
        title,
        table(rows, "llrl", indent=2, gap=1, first=_NAME - 1),
        table([(Text(text, "dim"),) for text in (figures, *rest)], "l", columns=columns, indent=2),
    )


def comparison_text(rows: Sequence[Plan | Refused], columns: int = 80) -> Text:
    """Several plans: a table, and below each row its memory by part against its device's line."""
    plans = [row for row in rows if isinstance(row, Plan)]
    scale = max((max(plan.memory[0].total.value, plan.device_memory) for plan in plans), default=1)
    unit = view.Unit.of(scale)
    heads = [unit.name, "a step", "tokens/s", "in all"]
    known = {head for plan in plans for head in view.comparison_figures(plan, unit)}
    heads += [head for head in ("costs", "cost/1M") if head in known][:1]
    divided = any(plan.sequence * plan.tensor * plan.expert * plan.pipeline > 1 for plan in plans)
    heads += ["bound by"] if divided else []
    cells: list[list[str | Text]] = [["", "fits", *heads]]
    labels, most = view.labels(rows), columns - (63 if divided else 53)
    for label, row in zip(labels, rows, strict=True):
        line: list[str | Text] = [label if len(label) <= most else ""]
        if isinstance(row, Refused):
            line.append(Text("refused", STYLES["no"]))
        else:
            figures = view.comparison_figures(row, unit)
            line += [Text(row.fit.answer, STYLES[row.fit.answer]), *(figures.get(head, "") for head in heads)]
        cells.append(line)
    head, *lines = table(cells, "ll" + "r" * len(heads)).split("\n")
    head.stylize("bold")
    blocks = [head]
    for label, row, figures_line in zip(labels, rows, lines, strict=True):
        if len(label) > most:
            blocks.append(Text(textwrap.fill(label, columns, subsequent_indent="  ", break_on_hyphens=False)))
        blocks.append(figures_line)
        if isinstance(row, Refused):
            blocks.append(table([(Text(brief(row.reason, 4), "dim"),)], "l", columns=columns, indent=2))
        else:
            blocks.append(Text("  ").append_text(_stack(row, scale, columns - 4)))
    used = {part for plan in plans for part in plan.memory[0].parts_at_peak()}
    if used:
        names = [f"{_LINE} the device's memory", *(f"{LETTERS[part][0]} {part}" for part in LETTERS if part in used)]
        # Lines break between entries, not inside one.
        key = textwrap.fill(", ".join(name.replace(" ", "\0") for name in names), columns)
        blocks.append(Text(key.replace("\0", " "), "dim"))
    return _lines(*blocks)


def _headline(plan: Plan, columns: int) -> Text:
    named = Text(f"{' '.join([plan.recipe, *plan.overrides])} on {plan.hardware}", "bold")
    verdict = Text(f"{view.ANSWERS[plan.fit.answer].upper()}:", STYLES[plan.fit.answer])
    return _lines(
        table([(named,)], "l", columns=columns),
        table([(verdict, view.fit_text(plan))], columns=columns, gap=1),
        table([(view.time_text(plan),)], "l", columns=columns),
        *([table([(Text(plan.lengths, "dim"),)], "l", columns=columns)] if plan.lengths else []),
    )


def _rows(title: str, rows: Sequence[tuple[str, str]], columns: int) -> Text:
    text = table(rows, columns=columns, indent=2, first=_NAME - 1)
    return _lines(Text(title, "bold"), text) if title and rows else text


def _phases(memory: Memory, columns: int) -> Text:
    phases, parts = view.phase_table(memory)
    unit = view.Unit.of(memory.allocated)
    narrow = columns < 80
    short = {"evaluation": "eval", "forward": "fwd", "backward": "bwd", "resume": "resum"} if narrow else {}
    rows = [[Text(), *(Text(short.get(phase, phase), "dim") for phase in phases)]]
    for part, amounts in parts.items():
        rows.append([Text(part), *(Text(unit.text(amount) if amount else "·") for amount in amounts)])
    for cell in (rows[-1][0], rows[-1][1 + phases.index(memory.peak_phase)]):
        cell.stylize("bold")
    align = "l" + "r" * len(phases)
    figures = table(rows, align, indent=2, gap=1 if narrow else 2, first=_NAME - 2)
    return _lines(Text(f"Allocated by phase, {unit.name}", "bold"), figures)


def _advice(plan: Plan, shown: Sequence[Advice], columns: int) -> Text:
    if not shown:
        return Text()
    unit = view.Unit.of(plan.device_memory)
    rows = []
    for advice in shown:
        kind = Text(advice.kind, "bold" if advice.kind in ("fastest", "cheapest") else "")
        changes = view.change_text(advice.changes) or "no change"
        figures = f"{view.ANSWERS[advice.fits]}, {view.advice_figures(advice, unit)}"
        apart = "  " if len(changes) + len(figures) + _NAME + 2 <= columns else "\n"
        trades = [(f"\n{trade}", "dim") for trade in view.trade_texts(advice)]
        rows.append((kind, Text.assemble((changes, "cyan"), apart, figures, *trades)))
    title = Text("What to change, at the same global batch", "bold")
    return _lines(title, table(rows, columns=columns, indent=2, first=_NAME - 4))


def _lines(*blocks: Text) -> Text:
    return Text("\n").join(blocks)


def _apart(*blocks: Text) -> Text:
    return Text("\n\n").join(block for block in blocks if block)


def _height(text: Text) -> int:
    return text.plain.count("\n") + 1


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
    for part, amount in plan.memory[0].parts_at_peak().items():
        total += amount
        letter, style = LETTERS[part]
        count = round(total / scale * room) - len(text.plain)
        text.append(letter * count, f"black on {style}")
    text.append(" " * (room + 1 - len(text.plain)))
    line = round(plan.device_memory / scale * room)
    stack = Text.assemble(text[:line], _LINE, text[line + 1 :])
    stack.rstrip()
    return stack
