"""Bytes of states, against tables that others have published."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from arithmetic import recipe
from transformers import TrainingArguments

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.memory.states import States, moment_bytes, paged_bytes, states, stored_bytes, whole_model
from toolkit.planner.trace.types import Amount, Tensors, Trace
from toolkit.planner.workload import WIDTH, Workload
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.sections import Optimizer


def _optimizer(name: str, **values: object) -> Optimizer:
    return Optimizer(name=name, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)], ids=["whole", "zero1", "zero2", "zero3"]
)
def test_the_zero_papers_model_of_7_5_billion_on_64_devices(stage, gigabytes):
    """Figure 1 and table 1 of Rajbhandari et al. 2020: 2 bytes for weights, 2 for gradients, 12 for the optimizer."""
    wanted = recipe(strategy={"name": f"zero{stage}" if stage else "ddp"}, batch={"global_batch_size": 64})
    over = Workload(wanted, batch_layout(wanted, 64), find("h200x8x8"), Trace(1, (), (), {}, Amount(), 0, None)).over
    each = 2 / over.parameters + 2 / over.gradients + 12 / over.optimizer
    assert 7.5 * each == pytest.approx(gigabytes, abs=0.05)


def per_parameter(optimizer, weights="float32", gradients="float32", masters=None):
    """Bytes per parameter of a large matrix that is trained in full."""
    numel = 2**22
    moments = moment_bytes(optimizer, (numel,), masters or weights) / numel
    return States(WIDTH[weights], 0, WIDTH[masters] if masters else 0, WIDTH[gradients], moments)


def total(held):
    return held.parameters + held.masters + held.gradients + held.optimizer


def test_adamw_takes_16_bytes_per_parameter_in_fp32_and_in_mixed_precision():
    adamw = _optimizer("adamw")
    assert total(per_parameter(adamw)) == 16
    mixed = per_parameter(adamw, weights="bfloat16", gradients="bfloat16", masters="float32")
    assert (mixed.parameters, mixed.gradients, mixed.masters, mixed.optimizer) == (2, 2, 4, 8)
    # Gradients that are summed in fp32, as our engines do.
    assert total(per_parameter(adamw, weights="bfloat16", masters="float32")) == 18


def test_optimizers_with_their_fp32_copy():
    def copy_and_moments(name):
        found = per_parameter(_optimizer(name), weights="bfloat16", masters="float32")
        return found.masters + found.optimizer

    assert copy_and_moments("adamw") == 12
    # Beside two bytes of moments there is an fp32 scale for every 256 of them.
    assert copy_and_moments("adamw_8bit") == pytest.approx(6 + 2 * 4 / 256)
    assert copy_and_moments("sgd") == 8
    assert copy_and_moments("adafactor") == 8  # Of a vector; a matrix has two vectors.


def test_pure_bf16_keeps_torchs_moments_in_bf16_and_bitsandbytes_in_8_or_32_bits():
    moments = {name: per_parameter(_optimizer(name), weights="bfloat16").optimizer for name in ("adamw", "lion", "sgd")}
    assert moments == {"adamw": 4, "lion": 4, "sgd": 2}
    assert per_parameter(_optimizer("adamw_8bit"), weights="bfloat16").optimizer == pytest.approx(2.03, abs=0.01)


def test_sizes_of_whole_models():
    adamw = _optimizer("adamw")
    fp32 = per_parameter(adamw)
    assert 1e9 * fp32.parameters == 4e9
    # Gradients, moments and 8 bytes of activations: 20 extra bytes, so 24 with the weights.
    assert 7e9 * (total(fp32) + 8) == pytest.approx(168e9)
    # BLOOM: bf16 weights, fp32 gradients, masters and moments.
    mixed = per_parameter(adamw, weights="bfloat16", masters="float32")
    assert 176e9 * total(mixed) == pytest.approx(3e12, rel=0.06)
    # A checkpoint has no gradients.
    assert 70e9 * (total(mixed) - mixed.gradients) == pytest.approx(980e9)


def test_every_optimizer_of_the_recipe_has_a_size():
    sizes = {name: moment_bytes(_optimizer(name), (4096, 4096)) / 4096**2 for name in OPTIMIZERS}
    assert sizes["lomo"] == 0 and all(size > 0 for name, size in sizes.items() if name != "lomo")
    assert sizes["ademamix"] == 12 and sizes["adamw_torch_4bit"] == pytest.approx(1 + 8 / 256)
    # Projected to rank 128 of 4096: a projection and two moments.
    assert sizes["galore_adamw"] == pytest.approx(3 * 4 * 128 / 4096)
    # ZeRO hands over vectors, which have neither rows and columns nor a projection.
    assert moment_bytes(_optimizer("adafactor"), (4096, 4096), flat=True) == 4 * 4096**2


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "rmsprop"])
def test_torchs_optimizers_hold_what_is_stated(name):
    kinds = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    parameter = torch.nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], momentum=0.9) if name == "sgd" else kinds[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.ndim]
    assert sum(each.nbytes for each in held) == moment_bytes(_optimizer(name), (64, 128), "bfloat16")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("adamw", {"amsgrad": True}),
        ("rmsprop", {"centered": True}),
        ("rmsprop", {"momentum": 0.9}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
        ("rmsprop", {"momentum": 0.0, "centered": False}),
        ("adafactor", {"beta1": 0.9}),
        ("adamw_8bit", {"optim_bits": 32}),
        ("adamw_8bit", {"amsgrad": True}),
        ("adamw_8bit", {"min_8bit_size": 10_000}),
        ("lion", {"optim_bits": 8}),
        ("ademamix", {"optim_bits": 8}),
        ("rmsprop_bnb_8bit", {"momentum": 0.9}),
    ],
    ids=str,
)
def test_optimizers_hold_what_their_arguments_add(name, args):
    """With `amsgrad`, say, a plan of AdamW's two moments would have a run that does not fit begin."""
    import bitsandbytes as bnb

    from toolkit.train.optimizer import optimizer_class

    bnb.optim.GlobalOptimManager.get_instance().initialize()
    wanted = recipe(optimizer={"name": name, "args": args})
    optim = wanted.optimizer.traits.transformers_name or name
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, optim=optim, learning_rate=1e-3)
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    kind, keywords = optimizer_class(wanted, arguments, torch.nn.Module())
    optimizer = kind([parameter], **keywords)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter].items()
    held = {key: value for key, value in state if torch.is_tensor(value) and value.ndim and not key.startswith("qmap")}
    assert sum(value.nbytes for value in held.values()) == moment_bytes(wanted.optimizer, (64, 128))


