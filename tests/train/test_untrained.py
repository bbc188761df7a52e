"""What the untrained model says is asked once by runs that begin alike, and again by all others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from small import place_with, trained

from toolkit.train.evaluation import untrained

place = place_with("llama", "gpt2")
ALIKE = ["num_prompts=2", "data.eval_split=0.2", "method=lora", "method.r=4"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[str]:
    """What was asked of models before training."""
    monkeypatch.setattr(untrained, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(untrained, "_WORTH_KEEPING", 0.0)
    monkeypatch.setattr(untrained.concurrent.futures, "wait", lambda futures, timeout: futures[0].exception())
    found: list[str] = []
    for name in ("evaluate", "session_answers"):
        ask = getattr(untrained, name)
        monkeypatch.setattr(untrained, name, lambda *args, _name=name, _ask=ask: found.append(_name) or _ask(*args))
    return found


def said(run: Any) -> tuple[Any, Any]:
    """Figures of step 0, and answers before training."""
    row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["step"] == 0
    samples = json.loads((run / "samples.json").read_text(encoding="utf-8"))
    return row["eval_loss"], [each["before"] for each in samples]


def test_a_run_that_begins_as_another_says_the_same_without_asking(asked: list[str]) -> None:
    first = said(trained("first", *ALIKE))
    assert sorted(asked) == ["evaluate", "session_answers"] and first[1][0] is not None
    other = trained("other", *ALIKE, "method.r=8", "learning_rate=1e-3", "max_steps=3")
    assert len(asked) == 2
    assert said(other) == first


def test_what_changes_the_numbers_is_asked_again(asked: list[str]) -> None:
    trained("before", *ALIKE)
    keys = ("model.path=gpt2", "data.eval_split=0.3", "precision=bf16", "micro_batch_size=4", "max_new_tokens=5")
    changed = [[*ALIKE, key] for key in (*keys, "method.init_lora_weights=pissa")]
    # What is trained in full lies in other types than a frozen base.
    for number, settings in enumerate([*changed, [*ALIKE[:2], "method=full"]]):
        asked.clear()
        trained(f"changed{number}", *settings)
        assert sorted(asked) == ["evaluate", "session_answers"], settings


def test_a_damaged_file_is_asked_again(asked: list[str], tmp_path: Any) -> None:
    first = said(trained("whole", *ALIKE))
    files = list((tmp_path / "untrained").iterdir())
    assert len(files) == 2
    for file in files:
        file.write_text(file.read_text()[:-1])
    assert said(trained("damaged", *ALIKE)) == first
    assert len(asked) == 4
