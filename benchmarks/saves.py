"""For how long training waits for a checkpoint, how long that is made to count behind the steps, and what these lose.

`python benchmarks/saves.py`: a few minutes on any machine that is idle, on processes of its CPU, without a network. Of
each run every second checkpoint is flushed, hashed and renamed before training goes on: that is a plain save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

import material  # noqa: E402

ENGINES = {"single": 1, "ddp": 2, "zero2": 2, "zero3": 2, "fsdp": 2}
WIDTHS = (64, 512)
"""Of the model's layers: checkpoints of some megabytes, and of some hundred."""
EVERY, SAVES = 8, 8
RECIPE = """\
model: {{path: {model}}}
data: {{sources: [{data}], packing: true, over_long: split}}
objective: language_modelling
precision: fp32
batch: {{seq_len: 32, global_batch_size: 2}}
schedule: {{max_steps: {steps}}}
evaluation: {{num_prompts: 0}}
checkpoint: {{save_steps: {every}, save_total_limit: 2, resume: never, rehearse: false}}
"""
FIGURES = ("size", "planned", "waits", "behind", "steps lose", "plain save")


def train(engine: str, file: Path) -> int:
    """One process of a training, of which the first writes the figures to a file: seconds, and megabytes."""
    import cpu_engines
    from transformers import TrainerCallback

    from toolkit.train import setup
    from toolkit.train.checkpoints import staging

    behind: list[tuple[float, float]] = []
    steps: list[tuple[float, float]] = []
    saves: list[float] = []

    def in_background(call: Callable[[], None]) -> Future[None]:
        def timed() -> None:
            begun = time.monotonic()
            call()
            behind.append((begun, time.monotonic()))

        if len(saves) % 2 == 0:
            return background(timed)
        done: Future[None] = Future()
        done.set_result(call())
        return done

    background, staging.in_background = staging.in_background, in_background

    class Watch(TrainerCallback):
        def __init__(self, session: Any) -> None:
            self.session, self.since = session, time.monotonic()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            now = time.monotonic()
            steps.append((self.since, now))
            self.since = now

        def on_save(self, *args: Any, **kwargs: Any) -> None:
            now = time.monotonic()
            saves.append(now - self.since)
            self.since = now

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            session = self.session
            if session.leads:
                session.trainer.saves.settled()
                places = [each for each in session.folder.checkpoints.rglob("*") if each.is_file()]
                newest = max(session.folder.checkpoints.iterdir(), key=lambda place: int(place.name.split("-")[1]))
                size = sum(each.stat().st_size for each in places if newest in each.parents)
                file.write_text(json.dumps(figures(size, session.guard.plan.work.save_seconds)), encoding="utf-8")

    def figures(size: int, planned: float) -> dict[str, float]:
        beside = [any(begun < till and at < end for at, till in behind) for begun, end in steps]
        taken = [end - begun for begun, end in steps]
        alone = statistics.median(each for each, busy in zip(taken[EVERY:], beside[EVERY:], strict=True) if not busy)
        # The first save of each kind meets cold caches.
        later = behind[1:]
        lost = sum(end - begun - alone for begun, end in steps if any(begun < till and at < end for at, till in later))
        values = (
            *(size / 1e6, planned, statistics.median(saves[2::2])),
            *(
                statistics.median(end - begun for begun, end in later),
                lost / len(later),
                statistics.median(saves[3::2]),
            ),
        )
        return dict(zip(FIGURES, values, strict=True))

    class Callbacks(setup.Callbacks):
        def __init__(self, session: Any) -> None:
            super().__init__(session)
            session.trainer.add_callback(Watch(session))

    from toolkit.train import train as whole

    whole.Callbacks = Callbacks  # type: ignore[misc]
    settings = ["recipe=saves", f"strategy={engine}", f"output.name={engine}"]
    return cpu_engines.main(settings) if engine != "single" else cpu_engines.main(settings[:1])


def measure(engine: str, folder: Path) -> dict[str, float]:
    """Trains with the recipe of a folder on as many processes as the engine takes."""
    file = folder / f"{engine}.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ENGINES[engine])]
    launch = launch if ENGINES[engine] > 1 else [sys.executable]
    command = [*launch, str(Path(__file__).resolve()), "--one", engine, str(file)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text(encoding="utf-8"))


def main(engines: list[str], widths: list[int]) -> None:
    """Prints a row for each engine and size."""
    print("| engine | " + " | ".join(FIGURES) + " |\n" + "| --- " * (len(FIGURES) + 1) + "|")
    for width in widths:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "head_dim": width // 4}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "vocab_size": 4096}
            material.SHAPES["saved"] = (material.LLAMA_1B, sizes | heads)
            model = material.model("saved", folder)
            data = material.documents(400 * EVERY * SAVES, folder / "documents.jsonl")
            (folder / "recipes").mkdir()
            text = RECIPE.format(model=model, data=data, steps=EVERY * SAVES, every=EVERY)
            (folder / "recipes" / "saves.yaml").write_text(text, encoding="utf-8")
            for engine in engines:
                size, *seconds = measure(engine, folder).values()
                cells = " | ".join(f"{each:.3f} s" for each in seconds)
                print(f"| {engine} | {size:.0f} MB | {cells} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "FILE"), help="one process of a training")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.one:
        sys.exit(train(options.one[0], Path(options.one[1])))
    main(options.engines, options.widths)
