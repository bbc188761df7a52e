"""Several runs side by side: what was different about them, and what came out.

What is the same in all of them is left out. Everything is read from the run folders, so that runs of other machines and
runs that are still going on can be compared as well.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from toolkit.common import bytes_text, compact, duration, perplexity_of, perplexity_text, seconds_text, table
from toolkit.recipe.dotted import inline, parts, short_names
from toolkit.recipe.files import read
from toolkit.report import page, plan_view
from toolkit.report.charts import Series, chart, smooth
from toolkit.report.coordinates import Dimension, coordinates
from toolkit.report.evaluation import Score
from toolkit.report.leading import Leading, held_out_tokens, leading, same_rows
from toolkit.report.load import Record, finite, number, read_run
from toolkit.report.manifest import Manifest
from toolkit.report.run_charts import series
from toolkit.report.scores import OF_MODELS, OF_TARGETS, of_tokens
from toolkit.report.teacher import NEARNESS

MISSING = "\N{EN DASH}"
ABOVE, INTERVAL = "above the lowest", "95% interval"
"""How far a held-out loss is above the lowest, of the same rows; and half the width of that figure's interval."""
_OF_MANY = ("status", "held-out loss", ABOVE, "training loss", "tokens/s")
"""What many runs are told by."""
_OF_THE_RUN = ("output.", "description")
"""Keys of a recipe that change nothing of what is trained."""
_ABREAST = 4
"""Most runs that a terminal shows in columns; more are shown in rows, the best first."""
_FEW_LINES = 2
"""Up to so many runs the tables say more than a line for each across the axes of its settings."""
_DIGITS = 12
"""So much of a hash is shown."""


