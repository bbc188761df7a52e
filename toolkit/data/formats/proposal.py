"""Which `data.columns` would make a source with unknown columns one of the formats: proposed, never taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import OFTEN_CALLED, by_lower_case, listed, mapping_text, parsed, value_at
from toolkit.data.formats.messages import are_messages, conversation_in, dicts, holds_messages
from toolkit.recipe.data import FORMATS


def proposal(names: set[str], row: Mapping[str, Any], has_chat_template: bool, accepted: Sequence[str]) -> str:
    """The setting that maps the present columns to the accepted format that uses most of them."""
    best: dict[str, str] = {}
    as_well: list[str] = []
    spelt = by_lower_case(names)
    # Of two that use as many, alpaca is rendered with the chat template and prompt_completion is not.
    for form in sorted(accepted, key=lambda name: name != "alpaca") if has_chat_template else accepted:
        required, optional = FORMATS[form]
        if form == "prompt_completion" and not has_chat_template:
            optional = ()  # They are for chats.
        mapping: dict[str, str] = {}
        for column in required + optional:
            aliases = (alias for alias in (column, *OFTEN_CALLED.get(column, ())) if alias in spelt)
            left = (spelt[alias] for alias in aliases if spelt[alias] not in mapping.values())
            if name := next((name for name in left if _suits(column, form, row.get(name))), None):
                mapping[column] = name
        if mapping.keys() >= set(required) and len(mapping) > len(best):
            best, as_well = mapping, [f"`{name}`" for name in optional if mapping.get(name) == name]
    renamed = {name: actual for name, actual in best.items() if name != actual}
    if renamed:
        also = f" ({' and '.join(as_well)} will be read, too)" if as_well else ""
        return f"set {mapping_text(renamed)} if that is what they are{also}"
    if "prompt" in names:
        return "add the answers, as `completion`; prompts alone are for objective=grpo, which learns from rewards"
    inside = {f"{name}.{key}" for name in names if isinstance(row.get(name), dict) for key in row[name]}
    if talk := next((name for name in sorted(names | inside) if are_messages(value_at(row, name))), None):
        return f"set {mapping_text({'messages': talk})} if its conversations end with the answer to learn"
    texts = ((name, value_at(row, name)) for name in sorted(names | inside))
    written = ((name, conversation_in(text, {"messages": name})) for name, text in texts if isinstance(text, str))
    if found := next(((name, change) for name, change in written if change), None):
        return f"`{found[0]}` holds a conversation as text: {found[1]}"
    # Rather one that may be an answer.
    nearest = sorted(
        inside, key=lambda name: (not _suits("completion", "prompt_completion", value_at(row, name)), name)
    )
    dotted = f"; a dot reaches inside a column, as in `{nearest[0]}`" if nearest else ""
    return f"map names with 'data.columns={{prompt: NAME, completion: NAME}}'{dotted}"


def check_named(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Refuses names of `data.columns` that no row has.

    Args:
        columns: As `expected: actual`.
        rows: The first of a source.
        path: Of the source.

    Raises:
        UserError: With the columns that there are.
    """
    present = dict.fromkeys(name for row in rows for name in row)
    for expected, actual in columns.items():
        if actual not in present and all(value_at(row, actual) is None for row in rows):
            raise UserError(
                f"data source `{path}` has no column `{actual}` that `data.columns` names for `{expected}`",
                f"its columns are {listed(present)}",
            )


def _suits(column: str, form: str, value: Any) -> bool:
    """Whether a value can be what a column of a format is, by its type: a text or a conversation."""
    if value is None or column not in FORMATS[form][0] or form == "tokens":
        return True
    if form == "segments":
        return any("text" in each for each in dicts(value))
    if form in ("messages", "sharegpt"):
        return isinstance(parsed(value), list | dict)
    if holds_messages(value):
        return form == "prompt_completion"
    return isinstance(value, str | int | float) or (are_texts(value) and len(value) == 1)


def are_texts(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
