"""Mappings that are proposed for columns that no format has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolkit.data.proposal import proposal

TALK = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"items": TALK}, "items"),
        ({"id": 1, "items": json.dumps(TALK)}, "items"),
        ({"record": {"id": 1, "talk": TALK}}, "record.talk"),
        ({"tools": [{"name": "f"}], "talk": TALK}, "talk"),
        ({"tools": [{"name": "f"}], "query": "a"}, None),
        ({"items": [{"role": "clerk", "content": "a"}]}, None),
        ({"items": []}, None),
        ({"prompt": TALK[:1]}, None),
    ],
)
def test_a_column_of_messages_is_proposed_whatever_its_name(row: dict[str, Any], column: str | None) -> None:
    said = proposal(set(row), row, has_chat_template=True)
    assert said.startswith(f"set 'data.columns={{messages: {column}}}'") == (column is not None)
    assert not proposal(set(), row, has_chat_template=True).startswith("set ")


@pytest.mark.parametrize(
    ("has_chat_template", "form"), [(True, ["instruction", "output"]), (False, ["prompt", "completion"])]
)
def test_what_only_chats_have_counts_only_where_there_are_chats(has_chat_template: bool, form: list[str]) -> None:
    asked, answered = form
    assert f"{{{asked}: question, {answered}: answer}}" in proposal(
        {"question", "answer"}, {"question": "a", "answer": "b"}, has_chat_template
    )
    row = {"question": "a", "answer": "b", "system_prompt": "c"}
    assert "{instruction: question, output: answer, system: system_prompt}" in proposal(
        set(row), row, has_chat_template
    )
