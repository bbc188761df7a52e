"""Traces against the same model with real tensors, and against what is known of models on paper."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from harness import ROOT
from tiny import shrink, tiny_encoder, tiny_model
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, MarianConfig, T5Config
from trl.trainer import utils as trl_utils

from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import BatchLayout
from toolkit.models.adapters import add_method
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.dropout import dropout
from toolkit.models.load import ModelSource
from toolkit.models.output_heads import fused_head, head_chunk
from toolkit.models.output_heads.head_choice import choose
from toolkit.models.output_heads.output_head import HeadChoice
from toolkit.models.quantization.fp8_products import multiply_in_fp8
from toolkit.models.tiny import shrink as shrunk
from toolkit.planner.plan import UnknownSize
from toolkit.planner.trace import fake_kernels, fit, passes, store
from toolkit.planner.trace.analytic import estimated
from toolkit.planner.trace.fit import trace
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.shallow import Shallow, _layers, build, depths, load_config
from toolkit.planner.trace.tracker import Timeline, Tracker
from toolkit.planner.trace.types import Moment, Shape, Trace
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.precisions import FP8_SCALING

LLAMA_1B, LLAMA_8B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"
BATCH, LENGTH = 3, 96
FULL: dict[str, Any] = {"name": "full"}
LORA: dict[str, Any] = {"name": "lora", "r": 8}
QLORA = LORA | {"quantization": "nf4"}
CASES = [
    ("meta-llama/Llama-3.2-1B", QLORA, "bf16", "none", True),
]
MORE_CASES = [
    ("Qwen/Qwen3-30B-A3B", FULL, "bf16", "none", False),
    ("meta-llama/Llama-3.2-1B", FULL, "fp32", "none", False),
    ("Qwen/Qwen3-0.6B", LORA, "bf16", "selective", True),
    ("google/gemma-3-1b-it", LORA, "fp32", "full", True),
    ("facebook/blenderbot-400M-distill", FULL, "bf16", "none", False),
    ("meta-llama/Llama-3.2-1B", FULL, "bf16", "full", False),
    ("meta-llama/Llama-3.2-1B", LORA | {"quantization": "int8"}, "bf16", "full", False),
    ("meta-llama/Llama-3.2-1B", LORA | {"use_dora": True}, "fp32", "none", False),
    ("Qwen/Qwen3-0.6B", FULL, "fp32", "none", True),
    ("google/gemma-3-1b-it", FULL, "bf16", "none", False),
    ("openai-community/gpt2", FULL, "bf16", "none", False),
    ("openai-community/gpt2", LORA, "fp32", "full", False),
    ("Qwen/Qwen3-30B-A3B", LORA, "fp32", "full", False),
    ("Qwen/Qwen3-30B-A3B", QLORA, "bf16", "full", False),
    ("Qwen/Qwen3-30B-A3B", QLORA, "bf16", "none", True),
    ("facebook/blenderbot-400M-distill", LORA, "fp32", "full", False),
]
"""What the others have in other pairs, and what `test_memory.py` sees in real trainings."""


def setting(model: str = LLAMA_1B, **changes: Any) -> Setting:
    """A shipped model in full fine-tuning with bf16 autocast, packed, on a current GPU."""
    values: dict[str, Any] = {
        "config": model_configs.bundled()[model].config,
        "device": "cuda",
        "objective": "sft",
        "method": {"name": "full", "freeze": []},
        "load": "float32",
        "local": "float32",
        "autocast": "bfloat16",
        "attention": "torch_varlen",
        "layout": "flat",
    }
    return Setting(**values | changes)


def peak(trace: Trace, shape: Shape, phase: str, accumulating: bool = False) -> float:
    """Largest sum of a phase, in bytes."""

    def total(moment: Moment) -> float:
        parts = (moment.activations, moment.casts, moment.logits, moment.gradients)
        return sum(part.at(shape) for part in parts)

    return max(
        total(moment) for moment in trace.moments if (moment.phase, moment.accumulating) == (phase, accumulating)
    )


_TRACES: dict[str, Trace] = {}


def traced(setting: Setting) -> Trace:
    """The trace of a setting, made once for all tests that ask for it; it leaves random numbers and models alone."""
    if setting.key() not in _TRACES:
        before = torch.get_rng_state()
        _TRACES[setting.key()] = trace(setting)
        assert torch.equal(torch.get_rng_state(), before)
        normed = torch.nn.functional.layer_norm(torch.ones(1, 2, dtype=torch.bfloat16), (2,))
        assert normed.dtype == torch.bfloat16
    return _TRACES[setting.key()]


@pytest.mark.parametrize(("once", "period"), [(0, 1), (1, 1), (3, 1), (0, 2), (1, 2), (0, 6)])
def test_traced_depths_end_as_the_model_does(once: int, period: int) -> None:
    for total in range(once + 1, 40):
        small, large = depths(total, once, period)
        assert small >= 1 and large == small + period
        if total > once + 4 * period:
            assert small >= max(once + period, 2 * period)
        assert (total - small) % period == 0
        assert large <= max(total, once + 4 * period)


def test_what_layers_do_once_is_no_part_of_later_micro_batches() -> None:
    """Layers in 4 bits convert their bias when they are first called, which must not shift what else is traced."""
    values = shrink(dict(model_configs.bundled()["openai-community/gpt2"].config))
    made = traced(setting(config=values, method=QLORA, load="bfloat16", attention="sdpa", layout="padded"))

    for place in ("first_layer", "last_layer"):
        first, later = (
            {(each.activations, each.casts) for each in made.moments if key(each) == ("forward", place, accumulating)}
            for accumulating in (False, True)
        )
        assert first == later


def key(moment: Moment) -> tuple[str, str, bool]:
    return moment.phase, moment.place, moment.accumulating


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model", "method", "precision", "mode", "packing"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_CASES)],
    ids=[f"{model.split('/')[1]}-{index}" for index, (model, *_) in enumerate(CASES + MORE_CASES)],
)
def test_a_trace_is_what_real_tensors_take(
    model: str, method: dict[str, Any], precision: str, mode: str, packing: bool, tmp_path: Path
) -> None:
    folder = tiny_model(model, tmp_path)
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"sources": ["unread"], "packing": packing},
            "objective": "seq2seq" if "blenderbot" in model else "sft",
            "method": method,
            "precision": precision,
            "activation_checkpointing": {"mode": mode},
            "batch": {"seq_len": LENGTH},
        }
    )
    config = json.loads((folder / "config.json").read_text())
    cpu = setting_of(recipe, config, "cpu", "sdpa", BatchLayout(BATCH, BATCH, 1, 1, LENGTH))
    base = ModelSource.open(recipe).load(dtypes(recipe), "sdpa")
    trained = add_method(base, recipe, dtypes(recipe))
    trained.train()

    real = passes.run(Shallow(trained, _layers(base)), cpu, HeadChoice(), contextlib.nullcontext(), BATCH, LENGTH)
    planned = trace(cpu)

    shape = Shape(planned.layers, BATCH, LENGTH)
    for name, timeline in real.timelines.items():
        measured = max(sum(live) for live in timeline.live)
        estimate = peak(planned, shape, name.removesuffix("+"), name.endswith("+"))
        assert estimate == pytest.approx(measured, rel=0.025), name
    parameters = sum(_numel(each) for each in trained.parameters())
    assert planned.elements() == parameters
    assert planned.elements(trained=True) == sum(each.numel() for each in trained.parameters() if each.requires_grad)


@pytest.mark.parametrize(
    ("model", "method", "precision", "left"),
    [
        (LLAMA_1B, FULL, "fp32", 0.75),
        pytest.param(LLAMA_1B, FULL, "bf16", 0.6, marks=pytest.mark.matrix),  # Copies of weights are made again, too.
        pytest.param(LLAMA_1B, FULL, "pure_bf16", 0.75, marks=pytest.mark.matrix),
        pytest.param(LLAMA_1B, FULL, "pure_fp8", 0.9, marks=pytest.mark.matrix),
        pytest.param(LLAMA_1B, LORA, "bf16", 0.75, marks=pytest.mark.matrix),
        pytest.param(LLAMA_1B, QLORA, "bf16", 0.75, marks=pytest.mark.matrix),
        # Its MLP is narrower beside its attention.
        pytest.param("google/gemma-3-1b-it", FULL, "pure_bf16", 0.8, marks=pytest.mark.matrix),
        pytest.param("Qwen/Qwen3-0.6B", LORA, "bf16", 0.75, marks=pytest.mark.matrix),
        pytest.param("Qwen/Qwen3-0.6B", LORA | {"lora_dropout": 0.1}, "bf16", 0.75, marks=pytest.mark.matrix),
    ],
)
def test_compiled_layers_keep_what_is_traced_of_them(
    model: str, method: dict[str, Any], precision: str, left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Inductor, whose graphs hold what they keep; the trace has none of it compiled. The second graphs are not those
    of torch's cache, which has the first ones by then.

    Args:
        left: The share that is kept at most where element-wise work is computed again.
    """
    products = FP8_SCALING.get(precision, "")
    folder = tiny_model(model, tmp_path, layers=5 if products else 2)
    config = json.loads((folder / "config.json").read_text())
    recipe = Recipe.model_validate(
        {"model": {"path": str(folder)}, "data": {"sources": ["unread"], "packing": True}}
        | {"method": method, "precision": precision}
    )
    cpu = setting_of(recipe, config, "cpu", "sdpa", BatchLayout(BATCH, BATCH, 1, 1, LENGTH))
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    plain, elementwise = (_kept_by_inductor(recipe, config, each) for each in (False, True))
    for mode, measured in (("none", plain), ("elementwise", elementwise)):
        planned = traced(dataclasses.replace(cpu, compiled=True, checkpointing=mode, products=products))
        assert planned.kept.at(Shape(1, BATCH, LENGTH)) == pytest.approx(measured, rel=0.01), mode
    assert traced(cpu).kept.at(Shape(1, BATCH, LENGTH)) > 1.1 * plain
    assert elementwise < left * plain


