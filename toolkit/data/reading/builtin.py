"""A real data set without a download: questions about Python's standard library, answered by its docstrings.

The sources are parsed, not imported (imports act: a browser opens, a poem is printed); only C modules, which have none,
are imported. It takes a few seconds once per Python version. Shipping the rows instead would fix one version's texts
and their licence in the wheel; random text would show a falling loss, but no answer that a person can judge.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import itertools
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.cache import cache_dir
from toolkit.common import UserError
from toolkit.seal import build_sealed

# Modules whose import acts (a browser opens, a poem is printed), that are old copies, tests or programs of their own.
SKIPPED_MODULES = {"antigravity", "this", "test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
SKIPPED_MODULES |= {"distutils", "ntpath"}
# Modules that people import under another name.
PUBLIC_NAMES = {"_pydecimal": "decimal", "_pydatetime": "datetime", "_pyio": "io"}
PUBLIC_NAMES |= {"_collections_abc": "collections.abc", "posixpath": "os.path", "genericpath": "os.path"}
# Implemented in C, so without source; importing them has no effect.
C_MODULES = (
    *("array", "binascii", "builtins", "cmath", "gc", "itertools", "math", "select", "sys", "time"),
    *("unicodedata", "zlib", "_socket", "_struct", "_operator", "_functools", "_collections", "_bisect"),
)
MIN_ANSWER_CHARS, MAX_ANSWER_CHARS = 40, 600
MIN_ROWS = 2_000

Documented = tuple[str, str, str]
"""A public object: `function`, `class` or `method`; its dotted name, as a user would import it; its docstring."""


def docstring_rows() -> list[dict[str, Any]]:
    """Instruction pairs from the docstrings of Python's standard library (PSF license), in a fixed mixed order.

    Each row is `{"messages": [user, assistant]}`: a question about a function, class or method, and its description.
    Written at first use (a few seconds) and kept in the cache per Python version.

    Raises:
        UserError: This Python has no sources of its standard library.
    """
    return _lines("rows.jsonl")


def _lines(name: str) -> list[dict[str, Any]]:
    """A file of the folder that is written at first use."""
    key = hashlib.sha256(f"{sys.version} {sys.platform} {inspect.getsource(sys.modules[__name__])}".encode())
    folder = build_sealed(cache_dir() / "data" / f"stdlib-docstrings-{key.hexdigest()[:12]}", _write_rows)
    with (folder / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def docstring_pairs() -> list[dict[str, Any]]:
    """The same questions, each with its answer and, as the rejected one, that to the next question.

    Every answer is rejected once and chosen once, so that nothing but the question tells which is right.
    """
    talks = [row["messages"] for row in docstring_rows()]
    return [
        {"prompt": [asked], "chosen": [answer], "rejected": [other[-1]]}
        for (asked, answer), other in zip(talks, [*talks[1:], talks[0]], strict=True)
    ]


def judged_docstrings() -> list[dict[str, Any]]:
    """The same questions, in turn with its answer, which is good, and with that to the next question, which is not."""
    return [
        {"prompt": row["prompt"], "completion": row["rejected" if number % 2 else "chosen"], "label": number % 2 == 0}
        for number, row in enumerate(docstring_pairs())
    ]


def arithmetic() -> list[dict[str, Any]]:
    """Sums and differences of two numbers up to 20, each once, in a fixed mixed order, with the answer.

    Each is asked after an example with its answer in a tag, which small models follow now and then: often enough to
    learn from.
    """
    example = [
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "<answer>4</answer>"},
    ]
    sums = {
        f"{one} {sign} {other}": str(one + other if sign == "+" else one - other)
        for one, other, sign in itertools.product(range(1, 21), range(1, 21), "+-")
    }
    return [
        {"prompt": [*example, {"role": "user", "content": asked}], "answer": sums[asked]}
        for asked in sorted(sums, key=_digest)
    ]


def docstring_answers() -> list[dict[str, Any]]:
    """The questions and answers as pairs of texts, of which one is to be retrieved by the other."""
    talks = (row["messages"] for row in docstring_rows())
    return [{"question": asked["content"], "answer": answer["content"]} for asked, answer in talks]


def docstring_kinds() -> list[dict[str, Any]]:
    """The docstrings, each labelled with what it describes: a class, a function or a method."""
    both = zip(docstring_rows(), _lines("objects.jsonl"), strict=True)
    return [{"text": row["messages"][-1]["content"], "label": each["kind"]} for row, each in both]


def docstring_names() -> list[dict[str, Any]]:
    """The questions as words, whose tags (IOB2) mark the names of a class, a function or a method."""
    return [
        _tagged(row["messages"][0]["content"], each["name"], each["kind"])
        for row, each in zip(docstring_rows(), _lines("objects.jsonl"), strict=True)
    ]


def _tagged(question: str, name: str, kind: str) -> dict[str, Any]:
    start = question.index(name)
    words = [(match[0], match.start()) for match in re.finditer(r"\w+|[^\w\s]", question)]
    inside = [start <= place < start + len(name) for _, place in words]
    tags = [
        f"{'I' if number and inside[number - 1] else 'B'}-{kind}" if named else "O"
        for number, named in enumerate(inside)
    ]
    return {"tokens": [word for word, _ in words], "tags": tags}


def _write_rows(folder: Path) -> None:
    rows: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    answers: set[str] = set()
    for kind, name, doc in sorted({*_from_sources(), *_from_c_modules()}):
        answer = _answer(doc)
        fingerprint = re.sub(r"\W+", " ", answer).lower().strip()
        if not MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS or name in rows or fingerprint in answers:
            continue
        answers.add(fingerprint)
        kinds[name] = kind
        turns = [("user", _question(kind, name)), ("assistant", answer)]
        rows[name] = {"messages": [{"role": role, "content": content} for role, content in turns]}
    if len(rows) < MIN_ROWS:
        raise UserError(
            f"builtin:stdlib-docstrings needs the sources of the standard library; {sysconfig.get_path('stdlib')} "
            f"yields {len(rows)} rows",
            "Use a Python installed with its sources (not compiled only), or set data.sources to your own file.",
        )
    # Neighbours by name are alike, so any prefix or tail of a sorted list would be a lopsided sample.
    names = sorted(rows, key=_digest)
    objects = [{"kind": kinds[name], "name": name} for name in names]
    for file, content in (("rows.jsonl", [rows[name] for name in names]), ("objects.jsonl", objects)):
        with (folder / file).open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in content)


def _question(kind: str, name: str) -> str:
    """One of four questions about an object, chosen by its name."""
    noun = "" if kind == "function" else f"the {kind} "
    questions = (
        f"What is the Python class `{name}`?" if kind == "class" else f"What does the Python {kind} `{name}` do?",
        f"Explain {noun}`{name}` from Python's standard library.",
        f"In Python, what happens when I call `{name}`?" if kind == "method" else f"In Python, what is `{name}` for?",
        f"Describe `{name}` in Python." if kind == "class" else f"Describe what `{name}()` does in Python.",
    )
    return questions[int(_digest(name), 16) % len(questions)]


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _from_sources() -> Iterator[Documented]:
    """Public functions, classes and methods of the standard library's Python sources; nothing is imported."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        parts = tuple(PUBLIC_NAMES.get(part, part) for part in parts if part != "__init__")
        outside = not parts or parts[0].split(".")[0] not in sys.stdlib_module_names
        if outside or SKIPPED_MODULES & set(parts) or any(part.startswith("_") or part == "tests" for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # lib2to3 and the like keep files in other grammars
            continue
        yield from _documented(tree, ".".join(parts))


def _documented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Documented]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            function = "function" if isinstance(scope, ast.Module) else "method"
            kind = "class" if isinstance(node, ast.ClassDef) else function
            if doc := ast.get_docstring(node):
                yield kind, name, doc
            if isinstance(node, ast.ClassDef):
                yield from _documented(node, name)


