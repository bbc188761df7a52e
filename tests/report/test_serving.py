"""The lines that serve a trained model: on its base where vLLM can do that, merged elsewhere, by the run's template."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from example_run import example_run
from pages import Page

from toolkit.recipe import Recipe
from toolkit.report.run_page import write_report
from toolkit.report.serving import next_steps


def recipe_of(path: str = "org/base", **sections: Any) -> Recipe:
    model = {"path": path, **sections.pop("model", {})}
    return Recipe.model_validate({"model": model, "data": {"sources": ["org/chats"]}, **sections})


def lines(recipe: Recipe) -> dict[str, list[str]]:
    return {what: shlex.split(line) for what, line in next_steps(Path("runs/my run"), recipe)}


def test_an_adapter_is_served_on_its_base_by_the_template_it_was_trained_with() -> None:
    method = {"name": "lora", "r": 24, "rank_pattern": {"down_proj": 40}, "use_rslora": True}
    model = {"revision": "abc", "chat_template": "own.jinja", "trust_remote_code": True}
    found = lines(recipe_of(method=method, model=model))
    assert found["talk with it"] == ["toolkit", "chat", "runs/my run"]
    assert found["merge it"] == ["toolkit", "merge", "runs/my run"]
    assert " ".join(found["serve it with vLLM"]) == (
        "vllm serve org/base --revision abc --enable-lora --max-lora-rank 64 --lora-modules my run=runs/my run/final "
        "--chat-template runs/my run/final/chat_template.jinja --trust-remote-code"
    )
    merged = "transformers serve runs/my run/merged --trust-remote-code"
    assert " ".join(found["or with Transformers, once it is merged"]) == merged


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"use_dora": True}},
        {"method": {"modules_to_save": ["lm_head"]}},
        {"method": {"target_parameters": ["experts.down_proj"]}},
        {"method": {"quantization": "nf4"}, "precision": "bf16"},
        {"method": {"r": 300, "init_lora_weights": "pissa"}},
        {"model": {"new_tokens": ["<a>"]}},
        {"path": "builtin:smollm2-135m-instruct"},
        {"path": "base.Q4_1.gguf"},
    ],
)
def test_what_vllm_cannot_put_on_a_base_is_merged_first(sections: dict[str, Any]) -> None:
    method = {"name": "lora", **sections.pop("method", {})}
    found = lines(recipe_of(**sections, method=method))
    assert found["serve it with vLLM, once it is merged"][:3] == ["vllm", "serve", "runs/my run/merged"]
    assert "--enable-lora" not in found["serve it with vLLM, once it is merged"]


def test_the_adapter_that_took_a_part_of_the_base_has_twice_the_rank() -> None:
    found = lines(recipe_of(method={"name": "lora", "r": 64, "init_lora_weights": "olora"}))
    line = found["serve it with vLLM"]
    assert line[line.index("--max-lora-rank") + 1] == "128"


def test_a_full_model_is_served_with_the_variables_of_its_template() -> None:
    data = {"sources": ["org/chats"], "chat_template_kwargs": {"enable_thinking": False}, "eval_split": 0.1}
    found = lines(Recipe.model_validate({"model": {"path": "org/base"}, "data": data}))
    assert found["score it"] == ["toolkit", "evaluate", "runs/my run"] and "merge it" not in found
    kwargs = '{"enable_thinking": false}'
    assert found["serve it with vLLM"][2:] == [
        *("runs/my run/final", "--served-model-name", "my run", "--default-chat-template-kwargs", kwargs)
    ]
    assert found["or with Transformers"][2:] == ["runs/my run/final", "--chat-template-kwargs", kwargs]


def test_an_encoder_decoder_is_only_talked_with() -> None:
    assert list(lines(recipe_of(objective="seq2seq"))) == ["talk with it"]


def test_the_report_has_them_where_there_is_a_model(tmp_path: Path) -> None:
    run = example_run(tmp_path / "demo")
    assert "toolkit chat" not in Page(write_report(run).read_text(encoding="utf-8")).text
    (run / "final").mkdir()
    assert "toolkit chat" not in Page(write_report(run).read_text(encoding="utf-8")).text, "its recipe cannot be read"
    (run / "recipe.yaml").write_text("model: {path: org/base}\ndata: {sources: [a.jsonl]}\nmethod: {name: lora}\n")
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert f"toolkit chat {run}" in text and "vllm serve org/base --enable-lora" in text
