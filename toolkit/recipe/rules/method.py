"""Rules on the method: which parameters are trained, how adapters begin, and how the base is stored."""

from __future__ import annotations

import math

from toolkit.recipe import model_configs
from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.schema import Recipe
from toolkit.recipe.sections import MOVES_BASE

_OF_WHOLE_LAYERS = ("orthogonal", *MOVES_BASE)


def adapter_keys(recipe: Recipe) -> list[str]:
    """Keys of adapters that differ from their defaults."""
    return [key for key in recipe.method.changed() if key not in ("name", "freeze", "double_quantization")]


def _both_ways(recipe: Recipe) -> bool:
    targets = recipe.method.target_modules
    return isinstance(targets, list) and bool(set(targets) & set(recipe.method.modules_to_save))


def not_for_parameters(recipe: Recipe) -> list[str]:
    """Keys of adapters that PEFT refuses or ignores where it adapts single parameters."""
    method = recipe.method
    keys = ("lora_dropout", "use_dora", "layers_to_transform")
    return [f"method.{key}" for key in keys if key in method.changed()]


def _adapts_parameters(recipe: Recipe, config: Config) -> bool:
    """Whether there are adapters for what is no linear layer: named parameters, or fused experts."""
    method = recipe.method
    return bool(method.target_parameters) or _adapts_experts(recipe, config)


def _adapts_experts(recipe: Recipe, config: Config) -> bool:
    return recipe.method.name == "lora" and model_configs.adapts_experts(recipe.method.target_modules, config)


def not_linear(recipe: Recipe, config: Config) -> str:
    """Names what has adapters and is no linear layer."""
    experts = f"the {model_configs.fused_experts(config)} experts of a layer" if _adapts_experts(recipe, config) else ""
    return " and ".join(filter(None, ["method.target_parameters" * bool(recipe.method.target_parameters), experts]))


def linear_only(recipe: Recipe, config: Config) -> str:
    """What leaves adapters on linear layers alone."""
    parts = ["remove method.target_parameters"] if recipe.method.target_parameters else []
    if _adapts_experts(recipe, config):
        parts.append("set method.target_modules to layers that are no experts, e.g. [q_proj,k_proj,v_proj,o_proj]")
    return " and ".join(parts)


