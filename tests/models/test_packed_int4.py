"""4-bit integers as compressed-tensors packs them: what is lost, which layers are stored so, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import MODELS
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.models.quantization import packed_int4


def lost(weight: torch.Tensor, scales: torch.Tensor, group: int) -> float:
    numbers = weight.float().unflatten(-1, (-1, group))
    codes = (numbers / scales.float()[..., None]).round().clamp(-8, 7)
    return float((codes * scales.float()[..., None] - numbers).norm() / numbers.norm())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 0.002), (torch.bfloat16, 0.003)])
def test_scales_lose_a_tenth_of_normal_numbers_and_less_than_the_range(dtype: torch.dtype, near: float) -> None:
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    range_alone = weight.float().unflatten(-1, (-1, 128)).abs().amax(-1) / 7.5
    found = lost(weight, packed_int4.scales(weight, 128), 128)
    assert found == pytest.approx(0.102, abs=near)
    assert lost(weight, range_alone, 128) == pytest.approx(0.111, abs=0.002)
    nothing = packed_int4.scales(torch.zeros(2, 128, dtype=dtype), 128)
    assert nothing.dtype == dtype and nothing.gt(0).all(), "which codes are divided by"


def test_a_weight_is_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    whole = packed_int4.scales(weight, 64)
    monkeypatch.setattr(packed_int4, "_AT_ONCE", 600)
    assert whole.shape == (7, 4) and torch.equal(packed_int4.scales(weight, 64), whole)


def test_files_hold_codes_of_all_layers_but_those_that_are_kept(tmp_path: Path) -> None:
    source = tiny_model(MODELS["llama"], tmp_path / "llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    kept = "model.layers.0.self_attn"
    packed_int4.pack(model, [kept])
    packed_int4.save(model, tmp_path / "int4")
    stored = load_file(tmp_path / "int4" / "model.safetensors")
    config = json.loads((tmp_path / "int4" / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "pack-quantized"
    group = config["config_groups"]["group_0"]["weights"]["group_size"]
    assert group == 128 or before["model.layers.0.mlp.up_proj.weight"].shape[1] % 128
    assert f"{kept}.q_proj.weight" in stored and f"{kept}.q_proj" in config["ignore"]
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "int4").named_parameters())
    assert again.keys() == before.keys()
    for name, weight in before.items():
        packed = stored.get(name.replace("weight", "weight_packed"))
        if packed is None:
            assert torch.equal(again[name], weight) and ("proj" not in name or kept in name)
            continue
        # Eight codes in each integer, the first in its lowest bits.
        codes = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1) - 8
        scales = stored[name.replace("weight", "weight_scale")].repeat_interleave(group, 1)
        assert torch.equal(codes * scales, again[name])


def test_what_has_no_linear_layers_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(MODELS["gpt2"], tmp_path / "gpt2"))
    with pytest.raises(UserError, match="no linear layers"):
        packed_int4.pack(model, [])
