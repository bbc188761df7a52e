"""Prepared data: the right rows the right number of times, built once, and never silently changed."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import STOP, chat_row, chatml_tokenizer, plain_tokenizer, recipe
from datasets import Dataset
from harness import write_jsonl

from toolkit.common import UserError
from toolkit.data import prepare as prepare_module
from toolkit.data.auditing.audit import DataError
from toolkit.data.mixture import mix
from toolkit.data.prepare import Prepared, prepare, sequence_lengths
from toolkit.data.preview import show
from toolkit.data.reading import sources
from toolkit.data.reading.sources import open_sources
from toolkit.data.rows import Sample
from toolkit.data.statistics import statistics_of
from toolkit.recipe import Recipe


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def texts(prepared: Prepared, side: str = "train") -> list[str]:
    tokenizer = chatml_tokenizer()
    return [tokenizer.decode(row["input_ids"]) for row in getattr(prepared, side)]


def documents(path: Path, count: int, prefix: str = "document") -> Path:
    return write_jsonl(path, ({"text": f"{prefix} {n}"} for n in range(count)))


def test_unicode_chat_rows_round_trip(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("naïve 😀", "日本\r\nok"), chat_row("b", "c")])
    prepared = prepare(recipe(path, shuffle=False), chatml_tokenizer(), STOP, cache)
    assert prepared.train.column_names == ["input_ids", "labels"]
    assert texts(prepared)[0].startswith(
        "<|im_start|>user\nnaïve 😀<|im_end|>\n<|im_start|>assistant\n日本\r\nok<|im_end|>"
    )
    row = prepared.train[0]
    trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == token]
    assert chatml_tokenizer().decode(trained) == "日本\r\nok<|im_end|>"
    asked = "<|im_start|>user\nnaïve 😀<|im_end|>\n<|im_start|>assistant\n"
    input_ids = chatml_tokenizer()(asked)["input_ids"]
    assert prepared.samples[0] == Sample(prompt="naïve 😀", input_ids=input_ids, reference="日本\r\nok")


def test_tool_calls_are_not_given_foreign_keys(tmp_path: Path, cache: Path) -> None:
    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        }

    path = write_jsonl(tmp_path / "a.jsonl", [row({"city": "Rome"}), row({"n": 1})])
    rows = texts(prepare(recipe(path, shuffle=False), chatml_tokenizer(), STOP, cache))
    assert '"arguments": {"city": "Rome"}' in rows[0] and '"arguments": {"n": 1}' in rows[1]


def test_loads_again_without_reading_rows_and_notices_an_edit(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = documents(tmp_path / "a.jsonl", 5)
    first = prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    with monkeypatch.context() as patched:
        patched.setattr(sources.readers, "read", lambda path: pytest.fail("read again"))
        again = prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    assert again.fingerprint == first.fingerprint and again.train[:] == first.train[:]
    documents(path, 6)
    edited = prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    assert edited.fingerprint != first.fingerprint and len(edited.train) == 6


@pytest.mark.parametrize("is_there", [True, False])
def test_rows_of_a_file_that_is_written_meanwhile_are_not_kept_for_what_it_held(
    is_there: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = documents(tmp_path / "a.jsonl", 5), sources.readers.read

    def written(path: Path) -> Any:
        documents(path, 5, "edit no.")
        yield from read(path)
        if not is_there:
            path.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(sources.readers, "read", written)
        with pytest.raises(UserError, match="was written while it was read"):
            prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    documents(path, 5)
    assert all(text.startswith("document") for text in texts(prepare(recipe(path), chatml_tokenizer(), STOP, cache)))


def test_fingerprint_covers_settings_template_and_tokenizer(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{n}", f"a{n}") for n in range(10)])
    other_template, other_tokens = chatml_tokenizer(), chatml_tokenizer()
    other_template.chat_template = other_template.chat_template.replace("{% endfor", " {% endfor")
    other_tokens.add_tokens(["hello"])
    base = recipe(path)
    fingerprints = {
        prepare(base, chatml_tokenizer(), STOP, cache).fingerprint,
        prepare(base, other_template, STOP, cache).fingerprint,
        prepare(base, other_tokens, STOP, cache).fingerprint,
        prepare(recipe(path, train_on="all"), chatml_tokenizer(), STOP, cache).fingerprint,
        prepare(recipe(path, seq_len=128), chatml_tokenizer(), STOP, cache).fingerprint,
        prepare(recipe(path, eval_split=0.2), chatml_tokenizer(), STOP, cache).fingerprint,
    }
    assert len(fingerprints) == 6
    padded = chatml_tokenizer()
    padded(["a", "b c"], padding=True, truncation=True, max_length=4)  # leaves its traces in the backend
    assert prepare(base, padded, STOP, cache).fingerprint in fingerprints
    assert prepare(recipe(path, num_proc=2), chatml_tokenizer(), STOP, cache).fingerprint in fingerprints


FORK = multiprocessing.get_context("fork")


def test_two_processes_build_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = documents(tmp_path / "a.jsonl", 50)
    collect, told = prepare_module.collect, FORK.SimpleQueue()
    monkeypatch.setattr(prepare_module, "collect", lambda *args: (told.put("built"), collect(*args))[1])

    def one() -> None:
        told.put(len(prepare(recipe(path), chatml_tokenizer(), STOP, cache).train))

    started = [FORK.Process(target=one) for _ in range(2)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0]
    assert sorted((told.get() for _ in range(3)), key=str) == [50, 50, "built"] and told.empty()


def test_a_failed_build_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 5)
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match=r"a.jsonl:6 column 2"):
        prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_weights_repeat_small_sources(tmp_path: Path, cache: Path) -> None:
    big, small = documents(tmp_path / "big.jsonl", 60, "big"), documents(tmp_path / "small.jsonl", 8, "small")
    weighted = recipe({"path": str(big), "weight": 3.0}, {"path": str(small), "weight": 1.0})
    prepared = prepare(weighted, chatml_tokenizer(), STOP, cache)
    counts = Counter(texts(prepared))
    by_source = Counter("big" if "big" in text else "small" for text in counts.elements())
    assert by_source == {"big": 60, "small": 20}
    assert {counts[text] for text in counts if "small" in text} == {2, 3}
    assert [round(source.share, 2) for source in prepared.audit.sources] == [0.75, 0.25]
    assert len(prepare(recipe(big, small), chatml_tokenizer(), STOP, cache).train) == 68


def test_mixture_uses_every_row_and_nothing_more() -> None:
    source = np.array([0] * 7 + [1] * 100 + [2] * 3)
    mixture = mix(source, np.arange(110), [0.2, 0.7, 0.1], seed=0)
    assert set(mixture.train.tolist()) == set(range(110))
    assert np.bincount(source[mixture.train]).tolist() == [29, 100, 15]
    assert mix(source, np.arange(110), [0.2, 0.7, 0.1], seed=0).train.tolist() == mixture.train.tolist()
    assert mix(source, np.arange(110), [None] * 3, shuffle=False, seed=0).train.tolist() == list(range(110))


def test_eval_fraction_never_shares_content_with_train(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {n % 40}"} for n in range(80)])
    other = documents(tmp_path / "b.jsonl", 20, "row")
    weighted = recipe({"path": str(path), "weight": 1.0}, {"path": str(other), "weight": 1.0}, eval_split=0.25)
    prepared = prepare(weighted, chatml_tokenizer(), STOP, cache)
    assert not set(texts(prepared)) & set(texts(prepared, "eval"))
    assert len(set(texts(prepared, "eval"))) == 10
    assert prepared.audit.in_train_and_eval == 0 and prepared.audit.duplicates == 60
    assert len(prepared.samples) == 8
    assert all(
        f"{chatml_tokenizer().decode(sample.input_ids)}{sample.reference}<|im_end|>" in texts(prepared, "eval")
        for sample in prepared.samples
    )


def test_deduplicate_and_max_samples(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"row {n % 10}", "id": n} for n in range(30)])
    prepared = prepare(recipe(path, deduplicate=True), chatml_tokenizer(), STOP, cache)
    assert sorted(texts(prepared)) == [f"row {n}<|im_end|>" for n in range(10)]
    limited = prepare(recipe(path, deduplicate=True, max_samples=4), chatml_tokenizer(), STOP, cache)
    assert len(limited.train) == 4 and set(texts(limited)) < set(texts(prepared))


def test_eval_from_split_and_own_sources(tmp_path: Path, cache: Path) -> None:
    documents(tmp_path / "d" / "train.jsonl", 10)
    documents(tmp_path / "d" / "validation.jsonl", 4, "held out")
    extra = documents(tmp_path / "extra.jsonl", 3, "extra")
    settings = recipe(tmp_path / "d", eval_split="validation", eval_sources=[str(extra)])
    prepared = prepare(settings, chatml_tokenizer(), STOP, cache)
    assert len(prepared.train) == 10 and len(prepared.eval or []) == 7
    fewer = prepare(
        recipe(tmp_path / "d", eval_split="validation", eval_max_samples=2), chatml_tokenizer(), STOP, cache
    )
    assert len(fewer.eval or []) == 2
    leaking = prepare(recipe(extra, eval_sources=[str(extra)]), chatml_tokenizer(), STOP, cache)
    assert leaking.audit.in_train_and_eval == 3
    assert any("also trained on" in problem.what for problem in leaking.audit.problems)


def test_files_that_are_set_aside_for_a_word_in_their_name_are_warned_of(tmp_path: Path, cache: Path) -> None:
    for number, name in enumerate(("bugfix", "unit_test_gen", "eval_expressions", "test", "dev-00000-of-00001")):
        documents(tmp_path / "d" / f"{name}.jsonl", 3, f"document {number}")

    def warned(**data: Any) -> list[str]:
        problems = prepare(recipe(tmp_path / "d", **data), chatml_tokenizer(), STOP, cache).audit.problems
        return [problem.what for problem in problems if "not trained on" in problem.what]

    (what,) = warned()
    assert what.startswith("2 files of") and what.endswith("eval_expressions.jsonl, unit_test_gen.jsonl")
    (what,) = warned(eval_split="test")
    assert what.startswith("1 file of") and what.endswith("eval_expressions.jsonl")
    documents(tmp_path / "d" / "train.jsonl", 3, "more")
    assert warned() == [], "beside files that say they are for training, others are not"


@pytest.mark.parametrize(
    ("train", "held"),
    [
        ("train/chats", "test/chats_test"),
        ("chats", "test/chats_test"),
        ("chats", "chats_test"),
        ("chats", "dev-chats"),
        ("chats_train", "chats_test"),
    ],
)
def test_files_that_their_folder_or_a_name_beside_theirs_holds_out_are_not_warned_of(
    train: str, held: str, tmp_path: Path, cache: Path
) -> None:
    for name in (train, held):
        documents(tmp_path / "d" / f"{name}.jsonl", 3, name)
    assert prepare(recipe(tmp_path / "d"), chatml_tokenizer(), STOP, cache).audit.problems == []


def test_files_that_are_set_aside_are_those_there_are_and_that_nothing_reads(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path / "d" / "bugfix.jsonl", 3)
    added = tmp_path / "d" / "unit_test_gen.jsonl"
    monkeypatch.chdir(tmp_path)

    def warnings(*sources: Any, **data: Any) -> int:
        return len(prepare(recipe("d", *sources, **data), chatml_tokenizer(), STOP, cache).audit.problems)

    assert warnings() == 0
    documents(added, 3, "other")
    assert warnings() == 1, "also of data that was prepared before"
    assert warnings(eval_sources=[str(added)]) == warnings(added) == 0
    added.unlink()
    assert warnings() == 0


def test_one_row_cannot_be_split(tmp_path: Path, cache: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 1)
    assert len(prepare(recipe(path), chatml_tokenizer(), STOP, cache).train) == 1
    with pytest.raises(UserError, match=r"eval_split: 0.5"):
        prepare(recipe(path, eval_split=0.5), chatml_tokenizer(), STOP, cache)


def test_over_long_rows(tmp_path: Path, cache: Path) -> None:
    rows = [chat_row("q", "short"), chat_row("q", "x y z " * 200), chat_row("long question " * 100, "cut off")]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = chatml_tokenizer()
    with pytest.raises(UserError) as caught:
        prepare(recipe(path, seq_len=64), tokenizer, STOP, cache)
    assert "2 of 3 training rows are longer than `batch.seq_len: 64`" in str(caught.value)
    assert "a.jsonl:" in str(caught.value) and "set `data.over_long` to drop or truncate" in str(caught.value)
    assert isinstance(caught.value, DataError)
    assert caught.value.audit.train.lengths.percentiles["max"] > 64  # the figures to choose seq_len by

    dropped = prepare(recipe(path, seq_len=64, over_long="drop"), tokenizer, STOP, cache)
    assert len(dropped.train) == 1 and dropped.audit.train.over_long.rows == 2

    cut = prepare(recipe(path, seq_len=64, over_long="truncate", shuffle=False), tokenizer, STOP, cache)
    assert [len(row["input_ids"]) for row in cut.train] == [len(dropped.train[0]["input_ids"]), 64]
    assert texts(cut)[1].startswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nx y z")
    assert cut.audit.train.untrained_rows == 1 and "a.jsonl:" in cut.audit.train.first_untrained
    with pytest.raises(UserError, match="split` is for text"):
        prepare(recipe(path, seq_len=64, over_long="split"), tokenizer, STOP, cache)


def test_long_text_is_split_without_losing_a_token(tmp_path: Path, cache: Path) -> None:
    document = "The quick brown fox. " * 4000
    (tmp_path / "a.txt").write_text(document)
    with pytest.raises(UserError, match="with `objective: language_modelling`, split"):
        prepare(recipe(tmp_path / "a.txt", seq_len=128), chatml_tokenizer(), STOP, cache)
    settings = recipe(tmp_path / "a.txt", seq_len=128, over_long="split", objective="language_modelling", shuffle=False)
    prepared = prepare(settings, chatml_tokenizer(), STOP, cache)
    assert "".join(texts(prepared)) == document + "<|im_end|>"
    assert {len(row["input_ids"]) for row in prepared.train.select(range(len(prepared.train) - 1))} == {128}


def test_packing_keeps_every_row(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{n}", f"answer {n} " * (n % 9 + 1)) for n in range(60)])
    unpacked = prepare(recipe(path, eval_split=0.1), chatml_tokenizer(), STOP, cache)
    packed = prepare(recipe(path, eval_split=0.1, packing=True), chatml_tokenizer(), STOP, cache)
    parts = []
    for row in packed.train:
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 256
        edges = list(itertools.accumulate(row["seq_lengths"], initial=0))
        parts += [tuple(row["input_ids"][a:b]) for a, b in itertools.pairwise(edges)]
    assert sorted(parts) == sorted(tuple(row["input_ids"]) for row in unpacked.train)
    assert packed.eval is not None and packed.eval.column_names == ["input_ids", "labels"]
    assert 0.8 < packed.audit.packing.efficiency <= 1
    text = show(packed, chatml_tokenizer(), 1, color=False)
    assert "┄┄ document 2" in text and "«answer" in text and "<|im_start|>" in text


def test_seq2seq_labels_are_the_target(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"source": "one two three", "target": "zwei"}] * 2)
    prepared = prepare(recipe(path, objective="seq2seq"), plain_tokenizer(), frozenset({0}), cache)
    tokenizer = plain_tokenizer()
    assert tokenizer.decode(prepared.train[0]["input_ids"]) == "one two three"
    assert tokenizer.decode(prepared.train[0]["labels"]) == "zwei<|endoftext|>"
    assert prepared.audit.train.tokens == 2 * sum(len(prepared.train[0][name]) for name in ("input_ids", "labels"))
    assert "«zwei<|endoftext|>»" in show(prepared, tokenizer, 1, color=False)


def test_several_processes_tokenise_the_same(tmp_path: Path, cache: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 300)
    one = prepare(recipe(path), chatml_tokenizer(), STOP, cache / "one")
    two = prepare(recipe(path, num_proc=2), chatml_tokenizer(), STOP, cache / "two")
    assert one.train[:] == two.train[:]


def test_errors_in_rows_name_the_row(tmp_path: Path, cache: Path) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("a", "b")])
    with pytest.raises(UserError, match=r"a.jsonl:1.*roles must alternate"):
        prepare(recipe(path), tokenizer, STOP, cache)
    (tmp_path / "b.jsonl").write_text('{"text": "fine"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(UserError, match=r"b.jsonl:2 holds half of a surrogate pair \(\\ud83d\)"):
        prepare(recipe(tmp_path / "b.jsonl"), chatml_tokenizer(), STOP, cache)


def test_streaming_gives_the_same_tokens_and_begins_again(tmp_path: Path, cache: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 40)
    held_out = documents(tmp_path / "b.jsonl", 3, "held out")
    settings = {"shuffle": False, "eval_sources": [str(held_out)]}
    prepared = prepare(recipe(path, streaming=True, **settings), chatml_tokenizer(), STOP, cache)
    whole = list(prepare(recipe(path, **settings), chatml_tokenizer(), STOP, cache).train)
    assert list(itertools.islice(prepared.train, 40)) == whole
    assert "first 1,000 rows" in prepared.audit.scope and len(prepared.eval or []) == 3
    shuffled = prepare(recipe(path, streaming=True), chatml_tokenizer(), STOP, cache).train
    rows = [tuple(row["input_ids"]) for row in itertools.islice(shuffled, 16 * 40)]
    assert sorted(rows[:40]) == sorted(tuple(row["input_ids"]) for row in whole)
    assert rows[:40] != rows[40:80] and set(Counter(rows).values()) == {16}


def test_packed_stream_keeps_every_row_and_is_not_sorted_by_length(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"{n} " + "word " * (n % 50)} for n in range(1000)))
    settings = recipe(path, streaming=True, packing=True)
    packed = prepare(settings, chatml_tokenizer(), STOP, cache).train
    rows = list(itertools.islice(packed, 720))
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) <= 256 for row in rows)
    longest = [max(row["seq_lengths"]) for row in rows]
    assert abs(np.corrcoef(longest, range(len(longest)))[0, 1]) < 0.3
    seen = Counter(
        tuple(row["input_ids"][end - length : end])
        for row in rows
        for length, end in zip(row["seq_lengths"], itertools.accumulate(row["seq_lengths"]), strict=True)
    )
    assert seen.keys() == {
        tuple(row["input_ids"]) for row in prepare(recipe(path), chatml_tokenizer(), STOP, cache).train
    }


def test_streaming_mixes_by_weight(tmp_path: Path, cache: Path) -> None:
    big, small = documents(tmp_path / "big.jsonl", 300, "big"), documents(tmp_path / "small.jsonl", 10, "small")
    settings = recipe({"path": str(big), "weight": 0.5}, {"path": str(small), "weight": 0.5}, streaming=True)
    stream = prepare(settings, chatml_tokenizer(), STOP, cache).train
    first = [chatml_tokenizer().decode(row["input_ids"]) for row in itertools.islice(stream, 200)]
    assert 70 < sum("small" in text for text in first) < 130


def test_a_streamed_source_without_a_usable_row_is_an_error_and_no_endless_search(tmp_path: Path, cache: Path) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl", [{"text": " "}] * 3)
    good = documents(tmp_path / "good.jsonl", 20)
    settings = recipe({"path": str(good), "weight": 1.0}, {"path": str(empty), "weight": 1.0}, streaming=True)
    with pytest.raises(UserError, match=r"empty\.jsonl` has no row with a trained token"):
        list(itertools.islice(prepare(settings, chatml_tokenizer(), STOP, cache).train, 30))


def test_conversations_that_the_assistant_begins_are_trained(tmp_path: Path, cache: Path) -> None:
    greeting = {"messages": [{"role": "assistant", "content": "hello"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [greeting, chat_row("q", "a")])
    prepared = prepare(recipe(path, shuffle=False), chatml_tokenizer(), STOP, cache)
    assert len(prepared.train) == 2 and [sample.prompt for sample in prepared.samples] == ["q"]


def test_an_interrupted_build_is_neither_used_nor_left_behind(tmp_path: Path, cache: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 20)

    def killed() -> None:
        prepare_module.write_json = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        prepare(recipe(path), chatml_tokenizer(), STOP, cache)

    process = FORK.Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [entry for entry in cache.iterdir() if entry.is_dir()]
    prepared = prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    assert len(prepared.train) == 20
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == [prepared.path]


def test_conversational_completion_trains_the_completion(tmp_path: Path, cache: Path) -> None:
    row = {
        "prompt": [*chat_row("a", "before")["messages"], {"role": "user", "content": "b"}],
        "completion": [{"role": "assistant", "content": "after"}],
    }
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    for train_on in ("auto", "completion"):
        prepared = prepare(recipe(path, train_on=train_on), chatml_tokenizer(), STOP, cache)
        assert "before<|im_end|>" in (text := show(prepared, chatml_tokenizer(), 1, color=False))
        assert text.count("«") == 1 and "«after<|im_end|>»" in text
    everything = prepare(recipe(path, objective="language_modelling"), chatml_tokenizer(), STOP, cache)
    assert sum(label == -100 for label in everything.train[0]["labels"]) == 1


def test_unwritable_cache_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="TOOLKIT_CACHE"):
        prepare(recipe(documents(tmp_path / "a.jsonl", 3)), chatml_tokenizer(), STOP, tmp_path / "file" / "cache")


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "added"])
def test_prepared_data_that_is_damaged_is_made_again(
    tmp_path: Path, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever file it is, rows of tokens as well as figures."""
    rows, tokenizer = recipe(documents(tmp_path / "a.jsonl", 20), eval_split=0.2), chatml_tokenizer()
    whole = prepare(rows, tokenizer, STOP, cache)
    before = whole.train[:], whole.eval and whole.eval[:], whole.samples, whole.audit
    for file in [each for each in sorted(whole.path.rglob("*")) if each.is_file()]:
        content = bytearray(file.read_bytes())
        if damage == "flipped":
            content[len(content) // 2] ^= 1
        elif damage == "cut":
            del content[len(content) // 2 :]
        file.write_bytes(content)
        if damage == "missing":
            file.unlink()
        if damage == "added":
            file.with_name("stranger.arrow").write_bytes(content)
        caplog.clear()
        again = prepare(rows, tokenizer, STOP, cache)
        assert (again.train[:], again.eval and again.eval[:], again.samples, again.audit) == before, file
        assert f"{whole.path} " in caplog.text and caplog.text.count("and is made again") == 1, file


def test_figures_that_are_damaged_are_counted_again(tmp_path: Path, cache: Path) -> None:
    rows = recipe(documents(tmp_path / "a.jsonl", 20))
    figures = prepare(rows, chatml_tokenizer(), STOP, cache).statistics
    assert statistics_of(rows, cache) == figures
    (file,) = cache.glob("*.statistics.json")
    for content in (b"", b"{", b"[]", b"\xff", b'{"rows": "many"}'):
        file.write_bytes(content)
        assert statistics_of(rows, cache) is None
    assert prepare(rows, chatml_tokenizer(), STOP, cache).statistics == statistics_of(rows, cache) == figures


def test_show_does_not_let_data_steer_the_terminal(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("\x1b[2J\rhi", "yo\tyo\x07")])
    text = show(prepare(recipe(path), chatml_tokenizer(), STOP, cache), chatml_tokenizer(), 1, color=False)
    assert r"\x1b[2J\rhi" in text and "«yo\tyo\\x07<|im_end|>»" in text
    assert not set(text) & {"\x1b", "\r", "\x07"}


def test_show_marks_trained_text(tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("hi", "yo 😀")])
    prepared = prepare(recipe(path), chatml_tokenizer(), STOP, cache)
    text = show(prepared, chatml_tokenizer(), 3, color=False)
    assert "user\nhi<|im_end|>\n<|im_start|>assistant\n«yo 😀<|im_end|>»" in text
    trained = sum(label != -100 for label in prepared.train[0]["labels"])
    assert f"row 1: {len(prepared.train[0]['input_ids'])} tokens, {trained} trained" in text
    assert "\x1b[32myo 😀<|im_end|>\x1b[0m" in show(prepared, chatml_tokenizer(), 1, color=True)


