"""The page a person looks at after a training, or during it: `report.html` in the run folder.

Made anew from the folder's files whenever it is asked for, so it can be written on another machine and after a crash.
A tracker shows the same curves, but not the plan, the data and the samples beside them, and not without its server.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from toolkit.common import (
    UserError,
    bytes_text,
    compact,
    count_text,
    duration,
    perplexity_of,
    perplexity_text,
    seconds_text,
)
from toolkit.data.auditing.audit import Audit, in_sentences
from toolkit.files import remove_partial, write_atomically
from toolkit.planner.plan import Plan, Range
from toolkit.recipe.files import read
from toolkit.recipe.load import load_resolved
from toolkit.report import page, plan_page, plan_view, run_view
from toolkit.report.charts import steps_text
from toolkit.report.class_tables import class_tables
from toolkit.report.evaluation import HEADS
from toolkit.report.load import Record, finite, number, read_run
from toolkit.report.manifest import Manifest, Measured
from toolkit.report.page import Tile
from toolkit.report.rewards import held_out
from toolkit.report.run_charts import charts_of, rate_text
from toolkit.report.scores import OF_MODELS, OF_TARGETS, of_tokens, score_text
from toolkit.report.serving import next_steps
from toolkit.report.teacher import NEARNESS, nearness, nearness_text


def write_report(run: Path, **values: Any) -> Path:
    """Writes `report.html` into a run folder, from whatever is there; an existing page is replaced at once.

    Args:
        values: What the manifest will say when the page is there.

    Raises:
        UserError: If there is no such folder.
    """
    if not run.is_dir():
        raise UserError(f"there is no run folder {run}", "give the path of a run folder, such as runs/NAME")
    record, path = read_run(run), run / "report.html"
    manifest = record.manifest = record.manifest.model_copy(update=values)
    content = read(run / "recipe.yaml").values if record.recipe else {}
    html = page.render(
        "run.html.j2",
        title=f"{record.name} · training report",
        record=record,
        subject=_subject(content),
        longest_answer=_longest_answer(content),
        lead=_lead(record),
        notices=_notices(record),
        tiles=_tiles(record),
        charts=charts_of(record),
        speed=run_view.speed_sentences(record),
        planned=_planned(manifest.plan, manifest.measured) if manifest.plan and manifest.measured else None,
        evaluated=list(record.asked.sections()),
        heads=HEADS[1:],
        classes=class_tables(record.result),
        audit=_audit(record.audit) if record.audit else None,
        steps=_steps(run),
        recipe=[_keyed(line) for line in record.recipe.splitlines()],
        environment=_environment(manifest),
    )
    write_atomically(path, html)
    # Of a run that is finished, no start removes what a report or an evaluation that was killed has left.
    remove_partial(run, alone=False)
    return path


def _steps(run: Path) -> list[tuple[str, str]]:
    """What to type next; empty where there is no trained model, or its recipe cannot be read."""
    with contextlib.suppress(UserError, OSError):
        return next_steps(run, load_resolved(run / "recipe.yaml")) if (run / "final").is_dir() else []
    return []


def percent_change(before: float, after: float) -> str:
    """Relative change as text, with a sign."""
    if not (math.isfinite(before) and math.isfinite(after)) or before == 0:
        return ""
    change = (after - before) / abs(before) * 100
    sign = "\N{MINUS SIGN}" if change < 0 else "+"
    return f"{sign}{abs(change):.1f}%"


def _lead(record: Record) -> list[str]:
    manifest = record.manifest
    steps = record.training[-1]["step"] if record.training else 0
    lead = [
        f"{steps:,} of {count_text(total, 'step')}" if (total := manifest.total_steps) else count_text(steps, "step")
    ]
    if tokens := finite(record.training, "tokens"):
        lead.append(f"{compact(tokens[-1])} tokens")
    if manifest.started:
        lead.append(f"started {_when(manifest.started)}")
    if manifest.finished:
        lead.append(f"ended {_when(manifest.finished)}")
    return lead


def _longest_answer(content: dict[str, Any]) -> float | None:
    """Tokens after which an answer of `Samples` is cut."""
    evaluation = content.get("evaluation")
    return number(evaluation.get("max_new_tokens")) if isinstance(evaluation, dict) else None


def _subject(content: dict[str, Any]) -> list[str]:
    """What was trained, on what and how: model, data, method and learning rate, as far as the recipe can be read."""
    model, data, method, optimizer = (
        part if isinstance(part := content.get(name), dict) else {} for name in ("model", "data", "method", "optimizer")
    )
    sources = data.get("sources")
    paths = (
        [each["path"] for each in sources if isinstance(each, dict) and "path" in each]
        if isinstance(sources, list)
        else []
    )
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    quantization = method.get("quantization", "none")
    how = f"{method.get('name', '')}{'' if quantization == 'none' else f' on {quantization}'}"
    rate = number(optimizer.get("learning_rate"))
    texts = (
        model.get("path"),
        f"{paths[0]}{more}" if paths else None,
        how,
        rate and f"learning rate {rate_text(rate)}",
    )
    return [str(text) for text in texts if text]


def _when(time: str) -> str:
    try:
        return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return time


def _stopped(run: Path) -> str:
    """What is known of a run that could not say itself how it ended."""
    files = (run / name for name in ("manifest.json", "metrics.jsonl"))
    written = max(file.stat().st_mtime for file in files if file.is_file())
    last = datetime.fromtimestamp(written, UTC).isoformat()
    return (
        f"No process trains in this folder any more: it was killed after its last sign of life, {_when(last)}, or this "
        "is a copy of one that trains elsewhere. With checkpoint.resume=auto, the default, the same command goes on "
        "from the newest checkpoint."
    )


def _notices(record: Record) -> list[str]:
    notices, error = list(record.problems), record.manifest.error
    if error and record.manifest.status == "failed":
        notices.insert(0, f"The run failed: {' — '.join(map(str.strip, error.splitlines()))}")
    if record.status == "stopped":
        notices.insert(0, _stopped(record.folder))
    if not record.manifest.model_fields_set:
        notices.append("This folder has no readable manifest.json: what ran here is not known.")
    for row in record.training:
        slow = row.get("stragglers")
        texts = (
            [run_view.straggler_text(each) for each in slow if isinstance(each, dict)] if isinstance(slow, list) else []
        )
        notices += [f"At step {row['step']:,}: {text}." for text in texts if text]
    for key, what in (("loss", "training loss"), ("grad_norm", "gradient norm")):
        values = [(row["step"], number(row.get(key))) for row in record.training]
        broken = {step for step, value in values if value is not None and not math.isfinite(value)}
        if broken:
            notices.append(f"The {what} was not finite at {steps_text(broken)}.")
    return notices


def _tiles(record: Record) -> list[Tile]:
    tiles = []
    result, chosen, since = record.result, record.manifest.published, record.change
    rows = [row for row in record.evaluations if row is record.evaluations[0] or row is result]
    losses = [(row["step"], loss) for row in rows if (loss := number(row["eval_loss"])) is not None]
    if losses and (rewards := [list(held_out(row)) for row in rows]) and rewards[-1]:
        for place, (name, value, margin) in enumerate(rewards[-1]):
            before = (f"from {rewards[0][place][1]:.3f}",) if len(rewards) > 1 else ()
            changed = (f"change {since.negative().text()}",) if since and not name else ()
            title = f"Held-out reward{name and f', {name}'}"
            notes = (*before, *changed, "95% interval")
            tiles.append(Tile(title, f"{value:.3f} ± {margin:.3f}", notes, main=not name))
    elif losses:
        (first_step, first), (last_step, last) = losses[0], losses[-1]
        text, steps = f"{last:.3f}", f"step {last_step:,}"
        accuracies = finite(rows, "eval_accuracy")
        perplexity = "" if not of_tokens(rows[-1]) else f"perplexity {perplexity_text(perplexity_of(last))}"
        change = percent_change(first, last) if len(losses) > 1 else ""
        if len(losses) > 1:
            text, steps = f"{first:.3f} → {text}", f"step {first_step:,} to {last_step:,}"
            both = (perplexity_text(perplexity_of(each)) for each in (first, last))
            perplexity = perplexity and f"perplexity {' → '.join(both)}"
        moved = f"change {since.text()}" if since else ""
        notes = tuple(filter(None, (steps, perplexity, moved, chosen.what if chosen else "")))
        better = last < first if first != last and (since is None or since.is_certain) else None
        tiles.append(Tile("Held-out loss", text, notes, change, better, main=True))
        if accuracies:
            before = (f"from {accuracies[0]:.1%}",) if len(accuracies) > 1 else ()
            what = record.accuracy_of.capitalize()
            tiles.append(Tile(what, f"{accuracies[-1]:.1%}", (*before, "of those held out")))
        tiles += _teacher_tiles(rows)
        for key, title in OF_TARGETS.items():
            if values := finite(rows, key):
                before = (f"from {values[0]:.4g}",) if len(values) > 1 else ()
                tiles.append(Tile(title[:1].upper() + title[1:], f"{values[-1]:.4g}", before))
        for key, title in OF_MODELS.items():
            if text := score_text(rows[-1], key):
                before = (f"from {score_text(rows[0], key)}",) if len(rows) > 1 else ()
                tiles.append(Tile(title[:1].upper() + title[1:], text, before))
    elif record.training:
        loss = number(record.training[-1]["loss"])
        text = "?" if loss is None else f"{loss:.3f}"
        tiles.append(Tile("Training loss", text, ("never evaluated on held-out rows",)))
    if record.tokens_per_second is not None:
        padding = finite(record.training, "padding")
        share = (f"{statistics.fmean(padding):.0%} of what is computed is padding",) if padding else ()
        notes = ("median of the steps", *share)
        tiles.append(Tile("Tokens per second", compact(record.tokens_per_second), notes))
    if (speed := record.speed) and speed.flops is not None and speed.mfu is not None:
        tiles.append(
            Tile("Utilisation", f"{speed.mfu:.1%}", ("of the dense peak", f"{plan_view.flops_text(speed.flops)}/s"))
        )
    if record.peak_memory:
        device, value = record.peak_memory
        tiles.append(Tile("Peak memory", bytes_text(value), (device,)))
    if record.train_seconds is not None:
        tiles.append(Tile("Duration", duration(record.train_seconds), ("training",)))
    counts = record.manifest.parameters
    if counts and counts.total:
        note = f"{compact(counts.trainable)} of {compact(counts.total)} parameters"
        shown = tuple(filter(None, (note, counts.shares)))
        tiles.append(Tile("Trained", f"{counts.trainable / counts.total * 100:.3g}%", shown))
    return tiles


def _teacher_tiles(rows: Sequence[dict[str, Any]]) -> list[Tile]:
    """How near to its teacher a student was at first and is at last, with 95% intervals."""
    first, last = nearness(rows[0]), nearness(rows[-1])
    return [
        Tile(
            NEARNESS[key][:1].upper() + NEARNESS[key][1:],
            nearness_text(key, *each),
            (*((f"from {nearness_text(key, *first[key])}",) if len(rows) > 1 and key in first else ()), "95% interval"),
        )
        for key, each in last.items()
    ]


def _planned(plan: Plan, measured: Measured) -> dict[str, Any] | None:
    """What the plan said before training against what was measured."""
    memory, work, whole = plan.memory[0], plan.work, plan.work.total_seconds
    # On a CPU the host's memory is that of the process, whose range is known.
    host = memory.total if "tensors" in plan.host.parts else None
    rows: tuple[tuple[str, float | None, Range | None, str, Callable[[float], str]], ...] = (
        ("memory allocated", memory.allocated, None, "allocated", bytes_text),
        ("memory reserved", memory.reserved.value, memory.reserved, "reserved", bytes_text),
        ("host RAM", plan.host.peak, host, "host", bytes_text),
        ("time of a step", work.step_seconds.value, work.step_seconds, "step_seconds", seconds_text),
        ("wait for a checkpoint", work.save_seconds, None, "save_seconds", seconds_text),
        ("time in all", whole.value if whole else None, whole, "total_seconds", duration),
        ("tokens", work.tokens, None, "tokens", compact),
        ("energy", work.energy_kwh, None, "energy_kwh", plan_view.energy_text),
    )
    lines = []
    for name, planned, expected, key, form in rows:
        value = getattr(measured, key)
        if value is None or not math.isfinite(value):
            continue
        between = f" ({form(expected.low)} to {form(expected.high)})" if expected else ""
        off = "" if planned is None else percent_change(value, planned) or "?"
        lines.append((name, "not planned" if planned is None else form(planned) + between, form(value), off))
    stacks = plan_page.stacks([(f"planned, at its peak in {memory.peak_phase}", plan)], amounts=True)
    return {"rows": lines, "stacks": stacks} if lines else None


def _audit(audit: Audit) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"fatal": [], "warning": []}
    for problem in audit.problems:
        texts[problem.level].append(f"{problem.what} — {problem.change}")
    lengths = audit.train.lengths
    return {
        "fatal": texts["fatal"],
        "warnings": texts["warning"],
        "sources": run_view.source_rows(audit),
        "sentences": [
            *in_sentences(audit),
            *(f"{each.path}: {text}" for each in audit.sources for text in each.unused()),
        ],
        "lengths": run_view.length_text(lengths, audit.train.longest),
        "bars": run_view.bars(lengths.histogram),
        "json": _json(audit),
    }


def _keyed(line: str) -> tuple[str, str, str]:
    """A line of YAML as indent, key and the rest; the key is empty where there is none."""
    match = re.match(r"(\s*(?:- )*)([\w.-]+)(?=:(?:\s|$))", line)
    return (match[1], match[2], line[match.end() :]) if match else ("", "", line)


def _environment(manifest: Manifest) -> dict[str, Any] | None:
    """Without what other sections of the page show."""
    keys = {"hardware", "versions", "batch", "effective", "hashes", "git"}
    if not keys & manifest.model_fields_set:
        return None
    sentences, versions = run_view.machine_sentences(manifest), sorted(manifest.versions.items())
    return {"sentences": sentences, "versions": versions, "json": _json(manifest, keys)}


def _json(model: BaseModel, keys: set[str] | None = None) -> str:
    return json.dumps(model.model_dump(mode="json", include=keys), indent=2, ensure_ascii=False)
