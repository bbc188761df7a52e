"""Which split a file is of, by the words of its path."""

from __future__ import annotations

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


def is_part(split: str) -> bool:
    """Whether a split is one of several of its kind, such as `train_sft` beside `train_prefs`."""
    return split_of(split) is not None and not any(split.lower() in aliases for aliases in SPLITS.values())


def is_of(name: str, split: str) -> bool:
    """Whether a file is of a split by its path: of one of several of a kind only by all of the split's name."""
    if is_part(split):
        return re.search(rf"(?<!\w){re.escape(split)}(?!\w)", name, re.IGNORECASE) is not None
    return split_of(name) is not None and split_of(name) == split_of(split)
