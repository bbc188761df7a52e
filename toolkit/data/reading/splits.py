"""Which split a file is of, by the words of its path."""

from __future__ import annotations

import itertools
import re

SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev", "eval", "evaluation"},
    "test": {"test", "testing"},
}
"""Split to its names in those of files and folders."""


def split_of(name: str) -> str | None:
    """The split that the path of a file or the name of a split means, or None: a file's own name says it before those
    of its folders, and `train_sft` is one of the kinds of training rows."""
    for part in reversed(name.lower().split("/")):
        words = set(re.split(r"[^a-z]+", part))
        if found := next((split for split, aliases in SPLITS.items() if aliases & words), None):
            return found
    return None


def is_split_alone(name: str) -> bool:
    """Whether the name of a file says its split and at most a number: `test.csv`, not `unit_test_cases.csv`."""
    words = "|".join(itertools.chain(*SPLITS.values()))
    return re.match(rf"({words})([-_.]?\d.*)?\.", name.lower()) is not None


def is_part(split: str) -> bool:
    """Whether a split is one of several of its kind, such as `train_sft` beside `train_prefs`."""
    return split_of(split) is not None and not any(split.lower() in aliases for aliases in SPLITS.values())


def is_of(name: str, split: str) -> bool:
    """Whether a file is of a split by its path: of one of several of a kind only by all of the split's name."""
    if is_part(split):
        return re.search(rf"(?<!\w){re.escape(split)}(?!\w)", name, re.IGNORECASE) is not None
    return split_of(name) is not None and split_of(name) == split_of(split)
