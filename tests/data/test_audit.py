"""The audit counts what it says, and stops training where the data cannot teach anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, plain_tokenizer, recipe
from harness import write_jsonl

from toolkit.common import LINES, UserError
from toolkit.data.auditing.audit import (
    Audit,
    DataError,
    Lengths,
    Side,
    SourceFigures,
    in_sentences,
)
from toolkit.data.auditing.problems import check_batch, find_problems, with_settings
from toolkit.data.formats.messages import read_messages, without_use
from toolkit.data.formats.task import Task, has_empty_turn
from toolkit.data.prepare import prepare
from toolkit.data.preview import render
from toolkit.data.rows import Chat


def audit(tmp_path: Path, rows: list[Any], tokenizer: Any = None, stop: frozenset[int] = STOP, **settings: Any) -> Any:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return prepare(recipe(path, **settings), tokenizer or chatml_tokenizer(), stop, tmp_path / "cache").audit


def refused(*args: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        audit(*args, **settings)
    assert caught.value.change
    return str(caught.value)


def test_figures_are_counted(tmp_path: Path) -> None:
    rows = [chat_row("hi", "yo"), chat_row("hi", "yo"), chat_row("hi", ""), chat_row("q", "a " * 20) | {"id": 7}]
    audited = audit(tmp_path, rows)
    train, source = audited.train, audited.sources[0]
    prepared = prepare(recipe(tmp_path / "rows.jsonl"), chatml_tokenizer(), STOP, tmp_path / "cache")
    assert train.rows == len(prepared.train) == 3
    assert train.tokens == sum(len(row["input_ids"]) for row in prepared.train)
    assert train.trained_tokens == sum(label != -100 for row in prepared.train for label in row["labels"])
    assert train.stop_trained_rows == 3 and audited.duplicates == 1
    assert source.rows == 4 and source.empty_rows == 1 and source.unused_columns == ["id"]
    assert sum(bucket.rows for bucket in train.lengths.histogram) == 3
    assert train.lengths.percentiles["max"] == max(len(row["input_ids"]) for row in prepared.train)
    assert {problem.level for problem in audited.problems} == {"warning"}


@pytest.mark.parametrize(
    ("values", "noes"),
    [
        ([True, False, True], 1),
        ([0, 1, 0], 2),
        (["Yes", "no", ""], 1),
        ([None, "bad", "good"], 1),
        ([1, -1, -1.0], 2),
        ([True, True, None], None),
        ([False, "maybe", True], None),
        ([[True], [False], []], None),
    ],
)
def test_unused_columns_that_may_judge_rows_are_warned_of(values: list[Any], noes: int | None, tmp_path: Path) -> None:
    rows = [chat_row(f"hi {n}", "yo") | {"is_fine": value, "id": n} for n, value in enumerate(values)]
    audited = audit(tmp_path, rows)
    assert audited.sources[0].unused_columns == ["is_fine", "id"]
    assert audited.sources[0].verdicts == ({} if noes is None else {"is_fine": noes})
    said = render(audited)
    assert ("`is_fine` says no in" in " ".join(said.split())) == (noes is not None)
    assert not audit(tmp_path, rows, ignore=["is_fine"]).problems


@pytest.mark.parametrize(
    ("text", "is_placeholder"),
    [
        *(
            (text, True)
            for text in ("<image>Who?", "a\n<video>", "<audio>", "<|image|>?", "<|image_pad|>", "<image><image>")
        ),
        *(
            (text, False)
            for text in ("<video></video>", "an image", "<img>", "<video src='a'>", "<imagery>", "<|image>")
        ),
    ],
)
def test_placeholders_of_pictures_without_pictures_are_warned_of(
    text: str, is_placeholder: bool, tmp_path: Path
) -> None:
    audited = audit(tmp_path, [chat_row(text, "yo"), chat_row("hi", "yo")])
    assert audited.sources[0].placeholders == is_placeholder
    assert any("trained as plain text" in each.what for each in audited.problems) == is_placeholder


@pytest.mark.parametrize(
    ("train_on", "empty", "warns"),
    [
        ("auto", {}, True),
        ("last_assistant", {}, False),
        ("auto", {"train": False}, False),
        (["tool"], {}, False),
    ],
)
def test_turns_that_say_nothing_are_warned_of(
    train_on: Any, empty: dict[str, Any], warns: bool, tmp_path: Path
) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", **empty},
        {"role": "tool", "content": "found"},
        {"role": "user", "content": "hello?"},
        {"role": "assistant", "content": "yo"},
    ]
    audited = audit(tmp_path, [{"messages": turns}, chat_row("hi", "yo")], train_on=train_on)
    assert audited.sources[0].empty_turns == warns
    assert any("says nothing" in each.what for each in audited.problems) == warns


@pytest.mark.parametrize(
    ("row", "objective", "warns"),
    [
        (chat_row("hi", "nan"), "sft", True),
        (chat_row("nan", "yo"), "sft", False),
        (chat_row("hi", "nan bread"), "sft", False),
        ({"prompt": "hi", "completion": " NaN\n"}, "sft", True),
        ({"text": "<NA>"}, "language_modelling", True),
        ({"prompt": "hi", "chosen": "yo", "rejected": "nan"}, "dpo", True),
        ({"prompt": "hi", "completion": "nan", "label": True}, "kto", True),
    ],
)
def test_answers_that_pandas_wrote_for_a_missing_value_are_warned_of(
    row: dict[str, Any], objective: str, warns: bool, tmp_path: Path
) -> None:
    audited = audit(tmp_path, [row, row | {"other": 1}], objective=objective)
    assert audited.sources[0].missing_values == 2 * warns
    assert any("pandas" in each.what for each in audited.problems) == warns


def test_a_turn_of_calls_or_thoughts_alone_is_not_empty() -> None:
    asked, task = {"role": "user", "content": "hi"}, Task("sft", "auto", True)
    for said in ({"tool_calls": [{"function": {"name": "look", "arguments": {}}}]}, {"reasoning_content": "Hm."}):
        assert not has_empty_turn(Chat([asked, {"role": "assistant", "content": "", **said}]), task)
    assert has_empty_turn(Chat([asked, {"role": "assistant", "content": ""}]), task)
    assert not has_empty_turn(Chat([asked, {"role": "assistant", "content": ""}]), Task("sft", "all", True))


def test_rows_that_are_trained_as_they_are_end_themselves(tmp_path: Path) -> None:
    said = refused(tmp_path, [{"segments": [{"text": "a", "label": True}, {"text": "b</s>", "label": True}]}])
    assert "end what is trained in each row with the model's stop token" in said and "chat_template" not in said


GLM = """[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def test_a_template_that_ends_turns_with_the_next_ones_needs_an_end_of_the_last(tmp_path: Path) -> None:
    """GLM's models stop at `<|user|>`: of rows with one answer, no one would learn where it ends."""
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = GLM
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>"]))
    said = refused(tmp_path, [chat_row("a", "b")], tokenizer, stops)
    assert "ends the last answer with the model's stop token, <|endoftext|> or <|user|>" in said
    tokenizer.chat_template = GLM.replace("{% endfor %}", "{% if loop.last %}<|user|>{% endif %}{% endfor %}")
    assert audit(tmp_path, [chat_row("a", "b")], tokenizer, stops).train.stop_trained_rows == 1


def test_fields_of_messages_that_nobody_reads_are_listed_once(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "hi", "name": "Ann", "id": 7, "text": "", "timestamp": None},
            {"role": "assistant", "content": "yo", "id": 8, "weight": 1, "metadata": {"cost": 1}},
        ]
    }
    tokenizer = chatml_tokenizer()
    assert "name" not in tokenizer.chat_template
    audited = audit(tmp_path, [row, row], tokenizer)
    assert audited.sources[0].unused_fields == ["name", "id", "metadata"]
    assert render(audited).count("unused fields of messages: name, id, metadata") == 1
    left_out = audit(tmp_path, [row], tokenizer, ignore=["id", "metadata"])
    assert left_out.sources[0].unused_fields == ["name"]
    tokenizer.chat_template = "{{ messages[0].name }}" + tokenizer.chat_template
    assert audit(tmp_path, [row], tokenizer).sources[0].unused_fields == ["id", "metadata"]
    tokenizer.chat_template = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
    assert without_use(["id"], tokenizer.chat_template) == []


