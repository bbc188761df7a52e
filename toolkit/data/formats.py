"""Recognises the format of a source by its columns, and converts its rows to a normal form.

The columns decide and names are never guessed, because a wrong guess trains on the wrong text without a word; the error
proposes the mapping instead. (Data sets' `cast` or a Pydantic model per format would name a column, not `file:line`.) A
missing column or a wrong type is an error that names the row. Empty fields are not: such a row has nothing to train on,
which the audit counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.common import UserError
from toolkit.data.columns import (
    EMPTY,
    OFTEN_CALLED,
    STEPS,
    mapping_text,
    parsed,
    refuse_meaning,
    refuse_other_forms,
    value_at,
)
from toolkit.data.judged import ANSWERED, VERDICTS, judged, verdict_column
from toolkit.data.labelled import read_labelled, read_tagged, recognised
from toolkit.data.messages import FLAGS, conversation_in, dicts, holds_messages, read_messages, read_tools
from toolkit.data.preferences import preference_columns, read_preference
from toolkit.data.pretokenised import read_segments, read_tokens, refuse_unread_lists
from toolkit.data.prompts import PromptFormat, is_empty_prompt, recognise_prompts
from toolkit.data.proposal import are_texts, check_named, listed, proposal
from toolkit.data.ratings import ANSWERS, SCORES, Ratings, find_ratings
from toolkit.data.related import form_of, is_empty_related, read_related, related_columns
from toolkit.data.rows import (
    IGNORE,
    Chat,
    Completion,
    Judged,
    Labelled,
    Pair,
    Preference,
    Prompted,
    Related,
    Row,
    Segments,
    Tagged,
    Text,
    Tokens,
)
from toolkit.recipe import Recipe, preference
from toolkit.recipe.embedding import Embedding
from toolkit.recipe.heads import EMBEDDING
from toolkit.recipe.reinforcement import REINFORCED
from toolkit.recipe.schema import FORMATS, OF_CHATS, OF_OBJECTIVES, Source

_PLAIN = ("text", "segments", "tokens")

# The prompts of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, README).
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
    "\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Task:
    """What the rows are for: `objective` and `data.train_on` of the recipe, and whether the tokenizer renders chats."""

    objective: str
    train_on: str | Sequence[str]
    has_chat_template: bool
    system: str | None = None
    """A system message for prompts that have none, of `rollout` in the recipe."""
    embedding: Embedding = field(default_factory=Embedding)
    """The recipe's."""

    @classmethod
    def of(cls, recipe: Recipe, has_chat_template: bool) -> Task:
        """That of a recipe."""
        return cls(recipe.rows_for, recipe.data.train_on, has_chat_template, recipe.rollout.system, recipe.embedding)

    @property
    def trains_prompts(self) -> bool:
        """Whether every token is trained, prompts included."""
        return self.objective == "language_modelling" or self.train_on == "all"

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of answers."""
        return self.objective in preference.PAIRED

    @property
    def labelled(self) -> str | None:
        """The format of rows with labels, where these are learnt."""
        return {"classification": "labelled", "token_classification": "tagged"}.get(self.objective)

    @property
    def relates(self) -> bool:
        """Whether rows are texts that belong together."""
        return self.objective == EMBEDDING

    @property
    def judges(self) -> bool:
        """Whether rows are single answers, each of which is good or bad."""
        return self.objective == preference.JUDGED

    @property
    def reinforces(self) -> bool:
        """Whether rows are prompts, whose answers are scored."""
        return self.objective in REINFORCED


@dataclass(frozen=True)
class RowFormat:
    """How the rows of one source become rows of a normal form."""

    name: str
    """One of `FORMATS`."""
    columns: Mapping[str, str]
    """Expected column to the column in the data, or to what lies inside one (`body.messages`)."""
    task: Task
    ignored: frozenset[str] = frozenset()
    """Columns, and fields of messages, that are left out on purpose."""
    flags: tuple[str, ...] = FLAGS
    """Fields that say whether a message is trained."""
    verdict: str | None = None
    """The column that says whether the answer is good, where that is asked."""
    ratings: Ratings | None = None
    """Where the scores are of which pairs are made."""
    classes: tuple[str, ...] = ()
    """Names of the classes that numbers stand for, where the data has them."""

    @property
    def label_column(self) -> str:
        """The column with labels, of labelled rows."""
        name = "tags" if self.name == "tagged" else "label"
        return self.columns.get(name, name)

    def used_columns(self) -> set[str]:
        """The columns in the data that are read; all others have no influence on training."""
        actual = {self.columns.get(name, name) for names in FORMATS[self.name] for name in names}
        actual |= {self.verdict} if self.verdict else set()
        actual |= self.ratings.columns() if self.ratings else set()
        return actual | {name.partition(".")[0] for name in actual}

    def convert(self, raw: Mapping[str, Any], where: str) -> Row:
        """The normal form of one row.

        Raises:
            UserError: A column is missing, holds something else than it must, or would be left unused though it
                changes what should be learnt; the message names `where`.
        """
        row = self._converted(self.ratings.pair(raw, where) if self.ratings else raw, where)
        return row if self.verdict is None else judged(row, value_at(raw, self.verdict), self.verdict, where)

    def _converted(self, raw: Mapping[str, Any], where: str) -> Row:
        required, optional = FORMATS[self.name]
        for name in required:
            column = self.columns.get(name, name)
            if column not in raw and value_at(raw, column) is None:
                raise UserError(
                    f"{where} has no column `{column}`; it has {listed(raw)}",
                    "correct the row, or set `data.format` and `data.columns`",
                )
        unmapped = [name for name in optional if name not in self.columns]
        steps = [name for name, column in self.columns.items() if column.lower() == STEPS]
        known = self.used_columns() | self.ignored | {column for column in raw if steps and column.lower() == "labels"}
        refuse_meaning(raw, known, unmapped, self.name, where)
        mapped = {column.partition(".")[0] for column in self.columns.values()}
        row = {
            name: value_at(raw, self.columns.get(name, name))
            for name in (*required, *optional)
            if self.columns.get(name, name) not in self.ignored
            # A column is read as what it is named for, not as what it is called, too.
            and (name in required or name in self.columns or name not in mapped)
        }
        for name in steps:
            if are_texts(row.get(name)):
                row[name] = "\n".join(row[name])
        if self.name == "alpaca":
            return self._alpaca(row, where)
        if self.name in ("messages", "sharegpt"):
            return self._chat(row, required[0], raw, where)
        if self.name == "labelled":
            return read_labelled(row, where, self.classes, lambda value: self._labelled_chat(value, row, where))
        if self.name in ("related", "scored"):
            return read_related(row, where, self.task.embedding)
        if self.name == "tagged":
            return read_tagged(row, where, self.classes)
        if self.name == "preference":
            return read_preference(
                row,
                where,
                self.task.has_chat_template,
                lambda value, column: read_messages(value, column, where, self.ignored, self.flags),
                self._with_columns,
                self._alpaca,
            )
        if self.name == "segments":
            return read_segments(row["segments"], where, self.ignored)
        if self.name == "tokens":
            refuse_unread_lists({name: raw[name] for name in raw if name not in known}, row["input_ids"], where)
            return read_tokens(row, where)
        is_pair = self.task.objective == "seq2seq"
        if not is_pair and self.name == "prompt_completion" and any(holds_messages(row[name]) for name in required):
            return self._conversational_completion(row, where)
        if given := next((name for name in optional if row.get(name) not in EMPTY), None):
            asked, answered = (self.columns.get(name, name) for name in required)
            mapping = {"instruction": asked, "output": answered}
            if given in self.columns:
                mapping[given] = self.columns[given]
            raise UserError(
                f"{where}: `{given}` is for chats, not for plain prompts and completions",
                f"set {mapping_text(mapping)}, or write the conversation as `messages`, or set 'data.ignore=[{given}]'",
            )
        texts = [_string(row, name, where) for name in required]
        return Text(*texts) if self.name == "text" else Pair(*texts) if is_pair else Completion(*texts)

    def _alpaca(self, row: Mapping[str, Any], where: str) -> Any:
        names = ("system", "instruction", "input", "output", "reasoning")
        system, instruction, context, output, reasoning = (_string(row, name, where) for name in names)
        history = _rounds(row.get("history"), where)
        is_chat = self.task.objective != "seq2seq" and self.task.has_chat_template
        of_chats = ("history", "reasoning", *OF_CHATS)
        if not is_chat and (given := [name for name in of_chats if parsed(row.get(name)) not in EMPTY]):
            raise UserError(
                f"{where} has {listed(given)}, which only chats have",
                f"set `model.chat_template`, or 'data.ignore=[{', '.join(given)}]' to train without",
            )
        if self.task.objective == "seq2seq":
            return Pair("\n\n".join(filter(None, (system, instruction, context))), output)
        if not is_chat:
            template = ALPACA_WITH_INPUT if context else ALPACA
            prompt = template.format(instruction=instruction, input=context)
            return Completion(f"{system}\n\n{prompt}" if system else prompt, output)
        messages: list[dict[str, Any]] = []
        for asked, answered in history:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        user = f"{instruction}\n\n{context}" if context else instruction
        answer = {"role": "assistant", "content": output} | ({"reasoning_content": reasoning} if reasoning else {})
        return self._with_columns([*messages, {"role": "user", "content": user}, answer], row, where)

    def _labelled_chat(self, value: Any, row: Mapping[str, Any], where: str) -> Chat:
        return self._with_columns(read_messages(value, "messages", where, self.ignored, self.flags), row, where)

    def _chat(self, row: Mapping[str, Any], column: str, raw: Mapping[str, Any], where: str) -> Chat:
        messages = read_messages(row[column], column, where, self.ignored, self.flags)
        if messages:
            self._refuse_answer_beside(messages[-1], raw, self.columns.get(column, column), where)
        return self._with_columns(messages, row, where)

    def _refuse_answer_beside(self, last: Mapping[str, Any], raw: Mapping[str, Any], column: str, where: str) -> None:
        """A conversation that ends without an answer, which would be left unused in another column."""
        if last["role"] == "assistant" and any(last.get(key) for key in ("content", "tool_calls")):
            return
        messages = ("tool_calls", "function_call", "choices")
        names = ("completion", *OFTEN_CALLED["completion"], "target", "reply", "chosen", *messages)
        left = [name for name in raw if name.lower() in names and name not in self.used_columns() | self.ignored]
        if answer := next((name for name in left if raw[name] not in EMPTY), None):
            change = f"if it is the answer, set {mapping_text({'prompt': column, 'completion': answer})}"
            if last["role"] == "assistant" or answer in messages:
                change = f"write it into `{column}` as the last turn, of the assistant"
            raise UserError(
                f"{where}: `{column}` ends without an answer, and `{answer}` would be left unused",
                f"{change}, or set 'data.ignore=[{answer}]' to train without it",
            )

    def _conversational_completion(self, row: Mapping[str, Any], where: str) -> Chat:
        messages = []
        for column, role, trained in (("prompt", "user", self.task.trains_prompts), ("completion", "assistant", True)):
            value = row[column] if holds_messages(row[column]) else {"role": role, "content": row[column]}
            turns = read_messages(value, column, where, self.ignored, self.flags)
            messages += turns if trained else [turn | {"train": False} for turn in turns]
        return self._with_columns(messages, row, where)

    def _with_columns(self, messages: list[dict[str, Any]], row: Mapping[str, Any], where: str) -> Chat:
        """A conversation with the system message, tools and settings that stand beside it."""
        if system := _string(row, "system", where):
            if messages and messages[0]["role"] == "system":
                raise UserError(
                    f"{where} has a `system` column and a system message", "keep one of the two, or rename the column"
                )
            messages = [{"role": "system", "content": system}, *messages]
        settings = parsed(row.get("chat_template_kwargs")) or None
        if not isinstance(settings, dict | None):
            raise UserError(f"{where}: `chat_template_kwargs` is no object", 'write {"enable_thinking": false}')
        return Chat(messages, read_tools(row.get("tools") or row.get("functions"), where), settings)


def is_empty(row: Row, task: Task) -> bool:
    """Whether a row has no content that could be trained on."""
    match row:
        case Text(content) | Completion(_, content):
            return not content.strip()
        case Pair(source, target):
            return not (source.strip() and target.strip())
        case Segments(parts):
            return not any(text and trained for text, trained in parts)
        case Tokens(_, labels):
            return all(label == IGNORE for label in labels)
        case Preference(chosen, rejected):
            return is_empty(chosen, task) or is_empty(rejected, task)
        case Judged(answer):
            return is_empty(answer, task)
        case Prompted():
            return is_empty_prompt(row)
        case Labelled(text, second, label):
            said = (
                text.text if isinstance(text, Text) else "".join(str(each["content"] or "") for each in text.messages)
            )
            return not (label and f"{said}{second or ''}".strip())
        case Related():
            return is_empty_related(row)
        case Tagged(words, tags):
            return not (words and any(tags))
    if task.trains_prompts:
        return not row.messages
    roles = task.train_on if isinstance(task.train_on, list) else ["assistant"]
    return not any(
        message["content"] or message.get("tool_calls")
        for message in row.messages
        if message.get("train", message["role"] in roles)
    )


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
        columns = preference_columns(columns, {name: rows[0].get(name) for name in present if name not in ignored})
    rest, verdict = set(present) - set(columns.values()) - ignored, None
    if task.judges:
        verdict = verdict_column(columns, rows, rest, source.path)
        rest.discard(verdict)
    others = rest - {"role"} if source.format == "text" else rest
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
    if flag is None:
        return RowFormat(name, columns, task, ignored, verdict=verdict, ratings=ratings)
    places = [columns.get(column, column) for column in FORMATS[name][0]]
    if not any(flag in message for row in rows for place in places for message in dicts(value_at(row, place))):
        raise UserError(
            f"data source `{source.path}`: no message of the first rows has the field `{flag}` that `data.columns` "
            "names for `train`",
            "name the field of messages that says whether they are trained, or remove `train` from `data.columns`",
        )
    return RowFormat(name, columns, task, ignored, (*FLAGS, flag), verdict, ratings)


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
    accepted = "; ".join(f"{name} ({', '.join(required)})" for name, (required, _) in forms.items())
    raise UserError(
        f"data source `{source.path}` has the columns {listed(present)}, which no format fits",
        f"{proposal(names, row, task.has_chat_template)}; accepted are {accepted} "
        "(in a CSV the first line names the columns)",
    )


def _refuse_written_chats(
    rows: Iterable[Mapping[str, Any]], name: str, columns: Mapping[str, str], source: Source
) -> None:
    """Refuses texts that are conversations, all of them, as CSV files and dumps of data bases have them."""
    rows = list(rows)
    for column in FORMATS[name][0] if name in ("text", "prompt_completion", "alpaca") else ():
        actual = columns.get(column, column)
        texts = [text for row in rows if (text := value_at(row, actual)) not in EMPTY]
        mapping = {"messages": actual}
        if name == "alpaca":
            asked, answered = (columns.get(each, each) for each in FORMATS["alpaca"][0])
            mapping = {"prompt": asked, "completion": answered}
        changes = [isinstance(text, str) and conversation_in(text, mapping) for text in texts]
        # Prompts and completions may be messages, as JSON too.
        if texts and all(changes) and not (name == "prompt_completion" and all(map(holds_messages, texts))):
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
    pairs = ("prompt_completion", "alpaca", "source_target")
    if task.objective == "seq2seq" and name not in pairs:
        raise UserError(f"{where} does not fit `objective: seq2seq`", f"it takes {', '.join(pairs)}")
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


def _rounds(history: Any, where: str) -> list[tuple[str, str]]:
    """Earlier rounds as LLaMA-Factory writes them: [[question, answer], …]."""
    rounds = parsed(history) or []
    if isinstance(rounds, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in rounds
    ):
        return [(asked, answered) for asked, answered in rounds]
    raise UserError(f"{where}: `history` is no list of pairs", 'write [["question", "answer"], …]')


def _string(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if are_texts(value) and len(value) == 1:
        return str(value[0])
    if not isinstance(value, str):
        kinds = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
        change = "choose one of them, or join them" if are_texts(value) else 'write it as text ("4" for 4)'
        if isinstance(value, list) and holds_messages(value):
            change = "name the column of a whole conversation as `messages` in `data.columns`"
        raise UserError(
            f"{where}: `{name}` is {kinds.get(type(value), type(value).__name__)}, not a string",
            f"{change}, or choose other columns with `data.columns`",
        )
    return value
