"""What a training shows in the terminal: one live line, or plain lines where there is no terminal.

No control character is written to a log file, nothing hides the cursor, and every line fits 80 columns.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from toolkit.common import (
    LINES,
    compact,
    count_text,
    duration,
    fitted,
    perplexity_of,
    perplexity_text,
    printable,
    table,
)
from toolkit.data.rows import Sample

PLAIN_LINE_SECONDS = 10.0
PLAIN_LINE_SHARE = 0.05
REDRAWS_PER_SECOND = 10
WIDEST_BAR = 30
WIDEST_TEXT = 100


class Progress:
    """The progress of one training, on the process that talks to the user.

    Used as `start`, then `update` after every step, `evaluating` and `evaluation` around evaluations, and `close`,
    which may be called twice. `evaluating`, `evaluation` and `message` also work before `start`.

    Args:
        stream: Where to write; standard output by default.
        quiet: Whether steps and remarks are left out.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False) -> None:
        stream = stream or sys.stdout
        self.quiet = quiet
        self._console = console_of(stream)
        self._terminal = stream.isatty() and not self._console.is_dumb_terminal and not quiet
        self._live: Live | None = None
        self._total_steps = self._step = self._first_step = self._shown_step = 0
        self._started = time.monotonic()
        self._figures: list[tuple[str, str]] = []
        self._evaluating = ""
        self._shown_at = -math.inf

    def start(self, total_steps: int, step: int = 0) -> None:
        """Begins the line.

        Args:
            total_steps: Optimizer steps of the whole training.
            step: Steps done before, when training is resumed.
        """
        self._total_steps = total_steps
        self._step = self._first_step = self._shown_step = step
        self._started = time.monotonic()
        if self._terminal:
            self._redraw(force=True)
        else:
            resumed = f", resumed at step {step:,}" if step else ""
            self.remark(f"Training: {count_text(total_steps, 'step')}{resumed}")

    def update(
        self,
        step: int,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        seconds_left: float | None = None,
        reward: float | None = None,
    ) -> None:
        """Shows a finished step.

        Args:
            step: Optimizer steps done so far.
            loss: Mean training loss of the step.
            tokens_per_second: Trained and masked tokens over all processes, per second.
            seconds_left: Time to the end; by default estimated from the steps since `start`.
            reward: Mean of the step's answers.
        """
        self._step, self._evaluating, self._figures = step, "", []
        now, last, done = time.monotonic(), step >= self._total_steps, step - self._first_step
        if seconds_left is None and done > 0:
            seconds_left = (now - self._started) / done * (self._total_steps - step)
        if loss is not None:
            self._figures.append((f"loss {loss:.4f}", "bold" if math.isfinite(loss) else "bold red"))
        if reward is not None:
            self._figures.append((f"reward {reward:.3f}", "bold"))
        if tokens_per_second is not None:
            self._figures.append((f"{compact(tokens_per_second)} tok/s", ""))
        if last:
            self._figures.append((f"took {duration(now - self._started)}", "dim"))
        elif seconds_left is not None:
            self._figures.append((f"{duration(seconds_left)} left", "dim"))
        overdue = now - self._shown_at >= PLAIN_LINE_SECONDS
        if self._terminal:
            self._redraw(force=last)
        elif last or overdue or step - self._shown_step >= PLAIN_LINE_SHARE * self._total_steps:
            self._shown_step, self._shown_at = step, now
            share = f" ({step / self._total_steps:.0%})" if self._total_steps else ""
            figures = "".join(f"  {text}" for text, _ in self._figures)
            self.remark(f"Training  step {step}/{self._total_steps}{share}{figures}")

    def evaluating(self, batch: int, num_batches: int | None = None) -> None:
        """Shows that an evaluation has reached a batch. Only the live line does; a log gets the result alone."""
        self._evaluating = f"evaluating {batch}" + (f"/{num_batches}" if num_batches else "")
        if self._terminal:
            self._redraw()

    def evaluation(
        self, step: int, loss: float, accuracy: float | None = None, rewards: str = "", scores: str = ""
    ) -> None:
        """Prints the result of an evaluation; it stays above the live line.

        Args:
            accuracy: Share of answers that are preferred rightly; without it, and without scores, the loss is one of
                tokens, and has a perplexity.
            rewards: What is said of rewards, where the loss is no more than them.
            scores: What is said in place of a perplexity.
        """
        self._evaluating = ""
        at = f"step {step}" if step else "before training"
        of_labels = f"perplexity {perplexity_text(perplexity_of(loss))}"
        beside = scores or (of_labels if accuracy is None else f"accuracy {accuracy:.1%}")
        self.message(f"Held-out {rewards} ({at})" if rewards else f"Held-out loss {loss:.4f}, {beside} ({at})")
        if self._live:
            self._redraw(force=True)

    def message(self, text: str) -> None:
        """Prints text that stays above the live line."""
        write(Text(text), self._console)

    def remark(self, text: str) -> None:
        """A message that may be left out."""
        if not self.quiet:
            self.message(text)

    def close(self) -> None:
        """Ends the live line and leaves its last state on the screen."""
        if self._live:
            self._evaluating = ""
            live, self._live = self._live, None
            live.update(self._line(), refresh=True)
            live.stop()

    def _redraw(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._shown_at < 1 / REDRAWS_PER_SECOND:
            return
        self._shown_at = now
        if self._live is None:
            # Without a refresh thread nothing holds a lock when Ctrl-C arrives; and a cursor that was never hidden
            # needs no restoring when the process is killed.
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
            self._console.show_cursor(True)
        self._live.update(self._line(), refresh=True)

    def _line(self) -> Text:
        """The live line: bar, steps and figures, the last ones left out where they do not fit."""
        # Three columns stay free so that the terminal's own "^C" does not wrap the line.
        room = self._console.width - 3
        steps = f"{self._step}/{self._total_steps}"
        figures = [(self._evaluating, "bold")] if self._evaluating else self._figures
        parts = [(steps, ""), *figures] if self._total_steps else figures
        line = Text("Training", no_wrap=True, overflow="crop", end="")
        tail = Text(no_wrap=True)
        for text, style in parts:
            if line.cell_len + tail.cell_len + 2 + cell_len(text) <= room:
                tail.append("  ").append(text, style)
        bar_width = min(room - line.cell_len - tail.cell_len - 2, WIDEST_BAR)
        if bar_width >= 5 and self._total_steps:
            filled = round(bar_width * min(self._step / self._total_steps, 1.0))
            full, empty = ("━", "─") if self._console.encoding.startswith("utf") else ("=", "-")
            line.append("  ").append(full * filled, "cyan").append(empty * (bar_width - filled), "bright_black")
        line.append_text(tail)
        line.truncate(room)
        return line


def prompts_before_after(samples: Sequence[Sample], width: int | None = None, whole: str = "") -> str:
    """Samples with their answers as text, wrapped to the terminal, at most 100 columns; `whole` is as in `fitted`."""
    width = min(width or shutil.get_terminal_size().columns, WIDEST_TEXT)
    blocks = list[list[str]]()
    for number, sample in enumerate(samples, start=1):
        texts = {key: getattr(sample, key) for key in ("prompt", "before", "after", "reference")}
        rows = [(key, printable(text.strip().expandtabs(4))) for key, text in texts.items() if text is not None]
        lines = [table([row], columns=width, indent=2, first=9).plain.split("\n") for row in rows]
        blocks += [[f"Sample {number} of {len(samples)}"], *lines, [""]]
    return fitted(blocks[:-1], whole)


def console_of(stream: TextIO) -> Console:
    """A console that prints a text as it is."""
    return Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)


def write(text: Text, console: Console, whole: str = "") -> None:
    """Writes text with its colours to a terminal; a log gets plain text, whatever its encoding.

    Text that would steer the terminal is escaped, and loses its colours.

    Args:
        whole: How to see all of a text of which a terminal gets no more than a person reads.
    """
    lines = text.split("\n")
    if whole and console.is_terminal and (left := len(lines) - LINES) > 0:
        rest = [f"… and {left + 2:,} more lines", f"all of it: {whole}"]
        text = Text("\n").join([*lines[: LINES - 2], *map(Text, rest)])
    if (escaped := printable(text.plain)) != text.plain:
        text = Text(escaped)
    if console.is_terminal and not console.is_dumb_terminal:
        console.print(text)
    else:
        encoding = getattr(console.file, "encoding", None) or "utf-8"
        console.file.write(text.plain.encode(encoding, "replace").decode(encoding) + "\n")
        console.file.flush()