def test_keys_inside_calls_and_parts_are_read_or_listed(tmp_path: Path) -> None:
    """Arguments by another name are arguments; of what is left out, the audit names each key once."""
    nested = {"id": "a", "type": "function", "index": 1, "function": {"name": "f", "arguments": {"x": 1}, "strict": 1}}
    flat = [{"name": "f", given: {"x": 1}, "cost": 3} for given in ("arguments", "parameters", "input", "args")]
    answer = [{"type": "text", "text": "yo", "citations": ["b"], "cache_control": None}]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", "weight": 1, "cache_control": {"type": "x"}}]},
            {"role": "assistant", "content": answer, "tool_calls": [nested, *flat]},
        ]
    }
    messages = read_messages(row["messages"], "messages", "row 1")
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert messages[1]["tool_calls"] == [{"id": "a", **call}, *[call] * 4]
    listed = ["content.cache_control", "tool_calls.strict", "tool_calls.index", "tool_calls.cost", "content.citations"]
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message | tojson")
    prepared = prepare(
        recipe(write_jsonl(tmp_path / "a.jsonl", [row]), seq_len=1024), tokenizer, STOP, tmp_path / "cache"
    )
    assert sorted(prepared.audit.sources[0].unused_fields) == sorted(listed)
    assert "dropped" not in tokenizer.decode(prepared.train[0]["input_ids"])
    left_out = audit(tmp_path, [row], ignore=["tool_calls.index", *listed[3:]], seq_len=1024)
    assert left_out.sources[0].unused_fields == listed[:2]


