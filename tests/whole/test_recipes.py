"""Every shipped recipe and example: loads, obeys the rules, repeats no default, and trains a tiny model of its kind."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml
from pydantic_core import PydanticUndefined

from toolkit.recipe import Section, load, model_configs, sections
from toolkit.recipe.rules import load_checked

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "recipes"
FILES = sorted(SHIPPED.rglob("*.yaml"))
GROUPS = [file for file in FILES if file.relative_to(SHIPPED).parts[0] in sections()]
SHARED = [file for file in FILES if file.name.startswith("_")]
RECIPES = [file.stem for file in FILES if file not in GROUPS and file not in SHARED]
EXAMPLES = sorted((ROOT / "examples").glob("*.sh"))


def test_no_file_escapes_these_tests() -> None:
    assert all(file.parent == SHIPPED for file in FILES if file not in GROUPS), "recipes lie flat in recipes/"
    assert set(RECIPES) == {file.stem for file in SHIPPED.glob("[!_]*.yaml")}
    assert len(RECIPES) >= 27
    assert EXAMPLES


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_described(name: str) -> None:
    recipe = load_checked(name, folder=SHIPPED).recipe
    assert 10 < len(recipe.description) <= 100
    assert "\n" not in recipe.description
    assert model_configs.config_of(recipe.model) is not None, f"bundle the config of {recipe.model.path}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SHIPPED).with_suffix("").as_posix())
def test_file_states_only_what_differs_from_what_it_extends(file: Path) -> None:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if file in GROUPS:
        section = file.relative_to(SHIPPED).parts[0]
        content = {section: content}
        if section in ("method", "strategy"):  # `method=full` must undo another method, so it names itself.
            content[section].pop("name")
    parent = content.pop("defaults", None)
    inherited = _stated(SHIPPED / f"{parent}.yaml") if parent else {}
    for path, value in _leaves(content).items():
        before = inherited.get(path, _default(path))
        assert _plain(value) != _plain(before), f"{path} is {before!r} already"


@pytest.mark.parametrize("group", ["model", "method", "data", "strategy"])
def test_every_group_option_composes_with_a_recipe(group: str) -> None:
    for option in sorted((SHIPPED / group).glob("*.yaml")):
        # Without the length of the stream and the split of the other data, which are the recipe's to say.
        extra = ["schedule.max_steps=1", "over_long=truncate"]
        base = "blenderbot_400m_seq2seq" if option.stem == "blenderbot_400m" else "smollm2_135m_lora_demo"
        extra += ["nvme_path=/scratch"] * (option.stem == "zero3_nvme")
        load_checked(base, [f"{group}={option.stem}", *extra], SHIPPED)


def test_every_bundled_model_has_an_option() -> None:
    options = {yaml.safe_load(file.read_text(encoding="utf-8"))["path"] for file in (SHIPPED / "model").glob("*.yaml")}
    assert {model_configs.BUILTIN_MODELS.get(path, path) for path in options} == set(model_configs.bundled())


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.name)
def test_example_names_a_recipe_and_overrides_that_load(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert 2 <= sum(line.startswith("# ") for line in lines[1:]) <= 4
    assert script.stat().st_mode & 0o100, "make it executable"
    commands = [line for line in lines if re.match("(accelerate|toolkit) launch ", line)]
    assert len(commands) == 1
    assert ("toolkit/run.py" in commands[0]) == commands[0].startswith("accelerate")
    words = shlex.split(commands[0])
    assert words[-1] == "$@"
    arguments = [word.replace("$data", "rows.jsonl") for word in words if re.match(r"[a-z][\w.]*=", word)]
    names = [word.partition("=")[2] for word in arguments if word.startswith("recipe=")]
    assert len(names) == 1
    load_checked(names[0], [word for word in arguments if not word.startswith("recipe=")], SHIPPED)


def _stated(file: Path) -> dict[str, Any]:
    """What a recipe file and those it extends state, by dotted key."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    parent = content.pop("defaults", None)
    return (_stated(file.parent / f"{parent}.yaml") if parent else {}) | _leaves(content)


