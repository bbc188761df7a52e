"""Applies the rules to a recipe."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from toolkit.recipe import compilation, model_configs
from toolkit.recipe.base import Section
from toolkit.recipe.errors import COMMAND_LINE, ENOUGH, RecipeError, Rule, as_text, origin_of
from toolkit.recipe.load import Loaded, load
from toolkit.recipe.module_names import name_problems, whole_numbers
from toolkit.recipe.parallel import STRATEGIES
from toolkit.recipe.precisions import PRECISIONS
from toolkit.recipe.problem import Problem
from toolkit.recipe.rules.distillation import DISTILLATION_RULES, distillation_figures
from toolkit.recipe.rules.embedding import EMBEDDING_RULES, embedding_figures
from toolkit.recipe.rules.expert import EXPERT_RULES, nearest_experts
from toolkit.recipe.rules.extra import extra_problems, extra_warnings
from toolkit.recipe.rules.heads import HEAD_RULES
from toolkit.recipe.rules.ignored import IGNORED_RULES
from toolkit.recipe.rules.inputs import INPUT_RULES
from toolkit.recipe.rules.method import METHOD_RULES, adapter_keys, linear_only, not_for_parameters, not_linear
from toolkit.recipe.rules.parallel import PARALLEL_RULES, layer_widths, nearest_heads, nearest_parts
from toolkit.recipe.rules.pipeline import PIPELINE_RULES, nearest_pipeline
from toolkit.recipe.rules.preference import PREFERENCE_RULES, preference_keys
from toolkit.recipe.rules.reinforcement import REINFORCEMENT_RULES, reward_figures
from toolkit.recipe.rules.results import RESULT_RULES, evaluation_keys
from toolkit.recipe.rules.strategy import KEYS, STRATEGY_RULES, foreign_keys, zero3_fault
from toolkit.recipe.rules.training import (
    TRAINING_RULES,
    masters_figures,
    micro_batch,
    not_below_the_peak,
    own_keys,
    unknown_arguments,
    wrong_arguments,
)
from toolkit.recipe.rules.unusual import UNUSUAL_RULES, adapter_scale, end_of_decay
from toolkit.recipe.schema import Recipe, sections
from toolkit.recipe.sections import SCHEDULES
from toolkit.recipe.time_limit import TimeLimit

_SECONDS = 10.0
"""Recipes take a tenth of a second."""
RULES: dict[str, Rule] = (
    INPUT_RULES
    | METHOD_RULES
    | TRAINING_RULES
    | RESULT_RULES
    | STRATEGY_RULES
    | PARALLEL_RULES
    | EXPERT_RULES
    | PIPELINE_RULES
    | PREFERENCE_RULES
    | REINFORCEMENT_RULES
    | DISTILLATION_RULES
    | HEAD_RULES
    | EMBEDDING_RULES
    | IGNORED_RULES
    | UNUSUAL_RULES
)
"""Every rule by its stable name, in the order in which problems are reported."""


def check(
    recipe: Recipe,
    origins: Mapping[str, str] | None = None,
    *,
    texts: Mapping[str, str] | None = None,
    warns: bool = False,
) -> list[Problem]:
    """Every rule the recipe breaks, as problems that name the place to change.

    What the recipe leaves to the plan is wrong only if no choice would be right; the problems are then those of the
    choice that has the fewest.

    Args:
        texts: Dotted key to its value as it was written, which is shown in its place.
        warns: Whether the rules are those that warn, instead of those that refuse.
    """
    config = model_configs.config_of(recipe.model) or {}

    of_extra = extra_warnings if warns else extra_problems

    def broken(decided: Recipe) -> tuple[list[Rule], list[Problem]]:
        rules = [rule for rule in RULES.values() if rule.warns == warns and rule.broken(decided, config)]
        if origins is not None:
            rules = [rule for rule in rules if not rule.own or _is_own(rule.path, origins)]
        return rules, list(itertools.islice(of_extra(decided, origins or {}), ENOUGH))

    choices = ((decided, *broken(decided)) for decided in _decided(recipe))
    nearest, rules, others = min(choices, key=lambda choice: len(choice[1]) + len(choice[2]))
    figures = _figures(nearest, config) if rules else {}
    if not warns:
        others = [*others, *name_problems(nearest, config, origins or {})]
    return [
        Problem(
            rule.path,
            rule.why.format(**figures),
            _place(rule, nearest, origins or {}),
            given=_value(recipe, rule.path, texts),
            hint=rule.change.format(**figures),
        )
        for rule in rules
    ] + others


def _decided(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with each choice for what it leaves to the plan; the rules know decided recipes only."""
    choices = {
        "precision": PRECISIONS,
        "strategy.name": STRATEGIES[1:],
        "activation_checkpointing.mode": ("none", "full"),
    }
    undecided = [key for key in recipe.undecided if key in choices]
    for values in itertools.product(*(choices[key] for key in undecided)):
        yield recipe.with_values(dict(zip(undecided, values, strict=True)))


