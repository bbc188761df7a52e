"""Messages in every spelling become the same one: roles, text, parts, calls, and which characters are trained."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats.messages import further_fields, read_messages, read_tools, without_use

SPEAKERS = {
    "system": "system",
    "developer": "developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard claude ai bot chatbot model",
    "tool": "tool function observation function_response tool_response",
}
INVERTED = ("masked", "ignore_loss")
FLAGS = [
    *("train", "training", "trainable", "loss", "loss_weight", "loss_mask", "loss_scale", "calculate_loss", "weight"),
    *INVERTED,
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(*messages: Any, **settings: Any) -> list[dict[str, Any]]:
    return read_messages(list(messages), "talk", "d:1", **settings)


def one(message: Any, **settings: Any) -> dict[str, Any]:
    (result,) = read(message, **settings)
    return result


def refused(message: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(message, **settings)
    assert caught.value.change and caught.value.what.startswith("d:1: `talk[0]` ")
    return str(caught.value)


def says(text: Any, speaker: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": speaker, "content": text, **more}


@pytest.mark.parametrize(("role", "names"), SPEAKERS.items())
def test_who_speaks_is_known_under_every_name(role: str, names: str) -> None:
    for name, key in itertools.product(names.split(), ("role", "from")):
        for spelt in (name, name.upper(), name.title()):
            assert one({key: spelt, "content": "a"}) == says("a", role)
    assert role in refused(says("a", "narrator"))


@pytest.mark.parametrize("name", ["function_call", "tool_call"])
@pytest.mark.parametrize("key", ["content", "value"])
def test_a_speaker_of_calls_calls(name: str, key: str) -> None:
    for written in (json.dumps(CALL), json.dumps([CALL]), json.dumps(CALL["function"])):
        assert one({"from": name, key: written}) == says("", tool_calls=[CALL])
    two = json.dumps([CALL, CALL])
    assert one({"from": name, key: two}) == says("", tool_calls=[CALL, CALL])


@pytest.mark.parametrize("key", ["content", "value", "text", "refusal"])
def test_the_text_of_a_message_is_read_under_every_name(key: str) -> None:
    assert one({"role": "user", key: "a"}) == says("a", "user")
    assert one({"role": "user", "content": "", "value": "", key: "a"})["content"] == "a"
    for other in {"content", "value", "text", "refusal"} - {key}:
        assert "its text twice" in refused({"role": "user", key: "a", other: "b"})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_thoughts_are_read_under_every_name(key: str) -> None:
    assert one(says("a", **{key: "Hm."})) == says("a", reasoning_content="Hm.")
    empty = {"reasoning_content": "", "reasoning": "", "thinking": ""}
    assert one(says("a", **empty | {key: "Hm."}))["reasoning_content"] == "Hm."
    assert one(says("a", **{key: None})) == says("a")
    assert one(says("a", **{key: "Hm."}), ignored=[key]) == says("a")
    parts = [{"type": "text", "text": "H", "id": 3}, {"type": "text", "text": "m."}]
    assert one(says("a", **{key: parts})) == says("a", reasoning_content="Hm.", dropped=["content.id"])
    for other in {"reasoning_content", "reasoning", "thinking", "thought"} - {key}:
        assert one(says("a", **{key: "Hm.", other: "Hm."})) == says("a", reasoning_content="Hm.")
        assert "says twice what the model thinks" in refused(says("a", **{key: "Hm.", other: "Oh."}))
    details = [{"type": "reasoning.text", "text": "Hm."}]
    assert one(says("a", **{key: "Hm.", "reasoning_details": details})) == says("a", reasoning_content="Hm.")


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal"])
@pytest.mark.parametrize("key", ["text", "content", "value", "refusal", "thinking", "reasoning"])
def test_parts_of_text_are_joined(kind: str, key: str) -> None:
    parts = [{"type": kind, key: "a "}, {"type": "text", "text": "b"}]
    assert one(says(parts)) == says("a b")
    assert one(says(parts[0])) == says("a ")
    assert one(says([{"type": kind, key: "a", "text": None}] if key != "text" else "a")) == says("a")


@pytest.mark.parametrize("kind", ["reasoning", "thinking"])
@pytest.mark.parametrize("key", ["text", "value", "thinking", "reasoning"])
def test_parts_of_thought_are_no_text(kind: str, key: str) -> None:
    parts = [{"type": kind, key: "Hm"}, {"type": "text", "text": "a"}, {"type": kind, key: "!"}]
    assert one(says(parts)) == says("a", reasoning_content="Hm!")


@pytest.mark.parametrize("kind", ["tool_call", "function_call"])
def test_parts_that_call_come_before_calls_beside_them(kind: str) -> None:
    first = {"name": "add", "arguments": {"a": 0}}
    for part in ({"value": json.dumps(first)}, {"value": json.dumps([first])}, {"value": first}, first):
        message = one(says([{"type": "text", "text": "a"}, {"type": kind, **part}], tool_calls=[CALL]))
        assert message == says("a", tool_calls=[{"type": "function", "function": first}, CALL])


@pytest.mark.parametrize(
    "kind", ["image", "image_url", "input_image", "video", "video_url", "audio", "input_audio", "audio_url", "file"]
)
def test_parts_that_a_text_model_does_not_see_are_refused(kind: str) -> None:
    said = refused(says([{"type": "text", "text": "a"}, {"type": kind, kind: "a.png"}], "user"))
    assert f"has `{kind}`: pictures, sound or film" in said and "remove these rows" in said


@pytest.mark.parametrize(
    "name", ["image", "images", "video", "videos", "audio", "audios", "pixel_values", "input_features"]
)
def test_fields_that_a_text_model_does_not_see_are_refused_unless_empty(name: str) -> None:
    assert f"has `{name}`: pictures, sound or film" in refused(says("a", **{name: ["a.png"]}))
    assert f"has `{name.title()}`: pictures, sound or film" in refused(says("a", **{name.title(): "a.png"}))
    assert one(says("a", **{name: []})) == says("a", **{name: []}) and not further_fields(read(says("a", **{name: []})))
    assert one(says("a", **{name: ["a.png"]}), ignored=[name]) == says("a")


@pytest.mark.parametrize(
    "content", [5, {"texts": "a"}, ["a"], [{"type": "table", "text": "a"}], {"type": "text", "text": 5}]
)
def test_content_of_another_kind_is_refused(content: Any) -> None:
    assert "content of another kind than text" in refused(says(content))


def test_a_call_is_a_part_by_several_names() -> None:
    call = {"name": "look", "input": {"at": "b"}}
    for kind in ("tool_call", "function_call", "tool_use"):
        (called,) = one(says([{"type": "text", "text": "Hm."}, {"type": kind, **call}], "assistant"))["tool_calls"]
        assert called["function"] == {"name": "look", "arguments": {"at": "b"}}
    said = refused(says([{"type": "server_tool_use", **call}], "assistant"))
    assert "content of another kind than text, 'server_tool_use'" in said and '{"type": "tool_call", "name"' in said


@pytest.mark.parametrize("name", FLAGS)
def test_a_message_and_its_parts_say_under_every_name_whether_they_are_trained(name: str) -> None:
    for value in (True, False, 1, 0, 1.0, 0.0):
        trained = bool(value) != (name in INVERTED)
        assert one(says("a", **{name.title(): value})) == says("a", train=trained)
        for speaker in ("user", "assistant"):
            assert one(says("a", speaker, **{name: value})) == says("a", speaker, train=trained)
            part = {"type": "text", "text": "a", name: value}
            assert one(says([part], speaker)) == says("a", speaker, train=trained)
        quiet = {"type": "text", "text": "bc"}
        said = one(says([quiet, {"type": "text", "text": "a", name: value}, quiet]))
        assert said == (says("bcabc", train=True) if trained else says("bcabc", untrained={"content": [[2, 3]]}))
    assert one(says("a", **{name: None})) == says("a")
    for value in (2, 0.5, -1, "1", "true", [1]):
        assert f"has `{name}: {value!r}`" in refused(says("a", **{name: value}))
        assert f"has `{name}: {value!r}`" in refused(says([{"type": "text", "text": "a", name: value}]))


def test_flags_that_contradict_each_other_are_refused() -> None:
    for first, second in itertools.combinations(FLAGS, 2):
        same = (first in INVERTED) == (second in INVERTED)
        opposed = (1, 0) if same else (1, 1)
        said = refused(says("a", **dict(zip((first, second), opposed, strict=True))))
        assert "says twice whether it is trained, and not the same" in said and ", ".join(FLAGS) in said
        alike = (1, int(same))
        assert one(says("a", **dict(zip((first, second), alike, strict=True))))["train"] is (first not in INVERTED)
    assert "`mask`, which some trainers take for trained and some for not" in refused(says("a", mask=1))
    assert one(says("a", mask=1), flags=[*FLAGS, "mask"]) == says("a", train=True)
    assert one(says("a", keep=0), flags=[*FLAGS, "keep"]) == says("a", train=False)
    assert one(says("a", mask=1), ignored=["mask"]) == says("a")


@pytest.mark.parametrize("name", ["label", "kto_tag", "is_good", "is_correct", "desirable", "keep", "reward", "score"])
def test_a_field_that_may_judge_a_message_or_exclude_it_is_refused(name: str) -> None:
    for value in (False, 0, "no", "FALSE"):
        for spelt in (name, name.title()):
            said = refused(says("a", **{spelt: value}))
            assert f"has `{spelt}: {value!r}`" in said and f"'data.columns={{train: {spelt}}}'" in said
            assert one(says("a", **{spelt: value}), ignored=[spelt]) == says("a")
        assert f"has `{name}" in refused(says([{"type": "text", "text": "a", name: value}]))
    assert one(says("a", **{name: False}), flags=[*FLAGS, name]) == says("a", train=False)
    assert one(says("a", **{name: "greeting"})) == says("a", **{name: "greeting"})


@pytest.mark.parametrize("name", ["pieces", "message", "response", "Content"])
def test_a_message_that_says_something_under_another_name_is_not_empty(name: str) -> None:
    for value in ("a", [{"text": "a"}], {"text": "a"}):
        said = refused({"role": "assistant", name: value})
        assert said == refused({"role": "assistant", name: value, "train": True})
        assert f"has no `content`, but `{name}`" in said and f"data.ignore=[{name}]" in said
        for speaking in (says(""), says(None), {"role": "assistant", "tool_calls": [CALL]}, says(None, thinking="Hm.")):
            assert one({**speaking, name: value})[name] == value
        assert one({"role": "assistant", name: value}, ignored=[name]) == says("")
    for silent in ({name: ""}, {name: []}, {name: 5}, {"name": "Ann"}, {"id": "a"}, {"function_calls": "f()"}, {}):
        assert one({"role": "assistant", **silent})["content"] == ""


def trained_characters(message: dict[str, Any], field: str = "content") -> list[bool]:
    """Of each character of a message that was read."""
    whole = message.get("train", message["role"] == "assistant")
    left_out = {n for start, end in message.get("untrained", {}).get(field, []) for n in range(start, end)}
    return [whole and n not in left_out for n in range(len(message[field]))]


@pytest.mark.parametrize("seed", range(40))
def test_of_parts_those_characters_are_trained_that_say_so(seed: int) -> None:
    draw = random.Random(seed)
    speaker, whole = draw.choice(("user", "assistant")), draw.choice((None, None, True, False))
    flags = {} if whole is None else {"train": whole}
    default = (speaker == "assistant") if whole is None else whole
    parts, expected = [], []
    for _ in range(draw.randint(1, 5)):
        text, flag = "x" * draw.randint(1, 4), draw.choice((None, True, False))
        parts.append({"type": "text", "text": text} | ({} if flag is None else {"train": flag}))
        expected += [default if flag is None else flag] * len(text)
    assert trained_characters(one(says(parts, speaker, **flags))) == expected
    thinking = one(says("a", speaker, reasoning_content=parts, **flags))
    assert trained_characters(thinking, "reasoning_content") == expected
    # What thoughts say of themselves moves nothing else, and the reverse.
    assert trained_characters(thinking) == [default]
    speaking = one(says(parts, speaker, reasoning_content="a", **flags))
    assert trained_characters(speaking, "reasoning_content") == [default]


@pytest.mark.parametrize("seed", range(30))
def test_details_say_which_characters_are_trained(seed: int) -> None:
    """Axolotl's offsets: of whole answers, the last character included, in any order, also one in another."""
    draw = random.Random(seed)
    text, details, expected = "x" * 12, [], [False] * 12
    for _ in range(draw.randint(1, 4)):
        begin = draw.randrange(12)
        end, trained = draw.randint(begin, 13), draw.random() < 0.7
        details.append({"begin_offset": begin, "end_offset": end, "train": trained})
        if trained:
            expected[begin : end + 1] = [True] * len(expected[begin : end + 1])
    message = one({"from": "gpt", "value": text, "train_detail": details})
    assert trained_characters(message) == expected
    assert trained_characters(one(says(text, train_detail=details, train=False))) == [False] * 12
    assert "train_detail" not in message


