"""Reads the catalogue of devices, and the user's own."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from toolkit.planner.hardware.specs import Device, Efficiency, Node
from toolkit.recipe import Problem, RecipeError, Section, did_you_mean, origin_of, recipe_folders

USER_FILE = "_hardware.yaml"
"""In a recipes folder; the underscore keeps it out of the list of recipes."""
_SHIPPED = Path(__file__).with_name("catalogue.yaml")
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


@functools.cache
def document() -> dict[str, Any]:
    """The shipped file: `devices`, and `estimates` and a `node` for those that nothing is known about."""
    content: dict[str, Any] = yaml.safe_load(_SHIPPED.read_text(encoding="utf-8"))
    return content


@functools.cache
def shipped() -> dict[str, Device]:
    """The catalogue by name."""
    return _entries(document()["devices"], {})


def known(folder: Path | None) -> dict[str, Device]:
    """The catalogue and the user's devices, which win.

    Args:
        folder: The user's recipes folder, by default `recipes/`; its `_hardware.yaml` is read if there is one.

    Raises:
        RecipeError: With every problem of that file.
    """
    file = recipe_folders(folder)[0] / USER_FILE
    return shipped() | (_own(file) if file.is_file() else {})


def _own(file: Path) -> dict[str, Device]:
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


def _entries(raw: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Device]:
    entries: dict[str, Device] = {}
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
            entries[name] = Device.model_validate(_extended(name, raw, (), place) | {"_name": name})
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
            sections: dict[str, type[Section]] = {"": Device, "efficiency": Efficiency, "node": Node}
            fields = sections[".".join(location[:-1])].model_fields
            keys = [str(field.validation_alias or name) for name, field in fields.items()]
            allowed = ["like" if key == "_name" else key for key in keys]
            close = did_you_mean(location[-1], allowed)
            hint = f"did you mean `{close}`?" if close else ""
            return self.problem(key, "unknown key", str(finding["input"]), ", ".join(allowed), hint)
        if finding["type"] == "missing":
            return self.problem(key, "is required", hint=f"set {location[-1]}, or `like: NAME` of a known device")
        return self.problem(key, "is not valid", str(finding["input"]), finding["msg"].removeprefix("Value error, "))


def _extended(name: str, raw: Mapping[str, Any], around: tuple[str, ...], place: _Place) -> dict[str, Any]:
    """An entry over the one that it is like; `efficiency` and `node` are joined, all else is replaced."""
    own = dict(raw[name])
    parent = own.pop("like", None)
    if parent is None:
        # What almost nobody knows about a new device.
        return _joined({"efficiency": document()["estimates"]["generic"], "node": document()["node"]}, own)
    parent, devices = str(parent), document()["devices"]
    if isinstance(raw.get(parent), dict) and parent not in (*around, name):
        base = _extended(parent, raw, (*around, name), place)
    elif parent in devices and raw is not devices and parent not in around:
        base = _extended(parent, devices, (), place)
    else:
        candidates = list(dict.fromkeys([*(str(other) for other in raw if other != name), *devices]))
        close = did_you_mean(parent, candidates)
        what = "leads back to itself" if isinstance(raw.get(parent), dict) else "there is no such device"
        hint = f"did you mean `{close}`?" if close and parent not in raw else ""
        raise RecipeError("", [place.problem("like", what, parent, ", ".join(candidates), hint)])
    # What was measured on another device, or names it to its driver, says nothing about this one.
    dropped = () if parent == name else ("reported", "measured")
    return _joined({key: value for key, value in base.items() if key not in dropped}, own)


def _joined(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **own}
    for key in ("efficiency", "node"):
        if isinstance(base.get(key), dict) and isinstance(own.get(key), dict):
            both[key] = {**base[key], **own[key]}
    return both
