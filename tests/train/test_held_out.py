"""`toolkit evaluate`: the run's own rows, asked of the model it began with and of the one it trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import write_jsonl
from pages import Page
from small import LORA, MODELS, NF4, SEQ2SEQ, place_with, trained, with_special_tokens
from tiny import tiny_model

from toolkit.cli.main import main as cli
from toolkit.data.prepare import prepare
from toolkit.report.evaluation import ROWS, Evaluation
from toolkit.train.finished import held_out
from toolkit.train.finished.export import opened

place = place_with("llama", "blenderbot")

HELD_OUT = ["data.eval_split=0.2", "evaluation.num_prompts=3"]
KINDS = {"lora": LORA, "full": [], "seq2seq": SEQ2SEQ, "seq2seq-lora": [*LORA, *SEQ2SEQ], "nf4": NF4}
KINDS["biases"] = [*LORA, *SEQ2SEQ, "extra.lora={bias: all}", "optimizer.learning_rate=0.1"]


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()]


def found(run: Path) -> Evaluation:
    return Evaluation.model_validate_json((run / "evaluation.json").read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_that_the_run_gave_before_and_after(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(kind, *KINDS[kind], *HELD_OUT)
    samples = json.loads((run / "samples.json").read_text(encoding="utf-8"))
    capsys.readouterr()
    assert cli(["evaluate", str(run), "rows=6", "batch_size=2"]) == 0
    shown = capsys.readouterr().out
    asked = lines(run)
    assert len(samples) == 3 and len(asked) == 6
    keys = ("prompt", "reference", "before", "after")
    assert [{key: row[key] for key in keys} for row in asked[:3]] == [
        {key: row[key] for key in keys} for row in samples
    ]
    held_out = found(run).held_out
    assert held_out and (held_out.rows, held_out.held_out, held_out.max_new_tokens) == (6, 8, 4)
    exact = next(score for score in held_out.scores if score.name == "exact match")
    assert exact.after.value == sum(row["after"] == row["reference"] for row in asked) / 6
    assert "Greedy answers to 6 of 8 held-out rows, in batches of 2, of at most 4 tokens" in " ".join(shown.split())
    assert "exact match" in shown and "chrF" in shown
    page = Page((run / "report.html").read_text(encoding="utf-8")).text
    assert "Evaluation after training" in page and exact.after.text() in page


def test_a_run_that_went_on_from_an_adapter_began_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["optimizer.learning_rate=3e-2", "evaluation.max_new_tokens=8"]
    first = trained("stage-one", *LORA, *HELD_OUT, *fast)
    run = trained("stage-two", f"model.adapter={first / 'final'}", *HELD_OUT, *fast, "seed=7")
    for each in (first, run):
        assert cli(["evaluate", str(each), "rows=3"]) == 0
        samples = json.loads((each / "samples.json").read_text(encoding="utf-8"))
        for key in ("before", "after"):
            assert [row[key] for row in lines(each)] == [row[key] for row in samples]
    base, begun = ({row["before"] for row in lines(each)} for each in (first, run))
    assert base.isdisjoint(begun), "the first stage has moved the model"
    weights = first / "final" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    capsys.readouterr()
    assert cli(["evaluate", str(run), "rows=3"]) == 1
    assert f"went on from the adapter {first / 'final'}, which is another one now" in capsys.readouterr().err
    assert cli(["evaluate", str(run), "rows=3", "before=false"]) == 0


def test_commands_in_another_folder_read_what_the_run_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = trained("first-elsewhere", *LORA, *HELD_OUT)
    run = trained("elsewhere", f"model.adapter={first / 'final'}", *HELD_OUT, "data.sources=[cha*.jsonl]").absolute()
    samples = json.loads((run / "samples.json").read_text(encoding="utf-8"))
    tiny_model(MODELS["llama"], tmp_path / "llama", seed=1)  # A relative path would lead to this one.
    monkeypatch.chdir(tmp_path)
    assert cli(["evaluate", str(run), "rows=3"]) == 0
    for key in ("before", "after"):
        assert [row[key] for row in lines(run)] == [row[key] for row in samples]
    capsys.readouterr()
    assert cli(["merge", str(run)]) == 0 and cli(["export", str(run), "format=int8"]) == 0
    # Followed from here, as what was moved together with its run is, they lead to the other model.
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    (run / "manifest.json").write_text(json.dumps(manifest | {"working_folder": "/nowhere"}), encoding="utf-8")
    assert cli(["evaluate", str(run), "rows=3"]) == 1


def test_without_a_final_model_the_base_model_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("unfinished", *HELD_OUT)
    shutil.rmtree(run / "final")
    assert cli(["evaluate", str(run)]) == 1
    said = capsys.readouterr().err
    assert "has no final model: the run is not finished" in said and "rows answered" not in said


def test_answers_do_not_depend_on_batches_and_the_base_can_be_left_out() -> None:
    run = trained("batches", *LORA, *HELD_OUT)
    assert cli(["evaluate", str(run), "rows=5", "batch_size=5", "max_new_tokens=12"]) == 0
    together, cut = lines(run), found(run).held_out.cut  # type: ignore[union-attr]
    assert cli(["evaluate", str(run), "rows=5", "batch_size=1", "max_new_tokens=12", "before=false"]) == 0
    alone = lines(run)
    assert [row["after"] for row in alone] == [row["after"] for row in together]
    assert not any("before" in row for row in alone)
    held_out = found(run).held_out
    assert held_out and held_out.cut == (None, cut[1]) and all(score.change is None for score in held_out.scores)
    assert cli(["evaluate", str(run), "rows=500", "metrics=[rouge_l, json]", "max_new_tokens=1"]) == 0
    held_out = found(run).held_out
    assert held_out and held_out.rows == 8 and [score.name for score in held_out.scores] == ["ROUGE-L", "valid JSON"]
    assert held_out.cut == (8, 8), "no answer ends with its first token"


TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIX = {"function": {"name": "add", "arguments": {"a": 2, "b": 4}}, "type": "function"}
SAID = {
    "chat": {"content": "It is 6."},
    "thoughts": {"reasoning_content": "2 + 4, which is 6", "content": '{"sum": 6}'},
    "special": {"reasoning_content": "2 + 4, which is 6", "content": '{"sum": 6}'},
    "calls": {"content": "", "tool_calls": [SIX]},
}


@pytest.mark.parametrize("kind", [*SAID, "tokens", "segments"])
def test_a_model_that_says_what_was_trained_is_always_right(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the thoughts and the calls of tools that the template writes, and the special tokens of rows that have
    some."""
    begin, end = ("[THINK]", "[/THINK]") if kind == "special" else ("<think>", "</think>")
    template = TEMPLATE.replace("<think>", begin).replace("</think>", end)
    (place / "thinking.jinja").write_text(template, encoding="utf-8")
    if kind == "special":
        with_special_tokens(place / "llama", place / "larger", begin, end)
    asked = [{"role": "user", "content": f"{number}: 2 + 4?"} for number in range(40)]
    rows: list[dict[str, Any]] = [{"messages": [each, {"role": "assistant", **SAID.get(kind, {})}]} for each in asked]
    if kind == "tokens":
        rows = [{"input_ids": [40 + n, 50, 60, 61, 62, 2], "labels": [-100, -100, 60, 61, 62, 2]} for n in range(40)]
    if kind == "segments":
        parts = [{"text": " it is 6.", "label": True}, {"text": "<|im_end|>", "label": True}]
        rows = [{"segments": [{"text": each["content"], "label": False}, *parts]} for each in asked]
    write_jsonl(place / f"{kind}.jsonl", rows)
    run = trained(
        f"said-{kind}", *LORA, *HELD_OUT, f"data.sources=[{kind}.jsonl]", "model.chat_template=thinking.jinja",
        *(["model.path=larger"] if kind == "special" else []),
    )  # fmt: skip
    loaded = opened(run)
    tokenizer = loaded.tokenizer()
    prepared = prepare(loaded.recipe, tokenizer, loaded.stop_tokens(tokenizer), vocab_size=loaded.vocab_size)

    def perfect(model: Any, tokenizer: Any, prompts: list[list[int]], *_: Any) -> torch.Tensor:
        known = [row["input_ids"] for row in prepared.eval]
        answers = [
            torch.tensor(next(row[len(prompt) :] for row in known if row[: len(prompt)] == prompt))
            for prompt in prompts
        ]
        return torch.nn.utils.rnn.pad_sequence(answers, batch_first=True, padding_value=tokenizer.pad_token_id)

    monkeypatch.setattr(held_out, "generate", perfect)
    assert cli(["evaluate", str(run), "rows=4", "before=false", "max_new_tokens=99"]) == 0
    scores = found(run).held_out.scores  # type: ignore[union-attr]
    assert {score.name: score.after.value for score in scores if score.name in ("exact match", "valid JSON")} == (
        {"exact match": 1.0} | ({"valid JSON": 1.0} if kind in ("thoughts", "special") else {})
    )
    (line, *_) = lines(run)
    assert (end in line["after"]) == (end in line["reference"]) == (kind in ("thoughts", "special"))


