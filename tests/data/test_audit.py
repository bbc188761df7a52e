"""The audit counts what it says, and stops training where the data cannot teach anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, plain_tokenizer, recipe, write_jsonl

from toolkit.common import UserError
from toolkit.data.audit import DataError, check_batch
from toolkit.data.messages import read_messages, without_use
from toolkit.data.prepare import prepare
from toolkit.data.preview import render


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
    rows = [chat_row(f"{n} " * n, "yo") | {f"a_rather_long_column_name_{n}": 1} for n in range(1, 60)]
    text = render(audit(tmp_path, rows, eval_split=0.2, seq_len=96, over_long="drop"))
    assert max(len(line) for line in text.splitlines()) in range(width - 15, width + 1)
    for words in ("and 39 more", "of the training rows", "of the held-out rows", "held-out rows are longer"):
        assert words in " ".join(text.split())


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


def test_more_than_half_without_answer_is_fatal(tmp_path: Path) -> None:
    rows = [chat_row("hi", "yo")] + [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(3)]
    message = refused(tmp_path, rows)
    assert "3 of 4 rows have no trained token" in message and "data.train_on" in message


def test_no_usable_row_is_fatal(tmp_path: Path) -> None:
    assert "no usable row" in refused(tmp_path, [{"text": " "}, {"text": ""}])
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
    (problem,) = check_batch(audited, 16).problems
    assert problem.level == "warning" and "5 training rows do not fill one global batch of 16" in problem.what
    assert check_batch(audited, 5).problems == []


def test_merged_boundaries_are_counted(tmp_path: Path) -> None:
    merged = [{"prompt": "The quick bro", "completion": f"wn fox {n}"} for n in range(20)]
    assert audit(tmp_path, merged).train.boundary_merged_rows == 20
    apart = [{"prompt": "The quick brown\n", "completion": f"fox {n}"} for n in range(20)]
    assert audit(tmp_path, apart).train.boundary_merged_rows == 0
