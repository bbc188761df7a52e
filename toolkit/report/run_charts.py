"""The charts of a run in its report: how loss, rate, gradients, speed and memory went, and what its objective adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.common import byte_unit, compact
from toolkit.report.charts import Series, Style, chart, smooth
from toolkit.report.load import Record, finite, number
from toolkit.report.teacher import NEARNESS

FEWEST_TO_SMOOTH = 40
_LOADS = {
    "expert_load": "layers, on average",
    "expert_load_worst": "the worst layer",
    "process_load": "of processes that divide experts",
}
"""Keys of metrics, and what they are the load of."""


def charts_of(record: Record) -> list[dict[str, Any]]:
    """Those of a run, as far as it has come."""
    rows = record.training
    held_out = series(record.evaluations, "eval_loss", "held-out", "points")
    memory_key = "device_memory_bytes" if finite(rows, "device_memory_bytes") else "memory_bytes"
    unit, unit_name = byte_unit(max(finite(rows, memory_key), default=0.0))
    loads = [series(rows, key, label, "line") for key, label in _LOADS.items()]
    experts = [loads] if any(each.x for each in loads) else []
    return [
        chart("Loss", [*_smoothed(rows, "loss"), held_out], height=260, form=lambda value: f"{value:.4g}"),
        *_charts_of_answers(record),
        chart("Learning rate", [series(rows, "learning_rate", "", "line")], from_zero=True, form=rate_text),
        chart(
            "Gradient norm before clipping", _smoothed(rows, "grad_norm"), from_zero=True, may_log=True, form=compact
        ),
        chart("Tokens per second", _smoothed(rows, "tokens_per_second"), from_zero=True, form=compact),
        chart(
            f"{'GPU' if memory_key.startswith('device') else 'Host'} memory, {unit_name}",
            [series(rows, memory_key, "memory", "line", unit)],
            from_zero=True,
            form=lambda value: f"{value:.3g}",
        ),
        *[chart("Load of the fullest expert, in means", each, form=lambda value: f"{value:.3g}") for each in experts],
    ]


def _charts_of_answers(record: Record) -> list[dict[str, Any]]:
    """How often the right answer is preferred, and what both kinds are worth; or how often the right class is told."""
    rows = record.training
    if finite(rows, "no_spread"):
        return _charts_of_rewards(record)
    if finite(rows, "agreement"):
        return _charts_of_teachers(record)
    if not finite(rows, "accuracy"):
        return []
    accuracy = [*_smoothed(rows, "accuracy"), series(record.evaluations, "eval_accuracy", "held-out", "points")]
    if not finite(rows, "reward_margin"):
        return [chart("Share of " + record.accuracy_of, accuracy, form=lambda value: f"{value:.3g}")]
    rewards = [series(rows, f"reward_{name}", name, "line") for name in ("chosen", "rejected", "margin")]
    return [
        chart("Share of " + record.accuracy_of, accuracy, form=lambda value: f"{value:.3g}"),
        chart("Rewards of answers", rewards, form=lambda value: f"{value:.3g}"),
    ]


def _charts_of_teachers(record: Record) -> list[dict[str, Any]]:
    """How near a student comes to its teacher."""
    rows, evaluations = record.training, record.evaluations
    titles = {
        "kl": NEARNESS["eval_kl"],
        "agreement": "Share of same next tokens",
        "cross_entropy": "Loss of the labels",
    }
    return [
        chart(title, [*_smoothed(rows, key), series(evaluations, f"eval_{key}", "held-out", "points")], form=_short)
        for key, title in titles.items()
    ]


def _short(value: float) -> str:
    return f"{value:.3g}"


def _charts_of_rewards(record: Record) -> list[dict[str, Any]]:
    """Charts of rewards: the total and its parts, how much answers to a prompt differ, and how long they are."""
    rows, evaluations = record.training, record.evaluations
    names = [key for key in rows[-1] if key.startswith("reward_") and f"{key}_std" in rows[-1]]
    parts = [series(rows, key, key.removeprefix("reward_"), "line") for key in names] if len(names) > 1 else []
    spread = [series(rows, "reward_std", "standard deviation", "line")]
    shares = [("no_spread", "prompts without spread"), ("cut", "answers cut"), ("clipped", "tokens clipped")]
    form = _short
    return [
        chart(
            "Reward", [*_smoothed(rows, "reward"), series(evaluations, "eval_reward", "held-out", "points")], form=form
        ),
        *([chart("Rewards by part", parts, form=form)] if parts else []),
        chart("Reward among answers to a prompt", spread, from_zero=True, form=form),
        chart("Shares", [series(rows, key, name, "line") for key, name in shares], from_zero=True, form=form),
        chart("Tokens of an answer", _smoothed(rows, "answer_tokens"), from_zero=True, form=compact),
        *([chart("Divergence from the reference", _smoothed(rows, "kl"), form=form)] if finite(rows, "kl") else []),
    ]


def series(rows: Sequence[dict[str, Any]], key: str, label: str, style: Style, unit: float = 1.0) -> Series:
    """One metric of a run over its steps, in units of `unit`; rows that have no number for it are left out."""
    points = [(float(row["step"]), value / unit) for row in rows if (value := number(row.get(key))) is not None]
    return Series(label, [x for x, _ in points], [y for _, y in points], style)


def _smoothed(rows: Sequence[dict[str, Any]], key: str) -> list[Series]:
    """Every step faintly behind a smoothed line, or the steps alone when they are few."""
    raw = series(rows, key, "each step", "faint")
    if len(raw.x) < FEWEST_TO_SMOOTH:
        return [Series("training", raw.x, raw.y)]
    return [raw, Series("smoothed", raw.x, smooth(raw.y))]


def rate_text(value: float) -> str:
    """A learning rate as people write it: `2e-5`, `1.5e-4`, `0.02`."""
    if value == 0 or not 0 < abs(value) < 0.01:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
