"""Finds a recipe, composes it with Hydra, applies `key=value` overrides and checks every key and type.

Hydra's compose API is used instead of `@hydra.main` because every rank runs the script, and nothing is ever
instantiated from a recipe. Folders are searched in order: the user's `recipes/` first, then the shipped shelf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from toolkit.recipe.problems import (
    COMMAND_LINE,
    Problem,
    RecipeError,
    did_you_mean,
    from_validation_error,
    origin_of,
)
from toolkit.recipe.schema import Recipe, leaf_paths, sections

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*")


@dataclass(frozen=True)
class Loaded:
    """A recipe that passed the schema.

    Args:
        recipe: The typed recipe, interpolations resolved.
        name: Its name: the file's path inside the recipes folder, without `.yaml`.
        file: Its file.
        origins: Dotted key to `file:line` or `command line`, for every value that is not a default.
        unresolved: What was written, with interpolations such as `${oc.env:NAME}` as they stand.
    """

    recipe: Recipe
    name: str
    file: Path
    origins: dict[str, str]
    unresolved: dict[str, Any]

    def to_yaml(self) -> str:
        """The whole recipe, defaults included; values that came from the environment stay unresolved."""
        return yaml.safe_dump(
            _overlay(self.recipe.model_dump(), self.unresolved), sort_keys=False, allow_unicode=True, width=120
        )


def shipped_recipes() -> Path:
    """The shelf: inside the installed package, or beside it in a checkout."""
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
        raise RecipeError("?", [Problem("--recipes", "is not a folder", given=str(folder))])
    folders = [own.resolve()] if own.is_dir() else []
    shipped = shipped_recipes().resolve()
    return folders + [shipped] * (shipped not in folders)


def list_recipes(folders: Iterable[Path]) -> dict[str, Path]:
    """Name to file of every recipe. Folders named like a section hold groups, and files that start with `_` are parts."""
    found: dict[str, Path] = {}
    for root in folders:
        for file in sorted(root.rglob("*.yaml")):
            relative = file.relative_to(root)
            is_group = any(part in sections() for part in relative.parts[:-1])
            if not is_group and not file.name.startswith("_"):
                found.setdefault(relative.with_suffix("").as_posix(), file)
    return dict(sorted(found.items()))


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Splits `recipe=NAME key=value …` into the name and the overrides."""
    names = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    if len(names) != 1 or not names[0]:
        raise RecipeError("?", [Problem("recipe", "name one recipe", hint="recipe=NAME; `toolkit ls` lists them")])
    return names[0], [argument for argument in arguments if not argument.startswith("recipe=")]


def load(name: str, overrides: Sequence[str] = (), folder: str | Path | None = None) -> Loaded:
    """Composes and checks a recipe.

    Args:
        name: Its name, or the path of a YAML file inside one of the recipe folders.
        overrides: `key=value` texts in Hydra's grammar. `section=option` picks a group, `section=value` sets the
            section's main key, and a key that stands in one section only may be written without it.
        folder: The user's recipes folder, see `recipe_folders`.

    Raises:
        RecipeError: With every problem found.
    """
    folders = recipe_folders(folder)
    name, file, root = _find(name, folders)
    _check_yaml(name, file)
    search = [root, *folders]
    searchpath = f"hydra.searchpath=[{','.join(f'file://{path}' for path in search[1:])}]"
    try:
        with initialize_config_dir(str(root), version_base="1.3", job_name="toolkit"):
            loader = GlobalHydra.instance().hydra.config_loader  # type: ignore[union-attr]
            plain = loader.compute_defaults_list(file.stem, [searchpath], RunMode.RUN)
            rewritten = _rewrite(name, overrides, search, plain.overrides.known_choices)
            arguments = [searchpath, *rewritten]
            final = loader.compute_defaults_list(file.stem, arguments, RunMode.RUN).defaults
            config = compose(file.stem, arguments)
    except RecipeError:
        raise
    except yaml.YAMLError as error:
        raise RecipeError(name, [_yaml_problem(error)]) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError(name, [Problem("", _first_lines(error))]) from None
    origins = _origins(name, final, search, rewritten)
    unresolved = OmegaConf.to_container(config, resolve=False)
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        path = str(getattr(error, "full_key", "") or "")
        raise RecipeError(name, [Problem(path, _first_lines(error), origin_of(path, origins))]) from None
    recipe = _validate(name, resolved, origins)
    return Loaded(recipe, name, file, origins, unresolved)  # type: ignore[arg-type]


