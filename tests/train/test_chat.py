"""Conversations with runs: what was said before counts, by the run's own template; several runs hear the same."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import environment
from small import LORA, SEQ2SEQ, place_with, trained, with_special_tokens

from toolkit.cli.main import main as cli
from toolkit.train.finished import chat
from toolkit.train.finished.export import load_trained

place = place_with("llama", "blenderbot")


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *arguments: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    capsys.readouterr()
    assert cli(["chat", *arguments, "--max-new-tokens", "6"]) == 0
    return capsys.readouterr().out


def expected(run: Path, turns: list[str], system: str | None) -> list[str]:
    """The answers of Transformers' own greedy generation to a conversation."""
    _, model, tokenizer = load_trained(run)
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        stops = tokenizer.eos_token_id
        with torch.no_grad():
            found = model.generate(**ids, max_new_tokens=6, do_sample=False, eos_token_id=stops)
        answers.append(tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip())
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.parametrize("system", [None, "You are brief."])
def test_a_conversation_goes_on_until_it_is_forgotten(
    system: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(f"talks-{bool(system)}", *LORA, "optimizer.learning_rate=3e-2")
    first, second = expected(run, ["what does upper do?", "and lower?"], system)
    (alone,) = expected(run, ["and lower?"], system)
    options = ["--system", system] if system else []
    out = said(monkeypatch, capsys, "what does upper do?\n\nand lower?\n/reset\nand lower?\n", str(run), *options)
    assert out == f"{first}\n{second}\n{alone}\n"
    out = said(monkeypatch, capsys, "and lower?\n/exit\nwhat does upper do?\n", str(run), *options)
    assert out == f"{alone}\n"


def test_several_runs_answer_the_same_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with its own conversation: trained otherwise, they do not say the same."""
    one, other = trained("one", *LORA), trained("other", *LORA, "optimizer.learning_rate=0.3")
    answers = [expected(run, ["what does upper do?", "why?"], None) for run in (one, other)]
    assert answers[0] != answers[1]
    out = said(monkeypatch, capsys, "what does upper do?\nwhy?\n", str(one), str(other))
    turns = zip(*answers, strict=True)
    assert out == "".join(f"1: one\n{mine}\n\n2: other\n{others}\n\n" for mine, others in turns)


def test_thoughts_of_earlier_turns_are_left_out_of_a_conversation(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Templates do so by their marks, which the texts of answers are without where they are special tokens."""
    with_special_tokens(place / "llama", place / "thinking", "[THINK]", "[/THINK]")
    run = trained("thinks", *LORA, "model.path=thinking")
    prompts = []

    def think(model: Any, tokenizer: Any, asked: list[list[int]], *_: Any, streamer: Any, **__: Any) -> torch.Tensor:
        prompts.append(tokenizer.decode(asked[0]))
        answer = tokenizer("[THINK]hmm[/THINK]Yes.", add_special_tokens=False, return_tensors="pt")["input_ids"]
        for ids in (torch.tensor(asked), *answer[0].split(1)):
            streamer.put(ids)
        streamer.end()
        return answer

    monkeypatch.setattr(chat, "generate", think)
    said(monkeypatch, capsys, "Well?\nReally?\n", str(run))
    assert "Yes." in prompts[1] and "hmm" not in prompts[1]


TEXTS = [*LORA, "objective=language_modelling", "data.sources=[text.jsonl]"]


@pytest.mark.parametrize(("name", "kind"), [("pairs", SEQ2SEQ), ("texts", TEXTS)])
def test_a_run_that_knows_no_conversations_is_asked_each_line_by_itself(
    name: str, kind: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(name, *kind)
    out = said(monkeypatch, capsys, "Hello\nWorld\nHello\n", str(run))
    capsys.readouterr()
    assert cli(["generate", str(run), "--prompt", "Hello", "--max-new-tokens", "6"]) == 0
    answer = capsys.readouterr().out
    assert out.startswith(answer) and out.endswith(answer) and out.count("\n") >= 3
    assert cli(["chat", str(run), "--system", "You are brief."]) == 1
    assert "was not trained on conversations" in capsys.readouterr().err


def test_what_cannot_be_answered_ends_a_script_with_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("long", *LORA)
    for content, error in ((b"Hello\n", "more than the"), (b"a\xff\n", "no UTF-8")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8", "strict"))
        capsys.readouterr()
        assert cli(["chat", str(run), "--max-new-tokens", "1000000"]) == 1
        printed = capsys.readouterr()
        assert not printed.out and error in printed.err and len(printed.err.splitlines()) == 2
    assert cli(["chat", str(run), "--top-p", "0.5"]) == 1
    assert "--top-p has no effect without --temperature" in capsys.readouterr().err


def test_an_encoder_decoder_says_how_long_an_answer_can_be_however_long_the_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("writes", *SEQ2SEQ)
    most = load_trained(run)[1].config.max_position_embeddings - 1  # Behind the token that an answer begins with.
    for prompt in ("Hello\n", "Hello, hello, hello\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
        assert cli(["chat", str(run), "--max-new-tokens", "1000000"]) == 1
        assert f"an answer of 1,000,000 tokens is longer than the {most:,} that the model writes" in " ".join(
            capsys.readouterr().err.split()
        )


def read_until(terminal: int, text: str, seconds: float = 240) -> str:
    """What a terminal shows until a text has come."""
    shown, until = "", time.monotonic() + seconds
    while text not in shown:
        assert select.select([terminal], [], [], max(0.0, until - time.monotonic()))[0], shown
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # Linux says so of a terminal that nobody holds any more.
            raise AssertionError(shown) from None
    return shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a closed terminal says differs")
def test_in_a_terminal_runs_stand_side_by_side_and_commands_are_told() -> None:
    one, other = trained("left", *LORA), trained("right", *LORA, "optimizer.learning_rate=3e-2")
    answers = [expected(run, ["what does upper do?"], None)[0].split()[0] for run in (one, other)]
    terminal, screen = pty.openpty()
    command = [sys.executable, "-m", "toolkit", "chat", str(one), str(other), "--max-new-tokens", "6"]
    size = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=screen, stdout=screen, stderr=screen, env=environment() | size)
    os.close(screen)
    try:
        assert "left, right: /reset forgets the conversation" in read_until(terminal, "> ")
        os.write(terminal, b"/help\n")
        assert "there is no /help: /reset forgets" in read_until(terminal, "> ")
        os.write(terminal, b"what does upper do?\n")
        lines = read_until(terminal, "\x1b[?25h> ").splitlines()
        assert any("1: left" in line and "2: right" in line for line in lines)
        assert any(all(answer in line for answer in answers) for line in lines), (answers, lines)
        os.write(terminal, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
