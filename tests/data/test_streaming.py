"""A stream feeds several processes what it feeds one."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from data_fixtures import STOP, chatml_tokenizer, recipe
from harness import losses, write_jsonl, write_recipe
from ranks import Ranks
from tiny import tiny_model
from torch.utils.data import DataLoader

from toolkit.common import UserError
from toolkit.data import streaming
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.task import Task
from toolkit.data.prepare import prepare
from toolkit.data.reading.readers import read
from toolkit.data.reading.sources import open_source
from toolkit.data.rows import Chat, Text
from toolkit.data.streaming import Stream
from toolkit.data.tokenization import Chunker
from toolkit.train.main import main

RECIPE = """
model: {path: MODEL}
data: {sources: [{path: a.jsonl, weight: 3.0}, {path: b.jsonl, weight: 1.0}], streaming: true}
objective: language_modelling
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {max_steps: 12, warmup_steps: 0}
batch: {seq_len: 64, global_batch_size: 8, micro_batch_size: 2}
evaluation: {num_prompts: 0}
"""


@pytest.mark.usefixtures("formulas")
@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_one_past_the_end_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    for name, rows in (("a", 50), ("b", 7)):
        lines = (json.dumps({"text": f"{name} {n} " + "word " * (n % 9)}) + "\n" for n in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    model = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    write_recipe(tmp_path, "stream", RECIPE.replace("MODEL", str(model)))
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=stream", "output.name=one"]) == 0
    done = ranks.run(tmp_path, "recipe=stream", "output.name=two", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one = losses(tmp_path / "runs" / "one")
    assert len(one) == 12
    assert losses(tmp_path / "runs" / "two") == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_first_sequences_take_few_rows_which_another_thread_tokenises(
    packing: bool, tmp_path: Path, tokenised: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"row {n}"} for n in range(30_000)))
    wanted = recipe(path, streaming=True, packing=packing, seq_len=32)
    stream = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").train
    tokenised.clear()
    lines, threads, call = [], set(), Chunker.__call__

    def noted(self: Chunker, *row: Any) -> Any:
        threads.add(threading.current_thread())
        return call(self, *row)

    def counted(file: Path) -> Any:
        for row in read(file):
            lines.append(row)
            yield row

    monkeypatch.setattr(Chunker, "__call__", noted)
    monkeypatch.setattr("toolkit.data.reading.readers.read", counted)
    rows = iter(stream)
    next(rows)
    rows.close()
    assert 16 <= len(tokenised) <= (600 if packing else 100) and len(lines) < 20 * len(tokenised)
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(("words", "most"), [(3, 64), (200, 10)])
def test_of_long_rows_fewer_steps_are_made_ahead(
    words: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand sequences of a long context the host's memory would be full."""
    monkeypatch.setattr(streaming, "_AHEAD", 64)
    monkeypatch.setattr(streaming, "_AHEAD_TOKENS", 2000)
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"{n} " + "fox " * words} for n in range(64)))
    wanted = recipe(path, streaming=True, seq_len=512, over_long="truncate")
    stream = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").train
    assert isinstance(stream, Stream)
    windows = [*itertools.islice(stream.steps(range(2), threading.Event()), 8)]
    assert [len(each) for each in windows[:2]] == [2, 4] and max(map(len, windows)) == most
    length = max(len(row["input_ids"]) for row in windows[0])
    assert all(sum(len(row["input_ids"]) for row in each) < 2000 + 2 * length for each in windows)


