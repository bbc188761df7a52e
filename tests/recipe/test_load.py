"""Loading a recipe: composition, overrides, origins, and files outside the folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from toolkit.recipe import Loaded, RecipeError, list_recipes, load, recipe_folders, shipped_recipes
from toolkit.recipe.load import load_resolved
from toolkit.recipe.show import json_schema, markdown, with_origins

ROOT = Path(__file__).resolve().parents[2]
BASE = "defaults: [{model: smollm2_135m_builtin}, {data: stdlib_docstrings}, _self_]\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `mine`."""
    monkeypatch.chdir(tmp_path)
    write("mine", BASE)
    return tmp_path


def write(name: str, text: str, root: str = "recipes") -> Path:
    file = Path(root) / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def values(loaded: Loaded, *paths: str) -> list[Any]:
    found = []
    for path in paths:
        value: Any = loaded.recipe
        for part in path.split("."):
            value = getattr(value, part)
        found.append(value)
    return found


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["batch.seq_len=512"], "batch.seq_len", 512),
        (["seq_len=512"], "batch.seq_len", 512),
        (["max_steps=5"], "schedule.max_steps", 5),
        (["seq_len=512", "batch.seq_len=256"], "batch.seq_len", 256),
        (["batch.seq_len=256", "seq_len=512"], "batch.seq_len", 512),
        (["learning_rate=1e-4"], "optimizer.learning_rate", 1e-4),
        (["learning_rate=1E-4"], "optimizer.learning_rate", 1e-4),
        (["optimizer=sgd"], "optimizer.name", "sgd"),
        (["batch=8"], "batch.global_batch_size", 8),
        (["method=qlora"], "method.quantization", "nf4"),
        (["method.option=qlora"], "method.quantization", "nf4"),
        (["method={option: qlora, r: 4}"], "method.quantization", "nf4"),
        (["+method=qlora"], "method.quantization", "nf4"),
        (["model=gpt2"], "model.path", "openai-community/gpt2"),
        (["model=./folder"], "model.path", "./folder"),
        (["model=./folder", "model=gpt2"], "model.path", "openai-community/gpt2"),
        (["model=someone/thing-1.5B"], "model.path", "someone/thing-1.5B"),
        (["model=/home/josé/my model"], "model.path", "/home/josé/my model"),
        (["model={path: x, dtype: bf16}"], "model.dtype", "bf16"),
        (["optimizer={name: sgd, momentum: 0.8}"], "optimizer.momentum", 0.8),
        (["optimizer.args={nesterov: true}"], "optimizer.args", {"nesterov": True}),
        (["optimizer.args.nesterov=true"], "optimizer.args", {"nesterov": True}),
        (["columns.prompt=question"], "data.columns", {"prompt": "question"}),
        (["data.eval_split=null"], "data.eval_split", None),
        (["~data.eval_split"], "data.eval_split", None),
        (["~optimizer.learning_rate"], "optimizer.learning_rate", 2e-5),
        (["seed=7", "~seed"], "seed", 42),
        (["~seed", "seed=7"], "seed", 7),
        (["method=qlora", "~method"], "method.name", "full"),
        (["~method", "method=qlora"], "method.name", "lora"),
        (["++seed=6"], "seed", 6),
        (["target_modules=[q_proj,v_proj]"], "method.target_modules", ["q_proj", "v_proj"]),
        (["prompts=['a, b',c]"], "evaluation.prompts", ["a, b", "c"]),
        (["description=a b"], "description", "a b"),
        (["description=it's a=b #1 é中"], "description", "it's a=b #1 é中"),
        (["description='x, [y]'"], "description", "x, [y]"),
        (['description="x, {y}"'], "description", "x, {y}"),
        (["description=back\\slash é\\"], "description", "back\\slash é\\"),
        (["seed=${batch.seq_len}"], "seed", 2048),
        (["output.dir=~/runs"], "output.dir", "~/runs"),
    ],
)
def test_override(overrides: list[str], path: str, value: Any) -> None:
    loaded = load("mine", overrides)
    assert values(loaded, path) == [value]
    # What a run folder keeps says the same.
    assert load_resolved(write("kept", loaded.to_yaml(), "runs")) == loaded.recipe


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        ("data=a.jsonl", ["a.jsonl"]),
        ("data=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data=my rows/é.jsonl", ["my rows/é.jsonl"]),
        ("data=rows/*.jsonl", ["rows/*.jsonl"]),
        ("data=[{path: a, weight: 2.0},b]", ["a", "b"]),
        ("data.sources=[a]", ["a"]),
        ("data=alpaca", ["tatsu-lab/alpaca"]),
    ],
)
def test_data_of_the_command_line(override: str, paths: list[str]) -> None:
    assert [source.path for source in load("mine", [override]).recipe.data.sources] == paths


