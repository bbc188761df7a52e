"""What a recipe says of new tokens agrees with the adapter that it starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import write_recipe

from toolkit.recipe import RecipeError, load
from toolkit.recipe.dotted import inline
from toolkit.recipe.rules import check
from toolkit.recipe.show import with_origins

ADDED = [(2, "<eos>"), (9, "<tool>"), (5, "str"), (10, "</tool>")]
RIGHT = 'model.new_tokens=["<tool>", "str", "</tool>"]'


@pytest.fixture(autouse=True)
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `small` and an adapter with rows for three tokens."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "small", "model: {path: nowhere, adapter: first}\ndata: {sources: [a.jsonl]}\n")
    folder = tmp_path / "first"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config["trainable_token_indices"] = {"lm_head": [9, 5, 10], "model.embed_tokens": [9, 5, 10]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokens = [{"id": index, "content": name} for index, name in ADDED]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokens", [["</tool>", "str", "<tool>"], ["<a>", "str", "<b>"], ["<tool>", "str"], []])
def test_rows_of_other_tokens_are_refused(tokens: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load("small", [f"model.new_tokens={json.dumps(tokens)}"])
    assert "has rows for [<tool>, str, </tool>]" in str(caught.value) and inline(tokens) in str(caught.value)
    assert f"set '{RIGHT}'" in str(caught.value), "for a shell"
    load("small", [RIGHT])


def test_rows_without_names_are_refused(adapter: Path) -> None:
    (adapter / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"tokenizer\.json does not name"):
        load("small", [RIGHT])


def configure(adapter: Path, **settings: object) -> None:
    """Writes of the adapter what PEFT writes; it has no rows of tokens."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], **settings}
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_tokens_of_embeddings_that_are_trained_whole_are_those_of_the_adapters_own_recipe(adapter: Path) -> None:
    configure(adapter, modules_to_save=["embed_tokens"])
    load("small")
    (adapter.parent / "recipe.yaml").write_text("model: {path: a, new_tokens: [<a>, <b>]}\n", encoding="utf-8")
    load("small", ["model.new_tokens=['<a>','<b>']"])
    with pytest.raises(RecipeError, match="has rows for"):
        load("small")
    configure(adapter)
    load("small")


@pytest.mark.parametrize("own", ["seed: 1", "model: word", "model: {path: a, new_tokens: null}", "model: [", "- a", ""])
def test_a_users_own_recipe_beside_an_adapter_says_nothing_of_it(adapter: Path, own: str) -> None:
    configure(adapter, modules_to_save=["embed_tokens"])
    (adapter.parent / "recipe.yaml").write_text(own, encoding="utf-8")
    assert load("small").recipe.model.new_tokens == []


def test_what_a_recipe_leaves_out_is_the_adapters(adapter: Path) -> None:
    configure(adapter)
    loaded = load("small")
    method = loaded.recipe.method
    assert (method.name, method.r, method.lora_alpha, method.target_modules) == ("lora", 4, 8, ["q_proj", "v_proj"])
    assert not method.use_rslora and not method.use_dora and method.rank_pattern == method.alpha_pattern == {}
    assert method.modules_to_save == method.target_parameters == method.layers_to_transform == []
    assert loaded.origins["method.r"] == "first/adapter_config.json"
    more = {"rank_pattern": {"down_proj": 8}, "alpha_pattern": {"down_proj": 16}, "modules_to_save": ["lm_head"] * 2}
    configure(adapter, use_rslora=True, use_dora=True, layers_to_transform=3, target_modules="all-linear", **more)
    method = load("small").recipe.method
    assert method.use_rslora and method.use_dora and method.layers_to_transform == [3]
    assert method.target_modules == "all-linear" and method.modules_to_save == ["lm_head"]
    assert (method.rank_pattern, method.alpha_pattern) == ({"down_proj": 8}, {"down_proj": 16})


def test_a_recipe_that_only_its_adapter_makes_one_of_adapters_trains_at_their_rate(adapter: Path) -> None:
    configure(adapter)
    loaded = load("small")
    assert loaded.recipe.optimizer.learning_rate == load("small", ["method=lora"]).recipe.optimizer.learning_rate
    assert "learning_rate: 0.0002" in loaded.to_yaml() and "# default of adapters" in with_origins(loaded)
    rates = [load("small", [f"learning_rate={rate}"]).recipe.optimizer.learning_rate for rate in (2e-5, 3e-3)]
    assert rates == [2e-5, 3e-3]
    preferring = load("small", ["objective=dpo"])
    assert preferring.recipe.optimizer.learning_rate == 1e-5 and "# default of dpo" in with_origins(preferring)


