"""The real model code with few layers and no numbers: weights are fake tensors."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.quantizers import AutoHfQuantizer

from toolkit.distributed.engines import Dtypes
from toolkit.models.adapters import add_method, keep_unpacked, quantization_config
from toolkit.models.heads import from_config, pin
from toolkit.models.losses.embedding import drop_pooler
from toolkit.models.parallel.expert_parallel import divide_experts
from toolkit.models.parallel.tensor_parallel import divide_layers
from toolkit.models.quantization import experts
from toolkit.models.reach import reach_of
from toolkit.models.reading import refuse_code_elsewhere
from toolkit.planner.trace import fake_kernels
from toolkit.planner.trace.even_routing import EvenExchange
from toolkit.planner.trace.setting import Setting
from toolkit.planner.trace.types import CHUNK
from toolkit.recipe import Recipe
from toolkit.recipe.data import Data, Source
from toolkit.recipe.heads import EMBEDDING, HEADED
from toolkit.recipe.schema import Model
from toolkit.recipe.sections import Extra, Method

_DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_DECODER_KEYS = ("decoder_layers", "num_decoder_layers")
_OF_POSITIONS = ("position_ids", "token_type_ids")
_ENCODER_KEYS = ("encoder_layers", "num_layers")


@dataclass(frozen=True)
class Shallow:
    """A model to trace.

    Args:
        model: Transformers or PEFT model on fake tensors, ready to train.
        layers: The repeated layers that the depth counts.
        encoder: Layers of an encoder that has as many as the decoder in the same pattern, and so becomes as shallow.
    """

    model: Any
    layers: list[torch.nn.Module]
    encoder: Sequence[torch.nn.Module] = ()

    @property
    def base(self) -> Any:
        """The Transformers model inside."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model


def load_config(setting: Setting) -> Any:
    """The configuration object of the whole model."""
    if setting.path and setting.trust_remote_code:
        refuse_code_elsewhere(AutoConfig, setting.path, setting.revision)
        own = AutoConfig.from_pretrained(setting.path, revision=setting.revision, trust_remote_code=True)
        pin(own, setting.revision, setting.objective)
        return own
    values = {key: value for key, value in setting.config.items() if key != "transformers_version"}
    # Transformers completes nested settings, such as those of rotary embeddings, in place.
    config = AutoConfig.for_model(**copy.deepcopy(values))
    text = config.get_text_config(decoder=True)
    for each in (config, text):  # An encoder-decoder's second one is a copy.
        if (getattr(each, "pad_token_id", None) or 0) >= text.vocab_size:
            # The default of Phi-3 or Marian, where settings leave the model's own out: they change no memory.
            each.pad_token_id = 0
        if setting.objective in HEADED:  # By which a head finds the last token.
            each.pad_token_id = each.pad_token_id or 0
    return config


def depth_of(config: Any) -> int:
    """Repeated layers: of the decoder, where there is an encoder too."""
    text = _text(config)
    return int(getattr(text, _depth_key(text)))


def depths(total: int, once: int, period: int) -> tuple[int, int]:
    """Two depths from which that of the model follows: a period apart, and the shallow one ends as the model does.

    Args:
        total: Layers of the whole model.
        once: See `pattern`.
        period: The same.
    """
    small = once + period + (total - once) % period
    if small < 2 * period:  # The first layers would be the last.
        small += period
    if small > total - period:
        small = total - period if total > period else total
    return small, small + period


def pattern(layers: Sequence[torch.nn.Module], every: int = 1) -> tuple[int, int]:
    """How many layers come once, and after how many of the others their pattern begins anew.

    Layers are alike if they are made of the same modules with parameters of the same shapes: whether positions are
    masked changes neither memory nor work.

    Args:
        every: Of so many layers one is checkpointed, which is part of the pattern.
    """
    kinds = _kinds(layers)
    total = len(kinds)

    def repeats(once: int, period: int) -> bool:
        return kinds[once + period :] == kinds[once : total - period]

    pairs = ((once, period) for once in range(total) for period in range(1, total - once + 1) if repeats(once, period))
    once, period = min(pairs, key=lambda pair: (pair[0] + 2 * pair[1], pair), default=(0, 1))
    return once, math.lcm(period, every)


def _kinds(layers: Sequence[torch.nn.Module]) -> list[int]:
    """A number for each layer; those that are alike have the same."""
    seen: list[Any] = []
    for kind in map(_kind, layers):
        seen += [kind] * (kind not in seen)
    return [seen.index(_kind(layer)) for layer in layers]


def _kind(layer: torch.nn.Module) -> Any:
    return (
        [(name, type(module).__name__) for name, module in layer.named_modules()],
        [(name, parameter.shape) for name, parameter in layer.named_parameters()],
    )


