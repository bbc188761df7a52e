"""The data set made of the standard library's own documentation."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
from harness import environment

from toolkit.common import UserError
from toolkit.data.reading import builtin


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return builtin.docstring_rows()


def test_rows_are_plentiful_chats_without_duplicates(rows):
    assert len(rows) >= 2_000
    answers = []
    for row in rows:
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert "`" in user["content"]
        assert builtin.MIN_ANSWER_CHARS <= len(assistant["content"]) <= builtin.MAX_ANSWER_CHARS
        answers.append(assistant["content"].lower())
    assert len(set(answers)) == len(rows)
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)


def test_answers_are_the_documentation_of_what_is_asked(rows):
    answers = {row["messages"][0]["content"].split("`")[1].strip("()"): row["messages"][1]["content"] for row in rows}
    assert answers["textwrap.dedent"].startswith("Remove any common leading whitespace from every line in `text`.")
    assert answers["len"] == "Return the number of items in a container."
    assert answers["str.join"].startswith("Concatenate any number of strings.")
    assert answers["math.isclose"] == "Determine whether two floating point numbers are close in value."


@pytest.mark.parametrize(
    ("doc", "answer"),
    [
        ("range(stop) -> range object\n\nReturn a sequence of\nnumbers.", "Return a sequence of numbers."),
        ("S.count(sub) -> int\nHow often `sub` occurs.", "How often `sub` occurs."),
        ("Adds numbers.\n\n    >>> add(1, 2)\n    3\n", "Adds numbers."),
        ("Adds numbers.\n\nArguments:\n  a: one\n  b: two", "Adds numbers."),
        ("First.\n\nSecond.\n\nThird.", "First.\nSecond."),
    ],
)
def test_answer_is_leading_prose_without_signature_or_example(doc, answer):
    assert builtin._answer(doc) == answer


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        (
            "class",
            {
                "x.y": "What is the Python class `x.y`?",
                "os.path": "Explain the class `os.path` from Python's standard library.",
                "io.open": "In Python, what is `io.open` for?",
                "re.sub": "Describe `re.sub` in Python.",
            },
        ),
        (
            "function",
            {
                "x.y": "What does the Python function `x.y` do?",
                "os.path": "Explain `os.path` from Python's standard library.",
                "io.open": "In Python, what is `io.open` for?",
                "re.sub": "Describe what `re.sub()` does in Python.",
            },
        ),
        (
            "method",
            {
                "x.y": "What does the Python method `x.y` do?",
                "os.path": "Explain the method `os.path` from Python's standard library.",
                "io.open": "In Python, what happens when I call `io.open`?",
                "re.sub": "Describe what `re.sub()` does in Python.",
            },
        ),
    ],
)
def test_an_object_is_asked_for_in_one_of_four_ways_by_its_name(kind, questions):
    assert {name: builtin._question(kind, name) for name in questions} == questions


def test_rows_are_the_same_in_every_process_and_import_no_framework(tmp_path, rows):
    program = (
        "import sys, json; from toolkit.data.reading import builtin; rows = builtin.docstring_rows();"
        "print(json.dumps(['torch' in sys.modules, 'antigravity' in sys.modules, rows]))"
    )
    own = environment() | {"TOOLKIT_CACHE": str(tmp_path), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, rows]


def test_standard_library_without_sources_is_an_error_with_a_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=r"needs the sources of the standard library(?s:.*)data\.sources"):
        builtin.docstring_rows()
    assert not list((tmp_path / "data").glob("stdlib-docstrings-*[!.lock]/"))


def asked_for(rows):
    return {row["messages"][0]["content"].split("`")[1].removesuffix("()") for row in rows}


def test_programs_copies_and_private_names_are_not_asked_for(rows):
    names = asked_for(rows)
    left_out = (
        "antigravity this test idlelib lib2to3 turtledemo ensurepip pydoc_data distutils ntpath posixpath genericpath"
    )
    for name in names:
        first, *parts = name.split(".")
        assert first not in left_out.split() and "tests" not in parts
        assert not any(part.startswith("_") for part in (first, *parts)), name
    # Under the names that people import.
    assert {"io.TextIOBase", "os.path.join", "decimal.Clamped"} <= names
    assert any(name.startswith("collections.abc.") for name in names) and any(
        name.startswith("datetime.") for name in names
    )


def test_modules_written_in_c_are_asked_for(rows):
    modules = {name.split(".")[0] for name in asked_for(rows) if "." in name}
    assert {
        *("array", "binascii", "cmath", "gc", "itertools", "math", "select", "sys", "time", "unicodedata", "zlib"),
        *("socket", "struct", "operator", "functools", "collections", "bisect"),
    } <= modules
    assert {"abs", "len", "sorted", "str.join"} <= asked_for(rows)


def test_kinds_of_objects_of_a_module():
    source = """
class A:
  "A."
  def b(self): "B."
  class C:
    "C."
  def _d(self): "D."
async def e(): "E."
def f(): pass
"""
    documented = list(builtin._documented(ast.parse(source), "m"))
    assert documented == [
        *(("class", "m.A", "A."), ("method", "m.A.b", "B."), ("class", "m.A.C", "C."), ("function", "m.e", "E.")),
    ]


@pytest.mark.parametrize(
    ("doc", "answer"),
    [
        ("f(a)\nf(b) -> int\nAdds\ntwo.", "Adds two."),
        ("f(a) -- all in a line\n\nAdds.", "Adds."),
        ("Two  spaces   here.", "Two spaces here."),
        ("Title\n-----\nText.", ""),
        ("First.\n\n- one\n- two", "First."),
        ("First.\n\n:param x: one", "First."),
        ("First.\n\nArguments are two numbers.", "First."),
        ("First.\n\nArgument x is one.", "First."),
        ("First.\n\nAs follows:\n\nSecond.", "First."),
        ("First.\n\n  indented\n   more\n", "First."),
        ("First.\n\n>>> f()\n\nSecond.", "First."),
        ("First.\n\nA | B\n\n| C", "First.\nA | B"),
        ("First.\n\n" + "x" * 595, "First."),
        ("First.\n\n" + "x" * 594, "First.\n" + "x" * 594),
        ("f(x)\n\nFirst.", "First."),
        ("", ""),
    ],
)
def test_prose_ends_where_something_else_begins(doc, answer):
    assert builtin._answer(doc) == answer
