"""The plan of a run that is about to start: shown, refused where it would not fit, and explained if memory runs out.

Made by the same planner as `toolkit plan`, with the devices, processes and rows that are really there, before weights
are loaded. A model that has not been traced before costs some seconds.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from toolkit.common import UserError, bytes_text, in_a_line
from toolkit.data.statistics import DataStatistics
from toolkit.distributed.layout import World
from toolkit.models.load import ModelSource
from toolkit.planner.build import estimate
from toolkit.planner.hardware import Hardware, once_measured
from toolkit.planner.launch import launched_on
from toolkit.planner.plan import Plan, UnknownSize
from toolkit.recipe import Loaded, model_configs
from toolkit.report.manifest import Measured
from toolkit.report.plan_view import change_text, fit_text
from toolkit.train.process import peak_host_bytes

_SPARE = 0.9
"""A change counts as enough after memory ran out if the plan needs at most this share of what it needed or had."""


@dataclasses.dataclass(frozen=True)
class PlanGuard:
    """A run and its plan.

    Args:
        statistics: Figures of the prepared data; None for a stream, or where the data is not known yet.
    """

    loaded: Loaded
    source: ModelSource
    hardware: Hardware
    statistics: DataStatistics | None

    @functools.cached_property
    def plan(self) -> Plan:
        """Without advice, made when it is first asked for; raises `UnknownSize` where none can be made."""
        return self._planned(advice=False)

    def check(self) -> None:
        """Refuses a run that would not fit.

        Raises:
            UserError: With the smallest change that fits.
        """
        if self.plan.fit.answer == "no":
            raise UserError(f"this run would not fit: {fit_text(self.plan)}", f"{self._change()}, or add --force")

    def out_of_memory(self, error: BaseException) -> UserError:
        """What ran out, beside the plan, and the smallest change that would have fitted."""
        needed = min(self.plan.fit.needed, self.plan.fit.available)
        device = self.hardware.device.model_copy(update={"memory": int(_SPARE * needed)})
        smaller = dataclasses.replace(self.hardware, device=device)
        # For the smaller device `auto` would choose again, and leave nothing to change.
        ran = self.loaded.recipe.with_values({"batch.micro_batch_size": self.plan.micro_batch_size})
        parts = self.plan.memory[0].parts_at_peak()
        largest = sorted(parts.items(), key=lambda item: -item[1])
        planned = ", ".join(f"{name} {bytes_text(size)}" for name, size in largest if size)
        return UserError(
            f"out of memory: {in_a_line(error)}\n  held:    {_held()}\n"
            f"  planned: {bytes_text(self.plan.fit.needed)} of {bytes_text(self.plan.fit.available)}: {planned}",
            dataclasses.replace(self, hardware=smaller, loaded=dataclasses.replace(self.loaded, recipe=ran))._change(),
        )

    def _change(self) -> str:
        """The smallest change with which the run fits, as text."""
        # Advice knows the settings that have been traced. These two take the least memory; the second more time.
        for mode in ("none", "full"):
            values = {"batch.micro_batch_size": 1, "activation_checkpointing.mode": mode}
            least = dataclasses.replace(self.loaded, recipe=self.loaded.recipe.with_values(values))
            if dataclasses.replace(self, loaded=least)._planned(advice=False).fit.answer == "yes":
                break
        fitting = [each for each in self._planned(advice=True).advice if each.changes and each.fits != "no"]
        if not fitting:
            rows = "batch.micro_batch_size or " if self.plan.micro_batch_size > 1 else ""
            return f"nothing known fits: lower {rows}batch.seq_len, or take a smaller model or larger devices"
        return f"set {change_text(fitting[0].changes)} ({bytes_text(fitting[0].total)} by the plan)"

    def _planned(self, advice: bool) -> Plan:
        config = model_configs.config_of(self.loaded.recipe.model) or self.source.config.to_dict()
        plan = estimate(
            self.loaded.recipe,
            self.loaded.name,
            self.hardware,
            advice=advice,
            config=config,
            statistics=self.statistics,
            tracing="in_process",
        )
        return plan.model_copy(update={"chosen": {**plan.chosen, **self.loaded.chosen}})


def plan_run(loaded: Loaded, world: World, source: ModelSource, statistics: DataStatistics | None = None) -> PlanGuard:
    """A run on the processes that were launched. Must come before TrainingArguments, which prepare engines."""
    return PlanGuard(loaded, source, once_measured(launched_on(world, loaded.folder)), statistics)


def nvme_bytes(loaded: Loaded, world: World, source: ModelSource) -> int:
    """What a run keeps on the drives of each node; 0 if its model cannot be planned."""
    try:
        return plan_run(loaded, world, source).plan.disk.nvme
    except UnknownSize:
        return 0


def measured(plan: Plan | None, figures: Measured) -> Measured:
    """What really came, for the run's manifest: figures, and memory beside them."""
    if plan and plan.devices == 1:
        # The plan's figure is that of a whole node.
        figures.host = peak_host_bytes()
    if torch.cuda.is_available():
        figures.allocated = torch.cuda.max_memory_allocated()
        figures.reserved = torch.cuda.max_memory_reserved()
    return figures


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory is exhausted, on a GPU or on the host."""
    # The CPU's allocator has no error of its own.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _held() -> str:
    """What the allocator holds, beside what there is."""
    if not torch.cuda.is_available():
        return f"{bytes_text(peak_host_bytes())} of host memory by this process at its peak"
    free, total = torch.cuda.mem_get_info()
    figures = {
        "allocated": torch.cuda.memory_allocated(),
        "at its peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "free on the device": free,
        "in all": total,
    }
    return ", ".join(f"{bytes_text(size)} {name}" for name, size in figures.items())
