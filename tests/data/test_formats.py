"""Rows of every format become the right normal form; wrong ones are named with row and cure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import yaml

from toolkit.common import UserError
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task
from toolkit.data.rows import Chat, Completion, Pair, Row, Segments, Text, Tokens, from_json, to_json
from toolkit.recipe.data import Source


def convert(
    *rows: dict[str, Any],
    objective: str = "sft",
    train_on: str = "auto",
    template: bool = True,
    **settings: Any,
) -> Row:
    row_format = recognise(rows, Source(path="d.jsonl", **settings), Task(objective, train_on, template))
    return row_format.convert(rows[0], "d.jsonl:1")


def refused(*rows: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        convert(*rows, **settings)
    assert caught.value.change
    return str(caught.value)


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_text_and_completion() -> None:
    assert convert({"text": "a\r\nb", "id": 1}) == Text("a\r\nb")
    assert convert({"prompt": "p", "completion": None}) == Completion("p", "")


def test_alpaca_needs_a_template_to_be_a_chat() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert convert(row) == Chat([user("Add\n\n1 2"), assistant("3")])
    assert convert({"instruction": "Hi", "output": "Yo", "system": "S"}) == Chat(
        [{"role": "system", "content": "S"}, user("Hi"), assistant("Yo")]
    )
    completion = convert(row, template=False)
    assert isinstance(completion, Completion)
    assert completion.prompt.startswith("Below is an instruction that describes a task, paired with an input")
    assert completion.prompt.endswith("### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n")
    without_input = convert({"instruction": "{x}", "input": "", "output": "3"}, template=False)
    assert isinstance(without_input, Completion) and "Input" not in without_input.prompt
    assert "### Instruction:\n{x}\n" in without_input.prompt


def test_messages_with_tools_in_every_spelling() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    wanted = Chat(
        [user("?"), {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "21"}],
        tools,
    )
    spellings: list[Any] = [
        [call],
        [{"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
        [{"name": "weather", "arguments": {"city": "Rome"}}],
        json.dumps([call]),
    ]
    for calls in spellings:
        messages = [
            user("?"),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "21"},
        ]
        assert convert({"messages": messages, "tools": tools}) == wanted
        assert convert({"messages": json.dumps(messages), "tools": json.dumps(tools)}) == wanted
    legacy = [user("?"), {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}}]
    assert convert({"messages": [*legacy, {"role": "function", "content": "21"}], "tools": tools}) == wanted


def test_sharegpt() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert convert({"conversations": turns, "system": "S"}) == Chat(
        [{"role": "system", "content": "S"}, user("hi"), assistant("yo")]
    )
    assert convert({"conversations": [user("hi"), assistant("yo")]}) == Chat([user("hi"), assistant("yo")])
    turns = [
        {"from": "human", "value": "?"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
    ]
    chat = convert({"conversations": turns})
    assert isinstance(chat, Chat)
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert chat.messages[2] == {"role": "tool", "content": "2"}


def test_content_parts_weights_and_other_keys() -> None:
    row = {
        "messages": [
            user("hi", name="Ann"),
            assistant("one", weight=0),
            user("more"),
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}],
                "weight": 1,
            },
        ]
    }
    assert convert(row) == Chat(
        [user("hi", name="Ann"), assistant("one", train=False), user("more"), assistant("two", train=True)]
    )


def test_conversational_completion_trains_only_the_completion() -> None:
    row = {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d")]}
    chat = convert(row, train_on="completion")
    assert isinstance(chat, Chat)
    assert [message.get("train") for message in chat.messages] == [False, False, False, None]


def test_a_prompts_message_that_says_it_is_trained_is() -> None:
    row = {"prompt": [user("a"), assistant("b", train=True), user("c")], "completion": [assistant("d")]}
    chat = convert(row)
    assert isinstance(chat, Chat)
    assert [message.get("train") for message in chat.messages] == [False, True, False, None]


@pytest.mark.parametrize("train_on", [["user", "assistant"], "all"])
def test_a_part_is_left_out_of_a_message_that_the_recipe_trains(train_on: Any) -> None:
    parts = [{"type": "text", "text": "skip", "train": False}, {"type": "text", "text": "keep"}]
    chat = convert({"messages": [user(parts), assistant("b")]}, train_on=train_on)  # type: ignore[arg-type]
    assert isinstance(chat, Chat) and chat.messages[0]["untrained"] == {"content": [[0, 4]]}


def test_seq2seq_pairs() -> None:
    assert convert({"source": "a", "target": "b"}, objective="seq2seq") == Pair("a", "b")
    assert convert({"prompt": "a", "completion": "b"}, objective="seq2seq") == Pair("a", "b")
    assert convert({"instruction": "a", "input": "x", "output": "b"}, objective="seq2seq") == Pair("a\n\nx", "b")
    assert "does not fit `objective: seq2seq`" in refused({"text": "a"}, objective="seq2seq")


def test_columns_rename_and_decide() -> None:
    row = {"question": "q", "answer": "a", "text": "both"}
    assert convert(row, columns={"prompt": "question", "completion": "answer"}) == Completion("q", "a")
    assert convert(row, columns={"instruction": "question", "output": "answer"}) == Chat([user("q"), assistant("a")])
    # A swap of two existing names.
    swapped = {"prompt": "completion", "completion": "prompt"}
    assert convert({"prompt": "a", "completion": "q"}, columns=swapped) == Completion("q", "a")
    assert "no column `frage`" in refused(row, columns={"prompt": "frage"})
    assert "which no format has" in refused(row, columns={"promt": "question"})


def test_used_columns() -> None:
    row = {"q": "q", "completion": "a", "id": 1}
    row_format = recognise([row], Source(path="d", columns={"prompt": "q"}), Task("sft", "auto", True))
    assert row_format.used_columns() >= {"q", "completion"} and "id" not in row_format.used_columns()


def test_unknown_and_ambiguous_formats_list_columns_and_choices() -> None:
    message = refused({"question": "q", "answer": "a"})
    assert "`question`, `answer`" in message and "prompt_completion (prompt, completion)" in message
    assert "data.columns" in message
    message = refused({"text": "t", "instruction": "i", "output": "o"})
    assert "fits several formats: text, alpaca" in message and "data.format" in message
    assert convert({"text": "t", "instruction": "i", "output": "o"}, format="text") == Text("t")
    assert "needs" in refused({"text": "t"}, format="messages")


def test_common_names_are_proposed_as_a_setting() -> None:
    dolly = {"instruction": "i", "context": "c", "response": "r", "category": "x"}
    assert "'data.columns={output: response, input: context}'" in refused(dolly)
    assert "'data.columns={instruction: question, output: answer}'" in refused({"question": "q", "answer": "a"})
    without_template = refused({"question": "q", "answer": "a"}, template=False)
    assert "'data.columns={prompt: question, completion: answer}'" in without_template
    assert "'data.columns={messages: conversation}'" in refused({"conversation": []})


def test_single_messages_and_rated_answers_are_not_taken_for_something_else() -> None:
    tree = {"message_id": "1", "parent_id": None, "text": "hi", "role": "prompter"}
    assert "single messages" in refused(tree)
    assert convert(tree, format="text") == Text("hi")
    assert "single messages" in refused({"role": "user", "content": "hi"})
    rated = {"prompt": "p", "completion": "c", "label": True}
    assert "whether the answer is good" in refused(rated) and "data.ignore=[label]" in refused(rated)
    assert convert(rated, ignore=["label"]) == Completion("p", "c")


def test_roles_in_dumps_of_other_assistants() -> None:
    turns = [{"from": "Human", "value": "hi"}, {"from": "bing", "value": "yo"}, {"from": "chatgpt", "value": "yo"}]
    assert convert({"conversations": turns}) == Chat([user("hi"), assistant("yo"), assistant("yo")])


def test_preference_pairs_are_refused_with_a_word() -> None:
    message = refused({"prompt": "p", "chosen": "a", "rejected": "b"})
    assert "preference pairs" in message
    columns = {"completion": "chosen"}
    assert convert({"prompt": "p", "chosen": "a", "rejected": "b"}, columns=columns) == Completion("p", "a")


def test_format_must_suit_train_on_and_the_tokenizer() -> None:
    assert "data.train_on" in refused({"text": "t"}, train_on="assistant")
    assert "data.train_on" in refused({"prompt": "p", "completion": "c"}, train_on="last_assistant")
    assert "model.chat_template" in refused({"messages": []}, template=False)
    assert "objective: seq2seq" in refused({"source": "a", "target": "b"})
    assert convert({"text": "t"}, train_on="assistant", objective="language_modelling") == Text("t")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "completion": 3}, "`completion` is a number"),
        ({"instruction": "p", "input": float("nan"), "output": "o"}, "`input` is NaN, not a string"),
        ({"text": {"a": 1}}, "`text` is an object"),
        ({"messages": "hello"}, "`messages` is not a list"),
        ({"messages": ["hello"]}, "`messages[0]` is not an object"),
        ({"messages": [user("a"), {"role": "narrator", "content": "x"}]}, "`messages[1]` has the role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "no `role`, no `from`); it has `content`"),
        ({"messages": [user("a", weight=2)]}, "`weight: 2`"),
        ({"messages": [user("a", train="yes")]}, "`train: 'yes'`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "pictures, sound or film"),
        ({"messages": [assistant("", tool_calls=[{"arguments": {}}])]}, "tool call without a name"),
        ({"messages": [assistant("", tool_calls=[{"name": "f", "arguments": "x=1"}])]}, "no JSON object"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "`system` column"),
        ({"messages": [], "tools": "calculator"}, "`tools`"),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "`conversations[0]` has the role"),
        ({"prompt": [user("a")], "completion": [{"role": "narrator", "content": "b"}]}, "`completion[0]`"),
        ({"prompt": ["a", {}], "completion": "b"}, "`prompt[0]` is not an object"),
    ],
)
def test_wrong_types_name_the_row(row: dict[str, Any], words: str) -> None:
    message = refused(row)
    assert "d.jsonl:1" in message and words in message


def test_missing_column_in_a_later_row() -> None:
    row_format = recognise([{"text": "a"}], Source(path="d"), Task("sft", "auto", True))
    with pytest.raises(UserError, match="d:7 has no column `text`; it has `txt`"):
        row_format.convert({"txt": "b"}, "d:7")


def test_empty_conversations_are_no_error() -> None:
    assert convert({"messages": None}) == Chat([])
    assert convert({"messages": [{"role": "user", "content": None}]}) == Chat([user("")])


def test_rows_survive_json() -> None:
    rows: list[Row] = [
        Text("é\u2028"),
        Completion("a", "b"),
        Pair("a", "b"),
        Chat([user("x")], [{"name": "f"}]),
        Chat([]),
    ]
    assert [from_json(to_json(row)) for row in rows] == rows


SUITS: dict[tuple[str, bool], tuple[dict[str, Any], str]] = {
    ("text", True): ({"text": "t"}, "auto all"),
    ("segments", True): ({"segments": [{"text": "a", "label": True}]}, "auto all"),
    ("tokens", True): ({"input_ids": [1, 2]}, "auto"),
    ("prompt_completion", True): ({"prompt": "p", "completion": "c"}, "auto completion all"),
    ("alpaca", False): ({"instruction": "i", "output": "o"}, "auto completion all"),
    ("alpaca", True): ({"instruction": "i", "output": "o"}, "auto assistant last_assistant all roles"),
    ("messages", True): ({"messages": [user("a")]}, "auto assistant last_assistant all roles"),
    ("sharegpt", True): ({"conversations": [user("a")]}, "auto assistant last_assistant all roles"),
}


@pytest.mark.parametrize(("name", "template"), SUITS)
def test_every_format_takes_the_parts_to_train_that_it_has(name: str, template: bool) -> None:
    row, suited = SUITS[name, template]
    for train_on in ("auto", "completion", "assistant", "last_assistant", "all", "roles"):
        roles = ["user"] if train_on == "roles" else train_on
        assert convert(row, train_on="all" if roles == ["user"] else roles, objective="language_modelling")
        if train_on in suited.split():
            convert(row, train_on=roles, template=template)  # type: ignore[arg-type]
            continue
        said = refused(row, train_on=roles, template=template)
        assert f"({name}) has nothing that `data.train_on: {roles}` could mean" in said
        offered = said.rpartition("to one of ")[2].split(", ")
        assert offered == [each for each in suited.split() if each != "roles"]
    if name in ("prompt_completion", "alpaca"):
        assert isinstance(convert(row, objective="seq2seq", template=template), Pair)
    else:
        said = refused(row, objective="seq2seq", template=template)
        assert "does not fit `objective: seq2seq`" in said and "prompt_completion, alpaca, source_target" in said


def test_sources_and_targets_are_for_encoder_decoders_alone() -> None:
    row = {"source": "a", "target": "b"}
    for objective in ("sft", "language_modelling"):
        said = refused(row, objective=objective)
        assert f"not for `objective: {objective}`" in said and "{prompt: source, completion: target}" in said
    assert convert(row, columns={"prompt": "source", "completion": "target"}) == Completion("a", "b")


def test_alpaca_in_all_its_parts() -> None:
    row = {"instruction": "Add", "input": "1 2", "output": "3", "system": "S"}
    history = [["a", "b"], ["c", "d"]]
    system = {"role": "system", "content": "S"}
    earlier = [user("a"), assistant("b"), user("c"), assistant("d")]
    for given in (history, json.dumps(history)):
        assert convert(row | {"history": given}) == Chat([system, *earlier, user("Add\n\n1 2"), assistant("3")])
    for nothing in ([], None, "", "[]"):
        assert convert(row | {"history": nothing, "reasoning": ""}) == convert(row)
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = convert(row | {"tools": json.dumps(tools), "chat_template_kwargs": {"think": 1}})
    assert isinstance(called, Chat) and (called.tools, called.template_kwargs) == (tools, {"think": 1})
    thinking = convert(row | {"reasoning": "Hm."})
    assert thinking == Chat([system, user("Add\n\n1 2"), assistant("3", reasoning_content="Hm.")])
    assert convert(row, objective="seq2seq") == Pair("S\n\nAdd\n\n1 2", "3")
    assert convert(row | {"system": ""}, objective="seq2seq", template=False) == Pair("Add\n\n1 2", "3")
    plain = convert(row, template=False)
    assert isinstance(plain, Completion) and plain.prompt.startswith("S\n\nBelow is") and plain.completion == "3"
    for extra, what in (
        ({"history": history}, "`history`"),
        ({"reasoning": "Hm."}, "`reasoning`"),
        ({"tools": [{"name": "f"}]}, "`tools`"),
        ({"history": history, "functions": "[{}]"}, "`history`, `functions`"),
    ):
        for settings in ({"template": False}, {"objective": "seq2seq"}):
            said = refused(row | extra, **settings)  # type: ignore[arg-type]
            assert f"d.jsonl:1 has {what}, which only chats have" in said
            assert f"data.ignore=[{', '.join(extra)}]" in said
            assert convert(row | extra, ignore=list(extra), **settings) == convert(row, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "history", ["abc", 5, {"a": "b"}, [["a"]], [["a", "b", "c"]], [["a", 1]], ["ab"], [{"a": "b"}]]
)
def test_earlier_rounds_are_pairs(history: Any) -> None:
    said = refused({"instruction": "i", "output": "o", "history": history})
    assert "d.jsonl:1: `history` is no list of pairs" in said and '[["question", "answer"], …]' in said


@pytest.mark.parametrize(
    ("value", "what"),
    [
        *((3, "a number"), (0.5, "a number"), (True, "a boolean"), ({}, "an object")),
        *((value, "a list") for value in ([], ["a", 1], ["a", "b"])),
    ],
)
def test_what_is_no_text_is_said(value: Any, what: str) -> None:
    rows = [{"text": value}, {"instruction": "i", "output": value}]
    rows += [] if value == {} else [{"prompt": "p", "completion": value}]  # That would be a message.
    for row in rows:
        said = refused(row)
        assert f"d.jsonl:1: `{list(row)[-1]}` is {what}, not a string" in said
        assert ("choose one of them" if value == ["a", "b"] else '"4" for 4') in said
    assert convert({"text": ["a"]}) == Text("a")


def test_settings_and_tools_of_a_row_are_for_chats() -> None:
    talk, tools, settings = [user("a"), assistant("b")], [{"type": "function", "function": {"name": "f"}}], {"think": 1}
    rows: list[dict[str, Any]] = [
        {"messages": talk},
        {"conversations": talk},
        {"prompt": talk[:1], "completion": talk[1:]},
    ]
    rows.append({"prompt": "a", "completion": talk[1:]})
    for row in rows:
        for key in ("tools", "functions"):
            with pytest.raises(UserError, match=f"`{key}` is not a list of tool definitions"):
                convert(row | {key: ["add"]})
        for key, given in (("tools", tools), ("functions", tools), ("tools", json.dumps(tools))):
            chat = convert(row | {key: given, "chat_template_kwargs": json.dumps(settings)})
            assert isinstance(chat, Chat) and (chat.tools, chat.template_kwargs) == (tools, settings)
            assert [(each["role"], each["content"]) for each in chat.messages] == [("user", "a"), ("assistant", "b")]
        empty = convert(row | {"tools": [], "functions": None, "chat_template_kwargs": {}})
        assert isinstance(empty, Chat) and empty.tools is None and empty.template_kwargs is None
        assert "`chat_template_kwargs` is no object" in refused(row | {"chat_template_kwargs": [1]})
    given_beside = (("tools", tools), ("functions", tools), ("chat_template_kwargs", settings), ("system", "S"))
    for key, given in given_beside:
        plain = {"prompt": "a", "completion": "b"}
        for said in (refused(plain | {key: given}), refused(plain | {key: given}, objective="seq2seq")):
            assert f"d.jsonl:1: `{key}` is for chats" in said and f"data.ignore=[{key}]" in said
            assert "'data.columns={instruction: prompt, output: completion}'" in said
        named = refused({"p": "a", "c": "b", "s": given}, columns={"prompt": "p", "completion": "c", key: "s"})
        assert f"'data.columns={{instruction: p, output: c, {key}: s}}'" in named
        assert convert(plain | {key: given}, ignore=[key]) == Completion("a", "b")
        assert convert({"prompt": "a", "completion": "b", key: None}) == Completion("a", "b")


def test_what_reads_a_passage_beside_a_question_is_said_with_the_names_that_the_data_has() -> None:
    """SQuAD's columns, mapped as prompts and completions: what the refusal says to set can be set."""
    row = {"context": "Night fell.", "question": "Is it late?", "answers": {"text": ["Yes."], "answer_start": [0]}}
    said = refused(row, columns={"prompt": "question", "completion": "answers.text"})
    mapping = "{instruction: question, output: answers.text, input: context}"
    assert f"for texts set 'data.columns={mapping}'" in said
    chat = convert(row, columns=yaml.safe_load(mapping))
    assert isinstance(chat, Chat)
    assert [each["content"] for each in chat.messages] == ["Is it late?\n\nNight fell.", "Yes."]


