"""What `validate` and `plan` say of the data before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment, write_jsonl

from recipes import write
from toolkit.cli.main import main
from toolkit.data.check import data_problems
from toolkit.recipe import Recipe

GOOD = [{"prompt": "a", "completion": "b"}] * 3


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("rows.jsonl"), GOOD)
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": 5}]}) + "\n")
    Path("silent.jsonl").write_text("".join(json.dumps(row | {"completion": " "}) + "\n" for row in GOOD))
    write("mine", "model: smollm2_135m_builtin\ndata:\n  sources:\n  - rows.jsonl\n  eval_split: 0.5\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data=./nowhere.jsonl"], ["data.sources.0: ", "does not exist", "command line", "change"]),
        (["data=row.jsonl"], ["did you mean `rows.jsonl`"]),
        (["data=./elsewhere/*.jsonl"], ["no data files"]),
        (["data=[rows.jsonl,./other/b.jsonl]"], ["data.sources.1: ", "there is no folder `other`"]),
        (
            ["data.columns={prompt: promt}"],
            ["data.columns: ", "`rows.jsonl` has no column `promt`", "command line", "prompt"],
        ),
        (["data.columns={prompt: completion, completion: prompts}"], ["no column `prompts`"]),
        (["data.format=alpaca"], ["no column `instruction`"]),
        (["data=[chats.jsonl]"], ["chats.jsonl:1", "content"]),
        (["data=[silent.jsonl]"], ["data.sources: ", "no row has anything to train on", "`data.train_on`"]),
        (["data.eval_split=validation"], ["data.eval_split: ", "command line", "no split `validation`"]),
        (["data.eval_sources=[held.jsonl]"], ["data.eval_sources.0: ", "does not exist"]),
        (["objective=language_modelling", "data.format=text"], ["no column `text`"]),
        (["data=[nowhere://bucket/rows.jsonl]"], ["data.sources.0: ", "no file system for `nowhere://`", "s3"]),
        (["output.dir=rows.jsonl"], ["output.dir: ", "rows.jsonl is a file", "command line"]),
        (["output.dir=rows.jsonl/runs", "output.name=a"], ["output.dir: ", "rows.jsonl is a file"]),
        (["output.dir=.", "output.name=rows.jsonl"], ["output.name: ", "rows.jsonl is a file"]),
    ],
)
def test_what_the_run_would_refuse_is_said_by_validate(
    place: Path, changes: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "recipe=mine", *changes]) == 2
    printed = capsys.readouterr().err
    assert "1 problem\n" in printed
    for word in words:
        assert word in " ".join(printed.split()), printed


def test_good_data_and_data_elsewhere_are_valid(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for changes in ([], ["data=owner/name"], ["data=builtin:stdlib-docstrings"], ["data=[s3://bucket/rows.jsonl]"]):
        assert main(["validate", "recipe=mine", *changes]) == 0, changes


def test_of_large_files_only_those_are_opened_that_can_be_read_in_part(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("large.csv", "small.csv", "large.jsonl"):
        with Path(name).open("w") as file:
            file.write('{"wrong": 1}\n' * 20 if name.endswith("jsonl") else "wrong,columns\n1,2\n")
            if name.startswith("large"):
                file.truncate(20_000_001)
    assert main(["validate", "recipe=mine", "data=large.csv"]) == 0
    for name in ("small.csv", "large.jsonl"):
        assert main(["validate", "recipe=mine", f"data={name}"]) == 2
        assert "wrong" in capsys.readouterr().err


def test_rows_are_checked_without_a_framework(place: Path) -> None:
    program = (
        "import sys; from toolkit.cli.main import main; code = main(['validate', 'recipe=mine']);"
        "print(code, sorted({'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_a_plan_is_made_all_the_same_with_a_warning(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "recipe=mine", "data=./nowhere.jsonl", "hardware=h100"]) == 0
    printed = capsys.readouterr()
    assert "nowhere.jsonl` does not exist" in printed.err and "fits" in printed.out


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv", "a.txt", "a.md"])
def test_large_files_of_kinds_that_are_read_whole_are_left_to_the_run(name: str, place: Path) -> None:
    Path(name).write_text("wrong\n")
    wanted = Recipe.model_validate({"model": {"path": "x"}, "data": {"sources": [name], "format": "messages"}})
    assert data_problems(wanted, {})
    if name == "a.json":
        with Path(name).open("a") as file:
            file.truncate(20_000_000)
        assert data_problems(wanted, {})
    with Path(name).open("a") as file:
        file.truncate(20_000_001)
    assert not data_problems(wanted, {})


def test_the_first_rows_of_every_source_are_read(place: Path) -> None:
    good, wrong = json.dumps(GOOD[0]) + "\n", '{"prompt": 5, "completion": "b"}\n'
    for before, noticed in ((0, True), (19, True), (20, False)):
        Path("many.jsonl").write_text(good * before + wrong + good)
        given = {"sources": ["rows.jsonl", "many.jsonl"], "eval_sources": ["many.jsonl"]}
        wanted = Recipe.model_validate({"model": {"path": "x"}, "data": given})
        problems = data_problems(wanted, {})
        # The same thing twice is said once, where it comes first.
        assert [problem.path for problem in problems] == (["data.sources.1"] if noticed else [])
        assert all(f"many.jsonl:{before + 1}: `prompt` is a number" in problem.what for problem in problems)
