"""Recipe files: the folders they lie in, their names, and reading them so that every slip has a file and a line.

PyYAML's nodes know their lines and OmegaConf reads the values, so a file is read twice. A parser that does both at once
(ruamel.yaml) would be one more dependency, and would read numbers such as `2e-4` differently.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.recipe.dotted import inline
from toolkit.recipe.errors import Origins, RecipeError
from toolkit.recipe.problem import UNKNOWN_KEY, Problem
from toolkit.recipe.schema import sections
from toolkit.recipe.slips import plainly, size, slips
from toolkit.recipe.spelling import did_you_mean

NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*")
EXTENDS = (
    *("extends", "extend", "inherits", "inherit", "inherits_from", "inherit_from", "parent", "parents", "base"),
    *("_base_", "base_recipe", "base_config", "based_on", "from", "include", "includes", "import", "imports"),
)
"""What others call `defaults`."""


def shipped_recipes() -> Path:
    """The folder of shipped recipes: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_folders(folder: str | Path | None = None) -> list[Path]:
    """Folders that are searched, the user's first.

    Args:
        folder: The user's recipes folder; by default `recipes/` of the working folder, if there is one.
    """
    own = Path(folder) if folder else Path("recipes")
    if folder and not own.is_dir():
        hint = "name a folder that exists; `toolkit init --recipes DIR` makes one"
        raise RecipeError("", [Problem("--recipes", "is not a folder", given=str(folder), hint=hint)])
    folders = [own.resolve()] if own.is_dir() else []
    shipped = shipped_recipes().resolve()
    return folders + [shipped] * (shipped not in folders)


def list_recipes(folders: Iterable[Path]) -> dict[str, Path]:
    """Name to file of every recipe. Folders named like a section hold groups, files that start with `_` are parts."""
    recipes: dict[str, Path] = {}
    for root in folders:
        for file in sorted(root.rglob("*.yaml")):
            relative = file.relative_to(root)
            is_group = any(part in sections() for part in relative.parts[:-1])
            if not is_group and not file.name.startswith("_"):
                recipes.setdefault(relative.with_suffix("").as_posix(), file)
    return dict(sorted(recipes.items()))


def find(name: str, folders: list[Path]) -> tuple[str, Path]:
    """The recipe's name and file.

    Args:
        name: A name, or the path of a YAML file inside one of the folders.

    Raises:
        RecipeError: If there is none, or it lies outside the folders.
    """
    if name.endswith((".yaml", ".yml")):
        file = Path(name).absolute()
        if not file.is_file():
            hint = f"write recipe={Path(name).stem} for a recipe of that name"
            raise _unusable(name, "there is no such file", hint=hint)
        if file.suffix != ".yaml":
            raise _unusable(name, "recipe files end in .yaml", hint=f"rename it to {file.stem}.yaml")
        # Links are followed first: what counts is where the file really lies.
        real = _real(file)
        root = next((root for root in folders if real.is_relative_to(root)), None)
        if root is None:
            hint = "move the file into one of these folders, or name its folder with --recipes"
            raise _unusable(name, "lies outside the recipe folders", ", ".join(map(short, folders)), hint)
        return real.relative_to(root).with_suffix("").as_posix(), real
    if not NAME.fullmatch(name):
        names = " ".join(name.split(","))
        hint = f"one command takes one recipe; `toolkit plan --compare {names}` compares them" if "," in name else ""
        raise _unusable(name, "is not a recipe name", "letters, digits, _ - . and / for sub-folders", hint)
    known = list_recipes(folders)
    if name in known:
        if not _inside(known[name], folders):
            raise _unusable(name, f"leads outside the recipe folders, to {_real(known[name])}")
        return name, known[name]
    if any((root / f"{name}.yaml").is_file() for root in folders):
        section, _, option = name.partition("/")
        extend = f"extend it in a recipe: `defaults: {name}`"
        hint = f"write {section}={option} beside a recipe" if section in sections() else extend
        raise _unusable(name, "is a part of recipes, not a recipe", hint=hint)
    if other := next((file for root in folders if (file := root / f"{name}.yml").is_file()), None):
        raise _unusable(name, "recipe files end in .yaml", hint=f"rename {short(other)} to {other.stem}.yaml")
    close = did_you_mean(name, known)
    hint = f"did you mean `{close}`?" if close else "`toolkit ls` lists all recipes"
    raise _unusable(name, "there is no such recipe", f"a recipe in {', '.join(map(short, folders))}", hint)


