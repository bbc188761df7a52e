"""The files that rewards follow from: those that a recipe names, and the user's own modules that its Python imports."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from toolkit.common import UserError
from toolkit.recipe.reinforcement import Rewards

_OF_LIBRARIES = {"site-packages", "dist-packages"}
_TOOLKIT = __name__.partition(".")[0]


def file_hashes(rewards: Rewards) -> dict[str, str]:
    """Hashes of the files that scores follow from, by the keys that name them; of modules by their names.

    Raises:
        UserError: One cannot be read.
    """
    schema = rewards.json_schema.schema_file if rewards.json_schema else None
    files = {"rewards.file": rewards.file, "rewards.json_schema.schema_file": schema}
    contents = {key: read(key, path) for key, path in files.items() if path}
    if rewards.file:
        contents |= {f"module {name}": file.read_bytes() for name, file in _modules(Path(rewards.file)).items()}
    return {key: hashlib.sha256(content).hexdigest() for key, content in contents.items()}


def read(key: str, path: str) -> bytes:
    """What is in a file of a recipe's key.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error.strerror}", "correct the path") from None


def _modules(file: Path) -> dict[str, Path]:
    """The files of the modules that a file imports, also by way of each other, by their names in the user's folders.

    Those are where it lies, the working folder and what PYTHONPATH names. Nothing is run for that. What is installed is
    known by its version.
    """
    named = (Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place)
    roots = [file.parent, Path(), *(place for place in named if not _OF_LIBRARIES & {*place.parts})]
    found, waiting, seen = dict[str, Path](), [file], set[Path]()
    while waiting:
        if (each := waiting.pop().resolve()) in seen:
            continue
        seen.add(each)
        for level, parts in _imports(each):
            # `from . import …` begins where the module lies, `from .. import …` above that.
            for root in [each.parents[min(level, len(each.parents)) - 1]] if level else roots:
                new = [place for place in _files(root, parts) if place.is_file()]
                found |= {_name(place, roots): place for place in new}
                waiting += new
    return found


def _imports(file: Path) -> Iterator[tuple[int, list[str]]]:
    """What a file imports: of each how many folders it goes up, and its dotted name, which may end in one of a
    module's names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Running it says why.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, each.name.split(".")) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            yield from ((node.level, [*module, each.name]) for each in node.names)


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """Where a module may lie, with the packages around it."""
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        if parts[0] != _TOOLKIT:
            yield from (Path(f"{place}.py"), place / "__init__.py")


def _name(file: Path, roots: list[Path]) -> str:
    """A module's file, from the user's folder in which it is."""
    places = [root.resolve() for root in roots]
    return min((os.path.relpath(file.resolve(), place) for place in places), key=len)
