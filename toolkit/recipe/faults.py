"""The section of a recipe that says what happens on a fault during training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from toolkit.recipe.base import PositiveInt, Section


class Faults(Section):
    """What happens when a run hangs, or when a batch gives wrong numbers. May be changed when the run is continued."""

    hang_minutes: Annotated[float, Field(gt=0)] | None = 30.0
    """The run ends, and names the process that it waits for, when no process has made progress for this many minutes:
    none has trained or evaluated a micro-batch, or read or written 64 KB in a second. `null` waits for ever."""

    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradients that are not finite end the run (`stop`), or their batch's update is skipped and the run goes
    on as if the batch had not been there (`skip`). Either way its rows are saved in `bad_batches.jsonl`. `skip` waits
    for the device in each step, which takes some microseconds."""
    on_spike: Literal["ignore", "stop", "skip"] = "ignore"
    """The same for a loss far above those of the preceding steps."""
    spike_window: Annotated[int, Field(ge=2)] = 128
    """Number of preceding steps with which a loss is compared; nothing counts as a spike before half as many steps."""
    spike_sigmas: Annotated[float, Field(gt=0)] = 6.0
    """Number of standard deviations above the window's mean from which a loss is a spike; both defaults are those of
    OLMo's trainer."""
    max_skips: PositiveInt = 10
    """The run ends when more batches than this would be skipped."""

    @property
    def skips(self) -> bool:
        """Whether any batch may be skipped."""
        return "skip" in (self.on_nan, self.on_spike)

    @property
    def judges_steps(self) -> bool:
        """Whether each step is checked before its update, not only when it is logged."""
        return self.skips or self.on_spike != "ignore"
