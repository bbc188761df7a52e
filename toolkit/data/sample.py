"""Figures of local data that was not prepared, estimated from a few hundred rows in less than a second.

Rows are taken from all over the files, brought into their normal form and counted by the tokenizer if it lies on this
disk, else at four characters a token. What the chat template puts around a message is taken to be five tokens: to
render it would take Transformers, which takes seconds to import. Prepared data is counted exactly, see `statistics`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.common import UserError, first_line
from toolkit.data.batching.shared_prefixes import COMPARED, Document, in_common
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task
from toolkit.data.own_answers import longest_rows
from toolkit.data.reading import readers
from toolkit.data.reading.readers import RawRow
from toolkit.data.reading.sources import Reader, open_source
from toolkit.data.rows import (
    IGNORE,
    Chat,
    Completion,
    Labelled,
    Pair,
    Row,
    Segments,
    Tagged,
    Text,
    Tokens,
    sides,
)
from toolkit.data.statistics import DataStatistics
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.data import Source
from toolkit.recipe.prefixes import may_begin_alike

SAMPLED = 300
"""Rows of each source."""
_READ_WHOLE = 20e6
"""Bytes of a source up to which all its rows are read, and counted."""
_CHARACTERS = 4
"""Characters per token, for English and code with current tokenizers."""
_AROUND_MESSAGE = 5
"""Tokens of ChatML and of Llama 3 around the text of a message."""
_PACKED = 0.97
"""How full packed sequences are."""


def sampled(recipe: Recipe) -> DataStatistics | None:
    """Estimated figures of the recipe's data; None for a stream, and where a source is not local or cannot be read.

    Its `sample` says how they were made.
    """
    data = recipe.data
    if data.streaming:
        return None
    counter = _Counter(recipe)
    try:
        train = [_Side(source, counter) for source in data.training_sources()]
        held_out = [_Side(source, counter) for source in data.evaluation_sources()]
        if recipe.on_policy:
            for side in train:
                side.counted = _answered(recipe, side.counted)
    except (UserError, OSError, ValueError, RecursionError, NotImplementedError):
        return None  # What is wrong with it is said elsewhere.
    return _figures(recipe, train, held_out, counter)


class _Counter:
    """Counts the tokens of rows."""

    def __init__(self, recipe: Recipe) -> None:
        import tokenizers

        # Whether the tokenizer has a template is not known without it; most have one.
        self.task = Task.of(recipe, has_chat_template=True)
        self._count_of, self._answer = recipe.answers, recipe.rollout.max_completion_tokens
        file = model_configs.tokenizer_file(recipe.model)
        self._tokenizer, self.how = None, ", at four characters a token because the tokenizer is not on this disk"
        if file:
            try:
                self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:  # The library has no kind of its own; the run will say what is wrong.
                self.how = f", at four characters a token because the tokenizer cannot be read: {first_line(error)}"
            else:
                self.how = ""
                self._tokenizer.no_truncation()
                self._tokenizer.no_padding()

    def __call__(self, rows: Sequence[Row]) -> Iterator[tuple[tuple[int, int, int], list[Document]]]:
        """Of each row: tokens, those that carry loss, and those of a pair's target; of two answers both, and the tokens
        of the longer one with its prompt; of texts that belong together the same of all; of a prompt all its answers,
        as long as they may be, and one of them. And what documents it has, about."""
        counted = self._count([side for row in rows for side in sides(row)])
        if self.task.reinforces:
            for (length, _, _), asked in counted:
                whole = length + self._answer
                answered = Document(np.append(asked.ids, 0), np.append(np.full_like(asked.ids, IGNORE), 0))
                yield (self._count_of * whole, self._count_of * self._answer, whole), [answered] * self._count_of
        elif self.task.pairs or self.task.relates:
            for each in zip(*[counted] * self._count_of, strict=True):
                counts, documents = zip(*each, strict=True)
                lengths, trained, _ = zip(*counts, strict=True)
                yield (sum(lengths), sum(trained), max(lengths)), [*documents]
        else:
            yield from ((counts, [document]) for counts, document in counted)

    def _count(self, rows: Sequence[Row]) -> Iterator[tuple[tuple[int, int, int], Document]]:
        parts = [list(self._parts(row)) for row in rows]
        encoded = iter(self._encoded([text for row in parts for text, _ in row]))
        for row, pieces in zip(rows, parts, strict=True):
            if isinstance(row, Tokens):
                document = Document(np.asarray(row.input_ids), np.asarray(row.labels))
                yield (len(row.input_ids), sum(label != IGNORE for label in row.labels), 0), document
                continue
            texts = [(next(encoded), trained) for _, trained in pieces]
            document = _document(texts, _AROUND_MESSAGE if isinstance(row, Chat) else 0)
            around = _AROUND_MESSAGE * len(row.messages) if isinstance(row, Chat) else 1
            trained = sum(len(text) for text, is_trained in texts if is_trained)
            if isinstance(row, Labelled | Tagged):
                trained = len(row.tags) if isinstance(row, Tagged) else 1
            if isinstance(row, Pair):
                yield (len(texts[0][0]) + 1, trained + 1, trained + 1), document
            else:
                yield (sum(len(text) for text, _ in texts) + around, trained, 0), document

    def _encoded(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Numbers of each text's tokens; without a tokenizer, of pieces that are as long."""
        if self._tokenizer:
            return [np.array(each.ids) for each in self._tokenizer.encode_batch(texts, add_special_tokens=False)]
        return [*map(_pieces, texts)]

    def _parts(self, row: Row) -> Iterator[tuple[str, bool]]:
        prompts = self.task.trains_prompts
        match row:
            case Text(text):
                yield text, True
            case Completion(prompt, completion):
                yield from ((prompt, prompts), (completion, True))
            case Pair(source, target):
                yield from ((source, False), (target, True))
            case Segments(parts):
                yield from parts
            case Labelled(Text(text), second, _):
                yield from ((text, False), (second or "", False))
            case Labelled(Chat() as chat):
                yield from self._parts(chat)
            case Tagged(words):
                yield " ".join(words), False
            case Chat(messages, tools):
                for message in messages:
                    calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
                    trained = prompts or message.get("train", message["role"] in self.task.trained_roles)
                    yield f"{message['content'] or ''}{calls}", trained
                if tools:
                    yield json.dumps(tools), prompts