@dataclass(frozen=True)
class Row:
    """One thing of all runs, as texts.

    Args:
        best: Which runs did best, where that can be said.
    """

    name: str
    texts: tuple[str, ...]
    best: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Runs, in the order in which they were named.

    Args:
        records: Of each run.
        names: Names of the runs, no two alike.
        differences: What they were started with, by kind: only what is not the same in all.
        results: What came out.
        notices: What has to be known to compare them.
    """

    records: tuple[Record, ...]
    names: tuple[str, ...]
    differences: dict[str, list[Row]]
    results: list[Row]
    notices: list[str] = field(default_factory=list)


def compare(runs: Sequence[Path]) -> Comparison:
    """Reads run folders and finds what is different; never raises for what is in them."""
    records = tuple(map(read_run, runs))
    manifests, names = [record.manifest for record in records], _names(runs, records)
    order = leading(records, list(map(_last_loss, records)), len(held_out_tokens(records)) < 2)
    differences = {
        "recipe": _different([_recipe_values(record) for record in records], inline),
        "data and model": _different([_inputs(record) for record in records]),
        "versions": _different([each.versions for each in manifests]),
        "machine": _different([_machine(each) for each in manifests]),
        # Without the reasons, whose figures are measured anew for each run.
        "chosen by auto": _different([{k: v.partition(": ")[0] for k, v in each.chosen.items()} for each in manifests]),
    }
    return Comparison(
        records,
        names,
        {kind: rows for kind, rows in differences.items() if rows},
        _results(records, order),
        _notices(records, order, names),
    )


def comparison_text(compared: Comparison, columns: int = 80) -> Text:
    """For a terminal of so many columns: few runs side by side, many in rows, the best first."""
    names, blocks = compared.names, list[Text]()
    few = len(names) <= _ABREAST
    if (sum(map(len, names)) if few else max(map(len, names))) > columns // (2 if few else 3):
        names = tuple(str(at) for at in range(1, len(names) + 1))
        blocks.append(table(zip(names, compared.names, strict=True), columns=columns))
    if not few:
        blocks.append(_in_rows(compared, names, columns))
    else:
        titled = [*compared.differences.items(), ("results", compared.results)]
        blocks += [_abreast(title, names, rows, columns) for title, rows in titled]
    if not compared.differences:
        blocks.insert(0, Text("Nothing of what they were started with is different."))
    blocks += [table([(Text(text, "yellow"),)], "l", columns=columns) for text in compared.notices]
    return Text("\n\n").join(blocks)


def comparison_page(compared: Comparison) -> str:
    """The comparison as an HTML page, with the curves of all runs over each other."""
    records, names = compared.records, compared.names

    def curves(key: str, evaluations: bool = False) -> list[Series]:
        if evaluations:
            lines = [series(each.evaluations, key, name, "points") for name, each in zip(names, records, strict=True)]
        else:
            lines = [series(each.training, key, name, "line") for name, each in zip(names, records, strict=True)]
            lines = [replace(line, y=smooth(line.y)) for line in lines]
        return [replace(line, number=at) for at, line in enumerate(lines, start=1)]

    return page.render(
        "comparison.html.j2",
        title=" · ".join(names),
        heading=f"{len(names)} runs compared",
        compared=compared,
        figure=_figure(compared) if len(names) > _FEW_LINES else None,
        charts=[
            chart("Held-out loss", curves("eval_loss", True), height=260, form=lambda value: f"{value:.4g}"),
            chart("Training loss", curves("loss"), form=lambda value: f"{value:.4g}"),
            chart("Tokens per second", curves("tokens_per_second"), from_zero=True, form=compact),
        ],
    )


def _figure(compared: Comparison) -> dict[str, Any] | None:
    """Settings that differ beside what came out; None where no setting does."""
    records = compared.records
    values = [_recipe_values(record) for record in records]
    keys = [row.name for row in compared.differences.get("recipe", [])]
    own = [
        Dimension(name, [_plain(each.get(key)) for each in values])
        for key, name in zip(keys, short_names(keys), strict=True)
    ]
    came_out = [
        Dimension("held-out loss", [_last_loss(record) for record in records], _loss),
        Dimension("training loss", [_newest(record, "loss") for record in records], _loss),
        Dimension("tokens/s", [_or_nan(record.tokens_per_second) for record in records], compact, True),
    ]
    results = [each for each in came_out if len(set(filter(math.isfinite, each.values))) > 1]  # type: ignore[arg-type]
    if not own or not results:
        return None
    return coordinates("A line for each run", compared.names, own, results)


def _plain(value: Any) -> float | str | None:
    return value if value is None or isinstance(value, int | float) else inline(value)


def _abreast(title: str, names: Sequence[str], rows: Sequence[Row], columns: int) -> Text:
    """A column for each run; where they do not fit, a line for each run below each row's name."""
    cells: list[list[str | Text]] = [["", *names]]
    cells += [[row.name, *_marked(row)] for row in rows]
    head, *lines = table(cells, "l" + "r" * len(names)).split("\n")
    head.stylize("dim")
    lines.insert(0, head)
    if max(map(len, lines)) > columns:
        lines = []
        for row in rows:
            pairs = zip(names, _marked(row), strict=True)
            lines += [Text(row.name), *table(pairs, columns=columns, indent=2).split("\n")]
    return Text("\n").join([Text(title[:1].upper() + title[1:], "bold"), *lines])


def _marked(row: Row) -> list[str | Text]:
    return [Text(text, "bold green") if at in row.best else text for at, text in enumerate(row.texts)]


def _in_rows(compared: Comparison, names: Sequence[str], columns: int) -> Text:
    """A row for each run: its result and as much of what is different in the recipes as fits."""
    rows = {row.name: row for row in compared.results}
    if ABOVE in rows:
        both = zip(rows[ABOVE].texts, rows[INTERVAL].texts, strict=True)
        rows[ABOVE] = Row(ABOVE, tuple(" ".join(dict.fromkeys(texts)) for texts in both))
    order = sorted(range(len(names)), key=lambda at: (_last_loss(compared.records[at]), at))
    own = compared.differences.get("recipe", [])
    # The loss in training says less than all else.
    left_out = [(), ("training loss",)][: 1 + (ABOVE in rows)]
    for without, count in itertools.product(left_out, range(len(own), -1, -1)):
        shown = [*own[:count], *(rows[name] for name in _OF_MANY if name in rows and name not in without)]
        heads: list[str | Text] = ["", *short_names([row.name for row in shown])]
        texts = [_marked(row) for row in shown]
        cells = [heads, *([names[at], *(column[at] for column in texts)] for at in order)]
        found = table(cells, "l" + "r" * len(shown))
        if max(map(len, found.split("\n"))) <= columns:
            break
    lines = found.split("\n")
    lines[0].stylize("bold")
    others = sum(map(len, compared.differences.values())) - count
    if others:
        lines.append(Text(f"not shown: {others:,} of the differences (--html FILE has all)", "dim"))
    if "held-out loss" not in rows:
        lines.append(Text("None of them was evaluated on held-out rows.", "dim"))
    return Text("\n").join(lines)


