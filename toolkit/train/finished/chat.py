"""Conversations with runs in a terminal: answers come word by word, those of several runs side by side.

Every run keeps its own conversation, with its own answers in it, and is asked by its own template and stop tokens. A
run that was not trained on conversations is asked each line by itself.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import TextStreamer

from toolkit.common import UserError, printable
from toolkit.data.encoding.encode import Encoder
from toolkit.data.rows import Chat
from toolkit.data.thoughts import spoken, text_of
from toolkit.distributed.engines import dtypes
from toolkit.train.evaluation.evaluate import as_prompt, generate, positions_left
from toolkit.train.finished.export import (
    load_trained,
    no_text,
    on_device,
    read_audit,
    refuse_head,
    take_any_bytes,
)

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short"
_NARROWEST = 30
"""Characters of a run's column; with less, answers stand below each other."""

Show = Callable[[str], None]
"""Gets each piece of an answer as it comes."""


class Speaker:
    """A run that is talked with.

    Args:
        system: What the conversation begins with, if anything.

    Raises:
        UserError: If the run has no final model, or no conversation that a system prompt could begin.
    """

    def __init__(self, run: Path, system: str | None) -> None:
        refuse_head(run)
        source, model, tokenizer = load_trained(run)
        self.name, self._recipe, self._tokenizer = run.resolve().name, source.recipe, tokenizer
        self._model = on_device(model, source.recipe)
        self._stops, self._audit = source.stop_tokens(tokenizer), read_audit(run)
        settings = source.recipe.data.chat_template_kwargs
        self._encoder = Encoder(tokenizer, "auto", self._stops, settings)
        if system and not self._audit.chat_template.needed:
            raise UserError(f"{run} was not trained on conversations, which --system could begin", "leave it out")
        self._begin = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self._messages = list(self._begin)

    def reply(self, prompt: str, show: Show, max_new_tokens: int, sample: dict[str, Any] | None) -> None:
        """Answers a turn of the user; what was said of an answer that is cut short stays in the conversation.

        Raises:
            UserError: If the conversation has become longer than what the model reads, or the answer would be longer
                than what it writes.
        """
        turn = [*self._messages, {"role": "user", "content": prompt}]
        ids, said = self._prompt_ids(turn), list[str]()
        if (left := positions_left(self._model, ids)) < max_new_tokens:
            if self._model.config.is_encoder_decoder:  # It reads the conversation elsewhere than it writes.
                raise UserError(
                    f"{self.name}: an answer of {max_new_tokens:,} tokens is longer than the {left:,} that the model "
                    "writes",
                    "take a smaller --max-new-tokens",
                )
            raise UserError(
                f"{self.name}: the conversation has {len(ids):,} tokens, with an answer of {max_new_tokens:,} more "
                f"than the {len(ids) + left:,} that the model reads",
                "begin anew with /reset, or take a smaller --max-new-tokens",
            )

        def hear(piece: str) -> None:
            said.append(piece)
            show(piece)

        autocast = dtypes(self._recipe).autocast
        streamer = _Streamer(self._tokenizer, hear)
        try:
            found = generate(
                self._model, self._tokenizer, [ids], max_new_tokens, self._stops, autocast, sample, streamer=streamer
            )
            whole = text_of(self._tokenizer, found[0].tolist())
            if whole.strip() != "".join(said).strip():
                # Templates leave out thoughts of earlier turns, but not those whose marks, special tokens, are gone.
                said[:] = [spoken(whole)]
        finally:
            self._messages = [*turn, {"role": "assistant", "content": "".join(said).strip()}]

    def _prompt_ids(self, turn: list[dict[str, Any]]) -> list[int]:
        if self._audit.chat_template.needed:
            # A prompt is all that comes before the last answer, which is to be given.
            return self._encoder.prompt_ids(Chat([*turn, {"role": "assistant", "content": ""}]))
        settings = self._recipe.data.chat_template_kwargs
        return as_prompt(self._tokenizer, turn[-1]["content"], self._audit, self._stops, settings)


class _Streamer(TextStreamer):
    """Hands on words as soon as they are whole."""

    def __init__(self, tokenizer: Any, show: Show) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._show(text)


def chat(
    runs: Sequence[Path], system: str | None, max_new_tokens: int, sample: dict[str, Any] | None, seed: int
) -> None:
    """Talks with runs until the user leaves or the input ends.

    Args:
        system: What every conversation begins with, if anything.
        sample: See `evaluate.generate`.

    Raises:
        UserError: If there is nothing to talk with, or, where nobody sits at a terminal, if a turn cannot be answered.
    """
    if said := no_text(system or ""):
        raise UserError(said, "write it in UTF-8")
    speakers = [Speaker(run, system) for run in runs]
    torch.manual_seed(seed)
    take_any_bytes()
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"{', '.join(printable(speaker.name) for speaker in speakers)}: {_HELP}")
    for prompt in _turns(at_terminal):
        if prompt == "/exit":
            return
        if prompt == "/reset":
            for speaker in speakers:
                speaker.reset()
            continue
        try:
            if said := no_text(prompt):
                raise UserError(said, "write it in UTF-8")
            _answer(speakers, prompt, max_new_tokens, sample)
        except UserError as error:
            if not at_terminal:
                raise
            print(error)
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            print()


def _turns(at_terminal: bool) -> Iterator[str]:
    """What the user says, a line each; what stands alone behind a slash must be a command."""
    while True:
        try:
            line = input("> ") if at_terminal else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except KeyboardInterrupt:
            print()
            return
        line = line.strip()
        if at_terminal and line.startswith("/") and line[1:].isalpha() and line not in ("/reset", "/exit"):
            print(f"there is no {printable(line)}: {_HELP}")
        elif line:
            yield line


def _answer(speakers: Sequence[Speaker], prompt: str, max_new_tokens: int, sample: dict[str, Any] | None) -> None:
    if len(speakers) == 1:
        pieces = list[str]()

        def show(piece: str) -> None:
            # Spaces at the beginning are no part of an answer.
            piece = piece if pieces else piece.lstrip()
            pieces.extend(filter(None, [piece]))
            print(printable(piece), end="", flush=True)

        speakers[0].reply(prompt, show, max_new_tokens, sample)
        print(flush=True)
        return
    texts = dict[str, str]()
    names = [f"{at}: {speaker.name}" for at, speaker in enumerate(speakers, start=1)]
    abreast = sys.stdout.isatty() and shutil.get_terminal_size().columns // len(speakers) >= _NARROWEST
    screen = Live(console=Console(file=sys.stdout), auto_refresh=False) if abreast else contextlib.nullcontext()
    with screen as live:
        for name, speaker in zip(names, speakers, strict=True):
            texts[name] = ""

            def add(piece: str, name: str = name) -> None:
                texts[name] += piece
                if live:
                    live.update(_columns(names, texts), refresh=True)

            speaker.reply(prompt, add, max_new_tokens, sample)
            if not live:
                print(f"{printable(name)}\n{printable(texts[name].strip())}\n", flush=True)


def _columns(names: Sequence[str], texts: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for _ in names:
        grid.add_column(ratio=1, overflow="fold")
    grid.add_row(*(Text(printable(name), "bold") for name in names))
    grid.add_row(*(Text(printable(texts.get(name, "").strip())) for name in names))
    return grid
