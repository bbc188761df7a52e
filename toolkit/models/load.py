"""Tokenizer, weights, quantization and adapters, built the way the recipe says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from toolkit.common import UserError, first_line
from toolkit.data.encode import load_chat_template
from toolkit.distributed import Dtypes
from toolkit.models import attention, kernels
from toolkit.models.adapters import keep_unpacked, quantization_config
from toolkit.recipe import Recipe, model_configs


def locate(recipe: Recipe) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where the model is: path, revision, GGUF file, remote code."""
    model = recipe.model
    path, gguf = str(Path(model.path).expanduser()) if model.path.startswith("~") else model.path, model.gguf_file
    if path.startswith("builtin:"):
        from toolkit.models.builtin import builtin_model

        path = str(builtin_model(path.removeprefix("builtin:")))
    elif path.endswith(".gguf"):
        if not Path(path).is_file():
            raise UserError(f"model.path: there is no file {path}", "set model.path to an existing GGUF file")
        path, gguf = str(Path(path).parent), Path(path).name
    arguments = {"pretrained_model_name_or_path": path, "trust_remote_code": model.trust_remote_code}
    if model.revision:
        arguments["revision"] = model.revision
    if gguf:
        arguments["gguf_file"] = gguf
    return arguments


def load_config(recipe: Recipe) -> Any:
    """The model's configuration.

    Raises:
        UserError: If the model cannot be found, with the nearest known one; or if it is none for the objective.
    """
    config = _load(AutoConfig, recipe, locate(recipe))
    kind = _kind(recipe)
    if type(config) not in kind._model_mapping and kind.__name__ not in getattr(config, "auto_map", {}):
        known = "an encoder-decoder" if recipe.objective == "seq2seq" else "a causal language model"
        raise UserError(
            f"model.path: {recipe.model.path} is a {config.model_type}, which Transformers cannot load as {known}",
            "set model.path to a model for text",
        )
    return config


def _kind(recipe: Recipe) -> Any:
    return AutoModelForSeq2SeqLM if recipe.objective == "seq2seq" else AutoModelForCausalLM


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer, with the recipe's chat template and a padding token."""
    where = locate(recipe)
    if recipe.model.tokenizer:
        where = {
            "pretrained_model_name_or_path": recipe.model.tokenizer,
            "trust_remote_code": recipe.model.trust_remote_code,
        }
    tokenizer = _load(AutoTokenizer, recipe, where)
    if recipe.model.chat_template:
        tokenizer.chat_template = load_chat_template(recipe.model.chat_template)
    if tokenizer.pad_token is None:
        # Labels are masked by position, not by token, so any token can pad without being lost as a label.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def stop_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's end token and those of the model's generation config."""
    ids = {tokenizer.eos_token_id}
    file = _repository_file(recipe, "generation_config.json")
    if file:
        stops = GenerationConfig.from_pretrained(file.parent).eos_token_id
        ids.update(stops if isinstance(stops, list) else [stops])
    return frozenset(token for token in ids if token is not None)


def weight_files(recipe: Recipe) -> list[Path]:
    """The files on disk that the model was loaded from."""
    where = locate(recipe)
    folder = Path(where["pretrained_model_name_or_path"])
    if "gguf_file" in where and folder.is_dir():
        return [folder / where["gguf_file"]]
    config = _repository_file(recipe, "config.json")
    assert config, "a model that was loaded has a config"
    return [file for pattern in ("*.safetensors", "*.bin", "config.json") for file in config.parent.glob(pattern)]


def _repository_file(recipe: Recipe, name: str) -> Path | None:
    """A file of the model's folder or, from the cache, of its hub repository; None if it has no such file."""
    where = locate(recipe)
    path, revision = where["pretrained_model_name_or_path"], where.get("revision", "main")
    try:
        file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise UserError(f"model.path: {name} of {path} cannot be read: {error}", "try again, or download it") from error
    return Path(file) if file else None


def load_model(recipe: Recipe, dtypes: Dtypes, backend: str) -> PreTrainedModel:
    """The weights, stored as the recipe says, with the attention backend `backend` (see `attention.resolve`)."""
    kind = _kind(recipe)
    if backend == "torch_varlen":
        kernels.register()
    if torch.cuda.is_available():
        kernels.repeat_shared_heads(torch.cuda.get_device_capability())
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, dtypes.load),
        "attn_implementation": attention.IMPLEMENTATIONS[backend],
    }
    where = locate(recipe)
    quantization = quantization_config(recipe, dtypes)
    if "gguf_file" in where:
        # Otherwise the weights keep a quantizer that refuses to train and to save.
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    if quantization:
        if "gguf_file" in where:
            raise UserError(
                f"method.quantization={recipe.method.quantization} needs full weights, {recipe.model.path} is GGUF",
                "set method.quantization=none, or name the model's safetensors",
            )
        arguments["quantization_config"] = quantization
        arguments["dtype"] = getattr(torch, dtypes.compute)
        if recipe.strategy.name != "zero3":  # Which puts it on the same device, and wants to be asked for nothing.
            arguments["device_map"] = {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}
    model = _load(kind, recipe, {**where, **arguments})
    keep_unpacked(model)
    return model


def count_parameters(recipe: Recipe) -> int:
    """Parameters of the model, from its config: no weights are read."""
    kind = _kind(recipe)
    with torch.device("meta"):
        model = kind.from_config(load_config(recipe), trust_remote_code=recipe.model.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def restore_config(model: PreTrainedModel, recipe: Recipe) -> None:
    """Undoes what trainers change in a model's config: caches are switched off, routers return their logits."""
    before, config = load_config(recipe).get_text_config(), model.config.get_text_config()
    for key in ("output_router_logits", "router_aux_loss_coef"):
        if hasattr(before, key):
            setattr(config, key, getattr(before, key))
    config.use_cache = True


def _load(kind: Any, recipe: Recipe, arguments: dict[str, Any]) -> Any:
    path = arguments["pretrained_model_name_or_path"]
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        raise UserError(f"model.path: the folder {path} is empty", "set model.path to a folder with config.json")
    try:
        return kind.from_pretrained(**arguments)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        close = [name for name in model_configs.nearest(recipe.model.path) if name != recipe.model.path][:3]
        change = f"did you mean {' or '.join(close)}? " if close else ""
        change += "Set model.path to a hub id, a folder with config.json and *.safetensors, or a GGUF file"
        if "trust_remote_code=True" in str(error):
            change = "set model.trust_remote_code=true, once you have read that code"
        raise UserError(
            f"model.path: {path} cannot be loaded as {kind.__name__}: {first_line(error)}", change
        ) from error
