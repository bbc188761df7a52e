"""Answers that are judged one by one as good or bad: rows of any format that ends with an answer, with a column that
holds the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.common import UserError, brief
from toolkit.data.formats.columns import JUDGED, PAIRS_CALLED, by_lower_case, mapping_text, verdict
from toolkit.data.rows import Chat, Completion, Judged, Row

VERDICTS = ("label", "kto_tag")
"""Columns that say whether an answer is good: TRL's and LLaMA-Factory's."""
ANSWERED = ("prompt_completion", "alpaca", "messages", "sharegpt")
"""Formats whose rows end with an answer that can be judged."""


def verdict_column(columns: dict[str, str], rows: list[Mapping[str, Any]], names: Iterable[str], source: str) -> str:
    """The column that says whether an answer is good; takes it out of those that are mapped.

    Args:
        columns: Those that `data.columns` names.
        rows: The first ones.
        names: Columns that are neither mapped nor ignored.
        source: Path of the source.

    Raises:
        UserError: None does, several do, or rows hold pairs of answers.
    """
    if VERDICTS[0] in columns:
        return columns.pop(VERDICTS[0])
    spelt = by_lower_case(names)
    if len(found := [spelt[name] for name in VERDICTS if name in spelt]) == 1:
        return found[0]
    if found:
        raise UserError(
            f"data source `{source}`: {' and '.join(f'`{name}`' for name in found)} both say whether answers are good",
            f"set {mapping_text({VERDICTS[0]: found[0]})}",
        )
    if pair := next((pair for pair in PAIRS_CALLED if all(name in spelt for name in pair)), None):
        raise UserError(
            f"data source `{source}`: `{spelt[pair[0]]}` and `{spelt[pair[1]]}` are pairs of answers, and objective "
            "kto learns from answers that are judged one by one",
            "set objective=dpo, or write each answer as a row of its own, with true or false as its label",
        )
    likely = (name for name in JUDGED if name in spelt)
    saying = [spelt[name] for name in likely if all(verdict(row.get(spelt[name])) is not None for row in rows)]
    raise UserError(
        f"data source `{source}`: no column says whether an answer is good, as objective kto needs it",
        f"set {mapping_text({VERDICTS[0]: (saying or ['NAME'])[0]})} for a column of true and false",
    )


def judged(row: Row, value: Any, column: str, where: str) -> Judged:
    """A row with the verdict on its answer: on what follows the last message of a user, or a prompt.

    Raises:
        UserError: The column says neither good nor bad.
    """
    good = verdict(value)
    if good is None:
        raise UserError(
            f"{where}: `{column}` says neither good nor bad, but {brief(repr(value), 1, 80)}",
            "write true or false, or remove the row",
        )
    assert isinstance(row, Chat | Completion), "formats without an answer are refused"
    if isinstance(row, Chat):
        asked = max((n for n, message in enumerate(row.messages) if message["role"] == "user"), default=-1) + 1
        prompt = [message | {"train": False} for message in row.messages[:asked]]
        row = Chat([*prompt, *row.messages[asked:]], row.tools, row.template_kwargs)
    return Judged(row, good)
