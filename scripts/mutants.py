"""Which share of random faults in the core the tests of `make test-fast` notice: `make mutants`.

mutmut says what can be mutated and how. Its own runner holds mutants in copies of functions, which leaves out tables,
constants, fields and decorated functions, most of `recipe/`; cosmic-ray starts a process for each, and the frameworks
take 15 s of processor time to import. So the frameworks are imported once, and for each mutant a forked process writes
it into a copy of the tree and runs the tests that reach its statement, those of its own module first.

Left out by rule: annotations and their aliases, `__all__`, decorators, docstrings, what is said to people (arguments of
errors, warnings, logs and prints; text with a space in it), `encoding=` and `strict=`, which change nothing in an
environment like this one, and None for an empty text or the reverse. How many of the rest are no faults either is not
known, so no draw reaches 100%.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
import libcst.matchers as m
from coverage import Coverage, CoverageData
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

CORE = (
    "toolkit/recipe/**/*.py",
    "toolkit/data/**/*.py",
    "toolkit/distributed/**/*.py",
    "toolkit/planner/*.py",
    "toolkit/planner/memory/*.py",
    "toolkit/planner/speed/*.py",
    "toolkit/train/checkpoints/checkpoint.py",
    "toolkit/seal.py",
    "toolkit/train/run_folder.py",
)
FRAMEWORKS = ("pydantic", "hydra", "rich.console", "jinja2", "torch", "datasets", "transformers.trainer", "peft")
SAID = {"UserError", "Problem", "print", "warn", "warning", "info", "debug", "error", "exception", "cast", "TypeVar"}
GENERIC = {"Literal", "dict", "list", "tuple", "Callable", "Mapping", "NDArray", "Sequence"}
# Tests whose durations come to more than this are not run for one mutant; a hung one is noticed after twice as much.
SECONDS = 60.0


class Mutant(NamedTuple):
    """One fault: `kind` is mutmut's name of the change, `source` the whole file with it."""

    file: str
    line: int
    kind: str
    source: str


class Mutations(cst.CSTVisitor):
    """Collects what mutmut would change, by line, in the whole of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.by_line: dict[int, list[tuple[str, cst.CSTNode, cst.CSTNode]]] = {}

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Adds the mutations of `node`; false where it and what lies below is left out."""
        if left_out(node):
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                line = self.get_metadata(PositionProvider, node).start.line
                name = operator.__name__.removeprefix("operator_")
                if name == "assignment" and m.matches(node.value, m.Name("None") | m.SimpleString('""')):
                    continue
                found = [(name, node, mutated) for mutated in operator(node) if not same_but_left_out(node, mutated)]
                self.by_line.setdefault(line, []).extend(found)
        return True


def left_out(node: cst.CSTNode) -> bool:
    """Whether a mutation of `node` or below it would be no fault, by the rules in the module's docstring."""
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Raise() | cst.Assert() | cst.Import() | cst.ImportFrom():
            return True
        case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()):
            return True
        case cst.Subscript(value=cst.Name(value="Literal")):
            return True
        case cst.Assign(value=cst.Subscript(value=cst.Name(value=name))):
            return name in GENERIC
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__all__"))]):
            return True
        case cst.Call(func=cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name))):
            return name in SAID or name in ("len", "isinstance")
        case cst.Arg(keyword=cst.Name(value=name)):
            return name in ("encoding", "strict", "description", "help")
        case cst.SimpleString(value=text):
            return " " in text.strip("\"' ")
        case cst.ConcatenatedString():
            return True
        case cst.FormattedString(parts=parts):
            return any(isinstance(part, cst.FormattedStringText) and " " in part.value.strip() for part in parts)
    return False


