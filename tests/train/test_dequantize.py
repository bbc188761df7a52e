"""Where a base is restored to merge into, what that takes, and that the numbers are the libraries' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from small import INT8, NF4, populate
from tracker import Tracker

from toolkit.common import UserError
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.rules import load_checked
from toolkit.train.dequantize import dequantize, place_for

HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dequantize")
    populate(folder, "llama")
    return folder


@pytest.fixture(autouse=True)
def place(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)


def quantized(overrides: list[str]) -> Any:
    recipe = load_checked("small", overrides).recipe
    return ModelSource.open(recipe).load(dtypes(recipe), "eager")


@pytest.mark.parametrize("kind", [NF4, INT8], ids=["nf4", "int8"])
def test_a_base_is_restored_layer_by_layer_to_what_transformers_restores(kind: list[str]) -> None:
    expected = quantized(kind).dequantize(dtype=torch.float32).float().state_dict()
    base = quantized(kind)
    layers = [
        layer for layer in base.modules() if "bitsandbytes" in type(layer).__module__ and hasattr(layer, "weight")
    ]
    sizes = [4 * layer.in_features * layer.out_features for layer in layers]

    with Tracker() as tracker:
        restored = dequantize(base, HOST)

    # The result, and beside it no more than the three forms of one layer that `place_for` counts.
    assert sum(sizes) <= tracker.peaks["load"].bytes <= sum(sizes) + 3 * max(sizes)
    assert not hasattr(restored.config, "quantization_config")
    for name, weight in restored.float().state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(
    ("on_gpu", "on_host", "chosen"),
    [(40e9, 60e9, "cuda"), (20e9, 60e9, "cpu"), (None, 60e9, "cpu"), (20e9, 10e9, None)],
)
def test_a_model_of_8_billion_parameters_is_merged_where_there_is_room(
    on_gpu: float | None, on_host: float, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card of 24 GB trains it in 4 bits and cannot hold its 32 GB in fp32."""
    model = SimpleNamespace(parameters=lambda: [torch.empty(250_000_000, device="meta")] * 32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu is not None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (on_gpu, 24e9))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=on_host, total=on_host))
    if chosen is None:
        with pytest.raises(UserError, match=r"35\.0 GB; 20\.0 GB free on the GPU, 10\.0 GB free on the host"):
            place_for(model)
        return
    place, text = place_for(model)
    assert place.type == chosen and "35.0 GB" in text
