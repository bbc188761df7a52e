"""Recognises the format of a source by its columns, and converts its rows to one of four normal forms.

The columns decide and names are never guessed, because a wrong guess trains on the wrong text without a word; the error
proposes the mapping instead. (Data sets' `cast` or a Pydantic model per format would name a column, not `file:line`.) A
missing column or a wrong type is an error that names the row. Empty fields are not: such a row has nothing to train on,
which the audit counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.common import UserError
from toolkit.data.rows import Chat, Completion, Pair, Row, Text
from toolkit.recipe.schema import Source

FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ()),
    "prompt_completion": (("prompt", "completion"), ("tools",)),
    "alpaca": (("instruction", "output"), ("input", "system")),
    "messages": (("messages",), ("tools", "system")),
    "sharegpt": (("conversations",), ("tools", "system")),
    "source_target": (("source", "target"), ()),
}
"""Format to its required and its optional columns."""

ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "claude", "ai", "bot", "chatbot", "model"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""Role in data to the role in chat templates."""

OFTEN_CALLED = {
    "text": ("content", "document", "body"),
    "prompt": ("question", "query", "instruction", "input", "problem", "user"),
    "completion": ("answer", "response", "output", "solution", "assistant"),
    "instruction": ("question", "query"),
    "input": ("context",),
    "output": ("response", "answer", "completion"),
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
}
"""Column to names it often has elsewhere; only ever proposed, because a wrong guess would train on the wrong text."""

