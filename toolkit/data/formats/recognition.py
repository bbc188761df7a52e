"""Recognises the format of a source by its columns.

The columns decide and names are never guessed, because a wrong guess trains on the wrong text without a word; the error
proposes the mapping instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, listed, value_at
from toolkit.data.formats.conversion import RowFormat
from toolkit.data.formats.judged import ANSWERED, VERDICTS, verdict_column
from toolkit.data.formats.labelled import recognised
from toolkit.data.formats.messages import FLAGS, conversation_in, dicts, holds_messages
from toolkit.data.formats.other_forms import refuse_other_forms
from toolkit.data.formats.preferences import (
    preference_columns,
    refuse_repeated_prompts,
    refuse_worse_chosen,
    says_what_was_asked,
)
from toolkit.data.formats.prompts import PromptFormat, recognise_prompts
from toolkit.data.formats.proposal import check_named, proposal
from toolkit.data.formats.ratings import ANSWERS, SCORES, find_ratings
from toolkit.data.formats.related import form_of, related_columns
from toolkit.data.formats.task import Task
from toolkit.recipe.data import FORMATS, OF_OBJECTIVES, Source

_PLAIN = ("text", "segments", "tokens")
_PAIRS = ("prompt_completion", "alpaca", "source_target")
"""What encoder-decoders learn from."""


def recognise(rows: Iterable[Mapping[str, Any]], source: Source, task: Task) -> RowFormat | PromptFormat:
    """Finds the format of a source by the columns of its first rows.

    The `format` of the source (unless `auto`) decides, its `columns` rename.

    Raises:
        UserError: No format fits, several do, or it does not suit the task.
    """
    rows = list(rows)
    if task.reinforces:
        ignored = frozenset(source.ignore or ())
        return recognise_prompts(rows, source.columns or {}, ignored, source.path, task.has_chat_template, task.system)
    present = dict.fromkeys(name for row in rows for name in row)
    columns, ignored = dict(source.columns or {}), frozenset(source.ignore or ())
    flag = columns.pop("train", None)  # Of messages, not of rows.
    known = sorted({column for required, optional in FORMATS.values() for column in required + optional})
    known += [VERDICTS[0]] if task.judges else [ANSWERS[0], SCORES[0]] if task.pairs else []
    for expected in columns:
        if expected not in known:
            raise UserError(
                f"`data.columns` renames to `{expected}`, which no format has",
                f"write {{expected: column in the data}}, where expected is one of {', '.join([*known, 'train'])}",
            )
    check_named(columns, rows, source.path)
    if task.labelled:
        found = recognised(rows, source, task.labelled, columns, ignored, task.has_chat_template)
        return RowFormat(task.labelled, found, task, ignored)
    if task.relates:
        found = related_columns(rows, source, task.embedding, columns, ignored)
        return RowFormat(form_of(task.embedding), found, task, ignored)
    ratings = find_ratings(columns, rows, ignored) if task.pairs else None
    if ratings:
        rows = [ratings.pair(row, source.path) for row in rows]
        present = dict.fromkeys(name for row in rows for name in row)
    if task.pairs:
        first = {name: rows[0].get(name) for name in present if name not in ignored}
        refuse_worse_chosen(rows, columns, ignored, source.path)
        columns = preference_columns(columns, first, source.path)
        refuse_repeated_prompts(
            [{k: v for k, v in row.items() if k not in ignored} for row in rows], columns, source.path
        )
    rest, verdict = set(present) - set(columns.values()) - ignored, None
    if task.judges:
        verdict = verdict_column(columns, rows, rest, source.path)
        rest.discard(verdict)
    others = rest - {"role"} if source.format == "text" else rest
    if task.objective == "reward" and (margin := next((name for name in rest if name.lower() == "margin"), None)):
        raise UserError(
            f"data source `{source.path}`: `{margin}` is by how much each pair differs, and would be left unused",
            f"set preference.margin, which is one for all pairs, and 'data.ignore=[{margin}]'",
        )
    refuse_other_forms(rows[0], others, columns.values(), source.path, pairs=task.pairs)
    names = rest | set(columns)
    name = source.format
    if name is None or name == "auto":
        name = "preference" if task.pairs else _detect(names, set(columns), source, rows[0], present, task)
    if missing := [column for column in FORMATS[name][0] if column not in names]:
        raise UserError(
            f"data source `{source.path}` has no column `{missing[0]}`, which `data.format: {name}` needs; "
            f"its columns are {listed(present)}",
            f"map it with `data.columns: {{{missing[0]}: NAME}}` or choose another `data.format`",
        )
    if name in ("messages", "sharegpt") and not task.has_chat_template:
        raise UserError(
            f"data source `{source.path}` holds chats, but the tokenizer has no chat template",
            "set `model.chat_template` (`chatml` or a Jinja file), or train an instruct model that has one",
        )
    if source.format in (None, "auto"):
        _refuse_written_chats(rows, name, columns, source)
    _check_task(name, source, task)
    asks = name == "preference" and says_what_was_asked(rows, columns, ignored)
    if flag is None:
        return RowFormat(name, columns, task, ignored, verdict=verdict, ratings=ratings, asks=asks)
    places = [columns.get(column, column) for column in FORMATS[name][0]]
    if not any(flag in message for row in rows for place in places for message in dicts(value_at(row, place))):
        raise UserError(
            f"data source `{source.path}`: no message of the first rows has the field `{flag}` that `data.columns` "
            "names for `train`",
            "name the field of messages that says whether they are trained, or remove `train` from `data.columns`",
        )
    return RowFormat(name, columns, task, ignored, (*FLAGS, flag), verdict, ratings, asks=asks)


def _detect(
    names: set[str],
    mapped: set[str],
    source: Source,
    row: Mapping[str, Any],
    present: Iterable[str],
    task: Task,
) -> str:
    forms = {name: columns for name, columns in FORMATS.items() if name not in OF_OBJECTIVES}
    fits = [name for name, (required, _) in forms.items() if names.issuperset(required)]
    if mapped:
        fits = [name for name in fits if mapped <= set(FORMATS[name][0] + FORMATS[name][1])]
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise UserError(
            f"data source `{source.path}` fits several formats: {', '.join(fits)}; its columns are {listed(present)}",
            f"set `data.format` to one of {', '.join(fits)}",
        )
    may_be = [*(_PAIRS if task.objective == "seq2seq" else forms)]
    accepted = "; ".join(f"{name} ({', '.join(FORMATS[name][0])})" for name in may_be)
    raise UserError(
        f"data source `{source.path}` has the columns {listed(present)}, which no format fits",
        f"{proposal(names, row, task.has_chat_template, may_be)}; accepted are {accepted} "
        "(in a CSV the first line names the columns)",
    )


def _refuse_written_chats(
    rows: Iterable[Mapping[str, Any]], name: str, columns: Mapping[str, str], source: Source
) -> None:
    """Refuses texts that are conversations, all of them, as CSV files and dumps of data bases have them."""
    rows = list(rows)
    of_texts = {**dict.fromkeys(("text", "prompt_completion", "alpaca"), ()), "preference": ("prompt", "instruction")}
    for column in (*FORMATS[name][0], *of_texts[name]) if name in of_texts else ():
        actual = columns.get(column, column)
        texts = [text for row in rows if (text := value_at(row, actual)) not in EMPTY]
        mapping = {"messages": actual}
        if name == "alpaca":
            asked, answered = (columns.get(each, each) for each in FORMATS["alpaca"][0])
            mapping = {"prompt": asked, "completion": answered}
        changes = [isinstance(text, str) and conversation_in(text, mapping) for text in texts]
        # Prompts and answers may be messages, as JSON too.
        are_read = name in ("prompt_completion", "preference") and all(map(holds_messages, texts))
        if texts and all(changes) and not are_read:
            raise UserError(
                f"data source `{source.path}`: `{actual}` holds conversations, and would be trained as the plain text "
                "that they are written as",
                f"{changes[0]}, or set `data.format: {name}` if that is meant",
            )


def _check_task(name: str, source: Source, task: Task) -> None:
    """Refuses rows that the objective or `data.train_on` cannot use."""
    where = f"data source `{source.path}` ({name})"
    if name in ("labelled", "tagged"):
        of = "classification" if name == "labelled" else "token_classification"
        raise UserError(f"{where} does not fit `objective: {task.objective}`", f"set `objective: {of}` to learn labels")
    if name in ("related", "scored"):
        raise UserError(
            f"{where} does not fit `objective: {task.objective}`", "set `objective: embedding` to learn vectors"
        )
    if task.pairs != (name == "preference"):
        change = "it takes pairs, format preference" if task.pairs else "set `objective: dpo` to learn from pairs"
        raise UserError(f"{where} does not fit `objective: {task.objective}`", change)
    if task.judges and name not in ANSWERED:
        change = f"it takes answers, in format {', '.join(ANSWERED)}"
        raise UserError(f"{where} does not fit `objective: {task.objective}`", change)
    if task.pairs:
        return
    if task.objective == "seq2seq" and name not in _PAIRS:
        raise UserError(f"{where} does not fit `objective: seq2seq`", f"it takes {', '.join(_PAIRS)}")
    if task.objective != "seq2seq" and name == "source_target":
        raise UserError(
            f"{where} is for encoder-decoders, not for `objective: {task.objective}`",
            "set `objective: seq2seq`, or `data.columns: {prompt: source, completion: target}`",
        )
    is_chat = task.has_chat_template if name == "alpaca" else name in ("messages", "sharegpt")
    allowed: tuple[str, ...] = ("auto", "completion", "all")
    if is_chat:
        allowed = ("auto", "assistant", "last_assistant", "all")
    elif name in _PLAIN:
        allowed = ("auto",) if name == "tokens" else ("auto", "all")
    if task.objective == "sft" and not (is_chat if isinstance(task.train_on, list) else task.train_on in allowed):
        raise UserError(
            f"{where} has nothing that `data.train_on: {task.train_on}` could mean",
            f"set `data.train_on` to one of {', '.join(allowed)}",
        )
