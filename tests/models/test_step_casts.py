"""Adapters are cast to 16 bits once in a step; all weights, with each layer that is recomputed, and no copy stays.
Neither changes a number."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import yaml
from small import RECIPE, place_with, set_up
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from toolkit.models.cast_choice import drops_casts
from toolkit.models.step_casts import StepCasts, drop_with_layers
from toolkit.models.tiny import shrink
from toolkit.recipe import Recipe
from toolkit.train import setup
from toolkit.train.evaluation.evaluate import generate

SETTINGS = ("method=lora", "precision=bf16", "max_steps=3", "batch.micro_batch_size=2")

place = place_with("llama")


class Casts(TorchDispatchMode):
    """Counts the copies of some tensors in 16 bits."""

    def __init__(self, watched: Any) -> None:
        super().__init__()
        self.count, self._watched = 0, {id(each) for each in watched}
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._watched:
            self.count += 1
            self._made.append(StorageWeakRef(made.untyped_storage()))
        return made

    @property
    def alive(self) -> int:
        """How many of the copies still have their memory, whoever holds them."""
        return sum(not each.expired() for each in self._made)


class Steps(TrainerCallback):
    """What steps log, and the copies that each makes."""

    def __init__(self, casts: Casts) -> None:
        self.logged: list[tuple[float, float]] = []
        self.copies: list[int] = []
        self._casts = casts

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.copies.append(-self._casts.count)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.copies[-1] += self._casts.count

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged.append((logs["loss"], logs["grad_norm"]))


def train(kept: bool, *overrides: str) -> tuple[int, Steps]:
    """The number of trained parameters, and what the steps of a training did."""
    trainer = set_up(*SETTINGS, "method.lora_dropout=0.1", *overrides, f"output.name=run_{kept}").trainer
    assert trainer.casts
    trainer.casts = trainer.casts if kept else None
    adapters = [each for each in trainer.model.parameters() if each.requires_grad]
    with Casts(adapters) as casts:
        steps = Steps(casts)
        trainer.add_callback(steps)
        trainer.train()
    return len(adapters), steps


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_an_adapter_is_cast_once_in_a_step(checkpointing: str) -> None:
    adapters, kept = train(True, f"activation_checkpointing={checkpointing}")
    _, plain = train(False, f"activation_checkpointing={checkpointing}")
    assert kept.logged == plain.logged and len(kept.logged) == 3
    assert kept.copies == [adapters] * 3
    # Two micro-batches, and once more for what is recomputed.
    assert plain.copies == [2 * adapters * (2 if checkpointing == "full" else 1)] * 3


@pytest.mark.parametrize("override", ["precision=fp32", "method=full", "compile=layers"])
def test_nothing_is_kept_that_is_large_or_not_cast(override: str) -> None:
    assert set_up(*SETTINGS, override).trainer.casts is None


def cast(weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.nn.functional.linear(torch.ones(1, 2), weight)


def test_an_error_in_a_micro_batch_leaves_no_stale_copy() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ZeroDivisionError), StepCasts().micro_batch(last=False):
        cast(weight)
        raise ZeroDivisionError
    with torch.no_grad():
        weight.mul_(3)
    assert cast(weight).tolist() == [[6, 6]]


def test_a_backward_pass_in_another_thread_drops_no_copies() -> None:
    """As on a GPU, where layers are recomputed in autograd's own thread."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    casts, step = StepCasts(), [False, True]
    with Casts([weight]) as seen:
        for last in step:
            with casts.micro_batch(last):
                loss = torch.utils.checkpoint.checkpoint(cast, weight, use_reentrant=False).sum()
                casts.keep_in_backward(loss)
                # The counter is of this thread, as copies of the other would be dropped with its `autocast`.
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
    assert seen.count == 1
    assert weight.grad is not None and weight.grad.tolist() == [[2, 2], [2, 2]]
    with torch.no_grad():
        weight.mul_(3)
    assert cast(weight).tolist() == [[6, 6]]


FULL = ("method=full", "precision=bf16", "batch.micro_batch_size=2", "max_steps=2")


