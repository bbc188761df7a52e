"""What a person and an editor are shown: values with origins, JSON Schema, the documented keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT
from omegaconf import OmegaConf

from recipes import BASE, write
from toolkit.common import UserError
from toolkit.recipe import Recipe, list_recipes, load, shipped_recipes
from toolkit.recipe.show import description, json_schema, markdown, with_origins, write_diff

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
        (["method=full", "objective=dpo"], "default of dpo"),
        (["method=lora", "objective=grpo"], "default of grpo"),
        # A model that scores learns as fast as one that writes.
        (["method=full", "objective=reward"], "default"),
        (["method=lora", "objective=reward"], "default of adapters"),
    ],
    ids=str,
)
def test_the_learning_rate_says_whose_default_it_is(overrides: list[str], origin: str) -> None:
    (line,) = [line for line in with_origins(load("mine", overrides)).splitlines() if "learning_rate:" in line]
    assert line.endswith(f"  # {origin}")


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [([], 2e-4), (["method=full"], 2e-5), (["objective=dpo", "data.packing=false", "data=pairs.jsonl"], 1e-5)],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_0_6b_lora", "llama_3_1_8b_qlora"])
def test_a_shipped_recipe_with_another_method_or_objective_trains_at_its_rate(
    name: str, overrides: list[str], rate: float
) -> None:
    """DPO at the rate of supervised fine-tuning, twenty times its own, would forget what the model knows."""
    assert load(name, overrides).recipe.optimizer.learning_rate == pytest.approx(rate)


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


def test_a_copy_says_what_differs_and_nothing_else() -> None:
    write("args", BASE + "optimizer: {args: {amsgrad: true}}\ndata: {eval_split: 0.1}\n")
    changes = ["seed=3", "method=qlora", "method.r=4", "schedule.max_steps=5", "~data.eval_split", "precision=bf16"]
    content = yaml.safe_load(write_diff("args", changes, "copy").read_text(encoding="utf-8"))
    assert content.pop("description") == f"args with {' '.join(changes)}"
    assert content.pop("data")["eval_split"] is None
    assert content == {
        "defaults": "args",
        "method": {"option": "qlora", "r": 4},
        "precision": "bf16",
        "schedule": {"max_steps": 5},
        "seed": 3,
    }
    # Other data stand as a word, which leaves their columns behind; a description fills nothing in.
    file = write_diff("args", ["data=rows.jsonl", "output.name=x${seed}"], "team/other")
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == {
        "description": "args with data=rows.jsonl output.name=x{seed}",
        "defaults": "args",
        "data": ["rows.jsonl"],
        "output": {"name": "x${seed}"},
    }
    # A copy of none of it.
    assert yaml.safe_load(write_diff("args", [], "same").read_text(encoding="utf-8")) == {
        "description": "args with no change yet",
        "defaults": "args",
    }


@pytest.mark.parametrize(
    ("parent", "name", "words"),
    [
        *(("mine", name, "cannot name a recipe") for name in ("_part", "a/_part", "method/x", "a b", "../x", "")),
        ("mine", "other", "other.yaml exists already"),
        ("smollm2_135m_full", "smollm2_135m_full", "a recipe named smollm2_135m_full cannot extend smollm2_135m_full"),
        ("mine", "a/mine", "a recipe named mine cannot extend mine"),
        ("team/first", "second", "name the copy team/second"),
        ("team/first", "others/second", "name the copy team/second"),
    ],
)
def test_a_copy_that_cannot_be_is_not_written(parent: str, name: str, words: str, mine: Path) -> None:
    write("team/first", BASE)
    write("other", BASE)
    before = sorted(mine.rglob("*.yaml"))
    with pytest.raises(UserError) as caught:
        write_diff(parent, ["seed=3"], name)
    assert words in f"{caught.value.what}; {caught.value.change}"
    assert sorted(mine.rglob("*.yaml")) == before


def test_a_copy_stands_beside_its_parent_and_takes_no_key_out_of_a_mapping(mine: Path) -> None:
    write("team/first", BASE + "optimizer: {args: {amsgrad: true}}\n")
    assert load(str(write_diff("team/first", ["seed=3"], "team/second"))).recipe.seed == 3
    with pytest.raises(UserError, match="cannot take keys out of one of its mappings"):
        write_diff("team/first", ["~optimizer.args.amsgrad"], "team/third")
    assert not (mine / "recipes" / "team" / "third.yaml").exists()
    assert write_diff("smollm2_135m_full", ["seed=4"], "mine_too", "elsewhere").parent.name == "elsewhere"
    assert load("mine_too", folder="elsewhere").recipe.seed == 4