def test_a_prompt_of_messages_is_trained_where_prompts_are() -> None:
    row = {"prompt": [user("a"), assistant("b")], "completion": "c"}
    for settings, flags in (
        ({"train_on": "auto"}, [False, False, None]),
        ({"train_on": "all"}, [None, None, None]),
        ({"objective": "language_modelling"}, [None, None, None]),
    ):
        chat = convert(row, **settings)  # type: ignore[arg-type]
        assert isinstance(chat, Chat) and [each.get("train") for each in chat.messages] == flags
    assert "`prompt[1]` has the role" in refused({"prompt": [user("a"), {"role": "x"}], "completion": "c"})
    assert "`completion[0]` has the role" in refused({"prompt": "a", "completion": {"role": "x", "content": "b"}})


def test_system_columns_and_messages_of_their_own_names() -> None:
    system = {"role": "system", "content": "S"}
    pair = {"prompt": [user("a")], "completion": "b"}
    asked = convert(pair | {"system": "S"})
    assert asked == Chat([system, user("a", train=False), assistant("b")])
    assert convert(pair | {"system": "S"}, train_on="all") == Chat([system, user("a"), assistant("b")])
    assert "and a system message" in refused({"prompt": [system, user("a")], "completion": "b", "system": "S"})
    for column, row in (("messages", {"messages": [user("a")]}), ("conversations", {"conversations": [user("a")]})):
        assert convert(row | {"system": "S"}) == Chat([system, user("a")])
        assert convert(row | {"system": None}) == Chat([user("a")])
        assert "has a `system` column and a system message" in refused({column: [system], "system": "S"})
        assert convert({column: [], "system": "S"}) == Chat([system])
        assert "`system` is a number" in refused(row | {"system": 5})


