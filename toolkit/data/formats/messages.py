"""Messages of conversations as OpenAI, ShareGPT, LLaMA-Factory, Axolotl and TRL write them, in one form.

Each message becomes what chat templates expect (role, content, tool calls as objects, `reasoning_content`), and beside
it `train` and `untrained`: which messages carry loss, and which characters of them do not. A field without a meaning in
those formats reaches the template as it is; one that has a meaning which cannot be honoured is refused. Tool calls and
parts of a content are put into one form, so their further keys reach no template: `dropped` names them for the audit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, MEDIA, mapping_text, parsed
from toolkit.data.formats.content import (
    FLAGS,
    Content,
    Ranges,
    complement,
    flags_of,
    further,
    refused_media,
    take_flag,
)
from toolkit.data.formats.message_forms import as_messages

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "claude", "ai", "bot", "chatbot", "model"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""Role in data to the role in chat templates."""
_CALLS = ("function_call", "tool_call")
"""Roles whose text is a call."""
_PLAIN = {"role", "content"}
REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Names of what the model thinks before it answers."""
FOR_TEMPLATES: dict[str, tuple[tuple[Any, ...], str]] = {
    "channel": (("final",), "write an analysis as `reasoning_content` of the message that follows it"),
    "recipient": (("all", "assistant"), "write it as `tool_calls`"),
    "function_calls": ((), "write them as `tool_calls`"),
    **dict.fromkeys(
        ("tool_plan", "reasoning_details", "thoughts", "think", "analysis", "chain_of_thought"),
        ((), "write its text as `reasoning_content`"),
    ),
    **dict.fromkeys(("tools", "functions"), ((), "write them as `tools` beside the messages")),
    **dict.fromkeys(("documents", "context", "attachments", "files"), ((), "write it into the text")),
}
"""Fields that change what should be learnt and that only some templates print: values that change nothing, and what to
do where the template leaves them out."""
ASIDE = ("train", "untrained", "dropped")
"""Fields of a message in this form that are not for the template."""
_READ = ("role", "content", "tool_calls", "reasoning_content", *ASIDE)
"""Fields of a message in this form; it keeps others for the template."""
_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Names of what a tool is called with."""
_SPOKEN = ("content", "value", "text", "refusal", "parts")
"""Names of what a message says."""
_ABOUT = ("name", "id", "tool_call_id")
"""Fields that a message without a text may have."""
_PRINTED = re.compile(
    r"\s*((\[\s*)?\{\s*'(role|from|content|value)'|\{[^{}\[\]]*'(messages|conversations)')\s*:\s*['\"\[{]"
)
"""How Python prints a conversation, which is no JSON: so pandas writes lists into a CSV."""
_AS_JSON = "write it as JSON (`json.dumps`), or save the table as JSONL or Parquet, which keep lists"

Message = dict[str, Any]


def read_messages(
    value: Any,
    column: str,
    where: str,
    ignored: Collection[str] = (),
    flags: Collection[str] = FLAGS,
    trained: Collection[str] = ("assistant",),
) -> list[Message]:
    """A conversation, or one message of it; a JSON string of either, too.

    Args:
        value: What the column holds.
        column: Its name.
        where: Where its row stands.
        ignored: Fields of messages that are left out on purpose.
        flags: Fields that say whether a message is trained.
        trained: Roles whose messages are where they do not say it.

    Raises:
        UserError: Something is no message, or would be lost; it names the message.
    """
    value = parsed(value)
    if value is None:
        return []
    if isinstance(value, str) and _PRINTED.match(value):
        raise UserError(f"{where}: `{column}` holds a conversation as Python prints it, which is no JSON", _AS_JSON)
    if not isinstance(value, list | dict):
        raise UserError(f"{where}: `{column}` is not a list of messages", 'write [{"role": "user", "content": …}, …]')
    messages = as_messages(value, column, where)
    reads_all = not _PLAIN.isdisjoint((*ignored, *flags))
    return [
        {"role": ROLES[message["role"]], "content": message["content"]}
        if _is_plain(message) and not reads_all
        else _message(message, f"{where}: `{column}[{n}]`", ignored, flags, trained)
        for n, message in enumerate(messages)
    ]


def _is_plain(message: Any) -> bool:
    """Whether a message says nothing but who says what, as most do, and so needs no reading."""
    if not isinstance(message, dict) or message.keys() != _PLAIN:
        return False
    role, content = message["role"], message["content"]
    return type(role) is type(content) is str and role in ROLES and role not in _CALLS


def dicts(value: Any) -> list[dict[str, Any]]:
    """The messages that a column may hold."""
    value = parsed(value)
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]


def are_messages(value: Any) -> bool:
    """Whether a value is a message or a list of messages by their roles, also as JSON."""
    written = dicts(value) if not isinstance(value, str) or value.lstrip().startswith(("[", "{")) else []
    return bool(written) and all(str(each.get("role") or each.get("from")).lower() in ROLES for each in written)