@pytest.mark.parametrize("value", [True, "yes", ["x"]])
def test_fields_named_like_our_own_are_listed_like_others(tmp_path: Path, value: object) -> None:
    row = chat_row("hi", "yo")
    row["messages"][0] |= {"dropped": value, "untrained": value}
    assert sorted(audit(tmp_path, [row]).sources[0].unused_fields) == ["dropped", "untrained"]


def test_render_is_narrow_and_says_everything(tmp_path: Path) -> None:
    rows = [chat_row("hi " * n, "yo") | {f"column_{n}": 1} for n in range(1, 40)] + [chat_row("x", "")]
    text = render(audit(tmp_path, rows, eval_split=0.2, packing=True, seq_len=300))
    assert max(len(line) for line in text.splitlines()) <= 100
    for words in (
        "unused columns: column_1",
        "tokens carry loss",
        "are held out",
        "the tokenizer's",
        "sequences",
        "p99",
        "warning: 1 of",
    ):
        assert words in text
    assert "█" in text


@pytest.mark.parametrize("width", [80, 100])
def test_render_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    rows = [chat_row(f"{n} " * n, "yo") | {f"a_rather_long_column_name_{n}": 1} for n in range(1, 60)]
    for folder, words in ((Path(), ["and 39 more"]), (Path(*["a-folder"] * 20), [])):
        folder.mkdir(parents=True, exist_ok=True)
        text = render(audit(folder, rows, eval_split=0.2, seq_len=96, over_long="drop"))
        assert max(len(line) for line in text.splitlines()) in range(width - 15, width + 1)
        assert len(text.splitlines()) < LINES
        # A longer name takes lines from the rest.
        for each in (*words, "of the training rows", "of the held-out rows", "held-out rows are longer"):
            assert each in " ".join(text.split())


