"""What an audit says of pairs of answers: whether they can teach a preference, and whether length alone tells it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

LOPSIDED = 1.5
"""Chosen answers that many times as long as rejected ones are warned of: a judgement, not a measurement."""


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
                f"in {self.equal:,} pairs both answers are the same tokens, and they are left out",
                "remove them, or raise `batch.seq_len` if answers are cut before they differ",
            )
        if self.apart:
            yield (
                f"in {self.apart:,} pairs the two answers follow different prompts",
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
