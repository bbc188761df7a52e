"""Benchmarks of lm-eval, on tasks that lie in a folder: the run's adapter and template are what is asked."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import write_jsonl
from small import LORA, place_with, trained

from toolkit.cli.main import main as cli
from toolkit.report.evaluation import Evaluation
from toolkit.train.finished import benchmarks
from toolkit.train.finished.export import load_trained

# An extra that requirements.lock does not have.
pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluate]'")
place = place_with("llama")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_tasks(folder: Path, *names: str) -> list[dict[str, object]]:
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, object]] = [
        {"question": f"What does {name} do?", "choices": ["returns a string", "splits it"], "right": at % 2}
        for at, name in enumerate(("upper", "split", "strip", "join", "find", "count", "index", "title", "lower"))
    ]
    write_jsonl(folder / "rows.jsonl", rows)
    for name in names:
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder.resolve()))
    (folder / "both.yaml").write_text(f"group: both\ntask: [{', '.join(names)}]\n")
    return rows


def likelier(model: torch.nn.Module, tokenizer: object, prompt: str, choices: list[str]) -> int:
    """The choice to which a model gives the higher probability after a prompt."""
    sums = []
    for choice in choices:
        ids, start = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt + choice, prompt))  # type: ignore[operator]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        sums.append(sum(logits[at - 1, ids[at]].item() for at in range(len(start), len(ids))))
    return sums.index(max(sums))


def test_accuracy_is_that_of_the_runs_own_model_with_its_template(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_tasks(place / "tasks", "says", "other")
    run = trained("asked", *LORA, "optimizer.learning_rate=0.1")
    assert cli(["evaluate", str(run), "tasks=says", "include_path=tasks", "limit=8", "batch_size=3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "says: 8 of 9 samples, 0 examples in each prompt, as conversations." in shown
    (task,) = Evaluation.model_validate_json((run / "evaluation.json").read_bytes()).tasks
    (score,) = task.scores
    _, model, tokenizer = load_trained(run)

    def accuracy() -> float:
        right = 0
        for row in rows[:8]:
            message = [{"role": "user", "content": row["question"]}]
            prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            right += likelier(model, tokenizer, prompt, row["choices"]) == row["right"]  # type: ignore[arg-type]
        return right / 8

    assert score.after.value == pytest.approx(accuracy())
    with model.disable_adapter():
        assert score.before and score.before.value == pytest.approx(accuracy())
    assert score.after.low is not None and score.change and score.change.low is not None


def test_prompts_are_what_the_template_writes_of_parts_with_the_recipes_settings(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(place / "tasks", "says", "other")
    (place / "parts.jinja").write_text(
        "{{ mood }}:{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{{ eos_token }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    settings = ["model.chat_template=parts.jinja", "data.chat_template_kwargs={mood: calm}"]
    run, found = trained("in_parts", *LORA, *settings), []
    ask = benchmarks._found
    monkeypatch.setattr(benchmarks, "_found", lambda *a, **k: found.append(ask(*a, **k)) or found[-1])  # type: ignore[func-returns-value]
    assert cli(["evaluate", str(run), "tasks=says", "include_path=tasks", "limit=1", "before=false"]) == 0
    prompts = [sample["arguments"][0][0] for sample in found[0]["samples"]["says"]]
    assert prompts == [f"calm:What does upper do?{load_trained(run)[2].eos_token}>"]


def test_examples_groups_and_plain_prompts_are_noted_beside_what_was_found_before(place: Path) -> None:
    write_tasks(place / "tasks", "says", "other")
    run = trained("kept", *LORA, "data.eval_split=0.2")
    assert cli(["evaluate", str(run), "rows=2"]) == 0
    asked = ["include_path=tasks", "limit=3", "num_fewshot=1", "chat_template=false", "before=false"]
    assert cli(["evaluate", str(run), "tasks=both", *asked]) == 0
    found = Evaluation.model_validate_json((run / "evaluation.json").read_bytes())
    assert found.held_out and {task.name for task in found.tasks} >= {"says", "other"}
    for task in found.tasks:
        assert task.num_fewshot == 1 and not task.chat_template
        assert task.samples == (6 if task.name == "both" else 3)
        assert all(score.before is None and score.change is None for score in task.scores)
    assert cli(["evaluate", str(run), "tasks=says", "include_path=tasks", "limit=2", "before=false"]) == 0
    again = Evaluation.model_validate_json((run / "evaluation.json").read_bytes())
    assert sorted(task.name for task in again.tasks) == sorted(task.name for task in found.tasks)
    assert next(task for task in again.tasks if task.name == "says").samples == 2


def test_means_of_samples_have_students_intervals_and_other_scores_lm_evals() -> None:
    values, changes = np.array([0.2, 0.5, 0.9, 0.4]), np.array([0.1, 0.2, 0.0, 0.1])
    interval = benchmarks._interval("f1,none", {"f1,none": 0.5}, values)
    change = benchmarks._change(0.1, values, values + changes)
    for found, of in ((interval, values), (change, changes)):
        assert found.low is not None and found.high is not None
        # The quantile of three degrees of freedom, from a table.
        assert (found.high - found.low) / 2 == pytest.approx(3.18245 * of.std(ddof=1) / 2, rel=2e-3)
    bleu = benchmarks._interval("bleu,none", {"bleu,none": 20.0, "bleu_stderr,none": 2.0}, None)
    assert bleu.low == pytest.approx(20 - 1.96 * 2, abs=1e-3)
    assert benchmarks._interval("bleu,none", {"bleu,none": 20.0, "bleu_stderr,none": "N/A"}, None).low is None


def test_what_cannot_be_asked_is_one_error(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(place / "tasks", "says", "other")
    (place / "tasks" / "lost.yaml").write_text(TASK.format(name="lost", folder=place / "nowhere"))
    (place / "tasks" / "needy.yaml").write_text(
        TASK.format(name="needy", folder=place / "tasks") + "process_results: !function needy.process_results\n"
    )
    (place / "tasks" / "needy.py").write_text("import module_of_no_package\n")
    run = trained("refused", *LORA)
    for arguments, said in (
        (["tasks=sayz", "include_path=tasks"], "did you mean `says`?"),
        (["tasks=says", "include_path=nowhere"], "there is no folder nowhere"),
        (["tasks=lost", "include_path=tasks", "before=false"], "lm-eval cannot ask lost"),
        (["tasks=needy", "include_path=tasks", "before=false"], "the module module_of_no_package is not installed"),
    ):
        capsys.readouterr()
        assert cli(["evaluate", str(run), *arguments]) == 1
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert cli(["evaluate", str(run), "tasks=says"]) == 1
    assert "pip install lm-eval" in capsys.readouterr().err
    assert not (run / "evaluation.json").exists()
