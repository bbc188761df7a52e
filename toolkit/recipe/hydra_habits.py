"""What Hydra users are used to typing, answered with the equivalent here.

Recipes are written and overridden as Hydra's configs are, but composed without its application: each process of a
launch would make a folder of its own. So its flags and its own settings are named here, one line each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException

from toolkit.common import UserError
from toolkit.recipe.dotted import split_outside

_SHOW = "`toolkit show {rest}` prints the recipe with the origin of every value"
_FLAGS = {
    ("--multirun", "-m"): ("one command trains one recipe", "{sweep}"),
    ("--cfg", "-c", "--resolve"): ("a command of its own shows a recipe", _SHOW),
    ("--info", "-i"): ("a command of its own shows a recipe", f"{_SHOW}, `toolkit ls` lists the recipes"),
    ("--package", "-p"): ("a recipe is shown as a whole", _SHOW),
    ("--config-name", "-cn"): ("a recipe is named by a key", "write recipe=NAME; `toolkit ls` lists them"),
    ("--config-dir", "-cd", "--config-path", "-cp"): ("recipes have a folder of their own", "write --recipes DIR"),
    ("--hydra-help",): ("Hydra's own settings are no part of a recipe", "`toolkit show --help` lists all keys"),
    ("--run", "-r"): ("it is what the command does anyway", "leave it out"),
    ("--shell-completion", "-sc"): ("there is none", "`toolkit init` writes a schema that completes keys in editors"),
    ("--experimental-rerun",): ("a run folder starts again by its command", "it stands in runs/NAME/manifest.json"),
}
_SETTINGS = {
    "run": "output.dir=DIR and output.name=NAME say where a run is written",
    "sweep": "`toolkit sweep recipe=NAME KEY=V1,V2` trains with each value, in folders beside each other",
    "job": "output.name=NAME names a run; processes stay in the folder where they were started",
    "verbose": "write --verbose",
    "launcher": "`toolkit launch --slurm` writes a batch script",
    "sweeper": "`toolkit plan … --sweep KEY=V1,V2` compares values before anything is trained, `toolkit sweep` after",
    "searchpath": "write --recipes DIR",
}


_IN_ANY_ORDER = re.compile(r"(?:choice|shuffle)\((.*)\)")
_FUNCTION = re.compile(r"(?:sort|tag|int|float|str|bool|json_str)\(")
UNSUPPORTED = "glob(…) and interval(…) stand for no list of values"


class Usage(UserError):
    """The command line is not one of ours."""

    exit_code = 2


def refuse_flags(arguments: Sequence[str]) -> None:
    """Refuses the flags of a Hydra application.

    Raises:
        Usage: With the command that does the same.
    """
    flags = {flag: texts for names, texts in _FLAGS.items() for flag in names}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in flags:
            what, change = flags[name]
            rest = [text for text in arguments if "=" in text and not text.startswith("-")] or ["recipe=NAME"]
            raise Usage(f"{name}: {what}", change.format(rest=shlex.join(rest), sweep=_sweep(rest)))


def _sweep(arguments: Sequence[str]) -> str:
    """The commands that plan and train every combination of the values that are separated by commas."""
    swept = [(argument.partition("=")[0], values) for argument in arguments if (values := swept_values(argument))]
    if endless := [argument for argument in arguments if swept_values(argument) is None]:
        return f"{' '.join(endless)}: write the values, as in seq_len=128,256; {UNSUPPORTED}"
    if not swept:
        return "`toolkit sweep recipe=NAME KEY=V1,V2` trains with each value"
    keys = [key for key, _ in swept]
    kept = [shlex.quote(text) for text in arguments if text.partition("=")[0] not in keys]
    sweeps = " ".join(f"--sweep {shlex.quote(key + '=' + ','.join(values))}" for key, values in swept)
    return f"plan each: `toolkit plan {' '.join([*kept, sweeps])}`; train each: `toolkit sweep {shlex.join(arguments)}`"


def swept_values(argument: str) -> list[str] | None:
    """The values of `key=1,2`, `key=range(1,5)` and `key=choice(a,b)`; none for one value, None if they have no end."""
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:
        return []
    if not parsed.is_sweep_override():
        return []
    if parsed.is_range_sweep():
        return list(parsed.sweep_string_iterator())
    text = argument.partition("=")[2]
    if not parsed.is_choice_sweep() or text.startswith("glob("):
        return None
    # As they were typed: Hydra would make 0.001 of 1e-3.
    while len(values := split_outside(text, ",")) == 1 and (inner := _IN_ANY_ORDER.fullmatch(text)):
        text = inner[1].strip()
    if len(values) == 1 and _FUNCTION.match(text):
        return list(parsed.sweep_string_iterator())
    return [value.strip() for value in values]


@dataclass(frozen=True)
class Interval:
    """`key=interval(a,b)`: any number between two, both included.

    Args:
        whole: Whether it is a whole number, as of `int(interval(1,8))`.
        log: Whether each factor counts alike, as in `tag(log, interval(1e-5,1e-3))`, instead of each difference.
    """

    low: float
    high: float
    whole: bool
    log: bool


def interval(argument: str) -> Interval | None:
    """The interval that an argument gives; None if it gives something else."""
    try:
        parsed = OverridesParser.create().parse_override(argument)
    except HydraException:
        return None
    value = parsed.value()
    if not isinstance(value, IntervalSweep) or value.start is None or value.end is None:
        return None
    whole = isinstance(value.start, int) and isinstance(value.end, int)
    return Interval(value.start, value.end, whole, "log" in value.tags)


def hint(argument: str) -> str:
    """What to write in the place of an argument that Hydra would take and a recipe does not; empty for all others."""
    key, _, value = argument.lstrip("+~").partition("=")
    if key.startswith(("hydra.", "hydra/")) or key == "hydra":
        return _SETTINGS.get(re.split(r"[./]", f"{key}.")[1], "leave it out")
    if argument.startswith("~") and value:
        return f"write ~{key}, whatever its value"
    group, at, _ = key.removeprefix("/").partition("@")
    if at or key.startswith("/"):
        return f"write {group}={value}: an option belongs to the section that its group is named after"
    return ""
