"""Loads a recipe: composed by Hydra from files and command line, then checked key by key against the schema.

Hydra's compose API is used instead of `@hydra.main` because every rank runs the script, and nothing is ever
instantiated from a recipe. Folders are searched in order: the user's `recipes/` first, then the shipped shelf.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from toolkit.recipe.defaults import Defaults
from toolkit.recipe.files import find, locate, read, recipe_folders, search_order, short
from toolkit.recipe.overrides import Overrides, parse
from toolkit.recipe.problems import COMMAND_LINE, Problem, RecipeError, from_validation_error, origin_of
from toolkit.recipe.schema import Recipe, Section, sections


class _Folders(SearchPathPlugin):
    """Adds the folders of recipes to Hydra's search path; none but while a recipe is composed."""

    paths: ClassVar[list[Path]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for path in self.paths:
            search_path.append("recipes", f"file://{path}")


Plugins.instance().register(_Folders)


@dataclass(frozen=True)
class Loaded:
    """A recipe that passed the schema.

    Args:
        recipe: The typed recipe, interpolations resolved.
        name: Its name: the file's path inside the recipes folder, without `.yaml`.
        file: Its file.
        origins: Dotted key to `file:line` or `command line`, for every value that is not a default.
        unresolved: What was written, with interpolations such as `${oc.env:NAME}` as they stand.
        chosen: Keys that the recipe left to the plan, with value and reason.
    """

    recipe: Recipe
    name: str
    file: Path
    origins: dict[str, str]
    unresolved: dict[str, Any]
    chosen: Mapping[str, str] = field(default_factory=dict)

    def decided(self, recipe: Recipe, chosen: Mapping[str, str]) -> Loaded:
        """This recipe with what it left to the plan decided; the run folder keeps the values, not `auto`."""
        unresolved = copy.deepcopy(self.unresolved)
        for key in chosen:
            _remove(unresolved, key)
        origins = self.origins | dict.fromkeys(chosen, "chosen by the plan")
        return dataclasses.replace(self, recipe=recipe, unresolved=unresolved, origins=origins, chosen=chosen)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; values that came from the environment stay unresolved."""
        return yaml.safe_dump(
            _overlay(self.recipe.model_dump(), self.unresolved), sort_keys=False, allow_unicode=True, width=120
        )


@dataclass(frozen=True)
class Composed:
    """A recipe put together from its files and the command line, not yet checked against the schema.

    Args:
        name: As in `Loaded`.
        file: As in `Loaded`.
        values: Nested values with interpolations as they stand, defaults not included.
        origins: As in `Loaded`.
        choices: Group to option, as the files say; None for a group left empty.
        problems: What is wrong with the command line.
    """

    name: str
    file: Path
    values: dict[str, Any]
    origins: dict[str, str]
    choices: dict[str, str | None]
    problems: list[Problem]


def load(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Loaded:
    """Composes and checks a recipe.

    Args:
        name: Its name, or the path of a YAML file inside one of the recipe folders.
        overrides: `key=value` texts, see `toolkit.recipe.overrides.parse`.
        folder: The user's recipes folder, see `recipe_folders`.

    Raises:
        RecipeError: With every problem found.
    """
    composed = compose_recipe(name, overrides, folder)
    recipe = _checked(composed.name, composed.values, composed.origins, composed.problems)
    return Loaded(recipe, composed.name, composed.file, composed.origins, composed.values)


def compose_recipe(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Composed:
    """Composes a recipe; arguments as for `load`.

    Raises:
        RecipeError: The files do not fit together; with every problem found so far.
    """
    folders = recipe_folders(folder)
    name, file = find(name, folders)
    search = search_order(file, folders)
    changes = parse(overrides, search)
    defaults = Defaults(search, folders)
    defaults.follow(file)
    defaults.check_options(changes.groups)
    if defaults.problems:
        raise RecipeError(name, dict.fromkeys([*defaults.problems, *changes.problems, *_own_problems(file)]))
    config, origins = _compose(name, file.stem, changes, defaults)
    values: Any = OmegaConf.to_container(config, resolve=False)
    for key in changes.removed:
        _remove(values, key)
        origins = {path: origin for path, origin in origins.items() if path != key and not path.startswith(f"{key}.")}
    return Composed(name, file, values, origins, defaults.choices, changes.problems)


def load_resolved(file: Path) -> Recipe:
    """The recipe of a run folder, as it was written when the run started.

    Raises:
        RecipeError: If the file does not fit this version's schema.
    """
    source = read(file)
    if source.node is None:
        raise RecipeError(str(file), source.problems)
    origins: dict[str, str] = {}
    _record(source.node, "", short(file), origins)
    return _checked(str(file), OmegaConf.to_container(OmegaConf.load(file), resolve=False), origins, [])


def _compose(name: str, stem: str, changes: Overrides, defaults: Defaults) -> tuple[DictConfig, dict[str, str]]:
    """Hydra's composition, and where each of its values was written."""
    arguments, search, sources = changes.for_hydra(defaults.choices), defaults.search, defaults.sources
    _Folders.paths = search
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(search[0]), version_base="1.3", job_name="toolkit"):
            # Without `_self_` a recipe's own keys come last, which is what everybody expects; no need to warn.
            warnings.simplefilter("ignore", UserWarning)
            loader = GlobalHydra.instance().hydra.config_loader  # type: ignore[union-attr]
            files = loader.compute_defaults_list(stem, arguments, RunMode.RUN).defaults
            config = compose(stem, arguments)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise RecipeError(name, [Problem("", _first_lines(error))]) from None
    finally:
        _Folders.paths = []
    origins: dict[str, str] = {}
    for default in files:
        source = locate(default.config_path, search) if default.config_path else None
        if source in sources and (node := sources[source].node):
            _record(node, (default.package or "").removeprefix("_global_").strip("."), short(source), origins)
    for key in changes.values:
        origins = {path: origin for path, origin in origins.items() if not path.startswith(f"{key}.")}
        origins[key] = COMMAND_LINE
    return config, origins