def test_an_answer_that_is_cut_in_thoughts_which_its_prompt_opens_says_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    (place / "opening.jinja").write_text(template, encoding="utf-8")
    answer = {"role": "assistant", "reasoning_content": "2 + 4", "content": "{}"}
    write_jsonl(
        place / "opened.jsonl",
        ({"messages": [{"role": "user", "content": f"{number}: 2 + 4?"}, answer]} for number in range(40)),
    )
    run = trained(
        "opened", *LORA, *HELD_OUT, "data.sources=[opened.jsonl]", "model.chat_template=opening.jinja"
    )  # fmt: skip
    said = ["{}", "2 + 4\n</think>\n\n{}<|im_end|>"]

    def half_cut(model: Any, tokenizer: Any, prompts: list[list[int]], *_: Any) -> torch.Tensor:
        assert all(tokenizer.decode(prompt).endswith("<think>\n") for prompt in prompts)
        ids = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in said]
        return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)

    monkeypatch.setattr(held_out, "generate", half_cut)
    assert cli(["evaluate", str(run), "rows=2", "batch_size=2", "before=false"]) == 0
    scores = found(run).held_out.scores  # type: ignore[union-attr]
    assert {score.after.value for score in scores if score.name in ("exact match", "valid JSON")} == {0.5}
    assert "{}" in [row["after"] for row in lines(run)]


