"""A GGUF file is the model that it was written from, also where Transformers reads its header in part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import place_with
from tiny import tiny_gguf, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.models import gguf_header
from toolkit.models.load import ModelSource
from toolkit.recipe.rules import load_checked

place = place_with()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


def written(rope: dict[str, Any], folder: Path, **changes: Any) -> Path:
    """A tiny Llama with positions that are scaled so, and its GGUF file, whose path is returned."""
    tiny_model("meta-llama/Llama-3.2-1B", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_parameters": {**rope, "rope_theta": 10000.0}, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tiny_gguf(folder, folder / "tiny.gguf")


def opened(file: Path) -> ModelSource:
    return ModelSource.open(load_checked("small", [f"model.path={file}"]).recipe)


@pytest.mark.parametrize("kind", SCALED)
def test_positions_are_scaled_as_the_file_says(kind: str, tmp_path: Path) -> None:
    file = written(SCALED[kind], tmp_path / "model")
    source = opened(file)
    model = source.load(dtypes(source.recipe), "eager").eval()
    ids = torch.arange(4, 504).view(1, -1)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32).eval()(ids).logits
        torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({**LLAMA3, "high_freq_factor": 3.0, "original_max_position_embeddings": 100}, "factors of its own"),
        ({"rope_type": "longrope", "factor": 2.0}, "as longrope"),
    ],
)
def test_a_scaling_that_cannot_be_read_is_refused(rope: dict[str, Any], words: str, tmp_path: Path) -> None:
    longrope = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16} if rope["rope_type"] == "longrope" else {}
    file = written({**rope, **longrope}, tmp_path / "model")
    with pytest.raises(UserError, match=f"(?s){words}.*safetensors"):
        opened(file)


def test_widths_are_those_of_the_file(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2moe")
    writer.add_key_length(96)
    writer.add_expert_feed_forward_length(640)
    writer.add_expert_shared_feed_forward_length(1280)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    config = AutoConfig.for_model("qwen2_moe")
    gguf_header.complete(config, tmp_path / "m.gguf")
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (640, 1280)
    wide = AutoConfig.for_model("qwen3")
    gguf_header.complete(wide, tmp_path / "m.gguf")
    assert wide.head_dim == 96


@pytest.mark.parametrize(
    ("kind", "layers", "hidden", "heads", "head", "scale"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3_text", 34, 2560, 8, 256, 256),
        ("gemma3_text", 62, 5376, 32, 128, 168),
    ],
)
def test_queries_of_gemma_are_scaled_as_published(
    kind: str, layers: int, hidden: int, heads: int, head: int, scale: int, tmp_path: Path
) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", kind.removesuffix("_text"))
    writer.add_key_length(head)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
        write()
    config = AutoConfig.for_model(kind, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    gguf_header.complete(config, tmp_path / "m.gguf")
    assert config.query_pre_attn_scalar == scale
