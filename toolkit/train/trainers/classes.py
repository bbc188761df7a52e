"""How well classes are told apart: of rows by what each was taken for, of entities by their words.

Entities are those of CoNLL's evaluation, as seqeval counts them by default: a run of words whose tags name one type,
begun by `B-` or `S-`, by a change of type, or by any tag behind a word outside or an entity that `E-` or `S-` has
ended. BILOU's `U-` and `L-`, and BMES's `M-`, are read as `S-`, `E-` and `I-`. An entity is found if type, first and
last word are those of the label. A figure without anything to be counted is 0, as in scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.common import UserError
from toolkit.recipe import Recipe

_OUTSIDE = "O"
_MARKS = {"B": "B", "I": "I", "E": "E", "S": "S", "U": "S", "L": "E", "M": "I"}
"""What stands before a type, and which of IOBES it is."""
MOST_CONFUSED = 128
"""Classes up to which is kept what those of each were taken for: of 10,000 that would be 800 MB for each batch."""


def class_figures(counts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, Any]:
    """Figures of classes, by the keys of an evaluation.

    Args:
        counts: For each class its labels that were told, how often it was told, and its labels.
        names: Of the classes.
    """
    classes = {name: {**_scores(*row), "rows": row[2]} for name, row in zip(names, counts, strict=True)}
    right, _, total = (sum(row[n] for row in counts) for n in range(3))
    # A class that is neither there nor ever told is left out, as in scikit-learn.
    present = [classes[name]["f1"] for name, (_, taken, there) in zip(names, counts, strict=True) if taken or there]
    return {
        "eval_accuracy": right / total if total else 0.0,
        "eval_macro_f1": sum(present) / len(present) if present else 0.0,
        "eval_classes": classes,
    }


def entity_types(names: Sequence[str]) -> list[str]:
    """Types of entities that these classes tag, as IOB2, IOBES or BILOU does; none if they are no such tags."""
    tags = [name for name in names if name != _OUTSIDE]
    if not tags or not all(name[:1] in _MARKS and name[1:2] == "-" for name in tags):
        return []
    return sorted({name[2:] for name in tags})


def require_entities(recipe: Recipe, names: Sequence[str]) -> None:
    """Refuses to look for the model that finds entities best where classes tag none, as no evaluation would say it.

    Raises:
        UserError: They do not.
    """
    if recipe.checkpoint.keep_best == "eval_entity_f1" and not entity_types(names):
        raise UserError(
            "checkpoint.keep_best: eval_entity_f1 is measured of tags B-…, I-… and O (or IOBES, BILOU), and the "
            f"classes are {', '.join(names[:10])}{' …' * (len(names) > 10)}",
            "set checkpoint.keep_best=eval_macro_f1, or write the tags so",
        )


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Type, first and last word of each entity in the tags of a row's words."""
    found, begun = set(), 0
    mark, kind = _OUTSIDE, ""
    for place, tag in enumerate([*tags, _OUTSIDE]):
        last, open_kind = mark, kind
        mark, kind = _MARKS.get(tag[:1], _OUTSIDE), tag[2:]
        ends = last != _OUTSIDE and (last in "ES" or mark in (_OUTSIDE, "B", "S") or kind != open_kind)
        if ends:
            found.add((open_kind, begun, place - 1))
        if mark != _OUTSIDE and (ends or last == _OUTSIDE):
            begun = place
    return found


def entity_counts(wanted: Sequence[str], taken: Sequence[str], types: Sequence[str]) -> list[list[int]]:
    """For each type the entities of a row that were found, those that were said to be there, and those that are."""
    there, said = entities(wanted), entities(taken)
    return [[sum(each[0] == kind for each in group) for group in (there & said, said, there)] for kind in types]


def entity_figures(counts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Figures of entities, by the keys of an evaluation; those of all types together count each entity alike.

    Args:
        counts: Type to what `entity_counts` adds up to.
    """
    whole = _scores(*(sum(row[n] for row in counts.values()) for n in range(3)))
    return {
        **{f"eval_entity_{name}": value for name, value in whole.items()},
        "eval_entities": {kind: {**_scores(*row), "entities": row[2]} for kind, row in counts.items()},
    }


def _scores(right: int, taken: int, there: int) -> dict[str, float]:
    """Precision, recall and their harmonic mean."""
    both = taken + there
    return {
        "precision": right / taken if taken else 0.0,
        "recall": right / there if there else 0.0,
        "f1": 2 * right / both if both else 0.0,
    }