def _find(name: str, folders: list[Path]) -> tuple[str, Path, Path]:
    """The recipe's name, its file, and the folder Hydra takes as the root of its config."""
    if name.endswith((".yaml", ".yml")):
        file = Path(name).resolve()
        inside = [root for root in folders if file.is_relative_to(root)]
        if not inside:
            places = ", ".join(map(str, folders))
            hint = "move the file into one of these folders, or name its folder with --recipes"
            raise RecipeError(name, [Problem("recipe", "lies outside the recipe folders", "", name, places, hint)])
        if not file.is_file():
            raise RecipeError(name, [Problem("recipe", "no such file", given=name)])
        return file.relative_to(inside[0]).with_suffix("").as_posix(), file, file.parent
    if not _NAME.fullmatch(name) or ".." in name:
        raise RecipeError(name, [Problem("recipe", "is not a recipe name", given=name, allowed="letters, digits, _ - . /")])
    known = list_recipes(folders)
    if name not in known:
        close = did_you_mean(name, known)
        hint = f"did you mean `{close}`?" if close else "`toolkit ls` lists all recipes"
        searched = ", ".join(map(str, folders))
        raise RecipeError(name, [Problem("recipe", "no such recipe", given=name, allowed=f"a recipe in {searched}", hint=hint)])
    return name, known[name], known[name].parent


def _check_yaml(name: str, file: Path) -> None:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RecipeError(name, [_yaml_problem(error, file)]) from None
    except UnicodeDecodeError as error:
        raise RecipeError(name, [Problem("", f"is not UTF-8 text: {error.reason}", str(file))]) from None
    if not isinstance(content, dict):
        raise RecipeError(name, [Problem("", "must be a mapping of keys", f"{_short(file)}:1", hint="start with `model:`")])


def _yaml_problem(error: yaml.YAMLError, file: Path | None = None) -> Problem:
    mark = getattr(error, "problem_mark", None)
    place = _short(file) if file else str(getattr(mark, "name", "")).strip('"')
    where = f"{place}:{mark.line + 1}" if mark else place
    return Problem("", f"is not valid YAML: {getattr(error, 'problem', None) or error}", where)


def _rewrite(name: str, overrides: Sequence[str], search: list[Path], choices: dict[str, Any]) -> list[str]:
    """Overrides as Hydra wants them: pydantic, not Hydra, decides which keys exist, so all keys are forced in."""
    rewritten, problems = [], []
    short = {key: paths[0] for key, paths in leaf_paths().items() if len(paths) == 1}
    for override in overrides:
        try:
            parsed = OverridesParser.create().parse_override(override)
        except HydraException as error:
            hint = "quote values with spaces, commas or brackets: key='\"a, b\"'"
            problems.append(Problem(override, _first_lines(error), COMMAND_LINE, allowed="key=value", hint=hint))
            continue
        key, text = override.lstrip("+~").split("=", 1) if "=" in override else (override.lstrip("+~"), "")
        if parsed.is_delete():
            rewritten.append(override)
        elif parsed.is_sweep_override():
            problems.append(Problem(key, "a recipe takes one value", COMMAND_LINE, text, hint=f"for a list: {key}=[{text}]"))
        elif key.startswith("hydra"):
            problems.append(Problem(key, "Hydra's own settings are not part of a recipe", COMMAND_LINE, text))
        elif key in sections() and _is_option(key, text, search):
            rewritten.append(f"{key}={text}" if key in choices else f"+{key}={text}")
        elif key in sections() and not text.startswith("{"):
            main_key = sections()[key].main_key
            if main_key is None:
                allowed = ", ".join(f"{key}.{field}" for field in sections()[key].model_fields)
                problems.append(Problem(key, "is a section", COMMAND_LINE, text, allowed))
            else:
                value = f"[{text}]" if key == "data" and not text.startswith("[") else text
                rewritten.append(f"++{key}.{main_key}={value}")
        else:
            rewritten.append(f"++{short.get(key, key)}={text}")
    if problems:
        raise RecipeError(name, problems)
    return rewritten


