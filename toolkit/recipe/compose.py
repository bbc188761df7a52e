"""Loads a recipe: composed by Hydra from files and command line, then checked key by key against the schema.

Hydra's compose API is used instead of `@hydra.main` because every rank runs the script, and nothing is ever
instantiated from a recipe. Folders are searched in order: the user's `recipes/` first, then the shipped shelf.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
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

from toolkit.recipe.errors import COMMAND_LINE, Problem, RecipeError, did_you_mean, from_validation_error
from toolkit.recipe.files import NAME, Read, find, locate, options, read, recipe_folders, search_order, short
from toolkit.recipe.overrides import Overrides, parse
from toolkit.recipe.schema import Recipe, sections


class _Folders(SearchPathPlugin):
    """Adds the folders of recipes to Hydra's search path; none but while a recipe is composed."""

    paths: ClassVar[list[Path]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for path in self.paths:
            search_path.append("recipes", f"file://{path}")


Plugins.instance().register(_Folders)


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
        remove(values, key)
        origins = {path: origin for path, origin in origins.items() if path != key and not path.startswith(f"{key}.")}
    return Composed(name, file, values, origins, defaults.choices, changes.problems)


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
        raise RecipeError(name, [Problem("", first_lines(error))]) from None
    finally:
        _Folders.paths = []
    origins: dict[str, str] = {}
    for default in files:
        source = locate(default.config_path, search) if default.config_path else None
        if source in sources and (node := sources[source].node):
            record_origins(node, (default.package or "").removeprefix("_global_").strip("."), short(source), origins)
    for key in changes.values:
        origins = {path: origin for path, origin in origins.items() if not path.startswith(f"{key}.")}
        origins[key] = COMMAND_LINE
    return config, origins


def record_origins(node: yaml.Node, prefix: str, file: str, origins: dict[str, str], top: bool = True) -> None:
    if isinstance(node, yaml.MappingNode):
        # What is merged with `<<` comes first: the keys beside it win.
        for key_node, value_node in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if key_node.value == "<<":
                for part in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    record_origins(part, prefix, file, origins, top)
                continue
            if top and key_node.value == "defaults":
                continue
            path = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
            origins[path] = f"{file}:{key_node.start_mark.line + 1}"
            record_origins(value_node, path, file, origins, False)
    elif isinstance(node, yaml.SequenceNode):
        # A list replaces the one it overrides, of whatever length.
        for path in [path for path in origins if path.startswith(f"{prefix}.")]:
            del origins[path]
        for index, item in enumerate(node.value):
            origins[f"{prefix}.{index}"] = f"{file}:{item.start_mark.line + 1}"
            record_origins(item, f"{prefix}.{index}", file, origins, False)


def _own_problems(file: Path) -> list[Problem]:
    """Wrong keys and types of one file whose `defaults` cannot be followed; what it may inherit is not missed."""
    node = read(file).node
    if node is None:
        return []
    origins: dict[str, str] = {}
    record_origins(node, "", short(file), origins)
    data = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert isinstance(data, dict)
    data.pop("defaults", None)
    for path, _ in list(interpolated(data)):
        remove(data, path)
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        # A section that says nothing wrong but lacks what its group would have given.
        return [problem for problem in from_validation_error(error, data, origins, {}) if problem.what != "is required"]
    return []


def interpolated(values: Any, path: str = "") -> Iterator[tuple[str, str]]:
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, str) and ("${" in value or value == "???"):
            yield below, value
        yield from interpolated(value, below)


def value_at(data: Any, parts: Sequence[str]) -> Any:
    """The part of nested values at a dotted path; None if there is none."""
    for part in parts:
        if isinstance(data, list):
            data = data[int(part)] if part.isdigit() and int(part) < len(data) else None
        else:
            data = data.get(part) if isinstance(data, dict) else None
    return data


def remove(data: Any, path: str) -> bool:
    *parents, last = path.split(".")
    data = value_at(data, parents)
    if isinstance(data, list) and last.isdigit() and int(last) < len(data):
        del data[int(last)]
        return True
    return isinstance(data, dict) and data.pop(last, data) is not data


def first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hidden = ("full_key", "object_type", "Set the environment", "Config search path", "provider=")
    return " ".join(line for line in lines if not line.startswith(hidden))


ENTRY_FORMS = "NAME of a recipe, `GROUP: OPTION`, `override /GROUP: OPTION`, `_self_`"


