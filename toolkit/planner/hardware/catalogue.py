"""Reads the catalogue of devices, and the user's own, into what a plan computes with."""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError

from toolkit.planner.hardware.specs import Device, Dtype, Efficiency, Kind, Node, Rate
from toolkit.recipe import Problem, RecipeError, Section, did_you_mean, origin_of

USER_FILE = "_hardware.yaml"
"""In a recipes folder; the underscore keeps it out of the list of recipes."""
_SHIPPED = Path(__file__).with_name("catalogue.yaml")
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_GIB, _GB, _TERA = 2**30, 1e9, 1e12


def _in_order(rate: list[float]) -> list[float]:
    value, low, high = rate
    if not low <= value <= high:
        raise ValueError("value, low, high, in which the value lies between the others")
    return rate


def _with_fp32(peaks: dict[Dtype, float]) -> dict[Dtype, float]:
    if "fp32" not in peaks:
        raise ValueError("fp32 among them, at whose peak runs what has none of its own")
    return peaks


Positive = Annotated[float, Field(gt=0)]
Range = Annotated[list[Positive], Field(min_length=3, max_length=3), AfterValidator(_in_order)]


class Rates(Section):
    """Shares of the peaks as `[value, low, high]`, and the seconds of a launch; see `specs.Efficiency`."""

    matmul: Range
    attention: Range
    bandwidth: Range
    optimizer: Range
    link: Range
    pcie: Range
    network: Range
    launch_seconds: Range
    fp8: Range | None = None
    """Matrix products in fp8 with their casts, where that differs from `matmul`."""

    def efficiency(self, measured: Container[str] = (), *, width: float = 1) -> Efficiency:
        """The same for a plan.

        Args:
            measured: Which of them are not estimates.
            width: By what factor ranges are wider at either end.
        """
        rates: dict[str, Any] = {
            key: Rate(value, low / width, high * width, key in measured)
            for key, (value, low, high) in self.model_dump(exclude_none=True).items()
        }
        fp8 = rates.pop("fp8", None)
        return Efficiency(**rates, dtypes={"fp8": fp8} if fp8 else {})


class NodeEntry(Section):
    """A usual machine for a device."""

    devices: Annotated[int, Field(gt=0)]
    """Devices in one."""
    ram_gib: Positive
    """Host RAM."""
    cores: Annotated[int, Field(gt=0)]
    """Physical cores."""
    network_gbit_s: Positive
    """To other nodes, all adapters together."""
    nvme_gb_s: Positive
    """Local drives together."""
    nvme_tb: Positive | None = None
    """Their size."""
    source: str = ""
    """Where the figures come from."""


class DeviceEntry(Section):
    """A device. With `like` only what differs needs to be given."""

    title: str
    """For people."""
    kind: Kind = "cuda"
    """cuda, rocm or cpu."""
    reported: list[str] = Field(default_factory=list)
    """Names that the driver reports."""
    memory_gib: Positive
    """What torch reports as total."""
    tflops: Annotated[dict[Dtype, Positive], AfterValidator(_with_fp32)]
    """Dense peaks that accumulate in fp32; that of fp32 must be there."""
    bandwidth_gb_s: Positive
    """Of its memory."""
    link_gb_s: Positive | None = None
    """NVLink or xGMI, one direction."""
    pcie_gb_s: Positive
    """To the host, one direction."""
    capability: str | None = None
    """CUDA's."""
    efficiency: Rates
    """What is reached."""
    measured: list[str] = Field(default_factory=list)
    """Which efficiencies were measured."""
    sources: list[str] = Field(default_factory=list)
    """Where the peaks come from."""
    node: NodeEntry
    """A usual machine."""

    def device(self, name: str) -> Device:
        """In bytes and seconds."""
        return Device(
            name=name,
            title=self.title,
            kind=self.kind,
            memory=int(self.memory_gib * _GIB),
            flops={dtype: peak * _TERA for dtype, peak in self.tflops.items()},
            bandwidth=self.bandwidth_gb_s * _GB,
            link=self.link_gb_s * _GB if self.link_gb_s else None,
            pcie=self.pcie_gb_s * _GB,
            capability=self.capability,
            sources=tuple(self.sources),
            efficiency=self.efficiency.efficiency(self.measured),
        )

    def machine(self, devices: int) -> Node:
        """The part of a usual machine that comes with some of its devices."""
        whole = Node(
            ram=int(self.node.ram_gib * _GIB),
            cores=self.node.cores,
            network=self.node.network_gbit_s * _GB / 8,
            nvme=self.node.nvme_gb_s * _GB,
            nvme_bytes=int(self.node.nvme_tb * _TERA) if self.node.nvme_tb else None,
        )
        return whole.part(min(1.0, devices / self.node.devices))


@functools.cache
def shipped() -> dict[str, DeviceEntry]:
    """The catalogue by name."""
    return _entries(_document()["devices"], {})


@functools.cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(_SHIPPED.read_text(encoding="utf-8"))
    return document


def estimated_rates(kind: Literal["generic", "cpu"]) -> Rates:
    """What is assumed to be reached of a device that nothing is known about."""
    return Rates.model_validate(_document()["estimates"][kind])