def _kept_by_inductor(recipe: Recipe, config: dict[str, Any], elementwise: bool) -> float:
    """Bytes that a layer keeps for the backward pass."""
    torch._dynamo.reset()
    types = dtypes(recipe)
    trained = add_method(ModelSource.open(recipe).load(types, "sdpa"), recipe, types).train()
    # The first and the last layer multiply in bf16.
    ends = recipe.precision in FP8_SCALING
    if ends:
        multiply_in_fp8(trained, FP8_SCALING[recipe.precision])
    layers = CompiledLayers(trained, elementwise=elementwise)
    ids = torch.ones(BATCH, LENGTH, dtype=torch.long)
    positions = (ids.cumsum(1) - 1) % (LENGTH // 2)
    kept: dict[int, int] = {}
    weights = {each.untyped_storage()._cdata for each in (*trained.parameters(), *trained.buffers())}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    def bytes_with(count: int) -> int:
        kept.clear()
        for each in _layers(trained)[count:]:
            each.forward = lambda hidden, *args, **kwargs: hidden
        autocast = torch.autocast("cpu", getattr(torch, types.autocast)) if types.autocast else contextlib.nullcontext()
        with autocast, saved_tensors_hooks(note, lambda tensor: tensor):
            loss = trained(input_ids=ids, position_ids=positions, use_cache=False).logits.float().sum()
        total = sum(kept.values())
        loss.backward()
        return total

    most, least = config["num_hidden_layers"] - ends, 1 + ends
    deep = bytes_with(most)
    measured = (deep - bytes_with(least)) / (most - least)
    assert layers.graphs >= 1
    return measured


@pytest.mark.matrix
def test_documents_end_to_end_keep_what_was_measured_where_products_are_in_fp8() -> None:
    """On an H200 1.2B parameters in pure bf16, rows of 16,380 tokens, took 27.29 GiB, and 22.04 with products in fp8:
    25.3 of a token's 75.9 kB in each of the 14 layers that have such products."""
    plain = setting(load="bfloat16", local="bfloat16", autocast=None, objective="language_modelling", compiled=True)
    shape = Shape(1, 4, 4096)
    own, low = (traced(each).kept.at(shape) for each in (plain, dataclasses.replace(plain, products="tensorwise")))
    assert (own - low) / (4 * 4096) == pytest.approx(25.3e3, rel=0.07)


def test_of_compiled_layers_one_graph_serves_rows_of_every_length() -> None:
    """Most of what their trace costs is to make a graph."""
    torch._dynamo.reset()
    counters.clear()
    config = shrunk(dict(setting().config))
    traced(dataclasses.replace(setting(), config=config, compiled=True))
    assert counters["stats"]["unique_graphs"] == 1


def _numel(parameter: torch.nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def test_a_shallow_trace_says_what_a_deep_one_would() -> None:
    fake, shape = FakeTensorMode(allow_non_fake_inputs=True), Shape(5, 2, 4096)
    choice = choose(load_config(setting()))
    with fake_kernels.installed(setting()):
        whole = build(setting(), shape.layers, fake)
        deep = passes.run(whole, setting(), choice, fake, shape.batch, shape.seq_len)

    from_two_and_three = traced(setting())
    for phase in ("forward", "backward", "evaluation"):
        seen = max(sum(live) for live in deep.timelines[phase].live)
        assert peak(from_two_and_three, shape, phase) == pytest.approx(seen, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "device"),
    [
        ("t5", "cpu"),
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in [("umt5", "cpu"), ("mt5", "cuda"), ("t5", "cuda")]),
        *(pytest.param(kind, "cpu", marks=pytest.mark.matrix) for kind in ("mamba2", "zamba2", "bamba")),
    ],
)
def test_one_trace_serves_rows_of_any_length(kind: str, device: Any) -> None:
    """Biases of positions, which all rows of a batch share, and layers that pad each row to whole blocks."""
    pairs = kind in models_doc.ENCODER_DECODERS
    config = shrunk(AutoConfig.for_model(kind).to_dict()) | ({"decoder_start_token_id": 1} if pairs else {})
    each = setting(
        config=config, device=device, attention="sdpa" if pairs else "eager", layout="seq2seq" if pairs else "padded",
        objective="seq2seq" if pairs else "sft", autocast=None, masked=True, long=device == "cuda",
    )  # fmt: skip
    found, fake = traced(each), FakeTensorMode(allow_non_fake_inputs=True)
    with fake_kernels.installed(each):
        choice = choose(load_config(each), objective=each.objective)
        whole = build(each, found.layers, fake)
        for batch, length in ((3, 48), (4, 96), (2, 200), (2, 300)):
            seen = passes.run(whole, each, choice, fake, batch, length).timelines
            for phase in ("forward", "backward"):
                live = max(sum(live) for live in seen[phase].live)
                assert peak(found, Shape(found.layers, batch, length), phase) == pytest.approx(live, rel=0.03)


