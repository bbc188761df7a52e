"""Scores of answers, by the libraries' own figures and by hand; intervals, by how often they hold the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import sacrebleu

from toolkit.data.rewards import is_json, number_in
from toolkit.train.evaluation.scoring import METRICS, paired_shares, rouge_l, scored, wilson

WORDS = ["the", "a", "cat", "dog", "sat", "lay", "on", "under", "mat", "bed", "red", "blue"]


def sentences(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, size=draw.integers(1, 12))) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17 + 25 = 42", "42"),
        ("It costs $1,234.50.", "1234.50"),
        ("16 - 3 = 13\n#### 13", "13"),
        ("#### 7 of the 9", "7"),
        ("from 12-5", "5"),
        ("it is -5", "-5"),
        ("one of 3,4", "4"),
        ("1,2345", "2345"),
        ("none", None),
        ("9 apples #### none", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    found = number_in(text)
    assert (None if found is None else str(found)) == number


def test_numbers_in_a_box_are_results() -> None:
    """Of MATH's rows, as the reward `numeric` reads them; what stands behind the box is none."""
    references = [r"so $x = \boxed{12}$, for 3 > 2.", r"\boxed{\dfrac{7}{1}} of 9"]
    assert METRICS["numeric"].suits(references) and not METRICS["numeric"].suits([r"7 of \boxed{them}"])
    score, rows = scored("numeric", None, [r"It is \boxed{12}, 5 more than 7.", r"\boxed{1}, not 9"], references)
    assert score.after.value == 1 and rows == [(None, 1.0)] * 2


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, null]}', True),
        (" [] ", True),
        ("7", False),
        ('{"a": NaN}', False),
        ("{'a': 1}", False),
        ('```json\n{"a": 1}\n```', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_what_is_json(text: str, valid: bool) -> None:
    assert is_json(text) is valid


def test_rouge_l_is_that_of_its_authors_package() -> None:
    # A requirement of lm-eval's, of which requirements.lock has nothing.
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    for one, other in zip(sentences(200, 1), sentences(200, 2), strict=True):
        assert rouge_l(one, other) == pytest.approx(scorer.score(other, one)["rougeL"].fmeasure, abs=1e-12)
    assert rouge_l("", "") == 1 and rouge_l("", "a") == 0 == rouge_l("a", "")
    assert rouge_l("Der Bär", "der BÄR!") == 1, "letters are not only those of English"


def test_words_keep_their_vowel_signs_and_accents() -> None:
    """Hindi's "his" and "her" differ in the sign alone, and German's umlauts may be written as two characters."""
    assert rouge_l("उसका", "उसकी") == 0 and rouge_l("उसकी किताब", "उसकी किताब।") == 1
    assert rouge_l("स्कूल", "स कूल") == 0
    assert rouge_l("fu\u0308r", "für") == 1 and rouge_l("fu\u0308r", "f r") == 0
    assert rouge_l("\u2764\ufe0f ja", "ja") == 1, "a picture is no word"


@pytest.mark.parametrize(("name", "corpus"), [("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)])
def test_scores_of_a_corpus_are_sacrebleus(name: str, corpus: Callable[..., sacrebleu.BLEU]) -> None:
    before, after, references = (sentences(40, seed) for seed in (1, 2, 3))
    score, rows = scored(name, before, after, references)
    assert score.before is not None and score.change is not None and rows is None
    assert score.before.value == pytest.approx(corpus(before, [references]).score, abs=1e-9)
    assert score.after.value == pytest.approx(corpus(after, [references]).score, abs=1e-9)
    assert score.change.value == pytest.approx(score.after.value - score.before.value, abs=1e-9)
    assert score.after.low < score.after.value < score.after.high  # type: ignore[operator]


def test_a_change_of_the_same_rows_is_known_better_than_two_figures_apart() -> None:
    """Answers that are each a little better: the two intervals overlap, that of the change holds no zero."""
    references = sentences(60, 1)
    before = [" ".join(text.split()[: 1 + at % 6]) for at, text in enumerate(references)]
    after = [" ".join(text.split()[: 2 + at % 6]) for at, text in enumerate(references)]
    score, rows = scored("rouge_l", before, after, references)
    assert score.before is not None and score.before.high > score.after.low  # type: ignore[operator]
    assert score.better is True
    assert rows and all(was is not None and was <= now for was, now in rows)
    assert score.after.value == pytest.approx(np.mean([now for _, now in rows]))
    worse, _ = scored("rouge_l", after, before, references)
    assert worse.better is False


@pytest.mark.parametrize("name", METRICS)
def test_answers_that_are_the_same_have_not_changed(name: str) -> None:
    answers, references = sentences(30, 1), sentences(30, 2)
    score, _ = scored(name, answers, answers, references)
    assert score.change is not None and score.change.value == 0 and score.better is None
    alone, _ = scored(name, None, answers, references)
    assert alone.before is None and alone.change is None and alone.after == score.after


@pytest.mark.parametrize("answer", ["", "\ud800 \x00", "}" * 5000])
@pytest.mark.parametrize("name", METRICS)
def test_no_answer_is_too_strange_to_be_scored(name: str, answer: str) -> None:
    score, _ = scored(name, [answer], [answer], ["the cat"])
    assert score.after.value == 0


def test_metrics_are_taken_where_the_rows_answers_suit_them() -> None:
    suited = {
        text: {name for name, metric in METRICS.items() if metric.suits([text])} for text in ("a cat", "12", '{"a": 1}')
    }
    always = {"exact_match", "rouge_l", "bleu", "chrf"}
    assert suited == {"a cat": always, "12": always | {"numeric"}, '{"a": 1}': always | {"numeric", "json"}}


@pytest.mark.parametrize(("right", "count"), [(0, 10), (1, 10), (81, 263), (10, 10)])
def test_the_ends_of_a_shares_interval_are_where_the_test_of_it_turns(right: int, count: int) -> None:
    """Wilson's are the shares of which 1.96 standard errors reach the one that was seen."""
    found = wilson(right, count)
    assert found.low is not None and found.high is not None
    for end in (found.low, found.high):
        reach = 1.959964 * (end * (1 - end) / count) ** 0.5
        assert abs(end - right / count) == pytest.approx(reach, abs=1e-6)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("cells", [(0.3, 0.2, 0.1, 0.4), (0.05, 0.1, 0.02, 0.83), (0.9, 0.04, 0.04, 0.02)])
def test_intervals_of_changed_shares_hold_the_truth_as_often_as_they_say(cells: tuple[float, ...]) -> None:
    """Of rows that are right both times, only after, only before, and never."""
    draw = np.random.default_rng(7)
    truth, held = cells[1] - cells[2], 0
    for _ in range(1000):
        both, won, lost, neither = draw.multinomial(60, cells)
        before = np.repeat([True, False, True, False], (both, won, lost, neither))
        after = np.repeat([True, True, False, False], (both, won, lost, neither))
        found = paired_shares(before, after)
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert 0.93 <= held / 1000 <= 0.99


def test_resampled_intervals_hold_the_truth_nearly_as_often_as_they_say() -> None:
    """Of a mean of 60 rows; percentiles are known to be a little narrow."""
    draw, held = np.random.default_rng(3), 0
    for _ in range(200):
        references = ["a b c d"] * 60
        answers = [" ".join("abcd"[: draw.integers(1, 5)]) for _ in references]
        found = scored("rouge_l", None, answers, references)[0].after
        truth = np.mean([rouge_l(" ".join("abcd"[:size]), "a b c d") for size in (1, 2, 3, 4)])
        held += found.low <= truth <= found.high  # type: ignore[operator]
    assert 0.9 <= held / 200 <= 0.99
