"""What a person and an editor are shown: values with origins, JSON Schema, the documented keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from harness import ROOT
from omegaconf import OmegaConf

from recipes import BASE, write
from toolkit.recipe import Recipe, list_recipes, load, shipped_recipes
from toolkit.recipe.show import description, json_schema, markdown, with_origins

pytestmark = pytest.mark.usefixtures("mine")


def test_shown_recipe_is_yaml_with_the_same_values_and_an_origin_on_every_line() -> None:
    loaded = load("mine", ["seq_len=64", "data=[a, {path: b, weight: 2}]"])
    text = with_origins(loaded)
    assert Recipe.model_validate(yaml.safe_load(text)) == loaded.recipe
    lines = [line for line in text.splitlines() if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in lines)
    (line,) = [line for line in lines if "seq_len" in line]
    assert line.endswith("# command line")


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (["method=full"], "default"),
        (["method=lora"], "default of adapters"),
        (["method=lora", "learning_rate=1e-3"], "command line"),
    ],
    ids=str,
)
def test_the_learning_rate_says_whose_default_it_is(overrides: list[str], origin: str) -> None:
    (line,) = [line for line in with_origins(load("mine", overrides)).splitlines() if "learning_rate:" in line]
    assert line.endswith(f"  # {origin}")


def test_origins_stand_below_each_other_unless_a_value_is_long() -> None:
    lines = with_origins(load("mine", [f"description={'x' * 80}"])).splitlines()
    assert lines[0] == f"description: {'x' * 80}  # command line"
    assert {line.index("  # ") for line in lines[1:] if "  # " in line} == {60}


def test_value_inside_a_mapping_of_the_command_line_has_its_origin() -> None:
    text = with_origins(load("mine", ["data={packing: true}", "optimizer.args={nesterov: true}"]))
    origins = {line.split(":")[0].strip(): line.partition("  # ")[2] for line in text.splitlines()}
    assert origins["packing"] == origins["nesterov"] == "command line"
    assert origins["shuffle"] == "default"


def test_a_file_describes_itself_or_is_not_described() -> None:
    assert description(write("described", "description: >\n  Two\n  lines.\n" + BASE)) == "Two lines."
    for content in (BASE, "description:\n" + BASE, "[a]", "a: [", ""):
        assert description(write("plain", content)) == ""


def test_generated_files_are_current() -> None:
    stored = json.loads((ROOT / "recipes" / "schema.json").read_text(encoding="utf-8"))
    assert stored == json_schema(), "run: toolkit schema --output recipes/schema.json"
    intro, marker, keys = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("-->\n\n")
    assert "toolkit schema --markdown" in intro and marker
    assert keys == markdown(), "replace what follows the marker with the output of: toolkit schema --markdown"


def test_every_key_is_documented() -> None:
    text = markdown()
    for line in text.splitlines():
        if line.startswith("| `"):
            assert len(line.split(" | ")) >= 4 and not line.endswith("|  |"), line
    schema = json_schema()
    for definition in schema["$defs"].values():
        for key, entry in definition["properties"].items():
            assert entry.get("description") or "$ref" in entry, key
            assert f"| `{key}` |" in text or key == "option"


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether a value fits a JSON Schema, as far as the keywords go that an editor's first underline comes from."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(fits(value, one, root) for one in schema["anyOf"])
    if value not in schema.get("enum", [value]):
        return False
    if isinstance(value, dict) and schema.get("type", "object") == "object":
        known, closed = schema.get("properties", {}), schema.get("additionalProperties") is False
        return all(fits(part, known[key], root) if key in known else not closed for key, part in value.items())
    if isinstance(value, list) and schema.get("type") == "array":
        return all(fits(item, schema.get("items", {}), root) for item in value)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return schema.get("type") == names.get(type(value)) or (type(value) is int and schema.get("type") == "number")


def test_schema_takes_every_shipped_recipe_and_every_form_of_a_section() -> None:
    schema = json_schema()
    for name, file in list_recipes([shipped_recipes()]).items():
        assert fits(OmegaConf.to_container(OmegaConf.load(file)), schema, schema), name
    for model in ("gpt2", {"option": "gpt2"}, {"path": "x", "dtype": "bf16"}, {"option": "gpt2", "revision": "main"}):
        assert fits({"model": model, "data": ["a", {"path": "b"}], "batch": 8, "defaults": "x"}, schema, schema)
    for wrong in ({"model": 5}, {"model": {"options": "gpt2"}}, {"data": [5]}, {"checkpoint": 5}, {"defaults": 5}):
        assert not fits(wrong, schema, schema), wrong
