"""MLPs in tiles: the same logits and gradients, also with adapters, dropout and recomputation, for less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.models.tiled_mlp import tile_mlps, tiles_of

ARCHITECTURES = {
    "llama": "meta-llama/Llama-3.2-1B",
    "qwen3": "Qwen/Qwen3-8B",
    "gemma3": "google/gemma-3-1b-it",
    "phi3": {
        "model_type": "phi3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "gpt_neox": {
        "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiled") / request.param
    tiny_model(ARCHITECTURES[request.param], folder)
    return AutoModelForCausalLM.from_pretrained(folder).double()


def step(model: Any, rows: int = 2, tokens: int = 30) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of random rows, in 64 bits but for what models themselves compute in 32."""
    torch.manual_seed(1)
    ids = torch.randint(0, 200, (rows, tokens))
    logits = model(input_ids=ids, use_cache=False).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    return float(loss), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("tiles", "adapted", "recomputes"), [(2, False, False), (7, True, False), (7, True, True), (64, False, True)]
)
def test_loss_and_gradients_are_those_of_whole_rows(model: Any, tiles: int, adapted: bool, recomputes: bool) -> None:
    """Also where tiles are of unequal length, or more than there are tokens."""
    whole = copy.deepcopy(model)
    if adapted:
        torch.manual_seed(2)
        whole = get_peft_model(whole, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()
    whole.train()
    if recomputes:
        whole.enable_input_require_grads()
        whole.activation_checkpointing_enable({"use_reentrant": False})
    tiled = copy.deepcopy(whole)
    tile_mlps(tiled, tiles)
    assert (tiles_of(whole), tiles_of(tiled)) == (1, tiles)
    (loss, gradients), (other, others) = step(whole), step(tiled)
    assert other == pytest.approx(loss, rel=1e-6)
    assert others.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 2e-6 * gradient.norm() + 1e-9, name
    whole.eval(), tiled.eval()
    with torch.no_grad():
        ids = torch.arange(20)[None]
        assert torch.allclose(tiled(ids).logits, whole(ids).logits, rtol=1e-5, atol=1e-6)


def test_dropout_is_drawn_again_as_it_was(model: Any) -> None:
    """As finite differences of the loss with the same numbers say."""
    torch.manual_seed(2)
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), adapters).double().train()
    tile_mlps(adapted, 3)
    _, gradients = step(adapted)
    name, gradient = next((name, each) for name, each in gradients.items() if "lora_B" in name and "mlp" in name)
    slope, direction = float(gradient.norm()), gradient / gradient.norm()
    parameter = dict(adapted.named_parameters())[name]
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * 1e-2 * direction
        losses.append(step(adapted)[0])
        with torch.no_grad():
            parameter -= sign * 1e-2 * direction
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(slope, rel=1e-2)


def test_layers_without_an_mlp_of_their_own_are_refused(tmp_path: Any) -> None:
    config = {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
    tiny_model(config, tmp_path / "bloom")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bloom")
    with pytest.raises(UserError, match="layers of kind BloomBlock have no MLP that takes hidden states alone"):
        tile_mlps(model, 2)
    with pytest.raises(UserError, match="this model's layers are not marked as such"):
        tile_mlps(torch.nn.Linear(2, 2), 2)