@pytest.mark.parametrize("packing", [False, True])
def test_each_process_tokenises_the_rows_it_trains_and_steps_are_those_of_one(
    packing: bool, tmp_path: Path, tokenised: list[str]
) -> None:
    """Though some rows are empty and others become several sequences."""
    sizes = {n: 0 if n % 5 == 0 else 70 if n % 7 == 0 else n % 9 for n in range(300)}
    lines = ({"text": f"{n} " + "fox " * size if size else ""} for n, size in sizes.items())
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    wanted = recipe(path, streaming=True, packing=packing, over_long="split", seq_len=32)
    stream = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").train
    assert isinstance(stream, Stream)

    def steps(processes: int, rank: int) -> list[list[dict[str, Any]]]:
        share = 16 // processes
        tokenised.clear()
        made = itertools.chain.from_iterable(stream.steps(range(rank * share, (rank + 1) * share), threading.Event()))
        return [list(itertools.islice(made, share)) for _ in range(16)]

    whole, alone = steps(1, 0), len(tokenised)
    parts, counts = [], []
    for rank in range(4):
        parts.append(steps(4, rank))
        counts.append(len(tokenised))
    assert [list(itertools.chain(*step)) for step in zip(*parts, strict=True)] == whole
    assert max(counts) < 1.3 * alone / 4

    # As training reads them, from the start and continued after 5 steps of two micro-batches.
    for rank in range(2):
        loader = DataLoader(stream.divided(2).with_format("numpy"), batch_size=4, collate_fn=list)  # type: ignore[arg-type]
        loader = prepare_data_loader(loader, num_processes=2, process_index=rank)
        own = list(itertools.chain.from_iterable(step[8 * rank :][:8] for step in whole))
        for skipped in (0, 10):
            read = itertools.chain.from_iterable(itertools.islice(skip_first_batches(loader, skipped), 6))
            expected = own[4 * skipped :][:24]
            assert [row["input_ids"].tolist() for row in read] == [row["input_ids"] for row in expected]