def test_paging_is_an_argument_too():
    shape = (1024, 1024)
    sizes = {
        (name, paged): paged_bytes(_optimizer(name, args={"is_paged": paged}), shape) > 0
        for name in ("adamw_8bit", "paged_adamw_8bit")
        for paged in (True, False)
    }
    assert sizes == {key: key[1] for key in sizes}


def test_muon_holds_one_momentum_for_a_matrix_of_a_layer_and_two_moments_for_the_rest():
    from toolkit.train.muon import Muon

    matrix, embedding, norm = parameters = [
        torch.nn.Parameter(torch.zeros(*shape)) for shape in ((64, 128), (300, 64), (64,))
    ]
    optimizer = Muon([{"params": parameters}], {matrix})
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer.step()
    for each, place in ((matrix, "layer"), (embedding, "embeddings"), (norm, "layer")):
        held = [value for value in optimizer.state[each].values() if torch.is_tensor(value) and value.ndim]
        assert sum(value.nbytes for value in held) == moment_bytes(_optimizer("muon"), tuple(each.shape), place=place)
    # A head that is not tied, positions, and experts, which are one tensor of three dimensions.
    for shape, place in (((300, 64), "head"), ((128, 64), "other"), ((8, 64, 128), "layer")):
        assert moment_bytes(_optimizer("muon"), shape, place=place) == 8 * math.prod(shape)


