"""Reads the pages that the toolkit writes, and writes the metrics they are made from."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A parsed page: balanced tags, addresses it would load, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def step_line(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 100,
        "seconds": 2.0 * step,
        "loss": 4.0 - step / 100,
        "learning_rate": 1e-3,
        "grad_norm": 1.5,
        "tokens_per_second": 400.0,
        "trained_tokens_per_second": 160.0,
        "step_seconds": 2.0 if step > 2 else 9.0,
        "data_wait": 0.01,
        "model_flops": 3.1e11,
        "mfu": 0.23,
        "tokens": 870 * step,
        "padding": 0.08,
        "memory_bytes": 3 * 2**30,
    } | values


def eval_line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 100, "seconds": 2.0 * step, "eval_loss": loss, "eval_tokens": 100}


def write_metrics(run: Path, *rows: dict[str, Any], end: str = "") -> None:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end, encoding="utf-8")
