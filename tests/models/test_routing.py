"""How often experts are chosen: by counting by hand, with adapters, checkpointing and evaluations between."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from toolkit.models.parallel import pipeline
from toolkit.models.routing import Load, Routing


def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_each_choice_of_training_is_counted_once(adapted: bool, recomputed: bool) -> None:
    model: torch.nn.Module = mixture()
    chosen: list[Counter[int]] = [Counter(), Counter()]
    counting = True
    for layer, counts in zip(model.model.layers, chosen, strict=True):

        def note(
            module: object, args: object, outputs: tuple[torch.Tensor, ...], counts: Counter[int] = counts
        ) -> None:
            if counting and torch._C._current_graph_task_id() == -1:
                counts.update(outputs[2].flatten().tolist())

        layer.mlp.gate.register_forward_hook(note)
    if recomputed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if adapted:
        from peft import LoraConfig, get_peft_model

        parameters = ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters))
    routing = Routing(model)
    assert routing
    routing.begin(torch.device("cpu"))
    for _ in range(2):
        model(torch.randint(0, 64, (2, 9))).logits.sum().backward()
    counting = False
    with torch.no_grad():
        model.eval()(torch.randint(0, 64, (2, 9)))
    assert sum(chosen[0].values()) == 2 * 2 * 9 * 2
    by_hand = [max(counts.values()) / (sum(counts.values()) / 8) for counts in chosen]
    load = routing.take()
    assert load is not None
    assert (load.most, load.worst) == (pytest.approx(sum(by_hand) / 2), pytest.approx(max(by_hand)))
    assert load.idle == sum(8 - len(counts) for counts in chosen) / 16
    assert load.process is None
    assert routing.take() is None, "what was told is told no more"


def test_the_load_of_processes_is_that_of_all_their_experts() -> None:
    load = Load.of([[4, 0, 0, 0], [1, 1, 1, 1]], parts=2)
    assert load == Load(most=(4 + 1) / 2, worst=4, idle=3 / 8, process=(2 + 1) / 2)


def test_a_model_without_experts_has_none_to_count() -> None:
    assert not Routing(torch.nn.Linear(2, 2))


def count_in_stage(rank: int, layers: tuple[int, int], store: str, answers: Any) -> None:
    """What a process of a pipeline of two counts, which has so many layers of a mixture."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pipeline.chain_processes(2)
    model = mixture()
    model.model.layers = model.model.layers[: layers[rank]]
    routing = Routing(model)
    routing.begin(torch.device("cpu"))
    asked = bool(routing)
    for layer in model.model.layers:
        chosen = torch.full((6, 2), rank) + torch.arange(2)
        for hook in layer.mlp.experts._forward_pre_hooks.values():
            hook(layer.mlp.experts, (None, chosen))
    answers.put((asked, routing.take()))
    dist.destroy_process_group()


@pytest.mark.parametrize("layers", [(0, 2), (1, 2)])
def test_processes_of_a_pipeline_count_their_own_layers(layers: tuple[int, int], tmp_path: Path) -> None:
    """Of which some have no experts, and all are one model's."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    started = [
        context.Process(target=count_in_stage, args=(rank, layers, str(tmp_path / "store"), answers), daemon=True)
        for rank in range(2)
    ]
    for each in started:
        each.start()
    found = [answers.get(timeout=60) for _ in started]
    # In each layer two of eight experts meet six tokens each.
    assert found == [(True, Load(most=4, worst=4, idle=0.75, process=None))] * 2