def same_but_left_out(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether two calls differ only in an argument that is left out."""
    if not (isinstance(node, cst.Call) and isinstance(mutated, cst.Call) and node.func.deep_equals(mutated.func)):
        return False
    kept, others = ([arg for arg in call.args if not left_out(arg)] for call in (node, mutated))
    return len(kept) == len(others) and all(one.deep_equals(other) for one, other in zip(kept, others, strict=True))


def draw(top: Path, only: str, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, each of another line: all lines that can be mutated are as likely, and all mutants of a line."""
    chance = random.Random(seed)
    files = sorted({file for pattern in CORE for file in top.glob(pattern) if only in str(file.relative_to(top))})
    modules = []
    for file in files:
        wrapper = MetadataWrapper(cst.parse_module(file.read_text(encoding="utf-8")))
        wrapper.visit(mutations := Mutations())
        modules += [(file, wrapper.module, line, found) for line, found in sorted(mutations.by_line.items()) if found]
    print(f"{len(modules):,} lines of {len(files)} modules, {sum(len(found) for *_, found in modules):,} mutants")
    drawn = []
    for file, module, line, found in chance.sample(modules, min(count, len(modules))):
        kind, node, mutated = chance.choice(found)
        source = module.deep_replace(node, mutated).code  # type: ignore[arg-type]
        drawn.append(Mutant(str(file.relative_to(top)), line, kind, source))
    return drawn


class Recorder:
    """A plugin of pytest: which test runs which line, how long each takes and which fail without a mutant."""

    def __init__(self, coverage: Coverage) -> None:
        self.coverage = coverage
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Lines that run from here on belong to this test."""
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds one phase of a test."""
        if report.when == "setup":
            self.seconds[report.nodeid] = 0.0
            self.failed.discard(report.nodeid)
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)


class Chosen:
    """A plugin of pytest: only these tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leaves out and sorts."""
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda x: self.order[x.nodeid])


