"""A tokenizer that would take all memory is one error; those that are in use are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small import populate
from tiny import tiny_tokenizer

from toolkit.cli.main import main as command
from toolkit.common import UserError
from toolkit.models.load import ModelSource
from toolkit.recipe.rules import load_checked


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    populate(tmp_path, "llama")
    monkeypatch.chdir(tmp_path)


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def opened(**changes: Any) -> Any:
    file = Path("llama/tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | changes), encoding="utf-8")
    return ModelSource.open(load_checked("small").recipe).tokenizer()


MANY = {"id": "<s>", "ids": [1] * 5000, "tokens": ["<s>"] * 5000}
ROUND = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": MANY},
}


AGAIN = ROUND | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000}
BPE = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
PIECES = {
    "type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**6,
    "vocab": {"a": 0, "##a": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalizer": replace("b" * 10**6, String="a")}, "its normalizer makes texts 1,000,000 times as long"),
        ({"normalizer": replace("b" * 100, String="")}, "its normalizer makes texts"),
        ({"normalizer": replace("b" * 100, Regex="[a-z]")}, "its normalizer makes texts 100 times as long"),
        ({"normalizer": sequence(*[replace("aaa", String="a")] * 40)}, "its normalizer makes texts 81 times"),
        ({"normalizer": sequence(*[replace("a", Regex="x*")] * 40)}, "its normalizer makes texts 128 times"),
        ({"normalizer": sequence(replace("bb", String="a"), replace("c" * 60, String="b"))}, "makes texts 120 times"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "puts 1,000,000 characters before a text"),
        ({"decoder": replace("b" * 10**6, String="a")}, "its decoder makes texts 1,000,000 times as long"),
        ({"post_processor": ROUND}, "puts 5,000 tokens around a text"),
        ({"post_processor": AGAIN}, "makes 100,000 tokens of a letter"),
        ({"model": BPE | {"vocab": BPE["vocab"] | {"x" * 10**6: 600}}}, "a token has 1,000,000 characters"),
        ({"model": PIECES, "decoder": None, "added_tokens": []}, "max_input_chars_per_word is 1,000,000"),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(**changes)
    assert words in caught.value.what and "the tokenizer of llama" in caught.value.what
    assert "model.tokenizer" in caught.value.change and len(str(caught.value)) < 400


def test_too_many_added_tokens_are_refused_before_they_are_read() -> None:
    tokens = [{"id": 600 + number, "content": f"<{number}>", "special": True} for number in range(2**17 + 1)]
    with pytest.raises(UserError, match="adds 131,073 tokens to its vocabulary"):
        opened(added_tokens=tokens)


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_text_at_which_the_library_gives_up_is_one_error_that_names_the_row(
    part: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    search = {"Regex": "(e|ee|[^ ])+$"}
    split = {"type": "Split", "pattern": search, "behavior": "Isolated", "invert": False}
    opened(**{part: split if part == "pre_tokenizer" else replace("x", **search)})
    says = f"{'e' * 80} y"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": says}]
    row = {"text": says} if kind == "text" else {"messages": messages}
    Path("hard.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    objective = ["objective=language_modelling"] * (kind == "text")
    capsys.readouterr()
    assert command(["data", "recipe=small", "data.sources=[hard.jsonl]", *objective]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert error.startswith("error: hard.jsonl:1: The tokenizer gives up at this text: ") and "retry-limit" in error


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")),
        # ALBERT, DeBERTa.
        sequence(replace('"', String="``"), replace('"', String="''"), {"type": "NFKD"}, replace(" ", Regex=" {2,}")),
        # Names for the white space that is part of code.
        sequence(replace("<|newline|>", String="\n"), replace("<|tab|>", String="\t"), replace("<|end|>", String="\r")),
    ],
)
def test_tokenizers_in_use_are_taken(normalizer: dict[str, Any]) -> None:
    assert opened(normalizer=normalizer)("a b")["input_ids"]
