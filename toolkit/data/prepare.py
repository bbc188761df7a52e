"""Prepares the data of a recipe: read, checked, tokenised and packed once, then only loaded.

The first process builds a folder in the cache, under a hash of everything that its content follows from: the bytes of
the files, the settings, the tokenizer and its template, the seed. So nothing stale is ever trained on; the cost is that
every start reads all files once to hash them. The cache of `Dataset.map` hashes the pickled function instead, tokenizer
included, and knows neither of the audit nor of which process should build.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import xxhash
from datasets import Dataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from toolkit.cache import cache_dir
from toolkit.common import UserError
from toolkit.data.auditing import audit as auditing
from toolkit.data.auditing.classes import survey
from toolkit.data.auditing.problems import find_problems
from toolkit.data.batching.shared_prefixes import drawn, in_common
from toolkit.data.encoding.chat_template import check_variables
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.borrowed import with_others
from toolkit.data.formats.messages import without_use
from toolkit.data.formats.task import Task
from toolkit.data.mixture import Indices, counts_for_usable, mix, weighs
from toolkit.data.own_answers import longest_rows, prompts_of
from toolkit.data.reading.sources import Reader, open_sources, set_aside
from toolkit.data.reward_files import file_hashes
from toolkit.data.row_table import collect
from toolkit.data.rows import Chat, Sample, from_json, sides
from toolkit.data.statistics import DataStatistics, answered, record
from toolkit.data.streaming import AUDITED_ROWS, Stream
from toolkit.data.token_table import TokenTable
from toolkit.data.tokenization import Chunker, pack, tokenise
from toolkit.files import write_json
from toolkit.recipe import Recipe
from toolkit.recipe.places import as_written
from toolkit.recipe.prefixes import may_begin_alike
from toolkit.seal import build_sealed

CODE_VERSION = 12
"""Raise when the same data and settings would give other tokens than before."""
MIN_SAMPLES = 8


@dataclass(frozen=True)
class Prepared:
    """Data ready for training.

    Attributes:
        train: Columns input_ids and labels, with packing, and of pairs of answers,
            also seq_lengths (tokens of each row in a sequence, or of each answer with its prompt). Of judged answers
            the second is that of another row, and there is a column desirable. Of
            labelled rows labels has one number, of tagged words those at first tokens. Of texts that belong together
            seq_lengths has tokens of each, keys by which equal ones are known, and score what a pair is given.
        eval: Held-out rows, never packed; None if the recipe has none.
        audit: The figures of `toolkit.data.auditing.audit`.
        samples: Rows to generate for, held out ones if there are any.
        fingerprint: Changes whenever any of the above changes.
        path: Folder that holds it all.
        statistics: Figures of the above that a plan is made of; None for a stream.
    """

    train: Dataset | Stream
    eval: Dataset | None
    audit: auditing.Audit
    samples: list[Sample]
    fingerprint: str
    path: Path
    statistics: DataStatistics | None = None

    @property
    def classes(self) -> list[str]:
        """Names of classes, in the order of their numbers in the head; of labelled rows."""
        return self.audit.classes


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    cache: Path | None = None,
    vocab_size: int | None = None,
) -> Prepared:
    """Turns the sources of a recipe into token sequences.

    Args:
        recipe: One that the rules accept; `data`, `objective`, `batch` and `seed` matter.
        tokenizer: With the chat template that shall be used.
        stop_token_ids: Tokens that end generation.
        cache: Folder of prepared data; by default `data/` in the toolkit's cache.
        vocab_size: Number of tokens that the model has embeddings for, where it is known.

    Example:
        >>> source = ModelSource.open(load_checked("smollm2_135m_lora_demo").recipe)
        >>> tokenizer = source.tokenizer()
        >>> prepare(source.recipe, tokenizer, source.stop_tokens(tokenizer)).train.column_names
        ['input_ids', 'labels']

    Raises:
        UserError: The data cannot be read or cannot be trained on.
    """
    datasets.disable_progress_bars()
    data = recipe.data
    check_variables(tokenizer, data.chat_template_kwargs)
    train = open_sources(data.training_sources(), data.streaming)
    held_out = open_sources(data.evaluation_sources(), data.streaming, data.eval_max_samples)
    fingerprint = _fingerprint(recipe, tokenizer, stop_token_ids, vocab_size, train, held_out)
    task = Task.of(recipe, bool(tokenizer.chat_template))
    train_on = "all" if task.objective == "language_modelling" else data.train_on
    encoder = Encoder(tokenizer, train_on, stop_token_ids, data.chat_template_kwargs, vocab_size)
    chunker = Chunker(encoder, recipe.longest_row, data.over_long)
    audited = open_sources(data.training_sources(), True, AUDITED_ROWS) if data.streaming else train

    root = cache or cache_dir() / "data"
    # More samples are no other data: a run may go on with them.
    name = fingerprint + (f"-{count}" if (count := _num_samples(recipe)) > MIN_SAMPLES else "")
    statistics = None
    try:
        path = build_sealed(root / name, lambda folder: _build(recipe, chunker, task, audited, held_out, folder))
        audit = auditing.Audit.model_validate_json((path / "audit.json").read_bytes())
        for figures, files in zip(audit.sources, set_aside(train, held_out), strict=False):
            figures.set_aside = files
        audit.problems = list(find_problems(audit))
        if not data.streaming:
            statistics = _count(path, audit, recipe)
            record(recipe, statistics, root)
    except OSError as error:
        raise UserError(
            f"prepared data cannot be written to `{root}`: {error.strerror or error}",
            "free space there, make it writable, or set the environment variable TOOLKIT_CACHE to another folder",
        ) from error
    return Prepared(
        train=Stream(train, recipe, chunker, task) if data.streaming else Dataset.load_from_disk(str(path / "train")),
        eval=Dataset.load_from_disk(str(path / "eval")) if (path / "eval").is_dir() else None,
        audit=audit,
        samples=[Sample(**sample) for sample in json.loads((path / "samples.json").read_text(encoding="utf-8"))],
        fingerprint=fingerprint,
        path=path,
        statistics=statistics,
    )


def sequence_lengths(rows: Dataset, pairs: bool = False) -> NDArray[np.int64]:
    """(rows, 1) tokens of each row, or (rows, 2) of source and target, from Arrow's offsets; no row is decoded."""
    table = rows.with_format("arrow")[:]
    columns = ("input_ids", "labels") if pairs else ("input_ids",)
    return np.stack([pc.list_value_length(table[name]).to_numpy() for name in columns], axis=1).astype(np.int64)