def forked(place: Path, work: Any, timeout: float) -> int:
    """Runs `work` in a process of its own; its status, or 1 where it takes longer than `timeout` seconds."""
    if not (child := os.fork()):
        os.setpgrp()
        os.chdir(place)
        log = os.open("mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            status = int(work())
        finally:
            os._exit(status)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def record(place: Path, tests: list[str]) -> None:
    """Runs the fast tests once and writes beside the copy what `Reach` reads."""
    import pytest

    def work() -> int:
        coverage = Coverage(str(place / "reach.coverage"), source=[str(place / "toolkit")], config_file=False)
        recorder = Recorder(coverage)
        if (place / "reach.json").exists():
            coverage.load()
            known = json.loads((place / "reach.json").read_text(encoding="utf-8"))
            recorder.seconds.update(known["seconds"])
            recorder.failed.update(known["failed"])
        coverage.start()
        pytest.main(["-q", "-m", "not slow and not matrix", "-p", "no:cacheprovider", *tests], plugins=[recorder])
        coverage.stop()
        coverage.save()
        text = json.dumps({"seconds": recorder.seconds, "failed": sorted(recorder.failed)})
        (place / "reach.json").write_text(text, encoding="utf-8")
        return 0

    forked(place, work, 3600)


class Reach:
    """Which tests reach a statement."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.coverage = CoverageData(str(place / "reach.coverage"))
        self.coverage.read()
        known = json.loads((place / "reach.json").read_text(encoding="utf-8"))
        self.seconds = {test: cost for test, cost in known["seconds"].items() if test not in known["failed"]}
        self.texts = {
            name: (place / name).read_text(encoding="utf-8") for name in {t.split("::")[0] for t in known["seconds"]}
        }
        print(f"{len(self.seconds):,} tests; without a mutant fail: {known['failed']}")

    def stages(self, mutant: Mutant) -> Iterator[list[str]]:
        """The tests to run, in two parts: those in files that import the module, and the others.

        They are those that reach the statement. What runs when its module is imported runs for no test; it gets those
        that reach anything in the module or import it, and all of its package.
        """
        contexts = self.coverage.contexts_by_lineno(str(self.place / mutant.file))
        lines = statement_in_function((self.place / mutant.file).read_text(encoding="utf-8"), mutant.line)
        if lines and {test for line in lines for test in contexts.get(line, ())} == {""}:
            lines = None  # Of a function that makes a table.
        module = ".".join(Path(mutant.file).with_suffix("").parts)
        of_module = {test for test in self.seconds if module in self.texts[test.split("::")[0]]}
        reached = {test for line in lines or contexts for test in contexts.get(line, ()) if test in self.seconds}
        # Those of the module's own file may reach it in processes that they start.
        _, *rooms, file = Path(mutant.file).parts
        folder = "/".join(["tests", *rooms[:1]])
        of = tuple(f"{folder}/test_{name}.py" for name in (Path(file).stem, *rooms[1:])) if lines else f"{folder}/"
        reached |= {test for test in self.seconds if test.startswith(of)} | (set() if lines else of_module)
        importing = reached & of_module
        for part in (importing, reached - importing):
            if chosen := self._in_time(part):
                yield chosen

    def _in_time(self, tests: set[str]) -> list[str]:
        """The shortest of each file, then the next of each, and so on, so that the limit leaves out no file."""
        places: Counter[str] = Counter()
        order: dict[str, tuple[int, float]] = {}
        for test in sorted(tests, key=self.seconds.__getitem__):
            file = test.split("::")[0]
            order[test] = (places[file], self.seconds[test])
            places[file] += 1
        total, chosen = 0.0, []
        for test in sorted(order, key=order.__getitem__):
            if (total := total + self.seconds[test]) > SECONDS:
                break
            chosen.append(test)
        return chosen


def statement_in_function(source: str, line: int) -> range | None:
    """Lines of the innermost statement at `line`, without the body of one that has one; None outside of functions."""
    inside, lines = False, range(line, line + 1)
    for node in ast.walk(ast.parse(source)):  # outer ones first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            body = getattr(node, "body", None)
            inside |= isinstance(node, ast.FunctionDef) and line >= body[0].lineno
            lines = range(node.lineno, (line if body else node.end_lineno or line) + 1)
    return lines if inside else None


def noticed(place: Path, mutant: Mutant, reach: Reach) -> bool:
    """Whether a test fails once the mutant is in the copy's file."""
    import pytest

    file = place / mutant.file
    before, stat = file.read_text(encoding="utf-8"), file.stat()
    stages = list(reach.stages(mutant))
    file.write_text(mutant.source, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    try:
        for tests in stages:
            files = sorted({test.split("::")[0] for test in tests})

            def work(tests: list[str] = tests, files: list[str] = files) -> int:
                return pytest.main(["-x", "-q", "-p", "no:cacheprovider", *files], plugins=[Chosen(tests)])

            # Nothing to run is no failure.
            if forked(place, work, 30 + 2 * SECONDS) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return True
        return False
    finally:
        file.write_text(before, encoding="utf-8")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def copy(top: Path, place: Path) -> None:
    """The tree as git would commit it now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=top, capture_output=True, check=True)
    for name in listed.stdout.decode().splitlines():
        if (top / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(top / name, place / name)


def main() -> None:
    """Draws, judges, and prints the survivors with what was changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--only", default="", help="part of the modules' path")
    parser.add_argument("--tests", nargs="*", default=[], help="instead of all tests")
    parser.add_argument("--place", type=Path, help="keep the copy and which tests reach what here, for the next time")
    options = parser.parse_args()
    top = Path(__file__).resolve().parent.parent
    place = (options.place or Path(tempfile.mkdtemp())).resolve()
    copy(top, place)
    os.environ["PYTHONPATH"] = str(place)
    sys.path[:] = [str(place), *(entry for entry in sys.path if Path(entry).resolve() not in (top, top / "scripts"))]
    for name in FRAMEWORKS:
        import_module(name)
    import_module("trl").SFTTrainer  # noqa: B018
    if options.tests or not (place / "reach.json").exists():
        record(place, options.tests)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    reach = Reach(place)
    drawn, survivors = draw(place, options.only, options.count, options.seed), []
    for number, mutant in enumerate(drawn, 1):
        begin = time.monotonic()
        if not (seen := noticed(place, mutant, reach)):
            survivors.append(mutant)
        share = 100 * (1 - len(survivors) / number)
        print(
            f"{number} {mutant.file}:{mutant.line} {mutant.kind} {'noticed' if seen else 'SURVIVES'} "
            f"({time.monotonic() - begin:.0f} s; {share:.1f}% noticed)",
            flush=True,
        )
        if not seen:
            old = (place / mutant.file).read_text(encoding="utf-8").splitlines()
            lines = list(difflib.unified_diff(old, mutant.source.splitlines(), lineterm="", n=0))[2:]
            print("\n".join(lines), flush=True)
    print(
        f"seed {options.seed}: {len(drawn) - len(survivors)} of {len(drawn)} noticed; survivors by kind: "
        f"{dict(Counter(mutant.kind for mutant in survivors))}"
    )
    if not options.place:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
