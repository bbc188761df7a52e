"""Rules on objectives whose head scores texts or words, not the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.recipe import model_configs
from toolkit.recipe.errors import Rule
from toolkit.recipe.schema import VARLEN_ATTENTION, Recipe


def _no_head(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What does not go with a head of the objective's own."""
    return Rule(path, lambda r, _: r.headed and bool(broken(r)), why, change)


HEAD_RULES = {
    "head-attention": Rule(
        "model.attention",
        lambda r, c: (
            r.headed
            and r.model.attention in ("flex", *(() if not c or model_configs.scored_flat(c) else VARLEN_ATTENTION))
        ),
        "objective {r.objective} does not lay out rows of this model as this attention takes them",
        "set model.attention=sdpa, or auto",
    ),
    "head-packing": _no_head(
        "data.packing",
        lambda r: r.data.packing and not r.prefers,
        "each row is scored by itself, and packed rows would be one",
        "set data.packing=false",
    ),
    "head-streaming": _no_head(
        "data.streaming",
        lambda r: r.data.streaming and not r.prefers,
        "all rows are looked through, for classes or for texts that repeat, before the first step",
        "set data.streaming=false",
    ),
    "head-tokens": _no_head(
        "batch.tokens_per_step",
        lambda r: r.batch.tokens_per_step is not None and not r.prefers,
        "counts sequences of batch.seq_len tokens, and rows are not packed",
        "remove batch.tokens_per_step, and set batch.global_batch_size to the rows of a step",
    ),
    "head-train-on": _no_head(
        "data.train_on",
        lambda r: r.data.train_on != "auto" and not r.prefers,
        "labels or whole texts are learnt, and no token",
        "remove data.train_on",
    ),
    "head-prompts": _no_head(
        "evaluation.prompts",
        lambda r: r.evaluation.prompts,
        "a model without a head for the vocabulary answers no prompts",
        "remove evaluation.prompts",
    ),
    "head-eva": _no_head(
        "method.init_lora_weights",
        lambda r: (
            r.method.name == "lora"
            and (r.method.init_lora_weights == "loftq" or (r.method.init_lora_weights == "eva" and not r.prefers))
        ),
        "this beginning has been tried with the head for the vocabulary alone",
        "set method.init_lora_weights=default",
    ),
    "head-quantization": _no_head(
        "method.quantization",
        lambda r: r.method.quantization in ("fp8", "int4"),
        "models with a head of their own have been tried in nf4 and int8",
        "set method.quantization=nf4",
    ),
    "head-adapter": _no_head(
        "model.adapter",
        lambda r: r.model.adapter,
        "an adapter of another training has another head or none",
        "merge it first with toolkit merge, and set model.path to the folder",
    ),
    "head-new-tokens": _no_head(
        "model.new_tokens",
        lambda r: r.model.new_tokens,
        "new tokens have been tried with the head for the vocabulary alone",
        "remove model.new_tokens",
    ),
    **{
        f"head-{way}": _no_head(
            f"parallel.{way}",
            lambda r, way=way: getattr(r.parallel, way) > 1 and (not r.prefers or way in ("tensor", "expert")),  # type: ignore[misc]
            "objective {r.objective} has not been compared with work divided that way",
            f"remove parallel.{way}: strategy.name=zero3 and fsdp shard larger models",
        )
        for way in ("sequence", "context", "tensor", "expert", "pipeline")
    },
    "head-tiles": _no_head(
        "activation_checkpointing.mlp_tiles",
        lambda r: r.activation_checkpointing.mlp_tiles > 1,
        "objective {r.objective} has not been compared with MLPs in tiles",
        "set activation_checkpointing.mlp_tiles=1",
    ),
}