def test_own_groups_mix_with_shipped_ones_and_extend_them() -> None:
    write("data/support", "sources: [support.jsonl]\n")
    write("data/small_alpaca", "defaults: [alpaca]\nmax_samples: 5\n")
    write("data/team/nested", "sources: [nested.jsonl]\n")
    write("new", "model: qwen3_0_6b\ndata: support\nmethod: qlora\n")
    assert load("new").recipe.data.sources[0].path == "support.jsonl"
    assert load("new").recipe.method.quantization == "nf4"
    assert values(load("mine", ["data=small_alpaca"]), "data.max_samples", "data.format") == [5, "alpaca"]
    assert load("mine", ["data=team/nested"]).recipe.data.sources[0].path == "nested.jsonl"


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ("model: gpt2", "model.path", "openai-community/gpt2"),
        ("model: ./folder", "model.path", "./folder"),
        ("model: someone/thing-1.5B", "model.path", "someone/thing-1.5B"),
        ("model: '${oc.env:HOME}'", "model.path", str(Path.home())),
        ("method: qlora", "method.quantization", "nf4"),
        ("method: {option: qlora, r: 4}", "method.quantization", "nf4"),
        ("method: {r: 4, option: qlora}", "method.r", 4),
        ("method: {option: null, r: 4}", "method.name", "full"),
        ("strategy: zero3_offload", "strategy.offload_param", "cpu"),
        ("optimizer: sgd", "optimizer.name", "sgd"),
        ("batch: 8", "batch.global_batch_size", 8),
        ("evaluation: off", "evaluation.num_prompts", 0),
        ("data: {option: alpaca, max_samples: 5}", "data.format", "alpaca"),
    ],
)
def test_section_given_as_a_word(word: str, path: str, value: Any) -> None:
    write("evaluation/off", "num_prompts: 0\n")
    write("worded", f"defaults: mine\n{word}\n")
    assert values(load("worded"), path) == [value]