def _answered(recipe: Recipe, counted: NDArray[np.float64]) -> NDArray[np.float64]:
    """What was counted of rows, as it is with the longest answers that a student may write; one answer is taken to be
    all that is trained of a row."""
    lengths, trained, targets = counted
    prompts = lengths - trained
    longest = longest_rows(recipe, lengths, prompts)
    return np.stack([longest, longest - prompts, targets])


def _pieces(text: str) -> NDArray[np.int64]:
    """A number for each `_CHARACTERS` of a text, the same for the same ones."""
    count = round(len(text) / _CHARACTERS)
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64)
    whole = np.resize(characters, count * _CHARACTERS).reshape(count, _CHARACTERS)
    return np.asarray(whole @ (65_537 ** np.arange(_CHARACTERS)), dtype=np.int64)


def _document(texts: list[tuple[NDArray[np.int64], bool]], around: int) -> Document:
    """Texts, each of which is trained or not, behind so many tokens that are the same of all."""
    before = np.zeros(around, np.int64)
    ids = [part for text, _ in texts for part in (before, text)]
    labels = [np.full(around + len(text), IGNORE) for text, _ in texts]
    for label, (_, trained) in zip(labels, texts, strict=True):
        label[around:] = 0 if trained else IGNORE
    return Document(*(np.concatenate([before[:0], *each]) for each in (ids, labels)))


