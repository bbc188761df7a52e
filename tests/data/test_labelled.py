"""Rows with labels: which columns they have, what classes are called, the audit, and where labels of words stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from datasets import ClassLabel, Dataset, Features, List, Value
from harness import write_jsonl

from toolkit.common import UserError
from toolkit.data.auditing.audit import DataError
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.preview import render, show
from toolkit.recipe import Recipe

TEXTS = [{"text": f"row {n} is {'good' if n % 2 else 'bad'}", "label": "good" if n % 2 else "bad"} for n in range(20)]


def prepared(
    folder: Path, rows: Any, objective: str = "classification", tokenizer: Any = None, **data: Any
) -> Prepared:
    """These rows of a file as a recipe prepares them, or those of the files that are named."""
    if isinstance(rows, list):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        rows = folder / "rows.jsonl"
        rows.write_text(lines, encoding="utf-8")
    batch = {"seq_len": data.pop("seq_len", 64), "global_batch_size": 2}
    content = {"model": {"path": "a/b"}, "data": {"sources": [str(rows)], "shuffle": False, **data}, "batch": batch}
    recipe = Recipe.model_validate(content | {"objective": objective})
    return prepare(recipe, tokenizer or tiny.tiny_tokenizer(False), frozenset({2}), cache=folder / "cache")


@pytest.mark.parametrize(
    ("text", "label", "columns"),
    [
        ({"text": "A"}, "label", {}),
        ({"sentence": "A"}, "label", {}),
        ({"Text": "A"}, "Labels", {}),
        ({"review": "A", "text": "B"}, "stars", {"text": "review", "label": "stars"}),
        ({"messages": [{"role": "user", "content": "A"}]}, "label", {}),
    ],
)
@pytest.mark.parametrize("names", [("no", "yes"), (0, 1), (False, True)])
def test_texts_and_labels_are_found_by_their_columns(
    text: dict[str, Any], label: str, columns: Any, names: tuple[Any, Any], tmp_path: Path
) -> None:
    found = prepared(tmp_path, [text | {label: names[n % 2]} for n in range(8)], columns=columns)
    assert found.classes == [str(each) for each in names] and found.audit.sources[0].format == "labelled"
    assert found.train["labels"][:3] == [[0], [1], [0]]


def test_a_text_alone_is_tokenised_as_it_stands(tmp_path: Path) -> None:
    tokenizer = tiny.tiny_tokenizer(False)
    rows = prepared(tmp_path, TEXTS, tokenizer=tokenizer).train
    assert rows["input_ids"][:] == [tokenizer(row["text"])["input_ids"] for row in TEXTS]


@pytest.mark.parametrize("pair", [("sentence1", "sentence2"), ("premise", "hypothesis"), ("question", "sentence")])
def test_two_texts_are_read_with_what_stands_between_them(pair: tuple[str, str], tmp_path: Path) -> None:
    rows = [{pair[0]: f"one {n}", pair[1]: "two", "label": n % 2} for n in range(8)]
    tokenizer = tiny.tiny_tokenizer(False)
    (ids,) = prepared(tmp_path, rows, tokenizer=tokenizer).train["input_ids"][:1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "one 0\ntwo"


def test_two_texts_of_an_encoder_say_which_is_which(tmp_path: Path) -> None:
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizerFast(vocab=dict(zip(words, range(len(words)), strict=True)))
    rows = [{"premise": "one two", "hypothesis": "three " * (1 + n), "label": n % 2} for n in range(8)]
    found = prepared(tmp_path, rows, tokenizer=tokenizer, seq_len=8, over_long="truncate")
    assert found.train[0] == {
        "input_ids": [2, 5, 6, 3, 7, 3], "labels": [0], "token_type_ids": [0, 0, 0, 0, 1, 1],
    }  # fmt: skip
    # What is too long loses words, and keeps the token that ends a text.
    assert found.train[7]["input_ids"] == [2, 5, 6, 3, 7, 7, 7, 3] and len(found.train[7]["token_type_ids"]) == 8


def test_classes_are_in_the_order_of_the_data_or_sorted(tmp_path: Path) -> None:
    numbers = [{"text": f"row {n}", "label": [10, 9, -1][n % 3]} for n in range(9)]
    assert prepared(tmp_path, numbers).classes == ["-1", "9", "10"]
    # Postcodes and the like: equal as numbers, and of one order in every process.
    padded = ["0" * zeros + "7" for zeros in range(8, -1, -1)]
    spelt = [{"text": f"row {n}", "label": padded[n % 9]} for n in range(27)]
    assert prepared(tmp_path, spelt).classes == padded
    features = Features({"text": Value("string"), "label": ClassLabel(names=["worst", "best", "absent"])})
    rows = {"text": [f"row {n}" for n in range(8)], "label": [n % 2 for n in range(8)]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "named.parquet")
    named = prepared(tmp_path, tmp_path / "named.parquet")
    assert named.classes == ["worst", "best", "absent"]
    assert any("no training row has the label 'absent'" in problem.what for problem in named.audit.problems)
    tags = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-LOC", "I-LOC"]))})
    words = {"tokens": [["in", f"Oslo{n}"] for n in range(8)], "ner_tags": [[0, 1]] * 8}
    Dataset.from_dict(words, features=tags).to_parquet(tmp_path / "tags.parquet")
    tagged = prepared(tmp_path, tmp_path / "tags.parquet", "token_classification")
    assert tagged.classes == ["O", "B-LOC", "I-LOC"] and {label for row in tagged.train["labels"] for label in row} == {
        -100,
        0,
        1,
    }


def test_the_audit_says_how_labels_are_spread(tmp_path: Path) -> None:
    held = [{"text": "seen nowhere", "label": "ugly"}, {"text": "another", "label": "good"}]
    write_jsonl(tmp_path / "held.jsonl", held)
    both = [{"text": "both", "label": label} for label in ("good", "good", "bad")]
    twice = [*both[1:], {"text": " ", "label": "good"}]
    found = prepared(
        tmp_path, [*TEXTS, *twice, {"text": "no label", "label": None}], eval_sources=[str(tmp_path / "held.jsonl")]
    )
    text = render(found.audit)
    assert "Rows are of 2 classes: bad 50.0% (11), good 50.0% (11)." in text and "each has one label" in text
    assert "2 rows have a text that stands elsewhere with another label" in " ".join(text.split())
    assert "1 held-out label is of classes that no training row has: 'ugly'; it is left out" in " ".join(text.split())
    assert "2 of 24 rows have no text or no label and are left out" in " ".join(text.split())
    assert found.eval is not None and len(found.eval) == 1
    assert "stop token" not in text
    again = prepared(tmp_path, [*TEXTS, *both])
    assert again.audit.train.classes and again.audit.train.classes.contradicting == 3


def test_held_out_rows_of_other_classes_alone_are_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "seen nowhere", "label": 1}))
    with pytest.raises(DataError, match="no usable held-out row: 1 held-out label is of classes that no training"):
        prepared(tmp_path, TEXTS, eval_sources=[str(tmp_path / "held.jsonl")])


def test_lopsided_classes_and_missing_held_out_rows_are_warned_of(tmp_path: Path) -> None:
    rows = [{"text": f"row {n}", "label": "rare" if n == 0 else "usual"} for n in range(40)]
    said = [problem.what for problem in prepared(tmp_path, rows).audit.problems]
    assert "the class 'usual' has 39 rows and 'rare' only 1; who always says 'usual' is right in 98% of them" in said
    assert "no rows are held out, so nothing will say how well classes are told apart" in said


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([{"text": f"row {n}", "label": "one"} for n in range(8)], "all rows are of the class 'one'"),
        ([{"text": f"row {n}", "label": f"name {n}"} for n in range(30)], "30 different labels"),
    ],
)
def test_labels_that_teach_nothing_stop_the_run(rows: list[dict[str, Any]], what: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=what):
        prepared(tmp_path, rows)


@pytest.mark.parametrize(
    ("row", "objective", "what"),
    [
        ({"text": "A", "label": 0.5}, "classification", "a number with decimals"),
        ({"text": "A", "label": ["x"]}, "classification", "no name of a class"),
        ({"text": 5, "label": "x"}, "classification", "`text` is no text"),
        ({"text": "A"}, "classification", "has no column `label`"),
        ({"label": "x", "content": "A"}, "classification", "has no column `text`"),
        ({"text": "A", "sentence1": "B", "sentence2": "C", "label": 1}, "classification", "has several texts"),
        ({"tokens": ["a", "b"], "tags": ["O"]}, "token_classification", "2 words and 1 tags"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "token_classification", "no lists of words"),
        ({"tokens": ["a", 5], "tags": ["O", "O"]}, "token_classification", r"`tokens\[1\]` is 5, not a word"),
    ],
)
def test_what_is_no_labelled_row_is_refused(row: dict[str, Any], objective: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        prepared(tmp_path, [row] * 4, objective)


@pytest.mark.parametrize("label", [None, "", float("nan"), "NaN", -100])
def test_a_row_without_a_label_is_of_no_class_of_its_own(label: Any, tmp_path: Path) -> None:
    found = prepared(
        tmp_path, [*({"text": f"row {n}", "label": n % 2} for n in range(8)), {"text": "A", "label": label}]
    )
    assert found.classes == ["0", "1"] and found.audit.train.untrained_rows + found.audit.sources[0].empty_rows == 1


def test_one_class_in_several_spellings_is_one_or_is_warned_of(tmp_path: Path) -> None:
    # pandas writes whole numbers so where some cells are empty.
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"row {n},{[0, 1, '0.0', '1.0'][n % 4]}\n" for n in range(8))
    )
    assert prepared(tmp_path, tmp_path / "rows.csv").classes == ["0", "1"]
    spelt = [{"text": f"row {n}", "label": ["True", "true", "False", "FALSE"][n % 4]} for n in range(8)]
    secret = [{"text": f"row {n}", "label": [0, 1, -1][n % 3]} for n in range(9)]
    mixed = [{"text": f"row {n}", "label": ["good", "bad", 0, 1][n % 4]} for n in range(8)]
    for rows, said in (
        (mixed, "the classes '0', '1' are numbers where"),
        (spelt, "the classes 'True', 'true' differ in letters' case"),
        (secret, "write -1 where"),
    ):
        assert any(said in problem.what for problem in prepared(tmp_path, rows).audit.problems)


def test_numbers_on_a_scale_in_a_csv_are_warned_of(tmp_path: Path) -> None:
    """In JSON they are refused, as no text could be meant."""
    for values, said in (
        (["0", "0.5", "1.0", "-1.5"], "the classes '-1.5', '0.5' are numbers with decimals"),
        (["3", "3.5", "none"], "the classes '3' are numbers where others are names"),
    ):
        rows = "".join(f"row {n},{values[n % len(values)]}\n" for n in range(12))
        (tmp_path / "scores.csv").write_text(f"text,label\n{rows}")
        problems = [problem.what for problem in prepared(tmp_path, tmp_path / "scores.csv").audit.problems]
        assert [what.startswith(said) for what in problems if "are numbers" in what] == [True]


@pytest.mark.parametrize("label", ["[0, 3]", "['a', 'b']", [0]])
def test_several_labels_of_a_row_are_no_class(label: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="several labels of a row"):
        prepared(tmp_path, [{"text": "A", "label": label}] * 4)


def test_a_pair_that_lacks_a_text_is_left_out(tmp_path: Path) -> None:
    rows = [{"premise": f"row {n}", "hypothesis": None if n == 3 else "two", "label": n % 2} for n in range(8)]
    assert len(prepared(tmp_path, rows).train) == 7


def test_columns_of_texts_may_be_ignored(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "A"}]
    rows = [{"text": "x", "messages": asked if n else [], "label": "ab"[n % 2]} for n in range(8)]
    assert prepared(tmp_path, rows, ignore=["text"]).audit.sources[0].empty_rows == 1
    pairs = [{"text": "x", "label": "ab"[n % 2]} | ({"text_pair": "y"} if n else {}) for n in range(8)]
    first, *others = prepared(tmp_path, pairs, ignore=["text_pair"]).train["input_ids"]
    assert first and all(ids == first for ids in others)


def test_a_column_in_lower_case_is_taken_before_its_like(tmp_path: Path) -> None:
    rows = [{"text": "mine", "Text": "another", "label": n % 2} for n in range(4)]
    found = prepared(tmp_path, rows)
    assert found.audit.sources[0].unused_columns == ["Text"]


def test_labelled_rows_belong_to_their_objectives(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set `objective: classification` to learn labels"):
        prepared(tmp_path, TEXTS, "sft", format="labelled")
    with pytest.raises(UserError, match="takes labelled"):
        prepared(tmp_path, TEXTS, format="text")


def test_a_word_has_its_label_at_its_first_token(tmp_path: Path) -> None:
    tokenizer = tiny.tiny_tokenizer(False)
    rows = [{"tokens": ["Xylographer", "in", "", "Zwolle", "."], "ner_tags": ["B-JOB", "O", "O", "B-LOC", "O"]}] * 2
    found = prepared(
        tmp_path, [*rows, *({"tokens": [f"w{n}"], "ner_tags": ["O"]} for n in range(6))], "token_classification"
    )
    row = found.train[0]
    assert found.classes == ["B-JOB", "B-LOC", "O"]
    text = "Xylographer in  Zwolle ."
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == len(row["input_ids"]) > 8
    seen: dict[str, int] = {}
    for (start, end), label in zip(offsets, row["labels"], strict=True):
        if label != -100:
            rest = text[start:].lstrip()
            seen[rest.split(" ")[0]] = label
            assert end > start
    # An empty word has no token.
    assert seen == {"Xylographer": 0, "in": 2, "Zwolle": 1, ".": 2}
    assert "Rows" not in render(found.audit).partition("Words are of")[2][:5]
    shown = show(found, tokenizer, 1, color=False)
    assert "/B-JOB" in shown and "4 words" in shown


def test_a_labelled_row_is_shown_with_its_label(tmp_path: Path) -> None:
    assert "label bad\nrow 0 is bad" in show(prepared(tmp_path, TEXTS), tiny.tiny_tokenizer(False), 1, color=False)
