"""Every key of the schema with a wrong type, an empty value, a variable and a control character: one clear problem."""

from __future__ import annotations

import json
import shlex
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest

from recipes import write
from toolkit.cli.main import main
from toolkit.recipe import Problem, Recipe, RecipeError, Section, load
from toolkit.recipe.data import Source
from toolkit.recipe.schema import sections

SECRET = "hunter2hunter2"
VARIABLE = "${oc.env:MY_VARIABLE}"


def _keys() -> Iterator[tuple[str, Any]]:
    for name, field in Recipe.model_fields.items():
        inner = sections()[name].model_fields if name in sections() else {}
        yield from ((f"{name}.{key}", each) for key, each in inner.items() if key != "sources")
        if not inner:
            yield name, field
    yield from ((f"data.sources.0.{key}", field) for key, field in Source.model_fields.items())


def _takes(annotation: Any) -> set[type | str]:
    """What fits an annotation: types, and `choice` for one of several words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _takes(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return set().union(*map(_takes, get_args(annotation)))
    return {"choice"} if origin is Literal else {origin or annotation}


KEYS = {key: _takes(field.annotation) for key, field in _keys()}
"""Dotted key of every value to what it takes."""


def _must_have_a_key(kind: type | str) -> bool:
    """Whether it is a section that takes a key."""
    is_section = isinstance(kind, type) and issubclass(kind, Section)
    return is_section and any(field.is_required() for field in kind.model_fields.values())


def problems(values: dict[str, Any], place: str = "") -> dict[str, Problem]:
    """The problems of a recipe with these values at their keys, by key; one for each."""
    content: dict[str, Any] = {}
    for path, value in values.items():
        section, _, key = path.partition(".")
        if path.startswith("data.sources.0."):
            source = content.setdefault("data", {}).setdefault("sources", [{"path": "rows.jsonl"}])[0]
            source[path.rpartition(".")[2]] = value
        elif key:
            content.setdefault(section, {})[key] = value
        else:
            content[section] = value
    content.setdefault("model", {}).setdefault("path", "a/b")
    content.setdefault("data", {}).setdefault("sources", ["rows.jsonl"])
    write("mine", "".join(f"{name}: {json.dumps(part)}\n" for name, part in content.items()))
    with pytest.raises(RecipeError) as caught:
        load("mine")
    result: dict[str, Problem] = {}
    for problem in caught.value.problems:
        key = next(key for key in values if f"{problem.path}.".startswith(f"{key}."))
        assert key not in result, f"two problems: {result.get(key)}\n{problem}"
        assert problem.where.startswith("recipes/mine.yaml:") and problem.what and problem.hint, problem
        assert all(isinstance(part, str) for part in vars(problem).values()), problem
        assert SECRET not in str(problem) and "\x07" not in str(problem)
        result[key] = problem
    return result


@pytest.mark.parametrize("value", [[[1]], {"a b": {"c": 1}}, VARIABLE], ids=["list", "mapping", "variable"])
def test_a_wrong_type_is_one_problem(mine: Path, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", SECRET)
    keys = [key for key, takes in KEYS.items() if value != VARIABLE or str not in takes]
    if isinstance(value, dict):  # In a section with a key that it must have, that this is missing is a second one.
        keys = [key for key in keys if not any(map(_must_have_a_key, KEYS[key]))]
    found = problems(dict.fromkeys(keys, value))
    assert sorted(found) == sorted(keys)


def test_a_variable_is_not_filled_in_where_it_is_told_to_be_wrong(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "271828")
    keys = [key for key, takes in KEYS.items() if str not in takes and not key.startswith("data.sources")]
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [f"{key}={VARIABLE}" for key in keys])
    assert len(caught.value.problems) == len(keys) and "271828" not in str(caught.value)


def test_an_empty_value_is_one_problem(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "")
    keys = [key for key in KEYS if key != "description"]
    for empty in ("", VARIABLE):
        assert sorted(problems(dict.fromkeys(keys, empty))) == sorted(keys)
    required = [key for key, takes in KEYS.items() if types.NoneType not in takes]
    assert sorted(problems(dict.fromkeys(required, None))) == sorted(required)
    inside: dict[type | str, Callable[[], Any]] = {list: lambda: [""], dict: lambda: {"a": ""}}
    holders = {key: make() for kind, make in inside.items() for key, takes in KEYS.items() if kind in takes}
    assert sorted(problems(holders)) == sorted(holders)


def test_a_control_character_is_one_problem(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_VARIABLE", "a\x07b")
    for value in ("a\x07b", VARIABLE):
        assert sorted(problems(dict.fromkeys(KEYS, value))) == sorted(KEYS)
    texts = ("description", "rollout.system", "embedding.query_prompt", "embedding.document_prompt")
    lines = [key for key, takes in KEYS.items() if str in takes and key not in texts]
    assert sorted(problems(dict.fromkeys(lines, "two\nlines"))) == sorted(lines)
    write("mine", "model: gpt2\ndata: alpaca\n'k\x07ey': 1\n")
    with pytest.raises(RecipeError, match=r"mine.yaml:3") as caught:
        load("mine")
    assert "\x07" not in str(caught.value)


@pytest.mark.parametrize("value", ["[1]", "[a]", "[true]", "'5'", "'1e-3'", "'true'", "yes"])
def test_what_a_change_says_is_taken(mine: Path, value: str) -> None:
    keys = [key for key in KEYS if not key.startswith("data.sources")]

    def wrong(typed: list[str]) -> dict[str, Problem]:
        with pytest.raises(RecipeError) as caught:
            load("smollm2_135m_lora_demo", typed)
        return {problem.path: problem for problem in caught.value.problems}

    first = wrong([f"{key}={value}" for key in keys])
    changes = {
        path: shlex.split(each.hint)[1] for path, each in first.items() if each.hint.startswith(f"write {path}=")
    }
    assert changes
    # A number may be out of bounds all the same.
    again = wrong([*changes.values(), "seed=-1"])
    assert [path for path in changes if path in again and again[path].allowed == first[path].allowed] == []


PUBLISHED = [
    *("model.new_tokens", "method.target_modules", "method.target_parameters", "method.rank_pattern"),
    *("method.alpha_pattern", "method.modules_to_save", "output.name", "extra.lora"),
]


@pytest.mark.parametrize("key", [key for key, takes in KEYS.items() if takes & {str, list, dict}])
def test_a_value_of_the_environment_is_shown_as_it_was_written(
    key: str, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    takes, published = KEYS[key], key in PUBLISHED
    monkeypatch.setenv("MY_VARIABLE", SECRET)
    text = f"'a {VARIABLE}/b'"
    value = text if str in takes else f"[{text}]" if list in takes else f"{{a: {text}}}"
    section, of_source, field = key.partition("sources.0.")
    change = f"{section}sources=[{{path: x, {field}: {value}}}]" if of_source and field != "path" else f"{key}={value}"
    change = change.replace("sources.0.path=" + value, f"sources=[{value}]")
    for name in ("validate", "show", "plan"):
        main([name, "recipe=smollm2_135m_lora_demo", change, *["--json"] * (name == "plan")])
    shown = "".join(capsys.readouterr())
    assert SECRET not in shown
    assert ("cannot come from the environment" in shown) == published
    if not published:
        return
    monkeypatch.delenv("MY_VARIABLE")
    # Not `export it`, which would be refused.
    with pytest.raises(RecipeError, match=r"(?s)is not set.*change   write the value itself"):
        load("smollm2_135m_lora_demo", [change])


PATHS = [
    "output.dir",
    "output.name",
    "strategy.nvme_path",
    "checkpoint.resume",
    "checkpoint.staging",
    "model.tokenizer",
    "model.path",
    "data.sources.0.path",
]


@pytest.mark.parametrize("key", PATHS)
def test_a_variable_of_the_shell_in_a_path_is_refused_and_the_home_filled_in(mine: Path, key: str) -> None:
    assert problems({key: "$HOME/x"})[key].hint == f"write {key}: ${{oc.env:HOME}}/x"
    changes = {"data.sources.0.path": "data=~/x"}
    recipe = load("smollm2_135m_lora_demo", [changes.get(key, f"{key}=~/x")]).recipe
    value = recipe.data.sources[0].path if key.startswith("data") else attrgetter(key)(recipe)
    assert value == str(Path.home() / "x")


def test_a_number_is_shown_as_it_was_written(mine: Path) -> None:
    for text in ("83e4012", "0x1f", "1_000", "off"):
        write("mine", f"model:\n  path: a/b\n  revision: {text}\ndata: [rows.jsonl]\n")
        with pytest.raises(RecipeError) as caught:
            load("mine")
        (problem,) = caught.value.problems
        assert problem.given.startswith(text) and problem.hint == f"quote it: model.revision: '{text}'"
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", ["model.revision=83e4012"])
    (problem,) = caught.value.problems
    assert (problem.where, problem.hint) == ("command line", """quote it: model.revision='"83e4012"'""")