def test_columns_inside_columns_are_mapped_and_used() -> None:
    row = {"body": {"talk": [user("a"), assistant("b")], "given": [{"name": "f"}]}, "id": 1}
    columns = {"messages": "body.talk", "tools": "body.given"}
    source, task = Source(path="d", columns=columns), Task("sft", "auto", True)
    row_format = recognise([row], source, task)
    chat = row_format.convert(row, "d:1")
    assert isinstance(chat, Chat) and chat.messages == row["body"]["talk"] and chat.tools
    assert {"body", "body.talk", "body.given"} <= row_format.used_columns() and "id" not in row_format.used_columns()
    with pytest.raises(UserError, match=r"d:2 has no column `body\.talk`; it has `body`, `id`"):
        row_format.convert({"body": {}, "id": 2}, "d:2")
    assert "no column `body.none` that `data.columns` names for `messages`" in refused(
        row, columns={"messages": "body.none"}
    )
    # A column may be missing in the first rows, if a later one has it.
    later = recognise(
        [{"text": "a"}, {"text": "b", "sys": "S"}], Source(path="d", columns={"system": "sys"}, format="text"), task
    )
    assert later.name == "text"


def test_the_format_is_the_one_that_the_columns_and_their_mapping_leave() -> None:
    both = {"messages": [user("a")], "conversations": [user("a")], "text": "t"}
    said = refused(both)
    assert "fits several formats: text, messages, sharegpt" in said and "`messages`, `conversations`, `text`" in said
    assert "set `data.format` to one of text, messages, sharegpt" in said
    for name, form in (("text", Text), ("messages", Chat), ("sharegpt", Chat)):
        assert isinstance(convert(both, format=name), form)
    chat = convert(both | {"s": "S"}, columns={"system": "s"}, format="messages")
    assert isinstance(chat, Chat) and chat.messages[0] == {"role": "system", "content": "S"}
    assert convert(both | {"body": "b"}, columns={"text": "body"}, ignore=["messages"]) == Text("b")
    assert "has the columns none, which no format fits" in refused({})
    assert "which no format fits" in (said := refused({"a": 1})) and "`a`" in said
    assert "map names with 'data.columns={prompt: NAME, completion: NAME}'" in said
    assert "(in a CSV the first line names the columns)" in said
    for name, required in {
        **{"text": "text", "prompt_completion": "prompt, completion", "alpaca": "instruction, output"},
        **{"messages": "messages", "sharegpt": "conversations", "source_target": "source, target"},
        **{"segments": "segments", "tokens": "input_ids"},
    }.items():
        assert f"{name} ({required})" in said
    said = refused({"prompt": "p", "text": "t"}, format="alpaca")
    assert "has no column `instruction`, which `data.format: alpaca` needs; its columns are `prompt`, `text`" in said
    assert "map it with `data.columns: {instruction: NAME}`" in said