def holds_messages(value: Any) -> bool:
    """Whether a prompt or completion is a message or a list of messages, also as JSON, and no text."""
    return are_messages(value) if isinstance(value, str) else bool(dicts(value))


def conversation_in(text: str, mapping: Mapping[str, str]) -> str:
    """What to do with a text that is a conversation; empty for any other.

    Args:
        mapping: The `data.columns` with which it is read as one, if it is a list of messages as JSON.
    """
    if _PRINTED.match(text):
        return _AS_JSON
    if holds_messages(text):
        return f"set {mapping_text(mapping)}"
    inside = dicts(text) if text.lstrip().startswith("{") else []
    named = [name for each in inside for name in ("messages", "conversations") if holds_messages(each.get(name))]
    return f"write its `{named[0]}` as a column of the row" if named else ""


def further_fields(messages: Iterable[Message]) -> list[str]:
    """Fields with a content that only a template could use, and dotted ones that it is not given."""
    messages = list(messages)
    kept = [key for message in messages for key, value in message.items() if key not in _READ and value not in EMPTY]
    return [*kept, *(name for message in messages for name in message.get("dropped", ()))]


def without_use(fields: Iterable[str], template: str) -> list[str]:
    """Those of `further_fields` that a chat template neither names nor prints with the whole message."""
    printed = re.search(r"\bmessages?\s*\|\s*tojson", template)
    return [
        field for field in fields if "." in field or not (printed or re.search(rf"\b{re.escape(field)}\b", template))
    ]


def are_tools(value: Any) -> bool:
    """Whether a value is a list of definitions of functions, also as JSON, and nothing else that is called so."""
    tools = parsed(value)
    return isinstance(tools, list) and all(
        isinstance(tool, dict) and (isinstance(tool.get("function"), dict) or isinstance(tool.get("name"), str))
        for tool in map(parsed, tools)
    )


def read_tools(value: Any, where: str, column: str = "tools") -> list[dict[str, Any]] | None:
    """Tool definitions in OpenAI's form, or None if there are none; a bare function is put into it.

    Raises:
        UserError: They are something else.
    """
    value = parsed(value)
    if not value:
        return None
    tools = [parsed(tool) for tool in (value if isinstance(value, list) else [value])]
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: `{column}` is not a list of tool definitions", "write JSON schema objects")
    return [_tool(tool) for tool in tools]


def read_settings(value: Any, where: str) -> dict[str, Any] | None:
    """What a row itself gives to the chat template, as `chat_template_kwargs`; None without any.

    Raises:
        UserError: It is no object.
    """
    settings = parsed(value) or None
    if not isinstance(settings, dict | None):
        raise UserError(f"{where}: `chat_template_kwargs` is no object", 'write {"enable_thinking": false}')
    return settings


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if isinstance(tool.get("name"), str) and "function" not in tool:
        schema = {"input_schema": "parameters"} if "parameters" not in tool else {}  # Anthropic's name.
        named = {schema.get(key, key): inner for key, inner in tool.items() if key != "type"}
        tool = {"type": "function", "function": named}
    function = tool.get("function")
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        tool = tool | {"function": function | {"parameters": parsed(function["parameters"])}}
    return tool