@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "ademamix_8bit", "lion"])
@pytest.mark.parametrize("rows", [8, 64], ids=["small", "large"])
def test_bitsandbytes_optimizers_hold_what_is_stated(name, rows):
    import bitsandbytes as bnb

    kinds = {
        "adamw_8bit": bnb.optim.AdamW8bit, "lion_8bit": bnb.optim.Lion8bit, "lion": bnb.optim.Lion32bit,
        "ademamix_8bit": bnb.optim.AdEMAMix8bit,
    }  # fmt: skip
    # What trainings in this process have said of their embeddings holds for any optimizer made later.
    bnb.optim.GlobalOptimManager.get_instance().initialize()
    parameter = torch.nn.Parameter(torch.zeros(rows, 128))
    optimizer = kinds[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {key: value for key, value in optimizer.state[parameter].items() if torch.is_tensor(value)}
    own = sum(value.nbytes for key, value in held.items() if not key.startswith("qmap"))
    assert own == moment_bytes(_optimizer(name), (rows, 128))


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_4_bit_weights_take_what_bitsandbytes_stores(double):
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(torch.randn(256, 384), quant_type="nf4", compress_statistics=double)
    tensors = [packed, state.absmax, state.code]
    if double:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    planned = stored_bytes(Tensors("layer", (256, 384), 1, False, "nf4"), 2, double)
    assert planned == sum(each.nbytes for each in tensors)
    # The paper's figures: 0.5 and 0.127 bits beside the four.
    large = Tensors("layer", (8192, 8192), 1, False, "nf4")
    bits = 8 * stored_bytes(large, 2, double) / large.numel
    assert bits == pytest.approx(4.127 if double else 4.5, abs=0.001)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_scales_of_4_bits_are_whole_on_every_rank(strategy):
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(384, 256, bias=False, quant_storage=torch.bfloat16).to("cpu")
    share = torch.chunk(layer.weight, 4)[0]
    assert share.quant_state is layer.quant_state and share.nbytes == 256 * 384 / 2 / 4
    one = Tensors("layer", (256, 384), 1, False, "nf4")
    scales = stored_bytes(one, 2) - 256 * 384 / 2
    assert states(workload(strategy, (one,))).parameters == share.nbytes + scales


def test_8_bit_weights_take_a_byte_and_a_scale_per_row():
    assert stored_bytes(Tensors("layer", (256, 384), 1, False, "int8"), 2) == 256 * 384 + 4 * 256
    assert math.isclose(stored_bytes(Tensors("layer", (256, 384), 1, False, "base"), 2), 2 * 256 * 384)


# Bytes that can be added up by hand: two frozen layers of 30 x 10 in bf16, two adapters of 6 x 10, a frozen norm.
SMALL = (
    Tensors("layer", (30, 10), 2, False, "base"),
    Tensors("layer", (6, 10), 2, True, "adapter"),
    Tensors("other", (10,), 1, False, "base"),
)


def workload(strategy, tensors=SMALL, devices="h200x4", **sections):
    sections = {"method": {"name": "lora"}, "precision": "bf16", "strategy": {"name": strategy}, **sections}
    hardware = find(devices)
    wanted = recipe(**sections)
    return Workload(
        wanted, batch_layout(wanted, hardware.devices), hardware, Trace(2, tensors, (), {}, Amount(), 0, None)
    )


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        # Adapters in fp32 are their own masters: 4 bytes of 120, as many of gradients, and two moments.
        ("ddp", States(2 * 610, 4 * 120, 0, 4 * 120, 8 * 120)),
        # ZeRO's are bf16 with fp32 masters; of these and of the moments each rank has 30.
        ("zero1", States(2 * 610, 2 * 120, 4 * 30, 4 * 120, 8 * 30)),
        ("zero2", States(2 * 610, 2 * 120, 4 * 30, 4 * 30, 8 * 30)),
        # A quarter of each parameter, rounded up: 75 of 300, 15 of 60, 3 of 10.
        ("zero3", States(2 * (75 * 2 + 3), 2 * 30, 4 * 30, 4 * 30, 8 * 30)),
        # By rows, rounded up: 8 of 30, 2 of 6, 3 of 10.
        ("fsdp", States(2 * (8 * 10 * 2 + 3), 4 * 40, 0, 4 * 40, 8 * 40)),
    ],
)
def test_one_ranks_share_of_a_small_model(strategy, held):
    assert states(workload(strategy)) == held


