"""Texts that belong together: columns by the names of sentence-transformers, what is refused, what the audit says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from data_fixtures import plain_tokenizer

from toolkit.common import UserError
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.related import Texts, key_of
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.rows import Related, from_json, sides, to_json
from toolkit.data.tokenization import Chunker
from toolkit.recipe.data import Source
from toolkit.recipe.embedding import Embedding

PROMPTS = {"query_prompt": "q: ", "document_prompt": "d: "}


def read(row: dict[str, Any], source: dict[str, Any] | None = None, **settings: Any) -> Related:
    task = Task("embedding", "auto", False, embedding=Embedding.model_validate(settings))
    row_format = recognise([row], Source.model_validate({"path": "x"} | (source or {})), task)
    found = row_format.convert(row, "x row 1")
    assert isinstance(found, Related) and from_json(to_json(found)) == found
    return found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("anchor", "positive"), ("query", "positive"), ("question", "answer"), ("query", "passage"),
        ("sentence1", "sentence2"), ("premise", "hypothesis"), ("Question1", "Question2"),
    ],
)  # fmt: skip
def test_pairs_are_known_by_many_names(first: str, second: str) -> None:
    assert read({first: "a", second: "b"}).texts == ["a", "b"]


def test_pairs_of_other_names_are_named() -> None:
    columns = {"columns": {"anchor": "title", "positive": "body"}}
    assert read({"title": "a", "body": "b"}, columns).texts == ["a", "b"]
    with pytest.raises(UserError, match="has no column `anchor`, which its rows need; its columns are `title`, `body`"):
        read({"title": "a", "body": "b"})


@pytest.mark.parametrize(
    "negatives",
    [{"negative": "c", "negative_1": "d"}, {"negatives": ["c", "d", "e"]}, {"negative": ["c", "d"]}],
)
def test_negatives_stand_in_one_column_or_several(negatives: dict[str, Any]) -> None:
    assert read({"anchor": "a", "positive": "b", **negatives}, negatives=2).texts == ["a", "b", "c", "d"]
    with pytest.raises(UserError, match=r"has negatives in .* and embedding.negatives is 0") as refused:
        read({"anchor": "a", "positive": "b", **negatives})
    assert f"set embedding.negatives={3 if 'negatives' in negatives else 2}" in str(refused.value)


def spread(row: dict[str, Any], **settings: Any) -> list[list[str]]:
    task = Task("embedding", "auto", False, embedding=Embedding.model_validate(settings))
    row_format = recognise([row], Source.model_validate({"path": "x"}), task)
    return [row_format.convert(each, where).texts for where, each in row_format.rows([("x row 1", row)])]  # type: ignore[union-attr]


MESSAGE = {"role": "user", "content": "b"}


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"query": "a", "pos": ["b", "c"], "neg": ["d", "e"]}, [["a", "b", "d"], ["a", "c", "d"]]),
        ({"query": "a", "pos": '["b", "c"]', "neg": '["d"]'}, [["a", "b", "d"], ["a", "c", "d"]]),
        ({"query": "a", "pos": ["[1, 2]"], "neg": ["[3]"]}, [["a", "[1, 2]", "[3]"]]),
        (
            {
                "query_id": "1",
                "query": "a",
                "positive_passages": [{"docid": "7", "title": "T", "text": "b"}],
                "negative_passages": [{"docid": "8", "title": "", "text": "d"}, {"docid": "9", "text": "e"}],
            },
            [["a", "T b", "d"]],
        ),
        (
            {
                "messages": [MESSAGE | {"content": "a"}],
                "positive_messages": [[MESSAGE], [MESSAGE | {"content": "c"}]],
                "negative_messages": [[MESSAGE | {"content": "d"}]],
            },
            [["a", "b", "d"], ["a", "c", "d"]],
        ),
        ({"anchor": "a", "positive": ["b", "c"], "negative": "d"}, [["a", "b", "d"], ["a", "c", "d"]]),
    ],
)
def test_every_positive_of_a_list_makes_a_row(row: dict[str, Any], texts: list[list[str]]) -> None:
    assert spread(row, negatives=1) == texts


def test_lists_of_negatives_are_counted_and_no_more_than_usual_are_proposed() -> None:
    with pytest.raises(UserError, match="has negatives in `neg`") as refused:
        spread({"query": "a", "pos": ["b"], "neg": [f"n{n}" for n in range(200)]})
    assert "embedding.negatives=7" in str(refused.value) and "'data.ignore=[neg]'" in str(refused.value)


def test_a_conversation_is_no_text() -> None:
    turns = [MESSAGE, {"role": "assistant", "content": "c"}]
    with pytest.raises(UserError, match="x row 1: `positive` is no text"):
        spread({"query": "a", "pos": turns})
    with pytest.raises(UserError, match="x row 1: `positive` is no text"):
        spread({"messages": [MESSAGE], "positive_messages": [turns]})


def test_prompts_of_rows_may_be_messages() -> None:
    row = {"query": "a", "positive": "b", "prompt": [{"role": "user", "content": "c"}]}
    with pytest.raises(UserError, match="says in `prompt` what stands before its anchors"):
        read(row)
    assert read(row, {"ignore": ["prompt"]}).texts == ["a", "b"]


def test_instructions_of_rows_are_refused() -> None:
    with pytest.raises(UserError, match="says in `prompt` what stands before its anchors, such as 'Find: '") as refused:
        spread({"query": "a", "pos": ["b"], "neg": [], "prompt": "Find: "})
    assert "embedding.query_prompt" in str(refused.value)
    assert spread({"query": "a", "pos": ["b"], "neg": [], "prompt": ""}) == [["a", "b"]]


def test_rows_with_too_few_negatives_are_refused() -> None:
    with pytest.raises(UserError, match=r"x row 1 has 1 negatives, and embedding.negatives asks for 2"):
        read({"anchor": "a", "positive": "b", "negative": "c"}, negatives=2)


def test_pairs_have_scores_or_none() -> None:
    row = {"sentence1": "a", "sentence2": "b", "score": 0.5}
    assert read(row, loss="cosent") == Related(["a", "b"], 0.5)
    assert read({"question1": "a", "question2": "b", "label": 2}, loss="cosent").score == 2.0
    with pytest.raises(UserError, match="says in `score` which texts belong together") as refused:
        read(row)
    assert "set embedding.loss=cosent" in str(refused.value)
    assert read(row, {"ignore": ["score"]}).score is None
    with pytest.raises(UserError, match="has no column `score`"):
        read({"sentence1": "a", "sentence2": "b"}, loss="cosent")
    with pytest.raises(UserError, match="`score` is 'high', no number"):
        read(row | {"score": "high"}, loss="cosent")


def test_prompts_stand_before_their_texts() -> None:
    row = read({"anchor": "a", "positive": "b", "negative": "c"}, negatives=1, **PROMPTS)
    assert [side.text.text for side in sides(row)] == ["q: a", "d: b", "d: c"]  # type: ignore[union-attr]


def test_what_is_empty_or_equal_is_so_whatever_prompt_stands_before_it() -> None:
    task = Task("embedding", "auto", False)
    assert is_empty(read({"anchor": "", "positive": "b"}, **PROMPTS), task)
    assert is_empty(read({"sentence1": "a", "sentence2": None, "score": 1}, loss="cosent", **PROMPTS), task)
    encode = Chunker(Encoder(plain_tokenizer(), "auto", frozenset()), 32, "truncate")
    rows = [("what is it", "who said so"), ("who said so", "what is it"), ("one and the same", "one and the same")]
    (one,), (other,), (equal,) = encode([(read({"anchor": a, "positive": b}, **PROMPTS), "x") for a, b in rows])
    assert one["keys"] == other["keys"][::-1] and not one["equal"] and one["trained"] == 2
    assert equal["equal"] and not equal["trained"]


def test_negatives_that_are_empty_are_none() -> None:
    assert read({"anchor": "a", "positive": "b", "negatives": ["", "c", None]}, negatives=1).texts == ["a", "b", "c"]


def test_classes_of_inference_are_no_scores() -> None:
    row = {"premise": "a", "hypothesis": "b", "label": 0}
    with pytest.raises(UserError, match="is a class and no score"):
        read(row, loss="cosent")
    assert read(row, {"columns": {"score": "label"}}, loss="cosent").score == 0.0


def test_a_row_without_one_of_its_texts_is_empty() -> None:
    task = Task("embedding", "auto", False)
    assert is_empty(Related(["a", " "]), task) and not is_empty(Related(["a", "b"]), task)
    assert [side.text.text for side in sides(Related(["a", "b"]))] == ["a", "b"]  # type: ignore[union-attr]


def test_a_text_may_be_a_word_of_json() -> None:
    row = {"query": "What does it return?", "positive": "null", "negatives": ["[]", "{}", ""]}
    assert read(row, negatives=2).texts == ["What does it return?", "null", "[]", "{}"]


def test_other_objectives_do_not_take_them() -> None:
    source = Source.model_validate({"path": "x", "format": "related"})
    with pytest.raises(UserError, match="set `objective: embedding`"):
        recognise([{"anchor": "a", "positive": "b"}], source, Task("sft", "auto", False))


def test_the_audit_counts_what_repeats() -> None:
    keys = np.array([[1, 10, 90], [2, 10, 91], [1, 11, 11], [4, 12, 93]])
    figures = Texts.of(keys, np.arange(4), equal=3, cut=2, scores=None)
    assert (figures.shared_positives, figures.shared_anchors, figures.own_negatives) == (2, 2, 1)
    said = [what for _, what, _ in figures.problems(4, held_out=False)]
    assert any("3 rows have the same text as anchor and positive" in what for what in said)
    assert any("1 row names its own positive" in what for what in said) and any("held out" in what for what in said)
    assert "2 rows share their positive and 2 their anchor" in " ".join(figures.in_sentences(4))
    alike = Texts.of(keys[:, :2], np.arange(4), equal=0, cut=0, scores=np.ones(4))
    assert [fatal for fatal, *_ in alike.problems(4, held_out=True)] == [True]


def test_rows_that_weights_repeat_are_no_copies_in_the_data() -> None:
    keys, numbers = np.array([[1, 10], [2, 10], [3, 30], [3, 30], [3, 30], [1, 10]]), np.array([0, 1, 2, 2, 2, 0])
    figures = Texts.of(keys, numbers, equal=0, cut=0, scores=None)
    assert (figures.shared_positives, figures.shared_anchors) == (3, 0)


def test_equal_texts_have_one_key() -> None:
    assert key_of([1, 2, 3]) == key_of([1, 2, 3]) != key_of([1, 2, 4]) and 0 <= key_of([7]) < 2**63