def test_a_lane_whose_rows_are_all_empty_is_dealt_others_in_the_next_epoch(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": "" if n == 3 else f"row {n}"} for n in range(16)))
    wanted = recipe(path, streaming=True, shuffle=False)
    assert len(list(itertools.islice(prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").train, 160))) == 160


@pytest.mark.parametrize("rows", [1, 3, 7, 15, 16, 17])
def test_however_few_rows_there_are_every_lane_is_dealt_all_of_them(rows: int, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"row {n}"} for n in range(rows)))
    wanted = recipe(path, streaming=True, shuffle=False)
    stream = prepare(wanted, chatml_tokenizer(), STOP, tmp_path / "cache").train
    assert isinstance(stream, Stream)
    stop = threading.Event()
    too_long = threading.Timer(20, stop.set)
    too_long.start()
    sequences = itertools.chain.from_iterable(stream.steps(range(16), stop))
    steps = [[tuple(each["input_ids"]) for each in itertools.islice(sequences, 16)] for _ in range(2 * rows)]
    too_long.cancel()
    assert {len(step) for step in steps} == {16}
    assert {len(set(lane)) for lane in zip(*steps, strict=True)} == {rows}


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the rows stood that were tokenised."""
    places: list[str] = []
    call = Chunker.__call__

    def noted(self: Chunker, rows: Any) -> Any:
        places.extend(where for _, where in rows)
        return call(self, rows)

    monkeypatch.setattr(Chunker, "__call__", noted)
    return places


def drawn(
    tmp_path: Path, sizes: dict[str, int], weights: list[float | None], shuffle: bool = False, epoch: int = 0
) -> list[str]:
    """The texts of one epoch, in their order."""
    sources = [
        {
            "path": str(write_jsonl(tmp_path / f"{name}.jsonl", ({"text": f"{name}{n}"} for n in range(size)))),
            "weight": weight,
        }
        for (name, size), weight in zip(sizes.items(), weights, strict=True)
    ]
    wanted = recipe(*sources, streaming=True, shuffle=shuffle)
    readers = [open_source(source, True) for source in wanted.data.training_sources()]
    stream = Stream(readers, wanted, None, Task("language_modelling", "auto", False))  # type: ignore[arg-type]
    return [row.content["text"] for row in stream._rows(np.random.default_rng(epoch))]


def test_without_weights_sources_follow_each_other(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 2}
    assert drawn(tmp_path, sizes, [None, None]) == ["a0", "a1", "a2", "b0", "b1"]
    assert drawn(tmp_path, {"a": 3}, [5.0]) == ["a0", "a1", "a2"]
    shuffled = drawn(tmp_path, {"a": 200, "b": 2}, [None, None], shuffle=True)
    assert (
        sorted(shuffled) == sorted(drawn(tmp_path, {"a": 200, "b": 2}, [None, None]))
        and shuffled[:50] != sorted(shuffled)[:50]
    )
    assert shuffled != drawn(tmp_path, {"a": 200, "b": 2}, [None, None], shuffle=True, epoch=1)


@pytest.mark.parametrize("weights", [(1.0, 3.0), (None, 3.0), (0.5, None)])
def test_with_weights_every_source_is_read_in_order_and_again_until_all_were_read(
    weights: tuple[float | None, float | None], tmp_path: Path
) -> None:
    rows = drawn(tmp_path, {"a": 40, "b": 400}, list(weights))
    shares = [1.0 if weight is None else weight for weight in weights]
    parts = {name: [int(row[1:]) for row in rows if row[0] == name] for name in "ab"}
    assert len(parts["b"]) / len(rows) == pytest.approx(shares[1] / sum(shares), abs=0.1)
    for name, size in (("a", 40), ("b", 400)):
        assert parts[name] == [n % size for n in range(len(parts[name]))]
        assert len(parts[name]) >= size
    # The last source to be read through ends it.
    assert any(len(parts[name]) in (size, size + 1) for name, size in (("a", 40), ("b", 400)))


def test_rows_are_drawn_from_a_window_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SHUFFLE_BUFFER", 100)
    read: list[int] = []
    rows = (read.append(n) or n for n in range(1000))
    held, taken = [], []
    for row in streaming._shuffled(rows, np.random.default_rng(0)):  # type: ignore[arg-type,type-var]
        taken.append(row)
        held.append(len(read) - len(taken) + 1)
    assert sorted(taken) == list(range(1000)) and taken != sorted(taken)
    assert held[0] == 32 and max(held) == 100 and held[9:900] == [100] * 891
    assert all(late - early == 8 for early, late in itertools.pairwise(held[:9]))
    # Any row of the window may be next: late ones wait no longer than others.
    assert np.corrcoef(taken, range(1000))[0, 1] > 0.9


def test_a_stream_refuses_what_it_must_not_cut(tmp_path: Path) -> None:
    """Rows beyond those that are audited are seen first in training."""
    short, long = {"text": "fox"}, {"text": "fox " * 50}
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 50}]}
    asked = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for rows, over_long, outcome in (
        ([short, long, short], "error", "refused"),
        ([short, long, short], "drop", 2),
        ([short, long, short], "truncate", 3),
        ([short, long, short], "split", 6),
        ([asked, talk], "split", "refused"),
        ([asked, talk], "truncate", 2),
    ):
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        wanted = recipe(path, streaming=True, shuffle=False, over_long=over_long, seq_len=20)
        task = Task("sft", "auto", True)
        chunker = Chunker(Encoder(chatml_tokenizer(), "auto", STOP), 20, over_long)
        stream = Stream([open_source(wanted.data.training_sources()[0], True)], wanted, chunker, task)
        made = itertools.chain.from_iterable(stream._tokens(row) for row in stream._rows(np.random.default_rng(0)))
        if outcome == "refused":
            with pytest.raises(UserError, match=r"a\.jsonl:2 has \d+ tokens, more than `batch.seq_len: 20`") as caught:
                list(made)
            assert "set `data.over_long` to drop or truncate" in caught.value.change
            continue
        sequences = list(made)
        assert all(set(each) == {"input_ids", "labels"} and len(each["input_ids"]) <= 20 for each in sequences)
        assert len(sequences) == (
            outcome if over_long != "split" else 2 + -(-(len(chatml_tokenizer()("fox " * 50)["input_ids"]) + 1) // 20)
        )


def test_a_row_with_half_a_surrogate_pair_is_named_by_a_stream_too() -> None:
    encode = Chunker(Encoder(chatml_tokenizer(), "auto", frozenset([2])), 64, "truncate")
    assert encode([(Text("whole"), "a:1")])
    for row in (Text("\ud800"), Chat([{"role": "user", "content": "\ud800"}])):
        with pytest.raises(UserError, match=r"a:2 holds half of a surrogate pair \(\\ud800\)"):
            encode([(row, "a:2")])
