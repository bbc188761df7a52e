"""`toolkit evaluate RUN key=value …`: what may be asked, and where what was found goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError

from toolkit.common import UserError
from toolkit.files import read_file, set_aside, write_json
from toolkit.recipe.spelling import did_you_mean
from toolkit.report.evaluation import FILE, Evaluation
from toolkit.train.scoring import METRICS


def _listed(text: Any) -> Any:
    """`a,b` or `[a, b]` as a list."""
    return [each.strip() for each in text.strip("[] ").split(",") if each.strip()] if isinstance(text, str) else text


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"no metric `{unknown[0]}`; there are {', '.join(METRICS)}")
    return names


Names = Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]


class Questions(BaseModel):
    """The keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    include_path: str | None = None
    """A folder with tasks of one's own."""
    chat_template: bool | None = None
    """Whether prompts are conversations; by default as the run's rows were."""


_OF_ROWS = {"rows", "metrics", "max_new_tokens"}
_OF_TASKS = {"num_fewshot", "limit", "include_path", "chat_template"}


def questions(arguments: Sequence[str]) -> Questions:
    """Reads `key=value` arguments.

    Raises:
        UserError: With every problem.
    """
    problems, values = [], dict[str, str]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            problems.append(f"`{argument}` is not key=value")
        elif key not in Questions.model_fields:
            close = did_you_mean(key, Questions.model_fields)
            problems.append(f"unknown key `{key}`" + (f", did you mean `{close}`?" if close else ""))
        else:
            values[key] = value
    try:
        found = Questions.model_validate(values)
    except ValidationError as error:
        for each in error.errors():
            key = str(each["loc"][0])
            problems.append(f"{key}={values[key]}: {each['msg'].removeprefix('Value error, ')}")
        found = Questions()
    without_use = (_OF_ROWS if found.tasks else _OF_TASKS) & found.model_fields_set
    if without_use:
        problems.append(
            f"{', '.join(sorted(without_use))} would be ignored {'with' if found.tasks else 'without'} tasks"
        )
    if problems:
        keys = ", ".join(Questions.model_fields)
        raise UserError("\n".join(problems), f"the keys are {keys}: docs/evaluate.md")
    return found


def evaluate(run: Path, asked: Questions) -> Evaluation:
    """Evaluates a run, and notes what was found beside what was found before."""
    found = _noted(run / FILE)
    if asked.tasks:
        from toolkit.train.benchmarks import evaluate_tasks

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
        names = {task.name for task in new}
        kept = [task for task in found.tasks if task.name not in names]
        found, shown = found.model_copy(update={"tasks": [*kept, *new]}), Evaluation(tasks=new)
    else:
        from toolkit.train.held_out import evaluate_held_out

        held_out = evaluate_held_out(
            run, asked.rows, asked.batch_size, asked.max_new_tokens, asked.metrics, asked.before
        )
        found, shown = found.model_copy(update={"held_out": held_out}), Evaluation(held_out=held_out)
    write_json(run / FILE, found.model_dump())
    return shown


def _noted(file: Path) -> Evaluation:
    """What was found earlier; a file that cannot be read is set aside."""
    try:
        return Evaluation.model_validate_json(read_file(file))
    except FileNotFoundError:
        return Evaluation()
    except (OSError, ValidationError):
        set_aside(file)
        return Evaluation()