@pytest.mark.parametrize(
    "details", [5, [5], [{"begin_offset": 0}], [{"begin_offset": "x", "end_offset": 1, "train": True}]]
)
def test_details_of_another_form_are_refused(details: Any) -> None:
    assert "`train_detail` that is no list of ranges" in refused(says("abc", train_detail=details))


def test_calls_without_arguments_and_calls_that_are_none() -> None:
    bare = {"type": "function", "function": {"name": "add", "arguments": {}}}
    for arguments in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}, {"parameters": {}}):
        assert one(says("", tool_calls=[{"name": "add", **arguments}]))["tool_calls"] == [bare]
    assert one(says("", tool_calls=CALL)) == one(says("", tool_calls=json.dumps(CALL))) == says("", tool_calls=[CALL])
    assert one(says("", tool_calls=[json.dumps(CALL)])) == says("", tool_calls=[CALL])
    assert one(says("a", tool_calls=[])) == one(says("a", function_call=None)) == says("a")
    assert one(says("", function_call=CALL["function"], tool_calls=[bare])) == says("", tool_calls=[CALL])
    for call in ("add", 5, {"name": 5}, {"function": "add"}, {"function": {}}):
        assert "tool call without a name" in refused(says("", tool_calls=[call])), call
    for arguments in ([1], 5, "a=1"):
        said = refused(says("", tool_calls=[{"name": "add", "arguments": arguments}]))
        assert "calls `add` with arguments that are no JSON object" in said
    kept = one(
        says("", tool_calls=[{"id": "7", "index": 0, "type": "x", "function": {**CALL["function"], "strict": 1}}])
    )
    assert kept == says("", tool_calls=[{"id": "7", **CALL}], dropped=["tool_calls.strict", "tool_calls.index"])


