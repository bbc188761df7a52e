"""What columns mean in the formats of other trainers: read under another name, or refused with what to do.

A column that changes what should be learnt must not fall under "unused columns": a judged answer would be imitated, a
picture lost. So this table names those that public data sets have (LLaMA-Factory, Axolotl, TRL, OpenAI), and whoever
wants one left out says so in `data.ignore`. Columns that no format gives a meaning stay the audit's unused columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError

OFTEN_CALLED = {
    "text": ("content", "document", "body"),
    "prompt": (
        *("question", "query", "instruction", "input", "problem", "user", "message_1", "article", "inputs"),
        *("document", "dialogue"),
    ),
    "completion": (
        *("answer", "response", "output", "solution", "assistant", "generation", "corrected", "revision"),
        *("message_2", "summary", "highlights", "ideal", "targets", "reference_answer", "ground_truth"),
    ),
    "instruction": ("prompt", "question", "query", "problem", "message_1", "input", "user", "inputs"),
    "input": ("context", "article", "query", "passage", "paragraph", "story"),
    "output": (
        *("response", "answer", "completion", "solution", "generation", "corrected", "revision", "message_2"),
        *("assistant", "targets"),
    ),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "system": ("system_prompt", "system_message", "system_instruction", "systeminstruction"),
    "reasoning": (
        *("reasoning_content", "thinking", "thought", "thoughts", "think"),
        *("cot", "complex_cot", "chain_of_thought"),
    ),
    "segments": ("parts", "input_output"),
}
"""Column to names it often has elsewhere; only ever proposed, because a wrong guess would train on the wrong text."""

PAIRS_CALLED = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("chosen_messages", "rejected_messages"),
    ("preferred_output", "non_preferred_output"),
)
"""What the columns of preferred answers are called, and those of the others."""
STEPS = "completions"
"""The column of TRL's steps that are judged one by one; who maps it learns all of them, joined."""
NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of a text that say nothing; `[]` and `null` may be what is answered."""
EMPTY: tuple[Any, ...] = (*NOTHING, "[]", "{}", "null")
"""Values of columns and fields that say nothing, also as JSON in a CSV; 0 and false say something."""
_SEEN_OR_HEARD = ("image", "img", "picture", "video", "audio", "speech")
MEDIA = (
    *(f"{name}{suffix}" for name in _SEEN_OR_HEARD for suffix in ("", "s", "_url", "_urls", "_path", "_paths")),
    *("pixel_values", "input_features", "objects"),
)
"""Columns, and fields of messages, that hold what a text model does not see."""
MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "audio_url", "file")
"""Types of the parts of a message that do so."""
_CHATS = ("messages", "sharegpt")
_PROMPTS = ("prompt_completion", "alpaca", "source_target")
_ANSWERS = (*_CHATS, *_PROMPTS)
_ALL = (*_ANSWERS, "text", "segments", "tokens", "preference")
_BAD = ("false", "no", "n", "bad", "wrong", "incorrect", "undesirable", "rejected")
_GOOD = ("true", "yes", "y", "good", "right", "correct", "desirable", "chosen", "accepted")


def verdict(value: Any) -> bool | None:
    """What a value says of its row, if that is yes or no."""
    # Of a long text the beginning is enough to see that it is none.
    word = str(value)[:20].strip().lower() if isinstance(value, str | int | float) else ""
    return True if word in (*_GOOD, "1", "1.0") else False if word in (*_BAD, "0", "0.0", "-1", "-1.0") else None


def _says_no(value: Any) -> bool:
    return str(value).strip().lower() in _BAD


def _is_bad(value: Any) -> bool:
    return _says_no(value) or number(value) <= 0


def number(value: Any) -> float:
    """A number, also in the text of a CSV; not a number otherwise."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _are_verdicts(value: Any) -> bool:
    steps = parsed(value)
    return isinstance(steps, list) and all(verdict(step) is not None for step in steps)


