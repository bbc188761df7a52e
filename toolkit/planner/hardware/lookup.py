"""`hardware=h200x8x4`: from words to a machine."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.common import UserError
from toolkit.planner.hardware.calibration import with_calibration
from toolkit.planner.hardware.catalogue import known
from toolkit.planner.hardware.detect import cpu, detect
from toolkit.planner.hardware.specs import Device, Hardware
from toolkit.recipe import did_you_mean

_FORM = "NAME, NAMExDEVICES or NAMExDEVICESxNODES, such as h200, h200x8, h200x8x4"


def find(text: str, folder: Path | None = None) -> Hardware:
    """Hardware by its words: a device, how many of them in each node, and how many nodes.

    Figures measured on such a device (`toolkit calibrate`) take the place of estimates.

    Args:
        text: `h200`, `h200x8`, `h200x8x4`; `cpu` and `cpux2` mean processes on this machine.
        folder: The user's recipes folder, whose `_hardware.yaml` may name more devices.

    Raises:
        UserError: If there is no such device, with the nearest name, or a node does not hold so many.
        RecipeError: If `_hardware.yaml` is wrong.
    """
    entries = known(folder)
    wanted = text.strip().lower()
    name, devices, nodes = _parts(wanted, [*entries, "cpu"]) or _not_found(wanted, entries)
    if devices < 1 or nodes < 1:
        raise UserError(f"hardware={text}: there must be one device and one node at least", f"write {_FORM}")
    if name == "cpu":
        if nodes > 1:
            raise UserError(f"hardware={text}: cpu means this machine, which is one node", f"write cpux{devices}")
        return with_calibration(cpu(devices))
    entry = entries[name]
    if devices > entry.node.devices:
        usual = entry.node.devices
        better = f"write {name}x{usual}x{-(-devices // usual)}, or give {name} larger nodes in _hardware.yaml"
        raise UserError(f"hardware={text}: a node holds {usual} {entry.title}, not {devices}", better)
    whole = name + (f"x{devices}" if devices > 1 or nodes > 1 else "") + (f"x{nodes}" if nodes > 1 else "")
    return with_calibration(Hardware(whole, entry, entry.node.part(devices / entry.node.devices), devices, nodes))


def this_machine(folder: Path | None = None) -> Hardware:
    """What a run here would use, with the figures that were measured on it.

    Raises:
        UserError: If this machine's GPUs differ.
    """
    return with_calibration(detect(folder))


def _parts(text: str, known_names: list[str]) -> tuple[str, int, int] | None:
    """Device, devices per node and nodes; the longest name counts, as names may end in digits or an x."""
    for name in sorted(known_names, key=len, reverse=True):
        match = re.fullmatch(rf"{re.escape(name)}(?:x(\d+))?(?:x(\d+))?", text)
        if match:
            return name, int(match[1] or 1), int(match[2] or 1)
    return None


def _not_found(text: str, entries: dict[str, Device]) -> tuple[str, int, int]:
    if "," in text:
        raise UserError(
            f"hardware={text}: one plan is for one machine", f"write --sweep hardware={text} for a plan of each"
        )
    turned = re.fullmatch(r"(\d+)\s*x?\s*([a-z].*)", text)
    if turned and _parts(f"{turned[2]}x{turned[1]}", [*entries, "cpu"]):
        raise UserError(f"hardware={text}: the number comes last", f"write {turned[2]}x{turned[1]}")
    # Four digits are a card's number, not a count: `rtx3050` is not 3050 of something.
    spelled = re.fullmatch(r"(.*?)((?:x\d{1,3}){0,2})(?:x\d{1,3})*", text)
    assert spelled
    word, counts = spelled.groups()
    own = "give another device its figures in recipes/_hardware.yaml, see docs/hardware.md"
    if close := _alike(word, [*entries, "cpu"]):
        raise UserError(f"hardware={text}: there is no such device", f"did you mean `{close}{counts}`? Or {own}")
    listed = ", ".join([*entries, "cpu"])
    raise UserError(f"hardware={text}: there is no such device", f"write {_FORM}; known are {listed}; or {own}")


def _alike(word: str, names: list[str]) -> str:
    """The device that a word may stand for, or an empty string; never one of another number, as an H100 is no V100."""
    if plain := next((name for name in names if _letters(name) == _letters(word)), ""):
        return plain
    parts = re.findall(r"[a-z]+|\d+", word)
    number = next((part for part in parts if part.isdigit()), "")
    if not number:
        return did_you_mean(word, [name for name in names if not re.search(r"\d", name)])
    before = "".join(parts[: parts.index(number)][-1:])
    candidates = []
    for name in names:
        series, first, *others = [*re.findall(r"[a-z]+|\d+", name), "", ""]
        belongs = not before or before.endswith(series) or series.endswith(before)
        if first == number and (belongs or did_you_mean(before, [series])):
            own = {series, first, *filter(None, others)}
            # `a100-80gb` is an a100, though `a100_40gb` is spelled more alike.
            candidates.append((len(own - set(parts)), -len(own & set(parts)), name))
    return min(candidates, default=(0, 0, ""))[2]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z\d]", "", name)