def test_a_single_short_row_has_a_histogram(tmp_path: Path) -> None:
    audited = audit(tmp_path, [{"text": "hi"}])
    assert audited.model_dump()["train"]["lengths"]["histogram"] == [{"from": 0, "to": 15, "rows": 1}]


def test_a_fatal_audit_comes_with_the_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        audit(tmp_path, [chat_row("a", "b " * 200)], over_long="truncate", seq_len=64)
    assert {problem.level for problem in caught.value.audit.problems} == {"fatal", "warning"}
    assert "fatal: the stop token is trained in no row" in render(caught.value.audit)


def test_plain_prompts_for_a_chat_model_are_a_warning(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}\n", "completion": "a"} for n in range(3)]
    (problem,) = audit(tmp_path, rows).problems
    assert "without the chat template" in problem.what and "`instruction`" in problem.change
    assert audit(tmp_path, rows, plain_tokenizer(), frozenset({0})).problems == []


def test_a_template_that_no_row_needs_is_a_warning(tmp_path: Path) -> None:
    for row, named, warned in (
        ({"text": "Night fell."}, "chatml", True),
        ({"text": "Night fell."}, None, False),
        (chat_row("hi", "yo"), "chatml", False),
    ):
        wanted = recipe(write_jsonl(tmp_path / "rows.jsonl", [row])).with_values({"model.chat_template": named})
        problems = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").audit.problems
        assert any("model.chat_template is read by none" in problem.what for problem in problems) == warned


@pytest.mark.parametrize(
    ("ignore", "absent"),
    [
        (["id", "name", "tools", "deep", "content.cited"], []),
        (["imagse", "id"], ["imagse"]),
        (["content.sited", "Name"], ["content.sited", "Name"]),
    ],
)
def test_names_to_ignore_that_no_row_has_are_a_warning(tmp_path: Path, ignore: list[str], absent: list[str]) -> None:
    part = {"type": "text", "text": "hi", "cited": 1}
    chats = [{"role": "user", "content": [part], "name": "Ann"}, {"role": "assistant", "content": "yo"}]
    row = {"messages": json.dumps(chats), "tools": [], "id": 7, "more": {"deep": 1}}
    other = write_jsonl(tmp_path / "other.jsonl", [chat_row("q", "a")])
    first = write_jsonl(tmp_path / "first.jsonl", [chat_row("hi", "ho"), row])
    wanted = recipe(other, first, ignore=ignore)
    problems = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").audit.problems
    what = [problem.what for problem in problems if "data.ignore" in problem.what]
    names = " or ".join(f"`{name}`" for name in absent)
    assert what == ([f"no row has {names}, which `data.ignore` names"] if absent else [])


def test_more_than_half_without_answer_is_fatal(tmp_path: Path) -> None:
    rows = [chat_row("hi", "yo")] + [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(3)]
    message = refused(tmp_path, rows)
    assert "3 of 4 rows have no trained token" in message and "data.train_on" in message
    assert re.search(r"cut off; first: \S+\.jsonl:[234]\)", message), message


def test_a_row_that_is_left_out_is_named(tmp_path: Path) -> None:
    rows = [chat_row("hi", "yo"), chat_row("hi", ""), chat_row("ho", "yo")]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    told = [
        problem.what for problem in prepare(recipe(file), chatml_tokenizer(), STOP, tmp_path / "cache").audit.problems
    ]
    assert f"1 of 3 rows has no trained token and is left out (first: {file}:2)" in told, told


def test_no_usable_row_is_fatal(tmp_path: Path) -> None:
    assert "no usable row" in refused(tmp_path, [{"text": " "}, {"text": ""}])
    unanswered = refused(tmp_path, [{"messages": [{"role": "user", "content": "hi"}]}])
    assert "no usable row" in unanswered and "end rows with the answer to learn, or check" in unanswered
    assert "no usable row" in refused(tmp_path, [chat_row("hi", "yo " * 99)], seq_len=16, over_long="drop")


