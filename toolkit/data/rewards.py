"""Scores of answers that can be checked: the rewards that `rewards` of a recipe names.

Each is a function of one answer and what is known of its row, so that a score depends on nothing beside it. Those of a
user's own function are checked like any other: a score that is missing or no number ends the run, for a silent zero
would be learnt from.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.common import UserError, in_a_line
from toolkit.data.reward_files import read
from toolkit.data.thoughts import begun, spoken
from toolkit.data.words import COMMONEST, SCRIPTS
from toolkit.recipe.reinforcement import (
    ExactMatch,
    FormatMatch,
    JsonMatch,
    LanguageMatch,
    LengthMatch,
    NumericMatch,
    RegexMatch,
    Reward,
    Rewards,
)

_MODULE = "own_rewards"
"""What the user's own file is called as a module."""
ANSWER = "answer"
"""What a reference is called among the columns of a row."""
_SHOWN = 200
"""Characters of an answer in an error."""
FULL = 1.0 - 1e-9
"""From here on a score of a built-in reward is a full one."""
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)(?:[eE][+-]?\d{1,3}(?!\w))?"
)
"""Also `.5`, Unicode's minus, and `1e-05`, as Python writes 0.00001."""
_BRACES = re.compile(r"\\boxed\{|[{}]")


@dataclass(frozen=True)
class Answer:
    """An answer to be scored.

    Attributes:
        text: As a user would read it, without special tokens.
        tokens: How many it has.
        prompt: The text that was asked.
        columns: What is known of the row, the reference as `answer`.
        where: Which row it is, for errors.
    """

    text: str
    tokens: int
    prompt: str
    columns: Mapping[str, Any]
    where: str = ""

    @property
    def reference(self) -> str:
        """The reference, where there is one."""
        return str(self.columns.get(ANSWER) or "")

    @property
    def whole(self) -> str:
        """The text with the mark that opens its thoughts, also where that is the end of the prompt."""
        return begun(self.prompt) + self.text


def number_in(text: str) -> Decimal | None:
    """The number that a text comes to: the first after `####`, by which GSM8K's rows mark their result, else the last.

    Commas between thousands do not count.
    """
    before, mark, marked = text.rpartition("####")
    found = _NUMBER.findall(marked if mark else before or marked)
    return Decimal(found[0 if mark else -1].replace(",", "").replace("\u2212", "-")) if found else None


def is_one_number(text: str) -> bool:
    """Whether no more than one number stands where the result of a reference is looked for."""
    inside = boxed(text)
    part = (text if inside is None else inside).rpartition("####")[2]
    return len(_NUMBER.findall(part)) <= 1


def is_json(text: str) -> bool:
    """Whether all of a text is one JSON object or array, by RFC 8259: without NaN, and without a fence around it."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict | list)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` that is closed; None without one."""
    opened: list[int | None] = []
    first, found = -1, None
    for mark in _BRACES.finditer(text):
        if mark[0] != "}":
            opened.append(mark.end() if len(mark[0]) > 1 else None)
        elif opened and (start := opened.pop()) is not None and start > first:
            first, found = start, text[start : mark.start()]
    return found


def result_in(text: str) -> Decimal | None:
    """The number that a text comes to, see `number_in`; that in its box, where it has one like those of MATH's rows."""
    return number_in(text if (inside := boxed(text)) is None else inside)


def tagged(text: str, tag: str | None) -> str | None:
    """The content of the last of these tags, None without one; where no tag is named, what follows thoughts."""
    if tag is None:
        return spoken(text)
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1] if found else None


def _exact(settings: ExactMatch, answer: Answer) -> float:
    given = tagged(answer.whole, settings.tag)
    one, other = (given or "").strip(), answer.reference.strip()
    if not other:
        return 0.0  # Who says nothing must not be right where nothing is known.
    return float(one.casefold() == other.casefold() if settings.ignore_case else one == other)


def _numeric(settings: NumericMatch, answer: Answer) -> float:
    given = tagged(answer.whole, settings.tag)
    one, other = None if given is None else result_in(given), result_in(answer.reference)
    if one is None or other is None:
        return 0.0
    return float(abs(one - other) <= Decimal(settings.tolerance) * abs(other))


def _regex(settings: RegexMatch, answer: Answer) -> float:
    found = re.search(settings.pattern, answer.whole, re.DOTALL)
    if not found or "answer" not in found.re.groupindex:
        return float(found is not None)
    other = answer.reference.strip()
    return float(bool(other) and (found["answer"] or "").strip() == other)


