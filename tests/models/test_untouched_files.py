"""A whole model comes with the vocabulary from which llama.cpp's converter reads it; images: `test_of_images`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small import LORA, place_with, trained

from toolkit.cli.main import main as cli

place = place_with("llama")
VOCABULARY = b"sentencepiece's"


@pytest.fixture(scope="module")
def gemma(place: Path) -> str:
    """A model with a vocabulary in both forms, as Gemma is published."""
    shutil.copytree(place / "llama", place / "gemma")
    (place / "gemma" / "tokenizer.model").write_bytes(VOCABULARY)
    return "model.path=gemma"


def test_the_vocabulary_is_beside_what_was_trained_or_merged(gemma: str) -> None:
    assert (trained("full", gemma) / "final" / "tokenizer.model").read_bytes() == VOCABULARY
    run = trained("adapted", gemma, *LORA)
    assert cli(["merge", str(run)]) == 0
    assert (run / "merged" / "tokenizer.model").read_bytes() == VOCABULARY


def test_that_of_another_tokenizer_is_not(gemma: str) -> None:
    assert not (trained("other", gemma, "model.tokenizer=llama") / "final" / "tokenizer.model").exists()