@pytest.mark.parametrize("template", [False, True])
def test_the_mapping_that_is_proposed_is_accepted(template: bool) -> None:
    """For columns under the names that other projects give them, in any case."""
    names = [
        *(("question", "answer"), ("query", "response"), ("problem", "solution"), ("article", "summary")),
        *(("user", "assistant"), ("message_1", "message_2"), ("Input", "Output"), ("QUESTION", "generation")),
        *(("instruction", "response"), ("content",), ("document",), ("body",), ("dialog",), ("turns",)),
    ]
    for columns in names:
        talk = columns[0] in ("dialog", "turns")
        row: dict[str, Any] = {name: [user("q")] if talk else f"text of {name}" for name in columns}
        setting = refused(row, template=template).partition("'data.columns={")[2].partition("}'")[0]
        mapping = dict(pair.split(": ") for pair in setting.split(", "))
        assert set(mapping.values()) <= set(columns)
        if talk and not template:
            continue
        made = convert(row, template=template, columns=mapping)
        if not talk:
            assert all(f"text of {name}" in to_json(made) for name in columns)
    assert "prompts alone are for objective=grpo" in refused({"prompt": "p", "id": 1}, template=template)


@pytest.mark.parametrize(
    "column",
    ["response", "completion", "answer", "output", "Response", "ideal", "target", "reply", "chosen", "ground_truth"],
)
@pytest.mark.parametrize("talk", ["messages", "conversations"])
def test_an_answer_beside_a_conversation_that_ends_without_one(talk: str, column: str) -> None:
    asked = [user("a"), assistant("b"), user("c")]
    row = {talk: asked, column: "d"}
    said = refused(row)
    assert f"`{talk}` ends without an answer, and `{column}` would be left unused" in said
    setting = said.partition("'data.columns={")[2].partition("}'")[0]
    answered = convert(row, columns=dict(pair.split(": ") for pair in setting.split(", ")))
    assert isinstance(answered, Chat) and [each["content"] for each in answered.messages] == list("abcd")
    assert [each.get("train") for each in answered.messages] == [False, False, False, None]
    into = f"write it into `{talk}` as the last turn"
    assert into in refused({talk: [*asked, assistant("")], column: "d"})
    with_system = convert(row | {"system": "S"}, columns={"prompt": talk, "completion": column})
    assert isinstance(with_system, Chat) and with_system.messages[1:] == answered.messages
    assert setting in refused(row | {"system": "S"}) and with_system.messages[0]["content"] == "S"
    # Left out on purpose, empty, or beside an answer: metadata, like the figure that a reasoning task comes to.
    assert convert(row, ignore=[column]) == Chat(asked) == convert(row | {column: ""})
    assert convert({talk: [*asked, assistant("d")], column: "d"}) == Chat([*asked, assistant("d")])


