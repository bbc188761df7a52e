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


@pytest.mark.parametrize(
    ("text", "line", "path", "said"),
    [
        ("optimizer:\n\xa0\xa0eps: 1e-4\n", 3, "", "U+00A0 no-break space stands beside the key eps"),
        ("\u3000seed: 3\n", 2, "", "U+3000 ideographic space stands beside the key seed"),
        ("seed: \xa03\n", 2, "seed", "U+00A0 no-break space stands at an end of this value"),
        (f"seed: {'9' * 5000}\n", 2, "seed", "is a number of more than 64 bits"),
        (f"batch: {{seq_len: {'9' * 101}}}\n", 2, "batch.seq_len", "is a number of more than 64 bits"),
    ],
)
def test_what_yaml_would_take_for_another_word_or_python_would_not_read(
    text: str, line: int, path: str, said: str
) -> None:
    write("mine", f"model: a\n{text}")
    with pytest.raises(RecipeError) as error:
        load("mine")
    (problem,) = error.value.problems
    assert (problem.where, problem.path, problem.what) == (f"recipes/mine.yaml:{line}", path, said)


def test_odd_spaces_in_quotes_and_within_text_are_kept() -> None:
    write("mine", f'{BASE}description: "\xa0prix\xa0: 3"\n')
    assert load("mine").recipe.description == "\xa0prix\xa0: 3"
    write("mine", f"{BASE}description: prix\xa0: 3\n".replace("\xa0: ", "\xa0"))
    assert load("mine").recipe.description == "prix\xa03"