def test_keys_that_no_template_is_given_are_named() -> None:
    part = {"type": "text", "text": "a", "weight": 1, "citations": ["b"], "empty": ""}
    call = {"id": "7", "index": 1, **CALL}
    message = one(
        says([part], tool_calls=[call], dropped=1, untrained="x", name="Ann", note="", seen=None, turn=0, done=False)
    )
    assert message["dropped"] == ["content.citations", "tool_calls.index", "dropped", "untrained"]
    fields = further_fields([message, says("b", "user", name="Bo")])
    assert fields == ["name", "turn", "done", "name", *message["dropped"]]
    assert one(says([part]), ignored=["content.citations"]) == says("a", train=True)
    assert "note" in message and not message["note"] and "seen" not in message


def test_fields_that_a_template_names_or_prints_are_of_use() -> None:
    fields = ["name", "id", "content.id"]
    assert without_use(fields, "{{ message.name }}") == ["id", "content.id"]
    assert without_use(fields, "{{ message.names }} {{ idea }}") == fields
    assert without_use(fields, "{{ message['id'] }}") == ["name", "content.id"]
    for printed in ("{{ message | tojson }}", "{{ messages|tojson }}"):
        assert without_use(fields, printed) == ["content.id"]
    assert without_use(fields, "{{ tools | tojson }}{{ a_message | tojson }}") == fields