def test_calls_beside_a_conversation_are_an_answer() -> None:
    for name in ("tool_calls", "function_call", "choices"):
        row = {"messages": [user("a")], name: {"name": "f"}}
        assert "write it into `messages` as the last turn" in refused(row)
        assert convert(row | {"messages": [user("a"), assistant("", tool_calls=[{"name": "f"}])]})


def test_steps_are_joined_where_the_recipe_names_them() -> None:
    row = {"prompt": "p", "completions": ["a", "b"], "labels": [True, False]}
    assert convert(row, columns={"completion": "completions"}) == Completion("p", "a\nb")
    assert convert(row, columns={"instruction": "prompt", "output": "completions"}) == Chat(
        [user("p"), assistant("a\nb")]
    )
    said = refused({"prompt": "p", "completion": ["a"], "labels": [False]})
    assert "`labels` is which steps of the answer are right" in said
    assert "`completion` is a list" in refused({"prompt": "p", "completion": ["a", "b"]})
    squad = {"question": "p", "answers": {"text": ["a", "a"]}}
    assert "`output` is a list" in refused(squad, columns={"instruction": "question", "output": "answers.text"})


def test_proposals_are_of_columns_whose_values_suit_and_name_what_is_read_beside() -> None:
    chats = {"input": [user("a")], "output": "b"}
    assert "'data.columns={prompt: input, completion: output}'" in refused(chats)
    assert isinstance(convert(chats, columns={"prompt": "input", "completion": "output"}), Chat)
    written = {"input": json.dumps([user("a")]), "output": "b"}
    assert "'data.columns={prompt: input, completion: output}'" in refused(written)
    chat = convert(written, columns={"prompt": "input", "completion": "output"})
    assert chat == Chat([user("a", train=False), assistant("b")])
    for text in ('[{"a": 1}]', '[{"role": "clerk"}]', "[1]", '{"role": 5}', '{"role": [1]}', "[user]", "5"):
        assert convert({"prompt": "List.", "completion": text}) == Completion("List.", text)
    assert "{output: response}" not in refused({"instruction": "a", "response": ["b", "c"]})
    rounds = {"query": "a", "response": "b", "history": [["c", "d"]]}
    assert (
        "'data.columns={instruction: query, output: response}' if that is what they are (`history` will be read, too)"
        in (refused(rounds))
    )
    three = {"user": "a", "assistant": "b", "system": "S"}
    assert "{instruction: user, output: assistant}' if that is what they are (`system` will" in refused(three)
    for name in ("parts", "input_output"):
        segments = {name: [{"text": "a", "label": True}]}
        assert f"'data.columns={{segments: {name}}}'" in refused(segments)
    assert "segments" not in refused({"parts": "a"}).partition("; accepted")[0]


