"""The tokens of all distinct rows of a data set: what is measured of them, and which of them are trained on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from toolkit.data.auditing import audit as auditing
from toolkit.data.auditing.answers import Pairs, Prompts, Verdicts
from toolkit.data.auditing.classes import Survey
from toolkit.data.formats.related import Texts, form_of
from toolkit.data.mixture import Indices
from toolkit.data.rewards import ANSWER, Scorer, is_one_number, needs_reference
from toolkit.data.tokenization import Chunker
from toolkit.recipe import Recipe


class TokenTable:
    """All distinct rows as tokens, by the number of the row; a row may be several chunks. `places` says where a row
    stands in the data. Figures but for length and over_long are those after over-long rows were handled."""

    def __init__(
        self, chunks: Dataset, chunker: Chunker, places: Dataset, recipe: Recipe, found: Survey | None
    ) -> None:
        self.found = found
        self.chunks, self.chunker, self.places, self.recipe = chunks, chunker, places, recipe
        self.kinds = sorted(chunks.data.column("kind").unique().to_pylist())
        row, length, trained, stops, merged, prompt_lost = (
            chunks.data.column(name).to_numpy()
            for name in ("row", "length", "trained", "stops", "merged", "prompt_lost")
        )
        sequences = ("input_ids", "labels") if "Pair" in self.kinds else ("input_ids",)
        tokens = sum(pc.list_value_length(chunks.data.column(name)).to_numpy() for name in sequences)
        # Every row has at least one chunk, and chunks of a row follow each other.
        self.start = np.flatnonzero(np.diff(row, prepend=-1))
        self.count = np.diff(self.start, append=len(row))
        over_long = length > chunker.seq_len
        self.keep = (trained > 0) & ~(over_long & (chunker.over_long == "drop"))

        def per_row(values: Any) -> NDArray[Any]:
            return np.add.reduceat(np.where(self.keep, values, 0), self.start) if len(row) else row

        self.length, self.over_long = length[self.start], over_long[self.start]
        self.tokens, self.trained, self.stops, self.merged = map(per_row, (tokens, trained, stops, merged))
        self.prompt_lost = per_row(prompt_lost)
        self.answers = {
            name: np.asarray(chunks.data.column(name).to_numpy()) for name in ("chosen", "rejected", "equal", "apart")
        }
        self.desirable = np.asarray(chunks.data.column("desirable").to_numpy())[self.start]

    def usable(self, numbers: Indices) -> Indices:
        """Those of the rows that have a trained token."""
        return numbers[self.trained[numbers] > 0]

    def measure(self, numbers: Indices) -> auditing.Side:
        """Figures of these rows, with their repeats."""
        used, length = self.usable(numbers), self.length[numbers]
        over_long, action = int(self.over_long[numbers].sum()), self.chunker.over_long
        left_out = over_long if action == "drop" else 0
        pairs = self._pairs(numbers, used) if self.recipe.pairs else None
        texts = self._texts(numbers, used) if self.recipe.embeds else None
        left_out += pairs.equal if pairs else texts.equal if texts else 0
        # Rows that are too long, or whose answers are the same, are told of by themselves.
        told = self.over_long[numbers] & (action == "drop") | self.answers["equal"][self.start[numbers]]
        untrained = numbers[(self.trained[numbers] == 0) & ~told]
        return auditing.Side(
            rows=len(used),
            tokens=int(self.tokens[used].sum()),
            trained_tokens=int(self.trained[used].sum()),
            untrained_rows=len(numbers) - len(used) - left_out,
            first_untrained=self.places[int(untrained[0])]["where"] if len(untrained) else "",
            over_long=auditing.OverLong(rows=over_long, action=action, seq_len=self.chunker.seq_len),
            longest=self.places[int(numbers[length.argmax()])]["where"] if len(numbers) else "",
            stop_trained_rows=int(np.count_nonzero(self.stops[used])),
            boundary_merged_rows=int(np.count_nonzero(self.merged[used])),
            prompt_lost_rows=int(np.count_nonzero(self.prompt_lost[used])),
            lengths=auditing.Lengths.of(length),
            pairs=pairs,
            verdicts=self._verdicts(used) if self.recipe.judges else None,
            prompts=self._prompts(used) if self.recipe.reinforces else None,
            classes=self.found.figures(self._labels(used)) if self.found else None,
            texts=texts,
        )

    def _labels(self, used: Indices) -> NDArray[np.int64]:
        """Those of these rows, each of which is one chunk, end to end."""
        labels = self.chunks.data.column("labels").take(pa.array(self.start[used]))
        return np.asarray(pc.list_flatten(labels).to_numpy(), dtype=np.int64)

    def _verdicts(self, used: Indices) -> Verdicts:
        """Figures of judged answers."""
        good, trained = self.desirable[used], self.trained[used]
        return Verdicts(
            desirable=int(np.count_nonzero(good)),
            desirable_tokens=int(trained[good].sum()),
            undesirable_tokens=int(trained[~good].sum()),
        )

    def _prompts(self, used: Indices) -> Prompts:
        """Figures of prompts."""
        rows = self.chunks.select(self.start[used])
        known = [json.loads(text) for text in rows["columns"]]
        asked = [tuple(ids) for ids in rows["input_ids"]]
        lacking = Scorer(self.recipe.rewards, runs_code=False).of_references([columns for _, columns in known])
        places = {name: int(wrong.argmax()) for name, wrong in lacking.items() if wrong.any()}
        return Prompts(
            # Those that weights repeat are no copies in the data.
            repeated=len(np.unique(used)) - len(set(asked)),
            without_reference=sum(not columns[ANSWER] for _, columns in known),
            needs_reference=any(map(needs_reference, self.recipe.rewards.parts().values())),
            several_numbers=sum(not is_one_number(columns[ANSWER]) for _, columns in known)
            if self.recipe.rewards.numeric
            else 0,
            unrewarded={name: int(wrong.sum()) for name, wrong in lacking.items()},
            example={name: f"{known[at][0]}: {known[at][1][ANSWER][:80]!r}" for name, at in places.items()},
        )

    def _texts(self, numbers: Indices, used: Indices) -> Texts:
        """Figures of texts that belong together; those of a row are one chunk."""
        keys, cut, scores = (
            self.chunks.data.column(name).take(pa.array(self.start[used])) for name in ("keys", "cut", "score")
        )
        dropped = self.over_long[numbers] & (self.chunker.over_long == "drop")
        return Texts.of(
            pc.list_flatten(keys).to_numpy().reshape(len(used), self.recipe.answers),
            used,
            equal=int(np.count_nonzero(self.answers["equal"][self.start[numbers]] & ~dropped)),
            cut=pc.sum(cut).as_py() or 0,
            scores=scores.to_numpy() if form_of(self.recipe.embedding) == "scored" else None,
        )

    def _pairs(self, numbers: Indices, used: Indices) -> Pairs:
        """Figures of pairs of answers, each of which is one chunk."""
        chosen, rejected, equal, apart = self.answers.values()
        dropped = self.over_long[numbers] & (self.chunker.over_long == "drop")
        return Pairs(
            chosen_tokens=int(chosen[used].sum()),
            rejected_tokens=int(rejected[used].sum()),
            longer_chosen=int(np.count_nonzero(chosen[used] > rejected[used])),
            equal=int(np.count_nonzero(equal[numbers] & ~dropped)),
            apart=int(np.count_nonzero(apart[used])),
        )

    def take(self, numbers: Indices) -> Dataset:
        """The usable chunks of the rows, in their order: columns input_ids and labels, of pairs seq_lengths too, of
        judged answers desirable."""
        count = self.count[numbers]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        chosen = np.repeat(self.start[numbers], count) + within
        further = ["seq_lengths"] if self.recipe.pairs else ["desirable"] if self.recipe.judges else []
        further += ["columns"] if self.recipe.reinforces else []
        further += ["seq_lengths", "keys", "score"] if self.recipe.embeds else []
        if self.found and pc.max(pc.list_value_length(self.chunks.data.column("token_type_ids"))).as_py():
            further = ["token_type_ids"]
        columns = ["input_ids", "labels", *further]
        return self.chunks.select_columns(columns).select(chosen[self.keep[chosen]])
