"""Loads a recipe: composes it, fills in interpolations and checks every key against the schema.

All problems come at once: a value that is wrong is reported and taken out, and the rest is checked without it, down to
the rules between keys. Nothing named in a recipe is ever imported or called.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import ValidationError

from toolkit.common import conceal
from toolkit.recipe.adapter import start_from
from toolkit.recipe.base import Section
from toolkit.recipe.compose import compose_recipe
from toolkit.recipe.dotted import interpolated, parts, remove, value_at
from toolkit.recipe.errors import ENOUGH, Origins, RecipeError, from_validation_error, origin_of
from toolkit.recipe.files import first_lines, read
from toolkit.recipe.libraries import flat
from toolkit.recipe.places import as_seen_by
from toolkit.recipe.problem import Problem
from toolkit.recipe.schema import Recipe, sections
from toolkit.recipe.slips import INTERPOLATION


@dataclass(frozen=True)
class Loaded:
    """A recipe that passed the schema."""

    recipe: Recipe
    """Interpolations resolved."""
    name: str
    """The file's path inside the recipes folder, without `.yaml`."""
    file: Path
    origins: Origins
    unresolved: dict[str, Any]
    """What was written, with interpolations such as `${oc.env:NAME}` as they stand."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """Keys that the recipe left to the plan, with value and reason."""
    taken_over: Mapping[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed that the launcher's file states and no key of a recipe does, by dotted key."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Dotted key to the text of its value, as it was written."""
    warnings: tuple[Problem, ...] = ()
    """What can be trained and is probably not meant."""
    folder: str | Path | None = None
    """The user's recipes folder, as it was named; None for the usual one."""

    @property
    def run_folder(self) -> Path:
        """Where it trains, unless `checkpoint.resume=never` finds that taken."""
        return Path(self.recipe.output.dir) / (self.recipe.output.name or self.name.replace("/", "-"))

    @property
    def extra(self) -> dict[str, Any]:
        """What is passed to the libraries, by dotted key; values from the environment as they were written."""
        return flat(_overlay(self.recipe.extra.model_dump(), self.unresolved.get("extra")))

    def decided(self, recipe: Recipe, chosen: Mapping[str, str]) -> Loaded:
        """This recipe with what it left to the plan decided; the run folder keeps the values, not `auto`."""
        unresolved = copy.deepcopy(self.unresolved)
        for key in chosen:
            remove(unresolved, key)
        origins = self.origins | dict.fromkeys(chosen, "chosen by the plan")
        return dataclasses.replace(self, recipe=recipe, unresolved=unresolved, origins=origins, chosen=chosen)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; values that came from the environment stay unresolved."""
        return yaml.safe_dump(
            _overlay(self.recipe.model_dump(), self.unresolved), sort_keys=False, allow_unicode=True, width=120
        )


def load(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Loaded:
    """Composes and checks a recipe.

    Args:
        name: Its name, or the path of a YAML file inside one of the recipe folders.
        overrides: `key=value` texts, see `toolkit.recipe.overrides.parse`.
        folder: The user's recipes folder, see `recipe_folders`.

    Example:
        >>> load("smollm2_135m_lora_demo", ["seq_len=512"]).recipe.batch.seq_len
        512

    Raises:
        RecipeError: With every problem found.
    """
    composed = compose_recipe(name, overrides, folder)
    recipe = _checked(composed.name, composed.values, composed.origins, composed.texts, composed.problems)
    recipe, taken, problems = start_from(recipe, composed.origins)
    if problems:
        raise RecipeError(composed.name, problems, recipe, composed.origins)
    return Loaded(
        recipe,
        composed.name,
        composed.file,
        composed.origins | taken,
        composed.values,
        texts=composed.texts,
        warnings=tuple(composed.warnings),
        folder=folder,
    )


def load_resolved(file: Path) -> Recipe:
    """The recipe of a run folder, as it was written when the run started, with its paths `as_seen_by` the run.

    Raises:
        RecipeError: If the file does not fit this version's schema.
    """
    source = read(file)
    if source.problems:
        raise RecipeError(str(file), source.problems)
    batch = source.values.get("batch")
    if isinstance(batch, dict) and batch.get("micro_batch_size", 0) is None:
        # The default of runs from before it was `auto`.
        del batch["micro_batch_size"]
    recipe = _checked(str(file), source.values, source.origins, source.texts, [])
    return as_seen_by(file.parent, recipe)


def _checked(name: str, unresolved: Any, origins: Origins, texts: Mapping[str, str], earlier: list[Problem]) -> Recipe:
    """Resolves and validates; all problems are raised together, after the earlier ones."""
    data, written, problems = _resolve(unresolved, origins)
    problems = earlier + problems + _unusable(data, origins, texts)
    while True:
        try:
            recipe = Recipe.model_validate(data)
            break
        except ValidationError as error:
            # Without the offending keys the rest can be built, so that rules between keys are checked in one go too.
            known = {problem.path for problem in problems}
            new = from_validation_error(error, data, origins, written, texts)
            # What lost a wrong entry must not be told that it lacks one.
            problems += [each for each in new if not any(f"{path}.".startswith(f"{each.path}.") for path in known)]
            # Backwards, because taking out an entry of a list renumbers those after it.
            removed = [remove(data, problem.path) for problem in reversed(new)]
            if not all(removed) or len(problems) >= ENOUGH:
                raise RecipeError(name, problems, None, origins) from None
    if problems:
        raise RecipeError(name, problems, recipe, origins)
    return recipe


def _unusable(data: Any, origins: Origins, texts: Mapping[str, str]) -> list[Problem]:
    """Values that no library can hold: numbers of more than 64 bits, and halves of surrogate pairs, as which bytes that
    are no UTF-8 come from a shell; and numbers that YAML 1.1 reads in another base, which nobody means. They are taken
    out."""
    problems = []
    for path, value in parts(data):
        what = hint = ""
        text = texts.get(path, "") if isinstance(value, int | float) else ""
        if isinstance(value, int) and _BASE_8.match(text):
            decimal = re.sub(r"^([-+]?)[0_]+(?=.)", r"\1", text)
            what, hint = f"{text} would be read in base 8", f"write {decimal}, or '{text}' for text"
        elif _BASE_60.match(text):
            what, hint = f"{text} would be read in base 60", f"write one number, or '{text}' for text"
        elif _HALF.search(f"{path}{value}" if isinstance(value, str) else path):
            what, hint = (
                "holds half a character, or bytes that are no UTF-8",
                "write UTF-8; rename files of other names",
            )
        elif isinstance(value, int) and value.bit_length() > 63:
            what, hint = "is a number of more than 64 bits", "write a smaller number"
        if what:
            problems.append(Problem(path, what, origin_of(path, origins), hint=hint))
    for problem in reversed(problems):
        remove(data, problem.path)
    return problems


_HALF = re.compile("[\ud800-\udfff]")
_BASE_8 = re.compile(r"[-+]?0\d")
_BASE_60 = re.compile(r"[-+]?\d[\d_]*:\d")


def _resolve(unresolved: Any, origins: Origins) -> tuple[Any, dict[str, str], list[Problem]]:
    """The values with interpolations filled in, the text of each interpolation, and those that cannot be filled in."""
    data = copy.deepcopy(unresolved)
    written = dict(interpolated(unresolved))
    problems = []
    # `${batch.seq_len}` means the value that will be used, be it written or the default.
    try:
        config = OmegaConf.merge(_defaults(), unresolved) if written else OmegaConf.create()
    except OmegaConfBaseException:  # A list stands where keys must, which the schema says better.
        config = OmegaConf.create(unresolved)
    for path, text in written.items():
        *parents, last = path.split(".")
        if text == "???":
            what, hint = "is required: ??? stands for a value to be filled in", "write the value in its place"
            problem = Problem(path, what, origin_of(path, origins), hint=hint)
        else:
            _asked_for.clear()
            try:
                value = OmegaConf.select(config, path)
                part = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                parent = value_at(data, parents)
                if parent is not None:  # It is under a key with a dot in it, which no section knows.
                    parent[int(last) if isinstance(parent, list) else last] = part
                if not any(name in os.environ for name in _asked_for):
                    continue
                _hide(part, text)
                if not (place := _published(path, data)):
                    continue
                what = f"cannot come from the environment: {place}, for everyone to read"
                hint = _LITERALLY.format(next(name for name in _asked_for if name in os.environ))
            except OmegaConfBaseException as error:
                what, hint = _interpolation_error(error)
                if _asked_for and _published(path, data):  # Once it is set, it is refused.
                    hint = _LITERALLY.format(_asked_for[-1])
            problem = Problem(path, what, origin_of(path, origins), text, hint=hint)
        problems.append(problem)
    for problem in problems:
        # An entry of a list stays as it is, so that the numbers of the others remain true.
        if not problem.path.rpartition(".")[2].isdigit():
            remove(data, problem.path)
    return data, written, problems


_PUBLISHED = {"output.name": "it names the run folder", "model.new_tokens": "tokenizer.json holds it"} | dict.fromkeys(
    (
        *("method.target_modules", "method.target_parameters", "method.modules_to_save"),
        *("method.rank_pattern", "method.alpha_pattern", "extra.lora"),
    ),
    "adapter_config.json holds it",
)
"""Keys whose values must stand as they are in what a run leaves, to where."""
_asked_for: list[str] = []
"""The variables of the environment that the value at hand names."""
_LITERALLY = "write the value itself; in a command, your shell fills in ${}"


def _published(path: str, data: Any) -> str | None:
    """Where the value at a path, or a part of it, must stand as it is."""
    return next(
        (
            place
            for key, place in _PUBLISHED.items()
            if f"{path}.".startswith(f"{key}.") or (key.startswith(f"{path}.") and value_at(data, key.split(".")))
        ),
        None,
    )


@functools.cache
def _public_words() -> str:
    return json.dumps(Recipe.model_json_schema(), ensure_ascii=False)


def _hide(value: Any, written: str) -> None:
    """Has every text of a value shown as it was written, unless the schema itself says that word."""
    if isinstance(value, str) and not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", _public_words()):
        conceal(value, written)
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _hide(part, written)


def _from_environment(name: str, *default: str | None) -> str | None:
    """OmegaConf's `oc.env`; notes what the environment holds as nothing to show."""
    _asked_for.append(name)
    value: str | None = oc.env(name, *default)
    if name in os.environ:
        _hide(os.environ[name], f"${{oc.env:{name}}}")
    return value


OmegaConf.register_new_resolver("oc.env", _from_environment, replace=True)


def _defaults() -> dict[str, Any]:
    """The defaults of all keys that have one."""

    def of(section: type[Section]) -> dict[str, Any]:
        fields = section.model_fields.items()
        return {key: field.default for key, field in fields if not field.is_required() and key not in sections()}

    return of(Recipe) | {name: of(section) for name, section in sections().items()}


def _interpolation_error(error: Exception) -> tuple[str, str]:
    """What is wrong with an interpolation, and a hint."""
    text = first_lines(error)
    if "Environment variable" in text:
        name = text.split("'")[1]
        hint = f"export it, or give a default: ${{oc.env:{name},default}}"
        return f"the environment variable {name} is not set", hint
    return text[:1].lower() + text[1:], INTERPOLATION


def _overlay(values: Any, written: Any) -> Any:
    """`values` with every text of `written` that holds an interpolation put back in its place."""
    if isinstance(written, str) and "${" in written:
        return written
    if isinstance(values, dict) and isinstance(written, dict):
        return {key: _overlay(value, written.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(written, list) and len(values) == len(written):
        return [_overlay(value, other) for value, other in zip(values, written, strict=True)]
    return values