@pytest.mark.parametrize(
    ("checkpointing", "encoder"),
    [
        ("none", 6),
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in [("full", 6), ("none", 4)]),
    ],
)
def test_an_encoder_as_deep_as_the_decoder_is_traced_as_shallow(checkpointing: str, encoder: int) -> None:
    """With short rows gradients weigh most, and the peak is where the encoder's backward pass ends."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    config = AutoConfig.for_model("bart", d_model=64, vocab_size=512, encoder_layers=encoder, decoder_layers=6, **heads)
    each = setting(
        config=config.to_dict() | {"max_position_embeddings": 70_000}, objective="seq2seq", layout="seq2seq",
        attention="sdpa", masked=True, checkpointing=checkpointing,
    )  # fmt: skip
    found, fake = traced(each), FakeTensorMode(allow_non_fake_inputs=True)
    with fake_kernels.installed(each):
        assert len(build(each, 3, fake, encoder=True).encoder) == (3 if encoder == 6 else 0)
        whole = build(each, found.layers, fake)
        for batch, length in ((2, 32), (4, 256)):
            seen = passes.run(whole, each, HeadChoice(), fake, batch, length).timelines
            for phase in ("forward", "backward", "evaluation"):
                live = max(sum(live) for live in seen[phase].live)
                assert peak(found, Shape(found.layers, batch, length), phase) == pytest.approx(live, rel=0.01)


@pytest.mark.matrix
def test_encoder_and_decoder_with_configs_of_their_own_are_traced_as_shallow() -> None:
    part = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16, "vocab_size": 512}
    part |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("t5gemma", encoder=dict(part), decoder=dict(part), vocab_size=512)
    each = setting(
        config=config.to_dict() | {"decoder_start_token_id": 1}, objective="seq2seq", layout="seq2seq",
        attention="eager", masked=True,
    )  # fmt: skip
    found, fake = traced(each), FakeTensorMode(allow_non_fake_inputs=True)
    assert found.layers == 6
    with fake_kernels.installed(each):
        choice = choose(load_config(each), objective="seq2seq")
        assert len(build(each, 3, fake, encoder=True).encoder) == 3
        whole = build(each, found.layers, fake)
        for batch, length in ((2, 32), (4, 256)):
            seen = passes.run(whole, each, choice, fake, batch, length).timelines
            for phase in ("forward", "backward", "evaluation"):
                live = max(sum(live) for live in seen[phase].live)
                assert peak(found, Shape(found.layers, batch, length), phase) == pytest.approx(live, rel=0.01)


def check_batches_of_any_size(each: Setting) -> None:
    """A trace of long rows says what is seen where the loss has less than a chunk of tokens, and more."""
    found, fake, choice = traced(each), FakeTensorMode(allow_non_fake_inputs=True), choose(load_config(each))
    with fake_kernels.installed(each):
        whole = build(each, 3, fake)
        for batch, length in ((1, 128), (1, 512), (2, 1024), (1, 4096)):
            seen = passes.run(whole, each, choice, fake, batch, length).timelines
            for phase in ("forward", "backward"):
                live = max(sum(live) for live in seen[phase].live)
                assert peak(found, Shape(3, batch, length), phase) == pytest.approx(live, rel=0.025)


@pytest.mark.matrix
def test_one_trace_serves_batches_of_less_than_a_chunk_of_the_loss_too() -> None:
    check_batches_of_any_size(setting(checkpointing="full"))


@pytest.mark.matrix
@pytest.mark.parametrize("method", [FULL, LORA], ids=["full", "lora"])
def test_the_same_of_other_methods_and_heads(method: dict[str, Any]) -> None:
    qwen = model_configs.bundled()["Qwen/Qwen3-0.6B"].config | {"num_hidden_layers": 3}
    checkpointed = {"method": method, "activation_checkpointing": {"mode": "full"}}
    recipe = Recipe.model_validate(
        {"model": {"path": "any"}, "data": {"sources": ["any"], "packing": True}} | checkpointed
    )
    check_batches_of_any_size(setting_of(recipe, qwen, "cuda", "torch_varlen", BatchLayout(1, 1, 1, 1, 128)))


def sees_images(text: dict[str, Any]) -> dict[str, Any]:
    """A model with this decoder and 27 layers for images."""
    sees = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 27}
    return {"model_type": "gemma3", "text_config": text, "vision_config": sees | {"image_size": 56, "patch_size": 14}}


@pytest.mark.parametrize(("depth", "layers"), [(None, 14), (3, 3)])
def test_layers_for_images_are_not_those_that_text_goes_through(depth: int | None, layers: int) -> None:
    text = model_configs.bundled()["google/gemma-3-1b-it"].config | {"num_hidden_layers": 14}
    alone, inside = (
        build(setting(config=config, attention="sdpa", layout="packed"), depth, FakeTensorMode())
        for config in (text, sees_images(text))
    )

    assert len(inside.layers) == len(alone.layers) == layers
    sizes = [[parameter.shape for layer in each.layers for parameter in layer.parameters()] for each in (alone, inside)]
    assert sizes[0] == sizes[1]


@pytest.mark.matrix
def test_text_costs_the_same_in_a_model_that_sees_images() -> None:
    text = model_configs.bundled()["google/gemma-3-1b-it"].config | {"num_hidden_layers": 14}
    shape = Shape(14, 1, 4096)

    alone, inside = (
        traced(setting(config=config, attention="sdpa", layout="packed")) for config in (text, sees_images(text))
    )

    for phase in ("forward", "backward"):
        assert peak(inside, shape, phase) == pytest.approx(peak(alone, shape, phase), rel=0.02)
    assert inside.passes["forward"].matmul.at(shape) == pytest.approx(
        alone.passes["forward"].matmul.at(shape), rel=0.01
    )


@pytest.mark.matrix
def test_layers_may_differ_in_any_pattern() -> None:
    """Here two dense layers come first, of which no key that all models share says anything."""
    qwen = shrink(model_configs.bundled()["Qwen/Qwen3-30B-A3B"].config)
    config = qwen | {"num_hidden_layers": 4, "mlp_only_layers": [0, 1]}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))

    found = traced(setting(config=config, attention="sdpa", layout="packed", long=False))

    assert found.elements() == sum(parameter.numel() for parameter in model.parameters())
    layers = model.model.layers
    assert found.elements(place="layer") == sum(parameter.numel() for parameter in layers.parameters())
    assert len({sum(parameter.numel() for parameter in layer.parameters()) for layer in layers}) == 2


@pytest.mark.parametrize("kind", [T5Config, pytest.param(MarianConfig, marks=pytest.mark.matrix)])
def test_encoder_decoders_of_any_make_are_traced(kind: Any) -> None:
    """T5 leaves a parameter without a gradient; Marian needs a padding token that its own size has room for."""
    size = {"vocab_size": 1000, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = kind(**size, pad_token_id=0, **(layers if kind is MarianConfig else {}))
    with torch.device("meta"):
        model = AutoModelForSeq2SeqLM.from_config(config)

    values = {key: value for key, value in config.to_dict().items() if key != "pad_token_id"}
    found = traced(setting(config=values, objective="seq2seq", layout="seq2seq", attention="sdpa", long=False))

    assert found.elements() == sum(parameter.numel() for parameter in model.parameters())


def test_flops_are_those_of_the_paper() -> None:
    """Llama 3.2 1B at 4096 tokens: 2 FLOPs per weight of every matrix and token, attention 4 x hidden x length."""
    found = traced(setting())
    shape = Shape(16, 2, 4096)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    layers, head = (2 * shape.tokens * each for each in (16 * layer, 2048 * 128256))

    assert found.elements() == 1_235_814_400
    # The loss forms the gradients of the output head while its logits are there.
    assert found.passes["forward"].matmul.at(shape) == pytest.approx(layers + 3 * head, rel=1e-3)
    assert found.passes["forward"].attention.at(shape) == pytest.approx(16 * 4 * 2048 * shape.tokens * 4096, rel=1e-6)
    assert found.passes["backward"].matmul.at(shape) == pytest.approx(2 * layers, rel=1e-3)
    assert found.passes["backward"].attention.at(shape) == pytest.approx(2 * 16 * 4 * 2048 * shape.tokens * 4096)
    assert found.passes["recompute"].matmul.at(shape) == 0


@pytest.mark.matrix
def test_checkpointing_trades_memory_for_work() -> None:
    shape = Shape(16, 2, 4096)
    kept, dropped = traced(setting()), traced(setting(checkpointing="full"))

    assert peak(dropped, shape, "forward") < 0.6 * peak(kept, shape, "forward")
    again = dropped.passes["recompute"]
    # All of a layer but its last product, whose result the backward pass does not need, and nothing of the head, which
    # forms its gradients in the forward pass.
    head, last = 2 * shape.tokens * 2048 * 128256, 2 * shape.tokens * 16 * 2048 * 8192
    assert again.matmul.at(shape) == pytest.approx(kept.passes["forward"].matmul.at(shape) - 3 * head - last, rel=1e-3)
    assert again.attention.at(shape) == pytest.approx(kept.passes["forward"].attention.at(shape))
    selective = traced(setting(checkpointing="selective"))
    assert selective.passes["recompute"].attention.at(shape) == 0
    assert peak(dropped, shape, "forward") < peak(selective, shape, "forward") < peak(kept, shape, "forward")


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.matrix), "offload"])
def test_copies_of_layers_that_are_recomputed_are_those_of_one_layer(mode: str) -> None:
    """No forward pass ends with all of them, beside the gradient of the output head."""
    every = setting(checkpointing=mode, drops_casts=True)
    kept, dropped = traced(dataclasses.replace(every, drops_casts=False)), traced(every)
    hidden, inner, keys = (every.config[key] for key in ("hidden_size", "intermediate_size", "num_key_value_heads"))
    matrices = 2 * hidden**2 + 2 * hidden * keys * every.config["head_dim"] + 3 * hidden * inner
    for shape in (Shape(kept.layers, 1, 2048), Shape(kept.layers, 4, 4096)):
        for accumulating in (False, True):
            fell = peak(kept, shape, "forward", accumulating) - peak(dropped, shape, "forward", accumulating)
            assert fell == pytest.approx(2 * kept.layers * matrices, rel=0.1)
            held = max(each.casts.at(shape) for each in dropped.moments if each.phase == "forward")
            assert held == 2 * max(matrices, hidden * every.config["vocab_size"])
        for phase in ("backward", "evaluation"):  # All weights are cast once for what is generated.
            assert peak(dropped, shape, phase) == peak(kept, shape, phase)
    assert dropped.passes == kept.passes
    assert every.key() != dataclasses.replace(every, drops_casts=False).key()
    assert not every.ends()[0].drops_casts and every.ends()[1] == every


def test_a_trace_survives_being_written_and_its_setting_being_traced() -> None:
    asked = setting()
    key = asked.key()
    found = traced(asked)

    assert Trace.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert asked.key() == key


@pytest.mark.parametrize(
    ("changed", "kept"), [(None, True), ("planner/trace/fit.py", False), ("models/output_heads/pair_head.py", False)]
)
def test_what_another_version_of_the_code_has_kept_is_traced_anew(
    changed: str | None, kept: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """An upgrade would else go on planning what the version before it saw."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    asked = setting(masked=True)
    store.keep(asked, estimated(asked, ""))
    package = tmp_path / "toolkit"
    for room in ("models", "planner/trace"):
        shutil.copytree(ROOT / "toolkit" / room, package / room, ignore=shutil.ignore_patterns("shipped"))
    if changed:
        with (package / changed).open("a") as file:
            file.write("# repaired\n")
    monkeypatch.setattr(store, "__file__", str(package / "planner/trace/store.py"))
    monkeypatch.setattr(store, "_code", store._code.__wrapped__)
    monkeypatch.setattr(store, "_read_before", {})
    assert (store.find(asked) is not None) is kept


