"""What documents have in common is laid out once, and of every document all is there."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.data.batching.collate import Collator
from toolkit.data.batching.shared_prefixes import LEAST, Document, Row, documents_in, in_common
from toolkit.data.rows import IGNORE


def document(ids: list[int], trained_from: int | None) -> Document:
    labels = np.full(len(ids), IGNORE)
    if trained_from is not None:
        labels[trained_from:] = ids[trained_from:]
    return Document(np.array(ids), labels)


def drawn(rng: np.random.Generator, count: int) -> list[Document]:
    """Documents of which many begin alike, by beginnings of each other, trained from any place on or nowhere."""
    base = rng.integers(1, 90, 60).tolist()
    found: list[Document] = []
    for number in range(count):
        ids = base[: rng.choice([0, 3, 12, 12, 20, 40])] + rng.integers(1, 90, rng.integers(2, 30)).tolist()
        if number % 4 == 3:
            ids = found[-1].ids[: rng.integers(1, len(found[-1].ids) + 1)].tolist() + rng.integers(1, 90, 5).tolist()
        if number % 5 == 4:
            ids = found[-1].ids.tolist()
        found.append(document(ids, int(rng.integers(1, len(ids))) if number % 7 else None))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_document_stands_in_the_row_with_its_positions_and_its_own_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    documents = drawn(rng, int(rng.integers(1, 30)))
    row, own = Row.of(documents), 0
    assert len(row.ids) == len(row.labels) == len(row.positions) == row.lengths.sum()
    assert len(row.ids) <= sum(len(each.ids) for each in documents)
    for length, keys, places in zip(row.lengths, row.keys, np.split(row.places, row.keys.cumsum()[:-1]), strict=True):
        # It attends to its document from the first token on, the last of which are its own.
        assert len(places) == keys and (row.positions[places] == np.arange(keys)).all()
        start = keys - length
        assert (np.diff(places[start:]) == 1).all()
        if places[-1] + 1 not in row.ends:
            assert length >= LEAST and (row.labels[places[start:]] == IGNORE).all()
            continue
        its = documents[own]
        assert row.ends[own] == places[-1] + 1 and row.ids[places].tolist() == its.ids.tolist()
        # With the token before the first label, by which that is predicted.
        assert (row.labels[places[start:]] == its.labels[start:]).all()
        assert (its.labels[: start + 1] == IGNORE).all()
        own += 1
    assert own == len(documents)


def test_what_conversations_have_in_common_is_there_once() -> None:
    system = list(range(100, 130))
    two, other = ([*system, 5, *range(200, 212)], [*system, 6])
    documents = [document([*two, 1, 2], 44), document([*other, 3], 31), document([*two, 4], 43), document([9, 8], 1)]
    row = Row.of(documents)
    # The two that go on alike share one more segment, up to what predicts the first label of either.
    assert row.lengths.tolist() == [30, 12, 3, 2, 2, 2]
    assert row.keys.tolist() == [30, 42, 45, 32, 44, 2]
    assert row.ids[:45].tolist() == [*two, 1, 2]
    assert row.ids[45:].tolist() == [6, 3, two[-1], 4, 9, 8]
    assert row.counts.tolist() == [3] * 30 + [2] * 12 + [1] * 9


def test_what_is_short_or_trained_is_not_shared() -> None:
    begin = list(range(1, LEAST))
    assert Row.of([document([*begin, 50, 60], 8), document([*begin, 51, 61], 8)]).lengths.tolist() == [9, 9]
    whole = list(range(1, 40))
    assert Row.of([document(whole, 1), document(whole, 20)]).lengths.tolist() == [39, 39]
    assert Row.of([document(whole, 30), document(whole, 20)]).lengths.tolist() == [19, 20, 20]


def test_documents_of_packed_rows_are_apart() -> None:
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": [IGNORE, 2, IGNORE, 4, 5], "seq_lengths": [2, 3]}
    found = documents_in([row, {"input_ids": [7], "labels": [IGNORE]}])
    assert [each.ids.tolist() for each in found] == [[1, 2], [3, 4, 5], [7]]
    assert [each.free for each in found] == [0, 0, 0]


def test_in_common_is_counted_for_each_further_document() -> None:
    system = list(range(100, 120))
    documents = [document([*system, number, 1], 21) for number in range(16)]
    assert in_common(documents) == ((2, 20), (4, 20), (8, 20), (16, 20))
    assert in_common([document([number] * 20, 15) for number in range(8)]) == ()
    assert in_common(documents[:1]) == ()
    # Of two kinds that take turns, no two neighbours begin alike, but of four there are two pairs.
    mixed = [document([*(system if at % 2 else system[::-1]), at + 200, 1], 21) for at in range(8)]
    assert dict(in_common(mixed)) == pytest.approx({2: 0, 4: 2 * 20 / 3, 8: 6 * 20 / 7})
    # Answers to one prompt are never apart.
    asked = [document([*[number] * 20, 1], 20) for number in range(4) for _ in range(3)]
    assert dict(in_common(asked, least=3)) == pytest.approx({3: 19, 6: 19 * 4 / 5, 12: 19 * 8 / 11})


def test_more_documents_than_16_bits_count_share_a_beginning() -> None:
    """A million tokens of short rows behind one system prompt."""
    documents = 33_000
    rows = [{"input_ids": [*range(LEAST + 1), 99], "labels": [*[IGNORE] * (LEAST + 1), 99]}] * documents
    counts = Collator(0, "flat", 8, shares=True)(rows)["text_counts"][0]
    assert counts[:LEAST].tolist() == [documents] * LEAST and int(counts.sum()) == documents * (LEAST + 2)
