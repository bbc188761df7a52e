"""Mappings that are proposed for columns that no format has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolkit.data.formats.proposal import proposal
from toolkit.recipe.data import FORMATS, OF_OBJECTIVES

FORMS = [name for name in FORMATS if name not in OF_OBJECTIVES]
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
    said = proposal(set(row), row, True, FORMS)
    assert said.startswith(f"set 'data.columns={{messages: {column}}}'") == (column is not None)
    assert not proposal(set(), row, True, FORMS).startswith("set ")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversation": str(TALK)}, ["`conversation` holds a conversation as text: write it as JSON"]),
        ({"id": "7", "record": {"talk": str(TALK)}}, ["`record.talk` holds a conversation as text: write it as JSON"]),
        ({"record": json.dumps({"messages": TALK})}, ["`record` holds", "write its `messages` as a column of the row"]),
        ({"remark": "{'role': of a king}"}, ["map names with"]),
    ],
)
def test_a_conversation_in_a_text_is_named(row: dict[str, Any], words: list[str]) -> None:
    """As pandas writes lists into a CSV."""
    said = proposal(set(row), row, True, FORMS)
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("has_chat_template", "form"), [(True, ["instruction", "output"]), (False, ["prompt", "completion"])]
)
def test_what_only_chats_have_counts_only_where_there_are_chats(has_chat_template: bool, form: list[str]) -> None:
    asked, answered = form
    assert f"{{{asked}: question, {answered}: answer}}" in proposal(
        {"question", "answer"}, {"question": "a", "answer": "b"}, has_chat_template, FORMS
    )
    row = {"question": "a", "answer": "b", "system_prompt": "c"}
    assert "{instruction: question, output: answer, system: system_prompt}" in proposal(
        set(row), row, has_chat_template, FORMS
    )


@pytest.mark.parametrize("has_chat_template", [True, False])
def test_summaries_are_proposed_as_answers_to_their_texts(has_chat_template: bool) -> None:
    """XSum was to be trained on its documents alone, which `objective: seq2seq` then refused."""
    for row in ({"document": "a b", "summary": "a"}, {"dialogue": "a b", "summary": "a"}):
        said = proposal(set(row), row, has_chat_template, FORMS)
        assert f"{{prompt: {next(iter(row))}, completion: summary}}" in said
    row = {"article": "a b", "highlights": "a", "id": "1"}
    assert "{prompt: article, completion: highlights}" in proposal(set(row), row, has_chat_template, FORMS)
    alone = {"document": "a b"}
    assert "{text: document}" in proposal(set(alone), alone, has_chat_template, FORMS)
    assert "text" not in proposal(set(alone), alone, has_chat_template, ["prompt_completion", "source_target"])


def test_only_texts_with_labels_are_proposed_as_segments() -> None:
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    assert "segments" not in proposal({"input_output"}, {"input_output": tests}, True, FORMS)
    parts = json.dumps([{"text": "a", "label": True}])
    assert "{segments: input_output}" in proposal({"input_output"}, {"input_output": parts}, True, FORMS)


def test_a_dot_is_named_where_texts_lie_inside_a_column() -> None:
    row = {"translation": {"de": "a", "en": "b"}}
    assert "a dot reaches inside a column, as in `translation.de`" in proposal(set(row), row, True, FORMS)
    # Of SQuAD's answers the text, and not where it begins.
    row = {"question": "Who?", "answers": {"answer_start": [0], "text": ["Ada"]}}
    assert "as in `answers.text`" in proposal(set(row), row, True, FORMS)
    assert "dot" not in proposal({"x"}, {"x": "a"}, True, FORMS)
