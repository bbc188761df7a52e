"""Answers that a policy gives to prompts, drawn so that they depend on nothing but the seed, the step and the row.

Transformers draws from one generator for a whole batch, by which an answer would depend on the rows beside it and on
the number of processes. Here each answer has uniform numbers of its own, one for each of its tokens, and takes the
token at which the cumulated probability passes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

from toolkit.data.rewards import Answer, Scorer
from toolkit.data.thoughts import special_tokens, text_of
from toolkit.files import as_json, write_atomically
from toolkit.recipe import Recipe
from toolkit.train.evaluation.evaluate import CannotGenerate, evaluating, generate
from toolkit.train.health.watchdog import beat

Numbers = NDArray[np.float64]
ANSWERS = "answers.jsonl"
"""In the run folder, of each step that is logged: a prompt, its answers and what is known of them."""


@dataclass
class Rollout:
    """A prompt, the answers that it was given, and what is known of them.

    Attributes:
        row: Its number among the training rows.
        asked: Tokens of the prompt.
        answers: Tokens of each answer.
        scores: (answers, rewards).
        gains: (answers,) advantages.
        before: Of each answer, log-probabilities of its tokens by the policy that gave it, where they are kept.
        served: The same as a server drew them, where one gave the answers.
    """

    row: int
    asked: list[int]
    answers: list[list[int]]
    scores: Numbers
    gains: Numbers = field(default_factory=lambda: np.zeros(0))
    before: list[list[float]] | None = None
    served: list[list[float]] | None = None

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return vars(self) | {"scores": self.scores.tolist(), "gains": self.gains.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Rollout:
        """What `as_json` wrote."""
        return cls(**values | {name: np.array(values[name], dtype=np.float64) for name in ("scores", "gains")})


def uniform(seed: int, step: int, row: int | list[int], answers: int, tokens: int) -> Numbers:
    """(answers, tokens) numbers from 0 to 1 for the answers to a row in a step.

    Args:
        row: Its number, or its tokens.
    """
    return np.random.default_rng([seed, step, row]).random((answers, tokens))


def keep_answers(folder: Path | None, step: int, answers: list[dict[str, Any]]) -> None:
    """Adds some to `ANSWERS` of a run folder: what is learnt from is not always what was meant.

    Args:
        folder: On the process that writes it.
    """
    if folder and answers:
        # For want of room no training ends; what it needs is written elsewhere.
        with contextlib.suppress(OSError), (folder / ANSWERS).open("a", encoding="utf-8") as file:
            file.write(as_json({"step": step, "answers": answers}) + "\n")


def drop_answers(folder: Path, step: int) -> None:
    """Drops those of steps after one, which will be taken again, and a line that a kill cut off."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        *lines, _ = (folder / ANSWERS).read_bytes().split(b"\n")
        kept = [line + b"\n" for line in lines if json.loads(line)["step"] <= step]
        write_atomically(folder / ANSWERS, b"".join(kept))


class Drawn(LogitsProcessor):
    """Leaves of each distribution the token that a uniform number picks: inversion of its cumulated probabilities. For
    one generation, as each call takes the numbers of the next token.

    Args:
        numbers: (sequences, tokens), of each sequence for each token that it may have.
    """

    def __init__(self, numbers: torch.Tensor, temperature: float, top_p: float) -> None:
        self._numbers, self._temperature = iter(numbers.unbind(1)), temperature
        self._top_p = TopPLogitsWarper(top_p) if top_p < 1 else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float() / self._temperature
        if self._top_p:
            scores = self._top_p(input_ids, scores)
        cumulated = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        number = next(self._numbers)[:, None] * cumulated[:, -1:]
        picked = torch.searchsorted(cumulated, number, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -math.inf).scatter_(1, picked, 0.0)


