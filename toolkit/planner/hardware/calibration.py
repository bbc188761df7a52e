"""Figures that `toolkit calibrate` measured on a device, put in the place of estimates."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from toolkit import own_process
from toolkit.cache import cache_dir, find, locked, writable
from toolkit.common import UserError
from toolkit.files import set_aside
from toolkit.planner.hardware.detect import detect
from toolkit.planner.hardware.specs import Device, Dtype, Efficiency, Figure, Hardware, Rate
from toolkit.planner.trace.store import apart
from toolkit.recipe import Section

_log = logging.getLogger("toolkit.planner")
_LOOK = 0.3
"""Seconds for which others are looked at."""
_OTHERS = 0.15
"""Share of all processors that others may use meanwhile."""
_PATIENCE = 600
"""Seconds from a measurement beside others until it is seen whether they have ended."""
_UNSURE = 0.15
"""Half of the range of what is measured in layers: their model is not the one that is planned."""

LAYERS_VERSION = 2
"""Of what `layer` measures; figures of an earlier one are measured again. 2 has adapters that
compute as in training, and wide layers, where 1 had PEFT's adapters and one large product alone; 0 measured all
products alone, and had fp32 under bf16 layers."""
FIGURES_VERSION = 1
"""Of how other figures are counted. 0 counted the forward pass of attention 3.5 times, where plans divide 3 by what is
measured, and in `network` what stays within a node."""
_COUNTED_ANEW = ("attention", "network")
"""Figures that mean something else since this version."""
_UNMEASURED = "this CPU could not be measured, so times are estimates: %s"


class Layers(Section):
    """What a CPU reaches in a model's layers, in one dtype; see `layer`."""

    matmul: PositiveFloat
    """FLOP/s of matrix products as large as `step.REFERENCE`."""
    half: PositiveFloat
    """See `Efficiency.half`."""
    bandwidth: PositiveFloat
    """Bytes/s read and written by all other operations."""
    launch_seconds: PositiveFloat
    """Seconds of one counted operation, with the views, casts and autograd nodes around it."""
    attention: dict[str, dict[PositiveInt, PositiveFloat]]
    """FLOP/s of attention, forward and backward, by backend and tokens of a row; a mask counts for nothing. Of
    `DOCUMENTS` by tokens of a document, a causal mask counts half."""


class Calibration(Section):
    """One measurement. Figures are `[value, low, high]`, absolute: FLOP/s, bytes/s, seconds."""

    device: str
    """Name in the catalogue, or made of what the driver reports."""
    title: str
    """The device's name as the driver reports it."""
    processes: int
    """Processes that measured `link` and `network`."""
    date: str
    """Day."""
    versions: dict[str, str]
    """Versions of torch, CUDA and the driver."""
    matmul: dict[Dtype, Figure] = Field(default_factory=dict)
    """FLOP/s of matrix products, by dtype: of layers of three widths."""
    attention: dict[Dtype, Figure] = Field(default_factory=dict)
    """FLOP/s of fused attention, forward and backward; a causal mask counts half."""
    bandwidth: Figure | None = None
    """Bytes/s read and written by element-wise operations."""
    optimizer: Figure | None = None
    """Bytes/s read and written by a fused AdamW step."""
    pcie: Figure | None = None
    """Bytes/s from pinned host memory and back."""
    link: Figure | None = None
    """Bus bandwidth of an all-reduce in one node, bytes/s."""
    network: Figure | None = None
    """What each node sends in an all-reduce over nodes, bytes/s."""
    launch_seconds: Figure | None = None
    """Python and dispatch of one operation, seconds."""
    layers: dict[Dtype, Layers] = Field(default_factory=dict)
    """Figures of a CPU, in place of products, attention, bandwidth and launches."""
    layers_version: int = 0
    """Which `LAYERS_VERSION` measured them."""
    figures_version: int = 0
    """Which `FIGURES_VERSION` counted the others."""
    busy: bool = False
    """Whether other programs ran meanwhile."""
    skipped: dict[str, str] = Field(default_factory=dict)
    """What could not be measured, and why."""

    @property
    def again(self) -> bool:
        """Whether to measure a CPU once more: what other programs slowed down, and what earlier versions, or several
        processes, did not measure."""
        return self.layers_version < LAYERS_VERSION or (self.busy and not busy())


def path_of(device: Device) -> Path:
    """Where a device's figures are kept; those of a CPU by its model and number of cores."""
    name = re.sub(r"\W+", "-", f"cpu {device.title}".lower()) if device.kind == "cpu" else device.name
    return cache_dir() / "calibration" / f"{name}.yaml"


def busy() -> bool:
    """Whether other programs keep processors of this machine now; its load would count what has just ended."""
    before = used()
    time.sleep(_LOOK)
    return was_busy(before)