JUDGED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("label", "kto_tag"), lambda value: verdict(value) is not None),
    **dict.fromkeys(("desirable", "is_desirable", "is_correct", "is_good", "keep", "correctness"), _is_bad),
    **dict.fromkeys(("reward", "score", "rating", "feedback", "preferred", "accepted", "thumbs_up"), _is_bad),
    "correct": _says_no,  # 0 may be the number of a choice.
    "rejected": lambda value: value is True,  # Else it is the worse answer.
}
"""Columns, and fields of messages, that judge an answer, and which of their values do. What stands only beside good
answers harms none, so most are refused where they call one bad; those made for such training, whatever they say."""


@dataclass(frozen=True)
class Meaning:
    """What a column holds that changes what should be learnt, and what to do where a format cannot honour it."""

    what: str
    change: str
    """`{mapping}` stands for the setting that reads the columns as instructions, with this one."""
    formats: tuple[str, ...]
    is_meant: Callable[[Any], bool] = lambda value: True
    """Whether a value of the column means it."""


def _each(names: Iterable[str], meaning: Meaning) -> dict[str, Meaning]:
    return dict.fromkeys(names, meaning)


_TO_JUDGE = ", or set objective=kto to learn from both kinds"
REFUSED: tuple[dict[str, Meaning], ...] = (
    _each(MEDIA, Meaning("pictures, sound or film, which this toolkit does not train on", "remove these rows", _ALL)),
    {
        name: Meaning(
            "whether the answer is good",
            f"keep the rows that are{_TO_JUDGE if name in ('label', 'kto_tag') else ''}",
            _ANSWERS if name in ("label", "reward", "score", "rating", "feedback") else _ALL,
            is_meant,
        )
        for name, is_meant in JUDGED.items()
    },
    _each(("labels",), Meaning("which steps of the answer are right", "keep the right ones", _ANSWERS, _are_verdicts)),
    _each(
        ("weight", "loss_weight", "loss_scale", "sample_weight"),
        Meaning("the weight of a row in the loss", "set `weight` of a source, with a file for each weight", _ALL),
    ),
    _each(
        ("positive_messages", "negative_messages"),
        Meaning("what an embedding is near to or far from", "set objective=embedding to learn it", _CHATS),
    ),
    _each(("choices", "options"), Meaning("the choices of a question", "write them into the question", _PROMPTS)),
    _each(("documents",), Meaning("documents to answer from", "write them into the prompt", _ANSWERS)),
    _each(("context",), Meaning("a text to answer from", "write it into `input`", ("alpaca",))),
    _each(
        ("train", "trainable", "calculate_loss", "loss_mask"),
        Meaning("whether the row is trained", "remove the rows that are not", _ALL, _is_bad),
    ),
    _each(
        ("masked", "ignore_loss"),
        Meaning("whether the row is trained", "remove the rows that are not", _ALL, lambda value: not _is_bad(value)),
    ),
    _each(
        ("mask", "masks", "weights", "loss_weights", "loss_mask", "train_mask"),
        Meaning("what is not trained", 'write `"train": false` into the messages', _CHATS),
    ),
    _each(
        ("train", "trainable", "calculate_loss"),
        Meaning(
            "what is not trained",
            'write `"train": false` into the messages',
            _CHATS,
            lambda v: isinstance(parsed(v), list),
        ),
    ),
    _each(
        ("reflection", "corrected"),
        Meaning("a second answer", "set 'data.columns={output: corrected}' to train on the corrected one", _PROMPTS),
    ),
    _each(
        ("history",),
        Meaning("earlier rounds", "write all rounds as `messages`", (*_CHATS, "prompt_completion", "source_target")),
    ),
    _each(
        ("input", "context", "reasoning", *OFTEN_CALLED["reasoning"]),
        Meaning(
            "what prompts and completions do not have",
            "for texts set {mapping}; write it into conversations",
            ("prompt_completion",),
        ),
    ),
    _each(
        ("system", "instruction", "input", "context", *OFTEN_CALLED["system"]),
        Meaning("a part of the prompt", "write it into the source, or map all with `data.columns`", ("source_target",)),
    ),
    _each(
        ("system", *OFTEN_CALLED["system"]),
        Meaning("a part of the prompt", "write it as the first segment, with the label false", ("segments",)),
    ),
    _each(
        ("reasoning", *OFTEN_CALLED["reasoning"]),
        Meaning("reasoning beside the messages", "write it into them as `reasoning_content`", _CHATS),
    ),
    _each(
        ("seq_lengths", "position_ids"),
        Meaning("the documents of a packed row", "write a row for each document, and set `data.packing`", ("tokens",)),
    ),
    _each(
        ("prompt_length", "prompt_len", "source_len"),
        Meaning("which tokens are not trained", "write -100 as their `labels`", ("tokens",)),
    ),
)
"""Columns, in any case, that are refused where their format leaves them unused."""