def test_rows_that_say_themselves_what_is_trained(tmp_path: Path, cache: Path) -> None:
    tokenizer = chatml_tokenizer()
    segments = [{"text": "fox", "label": False}, {"text": " jumps<|im_end|>", "label": True}]
    parts = write_jsonl(tmp_path / "segments.jsonl", [{"segments": segments}] * 2)
    ids = tokenizer("the dog<|im_end|>")["input_ids"]
    tokens = write_jsonl(tmp_path / "tokens.jsonl", [{"input_ids": ids, "labels": [-100, *ids[1:]], "id": 1}])
    prepared = prepare(recipe(parts, tokens, shuffle=False, packing=True), tokenizer, STOP, cache)
    shown = show(prepared, tokenizer, 1, color=False)
    assert shown.count("fox« jumps<|im_end|>»") == 2 and "t«he dog<|im_end|>»" in shown
    assert prepared.audit.sources[1].unused_columns == ["id"]
    assert prepared.samples[0].reference == " jumps"
    assert prepared.samples[-1].input_ids == ids[:1]
    rows = recipe(parts, tokens, shuffle=False, streaming=True)
    streamed = list(itertools.islice(prepare(rows, tokenizer, STOP, cache).train, 3))
    assert [row["input_ids"] for row in streamed][2] == ids


