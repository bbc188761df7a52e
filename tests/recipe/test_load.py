"""Interpolations: values from the environment and from other keys."""

from __future__ import annotations

import pytest
import yaml

from recipes import BASE, values, write
from toolkit.recipe import RecipeError, load
from toolkit.recipe.load import load_resolved
from toolkit.recipe.show import with_origins

pytestmark = pytest.mark.usefixtures("mine")


def test_environment_is_read_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "hidden-name")
    monkeypatch.setenv("MY_NUMBER", "12")
    write("env", BASE + "output: {dir: '${oc.env:MY_FOLDER}/x', name: '${oc.env:NOT_SET,plain}'}\n")
    loaded = load("env", ["seed=${oc.decode:${oc.env:MY_NUMBER}}", "data=['${oc.env:MY_FOLDER}.jsonl']"])
    assert values(loaded, "output.dir", "output.name", "seed") == ["hidden-name/x", "plain", 12]
    assert loaded.recipe.data.sources[0].path == "hidden-name.jsonl"
    assert "hidden-name" not in loaded.to_yaml() + with_origins(loaded)
    assert load_resolved(write("kept", loaded.to_yaml(), "runs")) == loaded.recipe


def test_adapters_have_a_learning_rate_of_their_own_by_default() -> None:
    full, adapter = (load("smollm2_135m_lora", ["~optimizer", f"method={method}"]) for method in ("full", "dora"))
    assert (full.recipe.optimizer.learning_rate, adapter.recipe.optimizer.learning_rate) == (2e-5, 2e-4)
    assert "learning_rate: 0.0002" in adapter.to_yaml() and "# default of adapters" in with_origins(adapter)
    given = load("smollm2_135m_lora", ["learning_rate=2e-5"])
    assert given.recipe.optimizer.learning_rate == 2e-5 and "default of adapters" not in with_origins(given)


def test_what_the_plan_chose_stands_in_the_place_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "hidden-name")
    loaded = load("mine", ["strategy.name=auto", "strategy.overlap_comm=false", "output.dir='${oc.env:MY_FOLDER}'"])
    decided = loaded.decided(loaded.recipe.with_values({"strategy.name": "zero2"}), {"strategy.name": "it fits"})
    kept = yaml.safe_load(decided.to_yaml())
    assert kept["strategy"]["name"] == "zero2" and kept["output"]["dir"] == "${oc.env:MY_FOLDER}"
    assert not kept["strategy"]["overlap_comm"]
    assert decided.chosen == {"strategy.name": "it fits"} and decided.origins["strategy.name"] == "chosen by the plan"
    assert decided.origins["strategy.overlap_comm"] == loaded.origins["strategy.name"] == "command line"
    assert yaml.safe_load(loaded.to_yaml())["strategy"]["name"] == "auto" and loaded.chosen == {}


def test_a_run_folder_that_does_not_fit_names_its_file() -> None:
    with pytest.raises(RecipeError, match=r"2 problems") as caught:
        load_resolved(write("kept", "seed: x\nmodel: {path: a}\nbatch: {seq_len: y}\ndata: {sources: [b]}\n", "runs"))
    assert caught.value.name == "runs/kept.yaml"
    places = {problem.path: problem.where for problem in caught.value.problems}
    assert places == {"seed": "runs/kept.yaml:1", "batch.seq_len": "runs/kept.yaml:3"}
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_resolved(write("kept", "seed: [\n", "runs"))
    old = "model: {path: a}\ndata: {sources: [b]}\nbatch: {micro_batch_size: "
    assert load_resolved(write("kept", old + "null}\n", "runs")).batch.micro_batch_size == "auto"
    assert load_resolved(write("kept", old + "3}\n", "runs")).batch.micro_batch_size == 3


def test_a_value_for_another_key_is_the_default_where_none_is_written() -> None:
    write("refers", BASE + "seed: ${batch.seq_len}\nevaluation: {prompts: [a, '${method.name}']}\n")
    loaded = load("refers")
    assert values(loaded, "seed", "evaluation.prompts") == [2048, ["a", "full"]]
    assert values(load("refers", ["seq_len=7"]), "seed") == [7]
    # A run folder keeps the reference, in a list too.
    kept = yaml.safe_load(loaded.to_yaml())
    assert kept["seed"] == "${batch.seq_len}" and kept["evaluation"]["prompts"] == ["a", "${method.name}"]
    bare = load("mine", ["data=['${oc.env:HOME}/a.jsonl',b]"])
    first, second = yaml.safe_load(bare.to_yaml())["data"]["sources"]
    assert first == "${oc.env:HOME}/a.jsonl" and second["path"] == "b"


@pytest.mark.parametrize("given", ["seed={}", "batch.seq_len=-{}", "data.sources=[{}]", "optimizer.args={{a: {}}}"])
def test_a_number_that_python_does_not_read_is_too_large(given: str) -> None:
    with pytest.raises(RecipeError, match="holds a number of more than 64 bits") as refused:
        load("smollm2_135m_full", [given.format("9" * 5000)])
    assert refused.value.problems[0].path == given.partition("=")[0]


@pytest.mark.parametrize("key", ["schedule.max_steps", "seed", "batch.seq_len", "method.r", "extra.lora.x"])
def test_a_number_that_no_library_can_hold_is_refused(key: str) -> None:
    write("own", BASE)
    with pytest.raises(RecipeError, match="is a number of more than 64 bits") as refused:
        load("own", ["method.name=lora", f"{key}={'9' * 30}"])
    assert [problem.path for problem in refused.value.problems] == [key]


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("model.path", "model.path=\udcff"),
        ("output.dir", "output.dir=\udcff"),
        ("model.new_tokens.1", "model.new_tokens=[a, '\ud800']"),
        ("data.sources.0", "data.sources=['\udcff.jsonl']"),
        ("extra.lora.x", "extra.lora={x: '\udcff'}"),
        ("evaluation.prompts.0", "evaluation.prompts=['\udcff']"),
    ],
)
def test_what_is_no_text_is_refused(key: str, override: str) -> None:
    """Libraries could neither encode it nor write it."""
    write("own", BASE)
    with pytest.raises(RecipeError, match="holds half a character, or bytes that are no UTF-8") as refused:
        load("own", [override])
    assert key in {problem.path for problem in refused.value.problems}
