"""Figures of a plan as texts and rows, the same for the terminal, the plan's page and a run's page.

Units, rounding and wording are decided once, here; who shows them decides only how they are laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from toolkit.common import byte_unit, bytes_text, compact, count_text, duration, seconds_text
from toolkit.planner.plan import OVERHEAD, PARTS, PHASES, Advice, Memory, Plan, Range, Refused, Served, Work
from toolkit.planner.speed.communication import HOST, NVME

ALL_PARTS: Mapping[str, str] = {**PARTS, **OVERHEAD}
ANSWERS = {"yes": "fits", "tight": "tight", "no": "does not fit"}
_FOLDED_SHARE = 0.002
_TO_HOST = (HOST, NVME)


@dataclass(frozen=True)
class Unit:
    """One unit for all figures of a table."""

    size: float
    name: str

    @classmethod
    def of(cls, largest: float) -> Unit:
        """The unit in which the largest figure reads well, GiB at most: cards are sold and monitored in it."""
        return cls(*byte_unit(min(largest, 1024.0**3)))

    def text(self, value: float) -> str:
        """A figure without the unit: `2,048`, `139.8`, `4.25`."""
        scaled = abs(value / self.size)
        if 0 < scaled < 0.005:
            return "<0.01"
        sign = "-" if value < 0 else ""
        return sign + (f"{scaled:.2f}" if scaled < 9.995 else f"{scaled:.1f}" if scaled < 999.95 else f"{scaled:,.0f}")


def phase_table(memory: Memory) -> tuple[list[str], dict[str, list[int]]]:
    """Phases, and for each part its bytes in each of them; parts too small to see are summed up as `other`."""
    phases = [phase for phase in PHASES if phase in memory.phases]
    rows = {part: [memory.phases[phase].get(part, 0) for phase in phases] for part in PARTS}
    small = [part for part, row in rows.items() if max(row) < _FOLDED_SHARE * memory.allocated]
    folded = [sum(rows[part][index] for part in small) for index in range(len(phases))]
    table = {part: row for part, row in rows.items() if part not in small}
    if any(folded):
        table["other"] = folded
    table["allocated"] = [sum(memory.phases[phase].values()) for phase in phases]
    return phases, table


def fit_text(plan: Plan) -> str:
    """Whether it fits, by how much, and what decides."""
    fit = plan.fit
    unit = Unit.of(fit.available)
    needed, available = unit.text(fit.needed), f"{unit.text(fit.available)} {unit.name} {fit.where}"
    if plan.host_limit and fit.where == "host RAM":
        available += f" that {plan.host_limit} leaves"
    decides = f"largest part: {fit.decides}"
    if fit.answer == "no":
        return f"{needed} of {available}, {unit.text(-fit.margin)} {unit.name} too much; {decides}"
    if fit.answer == "tight":
        over = f", up to {unit.text(plan.memory[0].total.high)} possible" if fit.where.startswith("device") else ""
        return f"{needed} of {available}{over}; {decides}"
    return f"{needed} of {available}, {unit.text(fit.margin)} {unit.name} free; {decides}"


def time_text(plan: Plan) -> str:
    """Time, speed and money on one line."""
    work = plan.work
    parts = [f"{seconds_text(work.step_seconds.value)} a step", f"{compact(work.tokens_per_second)} tokens/s"]
    if work.total_seconds is not None:
        parts.append(f"{duration(work.total_seconds.value)} in all")
    if work.gpu_hours is not None and plan.devices > 1:
        parts.append(f"{number_text(work.gpu_hours)} {hours_name(plan)}")
    if work.cost is not None:
        parts.append(f"costs {money_text(work.cost)}")
    return ", ".join(parts if work.total_seconds is not None else [*parts, _million_text(work)])


def _million_text(work: Work) -> str:
    """Time, and where it is known the price, of a million tokens."""
    text = f"{duration(1e6 / work.tokens_per_second)} per million tokens"
    cost = work.cost_per_million_tokens
    return text if cost is None else f"{text}, which cost {money_text(cost)}"


def rows_text(answers: int, texts: bool) -> tuple[str, str]:
    """What rows of so many sequences are called, and what follows a length that is one of each sequence.

    Args:
        texts: Whether they are texts that belong together.
    """
    if texts:
        return f"rows of {answers} texts", " each"
    if answers > 2:
        return f"prompts with {answers} answers", " each"
    return ("pairs of answers", " each") if answers > 1 else ("sequences", "")


def setting_rows(plan: Plan) -> list[tuple[str, str]]:
    """How it will run."""
    nodes = f"{plan.nodes} nodes, " if plan.nodes > 1 else ""
    what, each = rows_text(plan.answers, plan.texts)
    batch = f"{plan.global_batch_size} {what} of up to {plan.seq_len:,} tokens{each}: "
    together = plan.sequence * plan.tensor * plan.pipeline
    groups = plan.devices // together
    ways = ("share each", plan.sequence), ("divide the layers", plan.tensor), ("follow each other", plan.pipeline)
    what = " and ".join(way for way, size in ways if size > 1)
    if together > 1:
        batch += (f"{groups} groups of " if groups > 1 else "") + f"{together} devices that {what} x "
    else:
        batch += f"{plan.devices} devices x " if plan.devices > 1 else ""
    if plan.expert > 1:
        which = "that" if plan.expert == plan.devices else f"of which each {plan.expert}"
        batch = batch.removesuffix(" x ") + f" {which} divide the experts x "
    every = plan.gradient_accumulation_steps
    batch += f"{every} micro-batch{'es' if every > 1 else ''} of {plan.micro_batch_size}"
    return [
        ("hardware", f"{plan.hardware}: {nodes}{plan.devices} device{'s' if plan.devices > 1 else ''}"),
        ("strategy", f"{plan.strategy}, attention {plan.attention}"),
        ("batch", batch),
        *([("pipeline", pipeline_text(plan))] if plan.stages else []),
        *chosen_rows(plan),
    ]


def pipeline_text(plan: Plan) -> str:
    """How layers are cut, and what share of a step its processes wait for the pipeline: `16 + 14 layers by 1f1b, …`."""
    share = plan.work.bubble_seconds / (plan.work.step_seconds.value or 1.0)
    layers = " + ".join(map(str, plan.stages))
    return f"{layers} layers by {plan.schedule}; its bubble is {share:.1%} of a step"


def serving_title(plan: Plan) -> str:
    """What the rows of serving are about."""
    context = plan.serving.context if plan.serving else plan.seq_len
    return f"Serving the result on one such device, {context:,} tokens a sequence"


def serving_rows(plan: Plan) -> list[tuple[str, str]]:
    """For each form of the result: its bytes, those of a sequence, and how many sequences fit at once."""
    if plan.serving is None:
        return []
    cache = bytes_text(plan.serving.cache)
    return [
        (each.form, f"{bytes_text(each.weights)} of weights, {cache} a sequence: {_served(each)}")
        for each in plan.serving.forms
    ]


def _served(form: Served) -> str:
    if form.sequences:
        return f"{form.sequences:,} at once"
    return f"needs {form.devices} devices" if form.devices else "does not fit on 16 devices"


def energy_text(kwh: float) -> str:
    """`1.51 kWh`, `2.4 Wh`."""
    return f"{number_text(kwh)} kWh" if kwh >= 0.1 else f"{1000 * kwh:.3g} Wh"


def chosen_rows(plan: Plan) -> list[tuple[str, str]]:
    """What `auto` came to, and why."""
    return [("auto", f"{key}={reason}") for key, reason in plan.chosen.items()]


def work_rows(plan: Plan) -> list[tuple[str, str]]:
    """Parameters, FLOPs, time and money."""
    work = plan.work
    model = f"{compact(work.parameters)} parameters, {compact(work.trained_parameters)} trained"
    flops = f"{flops_text(work.model_flops_per_step)} (rule of thumb {flops_text(work.rule_flops_per_step)})"
    if work.hardware_flops_per_step > 1.005 * work.model_flops_per_step:
        flops += f", {flops_text(work.hardware_flops_per_step)} executed"
    rows = [
        ("model", model),
        ("FLOPs a step", flops),
        ("tokens a step", compact(work.tokens_per_step)),
        ("time a step", f"{_range_text(work.step_seconds, seconds_text)}: {shares_text(plan)}"),
        ("speed", f"{compact(work.tokens_per_second)} tokens/s, MFU {work.mfu:.1%}"),
    ]
    if work.steps is None or work.total_seconds is None:
        unknown = "unknown length: prepare the data (toolkit data) or set schedule.max_steps"
        rows.append(("the run", f"{unknown}; {_million_text(work)}"))
    else:
        tokens = f", {compact(work.tokens)} tokens ({work.tokens_from})" if work.tokens is not None else ""
        rows.append(("the run", f"{count_text(work.steps, 'step')}{tokens}"))
        rows.append(("time", _range_text(work.total_seconds, duration)))
        if work.saves:
            rows.append(("checkpoints", f"{work.saves}, training waits {seconds_text(work.save_seconds)} for each"))
        if work.snapshots:
            waits = f"training waits {seconds_text(work.snapshot_seconds)} for each"
            rows.append(("models kept", f"{work.snapshots} at most, {waits}"))
    if work.pflop_days is not None and work.gpu_hours is not None:
        hours = f"{number_text(work.gpu_hours)} {hours_name(plan)}"
        if work.cost is not None and work.gpu_hours:
            hours += f" at {money_text(work.cost / work.gpu_hours)} = {money_text(work.cost)}"
        rows.append(("in all", f"{number_text(work.pflop_days)} PFLOP-days, {hours}"))
    if work.energy_kwh is not None:
        emitted = f", {number_text(work.co2_kg)} kg of CO2" if work.co2_kg is not None else ""
        rows.append(("energy", f"{energy_text(work.energy_kwh)} at the devices' power limit{emitted}"))
    if work.chinchilla_tokens is not None:
        share = f"; this run has {work.tokens / work.chinchilla_tokens:.2%}" if work.tokens is not None else ""
        text = f"{compact(work.chinchilla_tokens)} tokens from scratch would be 20 per parameter{share}"
        rows.append(("20 P", text))
    return rows


def link_rows(plan: Plan) -> list[tuple[str, str]]:
    """Traffic of one rank per step."""
    return [(link.name, f"{bytes_text(link.bytes)}, {seconds_text(link.seconds)}") for link in plan.work.links]


def store_rows(plan: Plan) -> list[tuple[str, str]]:
    """Host RAM and drives."""
    unit = Unit.of(plan.host_memory)
    largest = sorted(plan.host.parts.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{name} {bytes_text(amount)}" for name, amount in largest[:4] if amount)
    owner = "a node" if plan.nodes > 1 else "the machine"
    owner = f"of {owner}" if not plan.host_limit else f"that {plan.host_limit} leaves"
    rows = [("RAM", f"{unit.text(plan.host.peak)} of {unit.text(plan.host_memory)} {unit.name} {owner}: {parts}")]
    disk = {"a checkpoint": plan.disk.checkpoint, "all that are kept": plan.disk.kept}
    disk |= {"models to choose from": plan.disk.snapshots, "the result": plan.disk.model}
    rows.append(("disk", ", ".join(f"{name} {bytes_text(amount)}" for name, amount in disk.items() if amount)))
    nvme = f"{bytes_text(plan.disk.nvme)} of each node while training"
    return [*rows, ("NVMe", nvme)] if plan.disk.nvme else rows


def labels(rows: Sequence[Plan | Refused]) -> list[str]:
    """What sets each of several plans apart: recipe, hardware, or the settings that not all of them share."""
    same_recipe = len({row.recipe for row in rows}) == 1
    same_hardware = len({row.hardware for row in rows}) == 1
    common = set(rows[0].overrides).intersection(*(row.overrides for row in rows)) if rows else set()
    texts = []
    for row in rows:
        parts = [] if same_recipe else [row.recipe]
        parts += [] if same_hardware else [f"hardware={row.hardware}"]
        parts += [override for override in row.overrides if override not in common]
        texts.append(" ".join(parts) or row.recipe)
    return texts


def comparison_figures(plan: Plan, unit: Unit) -> dict[str, str]:
    """What is compared of a plan, by its head in the table; costs only where a price is known, and of a million tokens
    where the length of the run is not."""
    work, memory = plan.work, plan.memory[0]
    figures = {
        unit.name: unit.text(memory.total.value),
        "reserved": unit.text(memory.reserved.value),
        "a step": seconds_text(work.step_seconds.value),
        "tokens/s": compact(work.tokens_per_second),
        "bound by": bound(plan),
        "MFU": f"{work.mfu:.1%}",
        "in all": "?" if work.total_seconds is None else duration(work.total_seconds.value),
    }
    if work.cost is not None:
        return figures | {"costs": money_text(work.cost)}
    million = work.cost_per_million_tokens
    return figures if million is None else figures | {"cost/1M": money_text(million)}


def bound(plan: Plan) -> str:
    """What most of a step goes by: `compute`, the link for which devices wait, or the `bubble` of a pipeline; `memory`
    of what does not fit."""
    work, links = plan.work, {link.name: link.seconds for link in plan.work.links}
    between = {name: seconds for name, seconds in links.items() if name not in _TO_HOST}
    beside = {name: seconds for name, seconds in links.items() if name in _TO_HOST}
    waits = {
        "compute": work.compute_seconds.value + work.contention_seconds,
        max(between, key=lambda name: between[name], default="network"): work.communication_seconds,
        max(beside, key=lambda name: beside[name], default="host"): work.offload_seconds,
        "bubble": work.bubble_seconds,
    }
    return "memory" if plan.fit.answer == "no" else max(waits, key=lambda name: waits[name])


def change_text(changes: Mapping[str, str]) -> str:
    """Changes as one types them."""
    return " ".join(f"{key}={value}" for key, value in changes.items())


def trade_texts(advice: Advice) -> list[str]:
    """What a change buys and costs; nothing of what it does not."""
    costs = f"costs: {advice.costs}" if advice.costs not in ("", "nothing") else ""
    return [text for text in (advice.buys, costs) if text not in ("", "nothing")]


def advice_figures(advice: Advice, unit: Unit) -> str:
    """Memory of a device and time of a step after a change."""
    return f"{unit.text(advice.total)} {unit.name}, {seconds_text(advice.step_seconds)} a step"


def shares_text(plan: Plan) -> str:
    """The shares of a step: `compute 82%, communication 18%`."""
    work = plan.work
    whole = work.step_seconds.value or 1.0
    shares = {
        "compute": work.compute_seconds.value,
        "communication": work.communication_seconds,
        "contention": work.contention_seconds,
        "offload": work.offload_seconds,
        "bubble": work.bubble_seconds,
    }
    return ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in shares.items() if seconds / whole >= 0.005)


def hours_name(plan: Plan) -> str:
    """What is paid for: hours of a device."""
    return "device-hours" if plan.hardware.startswith("cpu") else "GPU-hours"


def flops_text(flops: float) -> str:
    """FLOPs with a prefix: `2.14 PFLOP`."""
    for size, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= 0.9995 * size:
            return f"{flops / size:.3g} {prefix}FLOP"
    return f"{flops:.3g} FLOP"


def number_text(value: float) -> str:
    """Three digits, without an exponent: `0.0123`, `7.1`, `1,204`."""
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def money_text(cost: float) -> str:
    """An amount in the currency of the price."""
    if 0 < cost < 0.005:
        return "<0.01"
    return f"{cost:,.2f}" if cost < 9_999.5 else f"{cost:,.0f}"


def _range_text(value: Range, form: Callable[[float], str]) -> str:
    low, middle, high = form(value.low), form(value.value), form(value.high)
    return middle if low == high else f"{middle} ({low} to {high})"
