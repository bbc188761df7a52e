"""Figures that `toolkit calibrate` measured on a device, put in the place of estimates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from toolkit.common import UserError, cache_dir
from toolkit.planner.hardware.detect import detect
from toolkit.planner.hardware.specs import Device, Dtype, Efficiency, Node, Rate
from toolkit.recipe import Section

Figure = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=3, max_length=3)]


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


def stored(device: Device) -> Calibration | None:
    """The figures measured on a device of this name, if there are any. CPUs differ: theirs must have the same title."""
    file = path_of(device.name)
    if not file.is_file():
        return None
    figures = load(file)
    return figures if device.kind != "cpu" or figures.title == device.title else None


def calibrated(device: Device, node: Node, figures: Calibration) -> tuple[Device, Node]:
    """The device and its node with measured figures.

    A figure above the peak raises the peak: that of a CPU or an unknown GPU was a guess.
    """
    rates: dict[str, Any] = {}
    peaks: dict[str, Any] = {"flops": dict(device.flops)}
    for dtype, figure in figures.matmul.items():
        # torch computes in dtypes that the hardware lacks, slowly.
        if dtype in device.flops:
            peaks["flops"][dtype], rate = _share(figure, device.flops[dtype])
            rates.setdefault("dtypes", dict(device.efficiency.dtypes))[dtype] = rate
    usual = ("fp32",) if device.kind == "cpu" else ("bf16", "fp16", "fp32")
    compute = next((dtype for dtype in usual if dtype in rates.get("dtypes", {})), None)
    if compute:
        rates["matmul"] = rates["dtypes"][compute]
    for dtype, figure in figures.attention.items():
        if dtype in device.flops:
            rates["attention"] = _share(figure, peaks["flops"][dtype])[1]
    if figures.bandwidth:
        peaks["bandwidth"], rates["bandwidth"] = _share(figures.bandwidth, device.bandwidth)
    if figures.optimizer:
        rates["optimizer"] = _share(figures.optimizer, peaks.get("bandwidth", device.bandwidth))[1]
    if figures.pcie:
        peaks["pcie"], rates["pcie"] = _share(figures.pcie, device.pcie)
    if figures.link and device.link:
        peaks["link"], rates["link"] = _share(figures.link, device.link)
    elif figures.link:
        rates["link"] = _share(figures.link, peaks.get("pcie", device.pcie))[1]
    if figures.network:
        network, rates["network"] = _share(figures.network, node.network)
        node = dataclasses.replace(node, network=network)
    if figures.launch_seconds:
        value, low, high = figures.launch_seconds
        rates["launch_seconds"] = Rate(value, low, high, measured=True)
    efficiency: Efficiency = dataclasses.replace(device.efficiency, **rates)
    return dataclasses.replace(device, efficiency=efficiency, **peaks), node


def _share(figure: list[float], peak: float) -> tuple[float, Rate]:
    peak = max(peak, figure[2])
    value, low, high = (each / peak for each in figure)
    return peak, Rate(value, low, high, measured=True)


def describe(path: Path) -> str:
    """Stored figures as a table: absolute, and as shares of this machine's peaks if they are its own."""
    figures = load(path)
    hardware = detect()
    shares: Efficiency | None = None
    if hardware.device.title == figures.title:
        shares = calibrated(hardware.device, hardware.node, figures)[0].efficiency
    rows: list[tuple[str, Figure, float, str, float | None]] = []
    for dtype, figure in figures.matmul.items():
        share = shares.dtypes.get(dtype) if shares else None
        rows.append((f"matrix products, {dtype}", figure, 1e12, "TFLOP/s", share.value if share else None))
    for dtype, figure in figures.attention.items():
        rows.append((f"attention, {dtype}", figure, 1e12, "TFLOP/s", shares.attention.value if shares else None))
    titles = {"bandwidth": "element-wise", "optimizer": "fused AdamW", "pcie": "host and device"}
    between = f"all-reduce of {figures.processes}"
    titles |= {"link": between, "network": f"{between}, over nodes"}
    for key, title in titles.items():
        if value := getattr(figures, key):
            rows.append((title, value, 1e9, "GB/s", getattr(shares, key).value if shares else None))
    if figures.launch_seconds:
        rows.append(("one operation", figures.launch_seconds, 1e-6, "microseconds", None))
    versions = ", ".join(f"{name} {version}" for name, version in figures.versions.items())
    lines = [f"{figures.title}, measured on {figures.date} ({versions})"]
    for title, (value, low, high), unit, name, part in rows:
        span = f"{low / unit:.4g} to {high / unit:.4g}"
        lines.append(
            f"  {title:<28} {value / unit:>8.4g} {name:<12} {span:<20} {f'{part:.0%} of peak' if part else ''}"
        )
    lines += [f"  {name:<28} not measured: {reason}" for name, reason in figures.skipped.items()]
    return "\n".join(line.rstrip() for line in lines)