class _Side:
    """A source.

    Attributes:
        rows: In all of it, about.
        counted: Tokens of these rows, those that carry loss, and those of targets, as counted: (3, sampled).
        documents: What is compared of each of them.
    """

    def __init__(self, source: Source, counter: _Counter) -> None:
        self.source = source
        taken, self.rows = _some_of(open_source(source, streaming=True))
        if not taken:
            raise UserError(f"{source.path} is not local, or can only be read whole")
        row_format = recognise([row for _, row in taken], source, counter.task)
        rows = [*row_format.rows(taken)]
        self.rows *= len(rows) / len(taken)
        counted = list(counter([row_format.convert(row, where) for where, row in rows]))
        self.counted = np.array([each for each, _ in counted], dtype=np.float64).reshape(-1, 3).T
        self.documents = [each for _, each in counted]


def _some_of(reader: Reader) -> tuple[list[RawRow], float]:
    """Rows from all over a source's files, and about how many it has; none if that takes a read of large files."""
    files, limit = reader.local_files(), reader.source.max_samples
    size = sum(file.stat().st_size for file in files)
    kinds = {readers.kind(file) for file in files}
    packed = any(file.suffix.lower() in readers.COMPRESSIONS for file in files)
    if not files or (packed and size > _READ_WHOLE / 4):
        return [], 0
    if size <= _READ_WHOLE:
        rows = list(reader.rows())
        return rows[:: -(-len(rows) // SAMPLED)], len(rows)
    if kinds == {"jsonl"}:
        taken = [row for file in files for row in _lines(file, max(1, SAMPLED * file.stat().st_size // size))]
        count = size / (sum(length for _, length in taken) / len(taken)) if taken else 0
        return [row for row, _ in taken], min(count, limit or count)
    if kinds == {"parquet"}:
        import pyarrow.parquet as pq

        total = sum(pq.ParquetFile(file).metadata.num_rows for file in files)
        return list(itertools.islice(reader.rows(), SAMPLED)), min(total, limit or total)
    return [], 0


def _lines(file: Path, count: int) -> Iterator[tuple[RawRow, int]]:
    """Rows at even distances in a file with one in each line, and their bytes."""
    with file.open("rb") as stream:
        for number in range(count):
            stream.seek(file.stat().st_size * number // count)
            if number:
                stream.readline()
            if line := stream.readline().strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"{file} holds something else than an object")
                yield (str(file), row), len(line) + 1


def _figures(recipe: Recipe, train: list[_Side], held_out: list[_Side], counter: _Counter) -> DataStatistics | None:
    data, seq_len, pairs = recipe.data, recipe.batch.seq_len, recipe.objective == "seq2seq"
    held_share = data.eval_split if isinstance(data.eval_split, float) else 0.0
    uses = [(1 - held_share) * side.rows for side in train]
    if any(side.source.weight is not None for side in train):
        # Every row that is trained on is used once at least.
        shares = [1.0 if side.source.weight is None else side.source.weight for side in train]
        kept = [float(_kept(recipe, side.counted).mean()) for side in train]
        times = max(rows * part / share for rows, part, share in zip(uses, kept, shares, strict=True))
        uses = [times * share / part if part else 0.0 for part, share in zip(kept, shares, strict=True)]
    used, lengths, trained, targets = _as_trained(recipe, train, uses)
    if not used.sum():
        return None  # All are dropped, which is an error of the run.
    used *= min(1.0, (data.max_samples or used.sum()) / used.sum())
    # Rows are held out before others are repeated or left out.
    apart = [(side, held_share * side.rows) for side in train if held_share] + [(side, side.rows) for side in held_out]
    held, held_lengths, _, held_targets = _as_trained(recipe, [side for side, _ in apart], [rows for _, rows in apart])
    held *= min(1.0, (data.eval_max_samples or np.inf) / max(held.sum(), 1))
    # Sequences in a row; where there are several, the longest of them stands for the target.
    count = recipe.answers
    longest = targets if count > 1 else np.maximum(lengths, targets)
    held_longest = held_targets if count > 1 else np.maximum(held_lengths, held_targets)
    # A held-out prompt is answered once.
    held_lengths = held_targets if recipe.reinforces else held_lengths
    # The longest of several texts, and the others as if they were alike.
    squares = longest**2 + (lengths - longest) ** 2 / (count - 1) if count > 1 else lengths**2
    quantiles, end_to_end = _quantiles(longest, used), np.empty(0)
    if count > 1 and not recipe.reinforces:
        end_to_end = _quantiles(lengths / count, used)
    rows, documents = used.sum(), count * used.sum()
    if data.packing:
        # Few are rounded, but hold no more than they can.
        full = used @ lengths / seq_len
        rows, quantiles = max(round(full / _PACKED), math.ceil(full)), np.linspace(2 * _PACKED - 1, 1, 1001) * seq_len
    return DataStatistics(
        rows=max(1, round(rows)),
        tokens=round(used @ lengths),
        trained_tokens=round(used @ trained),
        documents=max(1, round(documents)),
        squared_tokens=round(used @ squares),
        quantiles=tuple(quantiles.tolist()),
        eval_rows=round(held.sum()),
        eval_tokens=round(held @ held_lengths),
        longest_eval=round(held_longest.max(initial=0)),
        longest_target=round(max(targets.max(), held_targets.max(initial=0))) if pairs else None,
        end_to_end=tuple(end_to_end.tolist()),
        longest_eval_end_to_end=held_lengths.max(initial=0.0) / count if len(end_to_end) else 0.0,
        sample=f"a sample of {sum(side.counted.shape[1] for side in train):,} rows{counter.how}",
        in_common=_in_common(recipe, train, uses) if may_begin_alike(recipe) else (),
    )


def _in_common(recipe: Recipe, sides: list[_Side], uses: list[float]) -> tuple[tuple[int, float], ...]:
    """What documents begin with alike, of rows that are drawn as often as they are used."""
    often = [np.full(len(side.documents), rows / len(side.documents)) for side, rows in zip(sides, uses, strict=True)]
    weights, every = np.concatenate(often), [row for side in sides for row in side.documents]
    # Of a source whose rows are all dropped none is drawn.
    size = min(int(np.count_nonzero(weights)), COMPARED)
    numbers = np.random.default_rng(0).choice(len(every), size, replace=False, p=weights / weights.sum())
    documents = (document for number in numbers for document in every[number])
    most = recipe.batch.seq_len
    return in_common((Document(ids[:most], labels[:most]) for ids, labels in documents), recipe.answers)


def _quantiles(lengths: NDArray[np.float64], used: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shortest to longest in equal shares, of rows that are used so often."""
    order = np.argsort(lengths)
    return np.interp(np.linspace(0, 1, 1001), np.cumsum(used[order]) / used.sum(), lengths[order])


def _kept(recipe: Recipe, counted: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(sampled,) which rows are not dropped as too long, of their `counted` tokens."""
    whole, _, targets = counted
    longest = targets if recipe.answers > 1 else np.maximum(whole, targets)
    return (longest <= recipe.batch.seq_len) | (recipe.data.over_long != "drop")


def _as_trained(recipe: Recipe, sides: list[_Side], uses: list[float]) -> NDArray[np.float64]:
    """How often each sampled row is used, its tokens, its trained ones and those of its target, none longer than a
    sequence: (4, sampled)."""
    columns = [
        np.vstack([np.full(count := side.counted.shape[1], rows / count), side.counted])
        for side, rows in zip(sides, uses, strict=True)
    ]
    used, whole, trained, targets = np.concatenate([np.zeros((4, 0)), *columns], axis=1)
    seq_len = recipe.batch.seq_len
    kept = _kept(recipe, np.vstack([whole, trained, targets]))
    used, whole, trained, targets = used[kept], whole[kept], trained[kept], targets[kept]
    if recipe.data.over_long == "split":
        parts = np.maximum(1, np.ceil(whole / seq_len))
        used, whole, trained = used * parts, whole / parts, trained / parts
    most = recipe.answers * seq_len
    return np.vstack([used, whole.clip(0, most), trained.clip(0, most), targets.clip(0, seq_len)])