def test_chats_without_a_template_are_fatal(tmp_path: Path) -> None:
    assert "model.chat_template" in refused(tmp_path, [chat_row("a", "b")], plain_tokenizer(), frozenset({0}))
    turns = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    assert "model.chat_template" in refused(tmp_path, [turns], plain_tokenizer(), frozenset({0}))


def test_stop_token_that_is_never_trained_is_fatal(tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # the template ends turns with <|im_end|>
    message = refused(tmp_path, [chat_row("a", "b")], tokenizer, frozenset({0}))
    assert "stop token" in message and "model.chat_template" in message
    cut = refused(tmp_path, [chat_row("a", "b " * 200)], over_long="truncate", seq_len=64)
    assert "stop token" in cut and "batch.seq_len" in cut


def test_fewer_rows_than_a_global_batch_is_a_warning(tmp_path: Path) -> None:
    audited = audit(tmp_path, [chat_row(f"{n}", "b") for n in range(5)])
    (problem,) = check_batch(audited, 5, 16).problems
    assert problem.level == "warning" and "5 training rows do not fill one global batch of 16" in problem.what
    assert check_batch(audited, 5, 5).problems == []


def test_merged_boundaries_are_counted(tmp_path: Path) -> None:
    merged = [{"prompt": "The quick bro", "completion": f"wn fox {n}"} for n in range(20)]
    assert audit(tmp_path, merged).train.boundary_merged_rows == 20
    apart = [{"prompt": "The quick brown\n", "completion": f"fox {n}"} for n in range(20)]
    assert audit(tmp_path, apart).train.boundary_merged_rows == 0


def side(rows: int = 100, length: int = 10, **changes: Any) -> Side:
    """Rows of one length in which half of the tokens carry loss and all ends are trained."""
    fits = {"rows": 0, "action": "error", "seq_len": 64}
    of_all = {"rows": rows, "tokens": rows * length, "trained_tokens": rows * length // 2, "untrained_rows": 0}
    ends = {"stop_trained_rows": rows, "boundary_merged_rows": 0, "longest": "a.jsonl:7"}
    lengths = Lengths.of(np.full(rows, length))
    return Side.model_validate({**of_all, **ends, "over_long": fits, "lengths": lengths, **changes})


def figures(**changes: Any) -> Audit:
    """Of 100 chats with which nothing is wrong."""
    content = {"objective": "sft", "scope": "", "sources": [], "train": side(), "eval": None, "deduplicate": False}
    content |= {"duplicates": 0, "in_train_and_eval": 0, "kinds": ["Chat"]}
    return Audit.model_validate({**content, "chat_template": {"source": "the tokenizer's", "needed": True}, **changes})


def too_long(rows: int, action: str) -> Side:
    return side(length=80, over_long={"rows": rows, "action": action, "seq_len": 64})


@pytest.mark.parametrize(
    ("changes", "level", "what", "change"),
    [
        # 51 and 50 of 100 rows without an answer.
        ({"train": side(49, untrained_rows=51)}, "fatal", "51 of 100 rows have no trained token (", "data.train_on"),
        ({"train": side(50, untrained_rows=50)}, "warning", "50 of 100 rows have no trained token and", "fill or"),
        ({"train": side(99, untrained_rows=1)}, "warning", "1 of 100 rows has no trained token and", "fill or"),
        ({"train": side(stop_trained_rows=0)}, "fatal", "the stop token is trained in no row", "chat_template"),
        (
            {
                "train": side(stop_trained_rows=0),
                "chat_template": {"source": "the tokenizer's", "needed": True, "stops": ["</s>", "<|user|>"]},
            },
            *("fatal", "the stop token is trained in no row"),
            "a file, e.g. a copy of this template, that ends the last answer with the model's stop token, </s> or <|us",
        ),
        ({"train": side(stop_trained_rows=89)}, "warning", "in only 89 of 100 rows", "over_long: drop"),
        ({"kinds": ["Completion"]}, "warning", "without the chat template", "`instruction`"),
        ({"duplicates": 3}, "warning", "3 rows repeat an earlier row", "set `data.deduplicate: true`"),
        ({"in_train_and_eval": 2}, "warning", "2 held-out rows are also trained on", "hold a fraction out"),
        ({"train": side(boundary_merged_rows=4)}, "warning", "in 4 rows one token holds the end", "line break"),
        ({"train": side(prompt_lost_rows=5)}, "warning", "in 5 rows the chat template leaves out", "a template that"),
        ({"eval": side(0)}, "fatal", "no usable held-out row", "data.eval_sources"),
        (
            {"train": too_long(9, "error")},
            "fatal",
            "9 of 100 training rows are longer than `batch.seq_len: 64`",
            "set `data.over_long` to drop or truncate",
        ),
        (
            {"train": too_long(9, "error"), "kinds": ["Text"]},
            "fatal",
            "9 of 100 training rows are longer than `batch.seq_len: 64`",
            "drop, truncate or, with `objective: language_modelling`, split",
        ),
        ({"train": too_long(9, "error")}, "fatal", "the longest has 80 tokens (a.jsonl:7)", "at most 80 tokens"),
        ({"train": too_long(9, "drop")}, "warning", "they are left out", "to keep them whole"),
        ({"eval": too_long(9, "truncate")}, "warning", "9 of 100 held-out rows", "to keep them whole"),
        ({"eval": too_long(9, "truncate")}, "warning", "their ends are cut off", "raise `batch.seq_len`"),
        ({"train": too_long(9, "split")}, "fatal", "is for text, not for chats", "to drop or truncate"),
    ],
)
def test_what_is_wrong_with_figures(changes: dict[str, Any], level: str, what: str, change: str) -> None:
    (problem,) = find_problems(figures(**changes))
    assert problem.level == level and what in problem.what and change in problem.change


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eval": side(10)},
        {"train": side(stop_trained_rows=90)},
        {"train": side(stop_trained_rows=0), "objective": "language_modelling", "kinds": ["Text"]},
        {"kinds": ["Completion"], "chat_template": {"source": "none", "needed": False}},
        {"kinds": ["Completion"], "objective": "seq2seq"},
        {"kinds": ["Chat", "Completion"]},
        {"duplicates": 3, "deduplicate": True},
        {"train": too_long(9, "split"), "kinds": ["Text"]},
    ],
    ids=str,
)
def test_figures_with_which_nothing_is_wrong(changes: dict[str, Any]) -> None:
    assert list(find_problems(figures(**changes))) == []


