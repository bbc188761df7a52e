"""What one file of a recipe states, and how it lies on what others do."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import OmegaConf

from toolkit.recipe.dotted import remove, value_at
from toolkit.recipe.errors import Origins, Problem, as_text
from toolkit.recipe.files import forget
from toolkit.recipe.overrides import OF_MODELS, OF_SOURCES, inherited


@dataclass
class Layer:
    """What one file states."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    """Dotted keys of the layers below that it does away with."""
    others: set[str] = field(default_factory=set)
    """Sections whose main key (`data.sources`, `model.path`) it gives as a word, or in an option that begins here."""
    warnings: list[Problem] = field(default_factory=list)
    """Keys that were written for something else, and stay."""

    def under(self, upper: Layer) -> Layer:
        """This layer merged with the one above it, whose values win. Lists are replaced as a whole."""
        for key in upper.removed:
            self.drop(key)
        if "data" in upper.others:
            self.leave_data(upper.values["data"] or {})
        if "model" in upper.others:
            self.leave_model((upper.values["model"] or {}).get("path"))
        for key in upper.origins:
            if isinstance(value_at(upper.values, key.split(".")), list):
                forget(key, self.origins)
        return Layer(
            plain(OmegaConf.merge(self.values, upper.values)), self.origins | upper.origins, warnings=self.warnings
        )

    def leaves(self) -> dict[str, Any]:
        """Every `section.key` with its value."""
        parts = {name: part for name, part in self.values.items() if isinstance(part, dict)}
        return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.items()}

    def set_main_key(self, section: str, word: dict[str, Any]) -> None:
        """Puts the main key in the place of a section that was given as a word."""
        (main_key,) = word
        self.values[section] = word
        self.others.add(section)
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

    def leave_model(self, path: Any) -> None:
        """Takes out what belongs to the model, because that of another path takes its place."""
        model = self.values.get("model")
        if not isinstance(model, dict) or model.get("path") in (None, path):
            return
        for key in OF_MODELS:
            self.drop(f"model.{key}")
        if template := model.get("chat_template"):
            place = self.origins.get("model.chat_template", "")
            what = f"was written for {model['path']}, and stays"
            hint = "write ~model.chat_template behind the model on the command line, or null in a file, for its own"
            self.warnings.append(Problem("model.chat_template", what, place, as_text(template), hint=hint))

    def leave_to_option(self, section: str) -> None:
        """Takes out data or a model, and what describes them, because an option below has taken their place."""
        stated = self.values.get(section)
        if not isinstance(stated, dict):
            return
        keys = ("path", *OF_MODELS) if section == "model" else ("sources", *OF_SOURCES)
        is_named = section == "data" and isinstance(stated.get("eval_split"), str)
        for key in (*keys, *["eval_split"] * is_named):
            self.drop(f"{section}.{key}")

    def drop(self, key: str) -> None:
        """Takes out a key and what stands below it."""
        remove(self.values, key)
        forget(key, self.origins)
        self.origins.pop(key, None)


def plain(config: Any) -> dict[str, Any]:
    """A configuration of OmegaConf's as nested values."""
    return cast(dict[str, Any], OmegaConf.to_container(config))
