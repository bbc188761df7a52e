"""Rules on objectives that learn from pairs of answers, or from answers that are judged one by one."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.recipe.errors import Rule
from toolkit.recipe.heads import REWARD
from toolkit.recipe.preference import OF_DIFFERENCES, PREFERENCES, REFERRING, SMOOTHED, Preference
from toolkit.recipe.schema import Recipe


def _unread(key: str, reads: Callable[[Recipe], bool], why: str, instead: str) -> Rule:
    """A setting of preferences that the objective, or its loss, does not read."""
    path, default = f"preference.{key}", Preference.model_fields[key].default

    def broken(recipe: Recipe) -> bool:
        return recipe.prefers and getattr(recipe.preference, key) != default and not reads(recipe)

    return Rule(path, lambda r, _: broken(r), why, f"remove {path}, or set {instead}")


def _of_probabilities(recipe: Recipe) -> bool:
    return recipe.prefers and not recipe.headed


def _no_answers(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What does not go with answers that are compared, given ones or the model's own."""
    return Rule(path, lambda r, _: (r.prefers or r.reinforces) and bool(broken(r)), why, change)


def _of_dpo(*losses: str) -> Callable[[Recipe], bool]:
    return lambda r: r.objective == "dpo" and r.preference.loss in losses


def preference_keys(recipe: Recipe) -> list[str]:
    """Keys of the section that are set."""
    return [f"preference.{key}" for key in recipe.preference.changed()]


PREFERENCE_RULES = {
    "preference-objective": Rule(
        "preference",
        lambda r, _: not r.prefers and r.preference.changed(),
        "objective {r.objective} does not learn which answers are preferred",
        f"remove {{preference_keys}}, or set objective={' or '.join(PREFERENCES)}",
        keys=preference_keys,
    ),
    "preference-loss": _unread(
        "loss", lambda r: r.objective == "dpo", "objective {r.objective} has one loss of its own", "objective=dpo"
    ),
    "preference-smoothing": _unread(
        "label_smoothing",
        lambda r: r.objective == "cpo" or _of_dpo(*SMOOTHED)(r),
        "this objective and loss read no label_smoothing",
        "objective=dpo and preference.loss=robust",
    ),
    "preference-length": _unread(
        "length_normalized",
        _of_dpo(*OF_DIFFERENCES),
        "is for the losses of DPO that compare a pair's two answers: ipo, simpo and orpo are per token already",
        "objective=dpo and preference.loss=sigmoid",
    ),
    "preference-margin": _unread(
        "margin",
        lambda r: r.objective in ("simpo", REWARD),
        "only SimPO and reward models have a target margin",
        "objective=simpo",
    ),
    "preference-beta": _unread(
        "beta", _of_probabilities, "rewards are learnt as they are, without a scale", "objective=dpo"
    ),
    "preference-center": _unread(
        "center_rewards",
        lambda r: r.objective == REWARD,
        "only reward models have rewards to center",
        "objective=reward",
    ),
    **{
        f"preference-{key.replace('_', '-')}": _unread(
            key, lambda r: r.judges, "only judged answers are good or bad by themselves", "objective=kto"
        )
        for key in ("desirable_weight", "undesirable_weight")
    },
    "preference-sft": _unread(
        "sft_weight",
        lambda r: r.pairs and _of_probabilities(r),
        "there is no chosen answer whose likelihood is learnt",
        "objective=dpo",
    ),
    "preference-exo": Rule(
        "preference.label_smoothing",
        lambda r, _: _of_dpo("exo_pair")(r) and r.preference.label_smoothing == 0,
        "the loss exo_pair takes the logarithm of the share of wrong labels, which is 0",
        "set preference.label_smoothing=0.001, as its paper does, or preference.loss=sigmoid",
    ),
    "preference-packing": _no_answers(
        "data.packing",
        lambda r: r.data.packing,
        "whole answers are compared, those to a prompt side by side, and sequences of several rows would part them",
        "set data.packing=false: rows of like length go together, and varlen attention pads nothing",
    ),
    "preference-streaming": Rule(
        "data.streaming",
        lambda r, _: r.prefers and r.data.streaming,
        "all rows are counted, and the reference asked of them, before the first step",
        "set data.streaming=false",
    ),
    "preference-tokens": _no_answers(
        "batch.tokens_per_step",
        lambda r: r.batch.tokens_per_step is not None,
        "counts sequences of batch.seq_len tokens, and answers have different lengths",
        "remove batch.tokens_per_step, and set batch.global_batch_size to the rows of a step",
    ),
    "preference-train-on": _no_answers(
        "data.train_on",
        lambda r: r.data.train_on != "auto",
        "answers are compared, and nothing else is trained",
        "remove data.train_on",
    ),
    "preference-dropout": _no_answers(
        "method.lora_dropout",
        lambda r: r.method.name == "lora" and r.method.lora_dropout > 0,
        "answers are compared without dropout, whose noise would pass for a change of preference",
        "set method.lora_dropout=0",
    ),
    "preference-neftune": Rule(
        "extra.training_arguments",
        lambda r, _: (
            (r.objective in REFERRING or r.reinforces) and bool(r.extra.training_arguments.get("neftune_noise_alpha"))
        ),
        "answers are compared with, or drawn by, the model without NEFTune's noise, and the noise passes for a change",
        "remove extra.training_arguments.neftune_noise_alpha",
    ),
    "preference-eva": Rule(
        "method.init_lora_weights",
        lambda r, _: r.prefers and r.method.name == "lora" and r.method.init_lora_weights == "eva",
        "EVA reads single rows before the first step, and these hold two answers",
        "set method.init_lora_weights=default",
    ),
    **{
        f"preference-{way}": _no_answers(
            f"parallel.{way}",
            lambda r, way=way: getattr(r.parallel, way) > 1,  # type: ignore[misc]
            "whole answers are scored, and a process would have parts of them",
            f"remove parallel.{way}{{or_tensor}}",
        )
        for way in ("sequence", "context")
    },
    "preference-pipeline": _no_answers(
        "parallel.pipeline",
        lambda r: r.parallel.pipeline > 1,
        "answers have not been compared with layers that are spread over processes",
        "remove parallel.pipeline{or_tensor}",
    ),
}
