"""The adapter that a recipe starts from: what PEFT's `adapter_config.json` says of it, and what the recipe says.

Rank and targets are the adapter's: what the recipe leaves out is taken from there, what it states must agree. Reading
them before anything is loaded lets `validate`, `show` and plans see the keys that the run will have.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.common import UserError, brief, concealed
from toolkit.recipe.config_limits import MARKED, has_mark
from toolkit.recipe.dotted import value_at
from toolkit.recipe.errors import Origins, as_text, origin_of
from toolkit.recipe.files import read
from toolkit.recipe.libraries import PASSED
from toolkit.recipe.model_configs import BUILTIN_MODELS
from toolkit.recipe.problem import Problem
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import Method

_FILE = "adapter_config.json"
_KEYS = (
    *("r", "lora_alpha", "target_modules", "target_parameters", "layers_to_transform", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "use_rslora", "use_dora"),
)
_EXCLUDED = "exclude_modules"
_PLAIN = {"peft_type": "LORA", "bias": "none", "lora_bias": False, _EXCLUDED: None}
"""Settings of PEFT that a recipe has no key for, and the value that they have unless `extra.lora` says otherwise."""


def start_from(recipe: Recipe, origins: Origins) -> tuple[Recipe, Origins, list[Problem]]:
    """The recipe with the rank and targets of the adapter that it starts from.

    Returns:
        The recipe, where the values that it did not state come from, and what does not agree.
    """
    if recipe.model.adapter is None:
        return recipe, {}, []
    folder = Path(recipe.model.adapter)

    def problem(key: str, what: str, given: str, hint: str) -> Problem:
        return Problem(key, what, origin_of(key, origins), given, hint=hint)

    try:
        if has_mark(folder / _FILE):
            raise ValueError(MARKED.strip())
        config = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        _check(config, recipe.method)
    except (OSError, ValueError, RecursionError) as error:
        inside = folder / "final"
        hint = f"set model.adapter={inside}" if (inside / _FILE).is_file() else "name the folder `final` of a run"
        what = f"there is no readable {_FILE} in this folder" if isinstance(error, OSError) else f"{_FILE} {error}"
        return recipe, {}, [problem("model.adapter", what, recipe.model.adapter, hint)]
    extra = recipe.extra.lora
    if config.get(_EXCLUDED) and not _stated("extra.lora", origins):
        extra = {**extra, _EXCLUDED: config[_EXCLUDED]}
    problems = [
        problem("model.adapter", f"has {key}={config.get(key, plain)}, unlike the recipe", "", _follow(key))
        for key, plain in _PLAIN.items()
        if _sorted(config.get(key, plain)) != _sorted(extra.get(key, plain))
    ]
    if (tokens := _tokens(folder, config)) != recipe.model.new_tokens:
        # Rows are known by their places: those of other tokens, or in another order, would fit as well.
        what = f"the adapter in {folder} has rows for {as_text(tokens) if tokens else 'no tokens'}"
        written = shlex.quote(f"model.new_tokens={json.dumps(tokens, ensure_ascii=False)}")
        change = f"set {written}" if tokens else "remove model.new_tokens"
        if None in tokens:
            what, change = f"{folder}/tokenizer.json does not name the tokens of its rows", "name another adapter"
        problems.append(problem("model.new_tokens", what, as_text(recipe.model.new_tokens), change))
    base, path = config.get("base_model_name_or_path"), BUILTIN_MODELS.get(recipe.model.path, recipe.model.path)
    if base and base not in (path, concealed(path)) and not Path(path).exists():
        problems.append(
            problem("model.adapter", f"was trained on {base}", recipe.model.adapter, f"set model.path={base}")
        )
    values: dict[str, Any] = {"method.name": "lora"} | {f"method.{key}": _value(config, key) for key in _KEYS}
    if "loftq" in (begun := _begun(folder), recipe.method.init_lora_weights):
        # Such an adapter belongs on no base but the quantized one, stage after stage.
        values["method.init_lora_weights"] = begun
    taken: dict[str, Any] = {}
    for key, value in values.items():
        given = getattr(recipe.method, key.removeprefix("method."))
        if not _stated(key, origins) or given == "all-linear":
            taken[key] = value
        elif _sorted(given) != _sorted(value):
            what = f"the adapter in {recipe.model.adapter} has {as_text(value)}"
            problems.append(problem(key, what, as_text(given), f"remove {key}, or set it to that"))
    if extra is not recipe.extra.lora:
        taken["extra.lora"] = extra
    started = recipe.with_values(taken)
    if "learning_rate" not in recipe.optimizer.model_fields_set:
        # The default was chosen before the recipe was known to be one of adapters.
        started = started.with_values({"optimizer.learning_rate": started.default_learning_rate})
    return started, dict.fromkeys(taken, str(folder / _FILE)), problems


def _check(config: Any, method: Method) -> None:
    """Raises ValueError for what is no adapter's, of what is read of it."""
    if not isinstance(config, dict):
        raise ValueError("holds no object, as an adapter's does")
    rows, base = config.get("trainable_token_indices") or [], config.get("base_model_name_or_path")
    parts = list(rows.values()) if isinstance(rows, dict) else [rows]
    if not all(isinstance(part, list) and {type(number) for number in part} <= {int} for part in parts):
        raise ValueError(f"has {_shown('trainable_token_indices', rows)}, which are no numbers of tokens")
    excluded = config.get(_EXCLUDED) or []
    if not isinstance(excluded, str | list) or not all(isinstance(name, str) for name in excluded):
        raise ValueError(f"has {_shown(_EXCLUDED, excluded)}, which are no names")
    if not isinstance(base, str | None):
        raise ValueError(f"has {_shown('base_model_name_or_path', base)}, which is no name")
    for key in _KEYS:
        if key in ("r", "lora_alpha") and key not in config:
            raise ValueError(f"has no {key}")
        # As a recipe takes it.
        try:
            type(method).model_validate({**method.model_dump(), key: _value(config, key)})
        except (ValidationError, TypeError) as error:
            said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ValueError(f"has {_shown(key, config.get(key))}: {said}") from None


