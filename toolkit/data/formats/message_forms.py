"""Conversations in other forms, as the messages that `messages` reads.

Lists of fields (`datasets`), rounds of a question and an answer (XTuner, Capybara), messages of Gemini (`parts`) and of
Bedrock, and results of tools within a user's message (Anthropic): each becomes messages with roles and typed parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY

_ASKED = ("input", "human", "user", "question", "prompt")
_ANSWERED = ("output", "assistant", "gpt", "answer", "response")
_RESULTS = ("tool_result", "toolResult", "functionResponse")
"""How a part with the result of a tool is known: by its type, or by the key that holds it."""

Message = dict[str, Any]


def as_messages(value: list[Any] | dict[str, Any], column: str, where: str) -> list[Any]:
    """Messages of a conversation in any of these forms; what is in none of them stays as it is.

    Raises:
        UserError: Lists of fields differ in length, or a round has more than a question and an answer.
    """
    if isinstance(value, dict) and isinstance(value.get("role") or value.get("from"), list):
        value = _from_lists(value, column, where)
    messages = [value] if isinstance(value, dict) else value
    if messages and all(map(_is_round, messages)):
        places = (f"{where}: `{column}[{number}]`" for number in range(len(messages)))
        messages = [said for each, place in zip(messages, places, strict=True) for said in _said(each, place)]
    if any(isinstance(each, dict) and isinstance(each.get("content", each.get("parts")), list) for each in messages):
        messages = [each for message in messages for each in _with_results_apart(message)]
    return messages


def typed(part: Any) -> Any:
    """A part of a content with its type, where only its keys say what it is."""
    if not isinstance(part, dict) or "type" in part:
        return part
    if isinstance(part.get("text"), str):
        thought = part.get("thought") is True
        rest = {key: value for key, value in part.items() if key != "thought"} if thought else part
        return {"type": "reasoning" if thought else "text", **rest}
    call = part.get("functionCall") or part.get("toolUse")
    if not isinstance(call, dict):
        return part
    names = {"toolUseId": "id"}
    return {"type": "tool_call", **{names.get(key, key): value for key, value in call.items()}}


def _from_lists(fields: dict[str, Any], column: str, where: str) -> list[Message]:
    """A conversation that is a list for each field, as `datasets` gives a `Sequence` of objects."""
    lengths = {len(values) if isinstance(values, list) else None for values in fields.values()}
    if len(lengths) > 1:
        raise UserError(
            f"{where}: the lists of `{column}` differ in length", 'write [{"role": "user", "content": …}, …]'
        )
    return [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]


def _is_round(message: Any) -> bool:
    """Whether it is a question with its answer and says nothing of who speaks."""
    if not isinstance(message, dict) or message.get("role") or message.get("from"):
        return False
    return all(len(message.keys() & {*names}) == 1 for names in (_ASKED, _ANSWERED))


def _said(each: Message, where: str) -> Iterator[Message]:
    if more := [key for key in each if key not in ("system", *_ASKED, *_ANSWERED) and each[key] not in EMPTY]:
        raise UserError(
            f"{where} is a question and its answer, and has `{more[0]}`, too",
            'remove it, or write messages, as {"role": "user", "content": …}',
        )
    for role, names in (("system", ("system",)), ("user", _ASKED), ("assistant", _ANSWERED)):
        name = next((name for name in names if name in each), "")
        if name == "system" and each[name] in EMPTY:
            continue
        if name:
            yield {"role": role, "content": "" if each[name] is None else each[name]}


def _with_results_apart(message: Any) -> Iterator[Any]:
    """A message, before which the results of tools in it stand as messages of their own, with its other fields. What an
    assistant has among its own words stays there."""
    name = next((name for name in ("content", "parts") if isinstance(message, dict) and name in message), "")
    parts = message[name] if name else None
    results = [part for part in parts if _is_result(part)] if isinstance(parts, list) else []
    if not results or message.get("role") in ("assistant", "model"):
        yield message
        return
    others = {key: value for key, value in message.items() if key not in (name, "role", "from")}
    for part in results:
        yield others | _result(part)
    if rest := [part for part in parts or [] if not _is_result(part)]:
        yield {**message, name: rest}


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in _RESULTS or any(name in part for name in _RESULTS[1:]))


def _result(part: dict[str, Any]) -> Message:
    """The message of a tool whose result stands in a part: objects as JSON, and parts to be read as those of others."""
    held = next((part[name] for name in _RESULTS[1:] if isinstance(part.get(name), dict)), part)
    names = {"response": "content", "tool_use_id": "tool_call_id", "toolUseId": "tool_call_id", "id": "tool_call_id"}
    message = {names.get(key, key): value for key, value in held.items() if key != "type"}
    said = message.get("content") or ""
    if isinstance(said, list):
        said = [{"type": "text", "text": _as_text(each["json"])} if _is_json(each) else each for each in said]
    return message | {"role": "tool", "content": said if isinstance(said, str | list) else _as_text(said)}


def _is_json(part: Any) -> bool:
    return isinstance(part, dict) and "json" in part


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
