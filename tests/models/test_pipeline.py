"""Models whose layers are cut into stages: which can be, and what a process keeps of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.common import UserError
from toolkit.models.parallel.pipeline import Chain, Elsewhere, Split, chain_processes, elsewhere

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> Any:
    if kind == "qwen3_moe":
        changes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return AutoConfig.for_model(kind, **SIZES | changes)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A pipeline of one process, which has all stages."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    chain_processes(1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "olmo2", "phi3"]
)
@pytest.mark.parametrize("layers", [(2, 2), (1, 2, 1)])
def test_stages_one_after_the_other_give_the_models_own_hidden_states(kind: str, layers: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, head_dim=16)).eval()
    ids, places = torch.arange(20, 36)[None], torch.tensor([[*range(10), *range(6)]])
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=places, use_cache=False).logits
        own = Chain(model, Split(layers, 1))
        hidden: dict[str, Any] = {"input_ids": ids}
        for stage in own.stages:
            with own.only(stage):
                assert sum(not isinstance(each, Elsewhere) for each in own.decoder.layers) == layers[stage]
                call = model if stage == own.last else own.decoder
                given = call(**hidden, position_ids=places, use_cache=False)
            hidden = {"inputs_embeds": getattr(given, "last_hidden_state", None)}
        assert torch.equal(given.logits, whole)
        assert torch.equal(model(input_ids=ids, position_ids=places, use_cache=False).logits, whole)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("granite", "a granite changes hidden states outside of its layers"),
        ("gpt2", "beside embeddings and layers a gpt2 has wpe, ln_f, where one norm is expected"),
    ],
)
def test_models_that_do_more_than_their_layers_are_refused(kind: str, told: str) -> None:
    """Granite multiplies embeddings in its forward pass, and GPT-2 adds those of positions: every stage would."""
    changes = {"embedding_multiplier": 12.0} if kind == "granite" else {"n_layer": 4, "n_embd": 64, "n_head": 4}
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes))
    with pytest.raises(UserError) as refused:
        Chain(model, Split((2, 2), 1))
    assert told in refused.value.what and refused.value.change == "remove parallel.pipeline"


def test_a_frozen_model_has_nothing_to_train() -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama")).requires_grad_(False)
    with pytest.raises(UserError, match="nothing that process 0 of a pipeline has is trained"):
        Chain(model, Split((2, 2), 1))


def test_stages_go_around_or_return() -> None:
    around, back = Split((1,) * 6, 3), Split((1,) * 6, 3, returns=True)
    assert [around.place(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [back.place(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert (around.stages(1), back.stages(1), back.stages(0)) == ([1, 4], [1, 4], [0, 5])
    assert Split((3, 2, 4), 3).between(2) == (5, 9)


def test_a_model_with_code_of_its_own_is_divided(tmp_path: Path) -> None:
    """Without being asked on the terminal whether that code may run, which the recipe has said."""
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM):\n    pass\n"
    )
    config_of("llama", auto_map={"AutoModelForCausalLM": "own.Own"}).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert "model.layers.3" in elsewhere("sft", config, Split((2, 2), 2), 0, True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_process_does_not_keep_what_others_have(tied: bool) -> None:
    config = config_of("llama", tie_word_embeddings=tied)
    away = [elsewhere("sft", config, Split((1, 2, 1), 3), place, False) for place in range(3)]
    layers = [[name for name in each if ".layers." in name] for each in away]
    assert layers == [
        [f"model.layers.{number}" for number in (1, 2, 3)],
        [f"model.layers.{number}" for number in (0, 3)],
        [f"model.layers.{number}" for number in (0, 1, 2)],
    ]
    others = [{name for name in each if ".layers." not in name} for each in away]
    # The last one has a tied head as the embeddings.
    first, between = {"model.norm"} | ({"lm_head"} if not tied else set()), {"model.norm", "lm_head"}
    assert others == [first, between | {"model.embed_tokens"}, set() if tied else {"model.embed_tokens"}]
