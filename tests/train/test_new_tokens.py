"""Tokens that a model has yet to learn: their rows are made, trained, saved, continued and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import metrics, write_jsonl
from safetensors.torch import load_file
from small import LORA, loss_and_gradients, place_with, set_up
from transformers import AutoTokenizer

from toolkit.models.coverage import parameter_counts
from toolkit.recipe import RecipeError
from toolkit.recipe.rules import load_checked
from toolkit.train.finished.export import load_trained
from toolkit.train.main import main

TOKENS = 'model.new_tokens=["<tool>","str","</tool>"]'


place = place_with("llama", "qwen")


@pytest.fixture(scope="module", autouse=True)
def tools(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    for message in (message for row in rows for message in row["messages"] if message["role"] == "assistant"):
        message["content"] = f"<tool>{message['content']}</tool>"
    write_jsonl(place / "tools.jsonl", rows)


@pytest.mark.parametrize(("model", "tied"), [("llama", True), ("qwen", False)])
def test_adapters_train_the_rows_of_new_tokens_and_no_others(model: str, tied: bool) -> None:
    training = set_up(*LORA, TOKENS, "data.sources=[tools.jsonl]", f"model.path={model}")
    trained, vocabulary = training.trainer.model, len(training.tokenizer)
    base = trained.get_base_model()
    assert base.get_input_embeddings().original_module.weight.shape[0] == vocabulary
    assert training.tokenizer.convert_tokens_to_ids(["<tool>", "</tool>"]) == [vocabulary - 3, vocabulary - 1]
    with torch.inference_mode():  # What is kept of this pass must serve those that learn.
        trained(input_ids=torch.tensor([[vocabulary - 3, 1]]))
    loss, gradients = loss_and_gradients(training)
    rows = {name: each for name, each in gradients.items() if "lora_" not in name}
    assert len(rows) == (1 if tied else 2) and all(len(each) == 3 and each.any() for each in rows.values())
    counts = parameter_counts(trained)
    plain = parameter_counts(set_up(*LORA, f"model.path={model}").trainer.model)
    assert counts["trainable"] - plain["trainable"] == sum(each.numel() for each in rows.values())
    # The same by the model's own forward, which scores the labels with the wrapped head itself.
    training.trainer.output_head.fused = False
    own, expected = loss_and_gradients(training)
    assert own == pytest.approx(loss, abs=1e-6)
    assert all(torch.allclose(gradients[name], each, atol=1e-6) for name, each in expected.items())


@pytest.mark.matrix
@pytest.mark.parametrize("method", [[], LORA, [*LORA, "method.quantization=nf4"]], ids=["full", "lora", "nf4"])
def test_a_continued_run_ends_as_one_that_was_not_interrupted(method: list[str]) -> None:
    def run(name: str, *overrides: str) -> tuple[Path, Any]:
        asked = ["recipe=small", "data.sources=[tools.jsonl]", TOKENS, *method, f"output.name={name}", *overrides]
        assert main(asked) == 0
        final = Path("runs") / name / "final"
        return Path("runs") / name, load_file(next(final.glob("*model.safetensors")))

    name = f"whole-{len(method)}"
    whole, weights = run(name, "schedule.max_steps=4", "checkpoint.save_steps=2")
    checkpoint = whole / "checkpoints" / "checkpoint-2"
    _, continued = run(f"{name}-continued", "schedule.max_steps=4", f"checkpoint.resume={checkpoint}")
    assert weights.keys() == continued.keys() and all(torch.equal(weights[key], continued[key]) for key in weights)
    tokenizer = AutoTokenizer.from_pretrained(whole / "final")
    ids = tokenizer("<tool></tool>")["input_ids"]
    assert len(ids) == 2 and tokenizer.decode(ids, skip_special_tokens=True) == ""
    _, model, _ = load_trained(whole)
    assert model(torch.tensor([ids])).logits.shape[-1] == len(tokenizer)
    if method:
        again = ["model.adapter=" + str(whole / "final"), "schedule.max_steps=1"]
        with pytest.raises(RecipeError, match=r"model\.new_tokens"):
            load_checked("small", again)
        assert main(["recipe=small", "output.name=next", "checkpoint.resume=never", TOKENS, *method, *again]) == 0


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen", marks=pytest.mark.matrix)])
def test_an_adapter_with_whole_embeddings_is_continued_with_its_tokens(model: str) -> None:
    whole = [*LORA, "method.modules_to_save=[embed_tokens, lm_head]", "data.eval_split=0.2"]
    asked = ["recipe=small", "data.sources=[tools.jsonl]", f"model.path={model}"]
    assert main([*asked, TOKENS, *whole, f"output.name=embeddings-{model}"]) == 0
    start = f"model.adapter=runs/embeddings-{model}/final"
    with pytest.raises(RecipeError, match=r"has rows for \[<tool>, str, </tool>\]"):
        load_checked("small", [*asked[1:], start])
    assert main([*asked, TOKENS, start, "data.eval_split=0.2", f"output.name=again-{model}"]) == 0
    first, second = (
        [line["eval_loss"] for line in metrics(Path("runs") / f"{name}-{model}") if "eval_loss" in line]
        for name in ("embeddings", "again")
    )
    assert second[0] == pytest.approx(first[-1], abs=1e-6) and first[-1] < first[0]