@pytest.mark.parametrize(
    ("settings", "overrides", "words"),
    [
        ({}, ["method.r=8"], ["method.r: the adapter in first has 4", "remove method.r, or set it to that"]),
        ({}, ["method.target_modules=[q_proj]"], ["the adapter in first has [q_proj, v_proj]"]),
        ({"use_dora": True}, ["method.use_dora=false"], ["method.use_dora: the adapter in first has true"]),
        ({"peft_type": "VERA"}, [], ["model.adapter: has peft_type=VERA, unlike", "name another adapter"]),
        ({"bias": "all"}, [], ["model.adapter: has bias=all, unlike", "set extra.lora.bias to that"]),
        ({"lora_bias": True}, [], ["has lora_bias=True", "name another adapter"]),
        (
            {"exclude_modules": ["b", "a"]},
            ["extra.lora={exclude_modules: [c]}"],
            ["has exclude_modules=", "set extra.lora.exclude_modules to that"],
        ),
        ({"exclude_modules": {"a": 1}}, [], ["has exclude_modules={a: 1}, which are no names"]),
        ({"base_model_name_or_path": "a/b"}, [], ["was trained on a/b", "set model.path=a/b"]),
    ],
    ids=str,
)
def test_what_does_not_agree_with_the_adapter(
    adapter: Path, settings: dict[str, object], overrides: list[str], words: list[str]
) -> None:
    configure(adapter, **settings)
    with pytest.raises(RecipeError) as caught:
        load("small", overrides)
    (problem,) = caught.value.problems
    assert [word for word in words if word not in " ".join(str(problem).split())] == [], str(problem)


@pytest.mark.parametrize("excluded", [["b", "a"], r"(model\.vision_tower(\..*)?)"])
def test_what_an_adapter_leaves_out_is_left_out_again(adapter: Path, excluded: object) -> None:
    configure(adapter, exclude_modules=excluded)
    assert load("small").recipe.extra.lora == {"exclude_modules": excluded}


def test_an_adapter_of_loftq_stays_on_its_quantized_base(adapter: Path) -> None:
    configure(adapter)
    with pytest.raises(RecipeError, match="init_lora_weights: the adapter in first has default"):
        load("small", ["method.init_lora_weights=loftq"])
    for way, taken in (("eva", "default"), ("loftq", "loftq")):
        Path("recipe.yaml").write_text(f"method: {{init_lora_weights: {way}}}", encoding="utf-8")
        assert load("small").recipe.method.init_lora_weights == taken
    for stored, refused in (("none", True), ("nf4", False)):
        problems = check(load("small", [f"method.quantization={stored}"]).recipe)
        assert any("LoftQ makes up for what nf4 loses" in str(each) for each in problems) == refused


def test_what_agrees_with_the_adapter(adapter: Path) -> None:
    configure(adapter, bias="all", exclude_modules=["b", "a"], base_model_name_or_path="nowhere")
    overrides = ["extra.lora={bias: all, exclude_modules: [a, b]}", "method.target_modules=[v_proj, q_proj]"]
    assert load("small", [*overrides, "method.r=4"]).recipe.method.r == 4
    assert load("small", [*overrides, "method.target_modules=all-linear"]).recipe.method.target_modules == [
        *("q_proj", "v_proj")
    ]


def test_numbers_of_layers_agree_in_any_order(adapter: Path) -> None:
    configure(adapter, layers_to_transform=[10, 2, 9])
    assert load("small").recipe.method.layers_to_transform == [2, 9, 10]
    for layers in ("[2,9,10]", "[10,9,2]"):
        load("small", [f"method.layers_to_transform={layers}"])
    with pytest.raises(RecipeError, match=r"has \[2, 9, 10\]"):
        load("small", ["method.layers_to_transform=[2,9]"])


def test_a_folder_without_an_adapter_names_the_one_inside(adapter: Path) -> None:
    (adapter / "adapter_config.json").rename(adapter / "other.json")
    with pytest.raises(RecipeError, match=r"no readable adapter_config\.json in this folder") as caught:
        load("small")
    assert "name the folder `final` of a run" in str(caught.value)
    (adapter / "final").mkdir()
    (adapter / "other.json").rename(adapter / "final" / "adapter_config.json")
    with pytest.raises(RecipeError, match=r"set model\.adapter=first/final"):
        load("small")


@pytest.mark.parametrize("beside", ["method: qlora\n", "method: [\n", "- a list\n", ""])
def test_a_recipe_of_somebody_elses_beside_an_adapter_says_nothing_of_it(adapter: Path, beside: str) -> None:
    configure(adapter)
    (adapter.parent / "recipe.yaml").write_text(beside, encoding="utf-8")
    assert load("small").recipe.method.init_lora_weights == "default"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"[]", "holds no object"),
        (b"\xef\xbb\xbf{}", "begins with a byte order mark"),
        (b"[" * 100_000, "adapter_config.json"),
        (b'{"lora_alpha": 1}', "has no r"),
        (b'{"r": "x", "lora_alpha": 1}', "has r=x: Input should be a valid integer"),
        (b'{"r": 1, "lora_alpha": 1, "trainable_token_indices": 5}', "has trainable_token_indices=5"),
        (b'{"r": 1, "lora_alpha": 1, "base_model_name_or_path": []}', "which is no name"),
        (b'{"r": 1, "lora_alpha": 1, "target_modules": [1, "a"]}', "has target_modules="),
        (b'{"r": 1, "lora_alpha": 1, "rank_pattern": {"a": 0}}', "has rank_pattern="),
    ],
)
def test_a_damaged_config_of_an_adapter_is_one_problem(config: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(config)
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [f"model.adapter={tmp_path}"])
    assert len(caught.value.problems) == 1 and said in caught.value.problems[0].what
