"""What may be asked of `toolkit evaluate`, and how a slip of typing is answered."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from toolkit.cli.evaluate import Questions, evaluate, keep
from toolkit.cli.keys import read_keys
from toolkit.cli.main import main
from toolkit.cli.run_commands import Export
from toolkit.common import UserError
from toolkit.report.evaluation import FILE, Evaluation, HeldOut, Task


def questions(arguments: list[str]) -> Questions:
    return read_keys(Questions, arguments, "docs/evaluate.md")


def test_values_are_read_as_they_are_typed() -> None:
    asked = questions(["rows=12", "metrics=bleu,chrf", "before=false"])
    assert (asked.rows, asked.metrics, asked.before, asked.tasks) == (12, ["bleu", "chrf"], False, None)
    assert questions(["tasks=[gsm8k, ifeval]", "num_fewshot=0"]).tasks == ["gsm8k", "ifeval"]


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        questions(["row=3", "limit=x", "metrics=blue", "greedy", "batch_size=0"])
    text = str(caught.value)
    for said in ("`row`, did you mean `rows`?", "limit=x: ", "no metric `blue`", "`greedy` is not", "batch_size=0: "):
        assert said in text, said
    assert "num_fewshot" in text


def test_a_key_that_is_missing_is_said_with_what_it_may_be() -> None:
    with pytest.raises(UserError, match=r"format is missing: one of int8, fp8, nf4, int4, gguf, gguf_q8_0\n"):
        read_keys(Export, [], "docs/use.md")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["limit=3"], "limit would be ignored without tasks"),
        (["tasks=gsm8k", "rows=3", "metrics=bleu"], "metrics, rows would be ignored with tasks"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        questions(arguments)


def test_a_run_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found would be lost; nothing is there yet that could be evaluated."""
    monkeypatch.setattr("toolkit.train.finished.export.refuse_head", lambda run: None)
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(UserError, match=r"cannot be written: .* is read-only, or another user's"):
        evaluate(tmp_path, read_keys(Questions, [], "docs/evaluate.md"))


HELD_OUT = HeldOut(rows=1, held_out=1, data="ab", batch_size=1, max_new_tokens=1, cut=(0, 0), scores=[])


def test_what_was_found_earlier_is_kept(tmp_path: Path) -> None:
    tasks = [Task(name="gsm8k", samples=1, of_samples=1, num_fewshot=0, chat_template=False, scores=[])]
    newer = [tasks[0].model_copy(update={"samples": 2})]
    for found in (Evaluation(tasks=tasks), Evaluation(held_out=HELD_OUT), Evaluation(tasks=newer)):
        keep(tmp_path, found, [])
    kept = Evaluation.model_validate_json((tmp_path / FILE).read_bytes())
    assert kept.held_out == HELD_OUT and kept.tasks == newer


def test_what_many_processes_find_at_once_is_kept_and_reported(tmp_path: Path) -> None:
    context, names = multiprocessing.get_context("fork"), [f"task_{number}" for number in range(8)]
    ready = context.Barrier(len(names))

    def find(name: str) -> None:
        task = Task(name=name, samples=1, of_samples=1, num_fewshot=0, chat_template=False, scores=[])
        ready.wait()
        keep(tmp_path, Evaluation(tasks=[task]), [])

    finding = [context.Process(target=find, args=[name]) for name in names]
    for each in finding:
        each.start()
    for each in finding:
        each.join()
    kept = Evaluation.model_validate_json((tmp_path / FILE).read_bytes())
    assert sorted(task.name for task in kept.tasks) == names
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in names)


def test_what_was_found_is_shown_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setattr("toolkit.cli.run_commands._use_own_caches", lambda run: None)
    monkeypatch.setattr("toolkit.train.finished.export.refuse_head", lambda run: None)
    monkeypatch.setattr(
        "toolkit.train.finished.held_out.evaluate_held_out", lambda *args: (HELD_OUT, [{"prompt": "a"}])
    )
    monkeypatch.setattr("toolkit.cli.evaluate.write_json_lines", lambda *args: Path("/dev/full").write_text("a"))
    assert main(["evaluate", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert HELD_OUT.sentence() in " ".join(told.out.split())
    assert "No space left on device" in told.err
