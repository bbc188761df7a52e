"""Rows of every format become the right normal form; wrong ones are named with row and cure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats import Task, recognise
from toolkit.data.rows import Chat, Completion, Pair, Row, Text, from_json, to_json
from toolkit.recipe.schema import Source


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
        ({"text": {"a": 1}}, "`text` is an object"),
        ({"messages": "hello"}, "`messages` is not a list"),
        ({"messages": ["hello"]}, "`messages[0]` is not an object"),
        ({"messages": [user("a"), {"role": "narrator", "content": "x"}]}, "`messages[1]` has the role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "has the role None"),
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