def _leaves(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if path in sections() and isinstance(value, str):
            value = {"option": value}
        leaves |= _leaves(value, f"{path}.") if path in sections() else {path: value}
    return leaves


def _default(path: str) -> Any:
    from toolkit.recipe import Recipe

    kind: type[Any] = Recipe
    *parents, last = path.split(".")
    for part in parents:
        kind = sections()[part]
    if last == "option":
        return None
    field = kind.model_fields[last]
    return None if field.default is PydanticUndefined else field.default


def _plain(value: Any) -> Any:
    """YAML 1.1 reads `2e-4` as text; the loader reads it as a number, and so does this comparison."""
    assert not isinstance(value, Section)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def options(name: str) -> set[tuple[str, object]]:
    """What a recipe asks of the training code: keys that are not at their defaults, choices with their value."""
    recipe = load(name, folder=SHIPPED).recipe
    config = model_configs.config_of(recipe.model)
    assert config is not None
    return {("architecture", config["model_type"])} | {
        (path, value if isinstance(value, str | bool) else "")
        for path, value in _leaves(recipe.model_dump()).items()
        if path not in ("description", "model.path", "data.sources")
        and not path.startswith(("strategy.", "output."))
        and value != _default(path)
    }


def covering() -> list[str]:
    """The fewest recipes (chosen greedily) that have every option between them; `make matrix` trains the others too."""
    has = {name: options(name) for name in RECIPES}
    missing, chosen = set().union(*has.values()), []
    while missing:
        chosen.append(max(RECIPES, key=lambda name: len(has[name] & missing)))
        missing -= has[chosen[-1]]
    return chosen


COVERING = covering()


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in COVERING else pytest.mark.matrix) for name in RECIPES],
)
def test_recipe_trains_two_steps_on_a_tiny_model_of_its_architecture(name: str, tmp_path: Path) -> None:
    from toolkit.train.main import main

    recipe = load_checked(name, folder=SHIPPED).recipe
    config = model_configs.config_of(recipe.model)
    assert config is not None
    model = tiny.tiny_model(config, tmp_path / "model")
    rows = {
        "sft": tiny.chat_rows(40),
        "language_modelling": tiny.text_rows(40),
        "dpo": [row | {"rejected": "No."} for row in tiny.pair_rows(40, "prompt", "chosen")],
        "kto": [row | {"label": n % 2 > 0} for n, row in enumerate(tiny.pair_rows(40, "prompt", "completion"))],
        "distillation": tiny.chat_rows(40),
        "embedding": [
            row | {f"negative_{at + 1}": f"not {n}" for at in range(recipe.embedding.negatives)}
            for n, row in enumerate(tiny.pair_rows(40, "anchor", "positive"))
        ],
        "grpo": [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(40)],
        "reward": [row | {"rejected": "No."} for row in tiny.pair_rows(40, "prompt", "chosen")],
        "classification": tiny.labelled_rows(40),
        "token_classification": tiny.tagged_rows(40),
        # Columns as the recipe expects them, beside one that must not be taken for the input.
        "seq2seq": [
            {"source": "not the input"} | row
            for row in tiny.pair_rows(
                40, recipe.data.columns.get("source", "source"), recipe.data.columns.get("target", "target")
            )
        ],
    }[recipe.objective]
    data = tiny.write_splits(tmp_path / "data", rows)
    overrides = [
        f"model.path={model}",
        f"data.sources=[{data}]",
        "batch.seq_len=128",
        "batch.global_batch_size=2",
        "batch.micro_batch_size=1",
        "schedule.max_steps=2",
        "evaluation.max_new_tokens=4",
        f"output.dir={tmp_path / 'runs'}",
    ]
    if recipe.distills:
        overrides.append(f"distillation.teacher.path={tiny.tiny_model(config, tmp_path / 'teacher', seed=1)}")
    if recipe.embedding.dims:
        overrides.append("embedding.dims=[32,16]")
    if recipe.precision == "fp16":  # Loss scaling needs a GPU.
        overrides.append("precision=fp32")
    if recipe.strategy.name != "ddp":  # test_worked_examples.py trains these on their engines.
        overrides += ["strategy=ddp", *(f"~strategy.{key}" for key in recipe.strategy.changed() if key != "name")]
    if isinstance(recipe.data.eval_split, float):  # A share of so few rows would be none.
        overrides.append("data.eval_split=0.1")
    # test_parallel_recipes.py trains these on several processes.
    overrides += [f"parallel.{key}=1" for key in recipe.parallel.changed()]
    assert main([f"recipe={name}", *overrides]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in metrics if "loss" in row] == [1, 2]
    held_out = [row["eval_loss"] for row in metrics if "eval_loss" in row]
    assert len(held_out) == (0 if recipe.data.eval_split is None else 2)
    # A random model of 512 tokens starts near ln 512 = 6.2; what compares a model with itself at ln 2 = 0.69 or a half.
    near = {"dpo": (0.6, 0.8), "kto": (0.4, 0.6), "reward": (0.5, 0.9), "classification": (0.8, 1.4), "grpo": (-2, 2)}
    # Two random models say nearly the same, that every token is as likely as the others.
    near |= {"token_classification": (1.2, 2.0), "distillation": (0.0, 0.5)}
    # Of two to four candidates, at 20 times their cosines, summed over the sizes of a vector.
    near |= {"embedding": (0.1, 10)}
    low, high = near.get(recipe.objective, (5, 8))
    losses = [row["loss"] for row in metrics if "loss" in row] + held_out
    # The few outputs of a head leave where they begin within a step.
    assert all(low < loss < high for loss in (held_out[:1] if recipe.headed else losses))
    assert all(loss < 2 * high for loss in losses)
    saved = "adapter_model.safetensors" if recipe.method.name == "lora" else "model.safetensors"
    assert list(run.rglob(saved))