def test_tools_are_one_list_in_every_spelling() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    as_text = {"type": "function", "function": function | {"parameters": json.dumps(function["parameters"])}}
    for value in (tool, [tool], [function], function, json.dumps([tool]), [json.dumps(tool)], [as_text]):
        assert read_tools(value, "d:1") == [tool], value
    assert read_tools([function | {"type": "function"}], "d:1") == [tool]
    assert read_tools([tool | {"name": "x"}], "d:1") == [tool | {"name": "x"}]
    assert read_tools([{"google_search": {}}, {"name": 5}], "d:1") == [{"google_search": {}}, {"name": 5}]
    for nothing in (None, [], "", "[]", {}):
        assert read_tools(nothing, "d:1") is None
    for wrong in ([5], "add", ["add", tool]):
        with pytest.raises(UserError, match="d:1: `tools` is not a list of tool definitions"):
            read_tools(wrong, "d:1")


def test_conversations_and_single_messages_as_json() -> None:
    talk = [says("a", "user"), says("b")]
    for value in (talk, json.dumps(talk), json.dumps(json.dumps(talk))):
        assert read_messages(value, "talk", "d:1") == talk
    assert read_messages(talk[0], "talk", "d:1") == read_messages(json.dumps(talk[0]), "talk", "d:1") == talk[:1]
    assert read_messages(None, "talk", "d:1") == read_messages("", "talk", "d:1") == []
    with pytest.raises(UserError, match=r"d:1: `talk\[1\]` is not an object"):
        read(talk[0], "b")
    with pytest.raises(UserError, match="d:1: `talk` is not a list of messages"):
        read_messages("hello", "talk", "d:1")