@contextmanager
def _as_it_is(model: Any) -> Iterator[None]:
    """Without the penalties and limits that a model's generation config may have: answers are drawn from what the
    model is trained as."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    holders = [each for each in (model, base) if getattr(each, "generation_config", None) is not None]
    kept = [each.generation_config for each in holders]
    for each in holders:
        each.generation_config = GenerationConfig(bos_token_id=each.generation_config.bos_token_id)
    try:
        yield
    finally:
        for each, config in zip(holders, kept, strict=True):
            each.generation_config = config


@dataclass(frozen=True)
class Asker:
    """Asks a model for answers, and has them scored.

    Args:
        stops: Tokens that end an answer.
        autocast: Name of the dtype the model computes in, or None.
        scorer: Scores answers.
        reads_once: Whether a prompt that gets several answers is read once for all of them, and answers that have ended
            leave the others.
    """

    recipe: Recipe
    tokenizer: Any
    stops: frozenset[int]
    autocast: str | None
    scorer: Scorer
    reads_once: bool = False

    def answers(
        self, model: Any, prompts: Sequence[list[int]], device: torch.device, numbers: Numbers | None = None
    ) -> list[list[int]]:
        """Tokens of an answer to each of the prompts, up to the one that ends it.

        Args:
            model: Without the engine around it.
            numbers: (prompts, tokens) by which they are drawn; without them each token is the likeliest.

        Raises:
            CannotGenerate: See `generate`.
        """
        settings = self.recipe.rollout

        def sample(rows: torch.Tensor, written: int) -> dict[str, Any]:
            if numbers is None:
                return {"do_sample": False}
            left = torch.from_numpy(numbers).to(device)[rows.to(device), written:]
            drawn = Drawn(left, settings.temperature, settings.top_p)
            return {"do_sample": False, "logits_processor": LogitsProcessorList([drawn])}

        try:
            with _as_it_is(model):
                found = generate(
                    model, self.tokenizer, prompts, settings.max_completion_tokens, self.stops, self.autocast, sample,
                    device=device, once=self.reads_once,
                )  # fmt: skip
        except CannotGenerate as error:
            instead = (
                "have a server answer (rollout.server)" if self.recipe.reinforces else "set distillation.on_policy=0"
            )
            raise CannotGenerate(error.whole, f"train another model, or {instead}") from error
        return [self._ended(ids) for ids in found.tolist()]

    def drawn(self, trainer: Any, prompts: list[list[int]], numbers: Numbers) -> list[list[int]]:
        """The same of a trainer's model before a step, as many at once as `rollout.batch_size` says. All processes call
        this, each with prompts of its own.

        Args:
            numbers: (prompts, tokens) by which they are drawn.
        """
        size = self.recipe.rollout.batch_size or max(1, len(prompts))
        # Where parameters are divided, all processes generate as often; those that have no rows left do for nothing.
        turns = max(gather_object([math.ceil(len(prompts) / size)]))
        spare = prompts[:1] or [[0]], numbers[:1] if prompts else np.zeros((1, numbers.shape[1]))
        model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
        answers: list[list[int]] = []
        with evaluating(trainer.model_wrapped), torch.no_grad():
            for first in range(0, turns * size, size):
                beat(f"generating the answers of step {trainer.state.global_step + 1}")
                part, own = slice(first, first + size), first < len(prompts)
                asked, by = (prompts[part], numbers[part]) if own else spare
                found = self.answers(model, asked, trainer.args.device, by)
                answers += found if own else []
        return answers

    def _ended(self, ids: list[int]) -> list[int]:
        end = next((place for place, token in enumerate(ids) if token in self.stops), len(ids) - 1)
        return ids[: end + 1]

    def is_cut(self, answer: list[int]) -> bool:
        """Whether an answer was ended by its limit."""
        return answer[-1] not in self.stops

    @functools.cached_property
    def _kept(self) -> frozenset[str]:
        """Special tokens that a reward looks for: a model may have its tags as tokens."""
        return frozenset(filter(self.recipe.rewards.names, special_tokens(self.tokenizer)))

    def text(self, ids: list[int]) -> str:
        """As a user reads it, with the special tokens that a reward looks for."""
        return text_of(self.tokenizer, ids, self._kept)

    def scores(self, asked: list[int], answers: list[list[int]], place: str, columns: dict[str, Any]) -> Numbers:
        """(answers, rewards) scores of answers to one prompt.

        Args:
            place: Where the row stands.
            columns: What is known of it.
        """
        prompt = self.text(asked)
        return self.scorer([Answer(self.text(ids), len(ids), prompt, columns, place) for ids in answers])