METHOD_RULES = {
    "full-adapter-keys": Rule(
        "method",
        lambda r, _: r.method.name == "full" and adapter_keys(r),
        "full fine-tuning would ignore what belongs to adapters: {adapter_keys}",
        "set method.name=lora, or remove them",
        keys=lambda r: [f"method.{key}" for key in adapter_keys(r)],
    ),
    "lora-freeze": Rule(
        "method.freeze",
        lambda r, _: r.method.name == "lora" and r.method.freeze,
        "with adapters the base is frozen already",
        "remove method.freeze, or set method.name=full",
    ),
    "target-modules": Rule(
        "method.target_modules",
        lambda r, _: r.method.target_modules != "all-linear" and not isinstance(r.method.target_modules, list),
        "is one word, and the only one with a meaning is all-linear",
        "write all-linear, or a list: method.target_modules=[q_proj,v_proj]",
    ),
    "target-modules-empty": Rule(
        "method.target_modules",
        lambda r, _: r.method.target_modules == [] and not r.method.target_parameters,
        "adapters must be added to some modules",
        "write all-linear, or a list: method.target_modules=[q_proj,v_proj]",
    ),
    "init-whole-base": Rule(
        "method.init_lora_weights",
        lambda r, _: r.method.init_lora_weights in _OF_WHOLE_LAYERS and r.method.quantization != "none",
        "is computed from layers that are not quantized",
        "set method.init_lora_weights=default",
    ),
    "init-parameters": Rule(
        "method.init_lora_weights",
        lambda r, c: (
            (
                r.method.init_lora_weights in (*_OF_WHOLE_LAYERS, "eva")
                or (r.method.init_lora_weights == "loftq" and not model_configs.fused_experts(c))
            )
            and _adapts_parameters(r, c)
        ),
        "is computed for linear layers, which {not_linear} are not",
        "set method.init_lora_weights=default, or {linear_only}",
    ),
    "init-sharded": Rule(
        "method.init_lora_weights",
        lambda r, _: (
            r.method.init_lora_weights in (*MOVES_BASE, "eva", "loftq")
            and r.strategy.shards_parameters
            and not r.model.adapter
        ),
        "is computed from the whole base, of which no process has all under {r.strategy.name}",
        "set strategy.name=zero2, or method.init_lora_weights=default",
    ),
    "init-eva-seq2seq": Rule(
        "method.init_lora_weights",
        lambda r, _: r.method.init_lora_weights == "eva" and r.objective == "seq2seq",
        "EVA goes by what layers read of trained tokens, and an encoder reads none of them",
        "set method.init_lora_weights=default",
    ),
    "init-loftq-nf4": Rule(
        "method.init_lora_weights",
        lambda r, _: r.method.init_lora_weights == "loftq" and r.method.quantization != "nf4",
        "LoftQ makes up for what nf4 loses of the base",
        "set method.quantization=nf4, or method.init_lora_weights=default",
    ),
    "init-loftq-dora": Rule(
        "method.use_dora",
        lambda r, _: r.method.init_lora_weights == "loftq" and r.method.use_dora,
        "DoRA would scale what LoftQ makes up for back to the norm of the quantized weights",
        "set method.use_dora=false, or method.init_lora_weights=default",
    ),
    "init-loftq-experts": Rule(
        "method.init_lora_weights",
        lambda r, c: r.method.init_lora_weights == "loftq" and c and model_configs.fused_experts(c),
        "LoftQ makes up for what linear layers lost, and the {fused_experts} experts of a layer, most of this model, "
        "are none",
        "set method.init_lora_weights=default",
    ),
    "init-odd": Rule(
        "method.r",
        lambda r, _: r.method.init_lora_weights == "orthogonal" and r.method.r % 2,
        "init_lora_weights=orthogonal halves the rank",
        "set method.r to an even number",
    ),
    "init-adapter": Rule(
        "method.init_lora_weights",
        lambda r, _: r.model.adapter is not None and r.method.init_lora_weights not in ("default", "loftq"),
        "adapters begin as model.adapter has them",
        "remove method.init_lora_weights",
    ),
    "loraplus-optimizer": Rule(
        "method.loraplus_lr_ratio",
        lambda r, _: (
            r.method.loraplus_lr_ratio is not None
            and (r.optimizer.traits.rank or r.optimizer.traits.in_backward or r.optimizer.traits.family == "muon")
        ),
        "optimizer {r.optimizer.name} has groups of parameters of its own",
        "set optimizer.name=adamw, or remove method.loraplus_lr_ratio",
    ),
    "adapter-zero3": Rule(
        "model.adapter",
        lambda r, _: r.model.adapter is not None and r.strategy.name == "zero3",
        "ZeRO-3 divides adapters before their weights can be read into them",
        "set strategy.name=fsdp or zero2",
    ),
    "token-rows-sharded": Rule(
        "model.new_tokens",
        lambda r, _: (
            r.method.name == "lora"
            and r.model.new_tokens
            and r.strategy.shards_parameters
            and not r.method.modules_to_save  # Only the model tells whether these are its embeddings.
        ),
        "{r.strategy.name} divides embeddings, of which PEFT then cannot train single rows",
        "set strategy.name=zero2, or method.modules_to_save to the modules of the input and output embeddings "
        "(embed_tokens and lm_head in Llama)",
    ),
    "target-parameters": Rule(
        "method",
        lambda r, c: not_for_parameters(r) and _adapts_parameters(r, c),
        "PEFT's adapters for {not_linear}, which are no linear layers, do not know {not_for_parameters}",
        "remove {not_for_parameters}, or {linear_only}",
        keys=not_for_parameters,
    ),
    "layers-to-transform": Rule(
        "method.layers_to_transform",
        lambda r, c: (model_configs.num_layers(c) or math.inf) <= max(r.method.layers_to_transform, default=-1),
        "the model has {num_layers} layers, numbered from 0",
        "name layers below {num_layers}",
    ),
    "module-both-ways": Rule(
        "method.modules_to_save",
        lambda r, _: r.method.name == "lora" and _both_ways(r),
        "a module is either trained in full or gets an adapter",
        "keep it in one of target_modules and modules_to_save",
    ),
    "quantized-dtype": Rule(
        "model.dtype",
        lambda r, _: r.method.quantization != "none" and r.model.dtype != "auto",
        "a quantized base is stored as method.quantization says",
        "remove model.dtype",
    ),
    "quantized-experts": Rule(
        "method.quantization",
        lambda r, c: r.method.quantization == "int8" and c and model_configs.fused_experts(c),
        "the {fused_experts} experts of a layer, most of this model, are one tensor and no linear layers: bitsandbytes "
        "stores those in 4 bits only, and would leave them in 16",
        "set method.quantization=fp8, nf4 or int4",
    ),
    "quantized-nothing": Rule(
        "method.quantization",
        lambda r, c: r.method.quantization != "none" and c and model_configs.hides_linear_layers(c),
        "the linear layers of {model_type} are of a class of its own, and would stay in 16 bits",
        "set method.quantization=none",
    ),
    "double-quantization": Rule(
        "method.double_quantization",
        lambda r, _: not r.method.double_quantization and r.method.quantization != "nf4",
        "double quantization belongs to nf4",
        "remove method.double_quantization, or set method.quantization=nf4",
    ),
    "quantized-dora": Rule(
        "method.use_dora",
        lambda r, _: r.method.quantization not in ("none", "nf4") and r.method.use_dora,
        "DoRA needs the norm of the dequantized weight, which PEFT reads of nf4 alone reliably",
        "set method.quantization=nf4 or method.use_dora=false",
    ),
}