def test_template_settings_and_what_is_ignored_are_part_of_what_is_prepared(tmp_path: Path, cache: Path) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{% if loud %}LOUD{% endif %}" + tokenizer.chat_template
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row("b", "c") | {"images": ["1.jpg"]}])
    with pytest.raises(UserError, match=r"a.jsonl:1: `images` is pictures[\s\S]*data.ignore=\[images\]"):
        prepare(recipe(path), tokenizer, STOP, cache)
    quiet = prepare(recipe(path, ignore=["images"]), tokenizer, STOP, cache)
    loud = prepare(recipe(path, ignore=["images"], chat_template_kwargs={"loud": True}), tokenizer, STOP, cache)
    assert quiet.audit.sources[0].unused_columns == ["images"]
    assert texts(loud)[0] == "LOUD" + texts(quiet)[0]
    assert tokenizer.decode(loud.samples[0].input_ids).startswith("LOUD")


def test_settings_that_the_template_does_not_read_are_refused(tmp_path: Path, cache: Path) -> None:
    tokenizer, path = chatml_tokenizer(), write_jsonl(tmp_path / "a.jsonl", [chat_row("b", "c")])
    with pytest.raises(UserError, match=r"reads no think\n.*remove data.chat_template_kwargs: it reads none"):
        prepare(recipe(path, chat_template_kwargs={"think": True}), tokenizer, STOP, cache)
    tokenizer.chat_template = "{% if enable_thinking is defined %}{{ bos_token }}{% endif %}" + tokenizer.chat_template
    with pytest.raises(
        UserError, match=r"reads no enable_thinkin\n.*did you mean enable_thinking\? it reads enable_th"
    ):
        prepare(recipe(path, chat_template_kwargs={"enable_thinkin": False}), tokenizer, STOP, cache)
    assert prepare(recipe(path, chat_template_kwargs={"enable_thinking": False}), tokenizer, STOP, cache).train
    tokenizer.chat_template = None
    text = write_jsonl(tmp_path / "b.jsonl", [{"text": "b c"}])
    with pytest.raises(UserError, match="has no chat template"):
        prepare(recipe(text, chat_template_kwargs={"a": 1}), tokenizer, STOP, cache)