def _json(settings: JsonMatch, answer: Answer) -> float:
    text = spoken(answer.whole).strip()
    if not is_json(text):
        return 0.0
    if settings.schema_file is None:
        return 1.0
    return 1.0 if _validator(settings.schema_file).is_valid(json.loads(text)) else 0.5


@functools.cache
def _validator(path: str) -> Any:
    try:
        import jsonschema
    except ImportError:
        raise UserError(
            "rewards.json_schema.schema_file needs the package jsonschema, which is not installed",
            "pip install jsonschema, or remove schema_file to ask for any valid JSON",
        ) from None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        what = f"rewards.json_schema.schema_file: {path} is no JSON Schema that can be read: {in_a_line(error)}"
        raise UserError(what, "correct the file") from None
    return kind(schema)


def _length(settings: LengthMatch, answer: Answer) -> float:
    most = math.inf if settings.max_tokens is None else settings.max_tokens
    beyond = max(settings.min_tokens - answer.tokens, answer.tokens - most, 0)
    if not beyond:
        return 1.0
    return max(0.0, 1 - beyond / settings.soft) if settings.soft else 0.0


def _language(settings: LanguageMatch, answer: Answer) -> float:
    letters = [letter for letter in answer.text if letter.isalpha()]
    if not letters:
        return 0.0
    names, code = SCRIPTS.get(settings.code, ("LATIN",)), str(settings.code)
    share = sum(unicodedata.name(letter, "").startswith(names) for letter in letters) / len(letters)
    if code not in COMMONEST:
        return share
    words = re.findall(r"[^\W\d_]+", answer.text.lower())
    counts = Counter({each: sum(word in common for word in words) for each, common in COMMONEST.items()})
    return share * float(counts[code] > max(counts[each] for each in counts if each != code))