@dataclass
class Defaults:
    """What the files of a recipe extend and choose.

    Args:
        search: Folders in the order in which names are looked up.
        folders: Folders in which every file must really lie.
        problems: All that was found.
        sources: Every file that was read.
    """

    search: list[Path]
    folders: list[Path]
    problems: list[Problem] = field(default_factory=list)
    sources: dict[Path, Read] = field(default_factory=dict)
    _selected: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    _overridden: dict[str, tuple[str | None, str]] = field(default_factory=dict)

    @property
    def choices(self) -> dict[str, str | None]:
        """Group to option, as the files say."""
        return {group: option for group, (option, _) in {**self._selected, **self._overridden}.items()}

    def follow(self, file: Path) -> None:
        """Walks from a recipe's file through all that it extends."""
        self._extend(file, [])
        for group, (_, place) in self._overridden.items():
            if group not in self._selected:
                what = f"nothing that this recipe extends chooses a `{group}` that could be overridden"
                self._problem("defaults", what, place, hint=f"write `- {group}: …` without override")

    def check_options(self, chosen: Mapping[str, str]) -> None:
        """Checks that the option of every group exists, with those that the command line chose."""
        places = {group: place for group, (_, place) in {**self._selected, **self._overridden}.items()}
        for group, option in {**self.choices, **chosen}.items():
            if option is not None:
                self._option(group, option, places.get(group, ""), [])

    def _extend(self, file: Path, around: list[Path]) -> None:
        source = self._read(file)
        children: list[Path] = []
        for entry in source.entries():
            place = f"{short(file)}:{entry.start_mark.line + 1}"
            if isinstance(entry, yaml.ScalarNode) and entry.value:
                child = self._parent(entry.value.removeprefix("/"), place, [*around, file])
                children += [child] if child else []
            elif not self._choice(entry, place):
                self._problem("defaults", "is not an entry", place, _text(entry), ENTRY_FORMS)
        # Last, so that what this file overrides comes before what its parents override.
        for child in children:
            self._extend(child, [*around, file])

    def _parent(self, name: str, place: str, around: list[Path]) -> Path | None:
        if name == "_self_":
            return None
        if not NAME.fullmatch(name) or "/" in name:
            inside = "recipes of the same folder, of the recipes folder itself, and shipped ones, by their bare name"
            self._problem("defaults", "cannot be extended", place, name, inside)
            return None
        file = locate(name, self.search)
        if file is None:
            known = [file.stem for root in self.search for file in root.glob("*.yaml")]
            close = _group_of(name, self.search) or did_you_mean(name, known)
            hint = f"did you mean `{close}`?" if close else "`toolkit ls` lists all recipes"
            self._problem("defaults", "there is no such recipe", place, name, hint=hint)
        elif file in around:
            hint = "a recipe cannot extend itself; give one of them another name"
            self._problem("defaults", f"leads back to {short(file)}", place, name, hint=hint)
            return None
        return file

    def _choice(self, entry: yaml.Node, place: str) -> bool:
        """Records `group: option`. False if the entry has another form."""
        if not isinstance(entry, yaml.MappingNode) or len(entry.value) != 1:
            return False
        (key, value), *_ = entry.value
        keyword, _, group = key.value.rpartition(" ")
        group = group.removeprefix("/")
        if keyword not in ("", "override") or not isinstance(value, yaml.ScalarNode):
            return False
        option = None if value.tag.endswith(":null") else value.value
        if group not in sections():
            close = did_you_mean(group, sections())
            hint = f"did you mean `{close}`?" if close else ""
            self._problem("defaults", "there is no such group", place, group, ", ".join(sections()), hint)
        elif option is not None and not NAME.fullmatch(option):
            self._problem("defaults", "is not the name of an option", place, option)
        elif keyword == "override":
            self._overridden.setdefault(group, (option, place))
        elif group in self._selected:
            # What this file extends is walked after its own entries: the choice found first is the outer one.
            first, outer = self._selected[group]
            hint = f"write `- override /{group}: {first}`"
            self._problem("defaults", f"`{group}` is chosen in {place} too", outer, f"{group}: {first}", hint=hint)
        else:
            self._selected[group] = (option, place)
        return True

    def _option(self, group: str, option: str, place: str, around: list[Path]) -> None:
        file = locate(f"{group}/{option}", self.search)
        if file is None:
            known = options(group, self.search)
            close = did_you_mean(option, known)
            hint = f"did you mean `{close}`?" if close else ""
            allowed = ", ".join(known) or f"none: there is no folder {group}/ in the recipe folders"
            self._problem("defaults", f"group {group} has no such option", place, option, allowed, hint)
            return
        if file in around:
            self._problem("defaults", f"leads back to {short(file)}", place, option)
            return
        source = self._read(file)
        for entry in source.entries():
            place = f"{short(file)}:{entry.start_mark.line + 1}"
            if not isinstance(entry, yaml.ScalarNode) or not NAME.fullmatch(entry.value):
                self._problem("defaults", "an option extends options of its own group, by name", place, _text(entry))
            elif entry.value != "_self_":
                sibling = (PurePosixPath(option).parent / entry.value).as_posix()
                self._option(group, sibling, place, [*around, file])

    def _read(self, file: Path) -> Read:
        if file not in self.sources:
            self.sources[file] = read(file, self.folders)
            self.problems += self.sources[file].problems
        return self.sources[file]

    def _problem(self, path: str, what: str, place: str, given: str = "", allowed: str = "", hint: str = "") -> None:
        self.problems.append(Problem(path, what, place, given, allowed, hint))


def _group_of(name: str, search: list[Path]) -> str:
    """`GROUP: name` where a group has an option of that name: its group was forgotten."""
    return next((f"{group}: {name}" for group in sections() if locate(f"{group}/{name}", search)), "")


def _text(entry: yaml.Node) -> str:
    if isinstance(entry, yaml.ScalarNode):
        return str(entry.value)
    if isinstance(entry, yaml.MappingNode):
        return ", ".join(f"{_text(key)}: {_text(value)}" for key, value in entry.value)
    return f"[{', '.join(_text(value) for value in entry.value)}]"
