"""Which split a file is of, by the words of its path."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from toolkit.common import UserError
from toolkit.recipe.data import Source

SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev", "eval", "evaluation"},
    "test": {"test", "testing"},
}
"""Split to its names in those of files and folders."""
_IN_NUMBER = r"(?<=\d)(?=\d)"
"""Of names, such as `train_1`, which is not the beginning of `train_10`."""


def split_of(name: str) -> str | None:
    """The split that the path of a file or the name of a split means, or None: a file's own name says it before those
    of its folders, and `train_sft` is one of the kinds of training rows."""
    for part in reversed(name.lower().split("/")):
        words = set(re.split(r"[^a-z]+", part))
        if found := next((split for split, aliases in SPLITS.items() if aliases & words), None):
            return found
    return None


def is_only_split(name: str, beside: Iterable[str]) -> bool:
    """Whether the name of a file says its split and at most a number (`test.csv`) or what a file beside it is called
    (`chats_test.csv`, where there is `chats.csv`), unlike `unit_test_cases.csv`."""
    words = "|".join(itertools.chain(*SPLITS.values()))
    stem, *stems = (each.lower().partition(".")[0] for each in (name, *beside))
    rest = re.sub(rf"(?<![a-z])({words})(?![a-z])", "", stem).strip("-_ ")
    return rest in stems or re.match(rf"({words})([-_.]?\d.*)?\.", name.lower()) is not None


def of_split(source: Source, files: list[Path], root: Path) -> list[Path]:
    """Those of a folder's or a glob's files that are of the split of a source; names below `root` say it.

    Raises:
        UserError: There is none.
    """
    if re.search(r"[\[+]", source.split):
        raise UserError(
            f"`split: {source.split}` is a slice, which only hub data sets have",
            "name the split alone, and limit its rows with `max_samples` of the source",
        )
    splits: dict[str, list[Path]] = {}
    named = {str(path.relative_to(root)): path for path in files}
    for name, path in named.items():
        splits.setdefault(split_of(name) or "train", []).append(path)
    split = split_of(source.split) or source.split
    if _is_part(source.split):
        if chosen := [path for name, path in named.items() if is_of(name, source.split)]:
            return chosen
        if any(split_of(name) == split and _is_of_another_part(name, source.split) for name in named):
            split = source.split
    if split == "train" and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        listing = "; ".join(f"`{name}`: {', '.join(p.name for p in files[:3])}" for name, files in splits.items())
        raise UserError(
            f"data source `{source.path}` has no split `{source.split}`; it has {listing}",
            f"set `split` of the source or `data.eval_split` to one of {', '.join(splits)}, "
            "or hold a fraction out with `data.eval_split: 0.05`",
        )
    return splits[split]


def _is_part(split: str) -> bool:
    """Whether a split is one of several of its kind, such as `train_sft` beside `train_prefs`."""
    return split_of(split) is not None and not any(split.lower() in aliases for aliases in SPLITS.values())


def is_of(name: str, split: str) -> bool:
    """Whether a file is of a split by its path: of one of several of a kind only by all of the split's name, under
    any name of the kind, beside which it may have other words and numbers."""
    kind, split = split_of(split), split.lower()
    if kind is None or kind != split_of(name):
        return False
    if not (_is_part(split) and (said := _find_kind(kind, split))):
        return True
    before, behind = re.escape(split[: said.start()]), re.escape(split[said.end() :])
    whole = rf"(?<![a-z])(?!{_IN_NUMBER}){before}({'|'.join(SPLITS[kind])}){behind}(?!{_IN_NUMBER})(?![a-z])"
    return re.search(whole, name.lower()) is not None


def _is_of_another_part(name: str, split: str) -> bool:
    """Whether a file of the same kind is of another part of it: `train_prefs` or `train_2` where `train_sft` or
    `train_1` is asked for, but not `my_train-00000-of-00001` or a file in a folder `train`."""
    return not _beside_kind(name).isdisjoint(_beside_kind(split))


def _beside_kind(name: str) -> set[tuple[str, bool]]:
    """What stands nearest to the word that says the kind of split, before and behind it: whether that is a number."""
    kind = split_of(name)
    for part in reversed(name.lower().split("/")):
        if kind and (said := _find_kind(kind, part)):
            before, behind = part[: said.start()], part[said.end() :].partition(".")[0]
            near = {"before": re.findall(r"[a-z0-9]", before)[-1:], "behind": re.findall(r"[a-z0-9]", behind)[:1]}
            return {(side, each.isdigit()) for side, found in near.items() for each in found}
    return set()


def _find_kind(kind: str, part: str) -> re.Match[str] | None:
    return re.search(rf"(?<![a-z])({'|'.join(SPLITS[kind])})(?![a-z])", part)