def _different(values: Sequence[Mapping[str, Any]], form: Callable[[Any], str] = str) -> list[Row]:
    """A row for each key whose values are not all the same."""
    keys = dict.fromkeys(itertools.chain.from_iterable(values))
    rows = [Row(key, tuple(form(each[key]) if key in each else MISSING for each in values)) for key in keys]
    return [row for row in rows if len(set(row.texts)) > 1]


def _recipe_values(record: Record) -> dict[str, Any]:
    """Values of the resolved recipe by dotted key, none of which has others within; an empty list has none at all."""
    content = read(record.folder / "recipe.yaml").values if record.recipe else {}
    return {
        key: value
        for key, value in parts(content)
        if not isinstance(value, dict | list) and not key.startswith(_OF_THE_RUN)
    }


def _inputs(record: Record) -> dict[str, str]:
    hashes = {kind: record.manifest.hashes[kind][:_DIGITS] for kind in record.manifest.hashes if kind != "recipe"}
    if record.audit:
        hashes["rows trained on"] = f"{record.audit.train.rows:,}"
        hashes["tokens trained on"] = f"{record.audit.train.tokens:,}"
    return hashes


def _machine(manifest: Manifest) -> dict[str, str]:
    values = {}
    if hardware := manifest.hardware:
        values = {"device": hardware.device, "CPU": hardware.cpu}
        if hardware.gpus:
            values["GPUs"] = f"{len(hardware.gpus)} x {hardware.gpus[0].name}"
    if manifest.batch:
        values["processes"] = f"{manifest.batch.world_size:,}"
    if manifest.git:
        values["commit"] = manifest.git.commit[:_DIGITS] + ", changed since" * manifest.git.dirty
    return values


def _results(records: Sequence[Record], order: Leading) -> list[Row]:
    """What came out, as far as at least one run has it."""
    losses = [_last_loss(record) for record in records]
    above, intervals = order.texts(MISSING)
    highest = max if len(_objectives(records)) < 2 and same_rows(records, order) else None
    of_labels = _figures("perplexity", _of_labels(records, losses), lambda loss: perplexity_text(perplexity_of(loss)))
    of_labels = replace(of_labels, best=tuple(at for at in order.best if of_labels.texts[at] != MISSING))
    rows = [
        Row("status", tuple(record.status for record in records)),
        _figures("steps", [_newest(record, "step") for record in records], lambda value: f"{value:,.0f}"),
        _figures("tokens", [_newest(record, "tokens") for record in records], compact),
        _figures("held-out loss before", [_first_loss(record) for record in records], _loss),
        replace(_figures("held-out loss", losses, _loss), best=order.best),
        Row(ABOVE, above),
        Row(INTERVAL, intervals),
        of_labels,
        *(_figures(name, found, lambda value: f"{value:.4g}", highest) for name, found in _scores(records)),
        *_asked(records),
        _figures("training loss", [_newest(record, "loss") for record in records], _loss),
        _figures("tokens/s", [_or_nan(record.tokens_per_second) for record in records], compact, max),
        _figures(
            "time of a step",
            [_or_nan(record.speed.median if record.speed else None) for record in records],
            seconds_text,
        ),
        _figures("time", [_or_nan(record.train_seconds) for record in records], duration),
        _figures(
            "peak memory",
            [record.peak_memory[1] if record.peak_memory else math.nan for record in records],
            bytes_text,
            min,
        ),
        _figures("energy", [_energy(record) for record in records], plan_view.energy_text),
    ]
    return [row for row in rows if set(row.texts) != {MISSING}]


def _of_labels(records: Sequence[Record], losses: Sequence[float]) -> list[float]:
    """Those of the losses that are of labels, token by token."""
    alike = [of_tokens(record.result or {}) for record in records]
    return [loss if of_labels else math.nan for loss, of_labels in zip(losses, alike, strict=True)]


