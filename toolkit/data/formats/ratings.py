"""Several answers to one prompt, each with a score, as in UltraFeedback, Nectar and the output of reward models: the
best and the worst of a row make a pair.

Answers are a list of objects that hold text and score, or of texts or messages beside a list of scores. Of a rank the
lowest is the best, of any other score the highest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError, brief
from toolkit.data.formats.columns import NOTHING, by_lower_case, number, parsed, value_at

ANSWERS = ("answers", "completions", "responses", "generations", "candidates", "all_generated_responses")
"""Columns of several answers; in `data.columns` the first."""
SCORES = ("scores", "ratings", "rating", "rewards", "ranks", "ranking", "all_rm_scores")
"""Columns of their scores; in `data.columns` the first."""
_TEXT_IN = ("response", "answer", "text", "content", "completion", "output", "generation", "messages")
_SCORE_IN = ("overall_score", "overall_rating", "score", "rating", "reward", "rank")
_RANKS = ("rank", "ranks", "ranking")


@dataclass(frozen=True)
class Ratings:
    """Where the answers of a source and their scores are.

    Args:
        answers: The column of answers.
        score: The column of scores, or the field of each answer.
        text: The field of each answer that holds it, where answers are objects.
        ranks: Whether the lowest score is the best.
    """

    answers: str
    score: str
    text: str | None
    ranks: bool

    def columns(self) -> set[str]:
        """The columns that are read."""
        names = {self.answers} if self.text else {self.answers, self.score}
        return names | {name.partition(".")[0] for name in names}

    def pair(self, raw: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A row with `chosen` and `rejected` in place of its answers and scores, empty if none tells two apart.

        Raises:
            UserError: There are not as many scores as answers, or answers that are no list.
        """
        rest = {name: value for name, value in raw.items() if name not in self.columns()}
        given = parsed(value_at(raw, self.answers)) or []
        beside = [] if self.text else parsed(value_at(raw, self.score)) or []
        if not isinstance(given, list) or not isinstance(beside, list):
            raise UserError(f"{where}: `{self.answers}` is no list of answers with scores", "correct or remove the row")
        if self.text:
            given = [each if isinstance(each, Mapping) else {} for each in given]
            beside, given = [each.get(self.score) for each in given], [each.get(self.text) for each in given]
        if len(given) != len(beside):
            raise UserError(
                f"{where}: `{self.answers}` has {len(given)} answers, and `{self.score}` {len(beside)} scores",
                "give every answer a score, or null",
            )
        worth = [-number(score) if self.ranks else number(score) for score in beside]
        for score, value in zip(beside, worth, strict=True):
            # Of what is no number at all, such as N/A, an answer may be passed over; of 4/5 it may be the best.
            if isinstance(score, str) and math.isnan(value) and any(map(str.isdigit, score)):
                raise UserError(
                    f"{where}: `{self.score}` is {brief(repr(score), 1, 80)}, which is no number",
                    "write scores as numbers (4 for 4/5), or null for answers without one",
                )
        said = [each.strip() if isinstance(each, str) else each for each in given]
        known = [place for place, value in enumerate(worth) if not math.isnan(value) and said[place] not in NOTHING]
        best, worst = (pick(known, key=worth.__getitem__, default=None) for pick in (max, min))
        if best is None or worst is None or worth[best] == worth[worst]:
            return {**rest, "chosen": "", "rejected": ""}
        return {**rest, "chosen": given[best], "rejected": given[worst]}


def beside_answers(names: Sequence[str]) -> list[tuple[str, str]]:
    """Columns that say how good chosen answers are, each with that of the rejected ones: `score_chosen` …."""
    pairs = ((name, re.sub("chosen", "rejected", name)) for name in names if "chosen" in name)
    known = ("score", "rating", "reward", "rank")
    return [pair for pair in pairs if pair[1] in names and any(word in pair[0].lower() for word in known)]


def is_worse(raw: Mapping[str, Any], chosen: str, rejected: str) -> bool:
    """Whether the chosen answer of a row is worth less than the rejected one by what these two columns say."""
    one, other = number(raw.get(chosen)), number(raw.get(rejected))
    return one > other if "rank" in chosen.lower() else one < other


def find_ratings(columns: dict[str, str], rows: Sequence[Mapping[str, Any]], ignored: frozenset[str]) -> Ratings | None:
    """Where the first rows have answers with scores; None if they have none, or pairs.

    Args:
        columns: Those that `data.columns` names, from which those of answers and scores are taken out.
        rows: The first ones.
    """
    spelt = by_lower_case(name for row in rows for name in row if name not in ignored)
    named, scored = (columns.pop(names[0], None) for names in (ANSWERS, SCORES))
    if not named and {"chosen", "rejected"} & {*columns, *spelt}:
        return None
    for answers in [named] if named else [spelt[name] for name in ANSWERS if name in spelt]:
        first = next((found for row in rows if (found := parsed(value_at(row, answers)))), None)
        if not isinstance(first, list):
            continue
        fields = first[0] if isinstance(first[0], Mapping) else {}
        text, score = (next((name for name in names if name in fields), None) for names in (_TEXT_IN, _SCORE_IN))
        if text and score and not scored:
            return Ratings(answers, score, text, score in _RANKS)
        beside = scored or next((spelt[name] for name in SCORES if name in spelt), None)
        if beside and any(isinstance(parsed(value_at(row, beside)), list) for row in rows):
            return Ratings(answers, beside, None, beside.lower() in _RANKS)
    return None
