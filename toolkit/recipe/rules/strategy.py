"""Rules on strategies: what an engine cannot do with the rest of the recipe, or would do differently than asked."""

from __future__ import annotations

from toolkit.recipe.errors import Config, Rule
from toolkit.recipe.model_configs import text_config
from toolkit.recipe.schema import Recipe

_ZERO = ("zero1", "zero2", "zero3")
KEYS = {
    "offload_optimizer": _ZERO,
    "offload_param": ("zero3", "fsdp"),
    "nvme_path": ("zero3",),
    "pin_memory": (*_ZERO, "fsdp"),
    "reduce_dtype": (*_ZERO, "fsdp"),
    "overlap_comm": _ZERO,
    "reduce_bucket_size": _ZERO,
    "allgather_bucket_size": ("zero1", "zero2"),
    "prefetch_bucket_size": ("zero3",),
    "param_persistence_threshold": ("zero3",),
    "max_live_parameters": ("zero3",),
    "max_reuse_distance": ("zero3",),
    "sharding": ("fsdp",),
    "reshard_after_forward": ("fsdp",),
    "sync_each_batch": ("fsdp",),
    "wrap_classes": ("fsdp",),
    "state_dict_type": ("fsdp",),
    "cpu_ram_efficient_loading": ("fsdp",),
}
"""Key of the section to the strategies that read it."""

_EMBEDDINGS = {"embed_tokens", "lm_head"}


def foreign_keys(recipe: Recipe) -> list[str]:
    """Keys that differ from their defaults and that the chosen strategy does not read."""
    # Another rule says what to do about an optimizer offloaded under FSDP.
    others = {key for key, names in KEYS.items() if recipe.strategy.name not in names}
    others -= {"offload_optimizer"} if recipe.strategy.name == "fsdp" else set()
    return [key for key in recipe.strategy.changed() if key in others]


def _offloads(recipe: Recipe) -> bool:
    return {recipe.strategy.offload_optimizer, recipe.strategy.offload_param} != {"none"}


def _contradicts(recipe: Recipe) -> bool:
    """Whether `reshard_after_forward` says the opposite of `sharding`; within hybrid_shard both have a meaning."""
    strategy = recipe.strategy
    return (strategy.sharding, strategy.reshard_after_forward) in (("full_shard", False), ("shard_grad_op", True))


_CHOSEN_MODULES = ("nllb-moe", "switch_transformers")
_ZERO3_FAULTS = {
    "recurrent_gemma": "DeepSpeed turns the factor of its embeddings from bf16 to fp32",
    "gemma3n": "its backward pass needs parameters that DeepSpeed has released",
}


def zero3_fault(recipe: Recipe, config: Config) -> str:
    """Why ZeRO-3 does not train an architecture as other engines do; empty if it does."""
    kind = str(text_config(config).get("model_type", "")).removesuffix("_text")
    lora, whole = recipe.method.name == "lora", recipe.precision == "fp32"
    return "" if (kind, True) in (("gemma3n", lora), ("recurrent_gemma", whole)) else _ZERO3_FAULTS.get(kind, "")


def _parts_tied(recipe: Recipe, config: Config) -> bool:
    saved = recipe.method.name == "lora" and _EMBEDDINGS & set(recipe.method.modules_to_save)
    return bool(saved and config.get("tie_word_embeddings", bool(config)))


