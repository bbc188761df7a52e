"""What columns mean elsewhere: each is refused in the formats that leave it unused, and in no other."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.columns import parsed, refuse_meaning, refuse_other_forms, value_at

CHATS = {"messages", "sharegpt"}
PROMPTS = {"prompt_completion", "alpaca", "source_target"}
ANSWERS = CHATS | PROMPTS
FORMATS = ANSWERS | {"text", "segments", "tokens"}
# Columns, a value, the formats that refuse it, and what the message says and offers.
MEDIA = [
    *("image", "images", "image_url", "image_urls", "image_path", "image_paths", "img", "imgs", "picture", "video"),
    *("videos", "video_path", "audio", "audios", "audio_url", "speech", "objects", "pixel_values", "input_features"),
]
SYSTEM = ("system", "system_prompt", "system_message")
MEANINGS = [
    (MEDIA, ["a.png"], FORMATS, "pictures, sound or film", "remove these rows"),
    (
        ("label", "reward", "score", "rating", "feedback"),
        False,
        ANSWERS,
        "whether the answer is good",
        "keep the rows that are",
    ),
    (
        *(("kto_tag", "desirable", "is_desirable", "is_correct", "correct", "is_good", "keep"), False, FORMATS),
        *("whether the answer is good", "keep the rows that are"),
    ),
    (("labels",), [True, False], ANSWERS, "which steps of the answer are right", "keep the right ones"),
    (("weight", "loss_weight", "sample_weight"), 0.5, FORMATS, "weight of a row in the loss", "`weight` of a source"),
    (("choices", "options"), ["a", "b"], PROMPTS, "choices of a question", "write them into the question"),
    (("documents",), ["a"], ANSWERS, "documents to answer from", "write them into the prompt"),
    (("context",), "a", {"alpaca"}, "a text to answer from", "write it into `input`"),
    (
        *(("mask", "masks", "weights", "loss_weights", "loss_mask", "train_mask"), [0, 1], CHATS),
        *("what is not trained", '`"train": false`'),
    ),
    (
        *(("train", "trainable", "calculate_loss", "loss_mask"), False, FORMATS),
        *("whether the row is trained", "remove the rows that are not"),
    ),
    (("masked", "ignore_loss"), True, FORMATS, "whether the row is trained", "remove the rows that are not"),
    (("reflection", "corrected"), "b", PROMPTS, "a second answer", "data.columns={output: corrected}"),
    (("history",), [["a", "b"]], CHATS | {"prompt_completion", "source_target"}, "earlier rounds", "as `messages`"),
    (
        *(("input", "context"), "Be brief.", {"prompt_completion"}),
        *("prompts and completions do not have", "data.columns={instruction: prompt, output: completion}"),
    ),
    (
        *((*SYSTEM, "instruction", "input", "context"), "Be brief.", {"source_target"}, "a part of the prompt"),
        "write it into the source",
    ),
    (SYSTEM, "Be brief.", {"segments"}, "a part of the prompt", "as the first segment, with the label false"),
    (
        *(("reasoning", "reasoning_content", "thinking", "thought"), "Hm.", CHATS, "reasoning beside the messages"),
        "write it into them as `reasoning_content`",
    ),
    (
        *(("reasoning", "reasoning_content", "thinking", "thought"), "Hm.", {"prompt_completion"}, "do not have"),
        "data.columns={instruction: prompt, output: completion}",
    ),
    (("seq_lengths", "position_ids"), [3], {"tokens"}, "documents of a packed row", "a row for each document"),
    (
        *(("prompt_length", "prompt_len"), 1, {"tokens"}),
        *("which tokens are not trained", "write -100 as their `labels`"),
    ),
]


def refusal(name: str, raw: dict[str, Any], used: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> str:
    try:
        refuse_meaning(raw, used, optional, name, "d:1")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("column", "value", "formats", "what", "change"),
    [(column, *rest) for columns, *rest in MEANINGS for column in columns],
    ids=[f"{column}-{what}" for columns, _, _, what, _ in MEANINGS for column in columns],
)
def test_a_column_is_refused_in_the_formats_that_leave_it_unused(
    column: str, value: Any, formats: set[str], what: str, change: str
) -> None:
    own = [rest for columns, *rest in MEANINGS if column in columns]
    for name in FORMATS:
        said = refusal(name, {column: value})
        if name in formats:
            assert f"d:1: `{column}` is" in said and what in said and change in said
            assert f"or set 'data.ignore=[{column}]' to train without it" in said
        else:
            assert not said or any(name in other for _, other, *_ in own if other is not formats)
        assert not refusal(name, {column: value}, used=(column,))
        assert not any(refusal(name, {column: nothing}) for nothing in ("", None, [], {}, "[]", "{}", "null"))
        for spelt in (column.upper(), column.title()):
            assert bool(refusal(name, {spelt: value})) == bool(said), spelt


BAD = (
    False,
    0,
    -1,
    0.0,
    -1.0,
    "false",
    "False",
    "FALSE",
    "0",
    "-1",
    "no",
    "No",
    "bad",
    "wrong",
    "incorrect",
    " no ",
    "-1.0",
    "0.0",
)
GOOD = (True, 1, 1.0, "true", "True", "1", "yes", "YES", "good", "correct")


def test_a_label_that_judges_nothing_is_no_judgement() -> None:
    for value in (*BAD, *GOOD):
        for column in ("label", "kto_tag"):
            assert "whether the answer is good" in refusal("alpaca", {column: value}), value
    for value in ("neutral", 3, 0.5, [0, 1], {"a": 1}):
        assert not refusal("alpaca", {"label": value}), value
    for value in ([1, 2], "positive", ["a"], 1):
        assert not refusal("alpaca", {"labels": value}), value


@pytest.mark.parametrize("column", ["desirable", "is_desirable", "is_correct", "is_good", "keep", "reward", "score"])
def test_what_may_stand_beside_good_answers_alone_is_refused_beside_a_bad_one(column: str) -> None:
    for value in BAD:
        assert "whether the answer is good" in refusal("messages", {column: value}), value
    for value in (*GOOD, "neutral", 0.7, 5, [0]):
        assert not refusal("messages", {column: value}), value


def test_rejected_is_a_judgement_where_it_says_yes_or_no_and_else_the_worse_answer() -> None:
    for name in FORMATS:
        assert "whether the answer is good" in refusal(name, {"rejected": True})
        assert not refusal(name, {"rejected": False}) and not refusal(name, {"rejected": "no"})
    names = {"instruction", "output", "rejected"}
    refuse_other_forms({"output": "b", "Rejected": False}, {"output", "Rejected"}, [], "d")
    for answer in ("no", "c", ["c"]):
        with pytest.raises(UserError, match="preference pairs"):
            refuse_other_forms({"instruction": "a", "output": "b", "rejected": answer}, names, [], "d")


def test_the_number_of_the_right_choice_is_no_judgement() -> None:
    assert "whether the answer is good" in refusal("messages", {"correct": "False"})
    assert not refusal("messages", {"correct": 0}) and not refusal("messages", {"correct": "B"})


OTHERWISE = {
    "text": "content document body",
    "prompt": "question query instruction input problem user message_1 article inputs",
    "completion": "answer response output solution assistant generation corrected revision message_2 summary ideal "
    "targets",
    "instruction": "prompt question query problem message_1 input user inputs",
    "input": "context article query",
    "output": "response answer completion solution generation corrected revision message_2 assistant targets",
    "messages": "conversation dialog dialogue chat turns",
    "system": "system_prompt system_message",
    "reasoning": "reasoning_content thinking thought",
    "segments": "parts input_output",
}


@pytest.mark.parametrize(("expected", "names"), OTHERWISE.items())
def test_a_column_under_another_name_is_proposed_where_its_format_takes_it(expected: str, names: str) -> None:
    for name in names.split():
        said = refusal("text", {name: "a"}, optional=(expected,))
        assert f"`{name}` would be left unused, but looks like `{expected}`" in said
        assert f"set 'data.columns={{{expected}: {name}}}', or set 'data.ignore=[{name}]'" in said
        assert f"'data.columns={{{expected}: {name.upper()}}}'" in refusal("text", {name.upper(): "a"}, (), (expected,))
        # Both are there: this one is another thing.
        assert not refusal("text", {name: "a", expected: "b"}, used=(expected,), optional=(expected,))


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


def test_rows_that_say_they_are_trained_are() -> None:
    for name in ("train", "trainable", "calculate_loss", "loss_mask"):
        assert not refusal("alpaca", {name: True}) and not refusal("alpaca", {name: 1})
    for name in ("masked", "ignore_loss"):
        assert not refusal("alpaca", {name: False}) and refusal("alpaca", {name: 1})


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


def test_values_inside_columns_and_json_inside_strings() -> None:
    row = {"body": {"messages": [1]}, "a.b": 2}
    assert [value_at(row, name) for name in ("body", "body.messages", "a.b")] == [{"messages": [1]}, [1], 2]
    assert [value_at(row, name) for name in ("none", "body.none", "body.messages.0", "a.c")] == [None] * 4
    assert parsed('{"a": 1}') == parsed('"{\\"a\\": 1}"') == {"a": 1}
    assert [parsed(value) for value in ("", "text", None, [1], '"text"')] == [None, "text", None, [1], "text"]


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