# The prompts of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, README).
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
    "\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Task:
    """What the rows are for: `objective` and `data.train_on` of the recipe, and whether the tokenizer renders chats."""

    objective: str
    train_on: str
    has_chat_template: bool

    @property
    def trains_prompts(self) -> bool:
        """Whether every token is trained, prompts included."""
        return self.objective == "language_modelling" or self.train_on == "all"


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one source become rows of a normal form."""

    name: str
    """One of `FORMATS`."""
    columns: Mapping[str, str]
    """Expected column to the column in the data."""
    task: Task

    def used_columns(self) -> set[str]:
        """The columns in the data that are read; all others have no influence on training."""
        return {self.columns.get(name, name) for names in FORMATS[self.name] for name in names}

    def convert(self, raw: Mapping[str, Any], where: str) -> Row:
        """The normal form of one row.

        Raises:
            UserError: A column is missing or holds something else than it must; the message names `where`.
        """
        required, optional = FORMATS[self.name]
        for name in required:
            if (column := self.columns.get(name, name)) not in raw:
                raise UserError(
                    f"{where} has no column `{column}`; it has {_listing(raw)}",
                    "correct the row, or set `data.format` and `data.columns`",
                )
        row = {name: raw.get(self.columns.get(name, name)) for name in (*required, *optional)}
        if self.name == "alpaca":
            return self._alpaca(*(_string(row, name, where) for name in ("system", "instruction", "input", "output")))
        if self.name in ("messages", "sharegpt"):
            return _chat(row, required[0], where)
        is_pair = self.task.objective == "seq2seq"
        if not is_pair and any(isinstance(row[name], list) for name in required) and self.name == "prompt_completion":
            return _conversational_completion(row, where, self.task.trains_prompts)
        texts = [_string(row, name, where) for name in required]
        return Text(*texts) if self.name == "text" else Pair(*texts) if is_pair else Completion(*texts)

    def _alpaca(self, system: str, instruction: str, context: str, output: str) -> Chat | Completion | Pair:
        if self.task.objective == "seq2seq":
            return Pair("\n\n".join(filter(None, (system, instruction, context))), output)
        if not self.task.has_chat_template:
            template = ALPACA_WITH_INPUT if context else ALPACA
            prompt = template.format(instruction=instruction, input=context)
            return Completion(f"{system}\n\n{prompt}" if system else prompt, output)
        messages = [{"role": "system", "content": system}] if system else []
        user = f"{instruction}\n\n{context}" if context else instruction
        return Chat([*messages, {"role": "user", "content": user}, {"role": "assistant", "content": output}])


def recognise(rows: Iterable[Mapping[str, Any]], source: Source, task: Task) -> RowFormat:
    """Finds the format of a source by the columns of its first rows.

    The `format` of the source (unless `auto`) decides, its `columns` rename.

    Raises:
        UserError: No format fits, several do, or it does not suit the task.
    """
    present = dict.fromkeys(name for row in rows for name in row)
    columns = source.columns or {}
    known = sorted({column for required, optional in FORMATS.values() for column in required + optional})
    for expected, actual in columns.items():
        if expected not in known:
            raise UserError(
                f"`data.columns` renames to `{expected}`, which no format has",
                f"write {{expected: column in the data}}, where expected is one of {', '.join(known)}",
            )
        if actual not in present:
            raise UserError(
                f"data source `{source.path}` has no column `{actual}` that `data.columns` names for `{expected}`",
                f"its columns are {_listing(present)}",
            )
    names = (set(present) - set(columns.values())) | set(columns)
    name = source.format
    if name is None or name == "auto":
        name = _detect(names, set(columns), source, present, task.has_chat_template)
    if missing := [column for column in FORMATS[name][0] if column not in names]:
        raise UserError(
            f"data source `{source.path}` has no column `{missing[0]}`, which `data.format: {name}` needs; "
            f"its columns are {_listing(present)}",
            f"map it with `data.columns: {{{missing[0]}: NAME}}` or choose another `data.format`",
        )
    if name in ("messages", "sharegpt") and not task.has_chat_template:
        raise UserError(
            f"data source `{source.path}` holds chats, but the tokenizer has no chat template",
            "set `model.chat_template` (`chatml` or a Jinja file), or train an instruct model that has one",
        )
    _check_task(name, source, task)
    return RowFormat(name, columns, task)


def _detect(names: set[str], mapped: set[str], source: Source, present: Iterable[str], has_chat_template: bool) -> str:
    fits = [name for name, (required, _) in FORMATS.items() if names.issuperset(required)]
    if mapped:
        fits = [name for name in fits if mapped <= set(FORMATS[name][0] + FORMATS[name][1])]
    else:
        _refuse_look_alikes(names, source)
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UserError(
            f"data source `{source.path}` fits several formats: {', '.join(fits)}; its columns are {_listing(present)}",
            f"set `data.format` to one of {', '.join(fits)}",
        )
    accepted = "; ".join(f"{name} ({', '.join(required)})" for name, (required, _) in FORMATS.items())
    raise UserError(
        f"data source `{source.path}` has the columns {_listing(present)}, which no format fits",
        f"{_proposal(names, has_chat_template)}; accepted are {accepted} (in a CSV the first line names the columns)",
    )


def _refuse_look_alikes(names: set[str], source: Source) -> None:
    """Rows of other trainers, and single messages, would otherwise be trained as something they are not."""
    holds = f"data source `{source.path}` holds"
    if {"chosen", "rejected"} <= names:
        raise UserError(
            f"{holds} preference pairs (chosen, rejected), which have no trainer yet",
            "to imitate the chosen answers set `data.columns: {completion: chosen}`, or `{messages: chosen}` if each "
            "is a whole conversation",
        )
    if {"prompt", "completion", "label"} <= names:
        raise UserError(
            f"{holds} rated answers (prompt, completion, label), which have no trainer yet",
            "to imitate every answer, good or bad, set `data.format: prompt_completion`",
        )
    if "role" in names and names & {"content", "text"}:
        raise UserError(
            f"{holds} single messages (it has a column `role`), not conversations",
            'put the messages of each conversation into one row, {"messages": [{"role": …, "content": …}, …]}; '
            "to train on single texts set `data.format: text`",
        )


def _proposal(names: set[str], has_chat_template: bool) -> str:
    """The setting that maps the present columns to the format that uses most of them."""
    best: dict[str, str] = {}
    # Of two that use as many, alpaca is rendered with the chat template and prompt_completion is not.
    for name in sorted(FORMATS, key=lambda name: name != "alpaca") if has_chat_template else FORMATS:
        required, optional = FORMATS[name]
        mapping = {
            column: actual
            for column in required + optional
            if (actual := next((name for name in (column, *OFTEN_CALLED.get(column, ())) if name in names), None))
        }
        if mapping.keys() >= set(required) and len(mapping) > len(best):
            best = mapping
    renamed = [f"{name}: {actual}" for name, actual in best.items() if name != actual]
    if not renamed:
        return "map names with 'data.columns={prompt: NAME, completion: NAME}'"
    return f"set 'data.columns={{{', '.join(renamed)}}}' if that is what they are"


def _check_task(name: str, source: Source, task: Task) -> None:
    """Refuses rows that the objective or `data.train_on` cannot use."""
    where = f"data source `{source.path}` ({name})"
    pairs = ("prompt_completion", "alpaca", "source_target")
    if task.objective == "seq2seq" and name not in pairs:
        raise UserError(f"{where} does not fit `objective: seq2seq`", f"it takes {', '.join(pairs)}")
    if task.objective != "seq2seq" and name == "source_target":
        raise UserError(
            f"{where} is for encoder-decoders, not for `objective: {task.objective}`",
            "set `objective: seq2seq`, or `data.columns: {prompt: source, completion: target}`",
        )
    chat, completion = ("auto", "assistant", "last_assistant", "all"), ("auto", "completion", "all")
    is_chat = task.has_chat_template if name == "alpaca" else name not in pairs
    allowed = ("auto", "all") if name == "text" else chat if is_chat else completion
    if task.objective == "sft" and task.train_on not in allowed:
        raise UserError(
            f"{where} has nothing that `data.train_on: {task.train_on}` could mean",
            f"set `data.train_on` to one of {', '.join(allowed)}",
        )


def _chat(row: dict[str, Any], column: str, where: str) -> Chat:
    messages = _messages(row[column], column, where)
    if system := _string(row, "system", where):
        if messages and messages[0]["role"] == "system":
            raise UserError(
                f"{where} has a `system` column and a system message", "keep one of the two, or rename the column"
            )
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, _tools(row.get("tools"), where))


def _conversational_completion(row: dict[str, Any], where: str, trains_prompts: bool) -> Chat:
    messages = []
    for column, role, trained in (("prompt", "user", trains_prompts), ("completion", "assistant", True)):
        turns = row[column] if isinstance(row[column], list) else [{"role": role, "content": row[column]}]
        messages += [m if trained else m | {"train": False} for m in _messages(turns, column, where)]
    return Chat(messages, _tools(row.get("tools"), where))


def _messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    value = _parsed(value)
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{where}: `{column}` is not a list of messages", 'write [{"role": "user", "content": …}, …]')
    return [_message(message, f"{where}: `{column}[{n}]`") for n, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where} is not an object", 'a message is {"role": "user", "content": …}')
    message = {key: value for key, value in message.items() if value is not None}
    role = message.pop("role", None) or message.pop("from", None)
    role = role.lower() if isinstance(role, str) else None
    if role not in ROLES:
        raise UserError(f"{where} has the role {role!r}", f"change the row; roles are {', '.join(ROLES)}")
    content = message.pop("content", message.pop("value", ""))
    result: dict[str, Any] = {"role": ROLES[role], "content": _content(content, where)}
    calls = message.pop("tool_calls", None)
    if role in ("function_call", "tool_call"):
        calls, result["content"] = content, ""
    if (legacy := message.pop("function_call", None)) is not None:
        calls = [legacy]
    if calls := _parsed(calls):
        calls = calls if isinstance(calls, list) else [calls]
        result["tool_calls"] = [_tool_call(call, where) for call in calls]
    if (weight := message.pop("weight", None)) is not None:
        if weight not in (0, 1):
            raise UserError(f"{where} has the weight {weight!r}", "a message's `weight` is 0 or 1")
        message.setdefault("train", bool(weight))
    if not isinstance(message.get("train", True), bool):
        raise UserError(f"{where} has `train: {message['train']!r}`", "a message's `train` is true or false")
    return result | message


def _content(content: Any, where: str) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part.get("text") or "" for part in content)
    if not isinstance(content, str):
        raise UserError(
            f"{where} has content of another kind than text",
            "change or remove the row; content is a string, or a list of text parts",
        )
    return content


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI's form with arguments as an object, which is what chat templates print."""
    call = _parsed(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} has a tool call without a name", 'write {"name": …, "arguments": {…}}')
    arguments = _parsed(function.get("arguments", {})) or {}
    if not isinstance(arguments, dict):
        raise UserError(
            f"{where} calls `{function['name']}` with arguments that are no JSON object", 'write {"argument": value}'
        )
    outer = {key: value for key, value in call.items() if key == "id"}
    return outer | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    value = _parsed(value)
    if not value:
        return None
    tools = [_parsed(tool) for tool in value] if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: `tools` is not a list of tool definitions", "write JSON schema objects")
    return tools


def _parsed(value: Any) -> Any:
    """Decodes JSON inside a string, which data sets use to get nested objects through Arrow."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value or None


def _string(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        kinds = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
        raise UserError(
            f"{where}: `{name}` is {kinds.get(type(value), type(value).__name__)}, not a string",
            'write it as text ("4" for 4), or choose other columns with `data.columns`',
        )
    return value


def _listing(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