def test_code_that_cannot_be_traced_is_estimated_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    llama = model_configs.bundled()[LLAMA_1B].config

    found = store.obtain(setting(config={**llama, "model_type": "unheard_of"}), "in_process")

    assert found.origin == "formulas"
    assert "unheard_of" in found.note
    assert found.elements() == pytest.approx(1_235_814_400, rel=1e-3)
    seen = traced(setting())
    shape = Shape(16, 4, 4096)
    assert peak(found, shape, "forward") == pytest.approx(peak(seen, shape, "forward") - 2 * seen.elements(), rel=0.35)


def test_code_that_failed_once_is_not_asked_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_untraced", {})
    asked: list[Any] = []
    monkeypatch.setattr(store, "ask", lambda question: asked.append(question) or {"error": "KeyError: width"})
    llama = {**model_configs.bundled()[LLAMA_1B].config, "model_type": "never_traced"}
    for way in ("none", "full", "none"):
        assert store.obtain(setting(config=llama, checkpointing=way)).origin == "formulas"
    assert len(asked) == 2
    # Advice goes by what was traced.
    assert store.find(setting(config=llama)) is None


@pytest.mark.parametrize("kind", ["t5", "marian", "led"])
def test_the_estimate_of_an_encoder_decoder_has_both(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        real = sum(each.numel() for each in AutoModelForSeq2SeqLM.from_config(config).parameters())
    found = estimated(setting(config=config.to_dict(), objective="seq2seq", layout="seq2seq"), "")
    assert found.elements() == pytest.approx(real, rel=1 / 3)


def test_a_gpu_is_spared_what_only_watching_allocates() -> None:
    def live_at_the_sum(on_gpu: bool) -> int:
        x = torch.randn(2**16, requires_grad=True)
        tracker = Tracker([x], [], on_gpu)
        timeline = tracker.begin()
        with tracker:
            (x.sin() + x.cos()).sum().backward()
        return sum(timeline.live[len(timeline.names) - 1 - timeline.names[::-1].index("aten::add.Tensor")])

    assert live_at_the_sum(on_gpu=False) - live_at_the_sum(on_gpu=True) == pytest.approx(4 * 2**16, rel=0.01)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 9, 9.5])
