"""How adapters begin by the weights of their layers (PiSSA, OLoRA), by what quantization lost of these (LoftQ) or by
what their layers read (EVA), before an engine has them.

PEFT's own OLoRA takes the weights of GPT-2's layers the wrong way round, and adapters of more ranks than a layer has
directions do not have the shapes that their settings say, neither by PiSSA nor by OLoRA.
PEFT's own LoftQ runs on GPUs only and leaves out the scale of the adapters: at lora_alpha = 2 r it corrects twice as
much as was lost. PEFT's EVA goes over the rows until all directions have settled, however long that takes, and finds
equal inputs by a Python list of all numbers that a layer reads. So its arithmetic is used, in loops with a bound.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from toolkit.data.rows import IGNORE
from toolkit.distributed.engines import Dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe import Recipe
from toolkit.recipe.sections import EVA_ROWS, EVA_TOKENS, MOVES_BASE

_TOGETHER = 512
"""EVA joins the directions of so many tokens at a time with those before. Till then they wait: 0.8 GiB for an 8B model
with adapters on all layers, less than the activations of a step."""
_ITERATIONS = 16
"""After which a product of rank 8 to 64 takes over 99% of what the best one would of nf4's errors, whose spectrum is
flat, in a fifth of the time of a whole decomposition or less."""


@torch.no_grad()
def begin_with_base(adapted: Any, recipe: Recipe) -> dict[str, torch.Tensor]:
    """PiSSA (Meng et al. 2024) and OLoRA (Büyükakyüz 2024): adapters take the principal part out of the base's weights.

    Returns:
        The adapters as they begin, by name; empty if they begin in another way.
    """
    way = recipe.method.init_lora_weights
    if way not in MOVES_BASE:
        return {}
    for _, layer in _layers(adapted):
        base, scale = layer.get_base_layer(), layer.scaling["default"]
        first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        weight = (base.weight.T if isinstance(base, Conv1D) else base.weight).float()
        rank = min(layer.r["default"], *weight.shape)
        if way == "pissa":
            left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
            half = (sizes / scale).sqrt()
            left, right = left * half, right * half[:, None]
        else:
            left, right = torch.linalg.qr(weight)
        # What is left of the ranks stays at zero.
        first.zero_()[:rank], second.zero_()[:, :rank] = right[:rank], left[:, :rank]
        rest = (weight - scale * second.float() @ first.float()).to(base.weight)
        base.weight.data = (rest.T if isinstance(base, Conv1D) else rest).contiguous()
    return {name: each.detach().cpu().clone() for name, each in adapted.named_parameters() if "lora_" in name}


@torch.no_grad()
def begin_with_lost(adapted: Any, source: ModelSource, dtypes: Dtypes) -> None:
    """LoftQ (Li et al. 2023) in one iteration: adapters hold the largest part of what their layers lost to nf4.

    Args:
        adapted: A quantized model whose adapters have no effect yet.
        source: Where its weights are as they were.
    """
    from peft.utils.integrations import dequantize_module_weight

    with tempfile.TemporaryDirectory(prefix="loftq-") as folder:
        files = source.in_files(dtypes, Path(folder)).files
        for name, layer in _layers(adapted):
            base = layer.get_base_layer()
            if not hasattr(base, "source_cls"):
                continue  # Quantization passes over some layers of some models.
            stored = dequantize_module_weight(base).float()
            weight = files[f"{name}.weight"].to(stored)
            lost = (weight.T if issubclass(base.source_cls, Conv1D) else weight) - stored
            rank = min(layer.r["default"], *lost.shape)
            left, sizes, right = torch.svd_lowrank(lost, min(2 * rank, *lost.shape), _ITERATIONS)
            half = (sizes[:rank] / layer.scaling["default"]).sqrt()
            layer.lora_A["default"].weight[:rank] = (right[:, :rank] * half).T
            layer.lora_B["default"].weight[:, :rank] = left[:, :rank] * half


@torch.no_grad()
def begin_with_read(adapted: Any, batches: Iterable[dict[str, Any]], score: Callable[[dict[str, Any]], object]) -> int:
    """EVA (Paischer et al. 2024), ranks as given: adapters begin with the main directions of what their layers read.

    Args:
        adapted: A model whose adapters have no effect, which they still have not afterwards.
        batches: Of a row each, in the order of training; the first `EVA_ROWS`, or fewer if these have `EVA_TOKENS`
            trained tokens, are read.
        score: Takes one through the model.

    Returns:
        How many layers have read fewer tokens than they have ranks, and begin as by default.
    """
    newest = _Newest()
    layers = [_Read(layer, newest) for _, layer in _layers(adapted)]
    training, total = adapted.training, 0
    adapted.eval()
    for batch in itertools.islice(batches, EVA_ROWS):
        newest.trained = batch["labels"].flatten() != IGNORE
        score(batch)
        total += int(newest.trained.sum())
        if total >= EVA_TOKENS:
            break
    adapted.train(training)
    for layer in layers:
        layer.end()
    return sum(not layer.give() for layer in layers)


@dataclass
class _Newest:
    """What was read last and by whom, and which tokens of the batch are trained."""

    given: torch.Tensor | None = None
    reader: _Read | None = None
    trained: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _Read:
    """The main directions of what a layer reads, as far as tokens are trained."""

    def __init__(self, layer: Any, newest: _Newest) -> None:
        from peft.utils.incremental_pca import IncrementalPCA

        self._layer, self._newest, self._rank = layer, newest, min(layer.r["default"], layer.in_features)
        self._directions = IncrementalPCA(self._rank, lowrank=True, lowrank_seed=0)
        self._waiting: list[torch.Tensor] = []
        self._like = self
        self._hook = layer.register_forward_pre_hook(self._read)

    def _read(self, layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        newest = self._newest
        if newest.reader and newest.given is inputs[0] and newest.reader._rank == self._rank:
            self._like = newest.reader  # Queries, keys and values are made of the same.
            return
        newest.given, newest.reader = inputs[0], self
        tokens = inputs[0].flatten(0, -2)
        # Experts get some of the tokens only.
        self._waiting.append(tokens[newest.trained] if len(tokens) == len(newest.trained) else tokens)
        if sum(map(len, self._waiting)) >= _TOGETHER:
            self._join()

    def _join(self) -> None:
        tokens = torch.cat(self._waiting).float()
        self._waiting.clear()
        self._directions.lowrank = 2 * self._rank <= min(tokens.shape)
        with torch.autocast(tokens.device.type, enabled=False):
            self._directions.partial_fit(tokens)

    def end(self) -> None:
        """Joins what still waits."""
        self._hook.remove()
        if sum(map(len, self._waiting)) >= self._rank:
            self._join()

    def give(self) -> bool:
        """Gives the adapter its directions, once all have ended; returns whether there are any."""
        directions = getattr(self._like._directions, "components_", None)
        if directions is not None:
            self._layer.lora_A["default"].weight[: self._rank] = directions
        return directions is not None


def _layers(adapted: Any) -> Iterator[tuple[str, Any]]:
    """Linear layers with adapters, by their names in the base."""
    from peft.tuners.lora import LoraLayer

    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), (torch.nn.Linear, Conv1D)):
            yield name, module
