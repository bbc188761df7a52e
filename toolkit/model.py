"""Tokenizer, weights, quantization and adapters, built the way the recipe says."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
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
    BitsAndBytesConfig,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from toolkit import attention, backends, facts
from toolkit.data.templates import load_chat_template
from toolkit.errors import UserError, first_line
from toolkit.policy import Dtypes
from toolkit.recipe import Recipe, did_you_mean


def locate(recipe: Recipe) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where the model is: path, revision, GGUF file, remote code."""
    model = recipe.model
    path, gguf = str(Path(model.path).expanduser()) if model.path.startswith("~") else model.path, model.gguf_file
    if path.startswith("builtin:"):
        from toolkit.builtin import builtin_model

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
        attention.register()
    if torch.cuda.is_available():
        attention.repeat_shared_heads(torch.cuda.get_device_capability())
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, dtypes.load),
        "attn_implementation": backends.IMPLEMENTATIONS[backend],
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


def keep_unpacked(model: torch.nn.Module) -> None:
    """Keeps 4-bit weights as they are stored.

    bitsandbytes 0.50 repacks them for AVX512 at the first forward pass in evaluation mode; the packed form has no
    backward pass and later gradients are silently wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def add_method(model: PreTrainedModel, recipe: Recipe, dtypes: Dtypes) -> Any:
    """Freezes, or adds adapters. Returns the model to train.

    Raises:
        UserError: If a pattern or module name matches nothing in this model, or cannot be trained.
    """
    method = recipe.method
    if method.name == "full":
        _freeze(model, method.freeze)
        return model
    from peft import LoraConfig, TaskType, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    _check_modules(model, method.target_modules, method.modules_to_save)
    saved, tied = _modules_to_save(model, method.target_modules, method.modules_to_save)
    adapter = LoraConfig(
        r=method.r,
        lora_alpha=method.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=method.lora_dropout,
        target_modules=method.target_modules,
        modules_to_save=saved or None,
        ensure_weight_tying=tied,
        use_rslora=method.use_rslora,
        use_dora=method.use_dora,
        task_type=TaskType.SEQ_2_SEQ_LM if recipe.objective == "seq2seq" else TaskType.CAUSAL_LM,
    )
    adapted = get_peft_model(model, adapter)
    cast_parameters((each for each in adapted.parameters() if each.requires_grad), dtypes.local)
    if dtypes.autocast:
        # PEFT casts a layer's input up to the adapter's fp32 masters; autocast computes in 16 bits without that copy.
        for module in adapted.modules():
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = False  # type: ignore[assignment]
    return adapted


def count_parameters(recipe: Recipe) -> int:
    """Parameters of the model, from its config: no weights are read."""
    kind = _kind(recipe)
    with torch.device("meta"):
        model = kind.from_config(load_config(recipe), trust_remote_code=recipe.model.trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def cast_parameters(parameters: Iterable[torch.nn.Parameter], dtype: str) -> None:
    """Converts parameters only: `Module.to` would also round the frequencies of rotary embeddings."""
    for parameter in parameters:
        parameter.data = parameter.data.to(getattr(torch, dtype))


def restore_config(model: PreTrainedModel, recipe: Recipe) -> None:
    """Undoes what trainers change in a model's config: caches are switched off, routers return their logits."""
    before, config = load_config(recipe).get_text_config(), model.config.get_text_config()
    for key in ("output_router_logits", "router_aux_loss_coef"):
        if hasattr(before, key):
            setattr(config, key, getattr(before, key))
    config.use_cache = True


def parameter_counts(model: torch.nn.Module) -> dict[str, int]:
    """Number of parameters in `total`, `trainable`, and `tied`: those that a second name stands for.

    4-bit weights count as the parameters they stand for.
    """
    total = trainable = tied = 0
    seen = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        count = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 leaves empty tensors behind
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            count = state.shape.numel()
        if parameter in seen:
            tied += count
            continue
        seen.add(parameter)
        total += count
        trainable += count if parameter.requires_grad else 0
    return {"total": total, "trainable": trainable, "tied": tied}


