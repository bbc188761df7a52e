"""Puts a recipe together: what it extends, the options it takes, its own keys, the command line, in this order.

Each of these is a layer: values, their lines, and the keys that they do away with. A layer lies on those before it, key
by key; OmegaConf merges and resolves. Hydra's forms of `defaults` are understood, but not composed by Hydra: there a
file cannot do away with a key, replacing an option takes an `override` that knows what the parents chose, and the order
of the result, which origins need, is internal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from toolkit.recipe.dotted import interpolated, remove, value_at
from toolkit.recipe.errors import (
    COMMAND_LINE,
    Origins,
    Problem,
    RecipeError,
    as_text,
    from_validation_error,
)
from toolkit.recipe.files import (
    NAME,
    Read,
    find,
    first_lines,
    forget,
    locate,
    options,
    read,
    recipe_folders,
    search_order,
    short,
)
from toolkit.recipe.layer import OWN_KEYS, Layer, plain, same
from toolkit.recipe.overrides import parse, replaced, section_word
from toolkit.recipe.schema import Recipe, sections
from toolkit.recipe.slips import INTERPOLATION
from toolkit.recipe.spelling import did_you_mean

_ENTRY_FORMS = "NAME of a recipe, `GROUP: OPTION`, `override /GROUP: OPTION`, `_self_`"


@dataclass(frozen=True)
class Composed:
    """A recipe put together from its files and the command line, not yet checked against the schema."""

    name: str
    """The file's path inside the recipes folder, without `.yaml`."""
    file: Path
    values: dict[str, Any]
    """Nested values with interpolations as they stand, defaults not included."""
    origins: Origins
    problems: list[Problem]
    """What is wrong with the command line."""
    texts: dict[str, str]
    """Dotted key to the text of its value, as it was written."""
    warnings: list[Problem]
    """Keys of the file itself that do not count."""


def compose_recipe(name: str, overrides: Sequence[str], folder: str | Path | None = None) -> Composed:
    """Composes a recipe; arguments as for `load`.

    Raises:
        RecipeError: The files do not fit together; with every problem found so far.
    """
    folders = recipe_folders(folder)
    name, file = find(name, folders)
    search = search_order(file, folders)
    changes = parse(overrides, search)
    walk = _Walk(search, folders, {group: _Choice(option) for group, option in changes.groups.items()})
    layers = walk.layers(file)
    if walk.problems:
        raise RecipeError(name, dict.fromkeys([*walk.problems, *changes.problems, *_wrong_keys(walk.own)]))
    try:
        result = functools.reduce(Layer.under, layers, Layer())
    except (OmegaConfBaseException, ValueError) as error:
        what = f"does not fit what it extends: {first_lines(error)}"
        raise RecipeError(name, [Problem("", what, short(file))]) from None
    warnings = walk.overruled(file, result)
    for key in changes.removed:
        result.drop(key)
    if not {"data", "data.eval_split", "data.eval_sources"}.isdisjoint(changes.removed):
        result.left = ""
    for section in sorted(changes.others):
        result.leave_for(section, changes.values.get(f"{section}.{sections()[section].main_key}"))
    config, problems = OmegaConf.create(result.values), list(changes.problems)
    for key, value in changes.values.items():
        try:
            # A mapping is laid on the one that stands there; an empty one takes its place.
            there = OmegaConf.select(config, key, throw_on_resolution_failure=False)
            OmegaConf.update(config, key, value, force_add=True, merge=value != {} and OmegaConf.is_dict(there))
        except (OmegaConfBaseException, ValueError) as error:
            hint = INTERPOLATION if "${" in str(value) else ""
            problems.append(Problem(key, first_lines(error), COMMAND_LINE, hint=hint))
            continue
        for part in [f"{key}.{name}" for name in value] if isinstance(value, dict) and value else [key]:
            forget(part, result.origins)
            result.origins[part] = COMMAND_LINE
        # A plain value of a file around the key gives way to a mapping.
        around = itertools.accumulate(key.split(".")[:-1], "{}.{}".format)
        words = [
            one
            for one in around
            if one in result.origins and not isinstance(value_at(result.values, one.split(".")), dict)
        ]
        result.origins |= dict.fromkeys([*words, key], COMMAND_LINE)
    warnings = [warning for warning in warnings if result.origins.get(warning.path) != COMMAND_LINE]
    warnings += [warning for warning in result.warnings if result.origins.get(warning.path) == warning.where]
    values = plain(config)
    warnings += result.hold_out(values.get("data"))
    return Composed(name, file, values, result.origins, problems, walk.texts(result) | changes.texts, warnings)


