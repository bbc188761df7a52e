"""What a step costs outside the model: a tiny Llama of 1,000 modules through the normal command, in processor time.

`python benchmarks/overhead.py`: a minute on any machine, without a network. The model's passes, what it takes to free
their graph, clipping and the optimizer, which every loop has, are timed by themselves; what a step takes beside them is
the loop's own. Wall time would also count other processes of the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import material  # noqa: E402

WARM_UP = 5
"""Steps that are not counted."""
MODULES_OF_A_LAYER = 13
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
RECIPE = """\
model: {{path: {model}}}
data: {{sources: [{data}], packing: true, over_long: split}}
objective: language_modelling
precision: fp32
batch: {{seq_len: 32, global_batch_size: {batches}, micro_batch_size: 1}}
schedule: {{max_steps: {steps}}}
evaluation: {{num_prompts: 0}}
"""


def measure(modules: int, batches: int, steps: int, settings: list[str]) -> dict[str, float]:
    """Milliseconds of processor time of a median step, by part.

    Args:
        modules: Of the model.
        batches: Micro-batches of a step.
        settings: Of the recipe, as on the command line.
    """
    import torch
    from transformers import TrainerCallback

    from toolkit.train import setup
    from toolkit.train.main import main
    from toolkit.train.trainers.trainer import CausalTrainer

    spent: Counter[str] = Counter()
    rows: list[dict[str, float]] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.process_time() - begun

        return run

    # A graph is freed with the last tensor that refers to it.
    graphs: list[Any] = []

    def score(*args: Any) -> Any:
        graphs.append(scored(*args))
        return graphs[-1]

    scored, free = timed("forward", CausalTrainer.score), timed("graph", graphs.clear)

    class Steps(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begun = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            free()
            now = time.process_time()
            rows.append({**spent, "step": now - self.begun})
            self.begun = now
            spent.clear()

    class Callbacks(setup.Callbacks):
        def __init__(self, session: Any) -> None:
            super().__init__(session)
            session.trainer.add_callback(Steps())
            session.trainer.optimizer_cls_and_kwargs[0].step = timed(
                "optimizer", session.trainer.optimizer_cls_and_kwargs[0].step
            )

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        material.SHAPES["deep"] = (
            material.LLAMA_1B,
            {**SIZES, "vocab_size": 4096, "num_hidden_layers": modules // MODULES_OF_A_LAYER},
        )
        model = material.model("deep", folder)
        data = material.documents(100 * batches * steps, folder / "documents.jsonl")
        (folder / "recipes").mkdir()
        recipe = folder / "recipes" / "overhead.yaml"
        recipe.write_text(RECIPE.format(model=model, data=data, batches=batches, steps=steps), encoding="utf-8")
        os.chdir(folder)
        with (
            patch.object(CausalTrainer, "score", score),
            patch.object(CausalTrainer, "_clip_grad_norm", timed("clipping", CausalTrainer._clip_grad_norm)),
            patch.object(torch.Tensor, "backward", timed("backward", torch.Tensor.backward)),
            patch("toolkit.train.train.Callbacks", Callbacks),
        ):
            assert main(["recipe=overhead", *settings]) == 0
    parts = {key: 1000 * statistics.median(row.get(key, 0.0) for row in rows[WARM_UP:]) for key in rows[-1]}
    parts["outside"] = 1000 * statistics.median(2 * row["step"] - sum(row.values()) for row in rows[WARM_UP:])
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("settings", nargs="*", help="of the recipe, as on the command line")
    options = parser.parse_args()
    found = measure(options.modules, options.batches, options.steps, options.settings)
    print("\n".join(f"{key:<12} {value:8.2f} ms" for key, value in found.items()))