def _shown(key: str, value: Any) -> str:
    return f"{key}={brief(as_text(value), 1)}"


def _begun(folder: Path) -> str:
    """How an adapter began, where the recipe of its run says it."""
    return _of_run(folder, "method", "init_lora_weights") or "default"


def _of_run(folder: Path, section: str, key: str) -> Any:
    """A value in the recipe of an adapter's run, or None; what lies there may be somebody's own recipe."""
    run = folder.parent / "recipe.yaml"
    with suppress(UserError):
        return value_at(read(run).values, [section, key]) if run.is_file() else None
    return None


def _tokens(folder: Path, config: Mapping[str, Any]) -> list[str | None]:
    """The new tokens that an adapter was trained with, in their order; None for those that its tokenizer does not name.

    Embeddings that are trained whole do not say which of their rows are new. The recipe of their run does.
    """
    rows = config.get("trainable_token_indices") or []
    if not rows and config.get("modules_to_save"):
        tokens = _of_run(folder, "model", "new_tokens")
        return tokens if isinstance(tokens, list) else []
    ids = next(iter(rows.values())) if isinstance(rows, dict) else rows
    names: dict[int, str] = {}
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"] if ids else []
        names = {token["id"]: token["content"] for token in added if isinstance(token["content"], str)}
    return [names.get(index) for index in ids]


def _value(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    if key in ("rank_pattern", "alpha_pattern"):
        return value or {}
    if key in ("use_rslora", "use_dora"):
        return bool(value)
    if key in ("r", "lora_alpha") or isinstance(value, str):
        return value
    return sorted(set(value if isinstance(value, list) else [] if value is None else [value]))


def _follow(key: str) -> str:
    # What else PEFT has is none of what adapters here can be.
    return f"set extra.lora.{key} to that" if key in PASSED["lora"] else "name another adapter"


def _sorted(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list) else value


def _stated(key: str, origins: Origins) -> bool:
    return any(written == key or written.startswith(f"{key}.") for written in origins)