def answer_lengths(rows: Dataset) -> NDArray[np.int64]:
    """(rows, 2) tokens of the chosen and of the rejected answer of each pair, or of each answer that is judged and of
    the one from another row, with their prompts; (rows, texts) of texts that belong together."""
    lengths = pc.list_flatten(rows.with_format("arrow")[:]["seq_lengths"]).to_numpy()
    return lengths.reshape(len(rows), -1).astype(np.int64)


def _count(path: Path, audit: auditing.Audit, recipe: Recipe) -> DataStatistics:
    """Figures of a folder of prepared data, from the audit and from the lengths of its rows."""
    train, pairs = Dataset.load_from_disk(str(path / "train")), audit.objective == "seq2seq"
    of_sides: Callable[[Dataset], NDArray[np.int64]] = functools.partial(sequence_lengths, pairs=pairs)
    if audit.train.pairs or audit.train.verdicts or audit.train.texts:
        of_sides = answer_lengths
    both, held_out = of_sides(train), np.zeros((1, 1), np.int64)
    lengths = both[:, 0] if audit.train.verdicts else sequence_lengths(train)[:, 0]
    documents = lengths
    if "seq_lengths" in train.column_names and not audit.train.verdicts:
        documents = pc.list_flatten(train.with_format("arrow")[:]["seq_lengths"]).to_numpy()
    if (path / "eval").is_dir():
        held_out = of_sides(Dataset.load_from_disk(str(path / "eval")))
    trained = audit.train.trained_tokens
    if recipe.on_policy:
        prompts = prompts_of(train)
        documents = lengths = longest_rows(recipe, lengths, prompts)
        both, trained = lengths[:, None], int((lengths - prompts).sum())
    alike = in_common(drawn(recipe, train), recipe.answers) if may_begin_alike(recipe) else ()
    if recipe.reinforces:
        return answered(recipe, lengths, held_out[:, 0] if audit.eval else held_out[:0, 0], alike)
    return DataStatistics(
        rows=len(lengths),
        tokens=int(lengths.sum()),
        trained_tokens=trained,
        documents=len(documents),
        squared_tokens=int((documents.astype(np.float64) ** 2).sum()),
        quantiles=_quantiles(both.max(axis=1)),
        eval_rows=len(held_out) if audit.eval else 0,
        eval_tokens=audit.eval.tokens if audit.eval else 0,
        longest_eval=int(held_out.max()),
        longest_target=int(max(both[:, 1].max(), held_out[:, -1].max())) if pairs else None,
        end_to_end=_quantiles(both.mean(axis=1)) if recipe.answers > 1 else (),
        longest_eval_end_to_end=float(held_out.mean(axis=1).max()) if recipe.answers > 1 else 0.0,
        in_common=alike,
    )


