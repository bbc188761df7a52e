"""What quantization and adapters really reach: said before anything is loaded, and counted afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_failures import quantized
from small import INT8, LORA, populate
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import batch_layout
from toolkit.models.adapters import add_method
from toolkit.models.coverage import parameter_counts, require_quantized, stored_form
from toolkit.models.load import ModelSource
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.trace import store
from toolkit.planner.trace.setting import Setting, setting_of
from toolkit.planner.trace.types import Trace
from toolkit.recipe import model_configs
from toolkit.recipe.rules import load_checked
from toolkit.report.manifest import Parameters


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    populate(tmp_path, "moe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "model_type", ["mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "jamba", "dbrx", "ernie4_5_moe"]
)
def test_fused_experts_are_known_from_the_config(model_type: str) -> None:
    config = AutoConfig.for_model(model_type).to_dict()
    assert model_configs.fused_experts(config) > 1


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "switch_transformers", "nllb-moe"])
def test_linear_layers_are_not_taken_for_fused_experts(model_type: str) -> None:
    assert model_configs.fused_experts(AutoConfig.for_model(model_type).to_dict()) == 0


def shipped_trace() -> Trace:
    """Of a mixture with adapters on its attention; nothing is quantized."""
    traces = map(Trace.from_json, store._shipped(qwen().architecture()).values())
    return next(each for each in traces if {tensors.kind for tensors in each.tensors} == {"base", "adapter"})


def qwen() -> Setting:
    loaded = load_checked("qwen3_30b_a3b_lora")
    config = model_configs.config_of(loaded.recipe.model)
    return setting_of(loaded.recipe, config or {}, "cuda", "sdpa", batch_layout(loaded.recipe, 1))


def test_base_that_stays_in_16_bits_is_refused_by_plan_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the config does not say it: by the trace, and by the loaded parameters."""
    monkeypatch.setattr(model_configs, "fused_experts", lambda config: 0)
    trace = shipped_trace()
    monkeypatch.setattr(store, "obtain", lambda *args: trace)
    recipe = load_checked("qwen3_30b_a3b_lora", ["method.quantization=nf4"]).recipe
    refused = r"(nf4|int8) reaches \d+% of the parameters in the layers"
    with pytest.raises(UserError, match=refused):
        estimate(recipe, "mixture", find("h200"), advice=False)
    with pytest.raises(UserError, match=refused):
        load(*INT8)


def load(*overrides: str) -> Any:
    recipe = load_checked("small", ["model.path=moe", *overrides]).recipe
    model = ModelSource.open(recipe).load(dtypes(recipe), "sdpa")
    require_quantized(model, recipe)
    return add_method(model, recipe, dtypes(recipe))


def test_counts_and_plan_say_what_adapters_reach() -> None:
    attention = parameter_counts(load(*LORA, "method.target_modules=[q_proj,v_proj]"))
    # PEFT gives the experts of this architecture adapters with all linear layers.
    everywhere = parameter_counts(load(*LORA))
    assert 0 < attention["reached"] < attention["base"] / 2 < everywhere["reached"] < everywhere["base"]
    assert attention["base"] == everywhere["base"]
    shares = Parameters(**attention).shares
    assert shares == f"training reaches {attention['reached'] / attention['base']:.1%} of the base"
    plan = estimate(load_checked("qwen3_30b_a3b_lora").recipe, "mixture", find("h200"), advice=False)
    assert [each for each in plan.notes if "do not reach the experts, which are 9" in each]


@pytest.mark.parametrize("form", ["none", "nf4", "int8", "fp8", "int4"])
def test_the_form_of_a_stored_base_is_read_back(form: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several keep bytes, of which count and type tell nothing."""
    model = place / "llama"
    populate(place, "llama")
    monkeypatch.setenv("TINY_LLAMA", str(model))
    built = AutoModelForCausalLM.from_pretrained(model) if form == "none" else quantized(form)
    assert stored_form(built) == form
