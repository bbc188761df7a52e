"""What one file of a recipe states, and how it lies on what others do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import OmegaConf

from toolkit.recipe.dotted import remove, value_at
from toolkit.recipe.errors import Origins, Problem, as_text
from toolkit.recipe.files import forget
from toolkit.recipe.schema import sections

OWN_KEYS = {"data": ("format", "columns", "ignore", "eval_sources"), "model": ("tokenizer",)}
"""Section to the keys that describe its sources or its model, and so do not go over to others."""
_HELD_OUT = 0.05
"""Fraction of rows that takes the place of a split's name; what all messages give as an example."""


@dataclass
class Layer:
    """What one file states."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    """Dotted keys of the layers below that it does away with."""
    words: dict[str, Any] = field(default_factory=dict)
    """Section to the value of its main key (`data.sources`, `model.path`), where it was given as a word."""
    left: str = ""
    """What was held out for data that others have taken the place of: the name of a split, or `eval_sources`."""
    warnings: list[Problem] = field(default_factory=list)
    """Keys that were written for something else, and stay."""

    def under(self, upper: Layer) -> Layer:
        """This layer merged with the one above it, whose values win. Lists are replaced as a whole."""
        for key in upper.removed:
            self.drop(key)
        for section, word in upper.words.items():
            self.leave_for(section, word)
        for key in upper.origins:
            if isinstance(value_at(upper.values, key.split(".")), list):
                forget(key, self.origins)
        merged = Layer(plain(OmegaConf.merge(self.values, upper.values)), self.origins | upper.origins)
        merged.left, merged.warnings = upper.left or self.left, self.warnings + upper.warnings
        return merged

    def leaves(self) -> dict[str, Any]:
        """Every `section.key` with its value."""
        parts = {name: part for name, part in self.values.items() if isinstance(part, dict)}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}

    def set_main_key(self, section: str, word: dict[str, Any]) -> None:
        """Puts the main key in the place of a section that was given as a word."""
        (main_key,) = word
        self.values[section] = word
        self.words[section] = word[main_key]
        for key in [key for key in self.origins if key.split(".")[0] == section]:
            self.origins[f"{section}.{main_key}{key.removeprefix(section)}"] = self.origins.pop(key)

    def leave_for(self, section: str, word: Any) -> None:
        """Takes out what was said of data or a model that a word replaces, unless it names the same again."""
        stated = self.values.get(section)
        if section not in OWN_KEYS or not isinstance(stated, dict):
            return
        old = stated.get(sections()[section].main_key)
        # Of sources alone, a word leaves behind also what was said before there were any.
        if not same(old, word) and (old is not None or section == "data"):
            self.leave(section)

    def leave(self, section: str) -> None:
        """Takes out what describes data or a model, because others take their place."""
        stated = self.values.get(section)
        if not isinstance(stated, dict):
            return
        left = left_split(stated) if section == "data" else ""
        self.left = left or self.left
        template, place = stated.get("chat_template"), self.origins.get("model.chat_template", "")
        if section == "model" and template and "path" in stated:
            what = f"was written for {stated['path']}, and stays"
            hint = "write ~model.chat_template behind the model on the command line, or null in a file, for its own"
            self.warnings.append(Problem("model.chat_template", what, place, as_text(template), hint=hint))
        for key in (*OWN_KEYS[section], *["eval_split"] * bool(left)):
            self.drop(f"{section}.{key}")

    def hold_out(self, data: Any) -> list[Problem]:
        """Holds out a fraction of data in place of what they did not inherit, if nothing is said of that for them.

        Returns:
            A warning, because of a stream no fraction can be held out.
        """
        if not self.left or not isinstance(data, dict) or "eval_split" in data or data.get("eval_sources"):
            return []
        if data.get("streaming"):
            what, hint = "nothing is held out: a stream has no share to take", "name a split, or set data.eval_sources"
            place, given = self.origins.get("data.sources", ""), f"in place of {self.left}"
            return [Problem("data.eval_split", what, place, given, hint=hint)]
        data["eval_split"] = _HELD_OUT
        self.origins["data.eval_split"] = f"in place of {self.left}"
        return []

    def drop(self, key: str) -> None:
        """Takes out a key and what stands below it."""
        remove(self.values, key)
        forget(key, self.origins)
        self.origins.pop(key, None)


def same(old: Any, new: Any) -> bool:
    """Whether two values of a main key name the same sources, or the same model."""
    return _entries(old) == _entries(new)


def inherited(data: Mapping[str, Any]) -> dict[str, Any]:
    """What other sources inherit of a data section: they have a form, columns and splits of their own."""
    layer = Layer({"data": dict(data)})
    layer.leave("data")
    return layer.values["data"]


def left_split(data: Mapping[str, Any]) -> str:
    """What is held out for a data section in a way that other sources do not inherit; a fraction they do."""
    split = data.get("eval_split")
    return "" if isinstance(split, float) else str(split or ("eval_sources" if data.get("eval_sources") else ""))


def _entries(main: Any) -> list[Any]:
    entries = main if isinstance(main, list) else [main]
    return [each if isinstance(each, dict) else {"path": each} for each in entries]


def plain(config: Any) -> dict[str, Any]:
    """A configuration of OmegaConf's as nested values."""
    return cast(dict[str, Any], OmegaConf.to_container(config))