@pytest.mark.parametrize(
    ("word", "paths"),
    [
        ("a.jsonl", ["a.jsonl"]),
        ("[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("[{path: a, weight: 2}, b]", ["a", "b"]),
        ("alpaca", ["tatsu-lab/alpaca"]),
    ],
)
def test_data_given_as_a_word(word: str, paths: list[str]) -> None:
    write("worded", f"model: gpt2\ndata: {word}\n")
    assert [source.path for source in load("worded").recipe.data.sources] == paths


def test_word_takes_the_place_of_what_the_parent_chose_and_keeps_what_the_parent_wrote() -> None:
    write("parent", "model: gpt2\ndata: {option: prosocial_dialog, over_long: drop}\nstrategy: zero3_offload\n")
    write("child", "defaults: parent\ndata: alpaca\nstrategy: zero2\n")
    write("grandchild", "defaults: [child]\ndata: rows.jsonl\n")
    write("again", "defaults: grandchild\ndata: alpaca\n")
    child, grandchild = load("child").recipe, load("grandchild").recipe
    assert (child.data.format, child.data.columns, child.data.over_long) == ("alpaca", {}, "drop")
    assert (child.strategy.name, child.strategy.offload_param) == ("zero2", "none")
    # Other data have a form and columns of their own, as with `data=rows.jsonl`.
    assert grandchild == load("child", ["data=rows.jsonl"]).recipe
    assert (grandchild.data.format, grandchild.data.eval_split) == ("auto", 0.01)
    assert load("again").recipe == child == load("grandchild", ["data=alpaca"]).recipe


def test_child_replaces_what_says_the_same_in_another_way() -> None:
    write("parent", BASE + "schedule: {num_epochs: 3, warmup_ratio: 0.1}\nbatch: {tokens_per_step: 8192}\n")
    write("child", "defaults: parent\nschedule: {max_steps: 5}\nbatch: 8\n")
    recipe = load("child").recipe
    assert (recipe.schedule.max_steps, recipe.schedule.num_epochs, recipe.schedule.warmup_ratio) == (5, None, 0.1)
    assert (recipe.batch.global_batch_size, recipe.batch.tokens_per_step) == (8, None)


def test_forms_of_hydra_mean_the_same() -> None:
    write("word", "defaults: smollm2_135m_lora\nmethod: qlora\nseed: 3\n")
    write("list", "defaults: [smollm2_135m_lora, {override /method: qlora}, _self_]\nseed: 3\n")
    write("plain", "defaults: [/smollm2_135m_lora, {/method: qlora}]\nseed: 3\n")
    write("first", "seed: 3\ndefaults:\n  - _self_\n  - smollm2_135m_lora\n  - method: qlora\n")
    assert load("word").recipe == load("list").recipe == load("plain").recipe == load("first").recipe


def test_own_keys_below_what_the_file_extends() -> None:
    write("under", "defaults: [_self_, {method: lora}]\nmethod: {r: 4, name: full}\n")
    write("whole", "defaults: [mine, under]\n")
    assert values(load("whole"), "method.name", "method.r") == ["lora", 4]


def test_own_keys_win_over_what_a_recipe_extends_with_and_without_self(recwarn: pytest.WarningsRecorder) -> None:
    write("with", "defaults: [smollm2_135m_lora_demo, _self_]\nseed: 3\n")
    write("without", "defaults: [smollm2_135m_lora_demo]\nseed: 3\n")
    assert load("with").recipe.seed == load("without").recipe.seed == 3
    assert not recwarn


def test_own_file_takes_the_place_of_a_shipped_one() -> None:
    write("method/lora", "name: lora\nr: 64\n")
    write("smollm2_135m_full", BASE + "description: mine now\n")
    assert load("smollm2_135m_lora_demo").recipe.method.r == 64
    assert load("smollm2_135m_full").recipe.description == "mine now"
    assert list_recipes(recipe_folders())["smollm2_135m_full"] == Path("recipes/smollm2_135m_full.yaml").resolve()


def test_recipe_in_a_sub_folder_extends_its_neighbours_its_folder_and_shipped_ones() -> None:
    write("team/first", "defaults: [mine]\nseed: 1\n")
    write("team/second", "defaults: [first]\nbatch: {seq_len: 64}\n")
    write("team/third", "defaults: [smollm2_135m_lora_demo]\n")
    assert values(load("team/second"), "seed", "batch.seq_len") == [1, 64]
    assert load("team/third").recipe.method.name == "lora"
    assert load("recipes/team/second.yaml").name == "team/second"
    assert {"mine", "team/first", "team/third"} <= set(list_recipes(recipe_folders()))


def test_folder_of_another_name(tmp_path: Path) -> None:
    write("other", BASE + "seed: 9\n", "elsewhere's [1]")
    assert load("other", folder="elsewhere's [1]").recipe.seed == 9
    assert load("other", ["method=qlora"], folder=tmp_path / "elsewhere's [1]").recipe.method.quantization == "nf4"
    with pytest.raises(RecipeError, match="no such recipe"):
        load("other")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside", "not a recipe name"),
        ("team/../../outside", "not a recipe name"),
        ("/etc/passwd", "not a recipe name"),
        ("outside.yaml", "outside the recipe folders"),
        ("recipes/../outside.yaml", "outside the recipe folders"),
        ("recipes/link.yaml", "outside the recipe folders"),
        ("link", "outside the recipe folders"),
        ("extends_link", "outside the recipe folders"),
        ("group_link", "outside the recipe folders"),
        ("up", "cannot be extended"),
        ("absolute", "cannot be extended"),
        ("group_up", "is not the name of an option"),
        ("word_link", "outside the recipe folders"),
        ("option_up", "is not the name of an option"),
    ],
)
def test_nothing_outside_the_folders_is_read(name: str, words: str, place: Path) -> None:
    outside = write("outside", BASE + "description: secret\n", ".")
    write("group", "path: secret\n", ".")
    Path("recipes/model").mkdir()
    Path("recipes/link.yaml").symlink_to(outside.resolve())
    Path("recipes/model/link.yaml").symlink_to(place / "group.yaml")
    write("extends_link", "defaults: [link]\n")
    write("group_link", "defaults: [{model: link}, {data: alpaca}]\n")
    write("up", "defaults: [../outside]\n")
    write("absolute", f"defaults: [{place}/outside]\n")
    write("word_link", "model: link\ndata: alpaca\n")
    write("option_up", "model: {option: ../../group}\ndata: alpaca\n")
    write("group_up", "defaults: [{model: ../../group}, {data: alpaca}]\n")
    with pytest.raises(RecipeError, match=words) as caught:
        load(name)
    assert "secret" not in str(caught.value)