def load_checked(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Loaded:
    """Loads a recipe and applies the rules; schema errors and broken rules are reported together.

    Example:
        >>> load_checked("smollm2_135m_lora_demo", ["method=qlora"]).recipe.method.quantization
        'nf4'

    Raises:
        RecipeError: With every problem found.
    """
    try:
        with TimeLimit(_SECONDS, lambda: _too_long(name)):
            return _load_checked(name, overrides, folder)
    except OSError as error:  # A path that is too long, or leads through what nobody may see.
        what = f"cannot look at {error.filename}: {error.strerror}"
        raise RecipeError(name, [Problem("", what, hint="name another file or folder")]) from None


def _load_checked(name: str, overrides: Sequence[str], folder: str | Path | None) -> Loaded:
    try:
        loaded = load(name, overrides, folder)
    except RecipeError as error:
        if error.partial is None:
            raise
        # Where a value is no value the rules see the default, which stands nowhere in the recipe.
        wrong = {problem.path for problem in error.problems}
        broken = [each for each in check(error.partial, error.origins) if each.path not in wrong]
        raise RecipeError(error.name, error.problems + broken) from None
    if broken := check(loaded.recipe, loaded.origins, texts=loaded.texts):
        raise RecipeError(loaded.name, broken)
    warnings = [*loaded.warnings, *check(loaded.recipe, loaded.origins, texts=loaded.texts, warns=True)]
    return dataclasses.replace(loaded, warnings=tuple(warnings))


def _too_long(name: str) -> RecipeError:
    hint = "shorten its texts and lists, and look for interpolations that are filled in over and over"
    return RecipeError(name, [Problem("", f"takes more than {_SECONDS:g} seconds to be read and checked", hint=hint)])


def warnings_of_length(loaded: Loaded, steps: int, epochs: float | None, warmup_steps: int) -> list[Problem]:
    """What a recipe is warned of only when it is known how many steps its epochs and its warm-up are, and how many
    epochs its steps."""
    known = {"schedule.num_epochs": epochs} if loaded.recipe.schedule.max_steps else {"schedule.max_steps": steps}
    counted = loaded.recipe.with_values({**known, "schedule.warmup_steps": warmup_steps})
    before, now = (check(each, loaded.origins, texts=loaded.texts, warns=True) for each in (loaded.recipe, counted))
    return [each for each in now if each not in before]


def _figures(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the texts of the rules may name in braces."""
    batch, foreign = recipe.batch, foreign_keys(recipe)
    lost = [token for tokens in model_configs.without_embedding(recipe.model, config) for token in tokens]
    low, high = recipe.optimizer.traits.usual_rates
    owners = [name for name in STRATEGIES if foreign and all(name in KEYS[key] for key in foreign)]
    return {
        "r": recipe,
        "max_positions": model_configs.max_positions(config) if config else None,
        "causal_change": f", or set {key}: true in its config.json"
        if (key := model_configs.causal_key(config))
        else "",
        "tokens_without_embedding": f"the model has no embedding for {len(lost)}, such as {lost[0]!r}" if lost else "",
        "fused_experts": model_configs.fused_experts(config),
        "stored_form": model_configs.stored_form(config),
        "whole_numbers": whole_numbers(model_configs.local_files(recipe.model), config),
        "run_steps": _so_many(recipe.schedule.max_steps or 0, "step"),
        "end_of_decay": end_of_decay(recipe),
        "run_epochs": _so_many(recipe.schedule.num_epochs or 1, "epoch"),
        "attention_heads": model_configs.attention_widths(config)[0],
        "nearest_heads": nearest_heads(recipe, config),
        "nearest_parts": nearest_parts(recipe, config),
        "nearest_experts": nearest_experts(recipe, config),
        "nearest_pipeline": nearest_pipeline(recipe, config),
        "layer_widths": layer_widths(config),
        "model_type": model_configs.text_config(config).get("model_type"),
        "zero3_fault": zero3_fault(recipe, config),
        "unfit_to_compile": compilation.unfit(recipe, config),
        "nearest_tokens": max(1, round((batch.tokens_per_step or 0) / batch.seq_len)) * batch.seq_len,
        "nearest_micro": math.gcd(batch.sequences_per_step, micro_batch(recipe)),
        "schedule_args": ", ".join(sorted(SCHEDULES[recipe.schedule.name])) or "none",
        "num_prompts": len(recipe.evaluation.prompts),
        "adapter_keys": ", ".join(adapter_keys(recipe)),
        "evaluation_keys": ", ".join(evaluation_keys(recipe)),
        "preference_keys": ", ".join(preference_keys(recipe)),
        **reward_figures(recipe),
        **distillation_figures(recipe),
        **embedding_figures(recipe),
        **masters_figures(recipe),
        "or_tensor": ", or set parallel.tensor instead" if recipe.aligns and not recipe.reinforces else "",
        "not_for_parameters": " and ".join(not_for_parameters(recipe)),
        "not_linear": not_linear(recipe, config),
        "linear_only": linear_only(recipe, config),
        "adapter_scale": f"{adapter_scale(recipe):.3g}",
        "likely_alpha": 2 * recipe.method.r,
        "width": model_configs.width(config),
        "num_layers": model_configs.num_layers(config) if config else None,
        "foreign_keys": ", ".join(f"strategy.{key}" for key in foreign),
        "owners": f", or set strategy.name={' or '.join(owners)}" if owners else "",
        "own_arguments": ", ".join(f"optimizer.args.{argument}" for argument in own_keys(recipe)),
        "own_keys": " and ".join(own_keys(recipe).values()),
        "unknown_arguments": ", ".join(unknown_arguments(recipe)),
        **_wrong_values(recipe),
        "not_below": ", ".join(not_below_the_peak(recipe)),
        "optimizer_arguments": ", ".join(sorted(recipe.optimizer.traits.arguments)),
        "usual_rates": f"{low:g} to {high:g}",
        "likely_rate": f"{math.sqrt(low * high):.0e}".replace("e-0", "e-"),
        "other_sharding": "full_shard" if recipe.strategy.reshard_after_forward else "shard_grad_op",
    }


def _so_many(number: float, what: str) -> str:
    return f"{number:.10g} {what}{'s' * (number != 1)}"


def _wrong_values(recipe: Recipe) -> dict[str, str]:
    """Arguments that cannot have the values they have, as given and as allowed, by section."""
    figures = {}
    for section, args in (("optimizer", recipe.optimizer.args), ("schedule", recipe.schedule.args)):
        allowed = wrong_arguments(recipe, section)
        figures[f"wrong_{section}"] = ", ".join(f"{name}={as_text(args[name])}" for name in allowed)
        figures[f"right_{section}"] = ", and ".join(f"{name} to {words}" for name, words in allowed.items())
    return figures


def _place(rule: Rule, recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Where the key of a rule was written; nothing for a default, whatever line its section begins at."""
    keys = [*(rule.keys(recipe) if rule.keys else ()), rule.path]
    origins = {key: place for key, place in origins.items() if key not in sections() or key == rule.path}
    return next((place for key in keys if (place := origin_of(key, origins))), "")


def _is_own(path: str, origins: Mapping[str, str]) -> bool:
    """Whether the user wrote a key, and not for another length of the run than he typed."""
    lengths = (origins.get("schedule.max_steps"), origins.get("schedule.num_epochs"))
    place, typed = origin_of(path, origins), COMMAND_LINE in lengths
    return bool(place) and not place.startswith("shipped:") and (place == COMMAND_LINE or not typed)


def _value(recipe: Recipe, path: str, texts: Mapping[str, str] | None) -> str:
    """The value at a key; nothing for a whole section."""
    value = attrgetter(path)(recipe)
    if isinstance(value, Section):
        return ""
    entries = value if isinstance(value, list) else []
    sources = [each.model_dump(exclude_unset=True) for each in entries if isinstance(each, Section)]
    return as_text(sources or value, path, texts)
