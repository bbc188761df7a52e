"""What is traced: one model in one way of computing, whose hash is the trace's name.

A shape that one trace does not serve is a setting of its own, so a key says all that changes which operations run, and
nothing else: settings that differ in less share their trace. `model` and `method` are kept without what changes neither
memory nor work, so that a recipe's other keys leave its trace where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.common import content_hash
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import BatchLayout
from toolkit.models.attention import backends
from toolkit.models.cast_choice import drops_casts
from toolkit.models.output_heads.head_chunk import ON_CPU
from toolkit.planner.trace.types import CHUNK, FORMAT
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.heads import HEADED, OF_TEXTS

Layout = Literal["padded", "packed", "flat", "seq2seq"]
_LIBRARIES = ("torch", "transformers", "trl", "peft")
_NO_ARCHITECTURE = (
    *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "task_specific_params"),
)
"""Keys of a config that change neither memory nor work."""
_ADAPTER_KEYS = ("name", "r", "lora_dropout", "target_modules", "modules_to_save", "use_dora")
_QUANTIZED_KEYS = ("quantization", "double_quantization")
_RARE_ADAPTER_KEYS = ("target_parameters", "layers_to_transform", "rank_pattern")
"""Part of a setting only where they are used."""


@dataclass(frozen=True)
class Setting:
    """One model in one way of computing. Plain values only, so that it can be hashed and handed to another process.

    Args:
        config: The model's `config.json`.
        device: What it will run on; kernels and rounding differ.
        objective: As in the recipe; `sft` of pairs of answers, each of which is computed as two rows are, and
            `classification` of those that get rewards. How many labels a head has is left out: it weighs nothing.
        method: The recipe's section `method`, without what leaves memory and work as they are; `extra` holds
            `extra.lora`, `new_tokens` the number of tokens whose rows are trained beside adapters, where there are any.
        load: Dtype of frozen weights, see `engines.Dtypes`.
        local: Dtype of trained weights as the forward pass sees them.
        autocast: Dtype of autocast, or None.
        attention: Backend, resolved.
        layout: How the collator lays out a batch.
        masked: Whether rows of different lengths are padded, so that attention reads a mask.
        checkpointing: Mode of activation checkpointing; `elementwise` of compiled layers alone.
        every_n_layers: Of activation checkpointing.
        mlp_tiles: Of activation checkpointing.
        long: Whether a micro-batch has more than `CHUNK` tokens, and so surely more than the loss works on at a time.
        trust_remote_code: Whether the model's own code may run.
        path: `model.path`, where its code comes with the weights.
        revision: `model.revision` of that code.
        tensor: Processes that divide each layer.
        context: Processes that share each row by gathering keys and values.
        expert: Processes that divide the experts of each layer.
        compiled: Whether the layers are compiled, which then keep other tensors for the backward pass.
        drops_casts: Whether autocast's copies of weights go with their layers, see `cast_choice`.
        products: Scaling of the products in fp8 that are trained, see `fp8_products`; empty for none.
    """

    config: Mapping[str, Any]
    device: Literal["cuda", "cpu"]
    objective: str
    method: Mapping[str, Any]
    load: str
    local: str
    autocast: str | None
    attention: str
    layout: Layout
    masked: bool = False
    checkpointing: str = "none"
    every_n_layers: int = 1
    mlp_tiles: int = 1
    long: bool = True
    trust_remote_code: bool = False
    path: str | None = None
    revision: str | None = None
    tensor: int = 1
    context: int = 1
    expert: int = 1
    compiled: bool = False
    drops_casts: bool = False
    products: str = ""

    def in_bf16(self) -> Setting:
        """The same in bf16 where this is in fp16: as many bytes and, but for a model's own clamps, the same kernels."""
        halves = [key for key in ("load", "local", "autocast") if getattr(self, key) == "float16"]
        changes: dict[str, Any] = dict.fromkeys(halves, "bfloat16")
        return dataclasses.replace(self, **changes)

    def ends(self) -> tuple[Setting, Setting]:
        """The same with no layer checkpointed, and with every one."""
        every = dataclasses.replace(self, every_n_layers=1)
        return dataclasses.replace(every, checkpointing="none", drops_casts=False), every

    def key(self) -> str:
        """A name for the trace of this setting; changes with the libraries that are traced."""
        content: dict[str, Any] = {"format": FORMAT, "versions": _versions(), **vars(self)}
        if self.objective == "seq2seq":
            content["head"] = "chunked"  # With all logits they would make another trace.
        if self.device == "cpu":
            content["chunk_on_cpu"] = ON_CPU  # Of TRL's own head they would make another trace.
        elif self.objective not in HEADED:
            content["head"] = "once"  # With logits that are formed twice they would make another trace.
        if self.objective == "seq2seq":
            content["encoder"] = "recomputed"  # Its layers, too; before, they counted as useful work.
        if self.method.get("quantization") == "nf4" and model_configs.fused_experts(self.config):
            content["experts"] = "nf4"  # In 16 bits they would make another trace.
        for dimension in ("tensor", "context", "expert", "mlp_tiles"):
            if content[dimension] == 1:
                del content[dimension]  # Traces are older than it.
        for way in ("compiled", "drops_casts", "products", "revision"):
            if not content[way]:
                del content[way]  # As above.
        content |= {} if self.layout == "flat" else {"rows": "short"}  # Of long ones alone it may be another trace.
        return content_hash(content)[:24]

    def architecture(self) -> str:
        """A name for the model's architecture alone."""
        return content_hash(dict(self.config))[:24]


