"""What the data is, in figures, before anything is trained on it; and which of those figures forbid training."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UserError

Audit = dict[str, Any]
Figures = dict[str, NDArray[Any]]
"""Columns by name, one entry per row: length, over_long, tokens, trained, stops, merged, pieces (all after over-long
rows were handled, but for length and over_long)."""

MIN_UNTRAINED_FATAL = 0.5


def measure(figures: Figures, seq_len: int, over_long: str) -> Audit:
    """Figures of one side (train or eval), over all rows with their repeats.

    Args:
        figures: One entry per row.
        seq_len: Longest row in tokens.
        over_long: What happened to longer rows.
    """
    length, trained, tokens = figures["length"], figures["trained"], figures["tokens"]
    used = trained > 0
    return {
        "rows": int(used.sum()),
        "tokens": int(tokens[used].sum()),
        "trained_tokens": int(trained.sum()),
        "untrained_rows": int((~used & ~(figures["over_long"] & (over_long == "drop"))).sum()),
        "over_long": {"rows": int(figures["over_long"].sum()), "action": over_long, "seq_len": seq_len},
        "stop_trained_rows": int((figures["stops"] & used).sum()),
        "boundary_merged_rows": int((figures["merged"] & used).sum()),
        "lengths": _lengths(length),
    }


def _lengths(length: NDArray[np.int64]) -> Audit:
    if not len(length):
        return {"percentiles": {}, "histogram": []}
    percentiles = np.percentile(length, [0, 10, 50, 90, 99, 100], method="nearest").astype(int).tolist()
    edges = [0, *(2**power for power in range(4, 64) if 2 ** (power - 1) <= length.max())]
    counts, _ = np.histogram(length, edges)
    buckets = [
        {"from": low, "to": high - 1, "rows": int(count)}
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    while buckets and not buckets[0]["rows"]:
        buckets.pop(0)
    names = ("min", "p10", "p50", "p90", "p99", "max")
    return {"percentiles": dict(zip(names, percentiles, strict=True)), "histogram": buckets}


def find_problems(audit: Audit) -> list[dict[str, str]]:
    """What is wrong with this data: `level` (fatal or warning), `what`, and what to `change`."""
    found: list[dict[str, str]] = []

    def add(level: str, what: str, change: str) -> None:
        found.append({"level": level, "what": what, "change": change})

    train, held_out = audit["train"], audit["eval"]
    empty = sum(source["empty_rows"] for source in audit["sources"] if source["role"] == "train")
    untrained = empty + train["untrained_rows"]
    seen = train["rows"] + untrained
    action = train["over_long"]["action"]
    if not train["rows"]:
        add(
            "fatal",
            f"no usable row: {untrained:,} rows have no trained token, {train['over_long']['rows']:,} are longer than "
            f"`batch.seq_len: {train['over_long']['seq_len']}` (`data.over_long: {action}`)",
            "check `data.columns`, `data.format` and `data.train_on`, or raise `batch.seq_len`",
        )
    elif untrained > MIN_UNTRAINED_FATAL * seen:
        add(
            "fatal",
            f"{untrained:,} of {seen:,} rows have no trained token (no answer, or it was cut off)",
            "check `data.columns`, `data.format` and `data.train_on`, or raise `batch.seq_len`",
        )
    elif untrained:
        add("warning", f"{untrained:,} of {seen:,} rows have no trained token and are left out", "fill or remove them")
    if audit["objective"] == "sft" and train["rows"] and not train["stop_trained_rows"]:
        add(
            "fatal",
            "the stop token is trained in no row, so the model would not learn to stop",
            "choose a `model.chat_template` that ends a turn with the model's stop token"
            + (", or raise `batch.seq_len` so that ends are not cut off" if action == "truncate" else ""),
        )
    elif audit["objective"] == "sft" and train["stop_trained_rows"] < 0.9 * train["rows"]:
        add(
            "warning",
            f"the stop token is trained in only {train['stop_trained_rows']:,} of {train['rows']:,} rows",
            "raise `batch.seq_len` or set `data.over_long: drop` if ends are cut off",
        )
    if train["over_long"]["rows"] and action in ("drop", "truncate"):
        done = {"drop": "dropped", "truncate": "cut"}[action]
        add(
            "warning",
            f"{train['over_long']['rows']:,} training rows are longer than {train['over_long']['seq_len']} tokens and "
            f"were {done}",
            f"raise `batch.seq_len` (the longest has {train['lengths']['percentiles']['max']:,}) to keep them whole",
        )
    if audit["duplicates"] and not audit["deduplicate"]:
        add("warning", f"{audit['duplicates']:,} rows repeat an earlier row", "set `data.deduplicate: true`")
    if audit["in_train_and_eval"]:
        add(
            "warning",
            f"{audit['in_train_and_eval']:,} held-out rows are also trained on, so the held-out loss is too low",
            "remove them from one side, or hold a fraction out with `data.eval_split: 0.05`",
        )
    if train["boundary_merged_rows"]:
        add(
            "warning",
            f"in {train['boundary_merged_rows']:,} rows one token holds the end of the prompt and the start of the "
            "answer",
            "end prompts with a line break, or start completions with a space",
        )
    if held_out is not None and not held_out["rows"]:
        add("fatal", "no usable held-out row", "check `data.eval_split`, `data.eval_sources` and `batch.seq_len`")
    return found


def check(problems: list[dict[str, str]]) -> None:
    """Raises a UserError with all fatal problems, if there are any."""
    fatal = [problem for problem in problems if problem["level"] == "fatal"]
    if fatal:
        raise UserError(
            "the data cannot be trained on: " + "; ".join(problem["what"] for problem in fatal),
            "; ".join(problem["change"] for problem in fatal),
        )


def check_batch(audit: Audit, global_batch_size: int) -> Audit:
    """The audit with a warning if all training rows together are fewer than one global batch."""
    rows = (audit["packing"] or audit["train"])["rows"]
    if audit["scope"] or rows >= global_batch_size:
        return audit
    problem = {
        "level": "warning",
        "what": f"{rows:,} training {'sequences' if audit['packing'] else 'rows'} do not fill one global batch of "
        f"{global_batch_size:,}",
        "change": "lower `batch.global_batch_size`" + (", or set `data.packing: false`" if audit["packing"] else ""),
    }
    return audit | {"problems": [*audit["problems"], problem]}


def render(audit: Audit) -> str:
    """The audit as plain text, at most 100 columns wide."""
    lines = [f"{'data':<44} {'format':<17} {'read':>9} {'used':>9} {'repeats':>7} {'share':>7}"]
    for source in audit["sources"]:
        name = source["path"] if source["split"] == "train" else f"{source['path']} [{source['split']}]"
        name = name if len(name) <= 44 else f"…{name[-43:]}"
        share = f"{source['share']:>7.1%}" if source["role"] == "train" else "held out"
        lines.append(
            f"{name:<44} {source['format']:<17} {source['rows']:>9,} {source['used_rows']:>9,} "
            f"{source['repeats']:>7.2f} {share}"
        )
        if source["unused_columns"]:
            lines += _wrap("  unused columns: " + ", ".join(source["unused_columns"]))
    lines.append("")
    for role in ("train", "eval"):
        if (part := audit[role]) is not None:
            trained_share = part["trained_tokens"] / max(part["tokens"], 1)
            lines.append(
                f"{role:<6} {part['rows']:,} rows, {part['tokens']:,} tokens, "
                f"{part['trained_tokens']:,} trained ({trained_share:.1%})"
            )
    lines += _details(audit)
    lines += ["", f"{'tokens per row':<18} {'rows':>9}"]
    histogram = audit["train"]["lengths"]["histogram"]
    most = max((bucket["rows"] for bucket in histogram), default=1) or 1
    for bucket in histogram:
        bar = "█" * round(50 * bucket["rows"] / most) or ("▏" if bucket["rows"] else "")
        span = f"{bucket['from']:,} to {bucket['to']:,}"
        lines.append(f"{span:<18} {bucket['rows']:>9,} {bar}".rstrip())
    percentiles = audit["train"]["lengths"]["percentiles"]
    lines.append("  ".join(f"{name} {value:,}" for name, value in percentiles.items()))
    for problem in audit["problems"]:
        lines += _wrap(f"{problem['level']}: {problem['what']}")
        lines += _wrap(f"  → {problem['change']}", indent="    ")
    return "\n".join(lines)


def _details(audit: Audit) -> list[str]:
    train = audit["train"]
    template = audit["chat_template"]
    needed = "" if template["needed"] else " (not needed for these rows)"
    over_long = train["over_long"]
    share = over_long["rows"] / max(train["rows"] + over_long["rows"] * (over_long["action"] == "drop"), 1)
    lines = [
        f"chat template: {template['source']}{needed}",
        f"longer than {over_long['seq_len']:,} tokens: {over_long['rows']:,} rows ({share:.1%}), "
        f"`over_long: {over_long['action']}`",
        f"stop token trained in {train['stop_trained_rows'] / max(train['rows'], 1):.1%} of rows",
        f"duplicate rows: {audit['duplicates']:,}{' (dropped)' if audit['deduplicate'] else ''}"
        f"; in train and eval: {audit['in_train_and_eval']:,}",
    ]
    if packing := audit["packing"]:
        lines.append(f"packed into {packing['rows']:,} sequences, {packing['efficiency']:.1%} filled")
    if audit["scope"]:
        lines.append(f"figures of {audit['scope']} only: the data is streamed")
    return lines


def _wrap(text: str, indent: str = "  ", width: int = 100) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, drop_whitespace=True, break_on_hyphens=False)
