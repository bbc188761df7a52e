"""The audit and prepared rows as a person can read them: which tokens are trained, and where packed documents meet."""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap

from transformers import PreTrainedTokenizerBase

from toolkit.common import brief, fitted, printable, table
from toolkit.data.auditing.audit import Audit, in_sentences
from toolkit.data.prepare import Prepared
from toolkit.data.rewards import ANSWER
from toolkit.data.rows import IGNORE
from toolkit.recipe.preference import PAIRED

_OF_A_CHARACTER = 3
"""Bytes of UTF-8 that are not yet one, each of which may be decoded as a mark of its own."""
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def show(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, n: int, color: bool) -> str:
    """The first `n` training rows of what was prepared with this tokenizer as text, special tokens included.

    With `color` trained text is green and the rest dimmed; otherwise trained text stands between « and ».
    """
    blocks = []
    for number, row in enumerate(itertools.islice(iter(prepared.train), n), 1):
        ids, labels = row["input_ids"], row["labels"]
        trained = [label != IGNORE for label in labels]
        if prepared.classes:
            blocks.append(
                _labelled(tokenizer, ids, [prepared.classes[n] if n != IGNORE else "" for n in labels], number)
            )
            continue
        if prepared.audit.objective == "seq2seq":
            lines = [f"── row {number}: source of {len(ids):,} tokens, target of {len(labels):,} tokens, all trained"]
            lines += [_delimited(tokenizer, ids, [False] * len(ids), color), "──▸"]
            lines += [_delimited(tokenizer, labels, trained, color)]
        else:
            lengths, pair = row.get("seq_lengths") or [len(ids)], prepared.audit.objective in PAIRED
            if "desirable" in row:  # Behind it stands the answer of another row.
                lengths = lengths[:1]
                ids, trained = ids[: lengths[0]], trained[: lengths[0]]
            numbered = (f"document {number}" for number in itertools.count(1))
            parts = iter(("the chosen answer", "the rejected answer")) if pair else numbered
            what = f" in {len(lengths)} {'answers' if pair else 'documents'}" if "seq_lengths" in row else ""
            if texts := prepared.audit.train.texts if "keys" in row else None:
                first = ("the first text", "the second") if texts.scores else ("the anchor", "its positive")
                parts, pair = itertools.chain(first, itertools.repeat("a negative")), True
            what = f" with a {'good' if row['desirable'] else 'bad'} answer" if "desirable" in row else what
            lines = [f"── row {number}: {len(ids):,} tokens{what}, {sum(trained):,} trained"]
            if texts:
                scored = f", of the score {row['score']:g}" if texts.scores else ""
                lines = [f"── row {number}: {len(ids):,} tokens in {len(lengths)} texts{scored}"]
            if "columns" in row:
                reference = json.loads(row["columns"])[1][ANSWER]
                lines = [f"── row {number}: a prompt of {len(ids):,} tokens, whose answer is {reference!r}"]
            for part, (a, b) in zip(parts, itertools.pairwise(itertools.accumulate(lengths, initial=0)), strict=False):
                lines += [f"┄┄ {part}: {b - a:,} tokens"] if a or pair else []
                lines += [_delimited(tokenizer, ids[a:b], trained[a:b], color)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _labelled(tokenizer: PreTrainedTokenizerBase, ids: list[int], names: list[str], number: int) -> str:
    """A row with its label, or its tokens with those of their words."""
    if len(names) == 1:
        text = printable(str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)))
        return f"── row {number}: {len(ids):,} tokens, label {names[0]}\n{text}"
    tokens = (printable(str(tokenizer.decode([each]))).strip() or "␣" for each in ids)
    shown = " ".join(f"{token}/{name}" if name else token for token, name in zip(tokens, names, strict=True))
    return f"── row {number}: {len(ids):,} tokens, {sum(map(bool, names)):,} words\n{shown}"


def _delimited(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool], color: bool) -> str:
    delimiters = {True: (GREEN, RESET), False: (DIM, RESET)} if color else {True: ("«", "»"), False: ("", "")}
    result = []
    start, position, before = 0, 0, ""
    for is_trained, run in itertools.groupby(trained):
        end = position + len(list(run))
        # A run decoded alone would lose a space at its start, and characters of several tokens: the one before, and
        # all that share a character with it, are decoded again.
        so_far = str(tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False))[len(before) :]
        decoded = so_far.rstrip("\ufffd")
        if end == len(ids) or len(so_far) - len(decoded) > _OF_A_CHARACTER:  # No beginning of one, but bytes of none.
            decoded = so_far
        opening, closing = delimiters[is_trained]
        shown = printable(decoded)
        if color:  # Of each line, so that any of them may be left out.
            shown = shown.replace("\n", f"{closing}\n{opening}")
        result.append(f"{opening}{shown}{closing}")
        if decoded != so_far:
            before += decoded
        else:
            start, before = position, str(tokenizer.decode(ids[position:end], clean_up_tokenization_spaces=False))
        position = end
    return "".join(result)


def render(audit: Audit, whole: str = "") -> str:
    """The audit as plain text, as wide as the terminal and at most 100 columns.

    Args:
        whole: The file in which all of it stands, which is named where it is longer than what a person reads.
    """
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    name_width = max(width - 55, 12)
    rows = [("data", "format", "read", "used", "repeats", "share")]
    for source in audit.sources:
        name = source.path if source.split == "train" else f"{source.path} [{source.split}]"
        name = name if len(name) <= name_width else f"…{name[1 - name_width :]}"
        share = f"{source.share:.1%}" if source.role == "train" else "held out"
        rows.append((name, source.format, f"{source.rows:,}", f"{source.used_rows:,}", f"{source.repeats:.2f}", share))
    head, *described = table(rows, "llrrrr", gap=1).plain.split("\n")
    sources = [head]
    for source, line in zip(audit.sources, described, strict=True):
        sources += [line, *(part for text in source.unused() for part in _wrap(f"  {text}", width))]
    sentences = [line for sentence in in_sentences(audit) for line in _wrap(sentence, width)]
    histogram = audit.train.lengths.histogram
    most = max((bucket.rows for bucket in histogram), default=1) or 1
    bars = [("tokens per row", "rows", "")]
    for bucket in histogram:
        bar = "█" * round((width - 34) * bucket.rows / most) or ("▏" if bucket.rows else "")
        bars.append((f"{bucket.low:,} to {bucket.high:,}", f"{bucket.rows:,}", bar))
    percentiles = "  ".join(f"{name} {value:,}" for name, value in audit.train.lengths.percentiles.items())
    problems = []
    for problem in sorted(audit.problems, key=lambda each: each.level != "fatal"):
        problems += _wrap(f"{problem.level}: {problem.what}", width)
        problems += _wrap(f"  → {problem.change}", width, indent="    ")
    lengths = table(bars, "lrl").plain.split("\n")
    return fitted([sources, ["", *sentences], ["", *lengths], [percentiles], problems], whole)


def _wrap(text: str, width: int, indent: str = "  ") -> list[str]:
    # Names from the data are as long as they like.
    text = brief(printable(text))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
