"""The `defaults` of a recipe, checked before Hydra composes them: what is extended, and which option each group takes.

Hydra stops at the first thing that it cannot find and speaks of its search path. Here all are found, each with its
line and what was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import yaml

from toolkit.recipe.files import NAME, Read, locate, options, read, short
from toolkit.recipe.problems import Problem, did_you_mean
from toolkit.recipe.schema import sections

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
