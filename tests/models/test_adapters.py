"""Adapters: which parameters get them, with what rank, and that a plan counts the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from small import LORA, place_with
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import batch_layout
from toolkit.models.adapters import add_method, cast_buffers
from toolkit.models.coverage import parameter_counts
from toolkit.models.load import ModelSource
from toolkit.models.tiny import tiny_model
from toolkit.planner.trace.fit import _inventory
from toolkit.planner.trace.setting import setting_of
from toolkit.planner.trace.shallow import build
from toolkit.recipe.rules import load_checked

place = place_with("llama", "moe", "gpt2", "blenderbot")


def recipe(*overrides: Any) -> Any:
    """Overrides of the command line, and values of keys that it has no words for."""
    written = [each for each in overrides if isinstance(each, str)]
    values = {key: value for each in overrides if isinstance(each, dict) for key, value in each.items()}
    return load_checked("small", [*LORA, *written]).recipe.with_values(values)


def adapted(*overrides: Any) -> Any:
    asked = recipe(*overrides)
    source = ModelSource.open(asked)
    new_tokens = source.tokenizer().convert_tokens_to_ids(asked.model.new_tokens)
    return add_method(source.load(dtypes(asked), "sdpa"), asked, dtypes(asked), new_tokens=new_tokens)


def ranks(model: Any) -> dict[str, int]:
    names = {name: p for name, p in model.named_parameters() if "lora_A" in name}
    return {name.split(".lora_A")[0].removeprefix("base_model.model."): p.shape[0] for name, p in names.items()}


EXPERTS = "method.target_parameters=[experts.gate_up_proj, experts.down_proj]"
SELECTED = {
    "layers": ["method.layers_to_transform=[1]"],
    "layers-of-some": ["method.layers_to_transform=[0]", "method.target_modules=[q_proj, down_proj]"],
    "ranks": [{"method.rank_pattern": {"q_proj": 4, r"layers\.0\.mlp\.down_proj": 8}}, "method.alpha_pattern.q_proj=1"],
    "experts": ["model.path=moe", "method.target_modules=[q_proj]", EXPERTS],
    "only-experts": ["model.path=moe", "method.target_modules=[]", EXPERTS, "method.rank_pattern={down_proj: 2}"],
    "gpt2": ["model.path=gpt2", "method.layers_to_transform=[1]"],
    "tokens": ["model.new_tokens=[new, newer]"],
    "biases": ["model.path=gpt2", "extra.lora.bias=all"],
    "fp8": ["method.quantization=fp8", "precision=bf16"],
    "int4": ["method.quantization=int4", "precision=bf16"],
    "excluded": ["extra.lora.exclude_modules=[down_proj]"],
    "seq2seq": ["model.path=blenderbot", "objective=seq2seq", "method.layers_to_transform=[0]"],
}


@pytest.mark.parametrize("kind", SELECTED)
def test_plan_counts_what_the_run_trains(kind: str) -> None:
    asked = recipe(*SELECTED[kind])
    setting = setting_of(asked, ModelSource.open(asked).config.to_dict(), "cuda", "sdpa", batch_layout(asked, 1))
    planned, _ = _inventory(build(setting, None, FakeTensorMode()), setting)
    trained = sum(each.numel * each.count for each in planned if each.trained)
    assert trained == parameter_counts(adapted(*SELECTED[kind]))["trainable"]


def test_adapters_are_where_the_recipe_wants_them() -> None:
    layers = ranks(adapted("method.layers_to_transform=[1]"))
    assert len(layers) == 7 and all(".layers.1." in name for name in layers)
    some = ranks(adapted(*SELECTED["ranks"]))
    assert {rank for name, rank in some.items() if name.endswith("q_proj")} == {4}
    assert some["model.layers.0.mlp.down_proj"] == 8 != some["model.layers.1.mlp.down_proj"] == 16
    model = adapted(*SELECTED["ranks"])
    assert model.base_model.model.model.layers[0].self_attn.q_proj.scaling == {"default": 1 / 4}
    experts = ranks(adapted(*SELECTED["experts"]))
    assert {rank for name, rank in experts.items() if "experts" in name} == {4 * 16}


def test_settings_of_peft_reach_it() -> None:
    model = adapted("model.path=gpt2", "extra.lora.bias=all")
    assert model.peft_config["default"].bias == "all"
    assert all(p.requires_grad == ("lora_" in name or "bias" in name) for name, p in model.named_parameters())
    counts, trained = parameter_counts(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
    biases = sum(p.numel() for name, p in model.named_parameters() if "bias" in name)
    assert counts["base"] == counts["total"] - (trained - biases)
    assert counts["reached"] == biases + parameter_counts(adapted("model.path=gpt2"))["reached"]
    names = ranks(adapted("extra.lora.exclude_modules=[down_proj, v_proj]"))
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}
    some = adapted("model.path=gpt2", "method.layers_to_transform=[1]", "extra.lora.layers_pattern=h")
    assert some.peft_config["default"].layers_pattern == "h" and all(".1." in name for name in ranks(some))


@pytest.mark.parametrize("rslora", [False, True])
def test_fused_projections_of_experts_have_the_scale_of_each_on_its_own(rslora: bool, tmp_path: Path) -> None:
    targets = "method.target_modules=all-linear"
    asked = ["model.path=moe", "method.r=4", "method.lora_alpha=6", "lora_dropout=0", targets]
    model = adapted(*asked, f"method.use_rslora={rslora}")
    # Of four experts, and of two projections of each.
    assert {rank for name, rank in ranks(model).items() if "experts" in name} == {4 * 4, 4 * 4 * 2}
    model.save_pretrained(tmp_path)
    base = ModelSource.open(recipe(*asked)).load(dtypes(recipe(*asked)), "sdpa")
    for each in (model, PeftModel.from_pretrained(base, tmp_path)):
        layers = [layer for layer in each.modules() if isinstance(layer, LoraLayer)]
        scales = {scale for layer in layers for scale in layer.scaling.values()}
        assert scales == {6 / math.sqrt(4) if rslora else 6 / 4}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["extra.lora.exclude_modules=[downproj]"], ["exclude_modules", "downproj"]),
        (["method.target_modules=[q_prj]"], ["target_modules", "no module 'q_prj'", "did you mean 'q_proj'?"]),
        (["method.modules_to_save=[lm_hed]"], ["modules_to_save", "did you mean 'lm_head'?", "modules with weights"]),
        (["method.rank_pattern={qproj: 4}"], ["rank_pattern", "'qproj' matches nothing", "did you mean 'q_proj'?"]),
        (["method.name=full", "method.freeze=['*.emb_tokens.*']"], ["freeze", "did you mean 'embed_tokens'?"]),
        ([{"method.alpha_pattern": {"(": 4}}], ["PEFT cannot add", "missing )"]),
        (["method.target_parameters=[experts.w1]"], ["target_parameters", "'experts.w1' matches nothing"]),
        (["model.path=moe", "method.modules_to_save=[gate]"], ["PEFT cannot add", "modules_to_save cannot be"]),
        (["model.path=moe", "lora_dropout=0.1"], ["dropout", "4 experts of a layer"]),
        (
            ["strategy=fsdp", "model.new_tokens=[new]", "method.modules_to_save=[norm]"],
            ["fsdp divides model.embed_tokens", "zero2"],
        ),
    ],
)
def test_what_matches_nothing_or_cannot_be_adapted_is_refused(overrides: list[Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        adapted(*overrides)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("phimoe", "router"), ("llama4_text", "router"), ("deepseek_v4", "o_a_proj"), ("nemotron_h", "out_proj")],
)
def test_linear_layers_that_are_no_plain_products_get_no_adapter(kind: str, layer: str) -> None:
    """Routers that return what they chose as well, products by groups, and weights that kernels read themselves."""
    asked, ids = recipe(), torch.arange(18).view(2, 9)
    model = add_method(tiny_model(models_doc.stated(kind, "sft"), "sft"), asked, dtypes(asked))
    model(input_ids=ids).logits.sum().backward()
    layers = ranks(model)
    assert layers and not any(layer in name for name in layers)
    stated = model.peft_config["default"]
    assert not any(layer in name for name in stated.target_modules) and stated.exclude_modules is None
    first = next(iter(layers)).rpartition(".")[2]
    for pattern in ([first], rf".*\.{first}"):
        other = recipe({"extra.lora": {"exclude_modules": pattern}})
        fewer = add_method(tiny_model(models_doc.stated(kind, "sft"), "sft"), other, dtypes(other))
        assert {*ranks(fewer)} == {name for name in layers if not name.endswith(f".{first}")}
        assert [*fewer.peft_config["default"].exclude_modules] == [*pattern]
    with pytest.raises(UserError, match=f"remove {layer} from method.target_modules"):
        asked = recipe({"method.target_modules": [layer]})
        add_method(tiny_model(models_doc.stated(kind, "sft"), "sft"), asked, dtypes(asked))


def test_an_adapter_whose_embeddings_stayed_tied_is_gone_on_with() -> None:
    begun = adapted("method.modules_to_save=[embed_tokens]")
    with torch.no_grad():
        begun.get_output_embeddings().weight.mul_(1.1)
    begun.save_pretrained("begun")
    after = adapted("method.modules_to_save=[model.embed_tokens]", "model.adapter=begun")
    for each in (after.get_input_embeddings(), after.get_output_embeddings()):
        assert torch.equal(each.weight, begun.get_output_embeddings().weight)


@pytest.mark.parametrize("kind", ["minimax", "gemma3_text", "llama"])
def test_buffers_have_the_types_of_a_model_that_is_loaded(kind: str) -> None:
    model = tiny_model(models_doc.stated(kind, "sft"), "sft")
    loaded = type(model)._from_config(model.config, dtype=torch.bfloat16)
    cast_buffers(model, "bfloat16")
    types = {name: each.dtype for name, each in model.named_buffers()}
    assert types == {name: each.dtype for name, each in loaded.named_buffers()}
    assert torch.float32 in types.values() and (torch.bfloat16 in types.values()) == (kind != "llama")


def test_what_balances_experts_is_never_rounded() -> None:
    model = tiny_model(models_doc.stated("deepseek_v3", "sft"), "sft")
    cast_buffers(model, "bfloat16")
    biases = [each for name, each in model.named_buffers() if "e_score_correction_bias" in name]
    assert biases and all(each.dtype == torch.float32 for each in biases)