def used() -> tuple[float, float, float]:
    """Seconds of processors that all programs of this machine and this process have used so far, and the time."""
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    return sum(times) - getattr(times, "guest", 0.0) - idle, time.process_time(), time.perf_counter()


def was_busy(before: tuple[float, float, float]) -> bool:
    """Whether other programs have kept processors since `used` was asked. What this process has done itself, such as
    importing beside a plan, does not count."""
    import psutil

    every, own, seconds = (now - then for now, then in zip(used(), before, strict=True))
    return every - own > _OTHERS * seconds * (psutil.cpu_count() or 1)


def load(path: Path) -> Calibration:
    """Reads figures, without those that an earlier version counted otherwise.

    Raises:
        UserError: If the file is broken.
    """
    try:
        found = Calibration.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{path}: not a calibration: {error}", "delete it, or run `toolkit calibrate` again") from error
    if found.figures_version < FIGURES_VERSION and (stale := [key for key in _COUNTED_ANEW if getattr(found, key)]):
        _warn_of_stale(path, " and ".join(stale))
        found = Calibration.model_validate(found.model_dump(exclude={*stale}))
    return found


@functools.cache
def _warn_of_stale(path: Path, names: str) -> None:
    """Once; a plan may read the file often."""
    _log.warning(
        "%s: %s, as an earlier version counted them, are not used; calibrate again, for the network on all nodes (see "
        "docs/hardware.md)",
        path,
        names,
    )


def with_calibration(hardware: Hardware) -> Hardware:
    """With the figures measured on a device of this name, if there are any."""
    if hardware.device.kind == "cpu":
        found = known(hardware.device)
    else:
        file = find(path_of(hardware.device))
        found = load(file) if file.is_file() else None
    return calibrated(hardware, found) if found else hardware


def known(device: Device) -> Calibration | None:
    """What was measured on a device of this name. A broken file is set aside, where measuring again is a matter of
    seconds, or what the user has asked for."""
    file = find(path_of(device))
    if not file.is_file():
        return None
    try:
        return load(file)
    except UserError as error:
        with contextlib.suppress(OSError):
            set_aside(file, error.__cause__)
        _log.warning("%s; it is not used", error.what.splitlines()[0])
        return None


def once_measured(hardware: Hardware, before: Callable[[], object] | None = None) -> Hardware:
    """With figures of this CPU, which are measured now if they never were, or not well enough.

    That takes about half a minute in a process of its own, once for a CPU; a GPU is not measured unasked.

    Args:
        before: What to try first, if anything is to be measured.
    """
    if hardware.device.kind != "cpu":
        return hardware
    found, file = known(hardware.device), find(path_of(hardware.device))
    began = file.stat().st_mtime_ns if found else None
    # Beside programs that pause and go on it would be done twice in a launch, and again by the next one. A clock that
    # was set back shows what was written as of the future.
    waits = began and found and found.busy and abs(time.time() - began / 1e9) < _PATIENCE
    if waits or (found and not found.again):
        return hardware
    if before:
        before()
    try:
        with locked(Path(f"{writable(path_of(hardware.device))}.lock")):
            # Another process may have measured while this one waited.
            if not file.is_file() or file.stat().st_mtime_ns == began:
                _measure()
    except OSError as error:
        _log.warning(_UNMEASURED, error)
    return with_calibration(hardware)


def _measure() -> None:
    _log.info("measuring this CPU, for plans: about half a minute, once")
    command = own_process.command("toolkit", "calibrate", "--seconds", "5")
    done = subprocess.run(command, env=apart(), capture_output=True, text=True)
    if done.returncode:
        _log.warning(_UNMEASURED, (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])