def test_chunks_of_the_head_that_are_alike_are_noted_as_if_each_were_computed(chunks: float) -> None:
    labels = torch.zeros(int(chunks * head_chunk.ON_CPU), dtype=torch.long)

    def noted(few: bool) -> list[Timeline]:
        hidden, weight = torch.randn(len(labels), 8, requires_grad=True), torch.randn(48, 8, requires_grad=True)
        tracker = Tracker([hidden, weight, labels], [weight])
        lines = [tracker.begin()]
        with tracker, fused_head.scoring(labels), pytest.MonkeyPatch.context() as patched:
            if few:
                patched.setattr(fused_head, "chunks", tracker.chunks)
            score = trl_utils._ChunkedLogProbFunction.apply
            found, *_ = score(hidden, weight, None, labels, 1.0, 0, None, 1.0, ("log_probs",))
            lines.append(tracker.begin())
            found.sum().backward()
        return lines

    assert noted(few=True) == noted(few=False)
    computed = list(Tracker([], []).chunks(len(labels), head_chunk.ON_CPU))
    assert len(computed) == min(math.ceil(chunks), 3)


def test_dropout_on_a_gpu_keeps_a_byte_for_each_element() -> None:
    x = torch.ones(8, requires_grad=True)
    with fake_kernels.installed(setting()):
        dropped = torch.nn.functional.dropout(x, 0.5)

    assert dropped.grad_fn and dropped.grad_fn._saved_result1.dtype == torch.bool


