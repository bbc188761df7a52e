"""A recipe of one's own, written as what it changes in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError
from toolkit.recipe.files import NAME, recipe_folders, search_order
from toolkit.recipe.load import Composed, compose_recipe, load
from toolkit.recipe.overrides import parse
from toolkit.recipe.schema import Recipe, sections


def write_diff(parent: str, overrides: Sequence[str], name: str, folder: str | Path | None = None) -> Path:
    """Writes `NAME.yaml`, which extends `parent` and loads to exactly `parent` with the overrides.

    Args:
        parent: Name or path of the recipe to extend.
        overrides: As for `load`.
        name: Name of the new recipe, without `.yaml`.
        folder: The user's recipes folder; by default `recipes/` of the working folder. It is made if need be.

    Raises:
        RecipeError: The parent or the overrides are wrong.
        UserError: The name cannot be used, or the difference cannot be written as a file.
    """
    own = Path(folder or "recipes")
    folder = folder if own.is_dir() else None
    wanted, recipe = compose_recipe(parent, overrides, folder), load(parent, overrides, folder).recipe
    file = own / f"{name}.yaml"
    _check_place(name, file, wanted, recipe_folders(folder))
    chosen = parse(overrides, search_order(wanted.file, recipe_folders(folder))).groups
    base = compose_recipe(parent, [f"{group}={option}" for group, option in chosen.items()], folder)
    values = _changed(wanted.values, base.values, recipe)
    # An interpolation shown here must not be filled in, least of all when cut in two.
    change = " ".join(overrides).replace("${", "{") or "no change yet"
    values.setdefault("description", f"{wanted.name} with {change}"[:100])
    entries = [{f"override /{key}" if key in wanted.choices else key: option} for key, option in chosen.items()]
    content = {
        "description": values.pop("description"),
        # Hydra wants overrides after all else.
        "defaults": [wanted.file.stem, *sorted(entries, key=lambda entry: "override" in next(iter(entry))), "_self_"],
        **values,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
    again = load(name, folder=own).recipe
    if again.model_dump(exclude={"description"}) != recipe.model_dump(exclude={"description"}):
        file.unlink()
        raise UserError(
            "a file that extends a recipe cannot take keys out of one of its mappings",
            f"copy {wanted.file} by hand and edit it; nothing was written",
        )
    return file


def _check_place(name: str, file: Path, parent: Composed, folders: Sequence[Path]) -> None:
    parts = name.split("/")
    if not NAME.fullmatch(name) or parts[-1].startswith("_") or any(part in sections() for part in parts[:-1]):
        allowed = "letters, digits, _ - . and /, no leading _, and no folder named like a section"
        raise UserError(f"{name!r} cannot name a recipe", f"use {allowed}")
    if file.exists():
        raise UserError(f"{file} exists already", "choose another name; nothing was written")
    if parts[-1] == parent.file.stem:
        raise UserError(f"a recipe named {parts[-1]} cannot extend {parent.name}", "choose another name")
    beside = parent.file.parent
    if beside not in folders and file.parent.resolve() != beside:
        place = parent.name.rpartition("/")[0]
        raise UserError(f"{parent.name} can only be extended in its own folder", f"name the copy {place}/{parts[-1]}")


def _changed(wanted: dict[str, Any], base: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Keys whose values differ, by section; a key that was taken out gets its default back."""
    changed: dict[str, Any] = {}
    for key in Recipe.model_fields:
        new, old = wanted.get(key), base.get(key)
        if key not in sections() or isinstance(new, str) or isinstance(old, str):
            if new != old:
                changed[key] = new if key in wanted else getattr(recipe, key)
            continue
        new, old = new or {}, old or {}
        defaults = getattr(recipe, key).model_dump(exclude_unset=False)
        leaves = {leaf: new.get(leaf, defaults[leaf]) for leaf in defaults if new.get(leaf, old) != old.get(leaf, old)}
        if leaves:
            changed[key] = leaves
    return changed
