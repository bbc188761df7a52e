"""What planning a model that was never traced costs: processor seconds of a plan without advice and its first trace.

`python benchmarks/first_trace.py`: two minutes on any machine, without a network. The models take longest for their
size: 7 billion parameters, 70 billion quantized, and mt0-xxl, which has an encoder, a vocabulary of 250,000 and
relative positions.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOAL = 15.0
"""Seconds of one processor."""
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
CONFIGS = {
    "7B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 32000, "max_position_embeddings": 4096},
    "70B": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
    "mt0-xxl": {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "d_model": 4096, "d_ff": 10240}
    | {"d_kv": 64, "num_heads": 64, "num_layers": 24, "num_decoder_layers": 24, "vocab_size": 250112}
    | {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32, "tie_word_embeddings": False}
    | {"is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
SETTINGS = {"70B": ["method=qlora"], "mt0-xxl": ["objective=seq2seq"]}
PLAN = """\
import sys
from toolkit.planner.build import estimate
from toolkit.planner.hardware import find
from toolkit.planner.trace import store
from toolkit.recipe import load

loaded = load("recipe", sys.argv[1:])
print(estimate(loaded.recipe, loaded.name, find("h100"), advice=False).origin)
tracer = store._tracer()
tracer.stdin.close()
tracer.wait()  # What it took counts once it has ended.
"""
RECIPE = """\
description: Planned with an empty cache
model: {path: model}
data: {sources: [rows.jsonl]}
method: lora
batch: {seq_len: 512, global_batch_size: 8, micro_batch_size: 2}
"""


def measure(name: str, config: dict[str, object]) -> float:
    """Processor seconds of one plan with an empty cache, and of the process that traces."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(config))
        (work / "recipes").mkdir()
        (work / "recipes" / "recipe.yaml").write_text(RECIPE)
        (work / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TOOLKIT_CACHE": str(work / "cache")}
        command = [sys.executable, "-c", PLAN, *SETTINGS.get(name, [])]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.stdout.split() != ["traced"]:
        sys.exit(f"{name}: {done.stderr or done.stdout}"[-2000:])
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Prints the seconds of each model. Returns 1 if one of them misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (3)")
    options = parser.parse_args()
    medians = []
    for name, config in CONFIGS.items():
        seconds = [measure(name, config) for _ in range(options.repeat)]
        medians.append(statistics.median(seconds))
        print(f"{name:8} {medians[-1]:5.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), goal {GOAL:.0f}")
    return 0 if max(medians) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
