"""`toolkit evaluate RUN key=value …`: its keys, and where its results go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, ValidationError

from toolkit.cache import locked
from toolkit.cli.keys import Keys
from toolkit.common import UserError
from toolkit.files import not_writable, read_file, set_aside, write_json, write_json_lines
from toolkit.recipe.base import Place
from toolkit.report.evaluation import FILE, ROWS, Evaluation
from toolkit.report.run_page import write_report
from toolkit.train.evaluation.scoring import METRICS

_LOCK = f".{FILE}.lock"


def _listed(text: Any) -> Any:
    """`a,b` or `[a, b]` as a list."""
    return [each.strip() for each in text.strip("[] ").split(",") if each.strip()] if isinstance(text, str) else text


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"no metric `{unknown[0]}`; there are {', '.join(METRICS)}")
    return names


Names = Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]


class Questions(Keys):
    """The keys."""

    rows: PositiveInt = 64
    """Held-out rows that are answered, at most."""
    batch_size: PositiveInt = 8
    max_new_tokens: PositiveInt | None = None
    """Longest answer; by default that of the recipe's `evaluation`."""
    metrics: Annotated[Names, AfterValidator(_known)] | None = None
    """By default those that the rows' own answers suit."""
    before: bool = True
    """Whether the base model is asked too."""
    tasks: Names | None = None
    """Benchmarks of lm-eval, in place of the held-out rows."""
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    """Examples in each prompt; by default what the task says."""
    limit: PositiveInt | None = None
    """Samples of each task, at most."""
    include_path: Place | None = None
    """A folder with tasks of one's own."""
    chat_template: bool | None = None
    """Whether prompts are conversations; by default as the run's rows were."""

    def problems(self) -> list[str]:
        """Keys that would have no effect."""
        rows, tasks = {"rows", "metrics", "max_new_tokens"}, {"num_fewshot", "limit", "include_path", "chat_template"}
        ignored = sorted((rows if self.tasks else tasks) & self.model_fields_set)
        which = "with" if self.tasks else "without"
        return [f"{', '.join(ignored)} would be ignored {which} tasks"] if ignored else []


def evaluate(run: Path, asked: Questions) -> tuple[Evaluation, list[dict[str, Any]]]:
    """Evaluates a run. Returns what was found, and a row for each held-out row that was answered."""
    from toolkit.train.finished.export import refuse_head

    refuse_head(run)
    if reason := not_writable(run):
        raise UserError(f"what is found is kept in {run}, which cannot be written: {reason}", "copy the run folder")
    if asked.tasks:
        from toolkit.train.finished.benchmarks import evaluate_tasks

        new = evaluate_tasks(
            run,
            asked.tasks,
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            include_path=asked.include_path,
            batch_size=asked.batch_size,
            chat_template=asked.chat_template,
            before=asked.before,
        )
        return Evaluation(tasks=new), []
    from toolkit.train.finished.held_out import evaluate_held_out

    held_out, rows = evaluate_held_out(
        run, asked.rows, asked.batch_size, asked.max_new_tokens, asked.metrics, asked.before
    )
    return Evaluation(held_out=held_out), rows


def keep(run: Path, new: Evaluation, rows: list[dict[str, Any]]) -> Path:
    """Adds to what was found earlier, and writes the report of it all. What is there is read only now, and by one
    process at a time: others may have evaluated meanwhile.

    Returns:
        The report.
    """
    with locked(run / _LOCK):
        earlier, names = _noted(run / FILE), {task.name for task in new.tasks}
        if rows:
            write_json_lines(run / ROWS, rows)
        tasks = [*(task for task in earlier.tasks if task.name not in names), *new.tasks]
        write_json(run / FILE, Evaluation(held_out=new.held_out or earlier.held_out, tasks=tasks).model_dump())
        return write_report(run)


def _noted(file: Path) -> Evaluation:
    """What was found earlier; a file that cannot be read is set aside."""
    try:
        return Evaluation.model_validate_json(read_file(file))
    except FileNotFoundError:
        return Evaluation()
    except (OSError, ValidationError) as error:
        set_aside(file, error)
        return Evaluation()