def test_a_system_message_that_the_template_leaves_out_is_a_warning(tmp_path: Path, cache: Path) -> None:
    tokenizer = chatml_tokenizer()
    system = {"role": "system", "content": "Be brief."}
    rows = [{"messages": [system, *chat_row(str(n), "c")["messages"]]} for n in range(3)]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, chat_row("b", "c")])
    assert not any("system" in problem.what for problem in prepare(recipe(path), tokenizer, STOP, cache).audit.problems)
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages if message.role != 'system'")
    (problem,) = prepare(recipe(path), tokenizer, STOP, cache).audit.problems
    assert problem.level == "warning" and "in 3 rows the chat template leaves out the system message" in problem.what


def fingerprint(
    changes: dict[str, Any], path: Path, stop: frozenset[int] = STOP, vocab: int | None = None, **own: Any
) -> str:
    tokenizer = chatml_tokenizer()
    for name, value in own.items():
        setattr(tokenizer, name, value)
    dumped = recipe(path, eval_sources=[str(path)]).with_values(changes).model_dump(warnings=False)
    wanted = Recipe.model_validate(dumped)
    sides = (wanted.data.training_sources(), wanted.data.evaluation_sources())
    readers = (open_sources(each, False) for each in sides)
    return prepare_module._fingerprint(wanted, tokenizer, stop, vocab, *readers)


