"""Linear layers whose weights a model's own code reads, asked of a tiny copy of it.

A layer that is stored in fewer bits computes what it did; who reads its weight finds bytes. Such code does not fail: it
casts what comes before the layer to the type of bytes (LongT5, the indexers of DeepSeek V3.2), or multiplies by the
weight without calling the layer, of whose adapter it then knows nothing (Jamba).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from toolkit.models.heads import POOLER, from_config, head_modules
from toolkit.models.tiny import by_itself, text_batch, tiny_model
from toolkit.recipe import model_configs
from toolkit.recipe.heads import EMBEDDING, HEADED

LINEAR = (torch.nn.Linear, Conv1D)
_ROUTER = re.compile(r"(^|\.)(classifier|gate|router|wg)(\.|$)")
_HARMLESS = ("device", "requires_grad", "is_cuda", "is_cpu", "is_meta")
"""What may be asked of a weight in any form."""


@dataclass(frozen=True)
class Reads:
    """Regular expressions of whole names of linear layers.

    Args:
        read: Their weight is read by something else than the layer itself.
        uncalled: These are never called at all, or not where there are kernels that take their weight.
        renamed: Of the adapters of these PEFT reads another name than it writes: a renaming of the model's own weights,
            which it applies to adapters, fits the new name as well (Laguna's shared experts).
    """

    read: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()


def kept_whole(config: Any, objective: str, trust_remote_code: bool) -> list[str]:
    """Names of modules that stay as they are where a model is stored in fewer bits: its head, the pooler that some
    encoders get where nothing reads it, routers, and linear layers whose weights are read; none where that is what
    libraries keep anyway, the head for the vocabulary."""
    read, headed = reads_of(config, objective, trust_remote_code).read, objective in HEADED
    experts = model_configs.experts(config.to_dict())[0]
    if not (read or headed or experts > 1):
        return []
    with by_itself(), torch.device("meta"):
        model = from_config(objective, config, trust_remote_code)
    linear = {name: each for name, each in model.named_modules() if isinstance(each, LINEAR)}
    routers = (name for name, each in linear.items() if _ROUTER.search(name) and len(each.weight) == experts > 1)
    names = sorted({*routers, *(name for name in linear if is_one_of(name, read))})
    if objective == EMBEDDING:
        return [*names, *([POOLER] if getattr(model, POOLER, None) is not None else [])]
    if headed:
        return [*names, *head_modules(model)]
    return [*names, *get_keys_to_not_convert(model)] if names else []


def is_one_of(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is meant by one of the patterns of `Reads`."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def reads_of(config: Any, objective: str, trust_remote_code: bool = False) -> Reads:
    """What an architecture's code reads, in training and evaluation; nothing where that cannot be told.

    Args:
        config: The model's configuration object.
        objective: As in the recipe.
    """
    # It draws numbers the first time, and adapters that are initialised next must not depend on that.
    with torch.random.fork_rng(devices=[]):
        return _ask(_Hashed(config, repr(sorted(config.to_dict().items(), key=str))), objective, trust_remote_code)


@dataclass(frozen=True)
class _Hashed:
    config: Any = field(compare=False)
    text: str


@functools.lru_cache
def _ask(hashed: _Hashed, objective: str, trust_remote_code: bool) -> Reads:
    try:
        model = tiny_model(hashed.config, objective, trust_remote_code)
        layers = {name: each for name, each in model.named_modules() if isinstance(each, LINEAR)}
        read, called = set[str](), set[str]()
        for name, layer in layers.items():
            _watch(layer, functools.partial(read.add, name), functools.partial(called.add, name))
        with by_itself(), torch.no_grad():
            for training in (True, False):
                model.train(training)(**text_batch(model))
    except Exception:  # A model's own code may raise anything for sizes that do not fit together.
        return Reads()
    handed = {name for name in layers if _handed_over(model, name)}
    sets = read | handed, (read - called) | handed, _renamed(tiny_model(hashed.config, objective, trust_remote_code))
    return Reads(*(tuple(sorted({*map(any_layer, names)})) for names in sets))


def _handed_over(model: Any, name: str) -> bool:
    """Whether the code around a layer hands its weight to a call, as Mamba's does to kernels that a CPU has not."""
    outer, _, own = name.rpartition(".")
    kind: Any = type(model.get_submodule(outer))
    return re.search(rf"^\s*(\w+=)?self\.{re.escape(own)}\.weight,$", _source(kind), re.MULTILINE) is not None


@functools.cache
def _source(kind: type[torch.nn.Module]) -> str:
    """The source of a model's class, empty where there is none; Python parses the whole file each time it is asked."""
    if kind.__module__.startswith("torch."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _renamed(model: Any) -> set[str]:
    """Layers whose adapters do not come back from what PEFT saves."""
    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return set()
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    try:
        with by_itself():
            adapted = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear"))
            found: Any = set_peft_model_state_dict(adapted, get_peft_model_state_dict(adapted))
    except Exception:  # Where PEFT takes no layers of a model, or another kind of it.
        return set()
    adapters = (name for name in found.missing_keys if ".lora_A." in name)
    return {name.removeprefix("base_model.model.").partition(".lora_A.")[0] for name in adapters}


def any_layer(name: str) -> str:
    """A pattern of the same layer's name whatever number it, or an expert's, has."""
    return re.sub(r"(?<=\.)\d+(?=\\\.|$)|(?<=_)\d+(?=\\\.)", r"\\d+", re.escape(name))


def _watch(layer: Any, note_read: Callable[[], None], note_call: Callable[[], None]) -> None:
    """Has a layer tell when it is called, and when its weight is used outside of that."""
    plain = type(layer)
    inside = [False]

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if name != "weight" or inside[0] or value is None:
                return value
            told = value.as_subclass(_Told)
            told.note = note_read
            return told

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            note_call()
            inside[0] = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                inside[0] = False

    layer.__class__ = Watched


class _Told(torch.Tensor):
    """A weight that tells what is made of it."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            name = function.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            for each in args if name not in _HARMLESS else ():
                if isinstance(each, _Told):
                    each.note()
            return function(*args, **(kwargs or {}))
