"""What columns mean elsewhere: each is refused in the formats that leave it unused, and in no other."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats.columns import parsed, refuse_meaning, value_at
from toolkit.data.formats.other_forms import refuse_other_forms

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
        *(("input",), "Be brief.", {"prompt_completion"}),
        *("prompts and completions do not have", "data.columns={instruction: prompt, output: completion}"),
    ),
    (
        *(("context",), "Be brief.", {"prompt_completion"}, "prompts and completions do not have"),
        "data.columns={instruction: prompt, output: completion, input: context}",
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
        *(("reasoning",), "Hm.", {"prompt_completion"}, "do not have"),
        "data.columns={instruction: prompt, output: completion}",
    ),
    *(
        (
            *((name,), "Hm.", {"prompt_completion"}, "do not have"),
            f"data.columns={{instruction: prompt, output: completion, reasoning: {name}}}",
        )
        for name in ("reasoning_content", "thinking", "thought")
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


def test_rows_that_say_they_are_trained_are() -> None:
    for name in ("train", "trainable", "calculate_loss", "loss_mask"):
        assert not refusal("alpaca", {name: True}) and not refusal("alpaca", {name: 1})
    for name in ("masked", "ignore_loss"):
        assert not refusal("alpaca", {name: False}) and refusal("alpaca", {name: 1})


def test_values_inside_columns_and_json_inside_strings() -> None:
    row = {"body": {"messages": [1]}, "a.b": 2}
    assert [value_at(row, name) for name in ("body", "body.messages", "a.b")] == [{"messages": [1]}, [1], 2]
    assert [value_at(row, name) for name in ("none", "body.none", "body.messages.0", "a.c")] == [None] * 4
    assert parsed('{"a": 1}') == parsed('"{\\"a\\": 1}"') == {"a": 1}
    assert [parsed(value) for value in ("", "text", None, [1], '"text"')] == [None, "text", None, [1], "text"]
