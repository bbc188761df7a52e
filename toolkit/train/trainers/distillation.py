"""Training a student on what a teacher would say: a causal model and any engine, with a loss of each trained token that
compares two distributions in place of one that scores a label."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.data.batching.answer_batches import answered_row
from toolkit.data.batching.collate import documents_of
from toolkit.data.own_answers import prompt_lengths, writable
from toolkit.data.rows import IGNORE
from toolkit.distributed.engines import teacher_dtype
from toolkit.models.coverage import stored_form
from toolkit.models.device import sent
from toolkit.models.losses.distillation import FIGURES, Divergence
from toolkit.models.output_heads.fused_head import judged_by
from toolkit.models.output_heads.head_choice import compare
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.teacher import Teacher, require_fused
from toolkit.recipe.distillation import Distillation
from toolkit.recipe.teaching import of_teacher
from toolkit.report.held_out_rows import per_count
from toolkit.report.rewards import MARGIN
from toolkit.train.session import Session
from toolkit.train.trainers.rollouts import Asker, keep_answers, uniform
from toolkit.train.trainers.told import Measurement, Telling
from toolkit.train.trainers.trainer import CausalTrainer

_WITH_INTERVALS = ("kl", "agreement")
OF_ANSWERS = ("on_policy", "answer_tokens", "cut")
"""What is told of a step whose answers a student writes itself: their share of its rows, their length on average, and
the share of them that their limit ended."""


class DistillationTrainer(Telling, CausalTrainer):
    """A causal model that learns from a teacher. Set `teacher` and `settings` once it is made, and `asker` where it
    writes answers itself."""

    said = (*FIGURES, *OF_ANSWERS)
    teacher: Teacher
    settings: Distillation
    data_collator: Any
    asker: Asker | None = None
    folder: Path | None = None
    """The run's, on the process that writes it."""
    _computed: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown: list[dict[str, Any]] = []
        """A prompt of the newest step on this process, with the student's answer to it."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step, in which the student has answered what it is to answer itself, and the number of
        their trained tokens."""
        batches, given = super().get_batch_samples(*args, **kwargs)
        if self.asker is None or not batches:
            return batches, given
        rows = [[row for row in documents_of(batch) if set(row["labels"]) != {IGNORE}] for batch in batches]
        self._write(self.asker, [row for batch in rows for row in batch])
        batches = [self.data_collator.whole(batch) for batch in rows]
        count = self._get_num_items_in_batch(batches, self.args.device)
        self.waiting.trained = self.waiting.trained + count - given
        return batches, count

    def _write(self, asker: Asker, rows: list[dict[str, list[int]]]) -> None:
        """Replaces last answers of a step's rows by the student's own.

        Which, and by which words, follows from the seed, the step and the row's own tokens: numbers of its own say
        first whether, and then draw token by token.
        """
        seed, longest = asker.recipe.seed, asker.recipe.rollout.max_completion_tokens
        drawn = []
        for row in rows:
            choice, *numbers = uniform(seed, self.state.global_step, row["input_ids"], 1, 1 + longest)[0]
            length = int(prompt_lengths(np.array(row["labels"]), np.array([len(row["labels"])]))[0])
            if choice < self.settings.on_policy and writable(asker.recipe, length):
                drawn.append((row, row["input_ids"][:length], numbers))
        prompts = [prompt for _, prompt, _ in drawn]
        answers = asker.drawn(self, prompts, np.array([each for *_, each in drawn]).reshape(-1, longest))
        for (row, prompt, _), given in zip(drawn, answers, strict=True):
            row.update(answered_row(prompt, given))
        cut = sum(map(asker.is_cut, answers))
        sums = [0.0] * (1 + len(FIGURES)) + [len(rows), len(answers), sum(map(len, answers)), cut]
        self.see(sent(sums, self.args.device, torch.float64))
        computed = sent(sum(len(row["input_ids"]) for row in rows), self.args.device)
        self._computed += int(self.accelerator.reduce(computed, reduction="sum"))
        self.row_at_once = True  # With an answer beside it.
        self.shown = [
            {"prompt": asker.text(prompt), "answer": asker.text(given)}
            for prompt, given in zip(prompts[:1], answers, strict=False)
        ]

    def take_tokens(self) -> int:
        """Tokens of rows that were trained on since this was last asked, of all processes."""
        taken, self._computed = self._computed, 0
        return taken

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Keeps an answer of the step, too."""
        if "loss" in logs:
            keep_answers(self.folder, self.state.global_step, self.shown)
        super().log(logs, *args, **kwargs)

    def score(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of a batch: the sum of the losses of its trained tokens, their number, and the routers' balance loss."""
        losses, told, trained, balance = self._judged(model, inputs)
        count = trained.sum()
        if model.training:
            sums = torch.cat([count[None], told.sum(0)]).double()
            self.see(torch.nn.functional.pad(sums, (0, 1 + len(OF_ANSWERS))))
        return losses.sum(), count, balance

    def told(self, sums: list[float]) -> dict[str, float]:
        """See `FIGURES`, which are means over tokens, and `OF_ANSWERS`."""
        tokens, *figures, rows, answers, answer_tokens, cut = sums
        said = {name: each / tokens for name, each in zip(FIGURES, figures, strict=True)}
        of_answers = dict(zip(OF_ANSWERS[1:], (answer_tokens / answers, cut / answers), strict=True)) if answers else {}
        return said | ({"on_policy": answers / rows} if rows else {}) | of_answers

    def measure(self, model: Any, inputs: dict[str, Any]) -> Measurement:
        """Of tokens, beside the loss, what `FIGURES` names."""
        losses, told, trained, _ = self._judged(model, inputs)
        sums = torch.stack([losses.double().sum(), trained.sum().double()])
        return Measurement.of(sums, losses, trained, *told.unbind(1))

    def figures(self, sums: list[float], rows: torch.Tensor | None) -> dict[str, float]:
        """What an evaluation says, per trained token. Tokens of a row are alike, so intervals are those of rows.

        Returns:
            `eval_loss`, `eval_tokens`, and `eval_…` of what `FIGURES` names, with half the width of the 95% intervals
            of `eval_kl` and `eval_agreement` as `…_plus_minus`.
        """
        assert rows is not None, "a loss of tokens is one of rows"
        (loss, tokens), (_, counts, *told) = sums, rows.cpu().numpy().T
        found: dict[str, float] = {"eval_loss": loss / tokens, "eval_tokens": int(tokens)}
        for name, each in zip(FIGURES, told, strict=True):
            found[f"eval_{name}"], half = per_count(each, counts)
            if name in _WITH_INTERVALS and not math.isnan(half):
                found[f"eval_{name}{MARGIN}"] = half
        return found

    def _judged(
        self, model: Any, inputs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Of the tokens (N) of a batch: losses (N) and what `FIGURES` names (N, 3), zero but for those trained, and
        which are (N); and the balance loss."""
        criterion = Divergence(self.settings, self.teacher.logits(inputs), self.teacher.common)
        self.output_head.scorer = lambda labels: judged_by(criterion, labels)
        try:
            outputs, balance = self.scores(model, inputs)
        finally:
            self.output_head.scorer = None
        trained = outputs.label_mask[0]
        return -outputs.log_probs[0], criterion.figures * trained[:, None], trained, balance


def check_heads(session: Session, batch: dict[str, Any]) -> None:
    """Asks student and teacher whether the fused output head is what they compute: the logits of both are made of what
    it reads.

    Args:
        batch: Rows all whose tokens are trained.

    Raises:
        UserError: If it is not.
    """
    student, teacher, teaches = session.trainer.output_head, session.trainer.teacher, of_teacher(session.recipe)
    assert teaches, "the objective has a teacher"
    with teacher.alone():
        difference, reason = compare(teacher.model, batch, teacher.head, getattr(torch, teacher_dtype(teaches)), True)
    kinds = [each.config.model_type for each in (session.module, teacher.model)]
    require_fused(HeadChoice(student.fused, reason="it is not what this model computes"), "model.path", kinds[0])
    require_fused(HeadChoice(difference <= 1, reason=reason), "distillation.teacher.path", kinds[1])


def state_of(model: Any) -> dict[str, Any]:
    """What of a teacher is compared with the recipe, see `engine_state.EngineState`."""
    moving = [each for module in model.modules() if module.training for each in module.parameters(recurse=False)]
    learning = {id(each): each.numel() for each in (*moving, *(p for p in model.parameters() if p.requires_grad))}
    return {
        "teacher_dtype": str(model.get_input_embeddings().weight.dtype).removeprefix("torch."),
        "teacher_quantization": stored_form(model),
        "teacher_offload": len({each.device for each in model.parameters()}) > 1,
        "teacher_trained": sum(learning.values()),
    }
