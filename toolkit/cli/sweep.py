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
from pathlib import Path

from toolkit.cli import launch
from toolkit.cli.jobs import Share, Trial, train
from toolkit.cli.restarts import STOPPED
from toolkit.common import UserError, printable
from toolkit.files import write_atomically
from toolkit.recipe import Recipe, split_arguments
from toolkit.recipe.hydra_habits import UNSUPPORTED, swept_values
from toolkit.recipe.overrides import full_key
from toolkit.recipe.problem import Problem, warn
from toolkit.recipe.rules import load_checked
from toolkit.report.comparison import Comparison, compare, comparison_page
from toolkit.report.load import read_manifest
from toolkit.train.continued import as_begun
from toolkit.train.run_folder import claim

PAGE = "comparison.html"
"""In the folder of a sweep."""


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
            f"{' '.join(endless)}: {UNSUPPORTED}",
            "write the values: learning_rate=1e-4,2e-4, or have them chosen with --trials 20",
        )
    if not swept:
        raise UserError("no key has several values", "separate them by commas: learning_rate=1e-4,2e-4 method.r=8,16")
    keys = swept_keys(arguments, lambda text: bool(swept_values(text)))
    kept = [text for text in arguments if text.partition("=")[0] not in keys]
    found, wrong = list[Trial](), list[str]()
    for combined in itertools.product(*(dict.fromkeys(each) for _, each in swept)):
        changes = [f"{key}={value}" for key, value in zip(keys, combined, strict=True)]
        try:
            found.append(trial(kept, changes, named(changes), recipes))
        except UserError as error:
            wrong.append(f"{shlex.join(changes)}: {error}")
    if wrong:
        raise UserError("\n".join(wrong), "leave these values out: nothing was started")
    folders = [each.folder for each in found]
    if alike := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(f"several combinations would be trained in {alike[0]}", "write values that differ in letters")
    _refuse_twins(found)
    warn(unlike_rows([each.loaded.recipe for each in found]))
    return found


def _refuse_twins(found: Sequence[Trial]) -> None:
    """Refuses combinations that train the same: of values written in two ways, or of one that overrules another."""
    first: dict[str, Trial] = {}
    for each in found:
        recipe = each.loaded.recipe.model_dump_json(exclude={"output"})
        if (twin := first.setdefault(recipe, each)) is not each:
            raise UserError(
                f"{shlex.join(twin.changes)} and {shlex.join(each.changes)} are the same training",
                "write each value once: nothing was started",
            )


def unlike_rows(recipes: Sequence[Recipe]) -> list[Problem]:
    """A warning if the seeds of runs change which rows are held out: their losses would not be comparable."""
    drawn = [each for each in recipes if each.data.held_out_by_seed]
    if len({each.seed if each.data.eval_seed is None else each.data.eval_seed for each in drawn}) < 2:
        return []
    what = "each seed holds out other rows, so losses of runs with different seeds cannot be compared"
    return [Problem("data.eval_seed", what, hint="set data.eval_seed=1, then all hold out the same rows")]


def swept_keys(arguments: Sequence[str], sweeps: Callable[[str], bool]) -> list[str]:
    """The keys of the arguments that stand for several values.

    Raises:
        UserError: If one of them is written twice, also where once without its section.
    """
    keys = [text.partition("=")[0] for text in arguments if sweeps(text)]
    written = [full_key(text.partition("=")[0]) for text in arguments]
    if twice := [key for key in map(full_key, keys) if written.count(key) > 1]:
        raise UserError(f"{twice[0]} is written twice", "write all of its values once")
    return keys


def trial(kept: Sequence[str], changes: Sequence[str], name: str, recipes: str | None) -> Trial:
    """One combination, in a folder of this name among the others.

    Args:
        kept: What holds for all of them.
        changes: Its own values.
        recipes: The user's recipes folder.

    Raises:
        UserError: If it cannot be trained.
    """
    arguments = [*kept, *changes]
    base = load_checked(*split_arguments(arguments), recipes)
    launch.check_resume(base.recipe, "a sweep that was stopped")
    folder = base.run_folder.with_name(f"{base.run_folder.name}-sweep")
    places = [f"output.dir={_quoted(str(folder))}", f"output.name={_quoted(name)}"]
    started = [text for text in arguments if not text.startswith(("output.dir=", "output.name="))] + places
    loaded = load_checked(*split_arguments(started), recipes)
    return Trial(loaded, (*started, *(["--recipes", recipes] if recipes else [])), tuple(changes))


def named(changes: Sequence[str]) -> str:
    """The name of a folder for values, `key=value` each."""
    pairs = [text.partition("=")[::2] for text in changes]
    short = [key.rpartition(".")[2] for key, _ in pairs]
    keys = short if len(set(short)) == len(short) else [key for key, _ in pairs]
    values = (re.sub(r"[^\w.+-]+", "-", value).strip("-") for _, value in pairs)
    return "_".join(f"{key}-{value}" for key, value in zip(keys, values, strict=True))


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
    return claim(as_begun(trial.loaded), 1).finished


def run(found: Sequence[Trial], places: list[Share], say: Callable[[str], None]) -> int:
    """Trains what is not finished yet; a run that fails does not stop the others. Returns 0 if all are finished.

    Args:
        say: Takes a line about each run.

    Raises:
        UserError: Before anything is started, if a run's folder holds another run or this machine cannot train it.
    """
    done = dict.fromkeys(each.folder for each in found if finished(each))  # In their order.
    what = {each.folder: f"run {at} of {len(found)}, {each.folder.name}" for at, each in enumerate(found, start=1)}
    left = [each for each in found if each.folder not in done]
    for each in left:
        places[0].cluster(each.loaded)
    for folder in done:
        say(f"{what[folder]}: finished before")

    def ended(each: Trial, status: int) -> None:
        if status in STOPPED:
            say(f"stopped in {each.folder.name}: the same command goes on there")
        elif status:
            say(f"{what[each.folder]}: failed with exit code {status}, the others go on")
        write_page([each.folder for each in found])

    if status := train(iter(left), places, lambda each: say(what[each.folder]), ended):
        return status
    failed = [each.folder.name for each in found if read_manifest(each.folder)[0].status != "finished"]
    if failed:
        say(f"{len(failed)} of {len(found)} runs failed: {', '.join(failed)}; the same command tries them again")
    return 1 if failed else 0


def nodes(found: Sequence[Trial], gpus: int | None, count: int) -> launch.Cluster:
    """So many of Slurm's machines for each run.

    Raises:
        UserError: If one cannot be trained on them.
    """
    clusters = [launch.cluster(each.loaded.recipe, gpus, count, None, None, None, True) for each in found]
    for each, cluster in zip(found, clusters, strict=True):
        launch.check(each.loaded.recipe, cluster)
    return clusters[0]


def write_page(folders: Sequence[Path]) -> None:
    """The page that compares those runs of a sweep that have begun."""
    if compared := compare_all(folders):
        write_atomically(folders[0].parent / PAGE, comparison_page(compared))


def compare_all(folders: Sequence[Path]) -> Comparison | None:
    """Those runs that have begun; None where it is none."""
    begun = [each for each in folders if (each / "recipe.yaml").is_file()]
    return compare(begun) if begun else None


def told(text: str) -> None:
    """Says a line between the runs, which write to the same terminal."""
    print(printable(f"\n[sweep] {text}"), file=sys.stderr, flush=True)


def shell_lines(found: Sequence[Trial]) -> list[str]:
    """What would be started, as one would type it."""
    return [shlex.join(["toolkit", "launch", *each.arguments]) for each in found]