def test_no_usable_row_names_both_reasons() -> None:
    nothing = side(0, untrained_rows=7, over_long={"rows": 2, "action": "drop", "seq_len": 64})
    over_long, problem = find_problems(figures(train=nothing.model_copy(update={"lengths": side(2).lengths})))
    assert over_long.level == "warning" and problem.level == "fatal"
    assert "7 rows have no trained token, 2 are too long (`data.over_long: drop`)" in problem.what
    cut = side(stop_trained_rows=0, over_long={"rows": 0, "action": "truncate", "seq_len": 64})
    (problem,) = find_problems(figures(train=cut))
    assert problem.change.endswith("or raise `batch.seq_len` so that ends are not cut off")


def test_empty_training_rows_count_as_untrained_and_held_out_ones_do_not() -> None:
    sources = [{"path": "a", "split": "train", "format": "text", "empty_rows": 3, "role": "train"}]
    sources.append({**sources[0], "empty_rows": 9, "role": "eval"})
    assert figures(sources=sources, train=side(97, untrained_rows=2)).untrained_rows == 5


def test_figures_in_sentences() -> None:
    assert in_sentences(figures()) == [
        "100 rows of 1,000 tokens are trained on; 50.0% of the tokens carry loss, 500 in all.",
        "No row is longer than 64 tokens.",
        "Every row has a token to train.",
        "The stop token is trained in every row.",
        "No row repeats another; no held-out row is trained on.",
        "The chat template is the tokenizer's.",
    ]
    packing, template = {"rows": 12, "efficiency": 0.957}, {"source": "none", "needed": False}
    many = figures(
        train=side(98, untrained_rows=2, stop_trained_rows=49, over_long={"rows": 7, "action": "drop", "seq_len": 64}),
        **{"eval": too_long(25, "drop"), "duplicates": 3, "in_train_and_eval": 2, "scope": "the first 100 rows"},
        **{"packing": packing, "chat_template": template},
    )
    assert in_sentences(many)[1:] == [
        "100 rows of 8,000 tokens are held out for evaluation.",
        "7 of the training rows (7.1%) and 25 of the held-out rows (25.0%) are longer than 64 tokens and are left out "
        "(data.over_long: drop).",
        "2 rows have no trained token and are left out.",
        "The stop token is trained in 50.0% of the rows.",
        "3 rows repeat an earlier one and are kept; 2 held-out rows are trained on.",
        "The chat template is none, and these rows do not need one.",
        "The rows are packed into 12 sequences, which are 95.7% full.",
        "These are figures of the first 100 rows only: the data is streamed.",
    ]
    for action, effect in (("truncate", "lose their ends"), ("split", "are cut into"), ("error", "stop the run")):
        assert effect in in_sentences(figures(train=too_long(7, action)))[1]
    dropped = in_sentences(figures(duplicates=3, deduplicate=True, in_train_and_eval=1))[4]
    assert dropped == "3 rows repeat an earlier one and are dropped; 1 held-out row is trained on."
    assert "0.0% of the tokens" in in_sentences(figures(train=side(0)))[0]