MASKS = ["completion_mask", "assistant_masks", "loss_mask"]


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_says_which_tokens_are_trained(name: str) -> None:
    for mask in ([0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0], [False, False, True, True], "[0, 0, 1, 1]"):
        assert convert({"input_ids": [5, 6, 7, 8], name: mask}) == Tokens([5, 6, 7, 8], [-100, -100, 7, 8])
    for mask in ([0, 0.5, 1, 1], [0, 2, 1, 1], [0, -1, 1, 1]):
        assert f"`{name}` is not of 0 and 1" in refused({"input_ids": [5, 6, 7, 8], name: mask})
    assert "has 3 numbers" in refused({"input_ids": [5, 6, 7, 8], name: [0, 0, 1]})


@pytest.mark.parametrize("name", ["weights", "response_mask", "Mask", "prompt_mask", "special_tokens_mask", "anything"])
def test_a_number_for_each_token_is_not_left_unused(name: str) -> None:
    for mask in ([0, 0, 1], [0.0, 0.0, 1.0], "[0, 0, 1]"):
        row = {"input_ids": [5, 6, 7], name: mask}
        assert f"`{name}` has a number for each token" in (said := refused(row))
        assert f"data.columns={{loss_mask: {name}}}" in said and "write -100 as the `labels`" in said
        assert convert(row, columns={"loss_mask": name}) == Tokens([5, 6, 7], [-100, -100, 7])
        assert convert(row, ignore=[name]) == Tokens([5, 6, 7], [-100, 6, 7])
        assert f"`{name}` has a number for each token" in refused({"input_ids": "[5, 6, 7]", name: mask})
        assert f"`{name}` has" in refused({"ids": [5, 6, 7], name: mask}, columns={"input_ids": "ids"})
    assert convert({"input_ids": [], name: []}) == Tokens([], [])
    for other in ({name: [0, 1]}, {name: ["a", "b", "c"]}, {name: 3}, {"token_type_ids": [0, 0, 0]}):
        assert convert({"input_ids": [5, 6, 7], **other}) == Tokens([5, 6, 7], [-100, 6, 7])