def test_whatever_changes_tokens_changes_the_fingerprint_and_nothing_else_does(tmp_path: Path) -> None:
    path, other = documents(tmp_path / "a.jsonl", 3), documents(tmp_path / "b.jsonl", 4)
    base = fingerprint({}, path)
    changes: list[dict[str, Any]] = [
        {"objective": "language_modelling"},
        {"seed": 5},
        {"batch.seq_len": 17},
        {"model.chat_template": "chatml"},
        {"data.train_on": "all"},
        {"data.shuffle": False},
        {"data.packing": True},
        {"data.over_long": "drop"},
        {"data.deduplicate": True},
        {"data.max_samples": 2},
        {"data.eval_max_samples": 2},
        {"data.chat_template_kwargs": {"a": 1}},
        {"data.format": "text"},
        {"data.ignore": ["x"]},
        {"data.columns": {"text": "text"}},
        {"data.sources": [{"path": str(path), "weight": 2.0}]},
        {"data.sources": [{"path": str(path), "max_samples": 2}]},
        {"data.sources": [str(other)]},
        {"data.sources": [str(path), str(other)]},
        {"data.sources": [str(path), str(path)], "data.eval_sources": []},
        {"data.eval_sources": [str(other)]},
        {"data.eval_split": 0.1},
    ]
    different = [fingerprint(change, path) for change in changes]
    different += [fingerprint({}, path, frozenset({2, 3})), fingerprint({}, path, vocab=400)]
    different += [fingerprint({}, path, eos_token="<pad>"), fingerprint({}, path, chat_template="{{ messages }}")]
    different += [fingerprint({}, path, split_special_tokens=True)]
    assert len({base, *different}) == len(different) + 1
    for same in ({"data.num_proc": 3}, {"batch.micro_batch_size": 2}, {"evaluation.num_prompts": 30}):
        assert fingerprint(same, path) == base
    by_order = [
        fingerprint({"data.columns": dict(pairs)}, path)
        for pairs in itertools.permutations({"a": "b", "c": "d"}.items())
    ]
    assert by_order[0] == by_order[1]


