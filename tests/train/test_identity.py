"""Which settings make a run another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import write_recipe

from toolkit.recipe import Loaded, load
from toolkit.train.identity import recipe_hash


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recipe(tmp_path, "small", "model: {path: nowhere}\ndata: {sources: [a.jsonl]}\n")
    monkeypatch.chdir(tmp_path)


def small(*overrides: str) -> Loaded:
    return load("small", list(overrides))


def test_identity_is_what_moves_the_weights() -> None:
    same = ["logging.every_steps=5", "output.dir=elsewhere", "evaluation.num_prompts=0", "checkpoint.save_steps=3"]
    same += ["batch.micro_batch_size=2", "activation_checkpointing.mode=full"]
    assert recipe_hash(small(*same).recipe) == recipe_hash(small().recipe)
    same = ["extra.deepspeed.dump_state=true", "extra.training_arguments.ddp_timeout=60"]
    assert recipe_hash(small(*same).recipe) == recipe_hash(small().recipe)
    noise = ["extra.training_arguments.neftune_noise_alpha=5"]
    assert recipe_hash(small(*same, *noise).recipe) == recipe_hash(small(*noise).recipe)
    for other in ("extra.lora.bias=all", "extra.training_arguments.neftune_noise_alpha=5"):
        assert recipe_hash(small(other).recipe) != recipe_hash(small().recipe)
    for other in ("seed=1", "batch.seq_len=100", "data.sources=[b.jsonl]", "optimizer.beta2=0.95", "precision=fp32"):
        assert recipe_hash(small(other).recipe) != recipe_hash(small().recipe)
