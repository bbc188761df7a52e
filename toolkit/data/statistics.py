"""What prepared data holds, kept so that a plan can count steps and tokens without a tokenizer.

When data is prepared, its figures are written beside it under a name that follows from the recipe and from the sizes
and times of the local files it names. Changed data therefore has another name, and nothing is known of it yet. The
fingerprint of the prepared data itself would need the tokenizer and a read of every file: minutes, where `toolkit plan`
answers in a second. So a file that is touched but not changed counts as changed.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from toolkit.cache import cache_dir, find, keep
from toolkit.common import content_hash
from toolkit.files import below
from toolkit.recipe import Recipe

FORMAT = 8
"""Raise when the same recipe and files would have other figures."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


_EPOCHS, _DRAWN = 4, 2**17
"""Epochs, and at most so many rows, that are drawn to see how they are dealt into micro-batches."""


@dataclass(frozen=True)
class Dealt:
    """What micro-batches hold, padding included.

    Args:
        tokens: On average.
        grid: Pairs of positions of all sequences, on average.
        longest: Tokens of the longest sequence, on average.
        fullest: Tokens of the fullest one that an epoch is expected to have.
    """

    tokens: float
    grid: float
    longest: float
    fullest: float


@dataclass(frozen=True)
class DataStatistics:
    """Figures of prepared data. A sequence is a row as it is trained; packed ones hold several documents.

    Args:
        rows: Training sequences.
        tokens: In all of them, padding not counted.
        trained_tokens: Those that carry loss.
        documents: Rows before packing.
        squared_tokens: Sum of the squares of the documents' lengths, to which attention within documents is
            proportional.
        quantiles: Lengths of the sequences: shortest to longest in equal shares, fine enough for the few long ones. Of
            pairs the longer of source and target, or of both answers, counts, to which a batch is padded at most.
        eval_rows: Held-out rows.
        eval_tokens: In all of them.
        longest_eval: Length of the longest, as in `quantiles`.
        longest_target: Tokens of the longest target of pairs, trained on or held out.
        sample: What the figures are estimated from, in words; empty where all rows were counted.
        end_to_end: `quantiles` of rows of several texts that lie end to end, where the mean of a row's texts counts;
            empty where rows have one text, or only such of one length.
        longest_eval_end_to_end: `longest_eval` of such rows.
        in_common: Of some numbers of documents in a micro-batch, tokens that each further one has in common with
            others, on average, where these are computed once; empty where there are none.
    """

    rows: int
    tokens: int
    trained_tokens: int
    documents: int
    squared_tokens: int
    quantiles: tuple[float, ...]
    eval_rows: int = 0
    eval_tokens: int = 0
    longest_eval: int = 0
    longest_target: int | None = None
    sample: str = ""
    end_to_end: tuple[float, ...] = ()
    longest_eval_end_to_end: float = 0.0
    in_common: tuple[tuple[int, float], ...] = ()

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence."""
        return self.tokens / self.rows

    def lengths(self, flat: bool) -> tuple[float, ...]:
        """Quantiles of what a sequence takes in a batch, by whether rows lie end to end."""
        return (self.end_to_end if flat else ()) or self.quantiles

    def longest_held_out(self, flat: bool) -> float:
        """What the longest sequence of a held-out row takes, as in `lengths`."""
        return (self.longest_eval_end_to_end if flat else 0.0) or self.longest_eval

    def alike(self, length: float) -> DataStatistics:
        """These statistics with sequences that all have this many tokens."""
        return dataclasses.replace(self, quantiles=(length, length), end_to_end=())

    def shared(self, sequences: Any) -> Any:
        """Tokens of so many sequences together, a number or an array of them, that are computed for others of them."""
        import numpy as np

        if not self.in_common:
            return 0.0 * sequences
        documents = np.maximum(sequences * self.documents / self.rows, 1.0)
        sizes, tokens = zip(*self.in_common, strict=True)
        return np.interp(np.log2(documents), np.log2(sizes), tokens) * (documents - 1)

    def begins_alike(self, sequences: int) -> bool:
        """Whether so many sequences together have enough in common to compute that once: a hundredth of their tokens,
        which is more than it takes to hand keys on to others."""
        return bool(self.shared(sequences) >= 0.01 * sequences * self.mean_length)

    @functools.cache  # noqa: B019 (there are few figures)
    def dealt(self, size: int, count: int, flat: bool, each: int = 1) -> Dealt:
        """Micro-batches of steps of `size` rows, each of which is cut into `count` as training does it.

        Steps are drawn until they are four epochs, or 131,072 rows, because the fullest of one draw alone was seen
        12% below that of others. One has the longest sequence for certain.

        Args:
            flat: See `batches.cut`.
            each: Sequences of a row.
        """
        # What asks for a plan must answer at once, also where no data is counted.
        import numpy as np

        from toolkit.data.batching.batches import ALIGNED, cut

        shares = np.random.default_rng(0).random((max(1, min(_EPOCHS * self.rows, _DRAWN) // size), size))
        quantiles = self.lengths(flat)
        lengths = np.interp(shares, np.linspace(0, 1, len(quantiles)), quantiles)
        lengths[0, 0] = quantiles[-1]
        unit = 1 if flat else ALIGNED
        widths = np.ceil(lengths / unit).astype(np.int64) * unit
        cuts = cut(-np.sort(-widths, axis=1), count, flat)
        tokens, longest = each * cuts.tokens - (self.shared(cuts.rows) if flat else 0), cuts.longest
        return Dealt(*map(float, (tokens.mean(), (tokens * longest).mean(), longest.mean(), tokens.max())))


def answered(
    recipe: Recipe, prompts: Any, held_out: Any, in_common: tuple[tuple[int, float], ...] = ()
) -> DataStatistics:
    """Figures of prompts whose answers are yet to come, and are taken to be as long as they may be.

    Args:
        prompts: (rows,) tokens of each.
        held_out: (rows,) the same of those held out.
        in_common: See `DataStatistics`.
    """
    import numpy as np

    count, longest = recipe.answers, recipe.rollout.max_completion_tokens
    whole, held = np.asarray(prompts) + longest, np.asarray(held_out) + longest
    return DataStatistics(
        rows=len(whole),
        tokens=int(count * whole.sum()),
        trained_tokens=count * longest * len(whole),
        documents=count * len(whole),
        squared_tokens=int(count * (whole.astype(np.float64) ** 2).sum()),
        quantiles=tuple(np.quantile(whole, np.linspace(0, 1, 1001)).tolist()),
        eval_rows=len(held),
        eval_tokens=int(held.sum()),
        longest_eval=int(held.max(initial=0)),
        in_common=in_common,
    )


def statistics_of(recipe: Recipe, cache: Path | None = None) -> DataStatistics | None:
    """The figures of a recipe's data, if it was prepared before and has not changed since.

    Hub data sets are taken as unchanged. Streams have none. `cache` is the folder of prepared data, by default `data/`
    in the toolkit's cache.
    """
    if recipe.data.streaming:
        return None
    try:
        return TypeAdapter(DataStatistics).validate_json(find(_file(recipe, cache)).read_bytes())
    except (OSError, ValueError):
        return None


def record(recipe: Recipe, figures: DataStatistics, cache: Path | None = None) -> None:
    """Keeps figures for `statistics_of`. Several processes may do so at once."""
    keep(_file(recipe, cache), json.dumps(vars(figures)))


def _file(recipe: Recipe, cache: Path | None) -> Path:
    data, model = recipe.data, recipe.model
    files = [path for source in (*data.sources, *data.eval_sources) for path in _files(source.path, below)]
    names = filter(None, (model.path, model.tokenizer, model.chat_template))
    # Those the tokenizer may be made of, and for data every file that a source may stand for: rather too many.
    files += [path for name in names for path in _files(name, Path.iterdir) if path.suffix not in _WEIGHTS]
    stamps = [[str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in sorted(files)]
    content = {
        "format": FORMAT,
        "data": data.model_dump(exclude={"num_proc", "num_workers"}),
        "model": model.model_dump(include={"path", "revision", "gguf_file", "tokenizer", "chat_template"}),
        **({"new_tokens": model.new_tokens} if model.new_tokens else {}),
        "objective": recipe.rows_for,
        "seq_len": recipe.batch.seq_len,
        "seed": recipe.seed,
        **({"rollout": recipe.rollout.model_dump(mode="json", exclude={"server"})} if recipe.writes else {}),
        **({"embedding": recipe.embedding.model_dump(mode="json")} if recipe.embeds else {}),
        # The built-in rows are the docstrings of Python itself.
        "python": sys.version,
        "files": stamps,
    }
    key = content_hash(content)[:32]
    return (cache or cache_dir() / "data") / f"{key}.statistics.json"


def _files(name: str, of_folder: Callable[[Path], Iterable[Path]]) -> list[Path]:
    """The local files that a path or glob stands for."""
    path = Path(name)
    paths = of_folder(path) if path.is_dir() else {path, *map(Path, glob.glob(str(path), recursive=True))}
    return [path for path in paths if path.is_file()]
