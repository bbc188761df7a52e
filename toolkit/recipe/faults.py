"""The section of a recipe that says what a fault in the middle of a training leads to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.recipe.base import PositiveInt, Section


class Faults(Section):
    """What hangs, and batches whose numbers are wrong, lead to. May be changed when a run goes on after one."""

    hang_minutes: Annotated[float, Field(gt=0)] | None = 30.0
    """The run ends, and names the process that holds it up, when none of its processes has got on for so long: none has
    taken a micro-batch, evaluated one, or read or written 64 KB in a second. `null` waits for ever."""

    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradients that are not finite end the run (`stop`), or the update of their batch is left out and the
    run goes on as if the batch had not been there (`skip`). Either way the rows are saved in `bad_batches.jsonl`.
    `skip` waits for the device in each step, which takes some microseconds."""
    on_spike: Literal["ignore", "stop", "skip"] = "ignore"
    """The same for a loss far above those of the steps before it."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Number of steps with which a loss is compared; none is a spike before half as many were taken."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """A loss is a spike from so many standard deviations above the mean of the window on; both defaults are those of
    OLMo's trainer."""
    max_skips: PositiveInt = 10
    """The run ends when more batches than this would be skipped."""

    @property
    def skips(self) -> bool:
        """Whether any batch may be skipped."""
        return "skip" in (self.on_nan, self.on_spike)

    @property
    def judges_steps(self) -> bool:
        """Whether each step is looked at before its update, not only where it is logged."""
        return self.skips or self.on_spike != "ignore"