@dataclass(frozen=True)
class _Choice:
    """An option and who chose it; without a file it was the command line. The option None leaves the group empty."""

    option: str | None
    place: str = COMMAND_LINE
    file: Path | None = None


@dataclass
class _Walk:
    """Follows a recipe through all that it extends and chooses.

    Of several choices for one group that of the outermost file counts. Its option lies where the innermost file chose,
    below the keys of that file.
    """

    search: list[Path]
    """Folders in the order in which names are looked up."""
    folders: list[Path]
    """Folders in which every file must really lie."""
    choices: dict[str, _Choice]
    """Group to what was chosen for it; to begin with by the command line."""
    problems: list[Problem] = field(default_factory=list)
    """All that is wrong with the files."""
    own: Layer = field(default_factory=Layer)
    """The layer of the recipe's own file."""
    _order: list[Layer | str] = field(default_factory=list)
    _files: dict[Path, Read] = field(default_factory=dict)
    _said: dict[tuple[Path, str], str | dict[str, Any] | None] = field(default_factory=dict)
    """File and group to the option, or the main key with its value, that the file gives it, whether that counts."""
    _old: dict[str, Any] = field(default_factory=dict)
    """Group to the value of its main key before an outer choice, in the files put in order so far."""

    def layers(self, file: Path) -> list[Layer]:
        """The layers of a recipe, the lowest first."""
        self.own = self._extend(file, [])
        result: list[Layer] = []
        for item in [*self._order, *(group for group in self.choices if group not in self._order)]:
            if isinstance(item, Layer):
                result.append(item)
            else:
                result += self._chosen(item)
        return result

    def texts(self, result: Layer) -> dict[str, str]:
        """Dotted key to the text of its value in the file that states it."""
        written = {
            (place, key): read.texts[key]
            for read in self._files.values()
            for key, place in read.origins.items()
            if key in read.texts
        }
        texts: dict[str, str] = {}
        for key, place in result.origins.items():
            section, _, rest = key.partition(".")
            # In a recipe, in an option of its section, or as the section's word.
            word = key.replace(f".{sections()[section].main_key}", "", 1) if section in sections() else key
            found = [written[place, name] for name in (key, rest, word) if (place, name) in written]
            if found:
                texts[key] = found[0]
        return texts

    def overruled(self, file: Path, result: Layer) -> list[Problem]:
        """The keys of the recipe's own file that come out otherwise, because `_self_` does not stand last in it."""
        place = next((place for entry, place in self._files[file].defaults if entry == "_self_"), "")
        problems: list[Problem] = []
        for key, where in self.own.origins.items() if place else ():
            given, counts = (value_at(layer.values, key.split(".")) for layer in (self.own, result))
            if any(key.startswith(f"{problem.path}.") for problem in problems):
                continue  # An entry of a list that is named already.
            if given != counts and not isinstance(given, dict):
                by = f"sets it in {result.origins[key]}" if key in result.origins else "does away with it"
                what = f"does not count: `_self_` stands before what {by}"
                hint = f"move `_self_` to the end of `defaults` ({place}), or remove {key}"
                problems.append(Problem(key, what, where, as_text(given), hint=hint))
        return problems

    def _extend(self, file: Path, around: list[Path]) -> Layer:
        """Puts a recipe file's layers in order, and returns that of its own keys."""
        source = self._read(file)
        own, chosen = self._own_keys(source, around)
        # All choices of this file come before those of its parents, which then give way. What two parents share lies
        # below both, once.
        steps = [self._entry(entry, place, file, around) for entry, place in source.defaults]
        for step in steps if "_self_" in steps else [*steps, "_self_"]:
            if isinstance(step, Path) and step not in self._files:
                self._extend(step, [*around, file])
            elif step == "_self_":
                self._order += [group for group in chosen if group not in self._order]
                self._leave(own, file, around)
                self._order.append(own)
            elif isinstance(step, str) and step not in self._order:
                self._order.append(step)
        return own

    def _own_keys(self, source: Read, around: list[Path]) -> tuple[Layer, list[str]]:
        """What a recipe file itself states, and the groups whose option it chooses."""
        own = Layer(source.values, source.origins)
        chosen: list[str] = []
        for section in sections():
            value, key = own.values.get(section), section
            if value is None or (isinstance(value, dict) and "option" not in value):
                continue
            word: str | dict[str, Any] | None
            if isinstance(value, dict):
                key = f"{section}.option"
                word = source.texts.get(key, as_text(value["option"])) if value["option"] is not None else None
            else:
                word = self._word(section, value, source)
            if isinstance(word, dict) and word and not self._is_outer(self.choices.get(section), around):
                own.set_main_key(section, word)
                continue
            self._said[source.file, section] = word
            place = own.origins[key]
            own.drop(key)
            if not isinstance(word, dict):
                self._choose(section, word, place, source.file, around)
                chosen.append(section)
        own.removed += replaced(own.leaves())
        return own, chosen

    def _word(self, section: str, value: Any, source: Read) -> str | dict[str, Any]:
        """What a section given as a word means; nothing at all if it is wrong."""
        text = source.texts.get(section, as_text(value))
        try:
            return section_word(section, text, value, source.origins[section], self.search)
        except RecipeError as error:
            self.problems += error.problems
            return {}

    def _entry(self, entry: Any, place: str, file: Path, around: list[Path]) -> Path | str | None:
        """What an entry of `defaults` stands for: a file, a group or `_self_`; None if it is wrong."""
        if isinstance(entry, str) and entry:
            return entry if entry == "_self_" else self._parent(entry.removeprefix("/"), place, [*around, file])
        (key, option), *more = entry.items() if isinstance(entry, dict) and entry else [(None, None)]
        keyword, _, group = str(key).rpartition(" ")
        group = group.removeprefix("/")
        if key is None or more or keyword not in ("", "override") or isinstance(option, dict | list):
            self._problem("defaults", "is not an entry", place, as_text(entry), _ENTRY_FORMS)
        elif group not in sections():
            close = did_you_mean(group, sections())
            hint = f"did you mean `{close}`?" if close else ""
            self._problem("defaults", "there is no such group", place, group, ", ".join(sections()), hint)
        else:
            self._choose(group, None if option is None else str(option), place, file, around)
            return group
        return None

    def _parent(self, name: str, place: str, around: list[Path]) -> Path | None:
        bare = name.rpartition("/")[2].removesuffix(".yaml")
        file = locate(name, self.search) if name == bare and NAME.fullmatch(name) else None
        if file in around:
            hint = "a recipe cannot extend itself; give one of them another name"
            self._problem("defaults", f"leads back to {short(file)}", place, name, hint=hint)
            return None
        if file is None:
            known = [file.stem for root in self.search for file in root.glob("*.yaml")]
            close = self._group_of(name) or did_you_mean(bare, known)
            what, hint = "there is no such recipe", f"did you mean `{close}`?" if close else "`toolkit ls` lists all"
            if name != bare:
                what = "cannot be extended: recipes beside it, in the recipes folder and shipped ones can, by bare name"
                hint = f"write `{close}`" if close else "copy it beside this one"
            self._problem("defaults", what, place, name, hint=hint)
        return file

    def _group_of(self, name: str) -> str:
        """`GROUP: name` where a group has an option of that name: its group was forgotten."""
        return next((f"{group}: {name}" for group in sections() if locate(f"{group}/{name}", self.search)), "")

    def _choose(self, group: str, option: str | None, place: str, file: Path, around: list[Path]) -> None:
        first = self.choices.get(group)
        if option is not None and not NAME.fullmatch(option):
            self._problem(group, "is not the name of an option", place, option, ", ".join(options(group, self.search)))
            return
        self._said[file, group] = option
        if first is None:
            self.choices[group] = _Choice(option, place, file)
        elif not self._is_outer(first, around):
            hint = f"write `{group}: {first.option}` in the recipe that extends both"
            hint = "remove one of them" if first.file == file else hint
            self._problem(group, f"is chosen in {first.place} too", place, option or "null", hint=hint)

    def _is_outer(self, choice: _Choice | None, around: list[Path]) -> bool:
        """Whether a choice was made by the command line or one of the files around."""
        return choice is not None and (choice.file is None or choice.file in around)

    def _chosen(self, group: str) -> list[Layer]:
        """The layers of the option that was chosen for a group."""
        choice = self.choices.get(group)
        return self._option(group, choice.option, choice.place, []) if choice and choice.option is not None else []

    def _leave(self, own: Layer, file: Path, around: list[Path]) -> None:
        """Takes out what a file says of data or a model that an outer choice replaces by others."""
        for group in OWN_KEYS:
            choice = self.choices.get(group)
            if choice is None or not self._is_outer(choice, around):
                continue
            main_key = sections()[group].main_key
            stated, said = own.values.get(group), self._said.get((file, group))
            old = stated.get(main_key) if isinstance(stated, dict) else None
            old = old or (next(iter(said.values()), None) if isinstance(said, dict) else self._main_value(group, said))
            self._old[group] = old = old or self._old.get(group)
            new = self._main_value(group, choice.option)
            if old and new and not same(old, new):
                own.leave(group)
                own.drop(f"{group}.{main_key}")

    def _main_value(self, group: str, option: str | None) -> Any:
        """The value that an option gives the main key. It may not be the one that counts, so no problem is reported."""
        layers = _Walk(self.search, self.folders, {group: _Choice(option)})._chosen(group)
        stated = [(layer.values[group] or {}).get(sections()[group].main_key) for layer in layers]
        return next((value for value in reversed(stated) if value), None)

    def _option(self, group: str, option: str, place: str, around: list[Path]) -> list[Layer]:
        """The layers of an option: those that it extends, then its own."""
        file = locate(f"{group}/{option}", self.search)
        if file is None:
            known = options(group, self.search)
            close = did_you_mean(option, known)
            hint = f"did you mean `{close}`?" if close else ""
            allowed = ", ".join(known) or f"none: there is no folder {group}/ in the recipe folders"
            self._problem(group, "there is no such option", place, option, allowed, hint)
            return []
        if file in around:
            self._problem(group, f"leads back to {short(file)}", place, option)
            return []
        source = self._read(file)
        own = Layer({group: source.values}, {f"{group}.{key}": line for key, line in source.origins.items()})
        own.removed += replaced(own.leaves())
        layers: list[Layer] = []
        for entry, where in source.defaults:
            if entry == "_self_":
                layers.append(own)
            elif not isinstance(entry, str) or not NAME.fullmatch(entry):
                self._problem("defaults", "an option extends options of its own group, by name", where, as_text(entry))
            else:
                sibling = (PurePosixPath(option).parent / entry).as_posix()
                layers += self._option(group, sibling, where, [*around, file])
        return layers if any(entry == "_self_" for entry, _ in source.defaults) else [*layers, own]

    def _read(self, file: Path) -> Read:
        if file not in self._files:
            self._files[file] = read(file, self.folders)
            self.problems += self._files[file].problems
        return self._files[file]

    def _problem(self, path: str, what: str, place: str, given: str = "", allowed: str = "", hint: str = "") -> None:
        self.problems.append(Problem(path, what, place, given, allowed, hint))


def _wrong_keys(layer: Layer) -> list[Problem]:
    """Wrong keys and types of a file whose `defaults` cannot be followed; what it may inherit is not missed."""
    # Backwards, because taking out an entry of a list renumbers those after it.
    for path, _ in reversed(list(interpolated(layer.values))):
        remove(layer.values, path)
    try:
        Recipe.model_validate(layer.values)
    except ValidationError as error:
        problems = from_validation_error(error, layer.values, layer.origins, {}, {})
        # A section that says nothing wrong but lacks what its group would have given.
        return [problem for problem in problems if problem.what != "is required"]
    return []
