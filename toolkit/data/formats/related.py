"""Texts that belong together: anchors with positives and negatives, and pairs with scores; and what an audit says of
them.

Columns are recognised under the names of sentence-transformers and its data sets. What beside them may say that texts
do not belong together after all is refused, not left unused.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel

from toolkit.common import UserError, count_text
from toolkit.data.formats.columns import EMPTY, NOTHING, by_lower_case, listed, mapping_text, parsed, value_at
from toolkit.data.formats.labelled import PAIRS_OF_TEXTS, check_format
from toolkit.data.reading.readers import RawRow
from toolkit.data.rows import Related
from toolkit.recipe.data import FORMATS, Source
from toolkit.recipe.embedding import COSENT, Embedding

_PAIRS = (
    *(("anchor", "positive"), ("query", "positive"), ("question", "positive"), ("question", "answer")),
    *(("query", "answer"), ("query", "document"), *PAIRS_OF_TEXTS),
    *(("query", "pos"), ("query", "positive_passages"), ("query", "positives"), ("messages", "positive_messages")),
)
"""What columns of an anchor and its positive are called; the last ones by FlagEmbedding, Tevatron and ms-swift, who
write lists of positives."""
_SCORES = ("score", "similarity_score", "similarity", "relatedness_score", "is_duplicate", "label")
_NEGATIVES = FORMATS["related"][1]
_LISTS_OF_NEGATIVES = ("neg", "negative_passages", "hard_negatives", "negative_messages")
"""What `negatives` are called beside these."""
_USUAL_NEGATIVES = 7
"""How many of a longer list are proposed; FlagEmbedding's recipes learn from so many."""

Columns = dict[str, str]


def related_columns(
    rows: Sequence[Mapping[str, Any]],
    source: Source,
    settings: Embedding,
    columns: Mapping[str, str],
    ignored: Collection[str],
) -> Columns:
    """The columns of a source of texts that belong together: what the format calls them, and what the data does.

    Args:
        rows: The first ones.
        columns: Those that `data.columns` names.
        ignored: Columns that are left out on purpose.

    Raises:
        UserError: The source is said to be of another format, lacks a column, or has one that the loss would not read.
    """
    form = form_of(settings)
    check_format(source, form)
    first = {name: value for row in reversed(rows) for name, value in row.items() if name not in ignored}
    found, spelt = dict(columns), by_lower_case(name for name in first if name not in columns.values())
    names: tuple[str, str] = FORMATS[form][0][:2]  # type: ignore[assignment]
    if not found.keys() & {*names}:
        pair = next((each for each in _PAIRS if set(each) <= spelt.keys()), ())
        found |= {name: spelt.pop(each) for name, each in zip(names, pair, strict=False)}
    scores = [spelt[each] for each in _SCORES if each in spelt]
    if form == "scored" and "score" not in found and scores:
        found["score"] = scores[0]
        _refuse_classes(found, source.path)
    missing = next((name for name in FORMATS[form][0] if name not in found), None)
    if missing:
        raise UserError(
            f"data source `{source.path}` has no column `{missing}`, which its rows need; its columns "
            f"are {listed(first)}",
            f"name it: {mapping_text({missing: 'NAME'})}"
            + (
                ", or set embedding.loss=multiple_negatives_ranking for pairs without scores"
                if missing == "score"
                else ""
            ),
        )
    if form == "scored":
        return found
    if scores:
        raise UserError(
            f"data source `{source.path}` says in `{scores[0]}` which texts belong together, and every pair would be "
            "learnt as one that does",
            f"set embedding.loss=cosent to learn from scores, or keep the pairs that do and set "
            f"'data.ignore=[{scores[0]}]'",
        )
    _refuse_prompts(rows, spelt.get("prompt", ""), source.path)
    found |= {name: spelt[name] for name in _NEGATIVES if name in spelt and name not in found}
    several = next((spelt[name] for name in _LISTS_OF_NEGATIVES if name in spelt), None)
    if several and not found.keys() & {*_NEGATIVES}:
        found["negatives"] = several
    named = [name for name in _NEGATIVES if name in found and any(_listed(row.get(found[name])) for row in rows)]
    if named and not settings.negatives:
        count = min(sum(len(_listed(row.get(found[name]))) for name in named) for row in rows)
        raise UserError(
            f"data source `{source.path}` has negatives in {listed(found[name] for name in named)}, and "
            "embedding.negatives is 0",
            f"set embedding.negatives={max(1, min(count, _USUAL_NEGATIVES))}, or "
            f"'data.ignore=[{', '.join(found[name] for name in named)}]' to "
            "learn without them",
        )
    return found