def test_a_size_that_is_not_stated_is_not_made_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    with pytest.raises(UnknownSize, match="states no hidden size"):
        store.obtain(setting(config={"model_type": "unheard_of", "width": 64}))


def test_that_a_model_is_traced_is_told_once(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("toolkit"), "propagate", True)
    monkeypatch.setattr(store, "_told", set())
    caplog.set_level(logging.INFO, "toolkit")
    for way in ("none", "full"):
        with pytest.raises(UnknownSize):
            store.obtain(setting(config={"model_type": "unheard_of", "width": 65}, checkpointing=way))
    # A record comes twice where the logger has a handler of its own.
    told = {id(each): each.getMessage() for each in caplog.records if "for the first time" in each.getMessage()}
    assert [*told.values()] == [
        "tracing this model for the first time: method full, checkpointing none, attention torch_varlen"
    ]


def test_tracing_ends_where_a_model_goes_through_its_tokens_one_by_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(fit, "_LIMIT", 0)
    with pytest.raises(TimeoutError, match="too many operations"):
        trace(setting("Qwen/Qwen3-0.6B"))


def test_heads_are_joined_without_a_copy_on_a_gpu() -> None:
    """As the kernels lay out their result; a copy would count it twice in every layer."""
    with fake_kernels.installed(setting(attention="sdpa")):
        query, key = (torch.empty(2, 6, heads, 8).transpose(1, 2).requires_grad_() for heads in (4, 4))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, key)

    joined = out.transpose(1, 2).reshape(2, 6, 32)
    assert joined.data_ptr() == out.data_ptr()


