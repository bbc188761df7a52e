"""Tokens per second beside the libraries alone: the same jobs, interleaved, each in a process of its own.

On a CUDA machine or a CPU: `python benchmarks/throughput.py`. Needs no network.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import material  # noqa: E402
import yaml  # noqa: E402

from toolkit.data.reading import builtin  # noqa: E402
from toolkit.planner.hardware import once_measured, this_machine  # noqa: E402

GIB = 2**30
PEERS = ("trl", "trainer", "llamafactory")
WARM_UP = 4
"""Steps that are not counted: the first ones compile, choose kernels and fill caches."""


@dataclass(frozen=True)
class Job:
    """What everybody trains.

    Args:
        name: For the table.
        model: One of `material.SHAPES`, or `smollm2`.
        method: full, lora or qlora.
        seq_len: Tokens of a row at most.
        rows: Rows per step.
        micro: Rows per pass for the peers; the toolkit decides by its plan.
        packing: Whether documents fill rows; else rows are padded.
        checkpointing: Whether the peers recompute activations; the toolkit decides by its plan.
        precision: As in a recipe; `auto` is what the device computes fastest, for the peers too.
        settings: What the toolkit's recipe has beside, as on the command line.
        objective: As in a recipe.
    """

    name: str
    model: str
    method: str
    seq_len: int
    rows: int
    micro: int
    packing: bool = True
    checkpointing: bool = False
    precision: str = "bf16"
    settings: tuple[str, ...] = ()
    objective: str = "language_modelling"


FULL, LESS = "activation_checkpointing=full", "activation_checkpointing=elementwise"
FP8, EIGHT_BIT = "method.quantization=fp8", "optimizer=adamw_8bit"
PURE_FP8 = ("precision=pure_fp8", "compile=layers")
REWARDED = (
    *("rollout.num_generations=8", "rollout.max_completion_tokens=64"),
    *("rewards.length.max_tokens=16", "rewards.length.soft=48"),
)
CUDA_JOBS = (
    Job("1.2B full, checkpointing", "llama_1b", "full", 4096, 4, 4, True, True, "pure_bf16", (FULL,)),
    Job("1.2B full", "llama_1b", "full", 4096, 4, 4, precision="pure_bf16"),
    # The libraries alone multiply in bf16.
    Job("1.2B full, products in fp8", "llama_1b", "full", 4096, 4, 4, settings=("precision=fp8", "compile=layers")),
    Job("1.2B full, pure bf16 and fp8", "llama_1b", "full", 4096, 4, 4, precision="pure_bf16", settings=PURE_FP8),
    Job("1.2B LoRA", "llama_1b", "lora", 4096, 4, 4),
    # Beside these the libraries alone keep the base in bf16.
    Job("1.2B LoRA, base in fp8", "llama_1b", "lora", 4096, 4, 4, settings=(FP8, "compile=layers")),
    Job("1.2B LoRA, checkpointing", "llama_1b", "lora", 4096, 4, 4, True, True, settings=(FULL,)),
    Job("8B LoRA", "llama_8b", "lora", 4096, 2, 2),
    Job("8B LoRA, checkpointing", "llama_8b", "lora", 4096, 4, 4, True, True, settings=(FULL,)),
    Job("8B QLoRA", "llama_8b", "qlora", 4096, 2, 2),
    Job("8B LoRA, base in fp8", "llama_8b", "lora", 4096, 2, 2, settings=(FP8, "compile=layers")),
    Job("8B LoRA, base in fp8, less kept", "llama_8b", "lora", 4096, 2, 2, settings=(FP8, LESS)),
    Job("8B LoRA, base in fp8, checkpointing", "llama_8b", "lora", 4096, 4, 4, True, True, settings=(FP8, FULL)),
    # The libraries alone keep AdamW's moments in bf16, four times as many bytes.
    Job("8B full, 8-bit AdamW", "llama_8b", "full", 4096, 2, 2, precision="pure_bf16", settings=(EIGHT_BIT,)),
)
CPU_JOBS = (
    Job("chat LoRA, padded", "smollm2", "lora", 512, 8, 2, False, precision="auto", objective="sft"),
    Job("full, packed 512", "smollm2", "full", 512, 4, 2, precision="auto"),
    Job("LoRA, packed 2048", "smollm2", "lora", 2048, 1, 1, precision="auto"),
    Job("encoder-decoder, padded", "blenderbot_tiny", "full", 256, 16, 8, False, precision="auto", objective="seq2seq"),
    Job("DPO, LoRA", "smollm2", "lora", 256, 8, 4, False, precision="auto", objective="dpo"),
    Job("reward, LoRA", "smollm2", "lora", 256, 8, 4, False, precision="auto", objective="reward"),
    Job("classification, LoRA", "smollm2", "lora", 256, 16, 8, False, precision="auto", objective="classification"),
    Job("GRPO, LoRA", "smollm2", "lora", 256, 4, 1, False, precision="auto", settings=REWARDED, objective="grpo"),
    Job("tiny full, packed 128", "llama_tiny", "full", 128, 4, 4, precision="auto"),
)

DOCSTRINGS = {
    "sft": builtin.docstring_rows,
    "dpo": builtin.docstring_pairs,
    "reward": builtin.docstring_pairs,
    "grpo": lambda: [{"prompt": row["messages"][:1]} for row in builtin.docstring_rows()],
    "classification": builtin.docstring_kinds,
}
"""Objective to rows of Python's own documentation."""


