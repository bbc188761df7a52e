"""Which known word a misspelt one means, and which plain value a text."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable

from toolkit.recipe.other_names import TRUTH

_A_SLIP = 2
"""How many changes a word typed in haste has at most, so that its beginning may be one."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word of which this is a slip of typing, a part or the long form, or an empty string."""
    folded = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    initials = [
        name for name in folded if "_" in name and "".join(part[:1] for part in name.split("_")) == word.lower()
    ]
    if len(initials) == 1:  # lr
        return folded[initials[0]]
    word = word.lower().replace("-", "_")
    most = (len(word) + 2) // 5
    slips = {name: _slips(word, name, most) for name in folded if abs(len(name) - len(word)) <= min(most, 4)}
    nearest = max(slips, key=lambda name: (-slips[name], name), default="")
    if nearest and slips[nearest] <= most:
        # dpo_desirable_weight means desirable_weight, although as many changes lead to undesirable_weight.
        meant = [name for name in folded if slips[nearest] > _A_SLIP and word.endswith(f"_{name}")]
        return folded[meant[0] if meant else nearest]
    longer = [name for name in folded if _is_part(word, name) or _spells_out(word, name)]
    return folded[longer[0]] if len(longer) == 1 else ""


def unquoted(text: str, kinds: Collection[str]) -> str:
    """The number or true/false that a text is, and should be, as it is written without quotes; empty if it is none.

    Args:
        kinds: pydantic's findings about it.
    """
    if "bool_type" in kinds:
        word = TRUTH.get(text.lower(), text.lower())
        return word if word in ("true", "false") else ""
    with contextlib.suppress(ValueError):
        number = float(text)
        if ("float_type" in kinds and math.isfinite(number)) or ("int_type" in kinds and number.is_integer()):
            return str(int(text)) if text.isdigit() else text.strip()  # YAML takes 010 for 8.
    return ""


def _is_part(word: str, name: str) -> bool:
    """save_limit of save_total_limit."""
    return set(word.split("_")) < set(name.split("_")) and 3 * len(word) >= len(name)


def _spells_out(word: str, name: str) -> bool:
    """seq_length for seq_len."""
    parts, shorts = word.split("_"), name.split("_")
    pairs = zip(parts, shorts, strict=False)
    return len(parts) == len(shorts) and all(len(short) > 2 and part.startswith(short) for part, short in pairs)


def _slips(word: str, meant: str, most: int) -> int:
    """Letters left out, added, changed, or swapped with their neighbour (Damerau 1964); some number above `most` if
    they are more."""
    rows = [list(range(len(meant) + 1))]
    for i, letter in enumerate(word, 1):
        row = [i]
        for j, wanted in enumerate(meant, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and (letter, word[i - 2]) == (meant[j - 2], wanted):
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
        if min(*row, *rows[-2]) > most:  # What follows builds on these two.
            break
    return rows[-1][-1]