def test_rows_for_rewards_are_prepared_anew_for_another_schema(tmp_path: Path) -> None:
    """The audit says which references do not fit."""
    path, schema = documents(tmp_path / "a.jsonl", 3), tmp_path / "schema.json"
    wanted = {"objective": "grpo", "rewards": {"json_schema": {"schema_file": str(schema)}}}
    found = []
    for kind in ("array", "object", "array"):
        schema.write_text(json.dumps({"type": kind}), encoding="utf-8")
        found.append(fingerprint(wanted, path))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("asked", "count"), [(0, 8), (3, 8), (12, 12), (40, 30)])
def test_so_many_samples_are_kept_as_may_be_asked_for(asked: int, count: int, tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_row(f"q{n}", f"a{n}") for n in range(30)])
    wanted = recipe(path, shuffle=False).with_values({"evaluation.num_prompts": asked})
    samples = prepare(wanted, chatml_tokenizer(), STOP, cache).samples
    assert [(sample.prompt, sample.reference) for sample in samples] == [(f"q{n}", f"a{n}") for n in range(count)]


def test_samples_show_the_last_question_and_skip_what_cannot_be_asked(tmp_path: Path, cache: Path) -> None:
    talk = [*chat_row("first", "one")["messages"], *chat_row("second", "two")["messages"]]
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = (
        "{% if messages|length == 0 %}{{ raise_exception('nothing') }}{% endif %}" + tokenizer.chat_template
    )
    rows = [{"messages": [{"role": "assistant", "content": f"hello {n}"}]} for n in range(5)] + [{"messages": talk}]
    prepared = prepare(recipe(write_jsonl(tmp_path / "a.jsonl", rows), shuffle=False), tokenizer, STOP, cache)
    (sample,) = prepared.samples
    assert (sample.prompt, sample.reference) == ("second", "two")
    assert tokenizer.decode(sample.input_ids).count("<|im_start|>") == 4