def _refuse_classes(found: Columns, source: str) -> None:
    """Refuses the label of an inference for a score: 0 is the one of sentences that follow from each other."""
    if found["score"].lower() == "label" and found["sentence1"].lower() == "premise":
        raise UserError(
            f"data source `{source}`: `{found['score']}` of a premise and a hypothesis is a class and no score, and "
            "most data sets give what belongs together the lowest",
            "write a `score` that is higher for what is nearer, or keep the pairs that belong together and set "
            f"embedding.loss=multiple_negatives_ranking 'data.ignore=[{found['score']}]'",
        )


def _refuse_prompts(rows: Sequence[Mapping[str, Any]], column: str, source: str) -> None:
    """Refuses FlagEmbedding's instructions of rows: what stands before anchors is one text, which is saved."""
    prompt = next((row[column] for row in rows if column and row.get(column) not in EMPTY), None)
    if prompt is None:
        return
    raise UserError(
        f"data source `{source}` says in `{column}` what stands before its anchors, such as {prompt!r}, and would "
        "be learnt without it",
        f"set embedding.query_prompt to it and 'data.ignore=[{column}]'; a model has one such text, so write others "
        "into the anchors themselves",
    )


def one_positive_each(rows: Iterable[RawRow], column: str) -> Iterator[RawRow]:
    """Rows of which each has one positive: a list of several in this column makes as many rows."""
    for where, row in rows:
        positives = _listed(value_at(row, column))
        if len(positives) < 2 or any(isinstance(each, Mapping) and "role" in each for each in positives):
            yield where, row
        else:
            yield from ((where, {**row, column: each}) for each in positives)


def form_of(settings: Embedding) -> str:
    """The format of rows that a loss takes."""
    return "scored" if settings.loss == COSENT else "related"


def read_related(row: Mapping[str, Any], where: str, settings: Embedding) -> Related:
    """Texts with what is put before them, and their score where the loss reads one.

    Raises:
        UserError: A text is none, there are too few negatives, or the score is no number.
    """
    if settings.loss == COSENT:
        both = [_text(row, name, where) for name in FORMATS["scored"][0][:2]]
        return Related(both, _score(row, where), *_prompts(settings))
    texts = [_text(row, name, where) for name in FORMATS["related"][0]]
    negatives = [
        text for name in _NEGATIVES if name in row for each in _listed(row[name]) if (text := _said(each, name, where))
    ]
    if len(negatives) < settings.negatives:
        raise UserError(
            f"{where} has {len(negatives)} negatives, and embedding.negatives asks for {settings.negatives}",
            f"set embedding.negatives={len(negatives)}, or complete the row",
        )
    return Related([*texts, *negatives[: settings.negatives]], None, *_prompts(settings))


def is_empty_related(row: Related) -> bool:
    """Whether a text is missing."""
    return not all(text.strip() for text in row.texts)


def key_of(ids: Sequence[int]) -> int:
    """A number of 63 bits by which equal texts are known, given their tokens."""
    return xxhash.xxh3_64_intdigest(np.asarray(ids, np.int64).tobytes()) >> 1


def _prompts(settings: Embedding) -> tuple[str, str]:
    return settings.query_prompt or "", settings.document_prompt or ""


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    return _said(row[name], name, where)


