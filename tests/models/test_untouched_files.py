"""A whole model comes with the vocabulary from which llama.cpp's converter reads it; images: `test_of_images`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small import LORA, place_with, trained
from transformers import AutoTokenizer

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


def test_a_converter_finds_added_tokens_beside_the_vocabulary(gemma: str) -> None:
    """llama.cpp's reads those that SentencePiece's vocabulary lacks from `tokenizer_config.json` alone."""
    folder = trained("new", gemma, *LORA, "model.new_tokens=['<new>']") / "final"
    whole = folder.parent / "merged"
    assert cli(["merge", str(folder.parent)]) == 0
    before, after = (AutoTokenizer.from_pretrained(each) for each in (folder, whole))
    listed = json.loads((whole / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    assert {int(number): token["content"] for number, token in listed.items()} == {
        number: token.content for number, token in before.added_tokens_decoder.items()
    }
    assert listed[str(before.convert_tokens_to_ids("<new>"))]["special"]
    text = "<|im_start|>user\nHello <new>  world<|im_end|>"
    assert before(text)["input_ids"] == after(text)["input_ids"]
    assert before.added_tokens_decoder == after.added_tokens_decoder
    assert before.special_tokens_map == after.special_tokens_map and before.get_vocab() == after.get_vocab()