def _message(
    message: Any, where: str, ignored: Collection[str], flags: Collection[str], trained: Collection[str]
) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where} is not an object", 'a message is {"role": "user", "content": …}')
    is_silent = not any(name in message for name in _SPOKEN)
    message = {key: value for key, value in message.items() if value is not None and key not in ignored}
    role = message.pop("role", None) or message.pop("from", None)
    if not role:
        keys = ", ".join(f"`{key}`" for key in message) or "nothing"
        raise UserError(
            f"{where} says nothing of who speaks (no `role`, no `from`); it has {keys}",
            'write each message as {"role": "user", "content": …}, then {"role": "assistant", "content": …}',
        )
    role = role.lower() if isinstance(role, str) else role
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where} has the role {role!r}", f"change the row; roles are {', '.join(ROLES)}")
    if media := next((name for name in message if name.lower() in MEDIA and message[name] not in EMPTY), None):
        raise refused_media(where, media)
    flag = take_flag(message, where, flags)
    given = [message.pop(name) for name in _SPOKEN if message.get(name)]
    if len(given) > 1:
        raise UserError(f"{where} has its text twice (content, value, text or refusal)", "keep one of them")
    default = flag if flag is not None else ROLES[role] in trained
    content = Content(default, where, ignored, flags)
    content.add(given[0] if given else message.pop("content", ""))
    calls = message.pop("tool_calls", None)
    if role in _CALLS:
        calls, content.text, content.parts = content.text, "", 0
    if (legacy := message.pop("function_call", None)) is not None:
        calls = [legacy]
    calls = parsed(calls) or []
    calls = [*content.calls, *(calls if isinstance(calls, list) else [calls])]
    result: Message = {"role": ROLES[role], "content": content.text}
    dropped = dict.fromkeys(content.dropped)
    if calls:
        result["tool_calls"] = [_tool_call(call, where, dropped, flags) for call in calls]
    thoughts = [message.pop(name) for name in REASONING if message.get(name)]
    if thoughts := [thought for thought in (content.reasoning, *thoughts) if thought]:
        message.pop("reasoning_details", None)  # OpenRouter's, which say the same in parts.
    if any(thought != thoughts[0] for thought in thoughts):
        raise UserError(f"{where} says twice what the model thinks", f"keep one of {', '.join(REASONING)}")
    reasoning = Content(default, where, ignored, flags)
    reasoning.add(thoughts[0] if thoughts else "")
    if reasoning.text:
        result["reasoning_content"] = reasoning.text
    of_calls = [_call_flag(call, f"{where} (`tool_calls[{n}]`)", ignored, flags) for n, call in enumerate(calls)]
    flagged = content.flags or reasoning.flags or any(each is not None for each in of_calls)
    untrained = {"content": content.untrained(), "reasoning_content": reasoning.untrained()} if flagged else {}
    if (details := message.pop("train_detail", None)) is not None:
        untrained["content"] = _outside(details, len(content.text), where)
    parts = [part for _, _, part in (*content.flags, *reasoning.flags)] + [
        each for each in of_calls if each is not None
    ]
    if True in parts or (details and flag is None):
        flag = True
    elif parts and len(parts) == content.parts + reasoning.parts + len(calls):
        flag = False
    is_trained = default if flag is None else flag
    if parts and any((default if each is None else each) != is_trained for each in of_calls):
        raise UserError(
            f"{where} has parts that are trained and tool calls that are not: calls can only be left out with all that "
            "is said beside them",
            "write `train: false` for the whole message, or train its calls",
        )
    if flag is not None:
        result["train"] = flag
    for name in ("dropped", "untrained"):
        if message.pop(name, None):
            # A field of the file's, whose name is needed below.
            dropped[name] = None
    if names := [name for name in (dropped | dict.fromkeys(reasoning.dropped)) if name not in ignored]:
        result["dropped"] = names
    if any(untrained.values()) and flag is not False:
        result["untrained"] = {field: ranges for field, ranges in untrained.items() if ranges}
    if is_silent and not (calls or result["content"] or reasoning.text):
        _refuse_unread_text(message, where)
    # An empty field of another spelling takes nothing away.
    return result | message | result


def _refuse_unread_text(message: Message, where: str) -> None:
    """Refuses a message that would be taken for an empty one, though it says something under another name."""
    known = {*_ABOUT, *FOR_TEMPLATES}
    given = [name for name in message if name not in known and isinstance(message[name], str | list | dict)]
    if name := next((name for name in given if message[name] not in EMPTY), None):
        raise UserError(
            f"{where} has no `content`, but `{name}`", f"write what it says as `content`, or set 'data.ignore=[{name}]'"
        )


def _outside(details: Any, length: int, where: str) -> Ranges:
    """What Axolotl's `train_detail` does not train: its offsets count characters, the last one included."""
    try:
        trained = [[int(d["begin_offset"]), int(d["end_offset"]) + 1] for d in details if d["train"]]
    except (TypeError, KeyError, ValueError):
        raise UserError(
            f"{where} has a `train_detail` that is no list of ranges",
            'write [{"begin_offset": 0, "end_offset": 8, "train": true}, …]',
        ) from None
    return complement(sorted(trained), length)


def _call_flag(call: Any, where: str, ignored: Collection[str], flags: Collection[str]) -> bool | None:
    """Whether a tool call is trained, if it says so."""
    call = parsed(call)
    given = flags_of(call, flags) if isinstance(call, dict) else {}
    return take_flag({key: value for key, value in given.items() if key not in ignored}, where, flags)


def _tool_call(call: Any, where: str, dropped: dict[str, None], flags: Collection[str]) -> dict[str, Any]:
    """OpenAI's form with arguments as an object, which is what chat templates print; notes what is dropped."""
    call = parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} has a tool call without a name", 'write {"name": …, "arguments": {…}}')
    given = next((name for name in _ARGUMENTS if function.get(name)), "")
    arguments = parsed(function.get(given)) or {}
    if not isinstance(arguments, dict):
        raise UserError(
            f"{where} calls `{function['name']}` with arguments that are no JSON object", 'write {"argument": value}'
        )
    outer = {key: value for key, value in call.items() if key == "id"}
    inner = ("name", given) if "function" in call else ("name", given, "id", "type")
    dropped |= dict.fromkeys(further(function, inner if "function" in call else (*inner, *flags), "tool_calls"))
    if "function" in call:
        dropped |= dict.fromkeys(further(call, ("id", "type", "function", *flags), "tool_calls"))
    return outer | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