def _record(node: yaml.Node, prefix: str, file: str, origins: dict[str, str], top: bool = True) -> None:
    if isinstance(node, yaml.MappingNode):
        # What is merged with `<<` comes first: the keys beside it win.
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if key_node.value == "<<":
                for part in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    _record(part, prefix, file, origins, top)
                continue
            if top and key_node.value == "defaults":
                continue
            path = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            origins[path] = f"{file}:{key_node.start_mark.line + 1}"
            _record(value_node, path, file, origins, False)
    elif isinstance(node, yaml.SequenceNode):
        # A list replaces the one it overrides, of whatever length.
        for path in [path for path in origins if path.startswith(f"{prefix}.")]:
            del origins[path]
        for index, item in enumerate(node.value):
            origins[f"{prefix}.{index}"] = f"{file}:{item.start_mark.line + 1}"
            _record(item, f"{prefix}.{index}", file, origins, False)


def _own_problems(file: Path) -> list[Problem]:
    """Wrong keys and types of one file whose `defaults` cannot be followed; what it may inherit is not missed."""
    node = read(file).node
    if node is None:
        return []
    origins: dict[str, str] = {}
    _record(node, "", short(file), origins)
    data = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(data, dict)
    data.pop("defaults", None)
    for path, _ in list(_interpolated(data)):
        _remove(data, path)
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        # A section that says nothing wrong but lacks what its group would have given.
        return [problem for problem in from_validation_error(error, data, origins, {}) if problem.what != "is required"]
    return []


