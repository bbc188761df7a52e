"""What an audit reports on pairs of answers, judged answers, and prompts whose answers are scored: whether they
teach a preference, or length alone predicts it; whether the recipe's own rewards would recognise a correct answer."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from toolkit.common import count_text

LOPSIDED = 1.5
"""Chosen answers that many times as long as rejected ones are warned of, and as many times more answers of one kind: a
judgement, not a measurement."""


class Pairs(BaseModel):
    """Figures of the pairs that are trained, if nothing else is said."""

    chosen_tokens: int
    """Trained tokens of all chosen answers."""
    rejected_tokens: int
    longer_chosen: int
    """Pairs whose chosen answer is the longer one."""
    equal: int
    """Pairs that are left out, because both answers are the same tokens."""
    apart: int
    """Pairs whose answers follow different prompts."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """What is wrong with them, and what to change."""
        if self.equal:
            yield (
                f"in {count_text(self.equal, 'pair')} both answers are the same tokens, and they are left out",
                "remove them, or raise `batch.seq_len` if answers are cut before they differ",
            )
        if self.apart:
            yield (
                f"in {count_text(self.apart, 'pair')} the two answers follow different prompts",
                "give both the same one: which answer is likelier does not tell then which is better",
            )
        if self.chosen_tokens > LOPSIDED * self.rejected_tokens > 0:
            times = self.chosen_tokens / self.rejected_tokens
            yield (
                f"chosen answers are {times:.1f} times as long as rejected ones, so the model may learn to write more",
                "set `preference.length_normalized: true` or `objective: simpo`, or choose pairs of like length",
            )

    def in_a_sentence(self, pairs: int) -> str:
        """How long the answers are, of so many pairs."""
        chosen, rejected = self.chosen_tokens / pairs, self.rejected_tokens / pairs
        return (
            f"Chosen answers have {chosen:,.0f} tokens on average, rejected ones {rejected:,.0f}; the chosen one is "
            f"longer in {self.longer_chosen / pairs:.0%} of the pairs."
        )


class Prompts(BaseModel):
    """Figures of prompts that the model is to answer."""

    repeated: int
    """Prompts that are asked of it in another row, too, whatever the reference there."""
    without_reference: int
    needs_reference: bool
    """Whether a reward compares with it."""
    several_numbers: int = 0
    """References with more numbers than one, where a reward compares one."""
    unrewarded: dict[str, int] = {}
    """Of each reward that should know them, references that it does not give a full score, though they are the answer
    in the frame that the recipe asks for."""
    example: dict[str, str] = {}
    """Of these the first one: where it stands, and what it is."""

    def problems(self, rows: int) -> Iterator[tuple[str, str, str]]:
        """Of so many rows: how bad it is, what is wrong with them, and what to change."""
        if self.repeated:
            yield (
                "warning",
                f"{count_text(self.repeated, 'prompt is that', 'prompts are those')} of other rows, too",
                "remove them: they count more often than others",
            )
        if self.needs_reference and self.without_reference:
            level = "fatal" if self.without_reference > rows / 2 else "warning"
            have = "has" if self.without_reference == 1 else "have"
            yield (
                level,
                f"{self.without_reference:,} of {rows:,} rows {have} no reference, and no answer to them can be right",
                "remove them, or name the column of the reference: 'data.columns={answer: NAME}'",
            )
        if self.several_numbers:
            yield (
                "warning",
                f"{self.several_numbers:,} of {rows:,} references hold several numbers, such as fractions, of which "
                "the reward `numeric` compares the last alone: 3/4 and 1/4 are the same to it",
                "put the result behind ####, write fractions as decimals, or set rewards.exact_match=true instead",
            )
        for name, count in self.unrewarded.items():
            if count <= self.without_reference:
                continue  # Of those it has been said.
            level = "fatal" if count > rows / 2 else "warning"
            yield (
                level,
                f"the reward `{name}` gives no full score to the reference itself in {count:,} of {rows:,} rows, such "
                f"as {self.example[name]}",
                f"correct rewards.{name}, or the references: what no answer can reach is not learnt",
            )

    def in_a_sentence(self, rows: int) -> str:
        """How many of so many prompts have a reference, and whether the rewards know them."""
        have = rows - self.without_reference
        known = "a right answer is given a full score by every reward that should know it"
        wrong = [f"{name} in {count:,}" for name, count in self.unrewarded.items() if count]
        if wrong:
            known = f"a right answer would be given less than a full score by {', '.join(wrong)}"
        return f"{have:,} of {rows:,} prompts have a reference; {known}."


class Verdicts(BaseModel):
    """Figures of the judged answers that are trained."""

    desirable: int
    """Answers that are good; all others are bad."""
    desirable_tokens: int
    """Trained tokens of them."""
    undesirable_tokens: int

    def problems(self, answers: int, weights: tuple[float, float]) -> Iterator[tuple[str, str]]:
        """What is wrong with so many answers, of which good and bad ones have these weights, and what to change."""
        good, bad = self.desirable, answers - self.desirable
        if not (good and bad):
            yield (
                f"all answers are {'good' if good else 'bad'}, so there is nothing to tell them from",
                f"add {'bad' if good else 'good'} ones, or set `objective: sft` to imitate good ones",
            )
            return
        share = good * weights[0] / (bad * weights[1])
        if not 1 / LOPSIDED <= share <= LOPSIDED:
            more, fewer = ("good", "undesirable") if share > 1 else ("bad", "desirable")
            weight = weights[share > 1] * max(share, 1 / share)
            yield (
                f"{more} answers count {max(share, 1 / share):.1f} times as much as the others: {good:,} are good, "
                f"{bad:,} bad",
                f"set `preference.{fewer}_weight: {weight:.2g}`",
            )

    def in_a_sentence(self, answers: int) -> str:
        """How many of so many answers are good, and how long they are."""
        good, bad = max(self.desirable, 1), max(answers - self.desirable, 1)
        return (
            f"{self.desirable / answers:.0%} of the answers are good, with {self.desirable_tokens / good:,.0f} tokens "
            f"on average; the bad ones have {self.undesirable_tokens / bad:,.0f}."
        )
