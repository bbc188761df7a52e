"""What was asked is what runs: a run that would differ stops before its first step, and the manifest says what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from ranks import Ranks
from tiny import tiny_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from transformers import Trainer

from toolkit.common import UserError
from toolkit.data.batching.batches import MicroBatches
from toolkit.distributed.engine_state import EngineState, expected_state
from toolkit.distributed.layout import batch_layout
from toolkit.models.load import ModelSource
from toolkit.recipe import Recipe
from toolkit.train import batching
from toolkit.train.live_state import reshard
from toolkit.train.main import main
from toolkit.train.verify import verify

SABOTAGED = """
import cpu_engines
import toolkit.distributed.engines as engines

honest = engines.deepspeed_config

def silently(*given):
    config = honest(*given)
    del config["gradient_clipping"]
    config["data_types"]["grad_accum_dtype"] = config["communication_data_type"] = "bf16"
    config["zero_optimization"]["stage"] = 1
    return config

def main(arguments):
    engines.deepspeed_config = silently
    return cpu_engines.main(arguments)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wanted(world_size: int = 2, **sections: Any) -> EngineState:
    recipe = Recipe.model_validate({"model": {"path": "m"}, "data": {"sources": ["d.jsonl"]}, **sections})
    return expected_state(recipe, batch_layout(recipe, world_size), "AdamW", "sdpa")


@pytest.mark.parametrize(
    ("strategy", "spread"),
    [
        ({"name": "ddp"}, ("whole", "whole", "whole")),
        ({"name": "zero1"}, ("whole", "whole", "sharded")),
        ({"name": "zero2"}, ("whole", "sharded", "sharded")),
        ({"name": "zero3"}, ("sharded", "sharded", "sharded")),
        ({"name": "fsdp"}, ("sharded", "sharded", "sharded")),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_what_each_strategy_spreads(strategy: dict[str, Any], spread: tuple[str, ...]) -> None:
    state = wanted(strategy=strategy)
    assert (state.parameters, state.gradients, state.optimizer_state) == spread
    alone = wanted(world_size=1, strategy=strategy)
    assert (alone.parameters, alone.gradients, alone.optimizer_state) == ("whole",) * 3
    assert state.master_dtype == "float32"
    # DeepSpeed and FSDP bring the parameters to the computation in its own type.
    assert (state.autocast == "none") == (strategy["name"] != "ddp")


def test_every_difference_is_named_at_once() -> None:
    state = wanted().model_copy(update={"optimizer": "Adam", "max_grad_norm": 1.5})
    with pytest.raises(UserError) as caught:
        verify(wanted(), state)
    assert "optimizer: the recipe asks for AdamW, Adam runs" in caught.value.what
    assert "max_grad_norm: the recipe asks for 1.0, 1.5 runs" in caught.value.what
    assert caught.value.what.count(": the recipe asks for") == 2
    verify(wanted(), wanted().model_copy(update={"frozen_parameters": 7}))


def test_manifest_says_what_ran(place: Path) -> None:
    assert main(["recipe=small", "max_steps=2", "precision=bf16"]) == 0
    state = json.loads((place / "runs" / "small" / "manifest.json").read_text())["effective"]
    assert state["autocast"] == "bfloat16" and state["master_dtype"] == state["moments_dtype"] == "float32"
    assert state["optimizer"] == "AdamW" and state["engine"] == "none" and state["trained_parameters"] > 0


def test_another_attention_kernel_stops_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ModelSource.load
    monkeypatch.setattr(ModelSource, "load", lambda source, types, _, *away: load(source, types, "eager", *away))
    assert main(["recipe=small", "max_steps=2", "model.attention=sdpa"]) == 1
    assert "attention: the recipe asks for sdpa, eager runs" in capsys.readouterr().err
    assert not (place / "runs" / "small" / "final").exists()


def test_low_masters_stop_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ModelSource.load
    monkeypatch.setattr(ModelSource, "load", lambda *given: load(*given).to(torch.bfloat16))
    assert main(["recipe=small", "max_steps=2", "method=full", "precision=bf16"]) == 1
    error = capsys.readouterr().err
    assert "master_dtype: the recipe asks for float32, bfloat16 runs" in error


def test_a_parameter_that_would_never_move_stops_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create = Trainer.create_optimizer

    def forgetful(self: Any, *given: Any) -> Any:
        optimizer = create(self, *given)
        del optimizer.param_groups[0]["params"][-2:]
        return optimizer

    monkeypatch.setattr(Trainer, "create_optimizer", forgetful)
    assert main(["recipe=small", "max_steps=2"]) == 1
    assert "not_updated: the recipe asks for 0, 2 runs" in capsys.readouterr().err


def test_batches_of_another_size_stop_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batching, "MicroBatches", lambda **given: MicroBatches(**given | {"accumulation": 4}))
    assert main(["recipe=small", "max_steps=2", "precision=bf16"]) == 1
    assert "micro_batch_size: the recipe asks for 2, 1 runs" in capsys.readouterr().err


@pytest.mark.slow
def test_an_engine_that_was_given_something_else_stops_the_run(place: Path, ranks: Ranks) -> None:
    (place / "sabotaged.py").write_text(SABOTAGED, encoding="utf-8")
    arguments = ["recipe=small", "strategy=zero2", "optimizer.max_grad_norm=0.5", "max_steps=2"]
    done = ranks.run(place, *arguments, entry="sabotaged")
    assert done.returncode == 1, done.stderr[-3000:]
    for line in (
        "zero_stage: the recipe asks for 2, 1 runs",
        "max_grad_norm: the recipe asks for 0.5, 1.0 runs",
        "reduce_dtype: the recipe asks for float32, bfloat16 runs",
    ):
        assert line in done.stderr, done.stderr[-3000:]


def test_units_are_read_at_rest_when_a_module_of_theirs_was_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 leaves them gathered: with the fused head, the unit of the last norm and `lm_head`."""
    monkeypatch.setattr(FSDPState, "_force_complete_incomplete_states", lambda self, output: output, raising=False)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.forward = lambda x: model[0](x) @ model[1].weight
        fully_shard([model[0], model[1]], mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(1, 4))
            assert not any(isinstance(each, DTensor) for each in model.parameters())
            reshard(model)
            assert all(isinstance(each, DTensor) for each in model.parameters())
    finally:
        distributed.destroy_process_group()


def test_a_model_that_cannot_pack_is_refused_before_its_rows_and_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small.populate(tmp_path)
    tiny_model(
        {"model_type": "falcon", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2},
        tmp_path / "falcon",
    )
    (tmp_path / "falcon" / "model.safetensors").write_bytes(b"")
    assert main(["recipe=small", "model.path=falcon", "data.packing=true", "method.name=lora"]) == 1
    said = capsys.readouterr()
    told = said.out + said.err
    assert "falcon with attention sdpa lets documents of a batch see each other" in told
    assert "set data.packing=false" in told and "rows of" not in told