def _checked(name: str, unresolved: Any, origins: Mapping[str, str], found: list[Problem]) -> Recipe:
    """Resolves and validates; all problems are raised together, after those found before."""
    data, written, problems = _resolve(unresolved, origins)
    problems = found + problems
    while True:
        try:
            recipe = Recipe.model_validate(data)
            break
        except ValidationError as error:
            # Without the offending keys the rest can be built, so that rules between keys are checked in one go too.
            known = {problem.path for problem in problems}
            new = from_validation_error(error, data, origins, written)
            problems += [problem for problem in new if problem.path not in known]
            # Backwards, because taking out an entry of a list renumbers those after it.
            removed = [_remove(data, problem.path) for problem in reversed(new)]
            if not all(removed):
                raise RecipeError(name, problems, None, origins) from None
    if problems:
        raise RecipeError(name, problems, recipe, origins)
    return recipe


def _resolve(unresolved: Any, origins: Mapping[str, str]) -> tuple[Any, dict[str, str], list[Problem]]:
    """The values with interpolations filled in, the text of each interpolation, and those that cannot be filled in."""
    data = copy.deepcopy(unresolved)
    written = dict(_interpolated(unresolved))
    problems = []
    # `${batch.seq_len}` means the value that will be used, be it written or the default.
    config = OmegaConf.merge(_defaults(), unresolved) if written else OmegaConf.create()
    for path, text in written.items():
        *parents, last = path.split(".")
        if text == "???":
            problem = Problem(path, "is required: ??? stands for a value to be filled in", origin_of(path, origins))
        else:
            try:
                value = OmegaConf.select(config, path)
                part = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
                parent = _at(data, parents)
                parent[int(last) if isinstance(parent, list) else last] = part
                continue
            except OmegaConfBaseException as error:
                what, hint = _interpolation_error(error)
                problem = Problem(path, what, origin_of(path, origins), text, hint=hint)
        problems.append(problem)
    for problem in problems:
        # An entry of a list stays as it is, so that the numbers of the others remain true.
        if not problem.path.rpartition(".")[2].isdigit():
            _remove(data, problem.path)
    return data, written, problems


def _defaults() -> dict[str, Any]:
    """The defaults of all keys that have one."""

    def of(section: type[Section]) -> dict[str, Any]:
        fields = section.model_fields.items()
        return {key: field.default for key, field in fields if not field.is_required() and key not in sections()}

    return of(Recipe) | {name: of(section) for name, section in sections().items()}


def _interpolated(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and ("${" in value or value == "???"):
            yield below, value
        yield from _interpolated(value, below)


def _interpolation_error(error: Exception) -> tuple[str, str]:
    """What is wrong with an interpolation, and a hint."""
    text = _first_lines(error)
    if "Environment variable" in text:
        name = text.split("'")[1]
        hint = f"export it, or give a default: ${{oc.env:{name},default}}"
        return f"the environment variable {name} is not set", hint
    hint = "write ${section.key} for another value, ${oc.env:NAME} for an environment variable"
    return text[:1].lower() + text[1:], hint


def _at(data: Any, parts: Sequence[str]) -> Any:
    """The part of nested values at a dotted path; None if there is none."""
    for part in parts:
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def _remove(data: Any, path: str) -> bool:
    *parents, last = path.split(".")
    data = _at(data, parents)
    if isinstance(data, list) and last.isdigit() and int(last) < len(data):
        del data[int(last)]
        return True
    return isinstance(data, dict) and data.pop(last, data) is not data


def _overlay(values: Any, written: Any) -> Any:
    """`values` with every text of `written` that holds an interpolation put back in its place."""
    if isinstance(written, str) and "${" in written:
        return written
    if isinstance(values, dict) and isinstance(written, dict):
        return {key: _overlay(value, written.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(written, list) and len(values) == len(written):
        return [_overlay(value, other) for value, other in zip(values, written, strict=True)]
    if isinstance(values, dict) and isinstance(written, str) and "path" in values:
        return _overlay(values, {"path": written})
    return values


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hidden = ("full_key", "object_type", "Set the environment", "Config search path", "provider=")
    return " ".join(line for line in lines if not line.startswith(hidden))
