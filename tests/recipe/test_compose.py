"""What a recipe becomes from what it extends, the options it takes and its own keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from recipes import BASE, values, write
from toolkit.recipe import RecipeError, load
from toolkit.recipe.compose import Layer, compose_recipe
from toolkit.recipe.dotted import interpolated, remove, value_at

pytestmark = pytest.mark.usefixtures("mine")


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


@pytest.mark.parametrize("defaults", ["[_self_, {data: bare}]", "[{data: bare}, _self_]"])
def test_a_file_describes_the_data_that_it_chooses_itself(defaults: str) -> None:
    """Wherever `_self_` stands; and so does a part that is extended by whoever chooses the data."""
    write("data/bare", "sources: [bare.jsonl]\n")
    about = "data: {columns: {messages: turns}, ignore: [label], eval_split: test}\n"
    write("base", f"defaults: {defaults}\nmodel: gpt2\n{about}")
    write("_part", f"model: gpt2\n{about}")
    write("whole", "defaults: _part\ndata: bare\n")
    for loaded in (load("base"), load("whole")):
        data = loaded.recipe.data
        assert (data.columns, data.ignore, data.eval_split) == ({"messages": "turns"}, ["label"], "test")
        assert not loaded.warnings
    write("middle", "defaults: base\ndata: {ignore: [other]}\n")
    write("other", "defaults: middle\ndata: wikitext\n")
    for loaded in (load("other"), load("middle", ["data=wikitext"]), load("base", ["data=wikitext"])):
        data = loaded.recipe.data
        assert (data.columns, data.ignore, data.eval_split, loaded.warnings) == ({}, [], "validation", ())
    write("outer", "defaults: other\ndata: {ignore: [mine]}\n")
    assert load("outer").recipe.data.ignore == ["mine"]


def test_own_keys_that_nothing_sets_are_warned_of() -> None:
    write("base", "model: gpt2\ndata: b.jsonl\n")
    write("first", "defaults: [_self_, base]\ndata: {ignore: [label]}\n")
    (warning,) = map(str, load("first").warnings)
    assert "`_self_` stands before what does away with it" in warning and "None" not in warning


def test_own_keys_that_a_group_overrules_are_warned_of() -> None:
    write("first", "defaults: [_self_, smollm2_135m_full, {method: lora}]\nmethod: {r: 4, name: full}\nseed: 3\n")
    (warning,) = map(str, load("first").warnings)
    for part in ("method.name", "first.yaml:2", "shipped:method/lora.yaml:1", "given    full", "first.yaml:1"):
        assert part in warning
    assert not load("first", ["method.name=full"]).warnings
    write("last", "defaults: [smollm2_135m_full, {method: lora}, _self_]\nmethod: {r: 4, name: full}\nseed: 3\n")
    assert not load("last").warnings


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
    write("mapped", BASE + "optimizer:\n  args:\n    amsgrad: true\n    maximize: false\n")
    mapped = load("mapped", ["optimizer.args={maximize: true, capturable: false}"])
    places = {key.rpartition(".")[2]: place for key, place in mapped.origins.items() if "args." in key}
    file, typed = "recipes/mapped.yaml:4", "command line"
    assert places == {"amsgrad": file, "maximize": typed, "capturable": typed}
    assert mapped.recipe.optimizer.args == {"amsgrad": True, "maximize": True, "capturable": False}
    assert load("mapped", ["optimizer.args={}"]).recipe.optimizer.args == {}
    assert origins["method.quantization"] == "shipped:method/qlora.yaml:2"
    assert origins["data.sources.0"].startswith("shipped:data/stdlib_docstrings.yaml:")
    assert "data.eval_split" not in origins


def test_what_two_parents_share_lies_below_both() -> None:
    write("base", BASE + "seed: 1\nbatch: {seq_len: 64}\n")
    write("left", "defaults: base\nseed: 2\n")
    write("right", "defaults: base\nbatch: {seq_len: 128}\n")
    write("both", "defaults: [left, right]\n")
    assert values(load("both"), "seed", "batch.seq_len") == [2, 128]


NESTED: dict[str, Any] = {"a": {"b": [1, {"c": 2}, [3, "${x}"]], "d": "???"}, "e": "", "f": ["${y}", 0, "${z}"]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("a.b.0", 1), ("a.b.1.c", 2), ("a.b.2.0", 3), ("f.2", "${z}"), ("e", ""), ("f", ["${y}", 0, "${z}"])),
        *(("a.b.3", None), ("a.b.-1", None), ("a.b.c", None), ("a.x", None), ("e.x", None), ("a.b.0.0", None)),
    ],
)
def test_values_and_entries_of_lists_are_looked_up_and_taken_out(path: str, value: Any) -> None:
    data = copy.deepcopy(NESTED)
    assert value_at(data, path.split(".")) == value
    assert remove(data, path) == (value is not None)
    *parents, last = path.split(".")
    left = value_at(data, parents)
    if value is None:
        assert data == NESTED
    elif isinstance(left, list):
        before = value_at(NESTED, parents)
        assert left == [*before[: int(last)], *before[int(last) + 1 :]]
    else:
        assert last not in left and len(left) == len(value_at(NESTED, parents)) - 1


def test_what_is_to_be_filled_in_is_found_in_lists_too() -> None:
    assert dict(interpolated(NESTED)) == {"a.b.2.1": "${x}", "a.d": "???", "f.0": "${y}", "f.2": "${z}"}


def test_a_layer_replaces_values_by_key_and_lists_as_a_whole() -> None:
    lower = Layer(
        {"a": {"b": 1, "c": [1, 2]}, "d": 3}, {"a.b": "l1", "a.c": "l2", "a.c.0": "l2", "a.c.1": "l3", "d": "l4"}
    )
    upper = Layer({"a": {"c": [5]}, "e": 6}, {"a.c": "u1", "a.c.0": "u1", "e": "u2"}, ["d"])
    both = lower.under(upper)
    assert both.values == {"a": {"b": 1, "c": [5]}, "e": 6}
    assert both.origins == {"a.b": "l1", "a.c": "u1", "a.c.0": "u1", "e": "u2"}
    assert both.leaves() == {"a.b": 1, "a.c": [5]}


def test_values_to_be_filled_in_hide_no_other_problem_where_defaults_cannot_be_followed() -> None:
    write("wrong", "defaults: nothing\nmethod: {layers_to_transform: ['${a}', '${b}', x]}\nseed: y\n")
    with pytest.raises(RecipeError) as refused:
        load("wrong")
    problems = {problem.path: problem.given for problem in refused.value.problems}
    assert problems == {"defaults": "nothing", "method.layers_to_transform.0": "x (text)", "seed": "y (text)"}


def test_every_value_is_remembered_as_it_was_written() -> None:
    write("base", "optimizer: {args: {depth: 0x10, sure: yes}}\nseed: 1_000\n")
    write("child", BASE.replace("_self_", "base") + "data: {sources: [{path: a, revision: 012}]}\nseed: 0b11\n")
    texts = compose_recipe("child", ["batch.seq_len=1e2"]).texts
    assert {key: texts[key] for key in ("optimizer.args.depth", "optimizer.args.sure", "seed", "batch.seq_len")} == {
        **{"optimizer.args.depth": "0x10", "optimizer.args.sure": "yes", "seed": "0b11", "batch.seq_len": "1e2"},
    }
    assert texts["data.sources.0.revision"] == "012"
