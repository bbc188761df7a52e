"""Planned against measured: runs recipes through the normal command, and sets the plan beside what happened.

`python benchmarks/plan_accuracy.py`, on one GPU or on a CPU, which has cases of its own. `--small` runs tiny ones. It
needs no network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(ROOT))

import material  # noqa: E402

from toolkit.planner.hardware import this_machine  # noqa: E402
from toolkit.planner.hardware.calibration import path_of  # noqa: E402

GIB = 2**30
GOALS: dict[str, tuple[float | None, float | None]] = {
    "allocated": (0.03, 0.05),
    "reserved": (None, 0.08),
    "step_seconds": (None, 0.10),
    "host": (None, None),
}
"""Largest errors wanted: median, worst."""
_TITLES = {"allocated": "allocated, GiB", "reserved": "reserved, GiB", "step_seconds": "step, s", "host": "RAM, GiB"}
_RECIPE = """\
objective: language_modelling
model:
  path: {model}
data:
  sources: [{documents}]
  packing: true
  over_long: split
schedule:
  max_steps: {steps}
evaluation:
  at_start: false
  num_prompts: 0
output:
  dir: {runs}
"""


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        name: For the table.
        model: One of `material.SHAPES`.
        seq_len: Tokens per sequence.
        micro_batch_size: Sequences per pass.
        accumulation: Passes per step.
        settings: What else differs, as on the command line.
    """

    name: str
    model: str
    seq_len: int
    micro_batch_size: int
    accumulation: int = 1
    settings: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """Its arguments of the command."""
        batch = {
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.micro_batch_size * self.accumulation,
        }
        return [*(f"batch.{key}={value}" for key, value in batch.items()), *self.settings]


LORA, QLORA = ("method=lora",), ("method=qlora",)
FULL = "activation_checkpointing=full"
CASES = (
    Case("160M full", "llama_160m", 2048, 8),
    Case("160M full, 4 passes a step", "llama_160m", 2048, 4, 4),
    Case("0.6B (Qwen3) full", "qwen3_0_6b", 4096, 2),
    Case("1B (Gemma 3) LoRA", "gemma_3_1b", 4096, 2, 1, LORA),
    Case("1B full", "llama_1b", 4096, 4),
    Case("1B full, 2 passes a step", "llama_1b", 4096, 2, 2),
    Case("1B full, checkpointing", "llama_1b", 4096, 4, 1, (FULL,)),
    Case("1B full, selective checkpointing", "llama_1b", 4096, 4, 1, ("activation_checkpointing=selective",)),
    Case("1B full, offloaded checkpointing", "llama_1b", 4096, 4, 1, ("activation_checkpointing=offload",)),
    Case("1B full, every second layer", "llama_1b", 4096, 4, 1, (FULL, "activation_checkpointing.every_n_layers=2")),
    Case("1B full, pure bf16", "llama_1b", 4096, 4, 1, ("precision=pure_bf16",)),
    Case("1B full, 8-bit AdamW", "llama_1b", 4096, 4, 1, ("optimizer=adamw_8bit",)),
    Case("1B full, 16k tokens in one sequence", "llama_1b", 16384, 1, 1, (FULL,)),
    Case("1B full, ZeRO-2", "llama_1b", 4096, 4, 1, ("strategy=zero2",)),
    Case("1B full, ZeRO-3", "llama_1b", 4096, 4, 1, ("strategy=zero3",)),
    Case("1B full, FSDP", "llama_1b", 4096, 4, 1, ("strategy=fsdp",)),
    Case("1B LoRA", "llama_1b", 4096, 4, 1, LORA),
    Case("1B QLoRA", "llama_1b", 4096, 4, 1, QLORA),
    Case("1B LoRA, sequences of 1k", "llama_1b", 1024, 16, 1, LORA),
    Case("8B LoRA", "llama_8b", 4096, 2, 1, LORA),
    Case("8B LoRA, checkpointing", "llama_8b", 4096, 4, 1, (*LORA, FULL)),
    Case("8B QLoRA", "llama_8b", 4096, 2, 1, QLORA),
    Case("8B full, pure bf16, 8-bit AdamW", "llama_8b", 4096, 2, 1, ("precision=pure_bf16", "optimizer=adamw_8bit")),
)
FP32 = ("precision=fp32", "compile=off")
CPU = (
    Case("160M LoRA, rows of 128", "llama_160m", 128, 4, 1, (*LORA, *FP32)),
    Case("160M LoRA", "llama_160m", 512, 1, 2, (*LORA, *FP32)),
    Case("160M LoRA, rows of 2k", "llama_160m", 2048, 1, 1, (*LORA, *FP32)),
    Case("160M full", "llama_160m", 512, 1, 2, FP32),
    Case("160M full, bf16", "llama_160m", 512, 1, 2, ("compile=off",)),
)
SMALL = (
    Case("tiny full", "llama_tiny", 128, 4),
    Case("tiny full, 2 passes a step", "llama_tiny", 128, 2, 2),
    Case("tiny full, checkpointing", "llama_tiny", 128, 4, 1, (FULL,)),
    Case("tiny LoRA", "llama_tiny", 128, 4, 1, LORA),
    Case("tiny QLoRA", "llama_tiny", 128, 4, 1, QLORA),
)