def _from_c_modules() -> Iterator[Documented]:
    for module_name in C_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # a Python built without it
            continue
        prefix = "" if module_name == "builtins" else f"{module_name.lstrip('_')}."
        for name, member in vars(module).items():
            if name.startswith("_") or not callable(member):
                continue
            kind = "class" if inspect.isclass(member) else "function"
            yield kind, f"{prefix}{name}", inspect.getdoc(member) or ""
            for method_name, method in vars(member).items() if kind == "class" else ():
                if not method_name.startswith("_") and callable(method):
                    yield "method", f"{prefix}{name}.{method_name}", inspect.getdoc(method) or ""


def _answer(doc: str) -> str:
    """The leading prose of a docstring as one paragraph per line, without signatures, examples and tables."""
    answer: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = paragraph.splitlines()
        while lines and re.match(r"[\w.]+\(", lines[0].strip()):
            lines = lines[1:]
        text = re.sub(r"(?<=\S) +", " ", " ".join(line.strip() for line in lines))
        if not text:
            continue
        # Examples, tables, underlined titles, field lists and what introduces them.
        is_prose = not re.search(r">>>|^[-=*|+:@]|[-=]{3,}|:$|^Arguments?\b", text)
        if not is_prose or any(line.startswith(" ") for line in lines[1:]) or len(answer) == 2:
            break
        if sum(map(len, answer)) + len(text) > MAX_ANSWER_CHARS:
            break
        answer.append(text)
    return "\n".join(answer)
