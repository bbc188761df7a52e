"""What an audit reports on labels: which classes there are, how many rows each has, and whether rows contradict each
other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel

from toolkit.common import count_text
from toolkit.data.formats.labelled import content_of, in_order
from toolkit.data.rows import Tagged, from_json

LOPSIDED = 10
"""So many times as many rows in one class as in another are warned of: a judgement, not a measurement."""
_MOST = 0.5
"""The share of rows with labels of their own from which on labels are no names of classes."""
_FEW = 20
"""Rows up to which nobody can tell."""
_DECIMAL = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?")
"""A number that is not whole, as a CSV has it."""


class Classes(BaseModel):
    """Figures of the labels that are trained or held out."""

    labels: dict[str, int]
    """How many there are of each class."""
    unknown: dict[str, int] = {}
    """Labels that no training row has, and how often they are met."""
    contradicting: int = 0
    """Rows whose text stands elsewhere with another label."""

    def problems(self, held_out: bool, of_words: bool) -> Iterator[tuple[bool, str, str]]:
        """Of training rows: whether a problem is fatal, what is wrong, and what to change.

        Args:
            held_out: Whether rows are held out.
            of_words: Whether each word has a label.
        """
        what = "words" if of_words else "rows"
        counted = {name: count for name, count in self.labels.items() if count}
        total = sum(counted.values())
        if total > _FEW and len(counted) > _MOST * total:
            text = f"{total:,} {what} have {len(counted):,} different labels, which are hardly names of classes"
            yield True, text, "name another column: 'data.columns={label: NAME}'"
            return
        if len(counted) == 1:
            yield (
                True,
                f"all {what} are of the class {next(iter(counted))!r}, so there is nothing to tell apart",
                ("add rows of another class, or name another column as `label` in `data.columns`"),
            )
        elif counted and not of_words and max(counted.values()) > LOPSIDED * min(counted.values()):
            (most, many), *_, (least, few) = sorted(counted.items(), key=lambda each: -each[1])
            yield (
                False,
                f"the class {most!r} has {many:,} rows and {least!r} only {few:,}; who always says {most!r} is right "
                f"in {many / total:.0%} of them",
                "add rows of the small classes, or look at the F1 of each: checkpoint.keep_best=eval_macro_f1",
            )
        for names, why, change in _doubtful(counted):
            yield False, f"the classes {', '.join(map(repr, names))} {why}", change
        if absent := [name for name, count in self.labels.items() if not count]:
            listed = ", ".join(map(repr, absent[:5])) + (" …" if len(absent) > 5 else "")
            yield False, f"no training row has the label {listed}", "add some, or leave these classes out of the data"
        if self.contradicting:
            yield (
                False,
                count_text(self.contradicting, "row has", "rows have")
                + " a text that stands elsewhere with another label",
                "decide on one label for each text, or remove these rows",
            )
        if not held_out:
            yield (
                False,
                "no rows are held out, so nothing will say how well classes are told apart",
                ("set data.eval_split, such as 0.1, or data.eval_sources"),
            )

    def strangers(self) -> Iterator[tuple[str, str]]:
        """Of held-out rows: what is wrong with them, and what to change."""
        if unknown := self.unknown:
            names = ", ".join(map(repr, [*unknown][:5])) + (" …" if len(unknown) > 5 else "")
            number = sum(unknown.values())
            labels = count_text(number, "held-out label is", "held-out labels are")
            what = f"{labels} of classes that no training row has: {names}"
            yield (
                f"{what}; {'it is' if number == 1 else 'they are'} left out",
                "add such rows to the training data, or remove these",
            )

    def in_a_sentence(self, of_words: bool) -> str:
        """How the labels are spread."""
        total = max(sum(self.labels.values()), 1)
        most = sorted(self.labels.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{name} {count / total:.1%} ({count:,})" for name, count in most[:12])
        more = f" and {len(most) - 12:,} others" if len(most) > 12 else ""
        return f"{'Words' if of_words else 'Rows'} are of {len(most):,} classes: {shown}{more}."


def _doubtful(names: Iterable[str]) -> Iterator[tuple[list[str], str, str]]:
    """Classes that may be none: which, why, and what to change."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    for spellings in alike.values():
        if len(spellings) > 1:
            yield (
                spellings,
                "differ in letters' case or spaces alone, and are learnt as different ones",
                "spell it alike",
            )
    numbers = [name for name in alike if name.lstrip("-").isdigit()]
    with_decimals = [name for name in alike if _DECIMAL.fullmatch(name)]
    if with_decimals and len(numbers) + len(with_decimals) == len(alike):
        why = "are numbers with decimals, as texts, and are learnt as names of which none is nearer to another"
        yield with_decimals[:5], why, "write classes as names or whole numbers; no objective learns numbers yet"
    elif numbers and len(numbers) < len(alike):
        why = "are numbers where others are names, and are learnt as different ones"
        yield numbers[:5], why, "write all as names, if some sources name their classes and others number them"
    if {"-1", "0"} <= alike.keys():
        why = "are learnt alike, and many data sets write -1 where a row has no label"
        yield ["-1", "0"], why, "remove the rows of -1, if they have none"


@dataclass(frozen=True)
class Survey:
    """What was found out of all rows, before they are mixed.

    Args:
        names: Of the classes, in the order of their numbers.
        unknown: See `Classes`.
        contradicting: The same.
    """

    names: tuple[str, ...]
    unknown: dict[str, int]
    contradicting: int

    def figures(self, numbers: NDArray[np.int64]) -> Classes:
        """Those of labels with these numbers; -100 is none."""
        counts = np.bincount(numbers[numbers >= 0], minlength=len(self.names))
        labels = dict(zip(self.names, counts.tolist(), strict=True))
        return Classes(labels=labels, unknown=self.unknown, contradicting=self.contradicting)


def survey(rows: Iterable[str], is_train: NDArray[np.bool_], declared: Sequence[str]) -> Survey:
    """Looks through all rows once.

    Args:
        rows: As JSON, as `collect` wrote them.
        is_train: Which of them are of training sources.
        declared: Classes that the data itself names, in its order.
    """
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    seen: dict[int, str] = {}
    alike: Counter[int] = Counter()
    contradicted: set[int] = set()
    for text, train in zip(rows, is_train.tolist(), strict=True):
        row = from_json(text)
        labels = row.tags if isinstance(row, Tagged) else [row.label]  # type: ignore[union-attr]
        counts[train].update(filter(None, labels))
        content, label = xxhash.xxh3_64_intdigest(content_of(row).encode()), repr(labels)  # type: ignore[arg-type]
        alike[content] += 1
        if seen.setdefault(content, label) != label:
            contradicted.add(content)
    found = set(counts[True])
    names = (*declared, *in_order(found - {*declared}))
    known = {*names}
    unknown = {name: count for name, count in counts[False].items() if name not in known}
    return Survey(names, unknown, sum(alike[content] for content in contradicted))