@dataclass
class Outcome:
    """What a run was said to need, and what it needed.

    Args:
        case: Its name.
        overrides: Arguments of the command.
        status: `finished`, `out of memory` or `failed`.
        fit: The plan's answer; `unknown` if the run ended before it was written down.
        planned: Bytes of `allocated`, `reserved` and `host` (RAM), `step_seconds`.
        measured: The same.
        reason: Last words of a run that did not finish.
    """

    case: str
    overrides: list[str]
    status: str
    fit: str
    planned: dict[str, float]
    measured: dict[str, float]
    reason: str = ""

    def error(self, figure: str) -> float | None:
        """Planned over measured, less one; None where one of them is missing."""
        planned, measured = self.planned.get(figure), self.measured.get(figure)
        return planned / measured - 1 if planned and measured else None


def outcome(case: Case, run: Path, code: int, said: str) -> Outcome:
    """Reads a run folder's manifest.

    Args:
        case: What ran.
        run: Its run folder.
        code: Exit code of the command.
        said: What the command wrote to the screen.
    """
    file = run / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    plan, measured = manifest.get("plan") or {}, manifest.get("measured") or {}
    planned: dict[str, float] = {}
    fit = plan["fit"]["answer"] if plan else "unknown"
    if plan:
        planned = {"allocated": plan["memory"][0]["allocated"], "reserved": plan["memory"][0]["reserved"]["value"]}
        planned |= {"step_seconds": plan["work"]["step_seconds"]["value"], "host": plan["host"]["peak"]}
    status, reason = "finished", ""
    if code:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        status = "out of memory" if "out of memory" in said.lower() else "failed"
        reason = next(
            (line for line in lines if line.startswith("error:")), lines[-1] if lines else f"exit code {code}"
        )
    known = {figure: measured[figure] for figure in GOALS if measured.get(figure)}
    return Outcome(case.name, case.overrides, status, fit, planned, known, reason)


