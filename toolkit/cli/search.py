"""`toolkit sweep … --trials N`: values that Optuna chooses from the results so far; worse runs are ended early.

What has been tried stands in `search.json` beside the runs, and what it came to in their folders; nothing else is kept.
Optuna's study is made anew from both whenever a question is asked of it, so a search goes on wherever it was stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout
from pydantic import BaseModel, ValidationError

from toolkit.cache import LOCK, locked
from toolkit.cli.jobs import Share, Trial, train
from toolkit.cli.restarts import STOPPED
from toolkit.cli.sweep import finished, named, swept_keys, trial, unlike_rows, write_page
from toolkit.common import UserError
from toolkit.files import write_json
from toolkit.recipe.hydra_habits import Interval, interval, swept_values
from toolkit.recipe.overrides import full_key
from toolkit.recipe.problem import warn
from toolkit.report.load import Record, number, read_run

if TYPE_CHECKING:
    import optuna

STATE = "search.json"
"""In the folder of a sweep."""
_STARTS = 4
"""So many runs are chosen at random, and none is ended early before as many are finished."""
_DIGITS = 3
"""Significant digits of chosen numbers: closer ones do not differ by more than chance."""
_ASKS = 50
"""So often at most the same values are chosen again before it is taken that there are no others."""


class Tried(BaseModel):
    """Values that were chosen, and how a run with them ended if its folder does not say it."""

    values: dict[str, str]
    ended: str = ""
    """Why it is left as it is: ended early, or refused."""


class _State(BaseModel):
    """`search.json`."""

    arguments: list[str]
    tried: list[Tried] = []


class Search:
    """The runs of one search.

    Args:
        arguments: `recipe=NAME key=value key=1,2 key=interval(1e-5,1e-3) …`.
        recipes: The user's recipes folder.
        count: How many runs it is to come to.
        prune: Whether runs that do worse than half of the others did after as many steps are ended early.
        say: Takes a line about each run.

    Raises:
        UserError: If there is nothing to choose or to choose by; if the folder holds another search.
    """

    def __init__(
        self, arguments: Sequence[str], recipes: str | None, count: int, prune: bool, say: Callable[[str], None]
    ) -> None:
        keys = swept_keys(arguments, lambda text: bool(interval(text) or swept_values(text)))
        if not keys:
            raise UserError(
                "no key has values to choose from", "write learning_rate=tag(log,interval(1e-5,1e-3)) method.r=8,16"
            )
        self._asked = {text.partition("=")[0]: text for text in arguments if text.partition("=")[0] in keys}
        self._kept = [text for text in arguments if text.partition("=")[0] not in keys]
        self._recipes, self._count, self._prune, self._say = recipes, count, prune, say
        self._known: dict[int, optuna.trial.FrozenTrial] = {}
        self._space = {key: _distribution(text) for key, text in self._asked.items()}
        # Any values do to see where the runs will be, and by what they are judged.
        some = {key: _text(space, space.to_external_repr(_some(space))) for key, space in self._space.items()}
        first = self._trial(0, some)
        recipe, self._folder = first.loaded.recipe, first.folder.parent
        seeds = {
            key: _text(space, space.to_external_repr(_another(space)))
            for key, space in self._space.items()
            if full_key(key) in ("seed", "data.eval_seed")
        }
        warn(unlike_rows([recipe, self._trial(0, some | seeds).loaded.recipe]))
        self._metric, self._seed = recipe.checkpoint.keep_best or "eval_loss", recipe.seed
        if not (recipe.data.eval_split or recipe.data.eval_sources):
            raise UserError("a search judges runs by held-out rows, and there are none", "set data.eval_split=0.1")
        if prune and not recipe.evaluation.every_steps:
            raise UserError(
                "--prune: this recipe evaluates at the end only, when nothing is left to save",
                "set evaluation.every_steps, to a tenth of the steps or so",
            )
        self._state = self._read([*arguments])

    def run(self, places: list[Share]) -> tuple[int, list[Path]]:
        """Trains until there are as many runs as asked for.

        Returns:
            An exit code, 0 if a run has finished and was judged; and the folders of all runs.

        Raises:
            UserError: Before anything is started, if this machine cannot train it, or another process searches here.
        """
        with self._alone():
            hopeless = self._hopeless if self._prune else None
            status = train(self._ask(places), places, self._began, self._ended, hopeless)
        if not (best := self._best()):
            return status or 1, self._folders()
        changes = _changes(self._state.tried[best[0]].values)
        self._say(f"best {self._metric} {best[1]:.4g}, of run {best[0] + 1}: {shlex.join(changes)}")
        return status, self._folders()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes from this search: each would write over what another one has chosen."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locked(self._folder / LOCK, timeout=0))
            except Timeout:
                raise UserError(
                    f"another process searches in {self._folder} right now",
                    "wait for it, or name another folder with output.dir",
                ) from None
            self._state = self._read(self._state.arguments)  # One that has ended since went on from what was read.
            yield

    def _ask(self, places: Sequence[Share]) -> Iterator[Trial]:
        """First what was begun before and is not finished, then what is chosen now."""
        for at, tried in enumerate(self._state.tried):
            if not tried.ended and not finished(begun := self._trial(at, tried.values)):
                yield begun
        while (at := len(self._state.tried)) < self._count:
            values = self._choose()
            if values is None:
                self._say(f"all {at} combinations have been tried")
                return
            self._state.tried.append(tried := Tried(values=values))
            try:
                chosen = self._trial(at, values)
                places[0].cluster(chosen.loaded)
            except UserError as error:
                if not at:
                    raise
                tried.ended = _REFUSED
                self._write()
                self._say(f"run {at + 1} of {self._count}: {shlex.join(_changes(values))} cannot be trained: {error}")
                continue
            self._write()
            yield chosen

    def _choose(self) -> dict[str, str] | None:
        """Values that were not tried yet; None if there seem to be none."""
        before = [tried.values for tried in self._state.tried]
        for turn in range(_ASKS):
            asked = self._study(turn).ask(self._space)
            values = {key: _text(space, asked.params[key]) for key, space in self._space.items()}
            if values not in before:
                return values
        return None

    def _study(self, turn: int = 0) -> optuna.Study:
        """All that is known, as Optuna wants it."""
        optuna = _optuna()
        # Runs that are not finished count as bad ones, so that those that run at once are not of the same values.
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_STARTS,
            constant_liar=True,
            seed=(self._seed + 1000 * len(self._state.tried) + turn) % 2**32,
        )
        pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTS)
        direction = "minimize" if self._metric == "eval_loss" else "maximize"
        study = optuna.create_study(direction=direction, sampler=sampler, pruner=pruner)
        for at in range(len(self._state.tried)):
            seen = self._known.get(at) or self._seen(at)
            if seen.value is not None or self._state.tried[at].ended:  # One that failed may be tried again.
                self._known[at] = seen
            study.add_trial(seen)
        return study

    def _seen(self, at: int) -> optuna.trial.FrozenTrial:
        """One run, as Optuna wants it."""
        optuna = _optuna()
        tried, state = self._state.tried[at], optuna.trial.TrialState
        record = read_run(self._place(at))
        curve = {row["step"]: value for row in record.evaluations if (value := self._finite(row)) is not None}
        curve.pop(0, None)
        value = self._value(record)
        ended = {_REFUSED: state.FAIL, _PRUNED: state.PRUNED}.get(tried.ended, state.RUNNING)
        if not tried.ended and record.manifest.status == "finished":
            ended = state.FAIL if value is None else state.COMPLETE
        elif not tried.ended and record.manifest.status == "failed":
            ended = state.FAIL
        return optuna.trial.create_trial(
            state=ended,
            value=value if ended == state.COMPLETE else None,
            params={key: _typed(self._space[key], text) for key, text in tried.values.items()},
            distributions=self._space,
            intermediate_values=curve,
        )

    def _hopeless(self, running: Trial) -> bool:
        """Whether it does worse than half of the others did after as many steps; it is noted before it is ended."""
        study, at = self._study(), self._at(running)
        if not study.pruner.prune(study, study.trials[at]):
            return False
        self._state.tried[at].ended = _PRUNED
        self._write()
        return True

    def _began(self, begun: Trial) -> None:
        self._say(f"run {self._at(begun) + 1} of {self._count}: {shlex.join(begun.changes)}")

    def _ended(self, run: Trial, status: int) -> None:
        at = self._at(run)
        what = f"run {at + 1} of {self._count}"
        best = self._best()
        rest = f"; best so far {best[1]:.4g}, of run {best[0] + 1}" if best else ""
        if self._state.tried[at].ended:
            self._say(f"{what}: worse than half of the others, ended early{rest}")
        elif status in STOPPED:
            self._say(f"stopped in {run.folder.name}: the same command goes on there")
        elif status:
            self._say(f"{what}: failed with exit code {status}, the others go on")
        elif (value := self._value(read_run(run.folder))) is not None:
            self._say(f"{what}: {self._metric} {value:.4g}{rest}")
        write_page(self._folders())

    def _best(self) -> tuple[int, float] | None:
        """Which run is the best of those that are finished, and its figure."""
        sign, values = 1 if self._metric == "eval_loss" else -1, list[tuple[float, int]]()
        for at, tried in enumerate(self._state.tried):
            record = read_run(self._place(at)) if not tried.ended else None
            if record and record.manifest.status == "finished" and (value := self._value(record)) is not None:
                values.append((sign * value, at))
        return (min(values)[1], sign * min(values)[0]) if values else None

    def _value(self, record: Record) -> float | None:
        return self._finite(record.result) if record.result else None

    def _finite(self, row: dict[str, Any]) -> float | None:
        value = number(row.get(self._metric))
        return value if value is not None and math.isfinite(value) else None

    def _trial(self, at: int, values: dict[str, str]) -> Trial:
        return trial(self._kept, _changes(values), _name(at, values), self._recipes)

    def _place(self, at: int) -> Path:
        """The folder of a run."""
        return self._folder / _name(at, self._state.tried[at].values)

    def _folders(self) -> list[Path]:
        return [self._place(at) for at, tried in enumerate(self._state.tried) if tried.ended != _REFUSED]

    def _at(self, run: Trial) -> int:
        return int(run.folder.name.partition("_")[0]) - 1

    def _read(self, arguments: list[str]) -> _State:
        file = self._folder / STATE
        if not file.exists():
            return _State(arguments=arguments)
        try:
            state = _State.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise UserError(f"{file} cannot be read: {error}", "name another folder with output.dir") from error
        if state.arguments != arguments:
            raise UserError(
                f"{self._folder} holds another search: {shlex.join(state.arguments)}",
                "write the same, or name another folder with output.dir",
            )
        return state

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / STATE, json.loads(self._state.model_dump_json()))


_PRUNED, _REFUSED = "pruned", "refused"


def _name(at: int, values: dict[str, str]) -> str:
    return f"{at + 1:03}_{named(_changes(values))}"


def _changes(values: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _distribution(text: str) -> Any:
    """What Optuna chooses from for `key=1,2` or `key=interval(1e-5,1e-3)`."""
    distributions = _optuna().distributions
    found = interval(text)
    if found is None:
        return distributions.CategoricalDistribution(tuple(dict.fromkeys(swept_values(text) or [])))
    _check(text, found)
    if found.whole:
        return distributions.IntDistribution(int(found.low), int(found.high), log=found.log)
    return distributions.FloatDistribution(found.low, found.high, log=found.log)


def _check(text: str, found: Interval) -> None:
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
        raise UserError(f"{text}: its first number is not below its last", "write interval(LOW,HIGH)")
    if found.log and found.low <= 0:
        raise UserError(
            f"{text}: the logarithm of {found.low:g} is no number", "begin above 0, or leave out tag(log, …)"
        )


def _some(space: Any) -> Any:
    """A value of a distribution, in Optuna's own terms."""
    return 0 if hasattr(space, "choices") else space.low


def _another(space: Any) -> Any:
    """Another one, if it has several."""
    return len(space.choices) - 1 if hasattr(space, "choices") else space.high


def _text(space: Any, value: Any) -> str:
    """A value as it is written on the command line, of as many digits as keep it in the interval."""
    if not isinstance(value, float):
        return str(value)
    texts = (f"{value:.{digits}g}" for digits in itertools.count(_DIGITS))
    return next(text for text in texts if space.low <= float(text) <= space.high)


def _typed(space: Any, text: str) -> Any:
    """A value as Optuna knows it; one that was written before may be rounded past an end."""
    if hasattr(space, "choices"):
        return text
    value = type(space.low)(text)
    return min(max(value, space.low), space.high)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("--trials needs Optuna, which is not installed", "pip install optuna") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