def _quantiles(lengths: NDArray[Any]) -> tuple[float, ...]:
    return tuple(np.quantile(lengths, np.linspace(0, 1, 1001)).tolist())


def _build(
    recipe: Recipe, chunker: Chunker, task: Task, train: list[Reader], held_out: list[Reader], folder: Path
) -> None:
    """Fills one folder of the cache."""
    data = recipe.data
    scratch = folder / "scratch"
    scratch.mkdir()
    rows, sources = collect(train + held_out, task, scratch / "rows.arrow")
    source, content = (np.asarray(rows.with_format("numpy")[name][:], dtype=np.int64) for name in ("source", "content"))
    is_train = source < len(train)
    weights = [reader.source.weight for reader in train]
    choose = functools.partial(
        mix,
        source[is_train],
        content[is_train],
        eval_fraction=data.eval_split if isinstance(data.eval_split, float) else None,
        max_samples=data.max_samples,
        deduplicate=data.deduplicate,
        shuffle=data.shuffle,
        seed=recipe.seed,
        eval_seed=data.eval_seed,
    )
    mixture = choose(weights)
    chosen_eval = np.concatenate([mixture.eval, np.flatnonzero(~is_train)])
    if data.eval_max_samples is not None and data.eval_max_samples < len(chosen_eval):
        seed = recipe.seed if data.eval_seed is None else data.eval_seed
        order = np.random.default_rng(seed).permutation(len(chosen_eval))
        chosen_eval = chosen_eval[np.sort(order[: data.eval_max_samples])]

    found = None
    if task.labelled:
        declared = dict.fromkeys(name for figures in sources for name in figures.classes)
        found = survey(rows["row"], is_train, [*declared])
        chunker = dataclasses.replace(chunker, classes=found.names)

    def tokenised(train: Indices, name: str) -> tuple[Indices, TokenTable]:
        distinct = np.unique(np.concatenate([train, chosen_eval]))
        chunks = tokenise(rows.select(distinct), chunker, data.num_proc, scratch / name)
        return distinct, TokenTable(chunks, chunker, rows.select_columns("where").select(distinct), recipe, found)

    distinct, tokens = tokenised(mixture.train, "tokens.arrow")
    if weighs(weights):
        # Shares are of rows that are trained on, which only their tokens say.
        usable = np.ones(len(content), bool)
        usable[distinct] = tokens.trained > 0
        if len(mixture.train) != data.max_samples:
            mixture = choose(weights, unusable=~usable[is_train])
        elif not usable[mixture.train].all():
            # Not all rows are tokenised for a sample of them, which says how many of each source are used.
            counts = counts_for_usable(source[mixture.train], usable[mixture.train], len(train))
            mixture = choose(weights, counts=counts)
            distinct, tokens = tokenised(mixture.train, "tokens_again.arrow")
    sides = {"train": np.searchsorted(distinct, mixture.train), "eval": np.searchsorted(distinct, chosen_eval)}

    for number, figures in enumerate(sources):
        figures.role = "train" if number < len(train) else "eval"
        used = tokens.usable(sides[figures.role][source[distinct[sides[figures.role]]] == number])
        figures.unused_fields = without_use(figures.unused_fields, str(chunker.encoder.tokenizer.chat_template))
        figures.used_rows, figures.repeats = len(used), len(used) / max(len(np.unique(used)), 1)
    total = sum(figures.used_rows for figures in sources if figures.role == "train") or 1
    for figures in sources:
        figures.share = figures.used_rows / total
    has_eval = data.eval_split is not None or bool(data.eval_sources)
    named = recipe.model.chat_template
    template = f"`model.chat_template: {named}`" if named else "the tokenizer's"
    stops = chunker.encoder.tokenizer.convert_ids_to_tokens(sorted(chunker.encoder.stop_token_ids))
    audit = auditing.Audit(
        objective=recipe.rows_for,
        scope=f"the first {AUDITED_ROWS:,} rows of every source" if data.streaming else "",
        sources=sources,
        train=tokens.measure(sides["train"]),
        eval=tokens.measure(sides["eval"]) if has_eval else None,
        deduplicate=data.deduplicate,
        duplicates=mixture.duplicates,
        in_train_and_eval=int(np.isin(content[chosen_eval], content[mixture.train]).sum()),
        chat_template=auditing.ChatTemplate(
            source=template if task.has_chat_template else "none",
            needed="Chat" in tokens.kinds,
            given=bool(named),
            stops=[each for each in stops if each],
        ),
        kinds=tokens.kinds,
        classes=[*found.names] if found else [],
    )
    audit.problems = list(find_problems(audit))
    if any(problem.level == "fatal" for problem in audit.problems):
        raise auditing.DataError(audit)

    unused = [each for each in sources if each.role == "train" and not each.used_rows]
    if data.streaming and unused:  # Its rows would be searched for ever.
        raise UserError(
            f"data source `{unused[0].path}` has no row with a trained token among its first {AUDITED_ROWS:,}",
            "take it out of `data.sources`, or check `data.columns`, `data.train_on` and `batch.seq_len`",
        )
    if not data.streaming:
        sequences = tokens.take(sides["train"])
        if recipe.judges:
            sequences = with_others(sequences, recipe.batch.seq_len, recipe.seed)
        if data.packing:
            sequences = pack(sequences, recipe.batch.seq_len)
            size = len(sequences) * recipe.batch.seq_len
            audit.packing = auditing.Packing(rows=len(sequences), efficiency=audit.train.tokens / size)
        sequences.save_to_disk(str(folder / "train"))
    if has_eval:
        held = tokens.take(sides["eval"])
        held = with_others(held, recipe.batch.seq_len, recipe.seed) if recipe.judges else held
        held.save_to_disk(str(folder / "eval"))
    write_json(folder / "audit.json", audit.model_dump())
    sampled = tokens.usable(sides["eval" if has_eval else "train"])
    samples = _samples(rows.select(distinct[sampled]), chunker.encoder, 0 if recipe.headed else _num_samples(recipe))
    write_json(folder / "samples.json", [sample.model_dump() for sample in samples])
    shutil.rmtree(scratch)