def test_unified_memory_holds_large_states_of_paged_optimizers_but_not_of_embeddings():
    def paged(strategy, *tensors):
        return states(workload(strategy, tensors, "h200", optimizer={"name": "paged_adamw_32bit"})).paged

    # From 100,000 elements on, two moments of 4 bytes.
    assert paged("ddp", Tensors("layer", (400, 250), 3, True, "adapter")) == 3 * 800_000
    assert paged("ddp", Tensors("layer", (399, 250), 3, True, "adapter")) == 0
    assert paged("ddp", Tensors("embeddings", (400, 250), 1, True, "base")) == 0
    assert paged("ddp", Tensors("embeddings", (100_000,), 1, True, "base")) == 800_000
    # ZeRO hands over one vector of all.
    assert paged("zero2", Tensors("layer", (50, 1000), 2, True, "adapter")) == 800_000
    usual = workload("ddp", (Tensors("layer", (400, 250), 3, True, "adapter"),), "h200")
    assert states(usual).paged == 0


def test_what_is_published_is_the_model_or_its_adapters():
    assert whole_model(workload("ddp")) == 4 * 120
    assert whole_model(workload("zero3")) == 2 * 120
    full = tuple(dataclasses.replace(each, trained=each.trained is False, kind="base") for each in SMALL)
    assert whole_model(workload("ddp", full, method={"name": "full"})) == 4 * 730


def test_state_of_small_odd_and_projected_parameters():
    def bytes_of(name, shape, **kwargs):
        return moment_bytes(_optimizer(name, **kwargs), shape)

    # Few bits from 4,096 elements on, and under torchao only in whole blocks.
    assert bytes_of("adamw_8bit", (4095,)) == 8 * 4095
    assert bytes_of("adamw_8bit", (4096,)) == 2 * (4096 + 4 * 16)
    assert bytes_of("adamw_8bit", (4097,)) == 2 * (4097 + 4 * 17)
    assert bytes_of("adamw_torch_8bit", (4097,)) == 8 * 4097
    assert bytes_of("adamw_torch_8bit", (4352,)) == 2 * (4352 + 4 * 17)
    assert bytes_of("adamw_torch_4bit", (4224,)) == 8 * 4224
    assert bytes_of("adamw_torch_4bit", (4224,), args={"block_size": 128}) == 2 * (4224 / 2 + 4 * 33)
    assert bytes_of("adamw_torch_4bit", (4352,)) == 2 * (4352 / 2 + 4 * 17)
    # Embeddings stay out of 8 bits under bitsandbytes, and not under torchao.
    embedding = {"shape": (64, 64), "place": "embeddings"}
    assert moment_bytes(_optimizer("adamw_8bit"), **embedding) == 8 * 4096
    assert moment_bytes(_optimizer("adamw_torch_8bit"), **embedding) == 2 * (4096 + 4 * 16)
    # Rows and columns of a matrix in fp32; all of a vector.
    assert bytes_of("adafactor", (30, 10)) == 4 * 40 and bytes_of("adafactor", (4, 30, 10)) == 4 * (120 + 40)
    # A projection of 10 x 4 and two moments of 30 x 4; no rank is above the smaller side.
    assert bytes_of("galore_adamw", (30, 10), args={"rank": 4}) == 4 * (40 + 2 * 120)
    assert bytes_of("galore_adamw", (30, 10), args={"rank": 64}) == 4 * (100 + 2 * 300)
    assert bytes_of("galore_adafactor", (30, 10), args={"rank": 4}) == 4 * (40 + 30 + 4)
    assert bytes_of("sgd", (30, 10), momentum=0) == 0 and bytes_of("sgd", (30, 10)) == 4 * 300
