"""Products of trained linear layers in fp8: how near they are, which layers have them, and the same on every engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import models_doc
import pytest
import small
import torch
from harness import write_recipe
from matrix import RECIPE, Difference, Launcher
from ranks import Ranks
from tiny import models_and_rows
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, T5Config, T5ForConditionalGeneration
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.common import UserError
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.quantization.fp8_products import Fp8Products, multiply_in_fp8
from toolkit.models.tiny import tiny_model
from toolkit.recipe import model_configs

ARCHITECTURES = [
    ("seq2seq" if title == "Encoder-decoders" else "sft", kind)
    for title, table in re.findall(r"^## (.*)\n\n.*\n\n((?:\|.*\n)+)", models_doc.PAGE.read_text("utf-8"), re.MULTILINE)
    for kind in re.findall(r"^\| (\S+) \| (?:fused|own) \|", table, re.MULTILINE)
]
SCALINGS = ("tensorwise", "rowwise")


def deep(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes | {"num_hidden_layers": 4, "vocab_size": 128, **changes})
    return AutoModelForCausalLM.from_config(config).train()


def in_fp8(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_modules() if isinstance(each, Fp8Products)}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [64, 37])
def test_all_three_products_are_as_near_as_three_bits_of_mantissa_are(scaling: str, rows: int) -> None:
    model = deep()
    plain = model.model.layers[1].mlp.up_proj
    inputs = torch.randn(rows, 64, requires_grad=True)
    weights = torch.randn(rows, 128) * 1e-4

    def products(layer: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(inputs)
        assert output.dtype == torch.bfloat16
        return [output.detach().float(), *torch.autograd.grad((output * weights).sum(), [inputs, layer.weight])]

    expected = products(plain)
    multiply_in_fp8(model, scaling)
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, Fp8Products) and layer.weight is plain.weight and layer.weight.dtype == torch.float32
    # Of e4m3 a number is off by up to 2**-4 of itself, 2.6% on average; of e5m2, of gradients, by twice as much.
    for got, wanted in zip(products(layer), expected, strict=True):
        assert got.dtype == wanted.dtype
        assert 0.01 < ((got - wanted).norm() / wanted.norm()).item() < 0.07


def test_without_autocast_a_layer_keeps_its_inputs_and_weights_themselves() -> None:
    """No copies are made of what is in bf16 already."""
    model = deep().bfloat16()
    multiply_in_fp8(model, "tensorwise")
    layer, inputs = model.model.layers[1].mlp.up_proj, torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(inputs)
    assert kept == [inputs.data_ptr(), layer.weight.data_ptr()]
    gradients = torch.autograd.grad(output.sum(), [inputs, layer.weight])
    assert {each.dtype for each in (output, *gradients)} == {torch.bfloat16}


def test_the_first_and_the_last_layer_and_what_is_no_layer_stay_as_they_are() -> None:
    model = deep()
    names = list(model.state_dict())
    count = multiply_in_fp8(model, "tensorwise")
    assert {name.split(".")[2] for name in in_fp8(model)} == {"1", "2"} and len(in_fp8(model)) == 2 * 7
    assert count == sum(model.get_submodule(name).weight.numel() for name in in_fp8(model))
    assert list(model.state_dict()) == names
    both = T5ForConditionalGeneration(
        T5Config(d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=3, num_decoder_layers=4, vocab_size=64)
    )
    multiply_in_fp8(both, "rowwise")
    assert {tuple(name.split(".")[:3:2]) for name in in_fp8(both)} == {
        ("encoder", "1"),
        ("decoder", "1"),
        ("decoder", "2"),
    }


def test_sides_that_no_unit_takes_and_routers_are_passed_over() -> None:
    model = deep(intermediate_size=120)
    multiply_in_fp8(model, "tensorwise")
    assert {name.split(".")[-1] for name in in_fp8(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    model = deep()
    model.config.num_experts = 128
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(64, 128)
    multiply_in_fp8(model, "tensorwise")
    assert not any(name.endswith(".gate") for name in in_fp8(model))
    for model in (deep(num_hidden_layers=2), deep(hidden_size=72)):
        assert not model_configs.multiplies_in_fp8(model.config.to_dict()), "a plan says so before the run does"
        with pytest.raises(UserError, match="no linear layer between"):
            multiply_in_fp8(model, "tensorwise")


def test_compiled_layers_do_not_clamp_by_what_has_triton_store_fp8_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does from 2.14 on, and for ROCm before."""
    from torch._inductor.codegen.triton import TritonOverrides

    monkeypatch.setattr(torch.version, "hip", "7.0")
    for bound in (TritonOverrides.minimum("a", "b"), TritonOverrides.maximum("a", "b")):
        assert "PropagateNan" not in bound


