"""Remakes the traces that are shipped: the models of shipped recipes, in the settings that recipes and advice need."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.common import in_a_line
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import batch_layout
from toolkit.models.attention import backends
from toolkit.output import quiet_libraries
from toolkit.planner.trace.fit import trace
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.store import SHIPPED
from toolkit.recipe import Recipe, compilation, list_recipes, load, model_configs, shipped_recipes
from toolkit.recipe.rules import check
from toolkit.recipe.sections import ActivationCheckpointing
from toolkit.recipe.teaching import of_teacher

_METHODS: tuple[Mapping[str, Any], ...] = (
    {"name": "full"},
    {"name": "lora"},
    {"name": "lora", "quantization": "nf4"},
)
_MODES: tuple[Mapping[str, Any], ...] = ({"mode": "none"}, {"mode": "full"})
_MORE_MODES: tuple[Mapping[str, Any], ...] = (
    {"mode": "full", "every_n_layers": 2},
    {"mode": "selective"},
    {"mode": "offload"},
)
"""Only with the method that a recipe asks for."""
_STRATEGIES = ("ddp", "zero2")
"""Autocast over fp32 masters, and 16-bit parameters."""
_ON_CPU = "builtin:"
_OLD, _NEW, _CPU = ("cuda", "7.5"), ("cuda", "9.0"), ("cpu", None)
_FASTEST = {_OLD: ("fp16",), _NEW: ("bf16",), _CPU: ("bf16", "fp32")}
"""What `precision: auto` may come to on them."""


def settings() -> dict[str, Setting]:
    """Key to setting: every shipped recipe as it stands, and the variants of it that advice considers."""
    found: dict[str, Setting] = {}
    for recipe, variants in _recipes():
        config = model_configs.config_of(recipe.model)
        assert config is not None, "the models of shipped recipes are bundled"
        for device in (_NEW, _OLD, _CPU) if recipe.model.path.startswith(_ON_CPU) else (_NEW, _OLD):
            for variant in (*_decided(recipe), *(variants if device != _OLD else ())):
                for precision in _FASTEST[device] if variant.precision == "auto" else (variant.precision,):
                    # The stages of a pipeline are parts of one trace.
                    decided = variant.with_values({"precision": precision, "parallel.pipeline": 1})
                    together = decided.parallel.together
                    for backend in _backends(decided, config, device):
                        layout = batch_layout(decided, math.lcm(together, decided.parallel.expert))
                        each = setting_of(decided, config, device[0], backend, layout)
                        found[each.key()] = each
                        if device == _NEW and _compiles(decided, config):
                            for mode in ("none", "elementwise"):
                                compiled = dataclasses.replace(each, compiled=True, checkpointing=mode)
                                found[compiled.key()] = compiled
                        if teaches := of_teacher(decided):
                            theirs = model_configs.config_of(teaches.model)
                            assert theirs is not None, "teachers of shipped recipes are bundled"
                            taught = setting_of(teaches, theirs, device[0], backend, layout)
                            found[taught.key()] = taught
    return found


def _decided(recipe: Recipe) -> list[Recipe]:
    """The recipe with all that `activation_checkpointing: auto` may come to."""
    if recipe.activation_checkpointing.mode != "auto":
        return [recipe]
    modes = [ActivationCheckpointing(**mode) for mode in (*_MODES, *_MORE_MODES)]
    return [each for mode in modes if not check(each := recipe.with_values({"activation_checkpointing": mode}))]


def _compiles(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Whether what its layers keep may be asked for as compiled ones keep it."""
    return recipe.activation_checkpointing.mode == "none" and not compilation.unfit(recipe, config)


def _backends(recipe: Recipe, config: Mapping[str, Any], device: tuple[str, str | None]) -> set[str]:
    """On a CPU `auto` may take eager attention instead of `sdpa`, where that was measured to be the faster."""
    asked = recipe.model.attention
    planned = backends.planned(asked, config, dtypes(recipe).compute, *device, headed=recipe.headed)
    eager = device == _CPU and planned == "sdpa" and recipe.activation_checkpointing.mode != "selective"
    return {planned, "eager"} if eager else {planned}


def ship(folder: Path = SHIPPED) -> Iterator[str]:
    """Writes one file for each architecture, leaving out traces that are there already; yields what was done."""
    wanted: dict[str, dict[str, Setting]] = {}
    for key, each in settings().items():
        wanted.setdefault(each.architecture(), {})[key] = each
    folder.mkdir(exist_ok=True)
    for file in folder.glob("*.json.gz"):
        if file.name.removesuffix(".json.gz") not in wanted:
            file.unlink()
    for architecture, group in sorted(wanted.items()):
        file = folder / f"{architecture}.json.gz"
        there = json.loads(gzip.decompress(file.read_bytes())) if file.is_file() else {}
        traces = {key: there[key] for key in group if key in there}
        for key in sorted(group.keys() - traces.keys()):
            try:
                traces[key] = trace(group[key]).to_json()
            except Exception as error:
                yield f"{group[key].config['model_type']}: {in_a_line(error)}"
            _write(file, traces)
        _write(file, traces)
        yield f"{file.name}: {len(traces)} traces of {next(iter(group.values())).config['model_type']}"


def _write(file: Path, traces: Mapping[str, Any]) -> None:
    """Without a time in it, the same traces make the same file."""
    content = json.dumps(traces, sort_keys=True, separators=(",", ":"))
    file.write_bytes(gzip.compress(content.encode(), mtime=0))


def _recipes() -> Iterator[tuple[Recipe, list[Recipe]]]:
    """The shipped recipes with their variants, and for each shipped model without one the recipe of its kind."""
    folder = shipped_recipes()
    recipes = [load(name, (), folder).recipe for name in list_recipes([folder])]
    yield from ((recipe, list(_variants(recipe))) for recipe in recipes)
    kinds = {
        known.config["model_type"]: recipe
        for recipe in recipes
        if (known := model_configs.known_model(recipe.model)) and not recipe.headed
    }
    used = {known.model for recipe in recipes if (known := model_configs.known_model(recipe.model))}
    for model, known in model_configs.bundled().items():
        if model not in used and known.config["model_type"] in kinds:
            recipe = kinds[known.config["model_type"]].with_values({"model.path": model})
            yield recipe, [each for each in _variants(recipe) if each.strategy.name == "ddp"]


def _variants(recipe: Recipe) -> Iterator[Recipe]:
    """Other methods, activation checkpointing and strategies, as far as the rules allow them."""
    own = recipe.model_dump(exclude_unset=True)
    asked = own.get("method", {})
    settings = [*itertools.product(_METHODS, _MODES, _STRATEGIES), *itertools.product([asked], _MORE_MODES, ["ddp"])]
    if recipe.headed:  # Others are traced where they are asked for.
        settings = [*itertools.product([asked], _MODES, _STRATEGIES)]
    for method, mode, strategy in settings:
        changes = {"method": {**method}, "activation_checkpointing": {**mode}, "strategy": {"name": strategy}}
        variant = Recipe.model_validate(own | changes)
        if not check(variant):
            yield variant


if __name__ == "__main__":
    quiet_libraries()
    for line in ship():
        print(line, flush=True)
