"""Rules on model, method, precision, optimizer and activation checkpointing: how the weights are held and moved."""

from __future__ import annotations

from pathlib import Path

from toolkit.recipe import model_configs
from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import Recipe

_BY_BOUNDARIES = ("torch_varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def adapter_keys(recipe: Recipe) -> list[str]:
    """Keys of adapters that differ from their defaults."""
    return [key for key in recipe.method.changed() if key not in ("name", "freeze", "double_quantization")]


def _is_local(recipe: Recipe) -> bool:
    path = recipe.model.path
    return path.startswith("builtin:") or path.endswith(".gguf") or Path(path).expanduser().is_dir()


def _both_ways(recipe: Recipe) -> bool:
    targets = recipe.method.target_modules
    return isinstance(targets, list) and bool(set(targets) & set(recipe.method.modules_to_save))


MODEL_RULES = (
    Rule(
        "gguf-twice",
        "model.gguf_file",
        lambda r, _: r.model.path.endswith(".gguf") and r.model.gguf_file is not None,
        "model.path names a GGUF file already",
        "remove model.gguf_file, or set model.path to the folder",
    ),
    Rule(
        "revision-local",
        "model.revision",
        lambda r, _: r.model.revision is not None and _is_local(r),
        "only models on the hub have revisions",
        "remove model.revision",
    ),
    Rule(
        "remote-code-unpinned",
        "model.trust_remote_code",
        lambda r, _: r.model.trust_remote_code and r.model.revision is None and not _is_local(r),
        "code of the model's repository would run in whatever version it has that day",
        "set model.revision to the commit whose code was read, or trust_remote_code to false",
    ),
    Rule(
        "attention-fp32",
        "model.attention",
        lambda r, _: r.precision == "fp32" and r.model.attention in _BY_BOUNDARIES,
        "FlashAttention kernels compute in 16 bits",
        "set model.attention=sdpa, or precision=bf16",
    ),
    Rule(
        "attention-seq2seq",
        "model.attention",
        lambda r, _: r.objective == "seq2seq" and r.model.attention in _BY_BOUNDARIES,
        "encoder-decoders are not fed by the boundaries of documents",
        "set model.attention=sdpa",
    ),
    Rule(
        "architecture-causal",
        "objective",
        lambda r, c: bool(c) and r.objective == "seq2seq" and not model_configs.is_encoder_decoder(c),
        "this model is decoder-only",
        "set objective=sft or language_modelling",
    ),
    Rule(
        "architecture-seq2seq",
        "objective",
        lambda r, c: bool(c) and r.objective != "seq2seq" and model_configs.is_encoder_decoder(c),
        "this model is an encoder-decoder",
        "set objective=seq2seq",
    ),
    Rule(
        "positions",
        "batch.seq_len",
        lambda r, c: (model_configs.max_positions(c) or r.batch.seq_len) < r.batch.seq_len,
        "the model has only {max_positions} positions",
        "set batch.seq_len={max_positions} or less",
    ),
)

METHOD_RULES = (
    Rule(
        "full-adapter-keys",
        "method",
        lambda r, _: r.method.name == "full" and bool(adapter_keys(r)),
        "full fine-tuning would ignore what belongs to adapters: {adapter_keys}",
        "set method.name=lora, or remove them",
    ),
    Rule(
        "lora-freeze",
        "method.freeze",
        lambda r, _: r.method.name == "lora" and bool(r.method.freeze),
        "with adapters the base is frozen already",
        "remove method.freeze, or set method.name=full",
    ),
    Rule(
        "target-modules",
        "method.target_modules",
        lambda r, _: r.method.target_modules != "all-linear" and not isinstance(r.method.target_modules, list),
        "is one word, and the only one with a meaning is all-linear",
        "write all-linear, or a list: method.target_modules=[q_proj,v_proj]",
    ),
    Rule(
        "target-modules-empty",
        "method.target_modules",
        lambda r, _: r.method.target_modules == [],
        "adapters must be added to some modules",
        "write all-linear, or a list: method.target_modules=[q_proj,v_proj]",
    ),
    Rule(
        "module-both-ways",
        "method.modules_to_save",
        lambda r, _: r.method.name == "lora" and _both_ways(r),
        "a module is either trained in full or gets an adapter",
        "keep it in one of target_modules and modules_to_save",
    ),
    Rule(
        "quantized-dtype",
        "model.dtype",
        lambda r, _: r.method.quantization != "none" and r.model.dtype != "auto",
        "a quantized base is stored as method.quantization says",
        "remove model.dtype",
    ),
    Rule(
        "quantized-gguf",
        "method.quantization",
        lambda r, _: (
            r.method.quantization != "none" and (r.model.gguf_file is not None or r.model.path.endswith(".gguf"))
        ),
        "weights in a GGUF file are quantized already and cannot be quantized again",
        "set method.quantization=none, or name the model's safetensors",
    ),
    Rule(
        "double-quantization",
        "method.double_quantization",
        lambda r, _: not r.method.double_quantization and r.method.quantization != "nf4",
        "double quantization belongs to nf4",
        "remove method.double_quantization, or set method.quantization=nf4",
    ),
    Rule(
        "int8-dora",
        "method.use_dora",
        lambda r, _: r.method.quantization == "int8" and r.method.use_dora,
        "DoRA needs the norm of the dequantized weight, which 8-bit layers do not give reliably",
        "set method.quantization=nf4 or method.use_dora=false",
    ),
)

PRECISION_RULES = (
    Rule(
        "full-low-masters",
        "model.dtype",
        lambda r, _: r.method.name == "full" and r.model.dtype in ("bf16", "fp16") and r.precision != "pure_bf16",
        "16-bit masters lose most updates of a small learning rate: at 1e-5 only 16% of the weights move in 50 steps",
        "remove model.dtype, or set precision=pure_bf16 to accept it",
    ),
    Rule(
        "pure-bf16-dtype",
        "model.dtype",
        lambda r, _: r.precision == "pure_bf16" and r.model.dtype not in ("auto", "bf16"),
        "pure_bf16 means that weights are stored in bf16",
        "remove model.dtype, or set precision=bf16",
    ),
    Rule(
        "fp32-stored-low",
        "model.dtype",
        lambda r, _: r.method.name == "lora" and r.precision == "fp32" and r.model.dtype in ("bf16", "fp16"),
        "a base stored in 16 bits computes in 16 bits, not in fp32",
        "remove model.dtype, or set precision={r.model.dtype}",
    ),
    Rule(
        "mixed-16-bit",
        "model.dtype",
        lambda r, _: r.method.name == "lora" and {r.precision, r.model.dtype} == {"bf16", "fp16"},
        "a base in one 16-bit type, computed with in the other, is rounded twice",
        "remove model.dtype, or set precision={r.model.dtype}",
    ),
)

OPTIMIZER_RULES = (
    Rule(
        "optimizer-no-decay",
        "optimizer.weight_decay",
        lambda r, _: bool(r.optimizer.weight_decay) and not r.optimizer.traits.decays,
        "optimizer {r.optimizer.name} would not apply it",
        "set optimizer.weight_decay=0",
    ),
    Rule(
        "optimizer-no-clipping",
        "optimizer.max_grad_norm",
        lambda r, _: bool(r.optimizer.max_grad_norm) and r.optimizer.traits.in_backward,
        "optimizer {r.optimizer.name} updates during the backward pass, so gradients cannot be clipped",
        "set optimizer.max_grad_norm=0",
    ),
    Rule(
        "checkpointing-interval",
        "activation_checkpointing.every_n_layers",
        lambda r, _: (
            r.activation_checkpointing.every_n_layers > 1 and r.activation_checkpointing.mode not in ("full", "offload")
        ),
        "only modes full and offload can leave layers out",
        "set activation_checkpointing.mode=full, or remove every_n_layers",
    ),
)
