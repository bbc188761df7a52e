"""Ranges of arguments end where their words say so."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.recipe.arguments import FLAG, POSITIVE, RATE, SHARE, Argument, count, number, one_of, wrong


@pytest.mark.parametrize(
    ("argument", "words", "among", "outside"),
    [
        (FLAG, "true or false", [True, False], [1, 0, "true", 3]),
        (one_of(8, 32), "8 or 32", [8, 32], [8.0, True, 4, "8"]),
        (one_of("linear", "cosine"), "linear or cosine", ["linear"], ["Linear", True]),
        (SHARE, "a number from 0 to 1", [0, 1, 0.5], [-0.1, 1.1, True, "0.5"]),
        (RATE, "a number from 0 to below 1", [0, 0.999], [1, 7]),
        (POSITIVE, "a number above 0", [1e-30, 5], [0, -3, "x", True]),
        (number(0), "a number from 0 on", [0, 1e9], [-1e-9]),
        (number(0, 1, above=True, below=True), "a number above 0 to below 1", [0.5], [0, 1]),
        (number(-1, 0, below=True), "a number from -1 to below 0", [-1, -0.8], [0, -1.1]),
        (count(1), "a whole number from 1 on", [1, 10**9], [0, -5, 1.0, True, "x"]),
        (count(1, 99), "a whole number from 1 to 99", [1, 99], [0, 100]),
    ],
)
def test_values_are_those_of_the_words(argument: Argument, words: str, among: list[Any], outside: list[Any]) -> None:
    assert argument.allowed == words
    assert [value for value in among if not argument.fits(value)] == []
    assert [value for value in outside if argument.fits(value)] == []


def test_wrong_are_known_names_with_values_that_do_not_fit() -> None:
    known = {"alpha": RATE, "centered": FLAG}
    assert wrong({"alpha": 7, "centered": True, "other": 7}, known) == {"alpha": "a number from 0 to below 1"}