def estimated_node() -> NodeEntry:
    """What is assumed of a machine that nothing is known about."""
    return NodeEntry.model_validate(_document()["node"])


def known(folder: Path | None) -> dict[str, DeviceEntry]:
    """The catalogue and the user's devices, which win.

    Args:
        folder: The user's recipes folder; its `_hardware.yaml` is read if there is one.

    Raises:
        RecipeError: With every problem of that file.
    """
    file = (folder or Path("recipes")) / USER_FILE
    return shipped() | (_own(file) if file.is_file() else {})


def _own(file: Path) -> dict[str, DeviceEntry]:
    hint = "write `devices:` and below it a name with `like: h100` and what differs"
    try:
        text = file.read_text(encoding="utf-8-sig")
        origins = dict(_lines(yaml.compose(text, Loader=yaml.SafeLoader), file))
        content = yaml.safe_load(text) or {}
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        what = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        raise RecipeError("", [Problem(USER_FILE, what, where, hint=hint)]) from error
    if not isinstance(content, dict) or set(content) - {"devices"} or not isinstance(content.get("devices", {}), dict):
        raise RecipeError("", [Problem(USER_FILE, "holds something else than devices", str(file), "", "devices", hint)])
    return _entries(content.get("devices") or {}, origins)


def _lines(node: yaml.Node | None, file: Path, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key to `file:line`."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        below = f"{path}.{key.value}" if path else str(key.value)
        yield below, f"{file}:{key.start_mark.line + 1}"
        yield from _lines(value, file, below)


def _entries(raw: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, DeviceEntry]:
    entries: dict[str, DeviceEntry] = {}
    problems: list[Problem] = []
    for name, own in raw.items():
        place = _Place(f"devices.{name}", origins)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "cpu":
            allowed = "small letters, digits, _ - and . ; not cpu, which is this machine"
            problems.append(place.problem("", "is not a device's name", str(name), allowed))
            continue
        if not isinstance(own, dict):
            problems.append(place.problem("", "must be a mapping of keys", hint="start with `like: h100`"))
            continue
        try:
            entries[name] = DeviceEntry.model_validate(_extended(name, raw, (), place))
        except RecipeError as error:
            problems += error.problems
        except ValidationError as error:
            problems += [place.translated(finding) for finding in error.errors()]
    if problems:
        raise RecipeError("", problems)
    return entries


@dataclass
class _Place:
    """An entry of a file, for messages."""

    path: str
    origins: Mapping[str, str]

    def problem(self, key: str, what: str, given: str = "", allowed: str = "", hint: str = "") -> Problem:
        path = f"{self.path}.{key}" if key else self.path
        return Problem(path, what, origin_of(path, self.origins), given, allowed, hint)

    def translated(self, finding: Any) -> Problem:
        location = [str(part) for part in finding["loc"] if part != "[key]"]
        key = ".".join(location)
        if finding["type"] == "extra_forbidden":
            allowed = _keys(location[:-1])
            close = did_you_mean(location[-1], allowed)
            hint = f"did you mean `{close}`?" if close else ""
            return self.problem(key, "unknown key", str(finding["input"]), ", ".join(allowed), hint)
        if finding["type"] == "missing":
            return self.problem(key, "is required", hint=f"set {location[-1]}, or `like: NAME` of a known device")
        return self.problem(key, "is not valid", str(finding["input"]), finding["msg"].removeprefix("Value error, "))


def _keys(location: list[str]) -> list[str]:
    kinds: dict[str, type[Section]] = {"efficiency": Rates, "node": NodeEntry}
    if location:
        return list(kinds[location[0]].model_fields) if location[0] in kinds else []
    return ["like", *DeviceEntry.model_fields]


def _extended(name: str, raw: Mapping[str, Any], around: tuple[str, ...], place: _Place) -> dict[str, Any]:
    """An entry over the one that it is like; `efficiency` and `node` are joined, all else is replaced."""
    own = dict(raw[name])
    parent = own.pop("like", None)
    if parent is None:
        # What almost nobody knows about a new device.
        return _joined({"efficiency": _document()["estimates"]["generic"], "node": _document()["node"]}, own)
    devices = _document()["devices"]
    if parent in raw and parent not in (*around, name):
        base = _extended(parent, raw, (*around, name), place)
    elif parent in devices and raw is not devices and parent not in around:
        base = _extended(parent, devices, (), place)
    else:
        candidates = list(dict.fromkeys([*(other for other in raw if other != name), *devices]))
        close = did_you_mean(str(parent), candidates)
        what = "leads back to itself" if parent in raw else "there is no such device"
        hint = f"did you mean `{close}`?" if close and parent not in raw else ""
        raise RecipeError("", [place.problem("like", what, str(parent), ", ".join(candidates), hint)])
    # What was measured on another device, or names it to its driver, says nothing about this one.
    dropped = () if parent == name else ("reported", "measured")
    return _joined({key: value for key, value in base.items() if key not in dropped}, own)


def _joined(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **own}
    for key in ("efficiency", "node"):
        if isinstance(base.get(key), dict) and isinstance(own.get(key), dict):
            both[key] = {**base[key], **own[key]}
    return both
