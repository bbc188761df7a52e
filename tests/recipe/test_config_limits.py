"""What no model's config holds is refused with its key; what models have is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.recipe.config_limits import read_config

NAN, INFINITY = float("nan"), float("inf")


def _read(folder: Path, **config: Any) -> dict[str, Any]:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
    return read_config(file)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({f"key{number}": 1 for number in range(1000)}, 'has 1,001 keys, such as "key999", '),
        ({"id2label": dict.fromkeys(range(150000), "x" * 50)}, "bytes, which no model's config has"),
        ({"num_experts": -1}, "num_experts is -1, not a whole number of experts"),
        ({"num_local_experts": "8"}, 'num_local_experts is "8"'),
        ({"num_experts": True}, "num_experts is true"),
        ({"n_routed_experts": 10**12}, "n_routed_experts is 1000000000000, which no model has: at most 100,000"),
        ({"num_experts": [2, 2.5]}, "num_experts is [2, 2.5]"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, not a whole number from 1 to 8"),
        ({"num_experts": 8, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"moe_num_experts": 8, "moe_k": 9}, "moe_k is 9, not a whole number from 1 to 8"),
        ({"num_experts": 8, "num_experts_per_tok": "2"}, 'num_experts_per_tok is "2"'),
        ({"num_experts": 8, "num_experts_per_tok": [2, -1]}, "num_experts_per_tok is [2, -1]"),
        ({"rope_theta": NAN}, ": rope_theta is NaN, not a number above 0 and up to 1e+15"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": "1e4"}, 'rope_theta is "1e4"'),
        ({"rope_theta": True}, "rope_theta is true"),
        ({"rope_theta": 1e308}, "rope_theta is 1e+308"),
        ({"rope_theta": 10**400}, "rope_theta is 1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, not a number above 0 and up to 1"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear", not an object'),
        ({"rope_parameters": 7}, "rope_parameters is 7, not an object"),
        ({"rope_scaling": {"rope_type": "liner"}}, 'the rope_type of rope_scaling is "liner", none of default, linear'),
        ({"rope_scaling": {"type": ["yarn"]}}, 'the rope_type of rope_scaling is ["yarn"]'),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, "rope_scaling.factor is 1e+30"),
        ({"rope_scaling": {"type": "linear", "factor": INFINITY}}, "rope_scaling.factor is Infinity"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": -1}}},
            "rope_parameters.full_attention.rope_theta is -1",
        ),
        ({"rope_scaling": {"type": "longrope", "long_factor": []}}, "rope_scaling.long_factor is []"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1, "2"]}}, 'rope_scaling.short_factor is [1, "2"]'),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, "position_embeddings is 0"),
    ],
)
def test_what_no_model_has_is_refused_with_its_key(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json") as caught:
        _read(tmp_path, **config)
    assert words in caught.value.what and caught.value.change.startswith("correct the file")
    if "bytes" not in words and "keys" not in words:
        with pytest.raises(UserError):
            _read(tmp_path, text_config=config)


def test_what_models_have_is_read(tmp_path: Path) -> None:
    """Also dense models of an architecture with experts, and code of a model's own, whose keys mean what it says."""
    for config in (
        {"num_local_experts": 0, "num_experts_per_tok": 0},
        {"num_experts": None, "num_experts_per_tok": 8},
        {"num_experts": [1, 64], "num_experts_per_tok": [1, 6]},
        {"num_experts": 512, "num_experts_per_tok": 10},
        {"rope_scaling": None, "rope_theta": 500_000.0},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"auto_map": {"AutoConfig": "configuration.Own"}, "rope_scaling": {"type": "own"}, "num_experts": "many"},
    ):
        assert _read(tmp_path, **config)


def test_the_settings_with_which_transformers_begins_are_read(tmp_path: Path) -> None:
    """Of every architecture that can be trained here."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    kinds = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    refused, read = {}, 0
    for kind in sorted(kinds):
        try:
            CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
        except Exception:  # Some need parts that they do not begin with.
            continue
        try:
            read_config(tmp_path / "config.json")
            read += 1
        except UserError as error:
            refused[kind] = error.what
    assert not refused and read > 200