def test_an_answer_that_positions_end_is_cut(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("positions", *LORA, *SEQ2SEQ, *HELD_OUT)
    assert cli(["evaluate", str(run), "rows=2", "before=false", "metrics=rouge_l", "max_new_tokens=4096"]) == 0
    held_out = found(run).held_out
    ended = [row["after"] for row in lines(run)]
    assert held_out and held_out.cut == (None, 2), ended


def test_rows_that_are_not_held_out_are_not_asked(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained("none", *LORA)
    capsys.readouterr()
    assert cli(["evaluate", str(run)]) == 1
    assert "holds out no rows" in capsys.readouterr().err
    rows = (place / "text.jsonl").read_text()
    (place / "own.jsonl").write_text(rows)
    own = trained("own", *LORA, *HELD_OUT, "data.sources=[own.jsonl]", "objective=language_modelling")
    (place / "own.jsonl").write_text(rows * 2)
    capsys.readouterr()
    assert cli(["evaluate", str(own)]) == 1
    assert "changed since the run began" in capsys.readouterr().err
    assert not (own / "evaluation.json").exists()


def test_a_damaged_file_of_results_is_kept_aside() -> None:
    run = trained("damaged", *LORA, *HELD_OUT)
    (run / "evaluation.json").write_text("{")
    assert cli(["report", str(run)]) == 0
    assert "evaluation.json cannot be read" in Page((run / "report.html").read_text(encoding="utf-8")).text
    assert cli(["evaluate", str(run), "rows=2"]) == 0
    assert (run / "evaluation.json.damaged").read_text() == "{" and found(run).held_out


def test_earlier_results_whose_disk_does_not_answer_stay_and_the_new_ones_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = trained("unanswered", *LORA, *HELD_OUT)
    (run / "evaluation.json").symlink_to("/proc/self/mem")  # Reading it is an input/output error.
    assert cli(["evaluate", str(run), "rows=2"]) == 1
    told = capsys.readouterr()
    assert "evaluation.json: Input/output error" in told.err and "chrF" in told.out, told
    assert (run / "evaluation.json").is_symlink()
    assert not (run / "evaluation.json.damaged").is_symlink() and not (run / ROWS).exists()
