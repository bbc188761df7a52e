"""Memory for running what was trained: caches of all architectures as they are filled, and what a device holds."""

from __future__ import annotations

from typing import Any

import models_doc
import pytest
import torch

from toolkit.models.tiny import tiny_model
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.memory.serving import serving
from toolkit.planner.trace import generation
from toolkit.planner.trace.analytic import estimated
from toolkit.planner.trace.setting import Setting
from toolkit.recipe.rules import load_checked

GIB = 2**30
LLAMA = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 9
}  # fmt: skip
T5 = {
    "is_encoder_decoder": True, "d_model": 768, "num_heads": 12, "d_kv": 64, "num_layers": 12, "num_decoder_layers": 12,
    "vocab_size": 9,
}  # fmt: skip
CORE = [
    *(("sft", kind) for kind in ("gemma3_text", "deepseek_v3", "bamba", "jamba", "falcon_mamba")),
    ("seq2seq", "bart"),
]
ALL = [("sft", kind) for kind in models_doc.CAUSAL] + [("seq2seq", kind) for kind in models_doc.ENCODER_DECODERS]
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}
"""So that the two layers of a tiny copy are not of one kind."""
UNTOLD = {"emu3", "jetmoe", "longcat_flash", "xlnet", "xmod", "led"}
"""Whose code needs numbers to run, or whose parts are no model of their own."""


@pytest.mark.parametrize(
    ("objective", "kind"),
    [*CORE, *(pytest.param(*each, marks=pytest.mark.matrix) for each in ALL if each not in CORE)],
)
def test_what_a_sequence_keeps_is_what_the_model_really_keeps(objective: str, kind: str) -> None:
    """Keys and values within windows, and the states of recurrences and convolutions."""
    try:
        config = models_doc.configuration(kind)
        for key, value in HYBRIDS.get(kind, {}).items():
            setattr(config, key, value)
        if objective == "sft":
            config.is_encoder_decoder = False
        model = tiny_model(config, objective).to(torch.bfloat16)
        # DeepSeek V4 waits for several tokens before it keeps an entry for all of them.
        context = 512 if kind == "deepseek_v4" else 40
        real = sum(map(generation.size, generation.filled(model, context, "cpu")))
    except Exception as error:
        pytest.skip(f"is not built, or has no cache: {error}")
    caches = generation.kept(model.config, objective)
    assert (caches is None) == (kind in UNTOLD)
    if caches is not None:
        assert sum(each.at(context) for each in caches) == pytest.approx(real, rel=1e-9)


def test_of_models_deeper_than_any_no_cache_is_filled() -> None:
    """It would take longer than all else in a plan; what is kept then follows from the config."""
    config = models_doc.configuration("llama")
    config.num_hidden_layers = 401
    assert generation.kept(config, "sft") is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 32 * 2 * 8 * 128),
        ({"n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 9}, 48 * 2 * 1600),
        ({"text_config": LLAMA, "model_type": "llava"}, 32 * 2 * 8 * 128),
        # Falcon-7B: one head for all queries; its successors group them.
        ({**LLAMA, "hidden_size": 4544, "num_attention_heads": 71, "num_key_value_heads": None, "multi_query": True},
         32 * 128),
        # DeepSeek-V2: a latent of 512 and a rotary key of 64.
        ({**LLAMA, "num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 60 * 576),
        (T5, 12 * 2 * 2 * 768),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_taken_to_attend_to_all_tokens(config: dict[str, Any], expected: int) -> None:
    served = served_without_trace(config)
    assert served.cache == 2 * 1024 * expected


def served_without_trace(config: dict[str, Any]) -> Any:
    method = load_checked("llama_3_1_8b_lora", []).recipe.method
    setting = Setting(config, "cuda", "sft", {"name": "full"}, "bfloat16", "bfloat16", None, "sdpa", "padded")
    return serving(method, config, estimated(setting, "untraceable"), 80 * GIB, 1024)


def test_the_result_is_held_in_16_bits_or_quantized() -> None:
    loaded = load_checked("llama_3_1_8b_lora", [])
    small, large = (estimate(loaded.recipe, "", find(name), advice=False, context=8192) for name in ("l4", "h200"))
    assert small.serving and large.serving
    merged, quantized = small.serving.forms
    assert (small.serving.context, small.serving.cache) == (8192, GIB)
    assert merged.weights == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    # Embeddings and head stay in 16 bits, and adapters lie beside what is quantized.
    kept = 2 * 128_256 * 4096
    assert quantized.weights == pytest.approx(2 * kept + 2 * 41_943_040 + (8_030_261_248 - kept) * 4.127 / 8, rel=1e-3)
    memory = 0.9 * find("l4").device.memory
    assert merged.sequences == int((memory - merged.weights) / GIB - 0.2) and merged.devices == 1
    assert large.serving.forms[0].sequences > 100 > quantized.sequences > merged.sequences > 0


def test_what_one_device_does_not_hold_takes_several() -> None:
    loaded = load_checked("llama_3_1_70b_qlora", [])
    plan = estimate(loaded.recipe, "", find("l4"), advice=False, context=65_536)
    assert plan.serving and [(each.form, each.sequences) for each in plan.serving.forms] == [("16 bits", 0), ("nf4", 0)]
    assert [each.devices for each in plan.serving.forms] == [8, 4]


@pytest.mark.parametrize(("context", "told"), [(131_072, False), (131_073, True), (None, False)])
def test_more_tokens_than_the_model_has_positions_for_are_said(context: int | None, told: bool) -> None:
    loaded = load_checked("llama_3_1_8b_lora")
    plan = estimate(loaded.recipe, loaded.name, find("h200"), context=context, advice=False)
    assert any("positions for 131,072 tokens" in note for note in plan.notes) == told