def _unusable(name: str, what: str, allowed: str = "", hint: str = "") -> RecipeError:
    return RecipeError(name, [Problem("recipe", what, given=name, allowed=allowed, hint=hint)])


def search_order(file: Path, folders: list[Path]) -> list[Path]:
    """Where a recipe looks up names: in the folders, and first beside itself if it lies in none of them directly."""
    return folders if locate(file.stem, folders) == file else list(dict.fromkeys([file.parent, *folders]))


def locate(path: str, search: Iterable[Path]) -> Path | None:
    """The first file that a name such as `_chat` or `model/gpt2` means."""
    # Also a link that leads nowhere, which is said when it is read.
    return next((file for root in search if os.path.lexists(file := root / f"{path}.yaml")), None)


def short(file: Path) -> str:
    """The path as a user would type it: relative to the working folder, or `shipped:…`."""
    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    shipped = shipped_recipes().resolve()
    return f"shipped:{file.relative_to(shipped)}" if file.is_relative_to(shipped) and file != shipped else str(file)


def options(group: str, search: Iterable[Path]) -> list[str]:
    """The options of a group, in all folders."""
    names = {
        file.relative_to(root / group).with_suffix("").as_posix()
        for root in search
        for file in (root / group).rglob("*.yaml")
    }
    return sorted(names)


def _inside(file: Path, folders: Iterable[Path]) -> bool:
    return any(_real(file).is_relative_to(root) for root in folders)


def _real(file: Path) -> Path:
    """Where a file lies, links followed; `Path.resolve` fails on one that leads to itself."""
    return Path(os.path.realpath(file))


