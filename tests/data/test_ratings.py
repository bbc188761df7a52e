"""Several answers with scores become a pair of the best and the worst: UltraFeedback, Nectar, lists beside lists."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.rows import Chat, Completion, Preference
from toolkit.recipe.data import Source


def pair(row: dict[str, Any], **settings: Any) -> Preference:
    row_format = recognise([row], Source(path="d", **settings), Task("dpo", "auto", True))
    converted = row_format.convert(row, "d:1")
    assert isinstance(converted, Preference)
    return converted


def answers(row: dict[str, Any], **settings: Any) -> tuple[str, str]:
    """The last words of both sides."""
    found = pair(row, **settings)
    sides = (found.chosen, found.rejected)
    chosen, rejected = (
        side.completion if isinstance(side, Completion) else side.messages[-1]["content"] for side in sides
    )
    return chosen, rejected


def scored(*scores: Any, text: str = "response", score: str = "overall_score") -> list[dict[str, Any]]:
    return [{text: f"answer {n}", score: value, "model": "m"} for n, value in enumerate(scores)]


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "openbmb/UltraFeedback": ({"instruction": "q", "completions": scored(5.0, 7.5, 2.0)}, {}),
    "berkeley-nest/Nectar": ({"prompt": "q", "answers": scored(2, 1, 3, text="answer", score="rank")}, {}),
    "argilla, with ratings": (
        {"input": "q", "generations": ["answer 0", "answer 1", "answer 2"], "rating": [4, 5, 1]},
        {},
    ),
    "of a reward model": (
        {
            **{"prompt": "q", "all_generated_responses": ["answer 0", "answer 1", "answer 2"]},
            **{"all_rm_scores": [0.1, 0.2, -3.0]},
        },
        {},
    ),
    "named": (
        {"q": "q", "tries": ["answer 0", "answer 1", "answer 2"], "marks": ["2", "1e1", "-1"]},
        {"columns": {"instruction": "q", "answers": "tries", "scores": "marks"}},
    ),
    "as JSON": ({"prompt": "q", "answers": '[{"text": "answer 1", "score": 2}, {"text": "answer 2", "score": 1}]'}, {}),
    "one without a score": ({"instruction": "q", "completions": scored(None, 7.5, "N/A", 7.0)[:4]}, {}),
}


@pytest.mark.parametrize("name", list(FORMS)[:-1])
def test_the_best_answer_is_chosen_and_the_worst_rejected(name: str) -> None:
    row, settings = FORMS[name]
    assert answers(row, **settings) == ("answer 1", "answer 2")


def test_answers_without_a_score_are_left_out() -> None:
    row, settings = FORMS["one without a score"]
    assert answers(row, **settings) == ("answer 1", "answer 3")


def test_messages_may_be_scored() -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("bad", "good")]
    row = {"prompt": [{"role": "user", "content": "q"}], "responses": said, "scores": [1, 2]}
    found = pair(row)
    assert isinstance(found.chosen, Chat) and [each["content"] for each in found.chosen.messages] == ["q", "good"]
    assert found.chosen.messages[0]["train"] is False and answers(row) == ("good", "bad")


@pytest.mark.parametrize("scores", [(3, 3), (None, 1), (), (2,)])
def test_a_row_whose_scores_tell_nothing_apart_is_empty(scores: tuple[Any, ...]) -> None:
    known = {"instruction": "q", "completions": scored(1, 2)}
    row_format = recognise([known], Source(path="d"), Task("dpo", "auto", True))
    assert is_empty(row_format.convert({"instruction": "q", "completions": scored(*scores)}, "d:1"), row_format.task)


def test_answers_that_are_missing_are_passed_over_and_scores_that_are_no_numbers_refused() -> None:
    row = {"instruction": "Late?", "generations": ["Not yet.", None, "Yes."], "scores": [5, 9, 1]}
    assert answers(row) == ("Not yet.", "Yes.")
    with pytest.raises(UserError, match="`scores` is '4/5', which is no number"):
        answers(row | {"scores": ["4/5", "N/A", "2"]})


def test_answers_and_scores_must_be_as_many() -> None:
    with pytest.raises(UserError, match="`answers` has 2 answers, and `scores` 1 scores"):
        pair({"prompt": "q", "answers": ["a", "b"], "scores": [1]})


def test_answers_without_scores_are_refused_and_pairs_stay_pairs() -> None:
    with pytest.raises(UserError, match="several answers to each prompt"):
        pair({"prompt": "q", "answers": ["a", "b"]})
    assert answers({"prompt": "q", "chosen": " a", "rejected": " b", "responses": ["c", "d"], "scores": [1, 2]}) == (
        " a",
        " b",
    )
    with pytest.raises(UserError, match="several answers to each prompt") as caught:
        recognise([FORMS["berkeley-nest/Nectar"][0]], Source(path="d"), Task("sft", "auto", True))
    assert "objective=dpo" in caught.value.change


def test_what_is_read_is_no_unused_column() -> None:
    row, _ = FORMS["openbmb/UltraFeedback"]
    row_format = recognise([row], Source(path="d"), Task("dpo", "auto", True))
    assert {"instruction", "completions"} <= row_format.used_columns()


def test_an_answer_may_be_an_empty_list() -> None:
    row = {"prompt": "Extract.", "responses": ["[]", '[{"a": 1}]', "null"], "scores": [5, 2, 1]}
    assert answers(row) == ("[]", "null")
    assert answers(row | {"responses": [" ", "{}", "x"]}) == ("{}", "x")
