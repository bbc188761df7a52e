"""What an objective has of its own: the class that trains it, its section of the recipe, its rows and its scores."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from toolkit.models.load import ModelSource
from toolkit.models.output_heads.head_choice import choose
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.teacher import require_fused
from toolkit.recipe import Recipe
from toolkit.recipe.heads import EMBEDDING
from toolkit.train.trainers.distillation import DistillationTrainer
from toolkit.train.trainers.embedding import EmbeddingTrainer
from toolkit.train.trainers.heads import ClassTrainer, RewardTrainer, TokenTrainer
from toolkit.train.trainers.judged import JudgedTrainer
from toolkit.train.trainers.policy import PolicyTrainer
from toolkit.train.trainers.preference import PairTrainer, numbered
from toolkit.train.trainers.trainer import CausalTrainer, EncoderDecoderTrainer

_log = logging.getLogger("toolkit.train")


def trainer_class(recipe: Recipe) -> Any:
    """The class that trains its objective."""
    of_heads = {"reward": RewardTrainer, "classification": ClassTrainer, "token_classification": TokenTrainer}
    of_heads[EMBEDDING] = EmbeddingTrainer
    if recipe.headed:
        return of_heads[recipe.objective]
    if recipe.prefers:
        return JudgedTrainer if recipe.judges else PairTrainer
    if recipe.reinforces:
        return PolicyTrainer
    if recipe.distills:
        return DistillationTrainer
    return EncoderDecoderTrainer if recipe.objective == "seq2seq" else CausalTrainer


def settings_of(recipe: Recipe) -> Any:
    """The section that its objective reads."""
    if recipe.distills:
        return recipe.distillation
    return recipe.policy if recipe.reinforces else recipe.preference


def with_numbers(recipe: Recipe, train: Any, held_out: Any) -> tuple[Any, Any]:
    """Training and held-out rows, numbered where what is known of a row is looked up by its number."""
    looked_up = (recipe.prefers and not recipe.headed) or recipe.reinforces or recipe.embeds
    return numbered(train, held_out) if looked_up else (train, held_out)


def head_of(source: ModelSource, first: bool) -> HeadChoice:
    """How labels are scored, as far as the architecture tells; the weights are asked before the first step."""
    choice = choose(source.config, source.recipe.model.trust_remote_code, source.recipe.objective)
    if first and not choice.fused:
        _log.warning(
            "the model's own forward scores the labels, from the logits of %s: the fused output head is not what a %s "
            "computes (%s)",
            "trained tokens" if choice.selects else "all tokens",
            source.config.model_type,
            choice.reason,
        )
    if source.recipe.distills:
        require_fused(choice, "model.path", source.config.model_type)
    if first and not choice.balances:
        _log.warning("this model computes no loss for the balance of its routers, and none is added")
    if not source.recipe.reinforces:
        return choice
    return dataclasses.replace(choice, temperature=source.recipe.rollout.temperature)
