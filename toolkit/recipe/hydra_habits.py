"""What Hydra's users type, answered with what does it here.

Recipes are written and overridden as Hydra's configs are, but composed without its application: each process of a
launch would make a folder of its own. So its flags and its own settings are named here, one line each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from toolkit.common import UserError

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
    "sweep": "output.dir=DIR and output.name=NAME say where a run is written",
    "job": "output.name=NAME names a run; processes stay in the folder where they were started",
    "verbose": "write --verbose",
    "launcher": "`toolkit launch --slurm` writes a batch script",
    "sweeper": "`toolkit plan … --sweep KEY=V1,V2` compares values before anything is trained",
    "searchpath": "write --recipes DIR",
}


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
            raise Usage(f"{name}: {what}", change.format(rest=shlex.join(rest), sweep=_loop(rest)))


def _loop(arguments: Sequence[str]) -> str:
    """A line of shell that trains every combination of the values that are separated by commas."""
    swept = [argument.partition("=")[::2] for argument in arguments if re.fullmatch(r"[^=]+=[^\[{'\"(]*,.*", argument)]
    if not swept:
        return "`toolkit plan recipe=NAME --sweep KEY=V1,V2` plans each value; a loop of the shell trains each"
    variables = {key: re.sub(r"\W", "_", key) for key, _ in swept}
    loops = [f"for {variables[key]} in {' '.join(map(shlex.quote, values.split(',')))}; do" for key, values in swept]
    kept = [shlex.quote(text) for text in arguments if text.partition("=")[0] not in variables]
    changes = [f"{key}=${variable}" for key, variable in variables.items()]
    name = "-".join(f"${variable}" for variable in variables.values())
    line = " ".join([*loops, "toolkit launch", *kept, *changes, f'output.name="{name}"' + "; done" * len(loops)])
    sweeps = " ".join(f"--sweep {key}={values}" for key, values in swept)
    return f"plan each: `toolkit plan {' '.join([*kept, sweeps])}`; train each: `{line}`"


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