def _said(value: Any, name: str, where: str) -> str:
    """A text, which may be a passage with a title, written before it as Tevatron does, or the one message of a chat,
    as ms-swift has it; a list of one of these counts as that one."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(value, Mapping) and (text := value.get("text", value.get("content"))) not in NOTHING:
        value = text if value.get("title") in NOTHING else f"{value['title']} {text}"
    if value in NOTHING:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: `{name}` is no text", "correct the row, or name another column in `data.columns`")
    return value


def _listed(value: Any) -> list[Any]:
    """One text or several, which may be written as JSON."""
    written = parsed(value) if isinstance(value, str) and value.startswith("[") else None
    if isinstance(written, list) and not any(isinstance(each, int | float) for each in written):
        value = written
    return [each for each in (value if isinstance(value, list) else [value]) if each not in NOTHING]


def _score(row: Mapping[str, Any], where: str) -> float:
    try:
        score = float(row["score"])
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise UserError(f"{where}: `score` is {row['score']!r}, no number", "correct the row, or remove it")
    return score


class Texts(BaseModel):
    """Figures of texts that belong together."""

    of_row: int
    equal: int = 0
    """Rows whose anchor and positive are the same text, which are left out; of pairs with scores there are none."""
    shared_positives: int = 0
    """Rows whose positive is also that of another row."""
    shared_anchors: int = 0
    """Rows whose anchor is also that of another row."""
    own_negatives: int = 0
    """Rows that have their own positive among their negatives."""
    cut: int = 0
    """Texts that were cut to `batch.seq_len`."""
    scores: tuple[float, float, float] | None = None
    """The lowest, the mean, and the highest, of pairs with scores."""

    @classmethod
    def of(
        cls,
        keys: NDArray[np.int64],
        numbers: NDArray[np.int64],
        equal: int,
        cut: int,
        scores: NDArray[np.float64] | None,
    ) -> Texts:
        """Those of rows with these numbers (rows,), which weights may repeat, whose texts have these keys
        (rows, texts)."""
        if not len(keys):
            return cls(of_row=keys.shape[1], equal=equal, cut=cut)
        told = None if scores is None else (float(scores.min()), float(scores.mean()), float(scores.max()))
        own = (keys[:, 2:] == keys[:, 1:2]).any(axis=1)
        return cls(
            of_row=keys.shape[1],
            equal=equal,
            shared_positives=_shared(keys[:, 1], numbers),
            shared_anchors=_shared(keys[:, 0], numbers),
            own_negatives=int(own.sum()),
            cut=cut,
            scores=told,
        )

    def problems(self, rows: int, held_out: bool) -> Iterator[tuple[bool, str, str]]:
        """Of training rows: whether a problem is fatal, what is wrong, and what to change."""
        if self.scores and self.scores[0] == self.scores[2]:
            what = f"all {rows:,} pairs have the score {self.scores[0]:g}, so there is no order to learn"
            yield True, what, "name another column as `score` in `data.columns`, or set embedding.loss"
        if self.equal:
            yield (
                False,
                count_text(self.equal, "row has", "rows have") + " the same text as anchor and positive: left out",
                "remove them: they teach nothing",
            )
        if self.own_negatives:
            yield (
                False,
                count_text(self.own_negatives, "row names its", "rows name their")
                + " own positive among the negatives, where it does not count",
                "correct these rows",
            )
        if self.scores is None and self.shared_positives > rows / 2:
            yield (
                False,
                f"{self.shared_positives:,} of {rows:,} rows share their positive with others, which are then no "
                "negatives of theirs",
                "keep one row of each positive if they are mere copies",
            )
        if not held_out:
            yield (
                False,
                "no rows are held out, so nothing will say how well texts are found",
                "set data.eval_split, such as 0.1, or data.eval_sources",
            )

    def in_sentences(self, rows: int) -> Iterator[str]:
        """What the figures come to."""
        if self.scores:
            low, mean, high = self.scores
            yield f"Pairs have scores from {low:g} to {high:g}, {mean:.3g} on average."
            return
        negatives = self.of_row - 2
        beside = f", {negatives} hard negative{'s' if negatives > 1 else ''}" if negatives else ""
        yield f"Each row has an anchor, a positive{beside}, and the positives of the other rows of its step."
        if self.shared_positives or self.shared_anchors:
            yield (
                f"{self.shared_positives:,} rows share their positive and {self.shared_anchors:,} their anchor with "
                "other rows: these are not taken for negatives of each other."
            )


def _shared(keys: NDArray[np.int64], numbers: NDArray[np.int64]) -> int:
    """How many are also those of other rows."""
    _, first, row = np.unique(numbers, return_index=True, return_inverse=True)
    _, key, counts = np.unique(keys[first], return_inverse=True, return_counts=True)
    return int(np.count_nonzero(counts[key[row]] > 1))