def _format(settings: FormatMatch, answer: Answer) -> float:
    tags, text = settings.tags, answer.whole
    frame = r"\s*".join(rf"<{re.escape(tag)}>(?:(?!</?{re.escape(tag)}>).)*</{re.escape(tag)}>" for tag in tags)
    counts = [text.count(mark) == 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if all(counts) and re.fullmatch(rf"\s*{frame}\s*", text, re.DOTALL):
        return 1.0
    return settings.partial * sum(counts) / len(counts)


_SCORES: dict[type[Reward], Callable[[Any, Answer], float]] = {
    ExactMatch: _exact,
    NumericMatch: _numeric,
    RegexMatch: _regex,
    JsonMatch: _json,
    LengthMatch: _length,
    LanguageMatch: _language,
    FormatMatch: _format,
}
_OF_REFERENCES = (ExactMatch, NumericMatch, RegexMatch, JsonMatch, FormatMatch)
"""Those that a reference itself, in the recipe's frame, should be given in full."""


def needs_reference(part: Reward) -> bool:
    """Whether a reward compares with the reference."""
    if isinstance(part, RegexMatch):
        return "answer" in re.compile(part.pattern).groupindex
    return isinstance(part, ExactMatch | NumericMatch)


class Scorer:
    """Scores answers as a recipe's `rewards` say.

    Args:
        rewards: The section, which names one reward at least.
        runs_code: Whether the user's own file is run; without it there are no scores of its function.

    Attributes:
        names: Of the rewards, in the order in which scores stand.
        weights: (rewards,) what they count.

    Raises:
        UserError: The user's own file or function cannot be loaded.
    """

    def __init__(self, rewards: Rewards, runs_code: bool = True) -> None:
        self._parts, weights = rewards.parts(), rewards.weights()
        self._own = _function(rewards) if rewards.file and runs_code else None
        self.names, self.weights = list(weights), np.array([*weights.values()], dtype=np.float64)

    def __call__(self, answers: Sequence[Answer]) -> NDArray[np.float64]:
        """(answers, rewards) scores, not weighed.

        Raises:
            UserError: A reward raises, or gives something else than a number; it names reward, row and value.
        """
        columns = [
            [self._one(name, functools.partial(_SCORES[type(part)], part), answer) for answer in answers]
            for name, part in self._parts.items()
        ]
        if self._own and answers:
            columns.append(self._of_function(answers))
        return np.array(columns, dtype=np.float64).reshape(len(self.names), len(answers)).T

    def of_references(self, columns: Sequence[Mapping[str, Any]]) -> dict[str, NDArray[np.bool_]]:
        """For each built-in reward that a reference answer should get in full: (rows,) whether it does not."""
        frame = next((part.tags for part in self._parts.values() if isinstance(part, FormatMatch)), None)
        tags = frame or [tag for part in self._parts.values() if (tag := getattr(part, "tag", None))][:1]

        def ideal(reference: str) -> str:
            return "".join(f"<{tag}>{reference}</{tag}>" for tag in tags) or reference

        asked = [Answer(ideal(str(each.get(ANSWER) or "")), 0, "", each) for each in columns]
        return {
            name: np.array([_SCORES[type(part)](part, answer) < FULL for answer in asked], dtype=bool)
            for name, part in self._parts.items()
            if isinstance(part, _OF_REFERENCES)
        }

    def _one(self, name: str, score: Callable[[Answer], float], answer: Answer) -> float:
        try:
            return score(answer)
        except UserError:
            raise
        except Exception as error:
            raise _wrong(name, answer, f"raises {in_a_line(error)}") from error

    def _of_function(self, answers: Sequence[Answer]) -> list[float]:
        """The user's own scores."""
        assert self._own is not None
        name = self.names[-1]
        known = dict.fromkeys(key for answer in answers for key in answer.columns)
        columns: dict[str, list[Any]] = {key: [answer.columns.get(key) for answer in answers] for key in known}
        if taken := [key for key in ("completions", "prompts") if key in known]:
            raise UserError(
                f"the reward `{name}` is given answers and prompts as `completions` and `prompts`, and the rows have a "
                f"column `{taken[0]}`, too",
                f"rename the column, or leave it out: 'data.ignore=[{taken[0]}]'",
            )
        # By name, as TRL does: its users write `prompts` first, or leave them to `**columns`.
        columns = {
            "completions": [each.text for each in answers],
            "prompts": [each.prompt for each in answers],
            **columns,
        }
        try:
            inspect.signature(self._own).bind(**columns)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"the reward `{name}` cannot be called with {', '.join(f'`{key}`' for key in columns)}: {error}",
                "give it parameters of these names, and **columns for those that it does not read",
            ) from None
        try:
            found = self._own(**columns)
        except (Exception, SystemExit) as error:  # Of a file that is a program, too.
            raise _wrong(name, answers[0], f"raises {in_a_line(error)}", "one of") from error
        if unawaited := [each for each in (found if isinstance(found, list) else [found]) if inspect.iscoroutine(each)]:
            for each in unawaited:
                each.close()  # Python would warn of each that nothing awaits.
            raise UserError(
                f"the reward `{name}` returns what is to be awaited: `async def` makes no scores until then",
                "write it with `def`, and call asyncio.run(…) in it where it has to wait",
            )
        scores = found.tolist() if hasattr(found, "tolist") else found  # Of arrays and tensors.
        if not isinstance(scores, list | tuple):
            raise _wrong(name, answers[0], f"returns {_short(found)} for {len(answers)} answers, no list", "one of")
        if len(scores) != len(answers):
            raise _wrong(name, answers[0], f"returns {len(scores)} scores for {len(answers)} answers", "one of")
        return [self._finite(name, answer, score) for answer, score in zip(answers, scores, strict=True)]

    def _finite(self, name: str, answer: Answer, score: Any) -> float:
        number = score.item() if getattr(score, "ndim", None) == 0 else score
        with contextlib.suppress(OverflowError):
            if isinstance(number, bool | int | float) and math.isfinite(number):
                return float(number)
        raise _wrong(name, answer, f"returns {_short(score)}, which is no finite number")


def _wrong(name: str, answer: Answer, what: str, of: str = "") -> UserError:
    place = f"{of} {answer.where or 'a row'} and those beside it" if of else answer.where or "a row"
    return UserError(
        f"the reward `{name}` {what}, for {place}: {_short(answer.text)}",
        "correct the reward: no answer is given 0 where it cannot be scored",
    )


def _short(value: Any) -> str:
    """A value in an error."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _function(rewards: Rewards) -> Callable[..., Any]:
    """The user's own function, from a file that may run."""
    assert rewards.file and rewards.trust_python, "code runs only where the recipe says so"
    module = ModuleType(_MODULE)
    module.__file__ = rewards.file
    # Where data classes look for what their annotations name, and pickle for what other processes are to run.
    sys.modules[_MODULE] = module
    names = vars(module)
    try:
        exec(compile(read("rewards.file", rewards.file), rewards.file, "exec", dont_inherit=True), names)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        what = f"rewards.file: {rewards.file} does not run: {in_a_line(error)}"
        raise UserError(what, "correct the file") from error
    if not callable(found := names.get(rewards.function)):
        own = [name for name, value in names.items() if callable(value) and not name.startswith("_")]
        raise UserError(
            f"rewards.file: {rewards.file} has no function `{rewards.function}`",
            f"set rewards.function to one of {', '.join(own) or 'none'}",
        )
    return found