def test_the_audit_says_which_template_and_whether_it_is_needed(tmp_path: Path, cache: Path) -> None:
    chats, plain = write_jsonl(tmp_path / "a.jsonl", [chat_row("q", "a")] * 2), documents(tmp_path / "b.jsonl", 2)
    own, named = chatml_tokenizer(), {"model.chat_template": "chatml"}
    for path, changes, tokenizer, source, needed in (
        (chats, {}, own, "the tokenizer's", True),
        (plain, {}, own, "the tokenizer's", False),
        (chats, named, own, "`model.chat_template: chatml`", True),
        (plain, {}, plain_tokenizer(), "none", False),
    ):
        stop = frozenset({tokenizer.eos_token_id})
        audit = prepare(recipe(path).with_values(changes), tokenizer, stop, cache).audit
        assert (audit.chat_template.source, audit.chat_template.needed) == (source, needed)
        assert audit.kinds == ["Chat" if path == chats else "Text"] and audit.scope == ""


def test_used_rows_repeats_and_shares_of_every_source(tmp_path: Path, cache: Path) -> None:
    paths = [documents(tmp_path / f"{name}.jsonl", count, name) for name, count in (("a", 30), ("b", 10), ("c", 4))]
    write_jsonl(paths[1], [{"text": f"b {n}" if n % 2 else " "} for n in range(20)])
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (3.0, 2.0), strict=False)]
    prepared = prepare(recipe(*sources, eval_sources=[str(paths[2])]), chatml_tokenizer(), STOP, cache)
    first, second, held_out = prepared.audit.sources
    assert [(each.role, each.rows, each.empty_rows) for each in prepared.audit.sources] == [
        *(("train", 30, 0), ("train", 20, 10), ("eval", 4, 0)),
    ]
    assert [each.used_rows for each in prepared.audit.sources] == [30, 20, 4]
    assert [each.repeats for each in prepared.audit.sources] == [1.0, 2.0, 1.0]
    assert [round(each.share, 3) for each in (first, second)] == [0.6, 0.4] and held_out.rows == 4
    assert prepared.audit.untrained_rows == 10 and len(prepared.eval or []) == 4


def one_of_three_fits(file: Path, count: int) -> Path:
    """Documents of which two of three are too long for 64 tokens."""
    return write_jsonl(file, [{"text": f"long {n}" + " word" * (200 if n % 3 else 0)} for n in range(count)])


def test_shares_are_those_of_the_rows_that_are_trained_on(tmp_path: Path, cache: Path) -> None:
    paths = [one_of_three_fits(tmp_path / "long.jsonl", 30), documents(tmp_path / "short.jsonl", 20, "short")]
    sources = [{"path": str(path), "weight": 1.0} for path in paths]
    settings = recipe(*sources, over_long="drop").with_values({"batch.seq_len": 64})
    prepared = prepare(settings, chatml_tokenizer(), STOP, cache)
    first, second = prepared.audit.sources
    assert (first.rows, first.used_rows + second.used_rows) == (30, 40)
    assert prepared.audit.train.over_long.rows == 20
    assert (first.used_rows, first.repeats, first.share) == (20, 2.0, 0.5)
    assert Counter(text.split()[0] for text in texts(prepared)) == {"long": 20, "short": 20}