def build(setting: Setting, depth: int | None, fake: FakeTensorMode, encoder: bool = False) -> Shallow:
    """The model of a setting.

    Args:
        depth: Number of layers; None for all of them (on the meta device, to count parameters).
        fake: The mode in which its tensors are made.
        encoder: Whether the whole model has an encoder that becomes as shallow, see `Shallow`.
    """
    config = load_config(setting)
    if depth is not None:
        _shorten(config, depth, encoder)
    recipe = _recipe(setting)
    types = _dtypes(setting)
    reach = reach_of(config, setting.objective, setting.trust_remote_code)
    with torch.device("meta"):
        model = from_config(
            setting.objective,
            config,
            setting.trust_remote_code,
            dtype=getattr(torch, types.load),
            attn_implementation=fake_kernels.implementation(setting),
        )
        if setting.objective == EMBEDDING:
            drop_pooler(model)
        _quantize(model, recipe, types)
        new_tokens = range(setting.method.get("new_tokens", 0))
        trained = add_method(model, recipe, types, whole=depth is None, new_tokens=new_tokens, reach=reach)
    trained.train()
    if depth is not None:
        _materialize(trained, fake, types, setting.objective in HEADED)
    # What it adds to parameters must be on those that are there.
    with contextlib.nullcontext() if depth is None else fake:
        divide_layers(trained, setting.tensor, index=0)
        divide_experts(trained, setting.expert, 0, EvenExchange)
        if setting.products and depth is not None:
            from toolkit.models.quantization.fp8_products import multiply_in_fp8  # torchao takes a second.

            multiply_in_fp8(trained, setting.products)
    lists = _repeated(model)
    twins = setting.objective == "seq2seq" and len(lists) == 2 and _kinds(lists[0]) == _kinds(lists[1])
    return Shallow(trained, _layers(model), lists[0] if twins else ())


def _recipe(setting: Setting) -> Recipe:
    data = Data(sources=[Source(path="unread")])
    stated = dict(setting.method)
    extra = Extra(lora=stated.pop("extra", {}))
    stated.pop("new_tokens", None)
    method = Method(**stated)
    return Recipe(model=Model(path="unread"), data=data, objective=setting.objective, method=method, extra=extra)  # type: ignore[arg-type]


def _dtypes(setting: Setting) -> Dtypes:
    compute = setting.autocast or setting.local
    return Dtypes(
        load=setting.load, local=setting.local, compute=compute, autocast=setting.autocast,
        reduce=setting.local, master=setting.local, export=compute,
    )  # fmt: skip


def _text(config: Any) -> Any:
    """The part of the config with the decoder's layers: of an encoder-decoder it would be a copy with other names, but
    where encoder and decoder have configs of their own."""
    if not config.is_encoder_decoder:
        return config.get_text_config()
    return config.decoder if isinstance(getattr(config, "decoder", None), PreTrainedConfig) else config


def _depth_key(text: Any) -> str:
    keys = _DECODER_KEYS if getattr(text, "is_encoder_decoder", False) else _DEPTH_KEYS
    return next(key for key in (*keys, *_DEPTH_KEYS) if isinstance(getattr(text, key, None), int))


def _shorten(config: Any, depth: int, encoder: bool) -> None:
    total, text = depth_of(config), _text(config)
    of_encoder = [(text, key) for key in _ENCODER_KEYS if encoder and getattr(text, key, None) == total]
    if encoder and text is not config and config.is_encoder_decoder:
        apart = config.encoder.get_text_config()
        of_encoder = [(apart, _depth_key(apart))]
    for part in {id(each): each for each in (text, *(part for part, _ in of_encoder))}.values():
        for key, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == total and total > 1 and key.endswith(("types", "layers")):
                setattr(part, key, value[:depth])
    for part, key in ((text, _depth_key(text)), *of_encoder):
        setattr(part, key, depth)


def _quantize(model: Any, recipe: Recipe, types: Dtypes) -> None:
    wanted = quantization_config(recipe, types, model.config)
    if wanted is None:
        return
    experts.quantize_fused()
    quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=False)
    quantizer.preprocess_model(model=model, dtype=getattr(torch, types.load), device_map={"": "cpu"})
    model.is_loaded_in_4bit = recipe.method.quantization == "nf4"
    model.is_loaded_in_8bit = recipe.method.quantization == "int8"
    model.hf_quantizer = quantizer
    keep_unpacked(model)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers."""
    lists = _repeated(model)
    # In an encoder-decoder the decoder comes last.
    return lists[-1] if model.config.is_encoder_decoder else max(lists, key=len)


def _repeated(model: PreTrainedModel) -> list[list[torch.nn.Module]]:
    """Lists of layers that are marked as such, or where none are, all lists of modules."""
    # A model of several modes may have more layers for images than a shallow decoder has.
    inside = model if model.config.is_encoder_decoder else model.get_decoder() or model.base_model
    lists = [[*each] for each in inside.modules() if isinstance(each, torch.nn.ModuleList) and len(each)]
    marked = [each for each in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in each)]
    return marked or lists


def _materialize(model: torch.nn.Module, fake: FakeTensorMode, types: Dtypes, headed: bool) -> None:
    """Replaces what lies on the meta device by fake tensors on the CPU; tied parameters stay tied.

    Args:
        headed: Whether the objective has a head of its own, as those have that train encoders.
    """
    made: dict[int, torch.nn.Parameter] = {}
    with fake:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    stored = fake_kernels.quantized(module, parameter, types)
                    like = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                    plain = torch.nn.Parameter(like, requires_grad=parameter.requires_grad)
                    made[id(parameter)] = plain if stored is None else stored
                module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    # Encoders have numbers of positions, as many as their longest row, which shapes exceed.
                    longer = headed and name in _OF_POSITIONS and buffer.dim() == 2 and buffer.shape[1] < 2 * CHUNK
                    size = (1, 2 * CHUNK) if longer else buffer.shape
                    module._buffers[name] = torch.empty(size, dtype=buffer.dtype, device="cpu")
        experts.restore_on_use(model)
