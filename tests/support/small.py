"""A user's folder with a tiny model and rows of every kind, and trainings that are set up but not started."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import write_jsonl, write_recipe
from tiny import chat_rows, pair_rows, text_rows, tiny_model

RECIPE = """
description: A small training
model: {path: llama}
data: {sources: [chat.jsonl]}
precision: fp32
optimizer: {learning_rate: 1.0e-2}
schedule: {max_steps: 2}
batch: {seq_len: 128, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0, max_new_tokens: 4}
"""
LORA = ["method.name=lora"]
NF4 = [*LORA, "method.quantization=nf4", "precision=bf16"]
INT8 = [*LORA, "method.quantization=int8", "precision=bf16"]
FP8 = [*LORA, "method.quantization=fp8", "precision=bf16"]
INT4 = [*LORA, "method.quantization=int4", "precision=bf16"]
SEQ2SEQ = ["model.path=blenderbot", "objective=seq2seq", "data.sources=[pairs.jsonl]"]
MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen": "Qwen/Qwen3-8B",
    "moe": "Qwen/Qwen3-30B-A3B",
    "gemma": "google/gemma-2-2b-it",
    "gpt2": "openai-community/gpt2-xl",
    "blenderbot": "facebook/blenderbot-400M-distill",
}


CUTS = ((1, []), (2, ["model.attention=eager"]), (4, ["model.attention=torch_varlen"]), (4, ["model.attention=sdpa"]))
"""Micro-batches of a step of four rows or pairs, each with an attention: steps are the same."""
ALL_CUTS = tuple(itertools.product((1, 2, 4), ([], ["model.attention=eager"], ["model.attention=torch_varlen"])))
"""All of these with all."""


def populate(folder: Path, *models: str) -> None:
    """Writes the models, `chat.jsonl`, `pairs.jsonl`, `text.jsonl` and the recipe `small`."""
    for name in models:
        tiny_model(MODELS[name], folder / name)
    for name, rows in (("chat", chat_rows(40)), ("pairs", pair_rows(40)), ("text", text_rows(40))):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_recipe(folder, "small", RECIPE)


def place_with(*models: str) -> Any:
    """A fixture of a module: a folder that `populate` has filled, in which its tests run."""

    @pytest.fixture(scope="module", autouse=True)
    def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        folder = tmp_path_factory.mktemp("small")
        populate(folder, *models)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            yield folder

    return place


def with_special_tokens(model: Path, folder: Path, *tokens: str) -> None:
    """Writes a model with special tokens more than another has."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, larger = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    tokenizer.add_special_tokens({"extra_special_tokens": [*tokens]})
    larger.resize_token_embeddings(len(tokenizer))
    for each in (tokenizer, larger):
        each.save_pretrained(folder)


def trained(name: str, *overrides: str) -> Path:
    """The folder of a finished run of four steps of the recipe `small`."""
    from toolkit.train.main import main

    assert main(["recipe=small", "max_steps=4", f"output.name={name}", *overrides]) == 0
    return Path("runs") / name


def logits_of(model: Any, row: dict[str, Any]) -> Any:
    """A model's logits of one row, in fp32."""
    import torch

    inputs = {"input_ids": torch.tensor([row["input_ids"]])}
    if model.config.is_encoder_decoder:
        inputs["labels"] = torch.tensor([row["labels"]])
    with torch.no_grad():
        return model.eval()(**inputs).logits.float()


def dequantized(model: Any) -> Any:
    """A model that was loaded quantized, as the libraries restore it in fp32 as a whole."""
    import torch
    from torch.nn.utils import parametrize
    from transformers.pytorch_utils import Conv1D

    from toolkit.models.quantization.stored import StoredLinear

    in_bytes = [(name, each) for name, each in model.named_modules() if isinstance(each, StoredLinear)]
    for name, layer in in_bytes:
        state = layer.weight.quant_state
        # As adapters are trained on them.
        weight = state.restored(layer.weight, state.dtype).float()
        plain: Any = torch.nn.Linear(layer.in_features, layer.out_features, device="meta")
        if layer.source_cls is Conv1D:
            plain, weight = Conv1D(layer.out_features, layer.in_features), weight.T.contiguous()
        plain.weight, plain.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
        model.set_submodule(name, plain)
    if in_bytes:
        model.hf_quantizer.remove_quantization_config(model)
        model = model.float()
    else:
        model = model.dequantize(dtype=torch.float32)
    for layer in list(model.modules()):
        for name in list(getattr(layer, "parametrizations", ())):
            weight = getattr(layer, name).detach().float()
            parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
            layer._parameters[name] = torch.nn.Parameter(weight, requires_grad=False)
    return model


def set_up(*overrides: str) -> Any:
    """A training of the recipe `small` in the current folder, ready for its first step."""
    return with_callbacks(*overrides)[0]


def with_callbacks(*overrides: str) -> tuple[Any, Any]:
    """The same, and its callbacks."""
    from toolkit.distributed.layout import World
    from toolkit.distributed.rendezvous import Rendezvous
    from toolkit.models.load import ModelSource
    from toolkit.recipe.rules import load_checked
    from toolkit.report.terminal import Progress
    from toolkit.train import preflight, setup
    from toolkit.train.health.watchdog import Watchdog
    from toolkit.train.run_folder import claim
    from toolkit.train.startup import StartUp

    loaded = load_checked("small", ["checkpoint.resume=never", *overrides])
    preflight.check_devices(loaded.recipe, World())
    source = ModelSource.open(loaded.recipe)
    folder = claim(loaded, 1)
    (folder.path / "recipe.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    rendezvous = Rendezvous(World())
    watchdog = Watchdog(rendezvous, loaded.recipe, folder)
    session = setup.set_up(loaded, rendezvous, source, folder, None, Progress(), StartUp(), watchdog)
    watchdog.stop()
    return session, setup.Callbacks(session)


def loss_and_gradients(training: Any, rows: int = 4) -> tuple[float, dict[str, Any]]:
    """Loss of one batch in training mode, as the trainer computes it, and the gradients of all trained parameters."""
    import torch

    trainer = training.trainer
    model = trainer.model.train()
    batch = trainer.data_collator([training.prepared.train[row] for row in range(rows)])
    labels = batch["labels"] if model.config.is_encoder_decoder else batch["labels"][:, 1:]
    with trainer.accelerator.autocast():
        loss = trainer.compute_loss(model, batch, num_items_in_batch=labels.ne(-100).sum())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    model.zero_grad()
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients.values())
    return loss.item(), gradients