def test_one_row_is_told_of_as_one() -> None:
    cut = {"rows": 1, "action": "drop", "seq_len": 64}
    alone = figures(train=side(1, untrained_rows=1, stop_trained_rows=1, over_long=cut), duplicates=1)
    assert in_sentences(alone)[:5] == [
        "1 row of 10 tokens is trained on; 50.0% of the tokens carry loss, 5 in all.",
        "1 of the training rows (100.0%) is longer than 64 tokens and is left out (data.over_long: drop).",
        "1 row has no trained token and is left out.",
        "The stop token is trained in every row.",
        "1 row repeats an earlier one and is kept; no held-out row is trained on.",
    ]
    for action, effect in (("truncate", "loses its end"), ("split", "is cut into"), ("error", "stops the run")):
        assert effect in in_sentences(figures(train=too_long(1, action)))[1]
    said = [problem.what for problem in find_problems(alone)]
    assert "1 row repeats an earlier row" in said and "1 of 2 rows has no trained token and is left out" in said


def test_lengths_of_rows() -> None:
    lengths = Lengths.of(np.array([3, 17, 18, 40, 100]))
    assert lengths.percentiles == {"min": 3, "p10": 3, "p50": 18, "p90": 100, "p99": 100, "max": 100}
    buckets = [(bucket.low, bucket.high, bucket.rows) for bucket in lengths.histogram]
    assert buckets == [(0, 15, 1), (16, 31, 2), (32, 63, 1), (64, 127, 1)]
    # Empty buckets before the first row are left out, those between rows are not; a power of two begins one.
    spread = Lengths.of(np.array([16, 64])).histogram
    assert [(bucket.low, bucket.high, bucket.rows) for bucket in spread] == [(16, 31, 1), (32, 63, 0), (64, 127, 1)]
    assert Lengths.of(np.array([], dtype=np.int64)) == Lengths(percentiles={}, histogram=[])


def test_unused_names_are_listed_up_to_twenty() -> None:
    source = SourceFigures(path="a", split="train", format="text", unused_columns=["b"] * 20, unused_fields=["c"] * 23)
    columns, fields = source.unused()
    assert columns == f"unused columns: {', '.join('b' * 20)}"
    assert fields == f"unused fields of messages: {', '.join('c' * 20)} and 3 more"
    assert SourceFigures(path="a", split="train", format="text").unused() == []