def test_two_gradients_of_a_tensor_are_added_in_place_where_nobody_watches() -> None:
    """What `tracker.py` says of torch, and why a GPU's trace is not what was seen under its own eyes."""

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def additions(watching: bool) -> set[str]:
        x = torch.randn(64, requires_grad=True)
        with torch.profiler.profile() as profile, Watching() if watching else contextlib.nullcontext():
            (x.sin() + x.cos()).sum().backward()
        names = [event.name for event in profile.events()]
        # The first addition is the forward pass's own.
        return set(names[names.index("aten::sum") :]) & {"aten::add", "aten::add_"}

    assert additions(watching=False) == {"aten::add_"}
    assert additions(watching=True) == {"aten::add"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "seconds"), [(LLAMA_8B, 15), ("meta-llama/Llama-3.1-70B", 30), ("Qwen/Qwen3-30B-A3B", 30)]
)
def test_the_first_plan_of_a_large_model_takes_seconds_and_little_memory(model: str, seconds: int) -> None:
    """Measured in processor time, so that other work on the machine does not count."""
    question = json.dumps({"trace": dataclasses.asdict(setting(model, checkpointing="full"))})
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit.planner.trace"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin and process.stdout
    process.stdin.write(question + "\n")
    process.stdin.flush()
    # Libraries print lines of their own before it.
    answer = json.loads(next(line for line in process.stdout if line.startswith('{"')))
    # Not `ru_maxrss`, which counts what the tests before held when they started this process.
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    process.stdin.close()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0

    assert Trace.from_json(answer["trace"]).origin == "traced"
    assert usage.ru_utime + usage.ru_stime < seconds
    assert peak < 3 * 2**30


