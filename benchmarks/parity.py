"""Losses on a GPU against those on the CPU of the same machine: tiny models of every architecture of the recipes, every
strategy that one device can run, every attention backend, precision and method, through the normal command.

`python benchmarks/parity.py` on a CUDA machine: some minutes with 16 cores. Needs no network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from tiny import models_and_rows  # noqa: E402

from toolkit.planner.hardware import this_machine  # noqa: E402

MODELS = {
    "llama": "meta-llama/Llama-3.2-1B",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "gemma2": "google/gemma-2-2b-it",
    "gemma3": "google/gemma-3-1b-it",
    "gpt2": "openai-community/gpt2-xl",
    "blenderbot": "facebook/blenderbot-400M-distill",
}
LIMITS = {"fp32": 1e-6, "tf32": 1e-4, "fp16": 1e-3, "bf16": 1e-3}
"""Largest relative difference of a loss; 16 bits round each activation by up to 2**-9."""
_RECIPE = """\
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
tf32: false
optimizer: {learning_rate: 1.0e-3, weight_decay: 0.1, beta2: 0.95, eps: 1.0e-5, max_grad_norm: 0.5}
schedule: {name: linear, max_steps: 8, warmup_ratio: 0.2}
batch: {seq_len: 128, global_batch_size: 4}
evaluation: {num_prompts: 2, max_new_tokens: 8, batch_size: 2}
checkpoint: {resume: never}
"""
_PACKED, _BF16, _LORA = ("data.packing=true",), ("precision=bf16",), ("method=lora", "method.r=8")
_STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp", "zero2_offload", "zero3_offload", "fsdp_offload")


@dataclass(frozen=True)
class Case:
    """A training on the GPU, and one on the CPU in fp32 that it must equal.

    Args:
        name: For the table.
        kind: The entry of `LIMITS`.
        reference: Settings of the training on the CPU, as on the command line.
        settings: What the one on the GPU has beside them.
    """

    name: str
    kind: str
    reference: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def cases() -> list[Case]:
    """All of them."""
    found = []
    for model in MODELS:
        own = (f"model.path={model}",)
        if model == "blenderbot":
            own += ("objective=seq2seq", "data.sources=[pairs.jsonl]")
        found += [Case(f"{model}, fp32", "fp32", own), Case(f"{model}, bf16", "bf16", own, _BF16)]
    for strategy in _STRATEGIES:
        spread = (f"strategy={strategy}", "batch.micro_batch_size=2")
        found += [Case(f"{strategy}, fp32", "fp32", (), spread), Case(f"{strategy}, bf16", "bf16", (), spread + _BF16)]
    for backend in ("eager", "sdpa", "flex", "torch_varlen"):
        asked = (*_BF16, f"model.attention={backend}")
        found.append(Case(f"{backend}, packed", "bf16", _PACKED, asked))
    for mode in ("full", "selective", "offload"):
        found.append(Case(f"checkpointing {mode}", "bf16", (), (*_BF16, f"activation_checkpointing={mode}")))
    found += [
        Case("gemma2, packed", "bf16", ("model.path=gemma2", *_PACKED), _BF16),
        Case("flex, padded", "bf16", (), (*_BF16, "model.attention=flex")),
        Case("pure bf16", "bf16", (), ("precision=pure_bf16",)),
        Case("fp16 with loss scaling", "fp16", (), ("precision=fp16",)),
        Case("tf32", "tf32", (), ("tf32=true",)),
        Case("8-bit AdamW", "bf16", (), (*_BF16, "optimizer.name=adamw_8bit")),
        Case("paged 8-bit AdamW", "bf16", (), (*_BF16, "optimizer.name=paged_adamw_8bit")),
        Case("LoRA", "bf16", _LORA, _BF16),
        Case("LoRA, packed, ZeRO-3", "bf16", (*_LORA, *_PACKED), (*_BF16, "strategy=zero3")),
        Case("LoRA, packed, FSDP2", "bf16", (*_LORA, *_PACKED), (*_BF16, "strategy=fsdp")),
        Case("DoRA", "bf16", ("method=dora", "method.r=8"), _BF16),
    ]
    return found


class Bench:
    """Runs trainings in a folder of its own, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        models_and_rows(folder, MODELS)
        (folder / "recipes").mkdir()
        (folder / "recipes" / "parity.yaml").write_text(_RECIPE, encoding="utf-8")

    def train(self, settings: tuple[str, ...], name: str, on_cpu: bool) -> list[float] | str:
        """Losses of the steps and held-out losses, or what it ended with."""
        command = [sys.executable, str(ROOT / "toolkit" / "run.py"), "recipe=parity", f"output.name={name}", *settings]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "COLUMNS": "120"}
        if on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
            return (said or [f"exit code {done.returncode}"])[-1].strip()
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [row[key] for row in rows for key in ("loss", "eval_loss") if key in row]


def difference(found: list[float] | str, wanted: list[float] | str) -> float | str:
    """The largest, relative; or why there is none."""
    if isinstance(found, str) or isinstance(wanted, str):
        return found if isinstance(found, str) else f"on the CPU: {wanted}"
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def _met(case: Case, found: float | str) -> bool:
    return not isinstance(found, str) and found <= LIMITS[case.kind]


def _row(case: Case, found: float | str) -> str:
    shown = found if isinstance(found, str) else f"{found:.1e}"
    return f"| {case.name} | {LIMITS[case.kind]:.0e} | {shown} | {'' if _met(case, found) else 'missed'} |"


def main() -> int:
    """Runs all, prints and keeps a table. Returns 1 if a training failed or differs by more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4), metavar="N", help="at once")
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR", help="where the dated file goes")
    options = parser.parse_args()
    import torch

    device, texts = this_machine().device, [text.lower() for text in options.only]
    wanted = [case for case in cases() if any(text in case.name.lower() for text in texts)]
    file = Path(options.results) / f"parity-{datetime.date.today().isoformat()}-{device.name}"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: list[tuple[Case, float | str]] = []
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        bench = Bench(Path(temporary))
        references = sorted({case.reference for case in wanted})
        alone = {each: pool.submit(bench.train, each, f"cpu{n}", True) for n, each in enumerate(references)}
        runs = [
            pool.submit(bench.train, case.reference + case.settings, f"case{n}", False) for n, case in enumerate(wanted)
        ]
        for case, run in zip(wanted, runs, strict=True):
            found.append((case, difference(run.result(), alone[case.reference].result())))
            print(_row(*found[-1]), flush=True)
            lines = [f"# Losses on {device.title} against a CPU's in fp32", ""]
            lines += [
                f"torch {torch.__version__}; largest relative difference of 8 training and 2 held-out losses.",
                "",
            ]
            lines += [
                "| training | limit | difference | |",
                "| --- | ---: | ---: | --- |",
                *(_row(*each) for each in found),
            ]
            file.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
            kept = [asdict(case) | {"difference": each} for case, each in found]
            file.with_suffix(".json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return 0 if all(_met(*each) for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
