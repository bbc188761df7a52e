"""`bad_batches.jsonl` in the run folder: rows whose loss or gradients were not finite, or rose far above the others."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from toolkit.common import brief
from toolkit.files import as_json, write_atomically
from toolkit.train.session import Session

FILE = "bad_batches.jsonl"
_MOST_ROWS, _MOST_CHARACTERS = 64, 2000
"""So many rows of a step are saved with their text, and so much of each."""


def save_batches(
    session: Session,
    steps: list[int],
    what: str,
    then: str,
    means: list[list[float]] | None = None,
    tokens: list[list[list[Any]]] | None = None,
) -> None:
    """Writes the micro-batches of some steps to `bad_batches.jsonl`, a line each. For the first process.

    Args:
        means: Of each process and its micro-batches the loss per token, where it is known. Those that are not finite
            are then saved alone, if any is.
        tokens: Of each process and its micro-batches those of each row, of a stream, whose rows have no numbers.
    """
    batches, train, layout = session.trainer.batches, session.trainer.train_dataset, session.layout
    if not (batches or tokens):
        return
    lines, left = [], _MOST_ROWS
    # Processes that get the same rows: the first of them stands for all, or the first whose part of them is broken.
    first = {layout.replica(rank): rank for rank in reversed(range(layout.world_size))}
    for step in steps:
        rows = list(batches.between(step - 1, step)) if batches else []
        count = len(rows) // layout.data_parallel_size or len(tokens[0] if tokens else [])
        every = [(turn, replica) for turn in range(count) for replica in range(layout.data_parallel_size)]
        broken = {
            (turn, layout.replica(rank)): rank
            for turn, rank in itertools.product(range(count), reversed(range(layout.world_size)))
            if means and not math.isfinite(means[rank][turn])
        }
        for turn, replica in sorted(broken) or every:
            rank = broken.get((turn, replica), first[replica])
            line: dict[str, Any] = {"step": step, "what": what, "then": then, "rank": rank}
            if means:
                line["loss"] = means[rank][turn]
            if rows:
                line["rows"] = rows[turn * layout.data_parallel_size + replica]
                texts = [train[number]["input_ids"] for number in line["rows"][:left]]
            else:
                texts = (tokens or [])[rank][turn][:left]
            left -= len(texts)
            line["texts"] = [brief(session.tokenizer.decode(each), columns=_MOST_CHARACTERS) for each in texts]
            lines.append(as_json(line) + "\n")
    with (session.folder.path / FILE).open("a", encoding="utf-8") as stream:
        stream.writelines(lines)


def keep_until(file: Path, step: int) -> None:
    """Drops the lines of steps that will be taken again."""
    if file.is_file():
        # Rows may hold characters that end a line elsewhere, such as U+2028.
        lines = filter(None, file.read_text(encoding="utf-8", errors="replace").split("\n"))
        write_atomically(file, "".join(f"{line}\n" for line in lines if _step(line) <= step))


def _step(line: str) -> int:
    """The step of a line; one that is damaged stays."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, LookupError):
        return 0
