"""Experts that two processes divide: what they hold and send, planned and in real trainings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from harness import metrics, write_jsonl, write_recipe
from tiny import text_rows, tiny_tokenizer
from tracker import measured, planned

from toolkit.distributed.layout import batch_layout
from toolkit.planner.hardware import find
from toolkit.planner.kernels import backend
from toolkit.planner.speed.communication import travels
from toolkit.planner.trace.setting import setting_of
from toolkit.planner.trace.store import obtain
from toolkit.planner.workload import Workload
from toolkit.recipe import model_configs, split_arguments
from toolkit.recipe.model_configs import meeting_share
from toolkit.recipe.rules import load_checked

_RECIPE = """
description: Few tokens and wide experts
model: {path: all}
data: {sources: [text.jsonl], over_long: truncate}
objective: language_modelling
schedule: {max_steps: 3}
batch: {seq_len: 64, micro_batch_size: 1, global_batch_size: 2}
precision: fp32
strategy: {name: ddp}
parallel: {expert: 2}
evaluation: {num_prompts: 0}
checkpoint: {resume: never}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of `all` each token meets every expert, so that all are sent; of `some` two of eight."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    for name, experts, chosen in (("all", 4, 4), ("some", 8, 2)):
        config = Qwen3MoeConfig(
            hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, num_experts=experts,
            num_experts_per_tok=chosen, moe_intermediate_size=256, norm_topk_prob=True, max_position_embeddings=256,
        )  # fmt: skip
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    # Longer than a row, so that each process has as many tokens in each micro-batch.
    rows = [{"text": row["text"] * 20} for row in text_rows(40)]
    write_jsonl(folder / "text.jsonl", rows)
    write_recipe(folder, "wide", _RECIPE)
    return folder


def test_tokens_that_meet_no_expert_of_a_process_are_not_sent_there():
    """By counting all choices of two of four experts, of which each of two processes has two."""
    choices = list(itertools.combinations(range(4), 2))
    assert meeting_share(4, 2, 2) == pytest.approx(sum(min(each) < 2 for each in choices) / len(choices))
    assert meeting_share(128, 8, 1) == 1 == meeting_share(4, 4, 2)
    assert meeting_share(128, 1, 8) == pytest.approx(1 / 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "further"),
    [
        ("all", "full", []),
        pytest.param("some", "full", [], marks=pytest.mark.matrix),
        pytest.param("some", "lora", [], marks=pytest.mark.matrix),
        pytest.param("all", "lora", ["activation_checkpointing.mode=full"], marks=pytest.mark.matrix),
        pytest.param("some", "full", ["activation_checkpointing.mode=full"], marks=pytest.mark.matrix),
    ],
)
def test_peaks_and_what_is_sent_are_as_planned(model, method, further, folder, ranks, monkeypatch):
    """Memory within 3%, and the bytes that are sent to the byte where each token meets all experts; where it meets
    some, chance spreads tokens unevenly, and both are near."""
    monkeypatch.chdir(folder)
    arguments = ["recipe=wide", f"model.path={model}", f"method.name={method}", *further]
    name = f"{model}-{method}-{len(further)}"
    done = ranks.run(folder, *arguments, f"output.name={name}", processes=2, entry="tracker")
    assert done.returncode == 0, done.stderr[-2000:]
    plan, real = planned(*arguments, processes=2).phases, measured(Path(folder), 2)
    for phase in ("forward", "backward", "step"):
        assert sum(plan[phase].values()) == pytest.approx(real[phase], rel=0.03), phase
    assert [step["tokens"] for step in metrics(folder / "runs" / name) if "tokens" in step] == [128, 256, 384]
    sent = _sent(arguments, [64, 64, 64])
    for phase in ("forward", "backward"):
        assert real[f"exchanged {phase}"] == pytest.approx(sent[phase], rel=0 if model == "all" else 0.1), phase


def _sent(arguments, batches):
    """Bytes that a process is planned to send over micro-batches of so many tokens, by pass."""
    recipe = load_checked(*split_arguments(list(arguments))).recipe
    config, hardware = model_configs.config_of(recipe.model), find("cpux2")
    layout = batch_layout(recipe, 2)
    setting = setting_of(recipe, config, "cpu", backend(recipe, hardware, config, None)[0], layout)
    workload = Workload(recipe, layout, hardware, obtain(setting, "in_process"))
    sent = [(each.during, sum(each.sent.values())) for tokens in batches for each in travels(workload, tokens)]
    return {phase: sum(size for during, size in sent if during == phase) for phase in ("forward", "backward")}
