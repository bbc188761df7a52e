"""Rows for another trainer: each form is refused with what to do, which then is not."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats.other_forms import refuse_other_forms

TOOLS = [{"name": "f"}]
OTHER: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "(chosen, rejected)", "data.columns={completion: chosen}"),
    ({"chosen": "b", "rejected": "c"}, "(chosen, rejected)", "data.columns={text: chosen}"),
    *(
        ({name: "a", "chosen": "b", "rejected": "c"}, "(chosen, rejected)", change)
        for name, change in {
            "instruction": "data.columns={output: chosen}",
            "question": "data.columns={instruction: question, output: chosen}",
            "input": "data.columns={instruction: input, output: chosen}",
            "messages": "data.columns={prompt: messages, completion: chosen}",
            "conversations": "data.columns={prompt: conversations, completion: chosen}",
        }.items()
    ),
    ({"chosen": [{}, {}], "rejected": [{}, {}]}, "(chosen, rejected)", "data.columns={messages: chosen}"),
    ({"prompt": "a", "chosen": [{}], "rejected": [{}]}, "(chosen, rejected)", "data.columns={completion: chosen}"),
    (
        {"prompt": "a", "chosen_response": "b", "rejected_response": "c"},
        *("(chosen_response, rejected_response)", "data.columns={completion: chosen_response}"),
    ),
    (
        {"chosen_messages": [{}], "rejected_messages": [{}]},
        *("(chosen_messages, rejected_messages)", "data.columns={messages: chosen_messages}"),
    ),
    (
        {"input": {"messages": [], "tools": TOOLS}, "preferred_output": [{}], "non_preferred_output": [{}]},
        "(preferred_output, non_preferred_output)",
        "data.columns={prompt: input.messages, completion: preferred_output, tools: input.tools}",
    ),
    (
        {"input": {"messages": []}, "preferred_output": [{}], "non_preferred_output": [{}]},
        "(preferred_output, non_preferred_output)",
        "data.columns={prompt: input.messages, completion: preferred_output}",
    ),
    ({"prompt": "a", "completions": ["b"], "labels": [True]}, "judged one by one", "{completion: completions}"),
    ({"custom_id": "1", "body": {"messages": []}}, "requests to a model", "data.columns={messages: body.messages}"),
    (
        {"custom_id": "1", "body": {"messages": [], "tools": TOOLS}},
        *("requests to a model", "data.columns={messages: body.messages, tools: body.tools}"),
    ),
    *(
        ({"custom_id": "1", "url": url, "body": {"input": "a"}}, "requests to a model", '{"messages": […]}')
        for url in ("/v1/embeddings", "/v1/responses")
    ),
    *(
        ({**row, rejected: "c"}, f", {rejected})", f"data.ignore=[{rejected}]")
        for row in ({"messages": [{}, {}]}, {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"})
        for rejected in ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
    ),
    ({"custom_id": "1", "response": {}}, "without the requests", "join the two files by `custom_id`"),
    ({"prompt": "a", "answers": ["b"]}, "several answers to each prompt", "write the one to learn into `completion`"),
    ({"role": "user", "content": "a"}, "single messages", "data.columns={text: content}"),
    ({"role": "user", "text": "a"}, "single messages", "data.columns={text: text}"),
]


@pytest.mark.parametrize(("row", "what", "change"), OTHER, ids=[f"{'-'.join(row)}" for row, _, _ in OTHER])
def test_rows_for_another_trainer_are_refused_unless_mapped(row: dict[str, Any], what: str, change: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse_other_forms(row, set(row), (), "d.jsonl")
    assert "data source `d.jsonl` holds" in caught.value.what and what in caught.value.what
    assert change in caught.value.change
    # What the change says ends the refusal.
    mapping = change.partition("data.columns={")[2]
    mapped = [part.partition(": ")[2] for part in mapping.rstrip("}").split(", ") if ": " in part]
    if ignored := change.partition("data.ignore=[")[2].rstrip("]"):
        refuse_other_forms(row, set(row) - {ignored}, (), "d.jsonl")
    if mapped:
        refuse_other_forms(row, set(row) - {each.partition(".")[0] for each in mapped}, mapped, "d.jsonl")


def test_other_forms_are_known_in_any_case() -> None:
    for row in ({"messages": [{}], "Rejected": "a"}, {"Prompt": "a", "Chosen": "b", "REJECTED": "c"}):
        with pytest.raises(UserError, match=r"preference pairs \(chosen, rejected\)") as caught:
            refuse_other_forms(row, set(row), (), "d")
        written = "data.ignore=[Rejected]" if "Rejected" in row else "data.columns={prompt: Prompt, completion: Chosen}"
        assert written in caught.value.change
    refuse_other_forms(row, {"Prompt", "REJECTED"}, ["Chosen"], "d")


def test_a_mapped_column_says_what_the_others_are_for() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    refuse_other_forms(row, {"prompt", "rejected"}, ["chosen"], "d")
    refuse_other_forms(row, {"prompt", "rejected"}, ["chosen.text"], "d")
    with pytest.raises(UserError):
        refuse_other_forms(row, {"chosen", "rejected"}, ["prompt"], "d")


@pytest.mark.parametrize(
    ("columns", "mapped"),
    [
        *((("chosen", "rejected"), "chosen"), (("chosen_response", "rejected_response"), "chosen_response")),
        *((("chosen_messages", "rejected_messages"), "chosen_messages"), (("prompt", "answers"), "answers")),
        *(
            (("preferred_output", "non_preferred_output"), "preferred_output"),
            (("completions", "labels"), "completions"),
        ),
        *((("custom_id", "body"), "body"), (("custom_id", "response"), "response")),
        *((("role", "content"), "content"), (("role", "text"), "text")),
    ],
)
def test_who_maps_what_is_to_be_learnt_has_seen_the_others(columns: tuple[str, str], mapped: str) -> None:
    row = dict.fromkeys(columns, "a") | {"id": 1}
    for names in (set(columns), set(columns) | {"id"}):
        with pytest.raises(UserError):
            refuse_other_forms(row, names, ["id"], "d")
        refuse_other_forms(row, names, [f"{mapped}.inner"], "d")
    for column in columns:  # One alone is nothing that is known, but for a pair's other side.
        if "reject" not in column and "non_" not in column:
            refuse_other_forms({column: "a"}, {column, "id"}, [], "d")