def calibrated(hardware: Hardware, figures: Calibration) -> Hardware:
    """The hardware with measured figures.

    A figure above the peak raises the peak: that of a CPU or an unknown GPU was a guess.
    """
    device, node = hardware.device, hardware.node
    flops, rates = dict(device.flops), dict[str, Rate]()
    # Processes on a CPU share what one was measured with.
    part = 1 / hardware.devices_per_node if device.kind == "cpu" else 1.0
    for dtype, figure in figures.matmul.items():
        # torch computes in dtypes that the hardware lacks, slowly.
        if dtype in flops:
            flops[dtype], rates[dtype] = _share(figure, flops[dtype])
    compute = next((dtype for dtype in ("bf16", "fp16", "fp32") if dtype in rates), None)
    if compute:
        rates["matmul"] = rates[compute]
    for dtype, figure in figures.attention.items():
        if dtype in flops:
            rates["attention"] = _part(figure, flops[dtype])
    moving = {dtype: _range(part * each.bandwidth) for dtype, each in figures.layers.items()}
    bandwidth = max([device.bandwidth, *(high for _, _, high in moving.values())])
    peaks = {"bandwidth": bandwidth, "pcie": device.pcie, "network": node.network}
    if device.link:
        peaks["link"] = device.link
    for name in ("bandwidth", "optimizer", "pcie", "link", "network"):
        if not (figure := getattr(figures, name)):
            continue
        figure = [part * each for each in figure]
        if name in peaks:
            peaks[name], rates[name] = _share(figure, peaks[name])
        else:
            # Others are shares of a peak that is not theirs, and may pass it: without a link devices use PCIe.
            rates[name] = _part(figure, peaks[{"optimizer": "bandwidth", "link": "pcie"}[name]])
    if figures.launch_seconds:
        value, low, high = figures.launch_seconds
        rates["launch_seconds"] = Rate(value, low, high, measured=True)
    node = node.model_copy(update={"network": peaks.pop("network")})
    efficiency = device.efficiency.model_copy(update=rates)
    by_dtype: dict[str, Efficiency] = {}
    for dtype, each in figures.layers.items():
        flops[dtype], matmul = _share(_range(part * each.matmul), flops[dtype])
        by_dtype[dtype] = efficiency.model_copy(
            update={
                "matmul": matmul,
                dtype: None,
                "bandwidth": _share(moving[dtype], peaks["bandwidth"])[1],
                "half": _rate(each.half),
                "launch_seconds": _rate(each.launch_seconds),
            }
        )
    attention: dict[str, dict[str, dict[int, float]]] = {
        dtype: {name: {length: part * rate for length, rate in rates.items()} for name, rates in each.attention.items()}
        for dtype, each in figures.layers.items()
    }
    efficiency = by_dtype.get("fp32", efficiency)
    device = device.model_copy(update={"flops": flops, "efficiency": efficiency, **peaks})
    return dataclasses.replace(hardware, device=device, node=node, by_dtype=by_dtype, attention=attention)


def _range(value: float) -> list[float]:
    return [value, value * (1 - _UNSURE), value * (1 + _UNSURE)]


def _rate(value: float) -> Rate:
    low, high = value * (1 - _UNSURE), value * (1 + _UNSURE)
    return Rate(value, low, high, measured=True)


def _share(figure: list[float], peak: float) -> tuple[float, Rate]:
    peak = max(peak, figure[2])
    return peak, _part(figure, peak)


def _part(figure: list[float], peak: float) -> Rate:
    value, low, high = (each / peak for each in figure)
    return Rate(value, low, high, measured=True)


def describe(path: Path) -> str:
    """Stored figures as a table: absolute, and as shares of this machine's peaks if they are its own."""
    figures = load(path)
    hardware = detect()
    own = hardware.device.title == figures.title
    shares = calibrated(hardware, figures).device.efficiency if own else None
    rows: list[tuple[str, Figure, float, str, Rate | None]] = []
    for dtype, figure in figures.matmul.items():
        rows.append((f"matrix products, {dtype}", figure, 1e12, "TFLOP/s", getattr(shares, dtype, None)))
    for dtype, figure in figures.attention.items():
        rows.append((f"attention, {dtype}", figure, 1e12, "TFLOP/s", getattr(shares, "attention", None)))
    titles = {"bandwidth": "element-wise", "optimizer": "fused AdamW", "pcie": "host and device"}
    between = f"all-reduce of {figures.processes}"
    titles |= {"link": between, "network": f"{between}, over nodes"}
    for key, title in titles.items():
        if value := getattr(figures, key):
            rows.append((title, value, 1e9, "GB/s", getattr(shares, key, None)))
    if figures.launch_seconds:
        rows.append(("one operation", figures.launch_seconds, 1e-6, "microseconds", None))
    for dtype, each in figures.layers.items():
        rows.append((f"products in layers, {dtype}", _range(each.matmul), 1e9, "GFLOP/s", None))
        rows.append((f"element-wise, {dtype}", _range(each.bandwidth), 1e9, "GB/s", None))
        rows.append((f"one operation, {dtype}", _range(each.launch_seconds), 1e-6, "microseconds", None))
        for name, rates in each.attention.items():
            spread = [rate for _, rate in sorted(rates.items())]
            figure = [spread[len(spread) // 2], min(spread), max(spread)]
            rows.append((f"attention {name}, {dtype}", figure, 1e9, "GFLOP/s", None))
    versions = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    lines = [f"{figures.title}, measured on {figures.date} ({versions})"]
    for title, (value, low, high), unit, name, share in rows:
        span = f"{low / unit:.4g} to {high / unit:.4g}"
        reached = f"{share.value:.0%} of peak" if share else ""
        lines.append(f"  {title:<28} {value / unit:>8.4g} {name:<12} {span:<20} {reached}")
    lines += [f"  {name:<28} not measured: {reason}" for name, reason in figures.skipped.items()]
    return "\n".join(line.rstrip() for line in lines)
