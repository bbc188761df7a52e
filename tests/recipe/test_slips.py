"""What YAML allows and a recipe does not, and where an error in YAML is said to be."""

from __future__ import annotations

import pytest

from recipes import BASE, write
from toolkit.recipe import RecipeError, load

pytestmark = pytest.mark.usefixtures("mine")


@pytest.mark.parametrize("typed", ["seq_len:64", "seq_len=64", "seq_len\uff1a 64", "seq_len:\xa064"])
def test_a_key_without_a_space_behind_its_colon_is_told_so(typed: str) -> None:
    """YAML takes it for a word, which would set the section's main key."""
    write("mine", f"{BASE}batch:\n  {typed}\n")
    with pytest.raises(RecipeError) as error:
        load("mine")
    (problem,) = error.value.problems
    assert problem.path == "batch" and "is a word, not a key with its value" in problem.what
    assert problem.hint == "write a space behind `seq_len:`"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("model: a\nseed:3\n\nprecision: fp32\n", 2, "no colon with a space behind it follows this key"),
        ("model: a\ndata: 'b\nseed: 3\n", 2, "a quotation mark that is not closed"),
        ("model: a\ndata: [b, c\n", 2, "a bracket or a quotation mark that is not closed"),
        ("model: a\nseed: 3\0\n", 2, "it holds the character U+0000"),
    ],
)
def test_an_error_in_yaml_is_where_it_begins(text: str, line: int, said: str) -> None:
    write("mine", text)
    with pytest.raises(RecipeError) as error:
        load("mine")
    (problem,) = error.value.problems
    assert problem.where == f"recipes/mine.yaml:{line}" and said in problem.what