def setting_of(recipe: Recipe, config: Mapping[str, Any], device: str, backend: str, layout: BatchLayout) -> Setting:
    """The setting in which a recipe trains.

    Args:
        config: The model's `config.json`.
        device: `cpu`, or any other for what torch calls CUDA.
        backend: Attention backend, see `backends.planned`.
        layout: How the batch is divided; its `seq_len` is the length of the longest row, where that is known.
    """
    types, method = dtypes(recipe), recipe.method
    # FSDP gathers parameters in the compute dtype, whatever their masters are.
    seen = types.compute if recipe.strategy.name == "fsdp" else types.local
    adapters, rare = method.name == "lora", set(_RARE_ADAPTER_KEYS) & set(method.changed())
    checkpointing = recipe.activation_checkpointing
    on_cpu = device == "cpu"
    rows, layout = _layout(recipe, backend), layout.in_sequences
    stated = method.model_dump(include={*_ADAPTER_KEYS, *_QUANTIZED_KEYS, *rare} if adapters else {"name", "freeze"})
    if adapters and recipe.model.new_tokens:
        stated["new_tokens"] = len(recipe.model.new_tokens)
    return Setting(
        config={key: value for key, value in config.items() if key not in _NO_ARCHITECTURE},
        device="cpu" if on_cpu else "cuda",
        objective=_computed_as(recipe),
        method=stated | ({"extra": dict(recipe.extra.lora)} if recipe.extra.lora else {}),
        load=types.load if adapters else seen,
        local=seen,
        autocast=types.autocast,
        attention=backend,
        layout=rows,
        # A row by itself is not padded, and Transformers drops a mask that hides nothing.
        masked=rows in ("padded", "seq2seq") and layout.micro_batch_size > 1,
        checkpointing=checkpointing.mode if checkpointing.of_layers else "none",
        every_n_layers=checkpointing.every_n_layers if checkpointing.mode in ("full", "offload") else 1,
        mlp_tiles=checkpointing.mlp_tiles,
        # Loops over chunks look different from one chunk; on a GPU, where they work in place, one trace serves both.
        long=not on_cpu or layout.micro_batch_size * layout.seq_len > CHUNK * layout.sharing,
        trust_remote_code=recipe.model.trust_remote_code,
        path=recipe.model.path if recipe.model.trust_remote_code else None,
        revision=recipe.model.revision if recipe.model.trust_remote_code else None,
        tensor=recipe.parallel.tensor,
        context=recipe.parallel.context,
        expert=recipe.parallel.expert,
        drops_casts=drops_casts(recipe),
    )


def _computed_as(recipe: Recipe) -> str:
    if recipe.headed:
        return "classification" if recipe.objective in OF_TEXTS else recipe.objective
    return "sft" if recipe.prefers or recipe.reinforces else recipe.rows_for


def _layout(recipe: Recipe, backend: str) -> Layout:
    if recipe.objective == "seq2seq":
        return "seq2seq"
    if backend in backends.VARLEN:
        return "flat"
    return "packed" if recipe.data.packing else "padded"


@functools.cache
def _versions() -> dict[str, str]:
    """Of what is traced, without the last number: a repair changes no memory worth a new trace."""
    return {name: ".".join(importlib.metadata.version(name).split(".")[:2]) for name in _LIBRARIES}