STRATEGY_RULES = {
    "strategy-keys": Rule(
        "strategy",
        lambda r, _: foreign_keys(r),
        "strategy {r.strategy.name} would ignore {foreign_keys}",
        "remove what it ignores{owners}",
        keys=lambda r: [f"strategy.{key}" for key in foreign_keys(r)],
    ),
    "fsdp-offload-optimizer": Rule(
        "strategy.offload_optimizer",
        lambda r, _: r.strategy.name == "fsdp" and r.strategy.offload_optimizer != "none",
        "FSDP cannot offload optimizer state alone: it lies where the parameters lie",
        "set strategy.offload_param=cpu and remove strategy.offload_optimizer, or set strategy.name=zero2",
    ),
    "fsdp-offload-nvme": Rule(
        "strategy.offload_param",
        lambda r, _: r.strategy.name == "fsdp" and r.strategy.offload_param == "nvme",
        "FSDP offloads to host memory only",
        "set strategy.offload_param=cpu, or strategy.name=zero3",
        reference="(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)",
    ),
    "nvme-needs-zero3": Rule(
        "strategy.offload_optimizer",
        lambda r, _: r.strategy.name in ("zero1", "zero2") and r.strategy.offload_optimizer == "nvme",
        "ZeRO-1 and ZeRO-2 take `nvme` for `cpu` and fill host memory without a word",
        "set strategy.offload_optimizer=cpu, or strategy.name=zero3",
    ),
    "nvme-needs-path": Rule(
        "strategy.nvme_path",
        lambda r, _: r.strategy.zero_stage == 3 and r.strategy.uses_nvme and not r.strategy.nvme_path,
        "offloading to NVMe needs a folder on that drive",
        "set strategy.nvme_path",
    ),
    "nvme-path-unused": Rule(
        "strategy.nvme_path",
        lambda r, _: r.strategy.zero_stage == 3 and not r.strategy.uses_nvme and r.strategy.nvme_path is not None,
        "nothing is offloaded there",
        "set strategy.offload_optimizer=nvme, or remove strategy.nvme_path",
    ),
    "pin-memory-unused": Rule(
        "strategy.pin_memory",
        lambda r, _: r.strategy.name in KEYS["pin_memory"] and not r.strategy.pin_memory and not _offloads(r),
        "nothing is offloaded, so no memory is pinned",
        "remove strategy.pin_memory, or set strategy.offload_optimizer or strategy.offload_param",
    ),
    "reshard-contradicts": Rule(
        "strategy.reshard_after_forward",
        lambda r, _: r.strategy.name == "fsdp" and _contradicts(r),
        "says the opposite of strategy.sharding",
        "remove it, or set strategy.sharding={other_sharding}",
    ),
    "reduce-overflows": Rule(
        "strategy.reduce_dtype",
        lambda r, _: (
            r.strategy.name in KEYS["reduce_dtype"] and r.strategy.reduce_dtype == "fp16" and r.precision != "fp16"
        ),
        "sums above 65,504 overflow in fp16, and only precision=fp16 scales the loss against it",
        "set strategy.reduce_dtype=bf16, or remove it",
    ),
    "zero1-pure-bf16-reduce": Rule(
        "strategy.reduce_dtype",
        lambda r, _: r.strategy.name == "zero1" and r.pure and r.strategy.reduce_dtype == "fp32",
        "ZeRO-1 that sums bf16 gradients in fp32 holds fp32 masters too, which a pure precision does not want",
        "remove strategy.reduce_dtype, or set strategy.name=zero2",
    ),
    "zero-pure-bf16-offload": Rule(
        "precision",
        lambda r, _: r.strategy.zero_stage and r.pure and r.strategy.offload_optimizer != "none",
        "DeepSpeed offloads 16-bit masters with its own Adam only, which is not the optimizer of the recipe",
        "set precision={with_masters}, or strategy.offload_optimizer=none",
    ),
    "zero-stored-dtype": Rule(
        "model.dtype",
        lambda r, _: r.strategy.zero_stage and r.model.dtype == "fp32" and r.engine_precision in ("bf16", "fp16"),
        "DeepSpeed stores the whole model in the compute precision; its masters are fp32 by themselves",
        "remove model.dtype, or set precision=fp32",
    ),
    "int8-sharded": Rule(
        "method.quantization",
        lambda r, _: r.strategy.shards_parameters and r.method.quantization == "int8",
        "8-bit layers cannot be sharded: FSDP breaks them, and under ZeRO-3 every device keeps them whole",
        "set method.quantization=nf4, int4 or fp8, or strategy.name=zero2",
    ),
    "quantized-param-nvme": Rule(
        "strategy.offload_param",
        lambda r, _: (
            r.strategy.zero_stage == 3
            and r.method.quantization in ("nf4", "fp8", "int4")
            and r.strategy.offload_param == "nvme"
        ),
        "DeepSpeed's buffers for NVMe hold floating-point numbers, not the bytes of quantized weights",
        "set strategy.offload_param=cpu",
    ),
    "zero3-nf4-dora": Rule(
        "method.use_dora",
        lambda r, _: r.strategy.zero_stage == 3 and r.method.quantization == "nf4" and r.method.use_dora,
        "DoRA dequantizes each weight to measure it, and ZeRO-3 loses track of weights that were read that way",
        "set method.use_dora=false, or strategy.name=fsdp or zero2",
    ),
    "fsdp-tied-embeddings": Rule(
        "strategy.cpu_ram_efficient_loading",
        # Quantized weights every process reads itself.
        lambda r, c: (
            r.strategy.name == "fsdp"
            and r.strategy.cpu_ram_efficient_loading
            and r.method.quantization == "none"
            and _parts_tied(r, c)
        ),
        "tied embeddings in method.modules_to_save cannot be tied again after the weights were read by one process",
        "set strategy.cpu_ram_efficient_loading=false",
    ),
    "fsdp-encoder-decoder": Rule(
        "strategy.name",
        lambda r, _: r.strategy.name == "fsdp" and r.objective == "seq2seq",
        "torch does not shard an embedding that encoder, decoder and output head share",
        "set strategy.name=zero2 or zero3",
    ),
    "zero3-architecture": Rule(
        "strategy.name",
        lambda r, c: r.strategy.zero_stage == 3 and bool(zero3_fault(r, c)),
        "ZeRO-3 does not train a {model_type} right: {zero3_fault}",
        "set strategy.name=zero2, or fsdp, which shards parameters too",
    ),
    "zero3-selective": Rule(
        "activation_checkpointing.mode",
        lambda r, _: r.strategy.zero_stage == 3 and r.activation_checkpointing.mode == "selective",
        "after an evaluation ZeRO-3 gathers weights at other points of the recomputation, and torch refuses to go on",
        "set activation_checkpointing.mode=full, or strategy.name=fsdp or zero2",
    ),
    "zero-separate-experts": Rule(
        "strategy.name",
        lambda r, c: r.strategy.zero_stage in (1, 2) and text_config(c).get("model_type") in _CHOSEN_MODULES,
        "experts of a {model_type} are modules of which each process calls those that its tokens choose, and ZeRO-1 "
        "and ZeRO-2 sum gradients in the order in which they come",
        "set strategy.name=zero3, which takes those of all experts at once, or ddp",
    ),
    "zero-optimizer": Rule(
        "optimizer.name",
        lambda r, _: r.strategy.zero_stage and r.optimizer.traits.zero_alternative,
        "ZeRO lays parameters end to end and cuts them: {r.optimizer.name} needs their shapes, norms or own state",
        "set optimizer.name={r.optimizer.traits.zero_alternative}",
    ),
    "zero-offload-paged": Rule(
        "optimizer.name",
        lambda r, _: (
            r.strategy.zero_stage
            and r.strategy.offload_optimizer != "none"
            and r.optimizer.traits.unpaged not in ("", r.optimizer.name)
        ),
        "optimizer state is in host memory already; paging would bring it back to the GPU",
        "set optimizer.name={r.optimizer.traits.unpaged}",
        reference="(https://huggingface.co/docs/bitsandbytes/main/en/explanations/optimizers#paged-optimizers)",
    ),
    "fsdp-optimizer": Rule(
        "optimizer.name",
        lambda r, _: r.strategy.name == "fsdp" and r.optimizer.traits.fsdp_alternative and r.optimizer.name != "muon",
        "{r.optimizer.name} has operations or a state that torch does not know for sharded tensors",
        "set optimizer.name={r.optimizer.traits.fsdp_alternative}",
    ),
    "fsdp-muon": Rule(
        "optimizer.name",
        lambda r, _: r.strategy.name == "fsdp" and r.optimizer.name == "muon",
        "torch adds up the products of a sharded matrix in bf16, so Muon takes other steps than with whole matrices",
        "set optimizer.name={r.optimizer.traits.fsdp_alternative}, or strategy.name=ddp",
    ),
}