@dataclass
class Result:
    """What one contestant did in one job, a figure per repetition.

    Args:
        rates: Tokens per second after the warm-up.
        start_up: Seconds from the command to the end of the first step.
        planned: Tokens per second that the toolkit's plan expected.
        memory: Largest bytes on the device, or of the process on a CPU.
        planned_memory: The same as the toolkit's plan expected it; 0 where there is none.
        error: Last words where it failed.
    """

    rates: list[float] = field(default_factory=list)
    start_up: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)
    memory: int = 0
    planned_memory: int = 0
    error: str = ""


class Bench:
    """Runs jobs in a folder of its own.

    Args:
        folder: For models, rows and runs.
        steps: Of each run.
        of: Steps of the run that the toolkit is told of, and stopped in: what pays in a long run it decides by these.
        jobs: All that will be run.
        on_gpu: Whether the device is a GPU.
        llamafactory: The Python that has it.
    """

    def __init__(
        self, folder: Path, steps: int, of: int, jobs: Sequence[Job], on_gpu: bool, llamafactory: str | None = None
    ) -> None:
        self.folder, self.steps, self.of, self.on_gpu, self.llamafactory = folder, steps, of, on_gpu, llamafactory
        self._tokens = int(1.5 * steps * max(each.seq_len * each.rows for each in jobs))
        (folder / "recipes").mkdir(parents=True, exist_ok=True)

    def run(self, who: str, job: Job, result: Result, minutes: float) -> None:
        """One repetition of one contestant."""
        model, data = self._material(job)
        metrics = self.folder / "runs" / "job" / "metrics.jsonl"
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        metrics.parent.mkdir(parents=True)
        make = self._peer if who.split("+")[0] in PEERS else self._recipe
        command = make(who, job, model, data, metrics)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "TOKENIZERS_PARALLELISM": "true"}
        cut = make == self._recipe and self.of > self.steps
        begun, log = time.monotonic(), self.folder / f"{job.name} {who}.log".replace("/", "-")
        with log.open("w") as stream:
            process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=stream, stderr=stream)
            first = None
            while process.poll() is None and time.monotonic() - begun < 60 * minutes:
                if cut and len(self._steps(metrics)) >= self.steps:
                    break
                if first is None and self._steps(metrics):
                    first = time.monotonic() - begun
                if not self.on_gpu:
                    result.memory = max(result.memory, _resident(process.pid))
                time.sleep(0.05)
            if process.poll() is None:
                process.kill()
        rows = self._steps(metrics)
        if (process.wait() and not cut) or len(rows) < self.steps:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            result.error = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:200]
            return
        steps = [(rows[0]["tokens"], rows[0])]
        steps += [(after["tokens"] - before["tokens"], after) for before, after in itertools.pairwise(rows)]
        # The Trainer fetches a batch ahead, so that its last step comes without tokens.
        steps = steps[WARM_UP:-1]
        seconds = sum(row.get("step_seconds") or tokens / row["tokens_per_second"] for tokens, row in steps)
        result.rates.append(sum(tokens for tokens, _ in steps) / seconds)
        result.start_up.append(first or 0.0)
        manifest = metrics.with_name("manifest.json")
        if manifest.is_file():
            plan = json.loads(manifest.read_text(encoding="utf-8"))["plan"]
            result.planned.append(plan["work"]["tokens_per_second"])
            result.planned_memory = plan["memory"][0]["allocated"] if self.on_gpu else 0
        result.memory = max(result.memory, *(row.get("device_memory_bytes", 0) for row in rows))

    def _steps(self, metrics: Path) -> list[dict[str, Any]]:
        if not metrics.is_file():
            return []
        lines = metrics.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if "tokens_per_second" in row]

    def _recipe(self, who: str, job: Job, model: str, data: Path, metrics: Path) -> list[str]:
        text = {
            "objective": job.objective,
            "model": {"path": model},
            "data": {"sources": [str(data)], "packing": job.packing},
            "method": job.method,
            "precision": job.precision,
            "schedule": {"max_steps": self.of},
            "batch": {"seq_len": job.seq_len, "global_batch_size": job.rows},
            "evaluation": {"at_start": False, "num_prompts": 0},
            # Writes what a checkpoint holds, which takes minutes for large models and is no part of a step.
            "checkpoint": {"rehearse": False},
            "output": {"dir": str(metrics.parent.parent), "name": metrics.parent.name},
        }
        if job.packing:
            text["data"]["over_long"] = "split"
        # JSON is YAML.
        (self.folder / "recipes" / "job.yaml").write_text(json.dumps(text), encoding="utf-8")
        settings = [*job.settings, *who.split("+")[1:]]
        return [sys.executable, str(ROOT / "toolkit" / "run.py"), "--force", "recipe=job", *settings]

    def _peer(self, who: str, job: Job, model: str, data: Path, metrics: Path) -> list[str]:
        described = asdict(job) | {"model": model, "data": str(data), "metrics": str(metrics), "steps": self.steps}
        name, *settings = who.split("+")
        described |= {key: yaml.safe_load(value) for key, value in (each.split("=", 1) for each in settings)}
        (self.folder / "job.json").write_text(json.dumps(described), encoding="utf-8")
        python = self.llamafactory if name == "llamafactory" and self.llamafactory else sys.executable
        return [python, str(HERE / "peers.py"), name, str(self.folder / "job.json")]

    def _material(self, job: Job) -> tuple[str, Path]:
        """Where model and rows lie; made in another process, which would hold a part of the device from then on."""
        if job.model == "smollm2":
            from toolkit.models.builtin import builtin_model

            model = str(builtin_model())
        else:
            model = str(self.folder / "models" / job.model)
            subprocess.run([sys.executable, str(material.__file__), job.model, str(Path(model).parent)], check=True)
        data = self.folder / f"{job.objective}.jsonl"
        if not data.is_file():
            if job.objective in DOCSTRINGS:
                # No more than a run comes to: TRL asks the untrained model about all rows of DPO.
                rows = DOCSTRINGS[job.objective]()[: self.of * job.rows]
                data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            else:
                write = material.pairs if job.objective == "seq2seq" else material.documents
                write(self._tokens, data)
        return model, data


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def table(results: dict[str, dict[str, Result]]) -> str:
    """Markdown: a row per job and contestant; rates are medians with the range of the repetitions."""
    lines = ["| job | who | tokens/s | range | planned | of the toolkit | start-up, s | memory, GiB | planned |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for job, found in results.items():
        own = found.get("toolkit")
        for who, result in found.items():
            if not result.rates:
                lines.append(f"| {job} | {who} | {result.error} | | | | | | |")
                continue
            rate = statistics.median(result.rates)
            share = f"{rate / statistics.median(own.rates):.2f}" if own and own.rates else ""
            spread = f"{min(result.rates):,.0f} to {max(result.rates):,.0f}"
            start = statistics.median(result.start_up)
            planned = f"{statistics.median(result.planned):,.0f}" if result.planned else ""
            cells = [job, who, f"{rate:,.0f}", spread, planned, share, f"{start:.1f}", f"{result.memory / GIB:.1f}"]
            cells.append(f"{result.planned_memory / GIB:.1f}" if result.planned_memory else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the jobs, prints and keeps a table. Returns 1 if the toolkit failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="jobs whose name holds one of these")
    parser.add_argument(
        "--who",
        nargs="+",
        default=["toolkit", *PEERS],
        metavar="NAME",
        help="contestants (all); `toolkit+KEY=VALUE` is the toolkit with another setting",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help=f"of each run, {WARM_UP} not counted (20)")
    parser.add_argument(
        "--of", type=int, default=0, metavar="N", help="the toolkit is told of a run of N steps, and stopped in it"
    )
    parser.add_argument("--folder", metavar="DIR", help="for models, rows and logs (default: a temporary one)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("--minutes", type=float, default=20, metavar="N", help="at most, for each run (20)")
    parser.add_argument("--llamafactory", metavar="PYTHON", help="of an environment that has LLaMA-Factory")
    parser.add_argument("--results", default=str(HERE / "results"), metavar="DIR", help="where the dated files go")
    options = parser.parse_args()
    import torch
    import transformers

    machine, texts = once_measured(this_machine()), [text.lower() for text in options.only]
    device = machine.device
    on_gpu = device.kind != "cpu"
    every = CUDA_JOBS if on_gpu else CPU_JOBS
    jobs = [job for job in every if any(text in job.name.lower() for text in texts)]
    if not jobs:
        parser.error(f"--only {' '.join(options.only)} is in no job's name: {'; '.join(job.name for job in every)}")
    fastest = machine.precisions[0]
    jobs = [dataclasses.replace(job, precision=job.precision.replace("auto", fastest)) for job in jobs]
    about = {"device": device.title, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
    about |= {"transformers": transformers.__version__, "steps": options.steps}
    about |= {"of a run of": options.of} if options.of else {}
    file = Path(options.results) / f"throughput-{about['date']}-{device.name}"
    file.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Result]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, of = Path(options.folder or temporary).resolve(), max(options.of, options.steps)
        bench = Bench(folder, options.steps, of, jobs, on_gpu, options.llamafactory)
        for job in jobs:
            results[job.name] = {who: Result() for who in options.who}
            for _ in range(options.repeat):
                for who, result in results[job.name].items():
                    if not result.error:
                        bench.run(who, job, result, options.minutes)
                        print(f"{job.name}, {who}: {result}", flush=True)
            text = "\n".join(f"- {key}: {value}" for key, value in about.items())
            file.with_suffix(".md").write_text(f"# Throughput\n\n{text}\n\n{table(results)}\n", encoding="utf-8")
            kept = {job: {who: asdict(result) for who, result in found.items()} for job, found in results.items()}
            written = json.dumps({"about": about, "results": kept}, indent=2) + "\n"
            file.with_suffix(".json").write_text(written, encoding="utf-8")
    print(f"\n{table(results)}\nwritten to {file}.md")
    own = [result for found in results.values() for who, result in found.items() if who.split("+")[0] not in PEERS]
    return 1 if any(result.error for result in own) else 0


if __name__ == "__main__":
    sys.exit(main())
