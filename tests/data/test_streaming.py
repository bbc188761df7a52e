"""A stream feeds several processes what it feeds one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import STOP, chatml_tokenizer, recipe, write_jsonl
from harness import losses, write_recipe
from ranks import Ranks
from tiny import tiny_model

from toolkit.data.prepare import prepare
from toolkit.data.readers import read
from toolkit.data.tokenization import Chunker
from toolkit.train.main import main

RECIPE = """
model: {path: MODEL}
data: {sources: [{path: a.jsonl, weight: 3.0}, {path: b.jsonl, weight: 1.0}], streaming: true}
objective: language_modelling
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {max_steps: 12, warmup_steps: 0}
batch: {seq_len: 64, global_batch_size: 8, micro_batch_size: 2}
evaluation: {num_prompts: 0}
"""


@pytest.mark.usefixtures("formulas")
@pytest.mark.slow
def test_two_processes_train_on_the_rows_of_one_past_the_end_of_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    for name, rows in (("a", 50), ("b", 7)):
        lines = (json.dumps({"text": f"{name} {n} " + "word " * (n % 9)}) + "\n" for n in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    model = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "model")
    write_recipe(tmp_path, "stream", RECIPE.replace("MODEL", str(model)))
    monkeypatch.chdir(tmp_path)
    assert main(["recipe=stream", "output.name=one"]) == 0
    done = ranks.run(tmp_path, "recipe=stream", "output.name=two", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one = losses(tmp_path / "runs" / "one")
    assert len(one) == 12
    assert losses(tmp_path / "runs" / "two") == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_first_sequences_take_few_rows_which_another_thread_tokenises(
    packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ({"text": f"row {n}"} for n in range(30_000)))
    stream = prepare(recipe(path, streaming=True, packing=packing), chatml_tokenizer(), STOP, tmp_path / "cache").train
    seen: dict[str, list[Any]] = {"read": [], "tokenised": []}
    tokenise = Chunker.__call__

    def noted(self: Chunker, *row: Any) -> Any:
        seen["tokenised"].append(threading.current_thread())
        return tokenise(self, *row)

    def counted(file: Path) -> Any:
        for row in read(file):
            seen["read"].append(row)
            yield row

    monkeypatch.setattr(Chunker, "__call__", noted)
    monkeypatch.setattr("toolkit.data.readers.read", counted)
    rows = iter(stream)
    next(rows)
    rows.close()
    assert 32 <= len(seen["tokenised"]) <= 100 and len(seen["read"]) < 1500
    assert threading.main_thread() not in seen["tokenised"]