def run_case(case: Case, folder: Path, steps: int, minutes: float) -> Outcome:
    """Trains through the normal command, in a process of its own, and clears up."""
    runs, recipes = folder / "runs", folder / "recipes"
    recipes.mkdir(exist_ok=True)
    tokens = case.seq_len * case.micro_batch_size * case.accumulation * steps
    documents = material.documents(int(tokens * 1.3) + 20_000, folder / "documents.jsonl")
    # Not in this process, which would hold a part of the device from then on.
    path = folder / "models" / case.model
    subprocess.run([sys.executable, str(material.__file__), case.model, str(path.parent)], check=True)
    text = _RECIPE.format(model=path, documents=documents, steps=steps, runs=runs)
    (recipes / "case.yaml").write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "toolkit" / "run.py"), "--force", "recipe=case", *case.overrides]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 * minutes
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, said = 124, f"stopped after {minutes:g} minutes"
    found = outcome(case, runs / "case", code, said)
    shutil.rmtree(runs, ignore_errors=True)
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per run."""
    heads = [f"{title}: planned | measured | error" for title in _TITLES.values()]
    lines = [f"| run | fit | {' | '.join(heads)} |", "| --- | --- |" + " ---: | ---: | ---: |" * len(heads)]
    for each in outcomes:
        cells = [each.case, each.fit]
        for figure in GOALS:
            unit, error = 1 if figure == "step_seconds" else GIB, each.error(figure)
            cells += [
                f"{values[figure] / unit:.3f}" if figure in values else "" for values in (each.planned, each.measured)
            ]
            cells.append("" if error is None else f"{error:+.1%}")
        if each.status != "finished":
            cells[0] += f" ({each.status}: {each.reason})"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(outcomes: Sequence[Outcome]) -> list[tuple[bool | None, str]]:
    """The goals: whether each is met (None: not measured here), and in words."""
    found: list[tuple[bool | None, str]] = []
    for figure, (median_goal, worst_goal) in GOALS.items():
        errors = [abs(error) for each in outcomes if (error := each.error(figure)) is not None]
        if not errors:
            found.append((None, f"{_TITLES[figure]}: not measured here"))
            continue
        median, worst = statistics.median(errors), max(errors)
        text = f"{_TITLES[figure]}: median {median:.1%}, worst {worst:.1%} of {len(errors)}"
        if worst_goal is None:
            found.append((None, text))
            continue
        goal = (f"median {median_goal:.0%}, " if median_goal else "") + f"worst {worst_goal:.0%}"
        met = worst <= worst_goal and (median_goal is None or median <= median_goal)
        found.append((met, f"{text} (goal: {goal})"))
    wrong = [each.case for each in outcomes if each.fit in ("yes", "unknown") and each.status == "out of memory"]
    found.append((not wrong, f"said to fit and did not: {', '.join(wrong) or 'none'}"))
    broken = [each.case for each in outcomes if each.status == "failed"]
    found.append((not broken, f"ended with an error: {', '.join(broken) or 'none'}"))
    return found


def page(outcomes: Sequence[Outcome], about: dict[str, Any]) -> str:
    """The dated file."""
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    words = {True: "met", False: "missed", None: "note"}
    goals = "\n".join(f"- {words[met]}: {text}" for met, text in verdicts(outcomes))
    return f"# Planned against measured\n\n{facts}\n\n{table(outcomes)}\n\n{goals}\n"


def _about(steps: int) -> dict[str, Any]:
    import torch
    import transformers

    hardware = this_machine()
    facts = {"device": hardware.device.title, "date": datetime.date.today().isoformat(), "torch": torch.__version__}
    calibrated = path_of(hardware.device).is_file()
    return {
        **facts,
        "transformers": transformers.__version__,
        "steps": steps,
        "calibrated": "yes" if calibrated else "no",
    }


def main() -> int:
    """Runs the cases and writes the results. Returns 1 if a run that was said to fit did not, or one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models, also for a CPU")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose name holds one of these")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="of each run (12)")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="at most, for each run (10)")
    parser.add_argument(
        "--calibrate", type=int, default=60, metavar="S", help="seconds, if not done before (60); 0: no"
    )
    parser.add_argument("--folder", metavar="DIR", help="for models and runs (default: a temporary one)")
    parser.add_argument("--results", default=str(RESULTS), metavar="DIR", help="where the dated files go")
    options = parser.parse_args()
    device = this_machine().device
    if options.calibrate and not path_of(device).is_file():
        command = [sys.executable, "-m", "toolkit", "calibrate", "--seconds", str(options.calibrate)]
        subprocess.run(command, cwd=ROOT, check=True)
    wanted = [text.lower() for text in options.only]
    chosen = SMALL if options.small else CPU if device.kind == "cpu" else CASES
    cases = [case for case in chosen if any(text in case.name.lower() for text in wanted)]
    about = _about(options.steps)
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    name = f"plan_accuracy-{about['date']}-{device.name}{'-small' if options.small else ''}"
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for index, case in enumerate(cases):
            outcomes.append(run_case(case, folder, options.steps, options.minutes))
            last = outcomes[-1]
            text = page(outcomes, about)
            (results / f"{name}.md").write_text(text, encoding="utf-8")
            kept = {"about": about, "outcomes": [asdict(each) for each in outcomes]}
            (results / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
            errors = [f"{figure} {error:+.1%}" for figure in GOALS if (error := last.error(figure)) is not None]
            print(f"{index + 1}/{len(cases)} {case.name}: {last.status} {last.reason} {', '.join(errors)}", flush=True)
            if case.model not in {later.model for later in cases[index + 1 :]} and not options.folder:
                shutil.rmtree(folder / "models" / case.model, ignore_errors=True)
    print(f"\n{page(outcomes, about)}\nwritten to {results / name}.md")
    return 0 if all(met for met, _ in verdicts(outcomes)[len(GOALS) :]) else 1


if __name__ == "__main__":
    sys.exit(main())
