"""One recipe on every engine: how it is started, what it left behind, and how far that is from the single process's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RUN, environment, metrics
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file

PROCESSES = torch.cuda.device_count() or 2
"""All GPUs of this machine, or two processes on a CPU."""
STEPS, SEQUENCES = 10, 4
"""Steps of a run, and sequences per process and step; micro-batch x accumulation divides them up."""

SEEDS = (2, 5)
"""Of a mixture of experts, now and then two are so nearly alike for a token that rounding decides between them, and
weights move by up to 1e-3. With which seed depends on the processor; so its training must be equal with one of two."""

LEARNING_RATE = 1e-3

# Adam divides by the size of the gradient. Where that is zero but for rounding (biases of attention keys), a smaller
# `eps` than this would make updates out of the rounding.
RECIPE = f"""
description: The same training on every engine
model: {{path: llama}}
data: {{sources: [chat.jsonl], eval_split: 0.1}}
precision: fp32
tf32: false
optimizer: {{learning_rate: {LEARNING_RATE}, weight_decay: 0.1, beta2: 0.95, eps: 1.0e-5, max_grad_norm: 0.5}}
schedule: {{name: linear, max_steps: {STEPS}, warmup_ratio: 0.2}}
batch: {{seq_len: 128, global_batch_size: {SEQUENCES * PROCESSES}}}
evaluation: {{num_prompts: 2, max_new_tokens: 8, batch_size: 2}}
checkpoint: {{resume: never}}
"""

# Buckets and thresholds of the defaults would hold these tiny models whole: nothing would be sharded or split.
_ZERO = ["strategy.reduce_bucket_size=20000", "strategy.overlap_comm=true"]
_ZERO12 = [*_ZERO, "strategy.allgather_bucket_size=20000"]
_ZERO3 = [*_ZERO, "strategy.prefetch_bucket_size=20000", "strategy.param_persistence_threshold=0"]
_PAGEABLE = [] if torch.cuda.is_available() else ["strategy.pin_memory=false"]
_OFFLOAD = ["strategy.offload_optimizer=cpu", *_PAGEABLE]
ENGINES = {
    "single": ["strategy.name=single"],
    "ddp": ["strategy.name=ddp"],
    "zero1": ["strategy.name=zero1", *_ZERO12],
    "zero2": ["strategy.name=zero2", *_ZERO12],
    "zero3": ["strategy.name=zero3", *_ZERO3],
    "zero2_offload": ["strategy.name=zero2", *_ZERO12, *_OFFLOAD],
    "zero3_offload": ["strategy.name=zero3", *_ZERO3, *_OFFLOAD, "strategy.offload_param=cpu"],
    "fsdp": ["strategy.name=fsdp"],
    "fsdp_grad_op": ["strategy.name=fsdp", "strategy.sharding=shard_grad_op"],
    "fsdp_offload": ["strategy.name=fsdp", "strategy.offload_param=cpu", *_PAGEABLE],
    "fsdp_hybrid": ["strategy.name=fsdp", "strategy.sharding=hybrid_shard"],
}
METHODS = {
    "full": [],
    "lora": ["method.name=lora", "method.r=8"],
    "freeze": ["method.freeze=[model.embed_tokens.*,*layernorm*]"],
    "qlora": ["method.name=lora", "method.r=8", "method.quantization=nf4"],
    "fp8": ["method.name=lora", "method.r=8", "method.quantization=fp8"],
    "int4": ["method.name=lora", "method.r=8", "method.quantization=int4"],
    "eva": ["method.name=lora", "method.r=8", "method.init_lora_weights=eva"],
    "loftq": ["method.name=lora", "method.r=8", "method.quantization=nf4", "method.init_lora_weights=loftq"],
    "dora": ["method.name=lora", "method.r=8", "method.use_dora=true"],
    "lora_embeddings": ["method.name=lora", "method.r=8", "method.modules_to_save=[embed_tokens,lm_head]"],
}


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    losses: list[float]
    grad_norms: list[float]
    held_out: list[dict[str, float]]
    answers: list[tuple[str, str]]
    weights: dict[str, torch.Tensor] = field(repr=False)
    rows: dict[str, Any] = field(default_factory=dict, repr=False)
    """Losses of held-out rows, as the run folder has them."""

    @classmethod
    def read(cls, run: Path) -> Result:
        """Reads a run folder."""
        rows = metrics(run)
        weights = {}
        for file in sorted((run / "final").glob("*.safetensors")):
            weights |= load_file(file)
        samples, rows_file = run / "samples.json", run / "held_out_rows.json"
        answers = json.loads(samples.read_text(encoding="utf-8")) if samples.is_file() else []
        return cls(
            losses=[row["loss"] for row in rows if "loss" in row],
            grad_norms=[row["grad_norm"] for row in rows if "loss" in row],
            held_out=[{k: v for k, v in row.items() if k.startswith("eval_")} for row in rows if "eval_loss" in row],
            answers=[(sample["before"], sample["after"]) for sample in answers],
            weights=weights,
            rows=json.loads(rows_file.read_text(encoding="utf-8")) if rows_file.is_file() else {},
        )


@dataclass(frozen=True)
class Difference:
    """Largest differences of a run from another one, each relative to the other's figure."""

    loss: float
    grad_norm: float
    held_out: float
    """Of losses, and of all rows' together: the norm of their differences, relative to that of their losses."""
    weights: float
    """Of the tensor that differs most: the norm of the difference, relative to the tensor's own or, where that is
    smaller, to one step of the optimizer (the biases of attention keys stay at zero but for rounding)."""

    @classmethod
    def between(cls, run: Result, reference: Result) -> Difference:
        """Compares runs that have the same steps, evaluations and weights.

        Raises:
            AssertionError: If they have not.
        """
        assert len(run.losses) == len(reference.losses) > 0
        assert len(run.held_out) == len(reference.held_out)
        assert run.weights.keys() == reference.weights.keys()
        for name, tensor in reference.weights.items():
            assert (run.weights[name].shape, run.weights[name].dtype) == (tensor.shape, tensor.dtype), name
        # The same rows, of as many tokens, whoever had them.
        for key in ("measured", "counts"):
            assert run.rows.get(key) == reference.rows.get(key), key
        evaluations = [[each["eval_loss"] for each in result.held_out] for result in (run, reference)]
        return cls(
            loss=_largest(run.losses, reference.losses),
            grad_norm=_largest(run.grad_norms, reference.grad_norms),
            held_out=max(_largest(*evaluations), *_of_rows(run.rows, reference.rows)),
            weights=max(_distance(run.weights[name], tensor) for name, tensor in reference.weights.items()),
        )

    def over(self, limits: Difference) -> dict[str, float]:
        """What is larger than allowed, or no number."""
        return {name: value for name, value in vars(self).items() if not value <= getattr(limits, name)}

    def figures(self) -> dict[str, str]:
        """Column to text."""
        return {name: f"{value:.1e}" for name, value in vars(self).items()}