def quantization_config(recipe: Recipe, dtypes: Dtypes) -> BitsAndBytesConfig | None:
    if recipe.method.quantization == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=recipe.method.double_quantization,
            bnb_4bit_compute_dtype=getattr(torch, dtypes.compute),
            # FSDP shards numbers of the type it computes in; bytes it would leave whole, others it would convert.
            bnb_4bit_quant_storage=getattr(torch, dtypes.compute) if recipe.strategy.name == "fsdp" else torch.uint8,
        )
    if recipe.method.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return None


def _freeze(model: torch.nn.Module, patterns: list[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"method.freeze: no parameter of this model matches {pattern!r}",
                f"parameters are named like {names[0]}, {names[len(names) // 2]}",
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("method.freeze leaves nothing to train", "remove a pattern from method.freeze")


def _check_modules(model: torch.nn.Module, targets: str | list[str], saved: list[str]) -> None:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if name and hasattr(module, "weight")}
    paths = [name for name, _ in model.named_modules()]
    wanted = [("method.modules_to_save", module) for module in saved]
    if isinstance(targets, list):
        wanted += [("method.target_modules", module) for module in targets]
    elif targets != "all-linear":
        raise UserError(
            f"method.target_modules={targets!r} is not known", "write all-linear, or a list of module names"
        )
    for key, module in wanted:
        if not any(_matches(path, [module]) for path in paths):
            close = did_you_mean(module, names)
            raise UserError(
                f"{key}: this model has no module {module!r}",
                (f"did you mean {close!r}? " if close else "") + f"modules with weights: {', '.join(sorted(names))}",
            )


def _modules_to_save(model: PreTrainedModel, targets: str | list[str], saved: list[str]) -> tuple[list[str], bool]:
    """The modules to train in full, and whether the embeddings are among them and tied.

    PEFT keeps tied embeddings tied when they have the names that it knows, of which it wants one.
    """
    weights = [module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    embeddings = [
        name
        for name, module in model.named_modules()
        if any(getattr(module, "weight", None) is each for each in weights)
    ]
    if isinstance(targets, list) and any(_matches(name, targets) for name in embeddings):
        raise UserError(
            f"method.target_modules: adapters on {' and '.join(embeddings)} would be trained or merged wrongly: "
            "the loss reads the output head's weight itself, and tied embeddings share theirs",
            "train them in full with method.modules_to_save",
        )
    if weights[0] is not weights[1] or not any(_matches(name, saved) for name in embeddings):
        return saved, False
    if [name.rpartition(".")[2] for name in embeddings] != ["embed_tokens", "lm_head"]:
        raise UserError(
            f"method.modules_to_save: {' and '.join(embeddings)} share one weight, and adapters would part them",
            "remove them from method.modules_to_save, or set method.name=full",
        )
    others = [name for name in saved if not any(_matches(each, [name]) for each in embeddings)]
    return [*others, "lm_head"], True


def _matches(path: str, modules: list[str]) -> bool:
    """Whether PEFT would take the module at this path for one of the named ones."""
    return any(path == module or path.endswith(f".{module}") for module in modules)


def _load(kind: Any, recipe: Recipe, arguments: dict[str, Any]) -> Any:
    path = arguments["pretrained_model_name_or_path"]
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        raise UserError(f"model.path: the folder {path} is empty", "set model.path to a folder with config.json")
    try:
        return kind.from_pretrained(**arguments)
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        close = [name for name in facts.nearest(recipe.model.path) if name != recipe.model.path][:3]
        change = f"did you mean {' or '.join(close)}? " if close else ""
        change += "Set model.path to a hub id, a folder with config.json and *.safetensors, or a GGUF file"
        if "trust_remote_code=True" in str(error):
            change = "set model.trust_remote_code=true, once you have read that code"
        raise UserError(
            f"model.path: {path} cannot be loaded as {kind.__name__}: {first_line(error)}", change
        ) from error
