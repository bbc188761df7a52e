"""Figures that `toolkit calibrate` measured on a device, put in the place of estimates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from toolkit.common import UserError, cache_dir
from toolkit.planner.hardware.detect import detect
from toolkit.planner.hardware.specs import Dtype, Figure, Hardware, Rate
from toolkit.recipe import Section


class Calibration(Section):
    """One measurement. Figures are `[value, low, high]`, absolute: FLOP/s, bytes/s, seconds."""

    device: str
    """Name in the catalogue, or made of what the driver reports."""
    title: str
    """As the driver reports it."""
    processes: int
    """Processes that measured `link` and `network`."""
    date: str
    """Day."""
    versions: dict[str, str]
    """Of torch, CUDA and the driver."""
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
    """Bus bandwidth of an all-reduce over nodes, bytes/s."""
    launch_seconds: Figure | None = None
    """Python and dispatch of one operation, seconds."""
    skipped: dict[str, str] = Field(default_factory=dict)
    """What could not be measured, and why."""


def path_of(device: str) -> Path:
    """Where a device's figures are kept."""
    return cache_dir() / "calibration" / f"{device}.yaml"


def load(path: Path) -> Calibration:
    """Reads figures.

    Raises:
        UserError: If the file is broken.
    """
    try:
        return Calibration.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise UserError(f"{path}: not a calibration: {error}", "delete it, or run `toolkit calibrate` again") from error


def with_calibration(hardware: Hardware) -> Hardware:
    """With the figures measured on a device of this name, if there are any. CPUs differ: theirs must have its title."""
    file = path_of(hardware.device.name)
    if not file.is_file():
        return hardware
    figures = load(file)
    if hardware.device.kind == "cpu" and figures.title != hardware.device.title:
        return hardware
    return calibrated(hardware, figures)


def calibrated(hardware: Hardware, figures: Calibration) -> Hardware:
    """The hardware with measured figures.

    A figure above the peak raises the peak: that of a CPU or an unknown GPU was a guess.
    """
    device, node = hardware.device, hardware.node
    flops, rates = dict(device.flops), dict[str, Rate]()
    for dtype, figure in figures.matmul.items():
        # torch computes in dtypes that the hardware lacks, slowly.
        if dtype in flops:
            flops[dtype], rates[dtype] = _share(figure, flops[dtype])
    usual = ("fp32",) if device.kind == "cpu" else ("bf16", "fp16", "fp32")
    compute = next((dtype for dtype in usual if dtype in rates), None)
    if compute:
        rates["matmul"] = rates[compute]
    for dtype, figure in figures.attention.items():
        if dtype in flops:
            _, rates["attention"] = _share(figure, flops[dtype])
    peaks = {"bandwidth": device.bandwidth, "pcie": device.pcie, "network": node.network}
    if device.link:
        peaks["link"] = device.link
    for name in ("bandwidth", "optimizer", "pcie", "link", "network"):
        # Others are shares of a peak that is not theirs: without a link devices use PCIe.
        of = name if name in peaks else {"optimizer": "bandwidth", "link": "pcie"}[name]
        if figure := getattr(figures, name):
            peak, rates[name] = _share(figure, peaks[of])
            if name == of:
                peaks[name] = peak
    if figures.launch_seconds:
        value, low, high = figures.launch_seconds
        rates["launch_seconds"] = Rate(value, low, high, measured=True)
    node = node.model_copy(update={"network": peaks.pop("network")})
    efficiency = device.efficiency.model_copy(update=rates)
    device = device.model_copy(update={"flops": flops, "efficiency": efficiency, **peaks})
    return dataclasses.replace(hardware, device=device, node=node)


def _share(figure: list[float], peak: float) -> tuple[float, Rate]:
    peak = max(peak, figure[2])
    value, low, high = (each / peak for each in figure)
    return peak, Rate(value, low, high, measured=True)


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
    versions = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    lines = [f"{figures.title}, measured on {figures.date} ({versions})"]
    for title, (value, low, high), unit, name, share in rows:
        span = f"{low / unit:.4g} to {high / unit:.4g}"
        reached = f"{share.value:.0%} of peak" if share else ""
        lines.append(f"  {title:<28} {value / unit:>8.4g} {name:<12} {span:<20} {reached}")
    lines += [f"  {name:<28} not measured: {reason}" for name, reason in figures.skipped.items()]
    return "\n".join(line.rstrip() for line in lines)
