"""Conversations in the forms of others: rounds, parts without a type, results of tools within a user's message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats.messages import read_messages, read_tools
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task
from toolkit.recipe.data import Source

ASKED, ANSWERED = {"role": "user", "content": "Late?"}, {"role": "assistant", "content": "No."}


def read(value: Any) -> list[dict[str, Any]]:
    return read_messages(value, "messages", "x row 1")


@pytest.mark.parametrize(
    "value",
    [
        [{"input": "Late?", "output": "No."}],
        [{"human": "Late?", "assistant": "No."}],
        [{"system": "", "input": "Late?", "output": "No."}],
        json.dumps([{"input": "Late?", "output": "No."}]),
        [{"role": "user", "content": [{"text": "Late?"}]}, {"role": "assistant", "content": [{"text": "No."}]}],
        [{"role": "user", "parts": [{"text": "Late?"}]}, {"role": "model", "parts": [{"text": "No."}]}],
        {"role": ["user", "assistant"], "content": ["Late?", "No."]},
    ],
    ids=["XTuner", "ms-swift", "empty system", "JSON", "Bedrock", "Gemini", "datasets"],
)
def test_one_conversation_in_many_forms(value: Any) -> None:
    assert read(value) == [ASKED, ANSWERED]


def test_rounds_have_a_system_message_and_keep_their_order() -> None:
    said = read([{"system": "S", "input": "a", "output": "b"}, {"input": "c", "output": "d"}])
    assert [(each["role"], each["content"]) for each in said] == [
        *(("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
    ]


def test_what_a_round_says_beside_question_and_answer_is_not_lost() -> None:
    with pytest.raises(UserError, match=r"x row 1: `messages\[0\]` is a question and its answer, and has `loss`, too"):
        read([{"input": "a", "output": "b", "loss": 0.5}])
    assert len(read([{"input": "a", "output": "b", "loss": None}])) == 2
    # Two questions are no round.
    with pytest.raises(UserError, match="says nothing of who speaks"):
        read([{"input": "a", "question": "b", "output": "c"}])


def test_thoughts_calls_and_results_of_gemini() -> None:
    call = {"functionCall": {"name": "get", "args": {"a": 1}}}
    said = read(
        [
            {"role": "user", "parts": [{"text": "How many?"}]},
            {"role": "model", "parts": [{"text": "I look.", "thought": True}, call]},
            {"role": "user", "parts": [{"functionResponse": {"name": "get", "response": {"n": 42}}}]},
            {"role": "model", "parts": [{"text": "42."}]},
        ]
    )
    assert [each["role"] for each in said] == ["user", "assistant", "tool", "assistant"]
    assert said[1]["reasoning_content"] == "I look."
    assert said[1]["tool_calls"][0]["function"] == {"name": "get", "arguments": {"a": 1}}
    assert said[2] == {"role": "tool", "name": "get", "content": '{"n": 42}'}
    with pytest.raises(UserError, match="content of another kind than text"):
        read([{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": "x"}}]}])


ANTHROPIC = [
    {"role": "user", "content": [{"type": "text", "text": "How many?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "So?"},
        ],
    },
    {"role": "assistant", "content": "42."},
]
BEDROCK = [
    {"role": "user", "content": [{"text": "How many?"}]},
    {
        "role": "assistant",
        "content": [{"text": "I look."}, {"toolUse": {"toolUseId": "t1", "name": "get", "input": {"a": 1}}}],
    },
    {"role": "user", "content": [{"toolResult": {"toolUseId": "t1", "content": [{"text": "42"}]}}, {"text": "So?"}]},
    {"role": "assistant", "content": [{"text": "42."}]},
]


@pytest.mark.parametrize("messages", [ANTHROPIC, BEDROCK], ids=["Anthropic", "Bedrock"])
def test_results_of_tools_stand_before_what_the_user_says(messages: list[dict[str, Any]]) -> None:
    said = read(messages)
    assert [(each["role"], each["content"]) for each in said] == [
        ("user", "How many?"), ("assistant", "I look."), ("tool", "42"), ("user", "So?"), ("assistant", "42."),
    ]  # fmt: skip
    assert said[1]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "get", "arguments": {"a": 1}}}
    ]
    assert said[2]["tool_call_id"] == "t1"


def test_nothing_of_a_result_is_lost() -> None:
    part = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
    (said,) = read([{"role": "user", "content": [part], "train": True}])
    assert said == {"role": "tool", "content": "no", "tool_call_id": "t1", "is_error": True, "train": True}
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    with pytest.raises(UserError, match="pictures, sound or film"):
        read([{"role": "user", "content": [part | {"content": [image]}]}])
    result = {"toolResult": {"toolUseId": "t1", "content": [{"json": {"n": 1}}]}}
    (said,) = read([{"role": "user", "content": [result]}])
    assert said["content"] == '{"n": 1}'
    # Between an assistant's own words it cannot stand before them.
    with pytest.raises(UserError, match="content of another kind than text, 'tool_result'"):
        read([{"role": "assistant", "content": [{"type": "text", "text": "a"}, part]}])


def test_tools_of_anthropic_have_parameters() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tool,) = read_tools([{"name": "get", "description": "d", "input_schema": schema}], "x") or []
    assert tool == {"type": "function", "function": {"name": "get", "description": "d", "parameters": schema}}


@pytest.mark.parametrize(
    "system", [[{"text": "Be "}, {"text": "brief."}], {"role": "system", "parts": [{"text": "Be brief."}]}, "Be brief."]
)
def test_a_system_message_beside_them_may_have_parts(system: Any) -> None:
    row = {"system": system, "messages": [ASKED, ANSWERED]}
    form = recognise([row], Source.model_validate({"path": "x"}), Task("sft", "auto", True))
    assert form.convert(row, "x row 1").messages[0] == {"role": "system", "content": "Be brief."}  # type: ignore[union-attr]


def test_geminis_columns_are_proposed() -> None:
    row = {"systemInstruction": {"parts": [{"text": "S"}]}, "contents": [{"role": "user", "parts": [{"text": "a"}]}]}
    with pytest.raises(UserError) as refused:
        recognise([row], Source.model_validate({"path": "x"}), Task("sft", "auto", True))
    assert "data.columns={messages: contents" in refused.value.change
    source = Source.model_validate({"path": "x", "columns": {"messages": "contents"}})
    form = recognise([row], source, Task("sft", "auto", True))
    with pytest.raises(UserError, match="`systemInstruction` would be left unused, but looks like `system`"):
        form.convert(row, "x row 1")
