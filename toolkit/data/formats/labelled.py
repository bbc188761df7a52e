"""Rows with labels: a text, two texts or a conversation of one class, and words each of which has a tag.

Columns are recognised under the names of public data sets, such as GLUE's `sentence1` and `sentence2`; what a label is
called is found in the data: `ClassLabel` features name numbers, other labels name themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from toolkit.common import UserError, brief
from toolkit.data.formats.columns import EMPTY, by_lower_case, listed, mapping_text, parsed
from toolkit.data.rows import IGNORE, Chat, Labelled, Tagged, Text
from toolkit.recipe.data import Source

PAIRS_OF_TEXTS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")),
    *(("text_a", "text_b"), ("text1", "text2"), ("query", "passage")),
)
"""What columns of two texts are called."""
_TEXTS = ("text", "sentence")
_CHATS = ("messages", "conversations")
_LABELS = ("label", "labels")
_WORDS = ("tokens", "words")
_TAGS = ("tags", "ner_tags", "labels", "pos_tags")

_WHOLE = re.compile(r"-?\d+\.0+")
"""A whole number as a float is written."""
_PRINTED = re.compile(r"\s*\[\s*'")
"""A list of texts as Python prints it."""

Columns = dict[str, str]


def recognised(
    rows: Sequence[Mapping[str, Any]],
    source: Source,
    form: str,
    columns: Mapping[str, str],
    ignored: Collection[str],
    has_chat_template: bool,
) -> Columns:
    """The columns of a source for an objective that learns labels alone: those that are called otherwise in the data.

    Args:
        rows: The first ones.
        form: The format that the objective takes.
        columns: Those that `data.columns` names.
        ignored: Columns that are left out on purpose.

    Raises:
        UserError: The source is said to be of another format, or has not what this one needs.
    """
    check_format(source, form)
    first = {name: value for row in reversed(rows) for name, value in row.items() if name not in ignored}
    found = labelled_columns(columns, first, source.path, form == "tagged")
    if "messages" in found and not has_chat_template:
        raise UserError(
            f"data source `{source.path}` holds chats, but the tokenizer has no chat template",
            "set `model.chat_template` (`chatml` or a Jinja file), or train an instruct model that has one",
        )
    return {name: actual for name, actual in found.items() if name != actual}


def check_format(source: Source, form: str) -> None:
    """Refuses a source that is said to be of another format than its objective takes."""
    if source.format not in (None, "auto", form):
        raise UserError(
            f"data source `{source.path}` is of the format {source.format}, and this objective takes {form}",
            f"remove `data.format`, or set it to {form}",
        )


def labelled_columns(columns: Mapping[str, str], row: Mapping[str, Any], source: str, tagged: bool) -> Columns:
    """The columns of a source of labelled rows: what the format calls them, and what the data does.

    Args:
        columns: Those that `data.columns` names.
        row: The first row, without what is ignored.
        source: Path of the source.
        tagged: Whether each word has a label.

    Raises:
        UserError: Something is missing, or there are several that it may be.
    """
    found, spelt = dict(columns), by_lower_case(name for name in row if name not in columns.values())

    def take(expected: str, names: tuple[str, ...]) -> None:
        if expected not in found and (name := next((spelt[each] for each in names if each in spelt), None)):
            found[expected] = name

    if tagged:
        take("tokens", _WORDS)
        take("tags", _TAGS)
        return _complete(found, ("tokens", "tags"), row, source)
    take("label", _LABELS)
    if {"text", "messages"} & found.keys():
        return _complete(found, ("label",), row, source)
    pair = next((each for each in PAIRS_OF_TEXTS if set(each) <= spelt.keys()), None)
    given = [name for name in (*_TEXTS, *_CHATS) if name in spelt]
    if pair and "sentence" in pair:
        given = [name for name in given if name != "sentence"]
    if len(given) + bool(pair) > 1:
        names = [*given, *(pair or ())]
        raise UserError(
            f"data source `{source}` has several texts: {listed(names)}",
            f"set {mapping_text({'text': names[0], 'label': found.get('label', 'NAME')})}, or name two texts as `text` "
            "and `text_pair`",
        )
    if pair:
        found |= {"text": spelt[pair[0]], "text_pair": spelt[pair[1]]}
    elif given:
        found["messages" if given[0] in _CHATS else "text"] = spelt[given[0]]
    return _complete(found, ("label", "text"), row, source)


def _complete(found: Columns, needed: tuple[str, ...], row: Mapping[str, Any], source: str) -> Columns:
    missing = [name for name in needed if name not in found and not (name == "text" and "messages" in found)]
    if missing:
        has = ", ".join(f"`{name}`" for name in row) or "none"
        raise UserError(
            f"data source `{source}` has no column `{missing[0]}`, which its rows need; its columns are {has}",
            f"name it: {mapping_text({missing[0]: 'NAME'})}",
        )
    return found


def read_labelled(row: Mapping[str, Any], where: str, classes: Sequence[str], chat: Callable[[Any], Chat]) -> Labelled:
    """A text, two texts or a conversation, and its class.

    Args:
        row: Its columns, by the names of the format.
        where: Where it stands.
        classes: What numbers stand for, where the data says so.
        chat: Makes a conversation of what a column holds.

    Raises:
        UserError: A text is none, or the label is no name of a class.
    """
    label = class_name(row["label"], where, "label", classes)
    if row.get("messages") not in EMPTY:
        return Labelled(chat(row["messages"]), None, label)
    text, second = (_text(row, name, where) if name in row else None for name in ("text", "text_pair"))
    return Labelled(Text(text or ""), second, label)


def read_tagged(row: Mapping[str, Any], where: str, classes: Sequence[str]) -> Tagged:
    """Words, and the tag of each; see `read_labelled`.

    Raises:
        UserError: They are no lists, or not as many of one as of the other.
    """
    words, tags = (parsed(row[name]) or [] for name in ("tokens", "tags"))
    for name, value, example in (("tokens", words, '["Ada", "lives"]'), ("tags", tags, '["B-PER", "O"]')):
        if not isinstance(value, list):
            what = (
                f"`tokens` and `tags` are no lists of words and of their tags: `{name}` is {brief(repr(value), 1, 80)}"
            )
            raise UserError(f"{where}: {what}", f"write a list, such as {example}")
    if wrong := [n for n, word in enumerate(words) if not isinstance(word, str)]:
        what = f"{where}: `tokens[{wrong[0]}]` is {words[wrong[0]]!r}, not a word"
        raise UserError(what, 'write each word as text ("4" for 4), or remove the row')
    if len(words) != len(tags):
        raise UserError(
            f"{where} has {len(words):,} words and {len(tags):,} tags", "write one tag for each word, or remove the row"
        )
    return Tagged(words, [class_name(tag, where, "tags", classes) for tag in tags])


def class_name(value: Any, where: str, column: str, classes: Sequence[str]) -> str:
    """What a class is called: a text or a whole number as it stands, if that stands for none of `classes`; nothing
    where there is no label.

    Raises:
        UserError: It is none of these.
    """
    # So data sets write that there is none, as pandas does, that it is kept secret, and that no loss is to be taken.
    if value is None or _is_nan(value) or value == IGNORE or (classes and value == -1):
        return ""
    if classes and isinstance(value, int):
        if not 0 <= value < len(classes):
            what = f"{where}: `{column}` is {value}, and the data names {len(classes)} classes"
            raise UserError(what, "correct the row")
        return classes[value]
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):  # As pandas writes whole numbers beside empty cells.
        value = value.strip().partition(".")[0]
    several = isinstance(parsed(value), list | dict) or (isinstance(value, str) and _PRINTED.match(value))
    if isinstance(value, bool | int) or (isinstance(value, str) and not several):
        return str(value).strip()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    what = "a number with decimals, which no objective learns yet" if isinstance(value, float) else "no name of a class"
    if several:
        what += ": each row is of one, and no objective learns several labels of a row yet"
    raise UserError(f"{where}: `{column}` is {value!r}, {what}", "write a name or a whole number for each class")


def _is_nan(value: Any) -> bool:
    return value.strip().lower() == "nan" if isinstance(value, str) else isinstance(value, float) and math.isnan(value)


def in_order(names: set[str]) -> list[str]:
    """Classes in the order of their numbers in the head: numbers by size, else by the alphabet, as are 1 and 01."""
    try:
        return sorted(sorted(names), key=int)
    except ValueError:
        return sorted(names)


def content_of(row: Labelled | Tagged) -> str:
    """What is to be told apart, without its labels."""
    if isinstance(row, Tagged):
        return repr(row.words)
    return repr((row.text.messages if isinstance(row.text, Chat) else row.text.text, row.second))


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: `{name}` is no text", "correct the row, or name another column in `data.columns`")
    return value
