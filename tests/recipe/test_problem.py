"""Problems as a terminal shows them: all of them where they fit, and what to change of as many as possible."""

from __future__ import annotations

import pytest

from toolkit.recipe import Problem, RecipeError


def shown(problems: list[Problem]) -> list[str]:
    lines = str(RecipeError("mine", problems)).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    return lines


def unknown(key: str, line: int, hint: str, where: str = "recipes/mine.yaml:{}") -> Problem:
    return Problem(key, "unknown key", where.format(line), "1", "model, data", hint)


def test_a_configuration_of_another_tool_is_answered_key_by_key() -> None:
    """Fifty keys: what to write instead of each stands on the screen, not only of the first two."""
    problems = [Problem("model", "is required", hint="set model, e.g. model=…")]
    problems += [unknown(f"other_{n}", n, f"write batch.key_{n}: {n}") for n in range(28)]
    problems += [unknown(f"empty_{n}", 40 + n, "remove it: it is empty") for n in range(20)]
    lines = shown(problems)
    assert "model: is required" in lines and "unknown keys  (recipes/mine.yaml, with their lines)" in lines
    for n in range(28):
        assert f"    other_{n} ({n}): write batch.key_{n}: {n}" in lines
    # Those of the same change share a row, after what must be written.
    text = " ".join(" ".join(lines).split())
    assert ", ".join(f"empty_{n} ({40 + n})" for n in range(20)) + ": remove it: it is empty" in text
    assert text.endswith("remove it: it is empty")


def test_few_unknown_keys_are_shown_in_full() -> None:
    lines = shown([unknown(f"other_{n}", n, "write seed: 1") for n in range(3)])
    assert sum(line.startswith("    given ") for line in lines) == 3


def test_keys_of_several_places_stand_under_each() -> None:
    problems = [unknown(f"in_a_file_{n}", n, f"write seed: {n}") for n in range(8)]
    problems += [unknown(f"typed_{n}", 0, f"write seed={n}", "command line") for n in range(8)]
    lines = shown(problems)
    assert "unknown keys  (recipes/mine.yaml, with their lines)" in lines and "unknown keys  (command line)" in lines
    assert "    typed_3: write seed=3" in lines


@pytest.mark.parametrize("count", [37, 38, 39, 250])
def test_what_does_not_fit_is_counted(count: int) -> None:
    lines = shown([unknown(f"other_{n}", n, f"write seed: {n}") for n in range(count)])
    named = sum(line.startswith("    other_") for line in lines)
    assert lines[-1] == (f"… and {count - named} more" if named < count else lines[-1])
    assert named >= min(count, 36)
