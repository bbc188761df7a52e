"""`toolkit sweep`: a recipe trained with every combination of some values, one after the other.

Each is an ordinary run in a folder named by its values, beside the others. So the same command goes on where it was
stopped: runs that are finished are left as they are, one that was cut off goes on from its checkpoint, and
`toolkit compare` reads them all. Hydra's own sweepers would start each with Hydra's application around it.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cli import launch
from toolkit.cli.restarts import Group
from toolkit.common import UserError, printable
from toolkit.files import write_atomically
from toolkit.recipe import Loaded, split_arguments
from toolkit.recipe.hydra_habits import UNSUPPORTED, swept_values
from toolkit.recipe.rules import load_checked
from toolkit.report.comparison import Comparison, compare, comparison_page
from toolkit.report.load import read_manifest
from toolkit.train.run_folder import claim

PAGE = "comparison.html"
"""In the folder of a sweep."""


@dataclass(frozen=True)
class Trial:
    """One combination of values.

    Args:
        loaded: The recipe with them.
        arguments: What starts it: `recipe=NAME key=value …`.
    """

    loaded: Loaded
    arguments: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.loaded.run_folder


def trials(arguments: Sequence[str], recipes: str | None = None) -> list[Trial]:
    """Every combination of the values that are separated by commas, the last key changing fastest.

    Args:
        arguments: `recipe=NAME key=value key=1,2 other=range(1,4) …`.
        recipes: The user's recipes folder.

    Raises:
        UserError: If nothing is swept or a list has no end; with the reason of each combination that cannot be trained.
    """
    swept = [(text.partition("=")[0], [*values]) for text in arguments if (values := swept_values(text))]
    if endless := [text for text in arguments if swept_values(text) is None]:
        raise UserError(
            f"{' '.join(endless)}: {UNSUPPORTED}", "write the values: learning_rate=1e-4,2e-4, or seed=range(1,5)"
        )
    if not swept:
        raise UserError("no key has several values", "separate them by commas: learning_rate=1e-4,2e-4 method.r=8,16")
    keys = [key for key, _ in swept]
    written = [text.partition("=")[0] for text in arguments]
    if twice := [key for key in keys if written.count(key) > 1]:
        raise UserError(f"{twice[0]} is written twice", "write all of its values once")
    kept = [text for text, key in zip(arguments, written, strict=True) if key not in keys]
    short = [key.rpartition(".")[2] for key in keys]
    found, wrong = list[Trial](), list[str]()
    for combined in itertools.product(*(dict.fromkeys(each) for _, each in swept)):
        named = zip(short if len(set(short)) == len(short) else keys, combined, strict=True)
        name = "_".join(f"{key}-{_in_name(value)}" for key, value in named)
        changes = [f"{key}={value}" for key, value in zip(keys, combined, strict=True)]
        try:
            found.append(_trial([*kept, *changes], name, recipes))
        except UserError as error:
            wrong.append(f"{shlex.join(changes)}: {error}")
    if wrong:
        raise UserError("\n".join(wrong), "leave these values out: nothing was started")
    folders = [each.folder for each in found]
    if alike := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(f"several combinations would be trained in {alike[0]}", "write values that differ in letters")
    return found


def _trial(arguments: Sequence[str], name: str, recipes: str | None) -> Trial:
    base = load_checked(*split_arguments(arguments), recipes)
    launch.check_resume(base.recipe, "a sweep that was stopped")
    folder = base.run_folder.with_name(f"{base.run_folder.name}-sweep")
    places = [f"output.dir={_quoted(str(folder))}", f"output.name={_quoted(name)}"]
    started = [text for text in arguments if not text.startswith(("output.dir=", "output.name="))] + places
    loaded = load_checked(*split_arguments(started), recipes)
    return Trial(loaded, (*started, *(["--recipes", recipes] if recipes else [])))


def _in_name(value: str) -> str:
    """A value in the name of a folder."""
    return re.sub(r"[^\w.+-]+", "-", value).strip("-")


def _quoted(text: str) -> str:
    """A text that Hydra's grammar reads as it is."""
    return text if re.fullmatch(r"[\w./+-]*[A-Za-z_/][\w./+-]*", text) else "'" + text.replace("'", "\\'") + "'"


def finished(trial: Trial) -> bool:
    """Whether it has been trained, and its model is as it was written.

    Raises:
        UserError: If its folder holds a run of another recipe.
    """
    if read_manifest(trial.folder)[0].status != "finished":
        return False
    return claim(trial.loaded, 1).finished


def run(found: Sequence[Trial], gpus: int | None, say: Callable[[str], None]) -> int:
    """Trains what is not finished yet; a run that fails does not stop the others. Returns 0 if all are finished.

    Args:
        gpus: Of this machine; None for all.
        say: Takes a line about each run.

    Raises:
        UserError: Before anything is started, if a run's folder holds another run or this machine cannot train it.
    """
    done = {each.folder: finished(each) for each in found}
    clusters = {}
    for each in found:
        if not done[each.folder]:
            clusters[each.folder] = launch.cluster(each.loaded.recipe, gpus, 1, None, None, None, False)
            launch.check(each.loaded.recipe, clusters[each.folder])
    group, page = Group(), found[0].folder.parent / PAGE
    for number, each in enumerate(found, start=1):
        what = f"run {number} of {len(found)}, {each.folder.name}"
        if done[each.folder]:
            say(f"{what}: finished before")
            continue
        say(what)
        cluster = clusters[each.folder]
        status = group.run(launch.line(cluster, None, each.arguments), launch.variables(cluster), 0)
        if group.stopped or status in (130, 143):
            say(f"stopped in {each.folder.name}: the same command goes on there")
            return status or 130
        if status:
            say(f"{what}: failed with exit code {status}, the others go on")
        if compared := compare_all(found):
            write_atomically(page, comparison_page(compared))
    failed = [each.folder.name for each in found if read_manifest(each.folder)[0].status != "finished"]
    if failed:
        say(f"{len(failed)} of {len(found)} runs failed: {', '.join(failed)}; the same command tries them again")
    return 1 if failed else 0


def compare_all(found: Sequence[Trial]) -> Comparison | None:
    """Those runs that have begun; None where it is none."""
    begun = [each.folder for each in found if (each.folder / "recipe.yaml").is_file()]
    return compare(begun) if begun else None


def told(text: str) -> None:
    """Says a line between the runs, which write to the same terminal."""
    print(printable(f"\n[sweep] {text}"), file=sys.stderr, flush=True)


def shell_lines(found: Sequence[Trial]) -> list[str]:
    """What would be started, as one would type it."""
    return [shlex.join(["toolkit", "launch", *each.arguments]) for each in found]