def refuse_meaning(
    raw: Mapping[str, Any],
    used: Iterable[str],
    optional: Iterable[str],
    form: str,
    where: str,
    mapped: Mapping[str, str] | None = None,
) -> None:
    """Refuses a row that has a column which would be left unused, though it changes what should be learnt.

    Args:
        raw: The row.
        used: Columns that are read, or left out on purpose.
        optional: Columns that the format takes and this source has not mapped.
        form: The format.
        where: Where the row stands.
        mapped: Columns of the format that this source has under other names.

    Raises:
        UserError: With the mapping that would honour the column, where there is one.
    """
    for column in (column for column in raw if column not in used and raw[column] not in EMPTY):
        ignore = f"set 'data.ignore=[{column}]' to train without it"
        name = column.lower()
        for expected in optional:
            counts = expected == "messages" and isinstance(raw[column], int | float)  # As `turns: 2`.
            if name in (expected, *OFTEN_CALLED.get(expected, ())) and expected not in raw and not counts:
                raise UserError(
                    f"{where}: `{column}` would be left unused, but looks like `{expected}`",
                    f"set 'data.columns={{{expected}: {column}}}', or {ignore}",
                )
        for meaning in (group[name] for group in REFUSED if name in group):
            if form in meaning.formats and meaning.is_meant(raw[column]):
                change = meaning.change.replace("{mapping}", _as_instructions(mapped or {}, column))
                raise UserError(f"{where}: `{column}` is {meaning.what}", f"{change}, or {ignore}")


def _as_instructions(mapped: Mapping[str, str], column: str) -> str:
    """The setting that reads prompts and completions as instructions, with a column that only those have."""
    mapping = {
        "instruction": mapped.get("prompt", "prompt"),
        "output": mapped.get("completion", "completion"),
        "input" if column.lower() in ("input", *OFTEN_CALLED["input"]) else "reasoning": column,
    }
    return mapping_text({name: actual for name, actual in mapping.items() if name != actual})


def by_lower_case(names: Iterable[str]) -> dict[str, str]:
    """Names by their lower case; of two that differ in case alone the one in lower case, or the first."""
    found: dict[str, str] = {}
    for name in names:
        if name.islower() or name.lower() not in found:
            found[name.lower()] = name
    return found


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """A column, or what lies inside one: `body.messages`. None where there is nothing."""
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for key in column.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def listed(names: Iterable[str]) -> str:
    """Names of columns for a sentence."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def mapping_text(mapping: Mapping[str, str]) -> str:
    """The setting that maps columns, ready for the command line."""
    return f"'data.columns={{{', '.join(f'{name}: {actual}' for name, actual in mapping.items())}}}'"


def parsed(value: Any) -> Any:
    """Decodes JSON inside a string (data sets use it to get nested objects through Arrow), however often encoded."""
    while isinstance(value, str):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError):  # Also numbers of thousands of digits.
            return value or None
        if decoded == value:
            return value
        value = decoded
    return value


def names_in(value: Any) -> Iterator[str]:
    """Every key inside a value, also where it is written as JSON."""
    value = parsed(value)
    if isinstance(value, Mapping):
        yield from value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from names_in(part)
