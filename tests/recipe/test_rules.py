"""Every rule: a recipe that breaks it, and that the stated change makes it valid."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rule_cases import CASES

from recipes import BASE
from toolkit.recipe import Recipe, RecipeError, load, model_configs
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.rules import RULES, check, load_checked, warnings_of_length
from toolkit.recipe.rules.distillation import DISTILLATION_RULES
from toolkit.recipe.rules.embedding import EMBEDDING_RULES
from toolkit.recipe.rules.expert import EXPERT_RULES
from toolkit.recipe.rules.heads import HEAD_RULES
from toolkit.recipe.rules.ignored import IGNORED_RULES
from toolkit.recipe.rules.inputs import INPUT_RULES
from toolkit.recipe.rules.method import METHOD_RULES
from toolkit.recipe.rules.parallel import PARALLEL_RULES
from toolkit.recipe.rules.pipeline import PIPELINE_RULES
from toolkit.recipe.rules.preference import PREFERENCE_RULES
from toolkit.recipe.rules.reinforcement import REINFORCEMENT_RULES
from toolkit.recipe.rules.results import RESULT_RULES
from toolkit.recipe.rules.strategy import STRATEGY_RULES
from toolkit.recipe.rules.training import TRAINING_RULES
from toolkit.recipe.rules.unusual import UNUSUAL_RULES
from toolkit.recipe.sections import SCHEDULES


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, adapters and files that recipes name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("models"))
        _populate()
    return folder


@pytest.fixture(autouse=True)
def place(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder, with a recipe `mine`."""

    def copy(source: str, target: str) -> None:
        # A vocabulary is large, and nothing writes into it.
        (os.link if source.endswith("tokenizer.json") else shutil.copyfile)(source, target)

    shutil.copytree(models, tmp_path, copy_function=copy, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("recipes/mine.yaml").write_text(BASE)


BNB = {"quant_method": "bitsandbytes", "load_in_8bit": False, "bnb_4bit_quant_type": "fp4"}


def _populate() -> None:
    Path("recipes").mkdir()
    Path("existing").mkdir()
    Path("bare").mkdir()
    for name in ("adapter", "both", "runs/adapted/final"):
        Path(name).mkdir(parents=True)
        Path(name, "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}')
    for file in (
        "runs/adapted/manifest.json",
        "m.gguf",
        "m-00001-of-00003.gguf",
        "existing/own.gguf",
        "bare/own.gguf",
        "own.jinja",
    ):
        Path(file).touch()
    vocabulary = {str(number): number for number in range(49_160)}
    for name, model, added in (
        ("larger", {"vocab": vocabulary}, []),
        ("grown", {"vocab": [["a", 0.5]]}, [{"id": 49_152, "content": "<tool>"}]),
        ("resized", {"vocab": {"a": 0, "b": 1}}, []),
        ("renamed", {"vocab": {"a": 0, "c": 1}}, []),
    ):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    for name, config in (
        ("falcon", {"model_type": "falcon"}),
        ("recurrent_gemma", {"model_type": "recurrent_gemma"}),
        ("ctrl", {"model_type": "ctrl"}),
        ("switch", {"model_type": "switch_transformers"}),
        ("mamba", {"model_type": "mamba", "num_hidden_layers": 2}),
        ("mixture", {"model_type": "deepseek_v3", "n_routed_experts": 8}),
        *((name, {"model_type": "llama"}) for name in ("existing", "both", "rounded", "complex")),
        ("stored4", {"model_type": "llama", "quantization_config": BNB | {"bnb_4bit_quant_type": "nf4"}}),
        ("stored8", {"model_type": "llama", "quantization_config": BNB | {"load_in_8bit": True}}),
        ("stored_mxfp4", {"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}),
        ("stored_gptq", {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("larger", {"model_type": "llama", "vocab_size": 49_152}),
        ("resized", {"model_type": "llama", "vocab_size": 49_153}),
        ("renamed", {"model_type": "llama", "vocab_size": 49_153}),
        ("encoder", {"model_type": "roberta", "is_decoder": False}),
        ("decoder", {"model_type": "roberta", "is_decoder": True}),
    ):
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.json").write_text(json.dumps(config))
    for name, dtype, size in (("rounded", "I8", 1), ("complex", "C64", 8)):
        head = json.dumps({"model.norm.weight": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
        Path(name, "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(size))


@functools.cache
def broken_by(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Paths and reasons of the rules that a recipe breaks, or of those that warn of one that breaks none."""
    try:
        return tuple(map(str, load_checked("mine", overrides).warnings))
    except RecipeError as error:
        return tuple(map(str, error.problems))


@pytest.mark.parametrize(("rule", "breaks", "fix"), CASES, ids=[case[0] for case in CASES])
def test_rule_refuses_and_its_fix_is_valid(rule: str, breaks: list[str], fix: list[str]) -> None:
    found = RULES[rule]
    problems = broken_by(tuple(breaks))
    # The fixed words before the first figure are enough to know the rule by.
    reason = " ".join(found.why.partition("{")[0].split())
    matching = [text for text in problems if text.startswith(f"{found.path}: ") and reason in " ".join(text.split())]
    assert len(matching) == 1, problems
    assert len(problems) == 1, "the case should break this rule alone"
    assert not re.search(r"\{[\w.]+\}|None", matching[0]), "an unfilled figure"
    assert broken_by((*breaks, *fix)) == ()
    # The fix stands in the message: at least the last part of one of the keys.
    keys = [override.lstrip("~").partition("=")[0].rpartition(".")[2] for override in fix]
    assert any(key in matching[0] for key in keys)


def test_whatever_a_message_offers_ends_what_it_is_about() -> None:
    """Each of several changes by itself, where it is settings or keys to remove and nothing more."""
    one = r"(?:set )?(?P<set>[a-z_.]+=[^ ,]+)|remove (?P<remove>(?!them)[a-z_.]+)"
    taken, left = 0, []
    for rule, breaks, _ in CASES:
        try:
            [problem] = load_checked("mine", breaks).warnings
        except RecipeError as error:
            [problem] = error.problems
        for offer in re.split(r",? or |; ", problem.hint):
            changes = [re.fullmatch(one, change) for change in offer.removesuffix(" too").split(" and ")]
            if "…" in offer or not all(changes):
                continue
            keys = [
                found["set"] or f"~{problem.path if found['remove'] == 'it' else found['remove']}" for found in changes
            ]
            reason = str(problem).partition("\n")[0]
            taken += 1
            left += [(rule, keys) for text in broken_by((*breaks, *keys)) if text.startswith(reason)]
    assert not left, left
    assert taken > 300


@pytest.mark.parametrize(
    ("overrides", "path", "offered", "offers"),
    [
        *(
            ([f"objective={objective}", f"parallel.{way}=2"], f"parallel.{way}", "parallel.tensor", can)
            for way in ("sequence", "context", "pipeline")
            for objective, can in (("dpo", True), ("kto", True), ("reward", False), ("grpo", False), ("rloo", False))
        ),
        (["model.dtype=fp16"], "model.dtype", "precision=", False),
        (["model.dtype=bf16"], "model.dtype", "precision=", True),
    ],
)
def test_no_message_offers_what_another_rule_refuses(
    overrides: list[str], path: str, offered: str, offers: bool
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_checked("mine", ["data.packing=false", *overrides])
    hints = [problem.hint for problem in caught.value.problems if problem.path == path and "remove" in problem.hint]
    assert hints and any(offered in hint for hint in hints) is offers, hints


def test_tokenizers_of_student_and_teacher_are_compared_once_until_one_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan checks dozens of settings, and vocabularies have 150,000 tokens."""
    compared = []
    apart = model_configs.apart
    monkeypatch.setattr(model_configs, "apart", lambda *both: compared.append(both) or apart(*both))
    file, same = Path("renamed/tokenizer.json"), Path("resized/tokenizer.json").read_text()
    other = file.read_text()
    file.unlink()  # It is linked to that of all tests.
    file.write_text(other)
    taught = load("mine", ["objective=distillation", "model=renamed", "distillation.teacher.path=resized"]).recipe
    assert [problem.path for _ in range(3) for problem in check(taught)].count("distillation.teacher.path") == 3
    assert len(compared) == 1
    file.write_text(same)
    assert "distillation.teacher.path" not in [problem.path for problem in check(taught)]


def test_every_rule_has_a_case_and_names_are_unique() -> None:
    tables = (INPUT_RULES, METHOD_RULES, TRAINING_RULES, STRATEGY_RULES, PARALLEL_RULES, EXPERT_RULES)
    tables += (PIPELINE_RULES, PREFERENCE_RULES, REINFORCEMENT_RULES, DISTILLATION_RULES, HEAD_RULES, EMBEDDING_RULES)
    tables += (RESULT_RULES, IGNORED_RULES, UNUSUAL_RULES)
    assert len(RULES) == sum(map(len, tables))
    assert set(RULES) == {rule for rule, _, _ in CASES}


def test_every_refused_optimizer_names_an_allowed_one() -> None:
    def problems(strategy: str, name: str) -> list[str]:
        schedule = {"name": "constant"} if name.startswith("schedule_free") else {}
        sections = {"strategy": {"name": strategy}, "optimizer": {"name": name, "max_grad_norm": 0.0}}
        model, data = {"path": "a/b"}, {"sources": ["rows.jsonl"]}
        recipe = Recipe.model_validate({"model": model, "data": data, "schedule": schedule, **sections})
        return [problem.hint for problem in check(recipe)]

    refused = 0
    for strategy, name in itertools.product(("zero1", "zero2", "zero3", "fsdp"), OPTIMIZERS):
        for hint in problems(strategy, name):
            refused += 1
            (nearest,) = re.findall(r"optimizer\.name=(\w+)", hint)
            assert problems(strategy, nearest) == [], (strategy, name, nearest)
    assert refused > 50


def test_broken_rule_names_the_line_of_the_file() -> None:
    Path("recipes/mine.yaml").write_text(BASE + "schedule:\n  max_steps: 5\n  num_epochs: 2\n")
    (problem,) = broken_by(())
    assert "recipes/mine.yaml:3" in problem and "given    5" in problem


def test_broken_rule_names_no_line_for_a_default_whatever_else_its_section_says() -> None:
    Path("recipes/mine.yaml").write_text(BASE + "strategy:\n  name: zero3\n  offload_param: nvme\n")
    (problem,) = broken_by(("seed=1",))
    assert problem.startswith("strategy.nvme_path: ") and "mine.yaml" not in problem
    Path("recipes/mine.yaml").write_text(BASE + "method:\n  name: full\n  r: 5\n")
    (problem,) = broken_by(("seed=2",))
    assert problem.startswith("method: ") and "recipes/mine.yaml:4" in problem


def test_a_value_that_is_none_is_not_told_what_the_default_breaks() -> None:
    """The model has 512 positions and the default is 2,048: nobody wrote that."""
    Path("falcon/config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    short = ("model.path=falcon", "seed=3")
    assert "positions" in broken_by((*short, "data.packing=true"))[0]
    (problem,) = broken_by((*short, "batch.seq_len=long"))
    assert "given    long" in problem


@pytest.mark.parametrize(
    ("written", "typed", "warned"),
    [
        ("schedule: {max_steps: 5}\ncheckpoint: {save_steps: 6}\n", [], True),
        ("schedule: {max_steps: 5}\n", ["save_steps=6"], True),
        ("checkpoint: {save_steps: 6}\n", ["max_steps=5"], False),
        ("checkpoint: {save_steps: 6}\n", ["max_steps=5", "save_steps=7"], True),
        ("checkpoint: {option: rare}\nschedule: {max_steps: 5}\n", [], True),
    ],
)
def test_steps_beyond_the_run_are_warned_of_where_they_are_not_meant_for_a_longer_one(
    written: str, typed: list[str], warned: bool
) -> None:
    Path("recipes/checkpoint").mkdir()
    Path("recipes/checkpoint/rare.yaml").write_text("save_steps: 6\n")
    Path("recipes/mine.yaml").write_text(BASE + written)
    assert [each.path for each in load_checked("mine", typed).warnings] == ["checkpoint.save_steps"] * warned


def test_epochs_are_warned_of_as_steps_are_once_their_number_is_known() -> None:
    def warned(steps: int, epochs: float, warmup: int, *typed: str) -> list[str]:
        loaded = load_checked("mine", typed)
        return [each.path for each in warnings_of_length(loaded, steps, epochs, warmup)]

    intervals = ("save_steps=6", "evaluation.every_steps=6", "logging.every_steps=6", "warmup_steps=5")
    assert warned(5, 1, 5, *intervals, "eval_split=0.1") == [
        *("checkpoint.save_steps", "evaluation.every_steps", "logging.every_steps"),
        "schedule.warmup_steps",
    ]
    assert warned(6, 1, 5, *intervals, "eval_split=0.1") == []
    # Half a step is a whole one: of rows for one step, or of `max_steps=1`.
    for length in ("num_epochs=0.1", "max_steps=1"):
        assert warned(1, 0.1, 1, length, "warmup_ratio=0.03") == ["schedule.warmup_steps"]
    assert warned(5, 0.8, 0, "max_steps=5", "save_epochs=1") == ["checkpoint.save_epochs"]
    # What the recipe says by itself has been said.
    said = [*intervals, "max_steps=5", "eval_split=0.1"]
    assert warned(5, 0.8, 5, *said) == warned(5, 1.2, 0, "save_epochs=2") == warned(5, 1, 5, "warmup_ratio=1") == []


def test_what_a_shipped_recipe_says_of_steps_is_meant_for_its_own_length() -> None:
    recipe = load_checked("mine", ["max_steps=5", "save_steps=6"]).recipe
    places = {"checkpoint.save_steps": "shipped:mine.yaml:3", "schedule.max_steps": "recipes/mine.yaml:2"}
    assert check(recipe, places, warns=True) == []
    assert check(recipe, places | {"checkpoint.save_steps": "recipes/mine.yaml:3"}, warns=True)


def test_schedule_arguments_are_those_of_transformers() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    supplied = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    functions = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    for name, known in SCHEDULES.items():
        assert known.keys() == set(inspect.signature(functions[name]).parameters) - supplied, name
