"""The content of a message: text, alone or in typed parts, and which parts are marked as not trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, JUDGED, MEDIA_PARTS, parsed
from toolkit.data.formats.message_forms import typed

Ranges = list[list[int]]
"""[start, end) of characters."""
_INVERTED = ("masked", "ignore_loss")
FLAGS = (
    *("train", "training", "trainable", "loss", "loss_weight", "loss_mask", "loss_scale", "calculate_loss", "weight"),
    *_INVERTED,
)
"""Names of what says whether a message, or a part of it, is trained."""
_TEXTS = ("text", "content", "value", "refusal", "thinking", "reasoning")
"""Names of the text of a part."""


class Content:
    """The text of a message, collected from a string or from typed parts.

    Args:
        default: Whether what says nothing of it is trained.
        where: File and line, for errors.
        ignored: Names of flags that are left out on purpose.
        names: Those of flags.

    Attributes:
        text: All text parts, joined.
        parts: Number of text parts.
        flags: (start, end, whether trained) of parts that say so.
        calls: Tool calls among the parts, with the flags of their part.
        reasoning: Parts that hold reasoning.
        dropped: Keys of parts that nothing reads.
    """

    def __init__(
        self, default: bool, where: str, ignored: Collection[str] = (), names: Collection[str] = FLAGS
    ) -> None:
        self.where, self.default, self.ignored, self.names = where, default, ignored, names
        self.text, self.parts = "", 0
        self.flags: list[tuple[int, int, bool]] = []
        self.calls: list[Any] = []
        self.reasoning: list[dict[str, Any]] = []
        self.dropped: list[str] = []

    def add(self, content: Any) -> None:
        """Takes what the field of a message holds."""
        if isinstance(content, str):
            self.text += content
            self.parts += bool(content)
            return
        for part in content if isinstance(content, list) else [content]:
            self._add_part(part)

    def untrained(self) -> Ranges:
        """The characters that are not trained, if the message is."""
        trained = [[start, end] for start, end, flag in self.flags if flag]
        if self.default:
            return [[start, end] for start, end, flag in self.flags if not flag]
        return complement(trained, len(self.text))

    def _add_part(self, part: Any) -> None:
        part = typed(part)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA_PARTS:
            raise refused_media(self.where, str(kind))
        name = next((name for name in _TEXTS if part.get(name) is not None), "text") if kind else ""
        value = part.get(name, "") if kind else None
        if kind in ("text", "input_text", "output_text", "refusal") and isinstance(value, str):
            start, self.parts = len(self.text), self.parts + 1
            self.text += value
            read = {key: each for key, each in part.items() if key not in self.ignored}
            if (flag := take_flag(read, self.where, self.names)) is not None:
                self.flags.append((start, len(self.text), flag))
            self.dropped += further(part, ("type", name, *self.names), "content")
        elif kind in ("reasoning", "thinking") and isinstance(value, str):
            self.reasoning.append(part | {"type": "text"})
        elif kind in ("tool_call", "function_call", "tool_use"):
            calls = parsed(part.get("value", part))
            flags = flags_of(part, self.names)
            self.calls += [
                flags | each if isinstance(each, dict) else each
                for each in map(parsed, calls if isinstance(calls, list) else [calls])
            ]
        else:
            raise UserError(
                f"{self.where} has content of another kind than text{f', {kind!r}' if isinstance(kind, str) else ''}",
                'change or remove the row; content is a string, or a list of parts as {"type": "text", "text": …} or '
                '{"type": "tool_call", "name": …, "arguments": {…}}; a result is a message of the role `tool`',
            )


def refused_media(where: str, name: str) -> UserError:
    return UserError(
        f"{where} has `{name}`: pictures, sound or film, which this toolkit does not train on", "remove these rows"
    )


def flags_of(holder: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What an object holds under names of flags, whatever it says."""
    return {key: value for key, value in holder.items() if key in names or key.lower() in names}


def take_flag(holder: dict[str, Any], where: str, names: Collection[str] = FLAGS) -> bool | None:
    """Takes the fields that say whether a message or part is trained out of it; None if there is none."""
    if "mask" in holder and "mask" not in names:
        raise UserError(
            f"{where} has `mask`, which some trainers take for trained and some for not",
            "write `train`, or set 'data.columns={train: mask}' if what it marks is trained",
        )
    for name in (name for name in holder if name not in names and name.lower() in JUDGED):
        if not JUDGED[name.lower()](holder[name]):
            continue
        raise UserError(
            f"{where} has `{name}: {holder[name]!r}`, which may judge it, or say whether it is trained",
            f"write `train`, or set 'data.columns={{train: {name}}}' if what it marks is trained, or "
            f"'data.ignore=[{name}]'",
        )
    flags = set()
    for name in [name for name in holder if name in names or name.lower() in names]:
        value = holder.pop(name)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise UserError(
                f"{where} has `{name}: {value!r}`",
                f"what is said is trained or not: `{name}` is true or false, or 1 or 0; to train by the rest of the "
                f"row, set 'data.ignore=[{name}]'",
            )
        flags.add(bool(value) != (name.lower() in _INVERTED))
    if len(flags) > 1:
        raise UserError(
            f"{where} says twice whether it is trained, and not the same", f"keep one of {', '.join(names)}"
        )
    return next(iter(flags), None)


def complement(ranges: Ranges, length: int) -> Ranges:
    """The characters of a text that lie in none of some sorted ranges."""
    gaps, position = [], 0
    for start, end in ranges:
        if start > position:
            gaps.append([position, min(start, length)])
        position = max(position, end)
    return [*gaps, [position, length]] if position < length else gaps


def further(holder: dict[str, Any], read: Collection[str], path: str) -> list[str]:
    """Dotted names of what an object holds beside what is read of it."""
    return [f"{path}.{key}" for key, value in holder.items() if key not in read and value not in EMPTY]
