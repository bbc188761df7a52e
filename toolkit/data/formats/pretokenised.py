"""Rows that say themselves what is trained: Axolotl's segments of text, and tokens with labels.

Neither gets a template, nor a token more than it has: whoever writes such rows has decided both. What can be checked is
checked, because nothing later would notice: labels that are shifted already, or tokens of another vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, parsed
from toolkit.data.rows import IGNORE, Segments, Tokens

MASKS = ("completion_mask", "assistant_masks", "loss_mask")
"""Columns that hold 1 for every token that is trained, and 0 for the others."""


def read_segments(value: Any, where: str, ignored: Collection[str]) -> Segments:
    """Axolotl's `input_output`: parts of a text, each with a `label` that says whether it is trained.

    Raises:
        UserError: A segment is something else, or has more than that and is not `ignored`.
    """
    segments = parsed(value) or []
    parts = []
    for number, segment in enumerate(segments if isinstance(segments, list) else [segments]):
        text, label = (segment.get("text"), segment.get("label")) if isinstance(segment, dict) else (None, None)
        if not isinstance(text, str) or not isinstance(label, bool):
            raise UserError(
                f"{where}: `segments[{number}]` is no text with a label", 'write {"text": "…", "label": true or false}'
            )
        left = [key for key in segment if key not in ("text", "label", *ignored) and segment[key] not in EMPTY]
        if left:
            raise UserError(
                f"{where}: `segments[{number}]` has `{left[0]}`, which segments do not have",
                f"remove it, or set 'data.ignore=[{left[0]}]'",
            )
        parts.append((text, label))
    return Segments(parts)


def read_tokens(row: Mapping[str, Any], where: str) -> Tokens:
    """`input_ids` with `labels`, or with a mask of what is trained; without, all are.

    What `attention_mask` hides is padding, and left out. The first token is never trained, because nothing predicts it.

    Raises:
        UserError: Lists differ in length, a mask is not of 0 and 1, or a label is neither -100 nor its token.
    """
    lists = {name: _numbers(row, name, where) for name in row}
    ids = lists["input_ids"] or []
    for name, numbers in lists.items():
        if numbers is not None and len(numbers) != len(ids):
            raise UserError(
                f"{where}: `{name}` has {len(numbers)} numbers, `input_ids` has {len(ids)}", "correct or remove the row"
            )
    labels = lists.get("labels") or ids
    for name in MASKS:
        if (mask := lists.get(name)) is not None:
            if not set(mask) <= {0, 1}:
                raise UserError(f"{where}: `{name}` is not of 0 and 1", "write 1 for tokens that are trained, else 0")
            labels = [label if keep else IGNORE for label, keep in zip(labels, mask, strict=True)]
    for number, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE, token):
            raise UserError(
                f"{where}: `labels[{number}]` is {label}, the token there is {token}",
                f"a label is its token, not the next one (the model shifts them), or {IGNORE}",
            )
    visible = lists.get("attention_mask") or [1] * len(ids)
    kept = [(token, label) for token, label, seen in zip(ids, labels, visible, strict=True) if seen]
    return Tokens([token for token, _ in kept], [label if n else IGNORE for n, (_, label) in enumerate(kept)])


def refuse_unread_lists(unread: Mapping[str, Any], input_ids: Any, where: str) -> None:
    """Refuses a column with a number for each token that nothing reads: most often it says what is trained.

    Raises:
        UserError: With the mapping that has it read.
    """
    ids = parsed(input_ids)
    length = len(ids) if isinstance(ids, list) else 0
    for name in (name for name in unread if name != "token_type_ids"):
        value = parsed(unread[name])
        if not isinstance(value, list) or not len(value) == length > 0:
            continue
        if all(isinstance(each, int | float) for each in value):
            raise UserError(
                f"{where}: `{name}` has a number for each token and would be left unused",
                f"set 'data.columns={{loss_mask: {name}}}' if it is 1 for tokens that are trained, write -100 as the "
                f"`labels` of those that are not, or set 'data.ignore=[{name}]' to train without it",
            )


def _numbers(row: Mapping[str, Any], name: str, where: str) -> list[Any] | None:
    value = parsed(row[name])
    kinds = int | float if name in MASKS else int
    if value is not None and not (isinstance(value, list) and all(isinstance(number, kinds) for number in value)):
        raise UserError(f"{where}: `{name}` is no list of whole numbers", "write the ids that the tokenizer gives")
    return value