def test_prompts_that_weights_repeat_are_no_copies_in_the_data(tmp_path: Path) -> None:
    for name, count in (("many", 12), ("few", 3)):
        write_jsonl(tmp_path / f"{name}.jsonl", ({"prompt": f"{name} {n}", "answer": "1"} for n in range(count)))
    sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1} for name in ("many", "few")]
    wanted = recipe(*sources, objective="grpo", seq_len=512).with_values({"rewards.length.max_tokens": 9})
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    assert len(prepared.train) == 24 and prepared.audit.train.prompts
    assert prepared.audit.train.prompts.repeated == 0 and prepared.audit.problems == []


def test_a_text_that_is_split_fills_a_batch_alone(tmp_path: Path) -> None:
    book = write_jsonl(tmp_path / "a.jsonl", [{"text": "fox " * 300}])
    held_out = write_jsonl(tmp_path / "b.jsonl", [{"text": "dog " * 200}])
    settings = {"objective": "language_modelling", "over_long": "split", "eval_sources": [str(held_out)]}
    wanted = recipe(book, seq_len=64, **settings).with_values({"batch.global_batch_size": 4})
    prepared = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache")
    assert prepared.audit.train.rows == 1 and len(prepared.train) > 4
    assert with_settings(prepared.audit, wanted, prepared.statistics).problems == []
    assert prepared.statistics and prepared.statistics.eval_rows == len(prepared.eval or ()) > 1
    few = with_settings(prepared.audit, wanted.with_values({"batch.global_batch_size": 400}), prepared.statistics)
    assert f"{len(prepared.train)} training sequences do not fill" in few.problems[0].what


def test_packed_rows_fill_a_batch_as_sequences() -> None:
    packed = figures(packing={"rows": 12, "efficiency": 0.9})
    (problem,) = check_batch(packed, 12, 13).problems
    assert "12 training sequences do not fill one global batch of 13" in problem.what
    assert problem.change == "lower `batch.global_batch_size`, or set `data.packing: false`"
    assert check_batch(packed, 12, 12) == packed
    assert with_settings(figures(scope="the first rows"), recipe("a.jsonl"), None).problems == []
    assert check_batch(figures(), 100, 101).problems[0].change == "lower `batch.global_batch_size`"


def test_sources_lengths_and_problems_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    sources = [
        {"path": "a.jsonl", "split": "train", "format": "text", "rows": 1200, "used_rows": 1000, "repeats": 1.25},
        {"path": "a.jsonl", "split": "validation", "format": "text", "rows": 9, "used_rows": 9, "role": "eval"},
    ]
    sources[0]["share"] = 0.5
    lengths = Lengths.of(np.array([20] * 1000 + [70]))
    shown = figures(sources=sources, train=side(1001, lengths=lengths), duplicates=3)
    shown.problems = list(find_problems(shown))
    lines = render(shown).splitlines()
    assert lines[1].split() == ["a.jsonl", "text", "1,200", "1,000", "1.25", "50.0%"]
    assert lines[2].split() == ["a.jsonl", "[validation]", "text", "9", "9", "1.00", "held", "out"]
    bars = lines[lines.index(next(line for line in lines if line.startswith("tokens per row"))) :]
    assert bars[0].split() == ["tokens", "per", "row", "rows"]
    assert [line.split() for line in bars[1:4]] == [
        *(["16", "to", "31", "1,000", "█" * 66], ["32", "to", "63", "0"], ["64", "to", "127", "1", "▏"]),
    ]
    assert "min 20  p10 20  p50 20  p90 20  p99 20  max 70" in lines
    assert lines[-2:] == ["warning: 3 rows repeat an earlier row", "  → set `data.deduplicate: true`"]
    nothing = render(figures(train=side(0))).splitlines()
    assert any(line.startswith("tokens per row") for line in nothing) and not any("█" in line for line in nothing)