def _samples(rows: Dataset, encoder: Encoder, count: int) -> list[Sample]:
    """The first rows that can be asked for; most templates refuse to open a conversation that the assistant begins."""
    samples: list[Sample] = []
    for text in rows.select(range(min(len(rows), 10 * count)))["row"]:
        known = from_json(text)
        row = sides(known)[0]
        with suppress(UserError):
            asked, reference = encoder.prompt_text(known)
            turns = reversed(row.messages) if isinstance(row, Chat) else ()
            prompt = next((turn["content"] for turn in turns if turn["role"] == "user"), asked)
            samples.append(Sample(prompt=prompt, input_ids=encoder.prompt_ids(known), reference=reference))
        if len(samples) == count:
            break
    return samples


def _fingerprint(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    vocab_size: int | None,
    train: list[Reader],
    held_out: list[Reader],
) -> str:
    schema = file_hashes(recipe.rewards.model_copy(update={"file": None}))
    recipe = as_written(recipe)

    def of(readers: list[Reader]) -> list[Any]:
        return [[as_written(reader.source).model_dump(), reader.fingerprint()] for reader in readers]

    parts = {
        "version": CODE_VERSION,
        "data": recipe.data.model_dump(exclude={"num_proc", "num_workers", "sources", "eval_sources", "eval_seed"}),
        # Only where it is set: what was prepared without it is still right.
        **({} if recipe.data.eval_seed is None else {"eval_seed": recipe.data.eval_seed}),
        **({"shares": "of usable rows"} if weighs([each.weight for each in recipe.data.sources]) else {}),
        "sources": of(train),
        **({"eval_sources": of(held_out)} if held_out else {}),
        "objective": recipe.rows_for,
        "seq_len": recipe.batch.seq_len,
        "vocab_size": vocab_size,
        "seed": recipe.seed,
        **(_of_prompts(recipe) if recipe.reinforces else {}),
        **({"schema": schema} if schema else {}),
        **({"embedding": recipe.embedding.model_dump(mode="json")} if recipe.embeds else {}),
        "template": [recipe.model.chat_template, tokenizer.chat_template],
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "stop": sorted(stop_token_ids),
        "tokenizer": [_tokenizer_text(tokenizer), tokenizer.split_special_tokens],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _of_prompts(recipe: Recipe) -> dict[str, Any]:
    """What prompts, and what the audit says of their references, follow from beside the data."""
    code = {"file", "function", "function_weight", "trust_python"}
    return {"system": recipe.rollout.system, "longest": recipe.longest_row} | {
        "rewards": recipe.rewards.model_dump(mode="json", exclude=code)
    }


def _tokenizer_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # What the last call left behind; the next one states its own.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer.backend_tokenizer.to_str()


def _num_samples(recipe: Recipe) -> int:
    return max(MIN_SAMPLES, recipe.evaluation.num_prompts)
