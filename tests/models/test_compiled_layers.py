"""Compiled layers compute what the layers compute: one graph for all that are alike, whatever the sizes of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_doc
import pytest
import small
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.models.compiled_layers import CompiledLayers, compiled
from toolkit.models.tiny import tiny_model
from toolkit.recipe import compilation
from toolkit.recipe.rules import load_checked

SIZES = ((2, 17), (2, 33), (3, 64), (2, 40))


def adapted(checkpointing: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="sdpa",
    )  # fmt: skip
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    if checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    return model.train()


def trained(model: Any, rows: int, length: int) -> tuple[float, float]:
    """Loss, and norm of the gradients, of a padded batch."""
    ids = torch.randint(5, 120, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    model.zero_grad()
    loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return loss.item(), torch.stack([each.norm() for each in gradients]).norm().item()


@pytest.mark.parametrize(
    ("checkpointing", "backend"),
    [(False, "eager"), (True, "eager"), pytest.param(True, "inductor", marks=pytest.mark.matrix)],
)
def test_one_graph_serves_all_layers_and_lengths(checkpointing: bool, backend: str) -> None:
    torch._dynamo.reset()
    model = adapted(checkpointing)
    names = list(model.state_dict())
    settings = torch._dynamo.config.suppress_errors
    expected = [trained(model, *size) for size in SIZES]
    layers = CompiledLayers(model, backend=backend)
    assert compiled(model) and layers.layers == 3
    measured = [trained(model, *size) for size in SIZES]
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(expected), rtol=1e-6, atol=0)
    assert layers.graphs == 1
    assert list(model.state_dict()) == names
    # What else is compiled, flex attention by itself, still fails aloud.
    assert torch._dynamo.config.suppress_errors == settings
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.long), labels=torch.ones(1, 5, dtype=torch.long))
    model.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=3, pad_token_id=0)
    assert layers.graphs == 1


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(compilation.COMPILED))
def test_auto_compiles_what_stays_one_graph_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = without_dropout(tiny_model(models_doc.configuration(kind), "sft")).train()
    expected = [trained(model, *size) for size in SIZES]
    layers = CompiledLayers(model, backend="aot_eager")
    measured = [trained(model, *SIZES[0])]
    kinds = layers.graphs
    measured += [trained(model, *size) for size in SIZES[1:]]
    torch.testing.assert_close(torch.tensor(measured), torch.tensor(expected), rtol=1e-5, atol=0)
    assert kinds <= 2 and layers.graphs == kinds
    assert not torch._dynamo.utils.counters["graph_break"]


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small.populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_missing_leaves_the_layers_as_they_are(
    place: Path, formulas: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.delenv("CXX", raising=False)
    assert small.set_up("compile=layers").compiled is None
    assert "layers are not compiled: there is no C++ compiler" in caplog.text


def test_a_run_compiles_where_it_is_told_to_and_not_by_itself_on_a_cpu(place: Path, formulas: None) -> None:
    assert small.set_up("compile=auto").compiled is None
    session = small.set_up("compile=layers", "output.name=other")
    assert session.compiled.layers == 2 and session.compiled.graphs == 0


def test_yaml_says_off_without_quotes(place: Path) -> None:
    recipe = place / "recipes" / "small.yaml"
    recipe.write_text(recipe.read_text() + "compile: off\n")
    assert load_checked("small").recipe.compile == "off"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], ""),
        (["strategy=zero2"], ""),
        (["strategy=zero3"], "zero3"),
        (["activation_checkpointing=selective"], "selective"),
        (["method=qlora"], "quantized"),
    ],
)
def test_auto_leaves_off_what_does_not_gain(overrides: list[str], reason: str) -> None:
    recipe = load_checked("llama_3_1_8b_lora", overrides).recipe
    assert reason in compilation.unfit(recipe, {"model_type": "llama"})
    assert bool(reason) == bool(compilation.unfit(recipe, {"model_type": "llama"}))
    assert compilation.unfit(recipe, {"model_type": "mamba"})