@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        *(("llama", "reward"), ("llama", "classification"), ("bert", "token_classification")),
        *(("llama", "embedding"), ("bert", "embedding")),
    ],
)
def test_a_model_with_a_head_of_its_own_is_traced_without_a_vocabulary(
    kind: str, objective: str, tmp_path: Path
) -> None:
    if kind == "bert":
        tiny_encoder("bert", tmp_path / "model")
    else:
        tiny_model(LLAMA_1B, tmp_path / "model")
    content = {"model": {"path": str(tmp_path / "model")}, "data": {"sources": ["x"]}, "precision": "fp32"}
    recipe = Recipe.model_validate(content | {"objective": objective, "batch": {"seq_len": 64}})
    source = ModelSource.open(recipe)
    model = source.labelled(["a", "b"], source.tokenizer()).load(dtypes(recipe), "sdpa")
    setting = setting_of(recipe, source.config.to_dict(), "cpu", "sdpa", BatchLayout(4, 4, 1, 1, 64))
    made = trace(setting)
    assert made.whole().elements() == sum(each.numel() for each in model.parameters())
    # Of each token a row of the head, twice as many operations as weights; nothing is scored in chunks. Of vectors the
    # mean of the outputs is taken.
    rows = 1 if objective == "embedding" else 2
    assert made.passes["forward"].matmul.fixed[1] == 2 * rows * source.config.hidden_size
    assert made.caches is None and all(moment.logits.chunk == 0 for moment in made.moments)
    # What stands in for a trace counts no vocabulary either.
    guess = estimated(setting, "untraced")
    assert guess.passes["forward"].matmul.fixed[1] == 2 * rows * source.config.hidden_size
    head = sum(each.numel * each.count for each in guess.tensors if each.place == "head")
    assert head == (0 if objective == "embedding" else 2 * source.config.hidden_size)
