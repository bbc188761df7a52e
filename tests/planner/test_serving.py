"""Memory for running what was trained: caches of published architectures by hand, and what a device holds."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.memory.serving import cache_bytes
from toolkit.recipe.rules import load_checked

GIB = 2**30
LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
GEMMA = {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
T5 = {
    "is_encoder_decoder": True,
    "d_model": 768,
    "num_heads": 12,
    "d_kv": 64,
    "num_layers": 12,
    "num_decoder_layers": 12,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, 32 * 1024 * 2 * 8 * 128),
        ({"n_embd": 1600, "n_head": 25, "n_layer": 48}, 48 * 1024 * 2 * 1600),
        ({"text_config": LLAMA, "model_type": "llava"}, 32 * 1024 * 2 * 8 * 128),
        # Falcon-7B: one head for all queries; its successors group them.
        (
            {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True},
            32 * 1024 * 128,
        ),
        # DeepSeek-V2: a latent of 512 and a rotary key of 64.
        ({**LLAMA, "num_hidden_layers": 60, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 60 * 1024 * 576),
        # Windows in all layers, in none, in those from the 24th on, in every second, in five of six, and by name.
        ({**LLAMA, "sliding_window": 256}, 32 * 256 * 2 * 8 * 128),
        ({**LLAMA, "sliding_window": 256, "use_sliding_window": False}, 32 * 1024 * 2 * 8 * 128),
        (
            {**LLAMA, "sliding_window": 256, "use_sliding_window": True, "max_window_layers": 24},
            (24 * 1024 + 8 * 256) * 2 * 8 * 128,
        ),
        ({**GEMMA, "model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 512}, 13 * 1536 * 2 * 4 * 256),
        (
            {**GEMMA, "num_hidden_layers": 26, "sliding_window": 512, "sliding_window_pattern": 6},
            (4 * 1024 + 22 * 512) * 2 * 4 * 256,
        ),
        (
            {**LLAMA, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            1024 * 2 * 8 * 128,
        ),
        (T5, 12 * 2048 * 2 * 768),
    ],
)
def test_cache_of_a_sequence(config: dict[str, Any], expected: int) -> None:
    assert cache_bytes(config, 1024) == 2 * expected


def test_what_has_no_attention_has_no_cache() -> None:
    assert cache_bytes({"hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}, 1024) is None


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
