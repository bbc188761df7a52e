"""Settings that can be trained but are probably a mistake: only warnings, because somebody may want just that."""

from __future__ import annotations

import math
from operator import attrgetter

from toolkit.recipe import model_configs
from toolkit.recipe.compilation import unfit
from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import Recipe


def _second_rate(recipe: Recipe) -> float:
    """The learning rate of the second matrices of adapters, under LoRA+."""
    return recipe.optimizer.learning_rate * (recipe.method.loraplus_lr_ratio or 1)


def _all_warmup(recipe: Recipe) -> bool:
    schedule = recipe.schedule
    return schedule.warmup_ratio == 1 or (schedule.warmup_steps or 0) >= (schedule.max_steps or math.inf)


def _decays_before_the_start(recipe: Recipe) -> bool:
    schedule = recipe.schedule
    decay = schedule.args.get("num_decay_steps")
    return (
        schedule.name == "warmup_stable_decay"
        and isinstance(decay, int)
        and (schedule.warmup_steps or 0) < (schedule.max_steps or 0) < decay + (schedule.warmup_steps or 0)
    )


def end_of_decay(recipe: Recipe) -> int | None:
    """The step after which a stated stable phase and its decay are over; None if the recipe does not say."""
    schedule = recipe.schedule
    warmup = schedule.warmup_steps if schedule.warmup_ratio or schedule.warmup_steps else 0
    parts = [warmup, *(schedule.args.get(name) for name in ("num_stable_steps", "num_decay_steps"))]
    known = schedule.name == "warmup_stable_decay" and all(type(each) is int for each in parts)
    return sum(parts) if known else None  # type: ignore[arg-type]


def _beyond(key: str, effect: str, instead: str) -> Rule:
    """A number of steps, or of epochs, that the run never comes to."""
    interval, unit = attrgetter(key), key.rpartition("_")[2]

    def broken(recipe: Recipe) -> bool:
        schedule = recipe.schedule
        epochs = schedule.num_epochs or (math.inf if schedule.max_steps else 1)
        return (interval(recipe) or 0) > (epochs if unit == "epochs" else schedule.max_steps or math.inf)

    why = f"is more than the run's {{run_{unit}}}, so {effect}"
    return Rule(key, lambda r, _: broken(r), why, f"set {key} lower{instead}", warns=True, own=True)


def _outside(key: str, low: float, high: float, effect: str, usual: str) -> Rule:
    """A figure that trains, and hardly what is meant."""
    figure = attrgetter(key)

    def broken(recipe: Recipe) -> bool:
        return figure(recipe) is not None and not low <= figure(recipe) <= high

    return Rule(key, lambda r, _: broken(r), effect, f"set {key}={usual}", warns=True)


def adapter_scale(recipe: Recipe) -> float:
    """What adapters are multiplied with before they are added to the base."""
    method = recipe.method
    return method.lora_alpha / (math.sqrt(method.r) if method.use_rslora else method.r)