def train_in_full(*overrides: str) -> tuple[list[int], list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Copies that are left when the last layer of each forward pass is done, what was logged, and the new weights."""
    trainer = set_up(*FULL, *overrides, "output.name=full").trainer
    left: list[int] = []
    matrices = [each.weight for each in trainer.model.model.layers.modules() if isinstance(each, torch.nn.Linear)]
    assert len(matrices) == 14
    with Casts(matrices) as casts:
        norm = trainer.model.model.norm
        # Before the first step the run asks the model what it computes, in evaluation mode.
        norm.register_forward_pre_hook(lambda *_: left.append(casts.alive) if norm.training else None)
        steps = Steps(casts)
        trainer.add_callback(steps)
        trainer.train()
    # Two micro-batches of two layers, in the forward pass and again; with `every_n_layers` one layer once.
    assert set(steps.copies) == {2 * 2 * 14 if "every_n_layers" not in str(overrides) else 2 * 3 * 7}
    return left, steps.logged, {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")  # TRL calls it.
@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["activation_checkpointing=full"], 0),
        (["activation_checkpointing=selective"], 0),
        # The backward pass of the layer that is not recomputed reads its seven.
        (["activation_checkpointing.mode=full", "activation_checkpointing.every_n_layers=2"], 7),
    ],
    ids=["full", "selective", "every second"],
)
def test_copies_of_layers_that_are_recomputed_go_with_them(
    overrides: list[str], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, logged, weights = train_in_full(*overrides)
    monkeypatch.setattr(setup, "drops_casts", lambda recipe: False)
    before, *same = train_in_full(*overrides)
    assert left == [kept] * 4 and before == [14] * 4
    assert logged == same[0] and len(logged) == 2
    assert weights.keys() == same[1].keys() and all(torch.equal(each, same[1][name]) for name, each in weights.items())


def test_what_is_generated_casts_each_weight_once() -> None:
    session = set_up(*FULL, "activation_checkpointing=full", "output.name=generated")
    model = session.trainer.accelerator.prepare_model(session.trainer.model)
    with Casts([model.model.layers[0].mlp.up_proj.weight]) as casts:
        generated = generate(model, session.tokenizer, [[5, 6, 7]], 4, frozenset(), "bfloat16")
    assert casts.count == 1 and generated.shape == (1, 4)


@pytest.mark.parametrize("every", [1, 2])
def test_gradients_of_weights_that_layers_share_are_those_of_copies_of_their_own(every: int) -> None:
    """Zamba 2 attends with the same weights in several layers. Copies that they share have their gradients summed in
    16 bits, and those of a layer of its own are the same bit for bit."""
    small = shrink(AutoConfig.for_model("zamba2").to_dict())
    small |= {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1}
    config = AutoConfig.for_model(**{key: value for key, value in small.items() if key != "hybrid_layer_ids"})
    ids = torch.arange(64).reshape(2, 32)

    def gradients(drops: bool, cache: bool = True) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        if drops:
            drop_with_layers(model)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    dropped, uncached, cached = gradients(True), gradients(False, cache=False), gradients(False)
    assert dropped.keys() == uncached.keys() == cached.keys()
    assert sum("shared_transformer" in name for name in dropped) >= 6
    for name, gradient in dropped.items():
        assert torch.equal(gradient, uncached[name]), name
        if "shared_transformer" in name:
            assert (gradient - cached[name]).norm() <= 2**-8 * gradient.norm(), name
        else:
            assert torch.equal(gradient, cached[name]), name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"precision": "fp16"}, True),
        ({"precision": "fp8"}, True),
        ({"activation_checkpointing": {"mode": "offload"}}, True),
        ({"activation_checkpointing": {"mode": "full", "every_n_layers": 2}}, True),
        ({"parallel": {"pipeline": 2}}, True),
        # Adapters are kept for a step, and in a pipeline what is not recomputed.
        ({"method": {"name": "lora"}}, False),
        ({"activation_checkpointing": {"mode": "full", "every_n_layers": 2}, "parallel": {"pipeline": 2}}, False),
        # The backward pass reads the copies.
        ({"activation_checkpointing": {"mode": "none"}}, False),
        ({"activation_checkpointing": {"mode": "elementwise"}}, False),
        # None are made.
        ({"precision": "fp32"}, False),
        ({"precision": "pure_bf16"}, False),
        ({"strategy": {"name": "zero2"}}, False),
        ({"strategy": {"name": "fsdp"}}, False),
    ],
    ids=str,
)
def test_copies_go_where_they_are_many_and_nothing_reads_them(changes: dict[str, Any], expected: bool) -> None:
    values = yaml.safe_load(RECIPE) | {"precision": "bf16", "strategy": {"name": "ddp"}}
    recipe = Recipe.model_validate(values | {"activation_checkpointing": {"mode": "full"}} | changes)
    assert drops_casts(recipe) is expected
