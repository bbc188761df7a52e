"""Shipped recipes that divide more than rows, on four processes and tiny models of their architectures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import metrics, write_jsonl, write_recipe
from ranks import ON_CPU, Ranks
from tiny import chat_rows, text_rows, tiny_model, write_splits

from toolkit.recipe import load
from toolkit.recipe.rules import load_checked

RECIPES = {
    "llama_3_1_8b_128k_lora": ["parallel.sequence=4", "batch.seq_len=512"],
    "llama_3_1_70b_full_tp_fsdp": ["parallel.tensor=2", "batch.seq_len=128"],
    "llama_3_1_70b_pipeline": ["batch.seq_len=128", "batch.global_batch_size=8"],
}
"""Recipe to what makes it one for four processes."""


def test_no_recipe_escapes_this_test() -> None:
    from toolkit.recipe import list_recipes, shipped_recipes

    folder = shipped_recipes()
    divided = {name for name in list_recipes([folder]) if load(name, (), folder).recipe.parallel.changed()}
    # test_expert_parallel.py trains that one.
    assert divided == RECIPES.keys() | {"qwen3_30b_a3b_full_expert"}


# Another division by layers and FSDP is among the cells of test_tensor_parallel.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.matrix] if name.endswith("tp_fsdp") else []) for name in RECIPES],
)
def test_a_recipe_trains_on_four_processes(name: str, tmp_path: Path, ranks: Ranks) -> None:
    recipe = load_checked(name).recipe
    model = tiny_model(recipe.model.path, tmp_path / "model", kv_heads=2, layers=4)
    data = write_splits(tmp_path / "data", chat_rows(120))
    overrides = [f"model.path={model}", f"data.sources=[{data}]", "data.eval_split=0.1", "schedule.max_steps=3"]
    overrides += ["batch.global_batch_size=2", "optimizer.learning_rate=3e-3", "schedule.warmup_ratio=0"]
    overrides += ["evaluation.max_new_tokens=4", "logging.every_steps=1", "output.name=run", "checkpoint.save_steps=2"]
    done = ranks.run(tmp_path, f"recipe={name}", *overrides, *RECIPES[name], processes=4, entry=ON_CPU)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    losses = [row["loss"] for row in metrics(run) if "loss" in row]
    # A random model of 512 tokens starts near ln 512 = 6.2.
    assert len(losses) == 3 and 5 < losses[0] < 8 and losses[-1] < losses[0]
    parallel = load_checked(name, RECIPES[name]).recipe.parallel
    asked = {key: getattr(parallel, key) for key in parallel.changed()}
    effective = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["effective"]
    assert {key: effective[key] for key in asked} == asked
    saved = "adapter_model.safetensors" if recipe.method.name == "lora" else "model.safetensors"
    assert (run / "final" / saved).is_file()
    report = (run / "report.html").read_text(encoding="utf-8")
    ways = {"sequence": "share them", "tensor": "divide the layers", "pipeline": "follow each other"}
    assert all(f"processes that {ways[key]}" in report for key in asked)
    assert ("its bubble is" in report) == (parallel.pipeline > 1)


@pytest.mark.matrix
def test_a_division_that_auto_chose_is_trained(tmp_path: Path, ranks: Ranks) -> None:
    """Two processes whose host has no room for two rows, by a limit as Slurm's, share each."""
    llama = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 65536,
    }  # fmt: skip
    model = tiny_model(llama, tmp_path / "model", kv_heads=2, layers=4)
    write_jsonl(tmp_path / "text.jsonl", text_rows(2000))
    write_recipe(
        tmp_path,
        "long",
        f"model: {{path: {model}}}\nobjective: language_modelling\n"
        "data: {sources: [text.jsonl], packing: true, over_long: split}\n"
        "strategy: auto\nactivation_checkpointing: auto\nprecision: fp32\nschedule: {max_steps: 1}\n"
        "batch: {seq_len: 65536, global_batch_size: 2}\n"
        "evaluation: {num_prompts: 0}\ncheckpoint: {resume: never}\n",
    )
    limit = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "2700"}
    done = ranks.run(tmp_path, "recipe=long", "output.name=run", processes=2, entry=ON_CPU, timeout=300, **limit)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    manifest = json.loads((tmp_path / "runs" / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["effective"]["sequence"] == 2
    assert "dividing nothing" in manifest["plan"]["chosen"]["parallel.sequence"]
