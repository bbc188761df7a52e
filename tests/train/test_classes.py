"""Figures of classes and entities, against counts by hand and what seqeval says."""

from __future__ import annotations

import pytest

from toolkit.train.trainers.classes import class_figures, entities, entity_counts, entity_figures, entity_types

COUNTS = [[6, 7, 8], [3, 5, 4], [0, 0, 0]]


def test_figures_of_classes_are_those_of_their_counts() -> None:
    figures = class_figures(COUNTS, ["yes", "no", "never"])
    assert figures["eval_accuracy"] == 9 / 12
    yes, no = figures["eval_classes"]["yes"], figures["eval_classes"]["no"]
    assert (yes["precision"], yes["recall"], yes["rows"]) == (6 / 7, 6 / 8, 8)
    assert yes["f1"] == pytest.approx(2 * (6 / 7) * (6 / 8) / (6 / 7 + 6 / 8))
    assert (no["precision"], no["recall"]) == (3 / 5, 3 / 4)
    assert figures["eval_classes"]["never"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 0}
    # A class that is neither there nor told takes no part in the mean.
    assert figures["eval_macro_f1"] == pytest.approx((yes["f1"] + no["f1"]) / 2)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        # Also what IOB2 does not write is an entity to CoNLL's script.
        ("O I-LOC I-LOC", {("LOC", 1, 2)}),
        ("B-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),
        ("B-PER E-PER E-PER S-LOC I-LOC", {("PER", 0, 1), ("PER", 2, 2), ("LOC", 3, 3), ("LOC", 4, 4)}),
        ("S-PER S-PER O B-LOC I-LOC E-LOC", {("PER", 0, 0), ("PER", 1, 1), ("LOC", 3, 5)}),
        ("U-PER B-LOC L-LOC I-LOC", {("PER", 0, 0), ("LOC", 1, 2), ("LOC", 3, 3)}),
        ("B-PER M-PER E-PER", {("PER", 0, 2)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities_are_the_runs_of_one_type(tags: str, found: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_an_entity_counts_if_type_and_both_ends_are_right() -> None:
    wanted = ["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC"]
    taken = ["B-PER", "O", "O", "B-LOC", "O", "B-PER"]
    counts = entity_counts(wanted, taken, ["LOC", "PER"])
    assert counts == [[1, 1, 2], [0, 2, 1]]
    figures = entity_figures(dict(zip(["LOC", "PER"], counts, strict=True)))
    assert figures["eval_entity_precision"] == 1 / 3 and figures["eval_entity_recall"] == 1 / 3
    assert figures["eval_entities"]["LOC"]["recall"] == 0.5
    assert figures["eval_entities"]["PER"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "entities": 1}


def test_only_tags_of_entities_have_types() -> None:
    assert entity_types(["O", "B-PER", "I-PER", "B-LOC"]) == ["LOC", "PER"]
    assert entity_types(["O", "S-PER", "B-LOC", "E-LOC", "I-LOC"]) == ["LOC", "PER"]
    assert entity_types(["O", "U-PER", "L-PER"]) == ["PER"] and entity_types(["B-PER", "X-LOC"]) == []
    assert entity_types(["NOUN", "VERB"]) == [] and entity_types(["O"]) == []