def test_calls_are_parts_of_a_message_that_may_be_left_out() -> None:
    first = {"name": "add", "arguments": {"a": 0}}
    text, call = {"type": "text", "text": "a"}, {"type": "tool_call", **first}
    left_out, called = text | {"train": False}, {"tool_calls": [{"type": "function", "function": first}]}
    assert one(says([left_out, call])) == says("a", untrained={"content": [[0, 1]]}, **called)
    assert one(says([left_out], tool_calls=[first])) == says("a", untrained={"content": [[0, 1]]}, **called)
    thought = {"type": "reasoning", "text": "a", "train": False}
    expected = says("", reasoning_content="a", untrained={"reasoning_content": [[0, 1]]}, **called)
    assert one(says([thought, call])) == expected
    for unread in (call | {"train": False}, {"type": "tool_call", "value": json.dumps(first), "train": False}):
        assert one(says([left_out, unread])) == says("a", train=False, **called)
        assert one(says([unread])) == says("", train=False, **called)
        assert "has parts that are trained and tool calls that are not" in refused(says([text, unread]))
    assert one(says([text, call | {"train": True}])) == says("a", train=True, **called)
    assert "trained and tool calls that are not" in refused(says("a", tool_calls=[{"function": first, "weight": 0}]))
    left_out = says("a", train=False, tool_calls=[first | {"train": True}])
    assert one(left_out) == says("a", train=True, untrained={"content": [[0, 1]]}, **called)
    thinks = one(left_out | {"reasoning_content": "Hm."})
    assert thinks["untrained"] == {"content": [[0, 1]], "reasoning_content": [[0, 3]]}
    written = {"role": "function_call", "content": json.dumps(first | {"train": False})}
    assert one(written) == says("", train=False, **called)


@pytest.mark.parametrize("name", ["weight", "keep"])
def test_flags_of_calls_and_parts_have_the_names_that_those_of_messages_have(name: str) -> None:
    flags, first = {"flags": (*FLAGS, "keep")}, {"name": "add", "arguments": {"a": 0}}
    expected = says("", tool_calls=[{"type": "function", "function": first}])
    for call in (first | {name: 0.25}, {"function": first, name: 0.25}):
        said = refused(says("", tool_calls=[first, call]), **flags)
        assert f"(`tool_calls[1]`) has `{name}: 0.25`" in said and f"'data.ignore=[{name}]'" in said
        assert one(says("", tool_calls=[call]), ignored=[name], **flags) == expected
        assert one(says("", tool_calls=[call | {name: 0}]), **flags) == expected | {"train": False}
    for flag in (0.25, 0):
        part = {"type": "text", "text": "a", name: flag}
        assert one(says([part]), ignored=[name], **flags) == says("a")
    assert one(says([part]), **flags) == says("a", train=False)
    in_parts = one(says([{"type": "tool_call", **first, name: 0}]), **flags)
    assert in_parts == expected | {"train": False}
