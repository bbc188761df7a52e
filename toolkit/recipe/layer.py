"""What one file of a recipe states, and how it lies on what others do."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import OmegaConf

from toolkit.recipe.dotted import remove, value_at
from toolkit.recipe.errors import Origins
from toolkit.recipe.files import forget
from toolkit.recipe.overrides import OF_SOURCES, inherited


@dataclass
class Layer:
    """What one file states."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    """Dotted keys of the layers below that it does away with."""
    other_data: bool = False
    """Whether it gives sources as a word, or is the lowest layer of an option that gives some, see `inherited`."""

    def under(self, upper: Layer) -> Layer:
        """This layer merged with the one above it, whose values win. Lists are replaced as a whole."""
        for key in upper.removed:
            self.drop(key)
        if upper.other_data:
            self.leave_data(upper.values["data"] or {})
        for key in upper.origins:
            if isinstance(value_at(upper.values, key.split(".")), list):
                forget(key, self.origins)
        return Layer(plain(OmegaConf.merge(self.values, upper.values)), self.origins | upper.origins)

    def leaves(self) -> dict[str, Any]:
        """Every `section.key` with its value."""
        parts = {name: part for name, part in self.values.items() if isinstance(part, dict)}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}

    def set_main_key(self, section: str, word: dict[str, Any]) -> None:
        """Puts the main key in the place of a section that was given as a word."""
        (main_key,) = word
        self.values[section] = word
        self.other_data |= section == "data"
        for key in [key for key in self.origins if key.split(".")[0] == section]:
            self.origins[f"{section}.{main_key}{key.removeprefix(section)}"] = self.origins.pop(key)

    def leave_data(self, stated: Container[str]) -> None:
        """Takes out what describes the sources, because others take their place."""
        data = self.values.get("data")
        if not isinstance(data, dict):
            return
        kept = inherited(data, stated)
        for key in data.keys() - kept.keys():
            self.drop(f"data.{key}")
        if kept.get("eval_split") != data.get("eval_split"):
            self.origins["data.eval_split"] = f"in place of {data.get('eval_split') or 'eval_sources'}"
        self.values["data"] = kept

    def forget_sources(self) -> None:
        """Takes out sources, and what describes them, because an option below has taken the place of theirs."""
        data = self.values.get("data")
        if not isinstance(data, dict):
            return
        is_name = isinstance(data.get("eval_split"), str)
        for key in ("sources", *OF_SOURCES, *["eval_split"] * is_name):
            self.drop(f"data.{key}")

    def drop(self, key: str) -> None:
        """Takes out a key and what stands below it."""
        remove(self.values, key)
        forget(key, self.origins)
        self.origins.pop(key, None)


def plain(config: Any) -> dict[str, Any]:
    """A configuration of OmegaConf's as nested values."""
    return cast(dict[str, Any], OmegaConf.to_container(config))