def _figures(
    name: str,
    values: Sequence[float],
    form: Callable[[float], str],
    best: Callable[[Sequence[float]], float] | None = None,
) -> Row:
    """A row of figures, of which those that are not known, or no numbers, are left out."""
    known = [value for value in values if math.isfinite(value)]
    leading = best(known) if best and len(set(known)) > 1 else None
    return Row(
        name,
        tuple(form(value) if math.isfinite(value) else MISSING for value in values),
        tuple(at for at, value in enumerate(values) if value == leading),
    )


def _scores(records: Sequence[Record]) -> list[tuple[str, list[float]]]:
    """What evaluations measured beside the loss, all of which is better the higher it is."""
    names = {**OF_TARGETS, "eval_accuracy": "accuracy", **OF_MODELS, "eval_agreement": NEARNESS["eval_agreement"]}
    results = [record.result or {} for record in records]
    return [(name, [_or_nan(number(each.get(key))) for each in results]) for key, name in names.items()]


def _asked(records: Sequence[Record]) -> list[Row]:
    """What `toolkit evaluate` found. The best is marked where all were asked the same, and where its interval holds no
    other's figure."""
    found: list[dict[str, tuple[Score, str]]] = []
    for record in records:
        held_out, tasks = record.asked.held_out, record.asked.tasks
        own = {f"answers: {each.name}": (each, held_out.question) for each in held_out.scores} if held_out else {}
        own |= {f"{task.name}: {each.name}": (each, task.question) for task in tasks for each in task.scores}
        found.append(own)
    rows = []
    for name in dict.fromkeys(itertools.chain.from_iterable(found)):
        cells = [each.get(name) for each in found]
        known = [cell for cell in cells if cell]
        best: tuple[int, ...] = ()
        if len(known) > 1 and len({question for _, question in known}) == 1:
            sign = 1 if known[0][0].higher_is_better else -1
            leading = max(known, key=lambda cell: sign * cell[0].after.value)[0]
            if not any(leading.after.holds(score.after.value) for score, _ in known if score is not leading):
                best = tuple(at for at, cell in enumerate(cells) if cell and cell[0] is leading)
        rows.append(Row(name, tuple(cell[0].after.text() if cell else MISSING for cell in cells), best))
    return rows


def _notices(records: Sequence[Record], order: Leading, names: Sequence[str]) -> list[str]:
    """Why losses may not be compared, and which cannot be told from each other."""
    notices = [f"{record.folder}: {problem}" for record in records for problem in record.problems]
    tokens = held_out_tokens(records)
    if len(tokens) > 1:
        counts = ", ".join(f"{count:,.0f}" for count in sorted(tokens))
        notices.append(f"Held-out losses are not of the same tokens ({counts}): which is lower says little.")
    if len(_objectives(records)) > 1:
        notices.append("The runs have different objectives, whose losses cannot be compared.")
    elif order.unlike:
        notices.append("Held-out losses are not of the same rows, or not made in the same way: none is marked as best.")
    return [*notices, *filter(None, [order.sentence(names)])]


def _objectives(records: Sequence[Record]) -> set[Any]:
    return {_recipe_values(record).get("objective") for record in records if record.recipe}


def _names(runs: Sequence[Path], records: Sequence[Record]) -> tuple[str, ...]:
    """The runs' names, those of their folders where two have the same, as in a sweep, or else their paths; numbered
    where one was named twice."""
    kinds = [record.name for record in records], [run.resolve().name for run in runs], [str(run) for run in runs]
    names = next((each for each in kinds if len(set(each)) == len(each)), kinds[-1])
    return tuple(f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, start=1))


def _last_loss(record: Record) -> float:
    value = number(record.result["eval_loss"]) if record.result else None
    return math.inf if value is None or not math.isfinite(value) else value


def _first_loss(record: Record) -> float:
    """Before training; NaN for a run that was not evaluated then."""
    row = next((row for row in record.evaluations if row["step"] == 0), {})
    return _or_nan(number(row.get("eval_loss")))


def _newest(record: Record, key: str) -> float:
    """The newest value; for a loss the mean of the last twentieth of all steps, as one batch says little."""
    values = finite(record.training, key)
    if key == "loss" and values:
        return statistics.fmean(values[-max(1, len(values) // 20) :])
    return values[-1] if values else math.nan


def _energy(record: Record) -> float:
    return _or_nan(record.manifest.measured.energy_kwh if record.manifest.measured else None)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _loss(value: float) -> str:
    return f"{value:.4f}"