UNUSUAL_RULES = {
    "save-beyond": _beyond("checkpoint.save_steps", "no checkpoint is saved on the way", ", or remove it"),
    "save-epochs-beyond": _beyond("checkpoint.save_epochs", "no checkpoint is saved on the way", ", or remove it"),
    "evaluate-beyond": _beyond("evaluation.every_steps", "rows are evaluated only before and after", ", or remove it"),
    "log-beyond": _beyond("logging.every_steps", "only its last one is logged", ""),
    "held-out-twice": Rule(
        "data.eval_split",
        lambda r, _: isinstance(r.data.eval_split, float) and r.data.eval_sources,
        "beside data.eval_sources, whose rows are held out, this share of data.sources is held out too",
        "set data.eval_split=null to train on all of data.sources",
        warns=True,
    ),
    "compile-unfit": Rule(
        "compile",
        lambda r, c: r.compile == "layers" and bool(unfit(r, c)),
        "is tried, although {unfit_to_compile}",
        "set compile=auto, which leaves these layers as they are",
        warns=True,
    ),
    "tokenizer-larger": Rule(
        "model.tokenizer",
        lambda r, c: r.model.tokenizer and model_configs.without_embedding(r.model, c)[1],
        "of its tokens {tokens_without_embedding}; a row that holds one ends the run",
        "set model.path to a folder where the model was saved after `model.resize_token_embeddings(len(tokenizer))`",
        warns=True,
    ),
    "own-tokenizer-larger": Rule(
        "model.path",
        lambda r, c: r.model.tokenizer is None and model_configs.without_embedding(r.model, c)[0],
        "of the tokens of its tokenizer {tokens_without_embedding}; a row that holds one ends the run",
        "set model.path to a folder where the model was saved after `model.resize_token_embeddings(len(tokenizer))`",
        warns=True,
    ),
    "learning-rate-high": Rule(
        "optimizer.learning_rate",
        lambda r, _: r.optimizer.learning_rate > r.optimizer.traits.usual_rates[1],
        "is far above what {r.optimizer.name} is used with, {usual_rates}; the loss will likely diverge",
        "set optimizer.learning_rate in that range, e.g. {likely_rate}",
        warns=True,
    ),
    "learning-rate-low": Rule(
        "optimizer.learning_rate",
        lambda r, _: r.optimizer.learning_rate < r.optimizer.traits.usual_rates[0],
        "is far below what {r.optimizer.name} is used with, {usual_rates}; the model will hardly change",
        "set optimizer.learning_rate in that range, e.g. {likely_rate}",
        warns=True,
    ),
    "loraplus-high": Rule(
        "method.loraplus_lr_ratio",
        lambda r, _: _second_rate(r) > r.optimizer.traits.usual_rates[1] >= r.optimizer.learning_rate,
        "gives the second matrices a learning rate far above what {r.optimizer.name} is used with, {usual_rates}",
        "set method.loraplus_lr_ratio=16, or optimizer.learning_rate lower",
        warns=True,
    ),
    "loraplus-low": _outside(
        "method.loraplus_lr_ratio", 1, math.inf, "lets the second matrices learn slower than the first ones", "16"
    ),
    "dropout-high": _outside("method.lora_dropout", 0, 0.5, "drops more than half of what adapters read", "0.05"),
    "adapter-scale": Rule(
        "method.lora_alpha",
        lambda r, _: r.method.name == "lora" and not 0.01 <= adapter_scale(r) <= 100,
        "adapters are scaled by {adapter_scale}, as if they had that many times the learning rate",
        "set method.lora_alpha={likely_alpha}",
        warns=True,
    ),
    "rank-beyond": Rule(
        "method.r",
        lambda r, c: r.method.name == "lora" and r.method.r > (model_configs.width(c) or math.inf),
        "adapters of a rank above {width}, the width of this model, say no more and are larger than its layers",
        "set method.r=16, or method.name=full",
        warns=True,
    ),
    "checkpointing-beyond": Rule(
        "activation_checkpointing.every_n_layers",
        lambda r, c: r.activation_checkpointing.every_n_layers > (model_configs.num_layers(c) or math.inf),
        "the model has {num_layers} layers, so one of them at most is recomputed",
        "set activation_checkpointing.every_n_layers=2, or remove it and set mode=none",
        warns=True,
    ),
    "epsilon-high": Rule(
        "optimizer.eps",
        lambda r, _: "eps" in r.optimizer.traits.reads and r.optimizer.eps > 1e-3,
        "is larger than the gradients of most models, whose updates then shrink with them",
        "set optimizer.eps=1e-8, or one below 1e-3",
        warns=True,
    ),
    "beta2-low": _outside("optimizer.beta2", 0.5, 1, "the mean of squared gradients forgets within two steps", "0.999"),
    "clipping-low": Rule(
        "optimizer.max_grad_norm",
        lambda r, _: 0 < r.optimizer.max_grad_norm < 1e-3,
        "gradients are clipped to almost nothing at every step",
        "set optimizer.max_grad_norm=1, or 0 for no clipping",
        warns=True,
    ),
    "maximize": Rule(
        "optimizer.args",
        lambda r, _: r.optimizer.args.get("maximize") is True,
        "maximize=true makes every step raise the loss",
        "remove maximize",
        warns=True,
    ),
    "weight-decay-high": Rule(
        "optimizer.weight_decay",
        lambda r, _: r.optimizer.learning_rate * r.optimizer.weight_decay > 0.01,
        "takes more than 1% off every weight at every step, together with the learning rate",
        "set optimizer.weight_decay=0.1 or less",
        warns=True,
    ),
    "warmup-too-long": Rule(
        "schedule.warmup_steps",
        lambda r, _: _all_warmup(r) and r.schedule.warmup_ratio != 1,
        "the warm-up is as long as the run or longer, so the learning rate never reaches {r.optimizer.learning_rate:g}",
        "set schedule.warmup_steps below the run's {run_steps}",
        warns=True,
    ),
    "warmup-all": Rule(
        "schedule.warmup_ratio",
        lambda r, _: _all_warmup(r) and r.schedule.warmup_ratio == 1,
        "the whole run is warm-up, so the learning rate reaches {r.optimizer.learning_rate:g} at its end",
        "set schedule.warmup_ratio=0.03",
        warns=True,
    ),
    "decay-too-long": Rule(
        "schedule.args",
        lambda r, _: _decays_before_the_start(r),
        "warm-up and decay together are longer than the run's {run_steps}",
        "set schedule.args.num_decay_steps lower",
        warns=True,
    ),
    "decay-over-early": Rule(
        "schedule.args",
        lambda r, _: (end_of_decay(r) or math.inf) < (r.schedule.max_steps or 0),
        "the decay is over after step {end_of_decay}, and the rest of the run's {run_steps} has the lowest rate",
        "remove schedule.args.num_stable_steps, which then follows from the others",
        warns=True,
    ),
    "decay-cut-off": Rule(
        "schedule.args",
        lambda r, _: (end_of_decay(r) or 0) > (r.schedule.max_steps or math.inf),
        "the decay would be over after step {end_of_decay}, and the run has {run_steps}",
        "remove schedule.args.num_stable_steps, which then follows from the others",
        warns=True,
    ),
}
