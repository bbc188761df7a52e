"""Modules that ZeRO-3 gathers whole lose no gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from matrix import ENGINES
from ranks import ON_CPU, Ranks
from tiny import chat_rows, tiny_model

from toolkit.common import UserError
from toolkit.train import leaf_modules

RECIPE = """
description: Layers that are gathered whole
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
schedule: {max_steps: 2}
batch: {seq_len: 128, global_batch_size: 4, micro_batch_size: 1}
evaluation: {num_prompts: 0}
"""
CLASSES = "extra.deepspeed.zero_optimization.leaf_module.classes"
LORA = ["method.name=lora", "method.target_modules=[down_proj]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    write_jsonl(folder / "chat.jsonl", chat_rows(40))
    write_recipe(folder, "small", RECIPE)
    return folder


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self._z3_leaf = True

    def forward(self, given: Any = None, *, named: Any = None) -> Any:
        return self.inner(named if given is None else given)


def test_what_a_leaf_module_is_given_must_have_a_gradient() -> None:
    def watched(trains: bool = True) -> torch.nn.Module:
        model = torch.nn.ModuleDict({"block": Block()})
        model.requires_grad_(trains)
        leaf_modules.watch(model)
        return model["block"]

    rows, given = torch.ones(1, 2), torch.ones(1, 2, requires_grad=True)
    with pytest.raises(UserError, match="lose the gradients of block, a Block"):
        watched()(rows)
    with pytest.raises(UserError, match="given by position"):
        watched()(named=given)
    watched(trains=False)(rows)
    block = watched()
    with torch.no_grad():
        block(rows)
    block.eval()(rows)
    block.train()(given)
    assert not block._forward_pre_hooks, "it is asked once"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{CLASSES}=[LlamaModel]"], "the gradients of model, a LlamaModel"),
        ([f"{CLASSES}=[LlamaAttention]"], "the gradients of model.layers.0.self_attn, a LlamaAttention"),
        ([f"{CLASSES}=[LlamaMLP]", *LORA], "model.layers.0.mlp, a LlamaMLP"),
        ([f"{CLASSES}=[LlamaDecoderLayer]"], ""),
    ],
    ids=["model", "attention", "lora", "layer"],
)
def test_gradients_that_zero3_would_lose_end_the_run(
    ranks: Ranks, home: Path, overrides: list[str], said: str, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    arguments = ["recipe=small", *ENGINES["zero3"], *overrides, f"output.name={name}"]
    done = ranks.run(home, *arguments, processes=2, entry=ON_CPU)
    assert (done.returncode == 1 and said in done.stderr) if said else done.returncode == 0, done.stderr[-3000:]
    assert len(losses(home / "runs" / name)) == (0 if said else 2)
