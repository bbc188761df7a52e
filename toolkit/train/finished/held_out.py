"""A run's held-out rows answered by the model it began with and by the one it trained, and scored.

Prompts are those of `samples.json`, only more of them: the rows as the run rendered them, up to their last answer.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit.common import UserError
from toolkit.data.prepare import prepare
from toolkit.data.rows import Sample
from toolkit.data.thoughts import begun, spoken, text_of
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.load import load_resolved
from toolkit.report.evaluation import HeldOut
from toolkit.report.load import read_manifest
from toolkit.train.continued import ALSO_CHANGED
from toolkit.train.evaluation.evaluate import generate
from toolkit.train.evaluation.scoring import METRICS, scored
from toolkit.train.finished.export import final_model, load_begun, load_trained, on_device

_log = logging.getLogger("toolkit.train")
T = TypeVar("T")


def evaluate_held_out(
    run: Path, rows: int, batch_size: int, max_new_tokens: int | None, metrics: Sequence[str] | None, before: bool
) -> tuple[HeldOut, list[dict[str, Any]]]:
    """Answers held-out rows greedily and scores the answers.

    Args:
        rows: How many, at most.
        max_new_tokens: Longest answer; by default that of the recipe's `evaluation`.
        metrics: Names of `scoring.METRICS`; by default those that the rows' own answers suit.
        before: Whether the base model answers too.

    Returns:
        The scores, and a row for each answer.

    Raises:
        UserError: If the run holds out no rows, has no final model, or its data has changed.
    """
    source = ModelSource.open(load_resolved(run / "recipe.yaml"))
    recipe, tokenizer = source.recipe, source.tokenizer()
    samples, held_out, data = held_out_rows(run, source, tokenizer, rows)
    references = [str(sample.reference) for sample in samples]
    said = [spoken(each) for each in references]
    chosen = metrics or [name for name, metric in METRICS.items() if metric.suits(said)]
    longest = max_new_tokens or recipe.evaluation.max_new_tokens
    stops = source.stop_tokens(tokenizer)

    def ask(model: Any, who: str) -> tuple[list[str], int]:
        """Answers in the order of the samples, and how many were cut."""
        # Prompts of like length together: little padding.
        order = sorted(range(len(samples)), key=lambda at: -len(samples[at].input_ids))
        answers, cut = [""] * len(samples), 0
        for start in range(0, len(order), batch_size):
            _log.info("%s: %d of %d rows answered", who, start, len(order))
            batch = order[start : start + batch_size]
            prompts = [samples[at].input_ids for at in batch]
            found = generate(model, tokenizer, prompts, longest, stops, dtypes(recipe).autocast)
            # Decoders of encoder-decoders begin with a token that is no part of the answer.
            begun = int(model.config.is_encoder_decoder)
            for at, ids in zip(batch, found[:, begun:].tolist(), strict=True):
                cut += stops.isdisjoint(ids)
                answers[at] = text_of(tokenizer, ids).strip()
        return answers, cut

    marks = [begun(text_of(tokenizer, sample.input_ids)) for sample in samples]

    def whole(answers: list[str]) -> list[str]:
        return [mark + each for mark, each in zip(marks, answers, strict=True)]

    first, (last, cut) = before_and_after(run, ask, before)
    found = [(name, *scored(name, whole(first[0]) if first else None, whole(last), references)) for name in chosen]
    lines = []
    for at, sample in enumerate(samples):
        figures = {name: each[at] for name, _, each in found if each}
        lines.append(
            {"prompt": sample.prompt, "reference": sample.reference}
            | ({"before": first[0][at]} if first else {})
            | {"after": last[at], "scores": {name: {"before": b, "after": a} for name, (b, a) in figures.items()}}
        )
    scores = HeldOut(
        rows=len(samples),
        held_out=held_out,
        data=data,
        batch_size=batch_size,
        max_new_tokens=longest,
        cut=(first[1] if first else None, cut),
        scores=[score for _, score, _ in found],
    )
    return scores, lines


def held_out_rows(run: Path, source: ModelSource, tokenizer: Any, rows: int) -> tuple[list[Sample], int, str]:
    """Prompts and answers of the first held-out rows, how many there are, and the hash of the data.

    Raises:
        UserError: If there are none, or they may not be those that the run held out.
    """
    recipe, stops = source.recipe, source.stop_tokens(tokenizer)
    prepared = prepare(recipe, tokenizer, stops, vocab_size=source.vocab_size)
    then = read_manifest(run)[0].hashes.get("data", prepared.fingerprint)
    if prepared.fingerprint != then:
        raise UserError(
            f"the data of {run} changed since the run began{ALSO_CHANGED} ({then} then, {prepared.fingerprint} now): "
            "rows that were trained on may be among those held out now",
            "restore it, or ask benchmarks: toolkit evaluate RUN tasks=…",
        )
    if not prepared.eval:
        raise UserError(
            f"{run} holds out no rows",
            "train with data.eval_split, such as 0.05, or with data.eval_sources; or ask benchmarks: tasks=…",
        )
    more = recipe.with_values({"evaluation.num_prompts": rows})
    samples = prepare(more, tokenizer, stops, vocab_size=source.vocab_size).samples[:rows]
    if not samples:
        raise UserError(
            f"none of the held-out rows of {run} has a prompt that the chat template renders",
            "ask benchmarks instead: toolkit evaluate RUN tasks=…",
        )
    return samples, prepared.audit.eval.rows if prepared.audit.eval else len(prepared.eval), prepared.fingerprint


def before_and_after(run: Path, ask: Callable[[Any, str], T], before: bool = True) -> tuple[T | None, T]:
    """What is asked of the model that a run began with, unless it is left out, and of the one it trained.

    The two are never in memory together; with an adapter they are one model, with the adapter off and on, unless the
    run went on from another adapter or trained biases of the base, too.

    Args:
        ask: Gets a model and what to call it.
    """
    recipe = load_resolved(run / "recipe.yaml")
    first: T | None = None
    apart = recipe.method.name == "full" or recipe.model.adapter is not None or recipe.trains_biases
    if before and apart:
        final_model(run)  # That there is one is asked before the first model works for minutes.
        first = ask(on_device(load_begun(run), recipe), "base model")
        gc.collect()
        torch.cuda.empty_cache()
    model = on_device(load_trained(run)[1], recipe)
    if before and not apart:
        with model.disable_adapter():
            first = ask(model, "base model")
    return first, ask(model, "trained model")
