"""Rows for another trainer, refused with what to do.

Trained as what they are not, rejected answers would be imitated, and requests learnt without their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import PAIRS_CALLED, by_lower_case, mapping_text, value_at

_ASKED = ("conversations", "messages", "input.messages", "prompt", "instruction", "question", "input")
"""Where public preference data has what was asked, the most telling first."""


@dataclass(frozen=True)
class OtherForm:
    """Rows for another trainer, known by `columns`, unless one of the columns `known_by_mapping` is mapped."""

    columns: tuple[str, ...]
    known_by_mapping: tuple[str, ...]
    what: str
    change: Callable[[_AnyCase], str]


def refuse_other_forms(
    row: Mapping[str, Any], names: set[str], mapped: Iterable[str], source: str, *, pairs: bool = False
) -> None:
    """Refuses what would otherwise be trained as something it is not.

    Args:
        row: The first row of the source.
        names: Columns that are neither mapped nor ignored.
        mapped: Columns in the data that are mapped.
        source: Path of the source.
        pairs: Whether pairs of answers are what is to be trained.
    """
    roots = {column.partition(".")[0].lower() for column in mapped}
    spelt = by_lower_case(names)
    for form in OTHER_FORMS if pairs else (*PAIRS, *OTHER_FORMS):
        judges = any(isinstance(row.get(spelt.get(column, column)), bool) for column in form.columns)
        if spelt.keys() >= set(form.columns) and not judges and not roots.intersection(form.known_by_mapping):
            raise UserError(f"data source `{source}` holds {form.what}", form.change(_AnyCase(row)))


class _AnyCase(dict[str, Any]):
    """A row by the lower case of its columns, which remembers how they are written."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__((name.lower(), value) for name, value in row.items())
        self.written = {name.lower(): name for name in row}

    def as_written(self, column: str) -> str:
        """A column, or what lies inside one, as the data has it."""
        name, dot, inside = column.partition(".")
        return self.written.get(name, name) + dot + inside


def _imitating(chosen: str, rejected: str) -> Callable[[_AnyCase], str]:
    def change(row: _AnyCase) -> str:
        answer = row.get(chosen)
        if answer is None:
            ignore = f"'data.ignore=[{row.as_written(rejected)}]'"
            return f"set objective=dpo if rows have both; to imitate the answers that they have without it set {ignore}"
        is_conversation = chosen == "chosen_messages" or (isinstance(answer, list) and len(answer) > 1)
        asked = next((name for name in _ASKED if value_at(row, name) is not None), None)
        if is_conversation:
            mapping = {"messages": chosen}
        elif asked is None:
            mapping = {"text": chosen}
        elif asked in ("instruction", "question", "input"):
            mapping = {"instruction": asked, "output": chosen}
        else:
            mapping = {"prompt": asked, "completion": chosen}
        if asked == "input.messages" and value_at(row, "input.tools"):
            mapping["tools"] = "input.tools"
        return f"set objective=dpo to learn from both, or to imitate the chosen answers set {_mapping_of(row, mapping)}"

    return change


def _mapping_of(row: _AnyCase, mapping: Mapping[str, str]) -> str:
    """The setting, with the columns as they are written, without those that need none."""
    written = {name: row.as_written(column) for name, column in mapping.items()}
    return mapping_text({name: column for name, column in written.items() if name != column})


def _batch_mapping(row: _AnyCase) -> str:
    if value_at(row, "body.messages") is None:
        return 'write each request with its answer into a row of {"messages": […]}'
    mapping = {"messages": "body.messages"}
    if value_at(row, "body.tools"):
        mapping["tools"] = "body.tools"
    return f"if its conversations end with the answer to learn, set {_mapping_of(row, mapping)}; else add the answers"


def _says(change: str, column: str = "") -> Callable[[_AnyCase], str]:
    """A change that may name a column, at {}."""
    return lambda row: change.format(row.as_written(column)) if column else change


_SINGLE = (
    'put the messages of each conversation into one row, {{"messages": [{{"role": …, "content": …}}, …]}}; '
    "to train on single texts set 'data.columns={{text: {}}}'"
)
PAIRS = tuple(
    OtherForm((rejected,), (chosen,), f"preference pairs ({chosen}, {rejected})", _imitating(chosen, rejected))
    for chosen, rejected in PAIRS_CALLED
)
"""Rows for objectives of preference."""
OTHER_FORMS = (
    OtherForm(
        ("completions", "labels"),
        ("completions",),
        "steps that are judged one by one (completions, labels), which have no trainer yet",
        _says("to imitate all steps, right or wrong, set 'data.columns={{completion: {}}}'", "completions"),
    ),
    OtherForm(
        ("custom_id", "body"), ("body",), "requests to a model (custom_id, body), without answers", _batch_mapping
    ),
    OtherForm(
        ("custom_id", "response"),
        ("response",),
        "answers to requests (custom_id, response), without the requests",
        _says('join the two files by `custom_id` into rows of {"messages": […]}'),
    ),
    OtherForm(
        ("prompt", "answers"),
        ("answers",),
        "several answers to each prompt",
        _says(
            'write the one to learn into `completion`: {"prompt": …, "completion": …}, or set objective=dpo if they '
            "have scores"
        ),
    ),
    OtherForm(
        ("role", "content"),
        ("content",),
        "single messages (it has a column `role`), not conversations",
        _says(_SINGLE, "content"),
    ),
    OtherForm(
        ("role", "text"),
        ("text",),
        "single messages (it has a column `role`), not conversations",
        _says(_SINGLE, "text"),
    ),
)