def _is_option(group: str, option: str, search: list[Path]) -> bool:
    return bool(_NAME.fullmatch(option)) and any((root / group / f"{option}.yaml").is_file() for root in search)


def _origins(name: str, defaults: Sequence[Any], search: list[Path], overrides: Sequence[str]) -> dict[str, str]:
    """Dotted key to where its final value was written, following Hydra's order of composition."""
    origins: dict[str, str] = {}
    for default in defaults:
        if default.config_path is None or default.config_path.startswith(("hydra", "_dummy")):
            continue
        candidates = [root / f"{default.config_path}.yaml" for root in search]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            continue
        if not any(file.resolve().is_relative_to(root) for root in search):
            raise RecipeError(name, [Problem("defaults", "lead outside the recipe folders", given=default.config_path)])
        package = (default.package or "").removeprefix("_global_").strip(".")
        node = yaml.compose(file.read_text(encoding="utf-8"))
        if isinstance(node, yaml.MappingNode):
            _record(node, package, _short(file), origins)
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if override.startswith("++"):
            origins = {path: origin for path, origin in origins.items() if not path.startswith(f"{key}.")}
            origins[key] = COMMAND_LINE
    return origins


def _record(node: yaml.Node, prefix: str, file: str, origins: dict[str, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key == "defaults" and not prefix:
                continue
            path = f"{prefix}.{key}" if prefix else key
            origins[path] = f"{file}:{key_node.start_mark.line + 1}"
            _record(value_node, path, file, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            origins[f"{prefix}.{index}"] = f"{file}:{item.start_mark.line + 1}"
            _record(item, f"{prefix}.{index}", file, origins)


def _validate(name: str, data: Any, origins: dict[str, str]) -> Recipe:
    problems: list[Problem] = []
    while True:
        try:
            recipe = Recipe.model_validate(data)
            break
        except ValidationError as error:
            found = from_validation_error(error, data, origins)
            problems += found
            # Without the offending keys the rest can be built, so that rules between keys are checked in one go too.
            if not all([_remove(data, problem.path) for problem in found]):
                raise RecipeError(name, problems, None, origins) from None
    if problems:
        raise RecipeError(name, problems, recipe, origins)
    return recipe


def _remove(data: Any, path: str) -> bool:
    *parents, last = path.split(".")
    for part in parents:
        data = data[int(part)] if isinstance(data, list) else data.get(part) if isinstance(data, dict) else None
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
    return " ".join(line for line in lines if not line.startswith(("full_key", "object_type", "Set the environment")))


def _short(file: Path) -> str:
    """The path as a user would type it: relative to the working folder when it lies inside."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def load_resolved(file: Path) -> Recipe:
    """The recipe of a run folder, as it was written when the run started.

    Raises:
        RecipeError: If the file does not fit this version's schema.
    """
    name = str(file)
    _check_yaml(name, file)
    try:
        data = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except OmegaConfBaseException as error:
        raise RecipeError(name, [Problem("", _first_lines(error), name)]) from None
    return _validate(name, data, {})


def as_diff(name: str, overrides: Sequence[str], folder: str | Path | None = None) -> tuple[dict[str, str], dict[str, Any]]:
    """What overrides change in a recipe: the groups they select, and the values they set as a nested mapping."""
    folders = recipe_folders(folder)
    _, file, root = _find(name, folders)
    groups: dict[str, str] = {}
    values = OmegaConf.create({})
    for override in _rewrite(name, overrides, [root, *folders], {}):
        key, _, text = override.lstrip("+").partition("=")
        if override.startswith("++"):
            OmegaConf.update(values, key, OverridesParser.create().parse_override(f"{key}={text}").value())
        else:
            groups[key] = text
    return groups, OmegaConf.to_container(values)  # type: ignore[return-value]