def test_so_are_those_of_a_sample_without_tokens_of_all_rows(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [one_of_three_fits(tmp_path / "long.jsonl", 3000), documents(tmp_path / "short.jsonl", 3000, "short")]
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (2.0, 1.0), strict=True)]
    settings = recipe(*sources, over_long="drop", max_samples=600).with_values({"batch.seq_len": 64})
    counted: list[int] = []

    def noted(rows: Any, *rest: Any, original: Any = prepare_module.tokenise) -> Any:
        counted.append(len(rows))
        return original(rows, *rest)

    monkeypatch.setattr(prepare_module, "tokenise", noted)
    first, second = prepare(settings, chatml_tokenizer(), STOP, cache).audit.sources

    # Of 600 rows 6 in 7 are of the source of which a third is used.
    assert first.used_rows == pytest.approx(600 * 6 / 7 / 3, rel=0.1) and first.share == pytest.approx(2 / 3, abs=0.05)
    assert second.repeats == 1.0 and sum(counted) <= 1200


def test_a_limit_of_held_out_rows_takes_some_of_all_in_their_order(tmp_path: Path, cache: Path) -> None:
    train, held = documents(tmp_path / "a.jsonl", 9), documents(tmp_path / "b.jsonl", 40, "held")
    wanted = recipe(train, eval_sources=[str(held)], eval_max_samples=10)
    numbers = [
        int(text.split()[1].partition("<")[0])
        for text in texts(prepare(wanted, chatml_tokenizer(), STOP, cache), "eval")
    ]
    assert len(set(numbers)) == 10 and numbers == sorted(numbers) and numbers != list(range(10))
    for limit in (40, 41):
        assert (
            len(
                prepare(wanted.with_values({"data.eval_max_samples": limit}), chatml_tokenizer(), STOP, cache).eval
                or []
            )
            == 40
        )


def test_an_eval_seed_says_which_held_out_rows_a_limit_takes_whatever_the_seed(tmp_path: Path, cache: Path) -> None:
    train, held = documents(tmp_path / "a.jsonl", 9), documents(tmp_path / "b.jsonl", 40, "held")
    wanted = recipe(train, eval_sources=[str(held)], eval_max_samples=10)

    def taken(**values: int) -> list[str]:
        changed = wanted.with_values({key.replace("__", "."): value for key, value in values.items()})
        return texts(prepare(changed, chatml_tokenizer(), STOP, cache), "eval")

    assert taken(seed=1) != taken(seed=2)
    assert taken(seed=1, data__eval_seed=7) == taken(seed=2, data__eval_seed=7) == taken(seed=7)
    assert taken(seed=1, data__eval_seed=8) != taken(seed=1, data__eval_seed=7)


def test_of_a_stream_no_more_held_out_rows_are_read_than_are_used(tmp_path: Path) -> None:
    path = documents(tmp_path / "a.jsonl", 30)
    for own, limit, count in ((None, 10, 10), (5, 10, 5), (20, 10, 10), (None, None, 30), (7, None, 7)):
        source = {"path": str(path), "max_samples": own}
        sources = recipe(source).data.training_sources()
        (reader,) = open_sources(sources, True, limit)
        assert len(list(reader.rows())) == count
        (whole,) = open_sources(sources, False, limit)
        assert len(list(whole.rows())) == (own or 30)


def test_lengths_of_rows_come_from_their_columns() -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [], [4]], "labels": [[1], [2, 3], []]})
    assert sequence_lengths(rows).tolist() == [[3], [0], [1]]
    assert sequence_lengths(rows, pairs=True).tolist() == [[3, 1], [0, 2], [1, 0]]
    assert sequence_lengths(rows.select([2, 0])).tolist() == [[1], [3]]


@pytest.mark.parametrize("over_long", ["truncate", "split", "drop"])
def test_a_row_of_just_the_length_is_not_too_long(over_long: str, tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "fox " * 5 + "dog"}, {"text": "fox " * 20}, {"text": "fox"}])
    tokenizer = chatml_tokenizer()
    whole = [len(row["input_ids"]) for row in prepare(recipe(path, shuffle=False), tokenizer, STOP, cache).train]
    wanted = recipe(path, seq_len=whole[0], over_long=over_long, shuffle=False, objective="language_modelling")
    prepared = prepare(wanted, tokenizer, STOP, cache)
    lengths = [len(row["input_ids"]) for row in prepared.train]
    pieces, rest = divmod(whole[1], whole[0])
    middle = {"truncate": [whole[0]], "split": [whole[0]] * pieces + [rest] * (rest > 1), "drop": []}[over_long]
    assert lengths == [whole[0], *middle, whole[2]]
    assert prepared.audit.train.over_long.rows == 1 and prepared.audit.train.longest == f"{path}:2"
    assert prepared.audit.train.tokens == sum(lengths) and prepared.audit.train.rows == 3 - (over_long == "drop")
    assert prepared.audit.train.untrained_rows == 0
    assert prepared.audit.train.trained_tokens == sum(lengths) - len(lengths)
