"""What rules say: the figures of the recipe, the keys that count, and what of `auto` is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes import recipe_of
from toolkit.recipe import Recipe
from toolkit.recipe.rules import check
from toolkit.recipe.rules.method import adapter_keys, not_for_parameters
from toolkit.recipe.rules.results import evaluation_keys
from toolkit.recipe.sections import Method

LORA, NF4, INT8 = (
    "method.name=lora ",
    "method.name=lora method.quantization=nf4 ",
    "method.name=lora method.quantization=int8 ",
)
FSDP, NVME = "strategy.name=fsdp ", "strategy.offload_param=nvme "

CHANGED = {
    "name": "lora", "r": 5, "lora_alpha": 5.0, "lora_dropout": 0.5, "target_modules": ["a"], "target_parameters": ["a"],
    "layers_to_transform": [0], "rank_pattern": {"a": 5}, "alpha_pattern": {"a": 5.0}, "modules_to_save": ["a"],
    "init_lora_weights": "gaussian", "loraplus_lr_ratio": 5.0, "use_rslora": True, "use_dora": True,
    "quantization": "nf4", "double_quantization": False, "freeze": ["a"],
    "at_start": False, "every_steps": 5, "batch_size": 5, "prompts": ["a"], "num_prompts": 5, "max_new_tokens": 5,
    "generation_metrics": True, "num_beams": 5,
}  # fmt: skip
"""A value of every key of the method and of the evaluation that is not its default."""


def test_keys_count_as_an_adapters_or_an_evaluations_once_they_are_changed() -> None:
    base = recipe_of()

    def counted(section: str, keys_of: Callable[[Recipe], list[str]]) -> set[str]:
        part = getattr(base, section)
        assert keys_of(base) == [] and set(type(part).model_fields) <= set(CHANGED)
        made = {key: base.with_values({f"{section}.{key}": CHANGED[key]}) for key in type(part).model_fields}
        found = {key: keys_of(each) for key, each in made.items()}
        assert all(keys in ([], [key], [f"{section}.{key}"]) for key, keys in found.items())
        return {key for key, keys in found.items() if keys}

    # Full fine-tuning has names and frozen parameters too, and a switch of nf4 says nothing without nf4.
    assert counted("method", adapter_keys) == {*Method.model_fields} - {"name", "freeze", "double_quantization"}
    # Prompts are answered without held-out rows.
    assert counted("evaluation", evaluation_keys) == {"every_steps", "batch_size", "generation_metrics"}
    assert counted("method", not_for_parameters) == {"lora_dropout", "use_dora", "layers_to_transform"}


# A recipe, the key of its one problem, and what the message says with the recipe's own figures.
FIGURES: list[tuple[str, str, list[str]]] = [
    *(
        (
            f"batch.seq_len=8 batch.tokens_per_step={given}",
            "batch.tokens_per_step",
            [f"set batch.tokens_per_step={near}"],
        )
        for given, near in ((13, 16), (11, 8), (3, 8))
    ),
    *(
        (
            f"batch.global_batch_size=12 batch.micro_batch_size={given}",
            "batch.micro_batch_size",
            [f"micro_batch_size={near}"],
        )
        for given, near in ((8, 4), (5, 1), (9, 3))
    ),
    ("batch.global_batch_size=3 batch.micro_batch_size=4", "batch.micro_batch_size", ["has 3 sequences", "=3 or less"]),
    ("schedule.args='{power: 2.0}'", "schedule.args", ["schedule cosine takes these arguments: num_cycles"]),
    ("schedule.name=linear schedule.args='{power: 2.0}'", "schedule.args", ["takes these arguments: none"]),
    ("schedule.name=polynomial schedule.args='{a: 2.0}'", "schedule.args", ["these arguments: lr_end, power"]),
    ("evaluation.prompts=[a,b,c,d,e]", "evaluation.num_prompts", ["has 5 prompts", "evaluation.num_prompts=5"]),
    ("method.r=5 method.use_dora=true", "method", ["adapters: r, use_dora"]),
    (
        "evaluation.every_steps=5 evaluation.batch_size=5",
        "evaluation",
        ["evaluation.every_steps, evaluation.batch_size"],
    ),
    (
        LORA + "method.target_parameters=[w] method.use_dora=true method.lora_dropout=0.1",
        "method",
        ["remove method.lora_dropout and method.use_dora", "or remove method.target_parameters"],
    ),
    (
        "strategy.reduce_bucket_size=5 strategy.overlap_comm=false",
        "strategy",
        [
            "ddp would ignore strategy.overlap_comm, strategy.reduce_bucket_size",
            "strategy.name=zero1 or zero2 or zero3",
        ],
    ),
    (
        "strategy.wrap_classes=[A] strategy.max_live_parameters=5",
        "strategy",
        ["strategy.max_live_parameters, strategy.wrap_classes", "remove what it ignores"],
    ),
    (
        "optimizer.args='{lr: 0.1, eps: 0.1}'",
        "optimizer.args",
        ["optimizer.args.lr, optimizer.args.eps", "set optimizer.learning_rate and optimizer.eps instead"],
    ),
    ("optimizer.args='{betas: 0.1}'", "optimizer.args", ["set optimizer.beta1 and optimizer.beta2 instead"]),
    ("optimizer.args='{weight_decay: 0.1}'", "optimizer.args", ["set optimizer.weight_decay instead"]),
    (
        "optimizer.name=lion optimizer.args='{a: 1}'",
        "optimizer.args",
        ["lion has no such argument: optimizer.args.a", "is_paged, min_8bit_size, optim_bits"],
    ),
    (
        "optimizer.name=adamw_torch_8bit optimizer.args='{amsgrad: true}'",
        "optimizer.args",
        ["amsgrad", "false"],
    ),
    (
        FSDP + "strategy.reshard_after_forward=true strategy.sharding=shard_grad_op",
        "strategy.reshard_after_forward",
        ["strategy.sharding=full_shard"],
    ),
    (
        FSDP + "strategy.reshard_after_forward=false",
        "strategy.reshard_after_forward",
        ["strategy.sharding=shard_grad_op"],
    ),
    ("precision=fp32 " + LORA + "model.dtype=fp16", "model.dtype", ["precision=fp16"]),
    (
        "strategy.name=zero2 " + "optimizer.name=muon",
        "optimizer.name",
        ["muon needs their shapes", "set optimizer.name=adamw"],
    ),
    ("model.path=openai-community/gpt2", "batch.seq_len", ["has only 1024 positions", "batch.seq_len=1024 or less"]),
    (
        LORA + "method.layers_to_transform=[12] model.path=openai-community/gpt2 batch.seq_len=64",
        "method.layers_to_transform",
        ["the model has 12 layers", "below 12"],
    ),
    (INT8 + "model.path=Qwen/Qwen3-30B-A3B", "method.quantization", ["the 128 experts of a layer"]),
]


@pytest.mark.parametrize(("settings", "path", "words"), FIGURES, ids=[row[1] for row in FIGURES])
def test_a_message_has_the_figures_of_the_recipe(settings: str, path: str, words: list[str]) -> None:
    (problem,) = check(recipe_of(settings))
    assert problem.path == path
    assert [word for word in words if word not in f"{problem.what}; {problem.hint}"] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("optimizer.learning_rate=1.0", ["adamw is used with, 1e-07 to 0.01", "e.g. 3e-5"]),
        ("optimizer.name=sgd optimizer.learning_rate=20.0", ["sgd is used with, 1e-06 to 1", "e.g. 1e-3"]),
        ("schedule.max_steps=5 schedule.warmup_steps=5", ["never reaches 2e-05", "below the run's 5 steps"]),
        ("schedule.warmup_ratio=1.0", ["reaches 2e-05 at its end", "set schedule.warmup_ratio=0.03"]),
        ("batch.micro_batch_size=2 batch.micro_batch_tokens=64", ["micro_batch_size=2 says", "micro_batch_size=auto"]),
        (INT8 + "compile=layers", ["although layers quantized to int8 have not been measured"]),
    ],
)
def test_a_warning_has_the_figures_of_the_recipe(settings: str, words: list[str]) -> None:
    assert check(recipe_of(settings)) == []
    (problem,) = check(recipe_of(settings), warns=True)
    assert [word for word in words if word not in f"{problem.what}; {problem.hint}"] == []


@pytest.mark.parametrize(
    ("kind", "settings", "end"),
    [
        ("roberta", "", "name a decoder, or set is_decoder: true in its config.json"),
        ("xlm", "", "name a decoder, or set causal: true in its config.json"),
        ("xlnet", "", "name a decoder"),
        ("falcon", NF4, "set method.quantization=none"),
    ],
)
def test_a_kind_of_model_that_cannot_be_trained_so_says_what_can(
    tmp_path: Path, kind: str, settings: str, end: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    (problem,) = check(recipe_of(f"model.path={tmp_path}", settings))
    assert problem.hint == end and (not settings or kind in problem.what)


def test_the_problems_of_auto_are_those_of_the_choice_that_has_the_fewest() -> None:
    auto = "strategy.name=auto "
    assert check(recipe_of(auto)) == check(recipe_of(auto + "activation_checkpointing.mode=auto")) == []
    # What one strategy reads leaves that one.
    assert (
        check(recipe_of(auto + "strategy.wrap_classes=[A]"))
        == check(recipe_of(auto + NVME + "strategy.nvme_path=/a"))
        == []
    )
    assert check(recipe_of(auto + "activation_checkpointing.mode=auto activation_checkpointing.every_n_layers=2")) == []
    assert check(recipe_of(auto, "extra.training_arguments='{ddp_find_unused_parameters: true}'")) == []
    (problem,) = check(recipe_of(auto + "strategy.wrap_classes=[A] strategy.overlap_comm=false"))
    assert problem.path == "strategy"
