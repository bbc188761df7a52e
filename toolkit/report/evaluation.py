"""`evaluation.json`: what `toolkit evaluate` found of a run, and how it is shown.

Every figure has an interval that holds the true one in 95 of 100 such evaluations; a change is that of the same rows,
base model against trained one, with an interval of its own, which says more than two that overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from rich.text import Text

from toolkit.common import count_text, table

FILE = "evaluation.json"
ROWS = "evaluation.jsonl"
"""The held-out rows with their answers."""
HEADS = ("", "base model", "trained", "change")


class Interval(BaseModel):
    """A figure, and the ends of its interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, sign: str = "") -> str:
        """`0.125 (0.061 to 0.239)`; with `sign="+"` each number has one."""

        def form(value: float) -> str:
            return f"{value:{sign if round(value, 4) else ''}.{1 if abs(value) >= 10 else 3}f}"

        if self.low is None or self.high is None:
            return form(self.value)
        return f"{form(self.value)} ({form(self.low)} to {form(self.high)})"

    def holds(self, value: float) -> bool:
        """Whether it may be that value, as far as is known."""
        low, high = (self.value if end is None else end for end in (self.low, self.high))
        return low <= value <= high


class Score(BaseModel):
    """One metric of the base model and of the trained one."""

    name: str
    after: Interval
    before: Interval | None = None
    change: Interval | None = None
    higher_is_better: bool = True

    @property
    def better(self) -> bool | None:
        """Whether training made it better; None where the interval of the change holds zero, or is not known."""
        change = self.change
        if change is None or change.low is None or change.high is None or change.low <= 0 <= change.high:
            return None
        return (change.value > 0) == self.higher_is_better

    def texts(self) -> tuple[str, str, str, str]:
        """A row below `HEADS`."""
        before, change = self.before, self.change
        return (self.name, before.text() if before else "", self.after.text(), change.text("+") if change else "")


class HeldOut(BaseModel):
    """Answers to the prompts of held-out rows, against the rows' own."""

    rows: int
    held_out: int
    """Rows that the run holds out, of which `rows` were asked."""
    data: str
    """The hash of the run's data."""
    batch_size: int
    max_new_tokens: int
    cut: tuple[int | None, int]
    """Answers of the base and of the trained model that were cut at `max_new_tokens`."""
    scores: list[Score]

    @property
    def question(self) -> str:
        """What has to be the same of two runs for their scores to be compared."""
        return f"{self.data} {self.rows} {self.max_new_tokens}"

    def sentence(self) -> str:
        """How it was measured."""
        whose = ("base model's", "trained model's")
        cut = [f"{count} of the {who}" for count, who in zip(self.cut, whose, strict=True) if count]
        return (
            f"Greedy answers to {self.rows:,} of {self.held_out:,} held-out rows, in batches of {self.batch_size}, of "
            f"at most {self.max_new_tokens:,} tokens" + (f", at which {' and '.join(cut)} were cut." if cut else ".")
        )


class Task(BaseModel):
    """A benchmark of lm-eval."""

    name: str
    samples: int
    of_samples: int
    num_fewshot: int
    chat_template: bool
    """Whether its prompts were conversations."""
    scores: list[Score]

    @property
    def question(self) -> str:
        """What has to be the same of two runs for their scores to be compared."""
        return f"{self.samples} {self.num_fewshot} {self.chat_template}"

    def sentence(self) -> str:
        """How it was measured."""
        form = "as conversations" if self.chat_template else "as plain text"
        shown = count_text(self.num_fewshot, "example")
        return f"{self.name}: {self.samples:,} of {self.of_samples:,} samples, {shown} in each prompt, {form}."


class Evaluation(BaseModel):
    """What is in the file."""

    held_out: HeldOut | None = None
    tasks: list[Task] = []

    def sections(self) -> Iterator[tuple[str, list[Score]]]:
        """How each part was measured, and what came out."""
        if self.held_out:
            yield self.held_out.sentence(), self.held_out.scores
        for task in self.tasks:
            yield task.sentence(), task.scores


def evaluation_text(found: Evaluation, columns: int) -> Text:
    """For a terminal of so many columns."""
    return Text("\n\n").join(_section(sentence, scores, columns) for sentence, scores in found.sections())


def _section(sentence: str, scores: Sequence[Score], columns: int) -> Text:
    shown = [at for at in range(4) if at in (0, 2) or any(score.texts()[at] for score in scores)]
    rows: list[list[str | Text]] = [[HEADS[at] for at in shown]]
    for score in scores:
        colour = {True: "green", False: "red", None: ""}[score.better]
        texts = score.texts()
        rows.append([Text(texts[at], colour if at == 3 else "") for at in shown])
    head, *lines = table(rows, "l" * len(shown)).split("\n")
    head.stylize("dim")
    return Text("\n").join([table([(sentence,)], "l", columns=columns), head, *lines])
