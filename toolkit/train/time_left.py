"""How long a training still takes, of which terminal and metrics tell."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from toolkit.report.load import WARM_UP_STEPS

NEWEST_STEPS = 100
"""So many steps are looked back at."""


@dataclass
class TimeLeft:
    """How long a training still takes: what the plan said, and from the first step on what steps have really taken.

    The first ones compile and allocate, so they promise too much; a plan can be wrong by more, and never learns.
    """

    total_steps: int
    planned_step_seconds: float | None = None
    evaluation_steps: int | None = None
    save_steps: int | None = None
    pauses: dict[str, float] = field(default_factory=dict)
    _warm_up: float | None = None
    # Of the newest steps only, so that the estimate follows a machine that becomes slower.
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_STEPS))
    _seen: int = 0

    def steps(self, count: int, seconds: float) -> None:
        """Notes that `count` steps took `seconds`, pauses not counted."""
        first = self._seen
        self._seen += count
        if first >= WARM_UP_STEPS:
            self._steps.extend([seconds / count] * min(count, NEWEST_STEPS))
        else:
            self._warm_up = seconds / count

    def pause(self, what: Literal["evaluation", "save"], seconds: float) -> None:
        """Notes how long the newest evaluation or checkpoint took."""
        self.pauses[what] = seconds

    @property
    def measured(self) -> float | None:
        """Median seconds of the newest steps, those of the warm-up left out."""
        return statistics.median(self._steps) if self._steps else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step: those measured, the plan's only while nothing is."""
        return self.measured or self._warm_up or self.planned_step_seconds

    def after(self, step: int) -> float | None:
        """Seconds from the end of a step to the end of training, with the evaluations and checkpoints to come."""
        if self.step_seconds is None:
            return None
        seconds = (self.total_steps - step) * self.step_seconds
        for what, every in (("evaluation", self.evaluation_steps), ("save", self.save_steps)):
            if every and what in self.pauses:
                seconds += (self.total_steps // every - step // every) * self.pauses[what]
        return seconds
