"""How long a training takes from the start of its process to the end of its first step, and what that goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
from transformers import TrainerCallback

Stage = Literal["imports", "data", "plan", "model", "evaluation", "first_step"]
"""In this order. `imports` begins with the process and has the checks of the recipe; `evaluation` is all that is done
with the model before it is trained: it is compared with the recipe, answers the prompts, and is evaluated."""


class StartUp(TrainerCallback):
    """Seconds of each stage. The last of the trainer's callbacks: those of the others are over when its own are called.

    Args:
        report: Takes the seconds of all stages, after the first step.
    """

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = {}
        self.report: Callable[[dict[Stage, float]], None] = lambda seconds: None

    def ended(self, stage: Stage) -> None:
        """Notes that a stage has ended, after those before it."""
        self.seconds[stage] = round(process_seconds() - sum(self.seconds.values()), 2)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended("evaluation")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "first_step" not in self.seconds:
            self.ended("first_step")
            self.report(self.seconds)


def process_seconds() -> float:
    """Age of this process."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.time() - psutil.Process().create_time()
