"""The page a person looks at after a training, or during it: `report.html` in the run folder."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Literal

from toolkit.common import UserError, byte_unit, bytes_text, compact, duration, perplexity_of, perplexity_text
from toolkit.planner.plan import Range
from toolkit.report import page, plan_page, plan_view
from toolkit.report.charts import Series, chart, smooth
from toolkit.report.load import Record, finite, number, read_run

FEWEST_TO_SMOOTH = 40
STATUSES = ("running", "interrupted", "finished", "failed")


def write_report(run: Path) -> Path:
    """Writes `report.html` into a run folder, from whatever is there; an existing page is replaced at once.

    Args:
        run: The run folder.

    Returns:
        Path of the page.

    Raises:
        UserError: If there is no such folder.
    """
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}", "give the path of a run folder, such as runs/NAME")
    record = read_run(run)
    parts = [_header(record), _charts(record), _planned(record), _samples(record), _audit(record), _recipe(record)]
    parts.append(_environment(record))
    body = "\n".join(part for part in parts if part)
    html = page.document(f"{record.name} · training report", body, plan_page.STYLE)
    path = run / "report.html"
    partial = run / f".report.{os.getpid()}.html"
    partial.write_text(html, encoding="utf-8")
    partial.replace(path)
    return path


def percent_change(before: float, after: float) -> str:
    """Relative change as text, with a sign."""
    if not (math.isfinite(before) and math.isfinite(after)) or before == 0:
        return ""
    change = (after - before) / abs(before) * 100
    sign = "\N{MINUS SIGN}" if change < 0 else "+"
    return f"{sign}{abs(change):.1f}%"


def _header(record: Record) -> str:
    manifest = record.manifest
    status = manifest.status or "unknown"
    css = status if status in STATUSES else "unknown"
    lead = []
    steps = record.training[-1]["step"] if record.training else 0
    lead.append(f"{steps:,} of {manifest.total_steps:,} steps" if manifest.total_steps else f"{steps:,} steps")
    tokens = finite(record.training, "tokens")
    if tokens:
        lead.append(f"{compact(tokens[-1])} tokens")
    if manifest.started:
        lead.append(f"started {_when(manifest.started)}")
    if manifest.finished:
        lead.append(f"ended {_when(manifest.finished)}")
    return (
        f'<header><div class="head"><h1>{escape(record.name)}</h1>'
        f'<span class="status {css}">{escape(status)}</span></div>'
        f'<p class="lead">{escape(" · ".join(lead))}</p>{_notices(record)}</header>'
        f'<dl class="tiles">{"".join(_tiles(record))}</dl>'
    )


def _when(time: str) -> str:
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return time


def _notices(record: Record) -> str:
    notices = list(record.problems)
    if not record.manifest.model_fields_set:
        notices.append("This folder has no readable manifest.json: what ran here is not known.")
    for key, what in (("loss", "training loss"), ("grad_norm", "gradient norm")):
        values = [(row["step"], number(row.get(key))) for row in record.training]
        broken = [step for step, value in values if value is not None and not math.isfinite(value)]
        if broken:
            notices.append(f"The {what} was not finite at {len(broken):,} steps, first at step {broken[0]:,}.")
    return page.notice(notices)


def _tiles(record: Record) -> list[str]:
    tiles = []
    evaluated = [(row["step"], number(row["eval_loss"])) for row in record.evaluations]
    losses = [(step, loss) for step, loss in evaluated if loss is not None]
    if losses:
        (first_step, first), (last_step, last) = losses[0], losses[-1]
        if len(losses) > 1:
            css = "good" if last < first else "bad"
            note = f'<span class="{css}">{percent_change(first, last)}</span> · step {first_step:,} to {last_step:,}'
            note += f"<br>perplexity {perplexity_text(perplexity_of(first))} → {perplexity_text(perplexity_of(last))}"
            tiles.append(_tile("Held-out loss", f"{first:.3f} → {last:.3f}", note, main=True))
        else:
            note = f"step {last_step:,}<br>perplexity {perplexity_text(perplexity_of(last))}"
            tiles.append(_tile("Held-out loss", f"{last:.3f}", note, main=True))
        tiles += _generation_tiles(record)
    elif record.training:
        loss = number(record.training[-1]["loss"])
        tiles.append(_tile("Training loss", "?" if loss is None else f"{loss:.3f}", "never evaluated on held-out rows"))
    if record.tokens_per_second is not None:
        tiles.append(_tile("Tokens per second", compact(record.tokens_per_second), "median of all steps"))
    if record.peak_memory:
        device, value = record.peak_memory
        tiles.append(_tile("Peak memory", bytes_text(value), device))
    if record.train_seconds is not None:
        tiles.append(_tile("Duration", duration(record.train_seconds), "training"))
    counts = record.manifest.parameters
    if counts and counts.total:
        note = f"{compact(counts.trainable)} of {compact(counts.total)} parameters"
        tiles.append(_tile("Trained", f"{counts.trainable / counts.total * 100:.3g}%", note))
    return tiles


def _generation_tiles(record: Record) -> list[str]:
    tiles = []
    for key, title in (("eval_bleu", "BLEU"), ("eval_chrf", "chrF"), ("eval_exact_match", "Exact match")):
        values = finite(record.evaluations, key)
        if values:
            tiles.append(_tile(title, f"{values[-1]:.4g}", f"from {values[0]:.4g}" if len(values) > 1 else ""))
    return tiles


def _tile(title: str, value: str, note: str = "", main: bool = False) -> str:
    """A headline figure; `note` is HTML made here from numbers."""
    css = "tile main" if main else "tile"
    return f'<div class="{css}"><dt>{escape(title)}</dt><dd>{escape(value)}<small>{note}</small></dd></div>'


def _charts(record: Record) -> str:
    rows = record.training
    held_out = _series(record.evaluations, "eval_loss", "held-out", "points")
    memory_key = "device_memory_bytes" if finite(rows, "device_memory_bytes") else "memory_bytes"
    unit, unit_name = byte_unit(max(finite(rows, memory_key), default=0.0))
    memory = _series(rows, memory_key, "memory", "line")
    memory = Series(memory.label, memory.x, [value / unit for value in memory.y])
    figures = [
        chart("Loss", [*_smoothed(rows, "loss"), held_out], height=260, form=lambda value: f"{value:.4g}"),
        chart("Learning rate", [_series(rows, "learning_rate", "", "line")], from_zero=True, form=_rate_text),
        chart(
            "Gradient norm before clipping", _smoothed(rows, "grad_norm"), from_zero=True, may_log=True, form=compact
        ),
        chart("Tokens per second", _smoothed(rows, "tokens_per_second"), from_zero=True, form=compact),
        chart(
            f"{'GPU' if memory_key.startswith('device') else 'Host'} memory, {unit_name}",
            [memory],
            from_zero=True,
            form=lambda value: f"{value:.3g}",
        ),
    ]
    return f'<section><h2>Training</h2><div class="charts">{"".join(figures)}</div></section>'


def _series(rows: Sequence[dict[str, Any]], key: str, label: str, style: Literal["line", "faint", "points"]) -> Series:
    points = [(float(row["step"]), value) for row in rows if (value := number(row.get(key))) is not None]
    return Series(label, [x for x, _ in points], [y for _, y in points], style)


def _smoothed(rows: Sequence[dict[str, Any]], key: str) -> list[Series]:
    """Every step faintly behind a smoothed line, or the steps alone when they are few."""
    raw = _series(rows, key, "each step", "faint")
    if len(raw.x) < FEWEST_TO_SMOOTH:
        return [Series("training", raw.x, raw.y)]
    return [raw, Series("smoothed", raw.x, smooth(raw.y))]


def _rate_text(value: float) -> str:
    """A learning rate as people write it: `2e-5`, `1.5e-4`, `0.02`."""
    if value == 0 or not 0 < abs(value) < 0.01:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def _planned(record: Record) -> str:
    """What the plan said before training against what was measured."""
    plan, measured = record.manifest.plan, record.manifest.measured
    if not plan or not measured:
        return ""
    memory, work, whole = plan.memory[0], plan.work, plan.work.total_seconds
    # On a CPU the host's memory is that of the process, whose range is known.
    host = memory.total if "tensors" in plan.host.parts else None
    rows: tuple[tuple[str, float | None, Range | None, str, Callable[[float], str]], ...] = (
        ("memory allocated", memory.allocated, None, "allocated", bytes_text),
        ("memory reserved", memory.reserved.value, memory.reserved, "reserved", bytes_text),
        ("host RAM", plan.host.peak, host, "host", bytes_text),
        ("time of a step", work.step_seconds.value, work.step_seconds, "step_seconds", plan_view.seconds_text),
        ("time in all", whole.value if whole else None, whole, "total_seconds", duration),
        ("tokens", work.tokens, None, "tokens", compact),
    )
    lines = []
    for name, planned, expected, key, form in rows:
        value = getattr(measured, key)
        if planned is None or value is None or not math.isfinite(value):
            continue
        between = f" ({form(expected.low)} to {form(expected.high)})" if expected else ""
        lines.append(
            f"<tr><th>{name}</th><td>{form(planned)}{between}</td><td>{form(value)}</td>"
            f"<td>{percent_change(value, planned) or '?'}</td></tr>"
        )
    bars = plan_page.stacks([(f"planned, at its peak in {memory.peak_phase}", plan)], amounts=True)
    heads = ("planned", "measured", "plan is off by")
    return f"<section><h2>Planned and measured</h2>{plan_page.figures(heads, lines)}{bars}</section>" if lines else ""


def _samples(record: Record) -> str:
    blocks = []
    for sample in record.samples:
        answers = ""
        for key, title in (("before", "Before training"), ("after", "After training"), ("reference", "Reference")):
            if (text := getattr(sample, key)) is not None:
                answers += f'<div class="{key}"><h3>{title}</h3>{_text(text)}</div>'
        prompt = f"<h3>Prompt</h3>{_text(sample.prompt)}"
        blocks.append(f'<article class="card sample">{prompt}<div class="answers">{answers}</div></article>')
    return f"<section><h2>Samples</h2>{''.join(blocks)}</section>" if blocks else ""


def _text(text: str) -> str:
    text = text.strip()
    return f'<p class="text">{escape(text)}</p>' if text else '<p class="text"><em>(empty)</em></p>'


def _audit(record: Record) -> str:
    if not record.audit:
        return ""
    audit = record.audit.model_dump(mode="json")
    problems = audit.pop("problems")
    levels = {level: [problem for problem in problems if problem["level"] == level] for level in ("fatal", "warning")}
    notice = page.notice(levels["fatal"]) + page.notice(levels["warning"], mild=True)
    return f'<section><h2>Data audit</h2>{notice}<div class="columns">{page.cards(audit)}</div></section>'


def _recipe(record: Record) -> str:
    parts = []
    if command := record.manifest.command:
        parts.append(f'<h2>Run it again</h2><pre class="wrap">{escape(command)}</pre>')
    if record.recipe:
        keyed = re.sub(r"(?m)^(\s*(?:- )*)([\w.-]+)(?=:(?:\s|$))", r"\1<b>\2</b>", escape(record.recipe))
        parts.append(f"<h2>Recipe</h2><details><summary>recipe.yaml</summary><pre>{keyed}</pre></details>")
    return f"<section>{''.join(parts)}</section>" if parts else ""


def _environment(record: Record) -> str:
    keys = ("hardware", "versions", "batch", "effective", "hashes")
    manifest = record.manifest.model_dump(mode="json")
    values: dict[str, Any] = {key: section for key in keys if (section := manifest.get(key))}
    if git := record.manifest.git:
        values["code"] = {"git_commit": git.commit, "changed_since": git.dirty}
    if not values:
        return ""
    cards = "".join(page.cards(section, page.title(key)) for key, section in values.items())
    return f'<section><h2>Environment</h2><div class="columns">{cards}</div></section>'
