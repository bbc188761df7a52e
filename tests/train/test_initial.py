"""How adapters begin: the model says what it said, and what is published stands on the base as it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import models_doc
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small import LORA, place_with, set_up, with_callbacks
from tiny import tiny_kind

from toolkit.models.load import ModelSource
from toolkit.train import train
from toolkit.train.finished.export import load_trained
from toolkit.train.finished.merge import merge
from toolkit.train.main import main
from toolkit.train.optimizer import optimizer_class

place = place_with("llama", "gpt2")


def logits(model: Any, session: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([session.prepared.train[0]["input_ids"]])).logits


WAYS = {
    "gaussian": [],
    "orthogonal": [],
    "pissa": ["method.rank_pattern.q_proj=4", "method.use_dora=true"],
    "eva": ["method.rank_pattern.q_proj=4", "method.use_dora=true"],
    "olora": ["method.use_rslora=true", "method.rank_pattern.q_proj=4", "method.alpha_pattern.q_proj=3"],
    # Of more ranks than some layers have directions; and of layers whose weights lie the other way round.
    "pissa-wide": ["method.r=200"],
    "olora-wide": ["method.r=200"],
    "pissa-gpt2": ["model.path=gpt2", "method.modules_to_save=[ln_1]"],
    "olora-gpt2": ["model.path=gpt2", "method.modules_to_save=[ln_1]"],
}


@pytest.mark.parametrize("way", WAYS)
def test_adapters_begin_without_an_effect_and_end_on_the_base_as_it_was(way: str) -> None:
    begun = way.partition("-")[0]
    overrides = [*LORA, "method.r=8", f"method.init_lora_weights={begun}", "method.modules_to_save=[input_layernorm]"]
    session, callbacks = with_callbacks(*overrides, f"output.name={way}", *WAYS[way])
    before = logits(ModelSource.open(session.recipe).load(session.dtypes, "eager"), session)
    # PiSSA and OLoRA do not begin at zero.
    assert bool(session.start) == (begun in ("pissa", "olora"))
    torch.testing.assert_close(logits(session.module, session), before, atol=2e-5, rtol=0)
    session.trainer.train()
    train.finish(session, callbacks)
    trained = logits(session.module, session)
    assert (trained - before).abs().max() > 1e-3
    _, published, _ = load_trained(session.folder.path)
    torch.testing.assert_close(logits(published, session), trained, atol=2e-5, rtol=0)
    merge([session.folder.path], session.folder.path / "merged")


@pytest.mark.parametrize("way", ["pissa", "olora"])
def test_the_part_taken_out_of_the_base_is_pefts(way: str) -> None:
    session = set_up(*LORA, "method.r=8", "method.use_rslora=true", f"method.init_lora_weights={way}")
    base = ModelSource.open(session.recipe).load(session.dtypes, "eager")
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", use_rslora=True, init_lora_weights=way)
    ours, theirs = (dict(each.named_parameters()) for each in (session.module, get_peft_model(base, config)))
    layers = [name.removesuffix(".lora_A.default.weight") for name in ours if "lora_A" in name]
    assert len(layers) == 14
    for layer in layers:
        (part, rest), (other, others) = (
            (
                named[f"{layer}.lora_B.default.weight"] @ named[f"{layer}.lora_A.default.weight"],
                named[f"{layer}.base_layer.weight"],
            )
            for named in (ours, theirs)
        )
        torch.testing.assert_close(part, other, atol=1e-5, rtol=0)
        torch.testing.assert_close(rest, others, atol=1e-5, rtol=0)


def test_eva_begins_with_the_main_directions_of_what_layers_read() -> None:
    session = set_up(*LORA, "method.r=4", "method.init_lora_weights=eva", "batch.micro_batch_size=4")
    other = set_up(*LORA, "method.r=4", "method.init_lora_weights=eva", "batch.micro_batch_size=1")
    weights, others = (dict(each.module.named_parameters()) for each in (session, other))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    layer = session.module.get_base_model().model.layers[1].mlp.down_proj
    directions, read = layer.lora_A["default"].weight.detach(), []
    hook = layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
    for row in session.prepared.train:
        with torch.no_grad():
            session.module.eval()(input_ids=torch.tensor([row["input_ids"]]))
        read[-1] = read[-1][[label != -100 for label in row["labels"]]]
    hook.remove()
    whole = torch.cat(read)
    varies = whole - whole.mean(dim=0)
    torch.testing.assert_close(directions @ directions.T, torch.eye(4), atol=1e-5, rtol=0)
    best = torch.linalg.svdvals(varies)[:4].square().sum()
    assert (varies @ directions.T).square().sum() > 0.99 * best


def test_layers_that_read_the_same_begin_alike_by_eva_in_any_order(tmp_path: Path) -> None:
    """OPT has its keys before its queries, and computes them after these."""
    model = tiny_kind(models_doc.stated("opt", "sft"), tmp_path / "opt")
    session = set_up(*LORA, "method.init_lora_weights=eva", f"model.path={model}")
    attention = session.module.get_base_model().model.decoder.layers[0].self_attn
    queries, keys, values = (
        getattr(attention, name).lora_A["default"].weight for name in ("q_proj", "k_proj", "v_proj")
    )
    assert torch.equal(queries, keys) and torch.equal(queries, values)


def test_loftq_begins_nearer_to_what_was_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    nf4 = [*LORA, "method.quantization=nf4", "method.r=32"]
    loftq = [*nf4, "method.init_lora_weights=loftq", "method.rank_pattern.q_proj=4"]
    plain = set_up(*nf4)
    session, callbacks = with_callbacks(*loftq, "output.name=loftq", "checkpoint.save_steps=1")
    whole = logits(ModelSource.open(set_up().recipe).load(session.dtypes, "eager"), session)
    lost, kept = ((logits(each.module, session) - whole).norm() for each in (plain, session))
    assert kept < 0.6 * lost
    session.trainer.train()
    train.finish(session, callbacks)
    merge([session.folder.path], session.folder.path / "merged")
    _, published, _ = load_trained(session.folder.path)
    torch.testing.assert_close(logits(published, session), logits(session.module, session), atol=2e-5, rtol=0)

    # What goes on has its adapters from the checkpoint.
    monkeypatch.setattr("toolkit.train.setup.begin_with_lost", None)
    resume = f"checkpoint.resume={session.folder.path}/checkpoints/checkpoint-1"
    assert main(["recipe=small", *loftq, "output.name=continued", resume]) == 0
    one, other = (load_file(Path(f"runs/{name}/final/adapter_model.safetensors")) for name in ("loftq", "continued"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_second_matrices_learn_faster_with_loraplus() -> None:
    session = set_up(*LORA, "method.loraplus_lr_ratio=16", "optimizer.weight_decay=0.1")
    _, kwargs = optimizer_class(session.recipe, session.trainer.args, session.trainer.model)
    names = {id(parameter): name for name, parameter in session.trainer.model.named_parameters()}
    rates = {names[id(each)]: group["lr"] for group in kwargs["params"] for each in group["params"]}
    rate = session.recipe.optimizer.learning_rate
    assert len(rates) == sum(each.requires_grad for each in session.trainer.model.parameters())
    assert all(math.isclose(each, rate * (16 if "lora_B" in name else 1)) for name, each in rates.items())
    session.trainer.train()
    assert {group["initial_lr"] for group in session.trainer.optimizer.param_groups} == {rate, 16 * rate}