def test_segments_have_nothing_but_a_text_and_a_label() -> None:
    row = {"segments": [{"text": "a", "label": True}, {"text": "b", "label": True, "weight": 0.5}]}
    assert "d.jsonl:1: `segments[1]` has `weight`" in refused(row) and "data.ignore=[weight]" in refused(row)
    assert convert(row, ignore=["weight"]) == Segments([("a", True), ("b", True)])


LONG = 200_000
"""Characters of a text of one repeated: what tries each beginning of it anew takes a minute, all else milliseconds."""
HOLDING: dict[str, Callable[[str], dict[str, Any]]] = {
    "text": lambda text: {"text": text},
    "chat": lambda text: {"messages": [user(text), assistant(text)]},
    "written": lambda text: {"messages": text},
    "completion": lambda text: {"prompt": text, "completion": text},
    "alpaca": lambda text: {"instruction": text, "input": text, "output": text},
    "parts": lambda text: {"messages": [user("x"), {"role": "assistant", "content": [{"type": "text", "text": text}]}]},
    "calls": lambda text: {"messages": [user("x"), assistant("", tool_calls=text, weight=text)], "tools": text},
    "roles": lambda text: {"messages": [{"role": text, "content": text}]},
    "names": lambda text: {text: text, "text": "x"},
    "unmapped": lambda text: {"chosen": text, "rejected": text, "history": text, "score": text},
}


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("repeated", [" ", "\n", "a", "[", "{", "{'", "<", "'", '"', "\\", "1", "a ", "[{'role': "])
def test_long_texts_are_read_in_time(repeated: str, holding: str) -> None:
    text = (repeated * LONG)[:LONG]
    started = time.process_time()
    with suppress(UserError):
        convert(HOLDING[holding](text))
    assert time.process_time() - started < 5