def test_linked_recipes_folder_is_fine(place: Path) -> None:
    Path("recipes").rename("shared")
    Path("recipes").symlink_to(place / "shared")
    assert load("mine").name == load("recipes/mine.yaml").name == "mine"


def test_origin_of_what_a_word_sets() -> None:
    write("origins", "model: ./folder\ndata:\n- a\n- {path: b}\nmethod:\n  option: qlora\n  r: 4\nbatch: 8\n")
    origins = load("origins").origins
    assert {key: place for key, place in origins.items() if not key.startswith("method")} == {
        "model.path": "recipes/origins.yaml:1",
        "data.sources": "recipes/origins.yaml:2",
        "data.sources.0": "recipes/origins.yaml:3",
        "data.sources.1": "recipes/origins.yaml:4",
        "data.sources.1.path": "recipes/origins.yaml:4",
        "batch.global_batch_size": "recipes/origins.yaml:8",
    }
    assert origins["method.r"] == "recipes/origins.yaml:7"
    assert origins["method.quantization"] == "shipped:method/qlora.yaml:2"


def test_origin_of_every_value() -> None:
    write("origins", BASE + "optimizer: &o\n  learning_rate: 1e-3\nschedule:\n  <<: {max_steps: 3}\n  name: linear\n")
    origins = load("origins", ["seq_len=64", "method=qlora", "data.packing=true", "~data.eval_split"]).origins
    assert origins["optimizer.learning_rate"] == "recipes/origins.yaml:3"
    assert origins["schedule.max_steps"] == "recipes/origins.yaml:5"
    assert origins["schedule.name"] == "recipes/origins.yaml:6"
    assert origins["batch.seq_len"] == origins["data.packing"] == "command line"
    assert origins["method.quantization"] == "shipped:method/qlora.yaml:2"
    assert origins["data.sources.0"].startswith("shipped:data/stdlib_docstrings.yaml:")
    assert "data.eval_split" not in origins


def test_shown_recipe_is_yaml_with_the_same_values_and_an_origin_on_every_line() -> None:
    loaded = load("mine", ["seq_len=64", "data=[a, {path: b, weight: 2}]"])
    text = with_origins(loaded)
    assert yaml.safe_load(text)["batch"]["seq_len"] == 64
    lines = [line for line in text.splitlines() if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in lines)
    (line,) = [line for line in lines if "seq_len" in line]
    assert line.endswith("# command line")


def test_environment_is_read_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "hidden-name")
    monkeypatch.setenv("MY_NUMBER", "12")
    write("env", BASE + "output: {dir: '${oc.env:MY_FOLDER}/x', name: '${oc.env:NOT_SET,plain}'}\n")
    loaded = load("env", ["seed=${oc.decode:${oc.env:MY_NUMBER}}", "data=['${oc.env:MY_FOLDER}.jsonl']"])
    assert values(loaded, "output.dir", "output.name", "seed") == ["hidden-name/x", "plain", 12]
    assert loaded.recipe.data.sources[0].path == "hidden-name.jsonl"
    assert "hidden-name" not in loaded.to_yaml() + with_origins(loaded)
    assert load_resolved(write("kept", loaded.to_yaml(), "runs")) == loaded.recipe


def test_generated_files_are_current() -> None:
    import json

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


def test_command_line_replaces_what_says_the_same_in_the_file(place: Path) -> None:
    """A quick trial of a recipe that counts in epochs, and other data in place of the file's."""
    (place / "recipes" / "long.yaml").write_text(
        "model: {path: m}\ndata: {sources: [a], format: alpaca, columns: {input: context}, eval_split: 0.1}\n"
        "schedule: {num_epochs: 3, warmup_ratio: 0.1}\n",
        encoding="utf-8",
    )
    recipe = load("long", ["max_steps=5", "warmup_steps=2", "data=b.jsonl"]).recipe
    assert (recipe.schedule.max_steps, recipe.schedule.num_epochs) == (5, None)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_ratio) == (2, None)
    assert (recipe.data.sources[0].path, recipe.data.format, recipe.data.columns) == ("b.jsonl", "auto", {})
    assert recipe.data.eval_split == 0.1
    kept = load("long", ["data=b.jsonl", "data.format=messages", "max_steps=null"]).recipe
    assert (kept.data.format, kept.schedule.num_epochs) == ("messages", 3)
