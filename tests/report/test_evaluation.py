"""What `toolkit evaluate` found, as it is shown."""

from __future__ import annotations

import pytest

from toolkit.report.evaluation import Evaluation, HeldOut, Interval, Score, Task, evaluation_text


def score(low: float, high: float, higher_is_better: bool = True) -> Score:
    return Score(
        name="word_perplexity",
        before=Interval(value=20.5, low=19, high=22),
        after=Interval(value=20.5 + (low + high) / 2),
        change=Interval(value=(low + high) / 2, low=low, high=high),
        higher_is_better=higher_is_better,
    )


@pytest.mark.parametrize(
    ("low", "high", "higher_is_better", "better"),
    [(0.1, 0.3, True, True), (-0.3, -0.1, True, False), (-0.3, -0.1, False, True), (-0.1, 0.3, True, None)],
)
def test_a_change_counts_where_its_interval_holds_no_zero(
    low: float, high: float, higher_is_better: bool, better: bool | None
) -> None:
    assert score(low, high, higher_is_better).better is better
    text = evaluation_text(Evaluation(held_out=held_out(score(low, high, higher_is_better))), 100)
    colours = {str(span.style) for span in text.spans}
    assert ("green" in colours, "red" in colours) == (better is True, better is False)


def held_out(*scores: Score) -> HeldOut:
    return HeldOut(
        rows=8, held_out=9, data="d", batch_size=4, max_new_tokens=64, cut=(2, 0), scores=list(scores)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("interval", "sign", "text"),
    [
        (Interval(value=0.125, low=0.0612, high=0.24), "", "0.125 (0.061 to 0.240)"),
        (Interval(value=45.678), "", "45.7"),
        (Interval(value=1.5, low=-0.25, high=12), "+", "+1.500 (-0.250 to +12.0)"),
        (Interval(value=0.0), "+", "0.000"),
    ],
)
def test_figures_are_read_with_their_intervals(interval: Interval, sign: str, text: str) -> None:
    assert interval.text(sign) == text


def test_a_terminal_is_told_how_it_was_measured() -> None:
    alone = Score(name="acc", after=Interval(value=0.5, low=0.2, high=0.8))
    task = Task(name="gsm8k", samples=20, of_samples=1319, num_fewshot=5, chat_template=True, scores=[alone])
    lines = evaluation_text(Evaluation(held_out=held_out(score(1, 2)), tasks=[task]), 80).plain.split("\n")
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert (
        "8 of 9 held-out rows, in batches of 4, of at most 64 tokens, at which 2 of the base model's were cut." in text
    )
    assert "gsm8k: 20 of 1,319 samples, 5 examples in each prompt, as conversations." in text
    assert "trained acc 0.500 (0.200 to 0.800)" in text, "a column without figures is left out"