@dataclass
class Read:
    """A recipe file as it was read. Where it has problems, the rest is empty."""

    file: Path
    defaults: list[tuple[Any, str]] = field(default_factory=list)
    """The entries of its `defaults`, each with its `file:line`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Keys of the file other than `defaults`, with interpolations unresolved."""
    origins: Origins = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Dotted key to the text of its value, as written (`off` rather than False)."""
    problems: list[Problem] = field(default_factory=list)

    @functools.cached_property
    def name(self) -> str:
        """The file as people are told it."""
        return short(self.file)


def read(file: Path, folders: list[Path] | None = None) -> Read:
    """Reads a recipe, a part or a group option.

    Args:
        folders: Where the file must really lie, links followed; None for a file of a run folder.
    """
    result = Read(file)

    def problem(what: str, line: int | None = None, path: str = "", hint: str = "") -> None:
        place = result.name if line is None else f"{result.name}:{line}"
        result.problems.append(Problem(path, what, place, hint=hint))

    def not_yaml(error: yaml.YAMLError, text: str) -> None:
        # What is not closed, or has no colon, is noticed only behind it.
        begun = re.search("stream|expected ':'", str(getattr(error, "problem", None)))
        mark = getattr(error, "context_mark" if begun else "problem_mark", None)
        position = getattr(error, "position", None)
        line = mark.line if mark else None if position is None else text[:position].count("\n")
        problem(f"is not valid YAML: {plainly(error)}", None if line is None else line + 1, hint="correct that line")

    if folders is not None and not _inside(file, folders):
        problem(f"leads outside the recipe folders, to {_real(file)}", hint="copy the file instead of linking it")
        return result
    if file.is_symlink() and not file.exists():
        problem(f"is a link to {file.readlink()}, where no file is", hint="put that file back, or remove the link")
        return result
    if file.exists() and not file.is_file():
        problem("is no file, but a folder, a pipe or a device", hint="write the recipe into a file")
        return result
    with file.open("rb") as opened:
        content = opened.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        problem(f"is larger than {_LARGEST // 1024} KiB", hint="a recipe names files of data, it does not hold them")
        return result
    try:
        text = content.decode("utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        problem("is not UTF-8 text", content[: error.start].count(b"\n") + 1, hint="save the file as UTF-8")
        return result
    except yaml.YAMLError as error:
        not_yaml(error, text)
        return result
    except RecursionError:
        problem("is nested too deep to be read", hint="look for brackets that are not closed")
        return result
    if node is not None and (count := size(node, {})) > _MOST_VALUES:
        hint = "for many files name their folder, or a pattern such as data/*.jsonl; write out what aliases repeat"
        problem(f"holds {count:.3g} keys and values, aliases written out; {_MOST_VALUES:,} are the most", hint=hint)
        return result
    if not isinstance(node, yaml.MappingNode):
        what = "is empty" if node is None else "must be a mapping of keys"
        # A group option may be empty: it then stands for the section's defaults.
        if node is not None or file.parent.name not in sections():
            problem(what, 1, hint="start with `model:`, or with `defaults:` and the name of a recipe to extend")
        return result
    if re.match(r"#\s*@package\b", text):
        problem("`@package` would move the keys elsewhere", 1, hint="remove this line")
    for place, key, what, hint in slips(node, "", []):
        problem(what, place.start_mark.line + 1, key, hint)
    for key, _ in node.value:
        if key.value == "hydra":
            problem("unknown key: Hydra's own settings are no part of a recipe", key.start_mark.line + 1, "hydra")
    if result.problems:
        return result
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except yaml.YAMLError as error:
        not_yaml(error, text)  # Merge keys (`<<`) are looked at only when values are made.
        return result
    except (OmegaConfBaseException, ValueError) as error:
        problem(first_lines(error))
        return result
    _record(node, "", result)
    entries = next((value for key, value in node.value if key.value == "defaults"), None)
    extended = values.pop("defaults", [])
    if isinstance(entries, yaml.ScalarNode) and entries.value:
        result.defaults = [(extended, result.origins["defaults"])]
    elif isinstance(entries, yaml.SequenceNode):
        lines = [f"{result.name}:{entry.start_mark.line + 1}" for entry in entries.value]
        result.defaults = list(zip(extended, lines, strict=True))
    elif entries is not None:
        hint = "write the name of the recipe to extend, or a list with an entry per line, each after a dash"
        problem("must be a name or a list", entries.start_mark.line + 1, "defaults", hint)
    result.origins = {key: place for key, place in result.origins.items() if key.split(".")[0] != "defaults"}
    for key in [key for key in EXTENDS if key in values]:
        # Said here, as of a wrong `defaults`: then what the recipe would inherit is not missed.
        names = inline(values.pop(key))
        hint = f"write defaults: {re.sub(r'[^ ,[]*/|[.]ya?ml', '', names)}"
        result.problems.append(Problem(key, UNKNOWN_KEY, result.origins.pop(key, ""), names, hint=hint))
    result.values = values
    return result


def _record(node: yaml.Node, path: str, result: Read) -> None:
    """Notes the line of every key below a node, and the texts of the values."""
    if isinstance(node, yaml.MappingNode):
        # What is merged with `<<` comes first: the keys beside it win.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
            if key.value == "<<":
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    _record(part, path, result)
                continue
            below = f"{path}.{key.value}" if path else str(key.value)
            result.origins[below] = f"{result.name}:{key.start_mark.line + 1}"
            _record(value, below, result)
    elif isinstance(node, yaml.SequenceNode):
        forget(path, result.origins)
        for index, item in enumerate(node.value):
            result.origins[f"{path}.{index}"] = f"{result.name}:{item.start_mark.line + 1}"
            _record(item, f"{path}.{index}", result)
    elif path:
        result.texts[path] = node.value


def texts_of(text: str, path: str) -> dict[str, str]:
    """Dotted key to the text of every plain value in a text that is read as the value at `path`; none if it is no YAML.

    Args:
        text: What was typed, e.g. `{learning_rate: 1e-4}`.
        path: A dotted key.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return {}
    result = Read(Path())
    if node is not None:
        _record(node, path, result)
    return result.texts


def forget(path: str, origins: Origins) -> None:
    """Takes out the origins of everything below a dotted path."""
    for key in [key for key in origins if key.startswith(f"{path}.")]:
        del origins[key]


def first_lines(error: Exception) -> str:
    """An exception of OmegaConf's in one line, without its own bookkeeping."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(line for line in lines if not line.startswith(("full_key", "object_type", "Set the environment")))


_LARGEST = 256 * 1024
"""Bytes of a file; shipped recipes have some thousands."""
_MOST_VALUES = 10_000
