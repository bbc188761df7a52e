"""What a recipe says of new tokens agrees with the adapter that it starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import write_recipe

from toolkit.recipe import RecipeError, load
from toolkit.recipe.errors import inline

ADDED = [(2, "<eos>"), (9, "<tool>"), (5, "str"), (10, "</tool>")]
RIGHT = 'model.new_tokens=["<tool>", "str", "</tool>"]'


@pytest.fixture(autouse=True)
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `small` and an adapter with rows for three tokens."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, "small", "model: {path: nowhere, adapter: first}\ndata: {sources: [a.jsonl]}\n")
    folder = tmp_path / "first"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    config["trainable_token_indices"] = {"lm_head": [9, 5, 10], "model.embed_tokens": [9, 5, 10]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokens = [{"id": index, "content": name} for index, name in ADDED]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokens", [["</tool>", "str", "<tool>"], ["<a>", "str", "<b>"], ["<tool>", "str"], []])
def test_rows_of_other_tokens_are_refused(tokens: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load("small", [f"model.new_tokens={json.dumps(tokens)}"])
    assert "has rows for [<tool>, str, </tool>]" in str(caught.value) and inline(tokens) in str(caught.value)
    assert f"set {RIGHT}" in str(caught.value)
    load("small", [RIGHT])


def test_rows_without_names_are_refused(adapter: Path) -> None:
    (adapter / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"tokenizer\.json does not name"):
        load("small", [RIGHT])