@pytest.mark.matrix
def test_the_recipe_is_refused_for_architectures_without_such_layers() -> None:
    wrong = []
    for objective, kind in ARCHITECTURES:
        config = models_doc.stated(kind, objective)
        model = tiny_model(config, objective)
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        linear = any(type(each) is nn.Linear for layer in layers for each in layer.modules())
        between = (model_configs.num_layers(config.to_dict()) or 3) > 2
        if model_configs.multiplies_in_fp8(config.to_dict()) != (linear and between):
            wrong.append(kind)
    assert not wrong and len(ARCHITECTURES) > 190


@pytest.mark.matrix
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_layers_are_two_graphs_with_equal_losses(scaling: str) -> None:
    """One of the layers in bf16, one of those in fp8, whatever the size of a batch."""
    torch._dynamo.reset()
    model = deep()
    multiply_in_fp8(model, scaling)

    def loss(rows: int, length: int) -> float:
        ids = torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(length))
        with torch.autocast("cpu", torch.bfloat16):
            result = model(input_ids=ids, labels=ids, use_cache=False).loss
        result.backward()
        return result.item()

    sizes = ((2, 17), (3, 40), (2, 33))
    expected = [loss(*size) for size in sizes]
    layers = CompiledLayers(model, backend="aot_eager")
    assert [loss(*size) for size in sizes] == pytest.approx(expected, rel=2e-3)
    assert layers.graphs == 2


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> Launcher:
    """As that of `whole/test_matrix.py`, with a model that has layers between its first and its last."""
    folder = tmp_path_factory.mktemp("fp8")
    models_and_rows(folder, {"llama": "meta-llama/Llama-3.2-1B"})
    config = AutoConfig.from_pretrained(folder / "llama")
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "llama")
    write_recipe(folder, "matrix", RECIPE)
    write_recipe(folder, "small", small.RECIPE)
    return Launcher(folder, ranks)


def test_pure_fp8_holds_nothing_in_fp32(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(launcher.folder)
    trainer = small.set_up("precision=pure_fp8").trainer
    gradients: set[torch.dtype] = set()
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: gradients.add(each.grad.dtype))
    trainer.train()  # The run itself compares what it finds.
    assert len(in_fp8(trainer.model)) == 2 * 7
    moments = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(list(trainer.model.parameters()))
    dtypes = {each.dtype for each in (*trainer.model.parameters(), *moments)}
    assert dtypes == gradients == {torch.bfloat16}


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("zero1", "zero2", "zero3", "fsdp", "fsdp_offload")),
    ],
)
@pytest.mark.parametrize(
    ("precision", "without", "scaling"), [("fp8_rowwise", "bf16", "rowwise"), ("pure_fp8", "pure_bf16", "tensorwise")]
)
def test_every_engine_trains_in_fp8_as_one_process_does(
    precision: str, without: str, scaling: str, engine: str, launcher: Launcher
) -> None:
    common, name = [f"precision={precision}", "batch.micro_batch_size=2"], f"{precision}-{engine}"
    reference = launcher.result(precision, "single", *common)
    other = launcher.result(without, "single", f"precision={without}", "batch.micro_batch_size=2")
    difference = Difference.between(launcher.result(name, engine, *common), reference)
    # As engines differ in bf16, see `whole/test_matrix.py`, rounded more coarsely.
    assert difference.loss < 2e-3 and difference.weights < 4e-2, difference
    # Not because nothing is in fp8.
    assert reference.losses != other.losses
    assert Difference.between(reference, other).loss < 5e-3
    manifest = Path(launcher.folder, "runs", name, "manifest.json").read_text(encoding="utf-8")
    assert f'"fp8_products": "{scaling}"' in manifest