def _largest(figures: list[float], reference: list[float]) -> float:
    return max((abs(one - other) / abs(other) for one, other in zip(figures, reference, strict=True)), default=0.0)


def _of_rows(run: dict[str, Any], reference: dict[str, Any]) -> list[float]:
    """Of each evaluation whose rows are kept."""
    both = [
        [torch.tensor(each["sums"][step], dtype=torch.float64) for each in (run, reference)]
        for step in reference.get("sums", ())
    ]
    return [0.0, *(((one - other).norm() / other.norm()).item() for one, other in both)]


def _distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    step = LEARNING_RATE * reference.numel() ** 0.5
    return ((tensor.double() - reference.double()).norm() / max(reference.double().norm().item(), step)).item()


class Launcher:
    """Runs the recipe `matrix` of a folder: on the GPUs of this machine, or on forked CPU processes."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._results: dict[str, Result] = {}
        self._ranks = ranks

    def result(
        self, name: str, engine: str, *overrides: str, processes: int | None = None, entry: str = ON_CPU
    ) -> Result:
        """What the run of this name left behind; it is started when it is asked for the first time.

        Args:
            processes: Other than `PROCESSES`.
            entry: Module whose `main` trains, on CPUs.
        """
        if name not in self._results:
            arguments = ["recipe=matrix", *ENGINES[engine], *overrides, f"output.name={name}"]
            code, said = self._run(engine, arguments, processes or (1 if engine == "single" else PROCESSES), entry)
            assert code == 0, f"{name}: exit code {code}\n{said[-3000:]}"
            self._results[name] = Result.read(self.folder / "runs" / name)
        return self._results[name]

    def _run(self, engine: str, arguments: list[str], processes: int, entry: str) -> tuple[int, str]:
        if torch.cuda.is_available():
            return _torchrun(self.folder, processes, arguments)
        nodes = 1
        if engine == "fsdp_hybrid":
            processes, nodes = 4, 2
        done = self._ranks.run(self.folder, *arguments, processes=processes, nodes=nodes, entry=entry)
        return done.returncode, done.stderr


def cells(core: Sequence[Sequence[object]], full: Sequence[Sequence[object]]) -> list[Any]:
    """Parameters of a test: those that always run, and the full product, which `make matrix` runs."""
    return [
        pytest.param(*each, id="-".join(map(str, each)), marks=[] if each in core else [pytest.mark.matrix])
        for each in dict.fromkeys([*core, *full])
    ]


def _torchrun(folder: Path, processes: int, arguments: list[str]) -> tuple[int, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [*launcher, str(RUN), *arguments],
        cwd=folder,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:processes])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout
