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
from toolkit.report.serving import next_steps, serving


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
    other = lines(recipe_of(method=method, model={"tokenizer": "org/chat"}))["serve it with vLLM"]
    assert other[-2:] == ["--tokenizer", "runs/my run/final"], "whose tokens the base's own may not have"
    merged = "transformers serve runs/my run/merged --trust-remote-code"
    assert " ".join(found["or with Transformers, once it is merged"]) == merged


@pytest.mark.parametrize(
    "sections",
    [
        {"method": {"use_dora": True}},
        {"extra": {"lora": {"bias": "all"}}},
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


HEADS = {
    "classification": ["--convert", "classify"],
    "token_classification": ["--convert", "classify"],
    "reward": ["--convert", "classify", "--pooler-config", '{"use_activation": false}'],
    "embedding": ["--convert", "embed"],
}


@pytest.mark.parametrize("objective", HEADS)
def test_heads_and_vectors_are_pooled_by_vllm_and_asked_by_a_line(objective: str) -> None:
    found = lines(recipe_of("Qwen/Qwen3-8B", objective=objective))
    by = "sentence-transformers" if objective == "embedding" else "Transformers"
    assert list(found) == ["serve it with vLLM", f"or with {by}"]
    start = ["vllm", "serve", "runs/my run/final", "--served-model-name", "my run", "--runner", "pooling"]
    assert found["serve it with vLLM"] == [*start, *HEADS[objective]]
    program, option, code = found[f"or with {by}"]
    assert (program, option) == ("python", "-c") and '"runs/my run/final"' in code
    compile(code, "line", "exec")
    merged = lines(recipe_of("Qwen/Qwen3-8B", objective=objective, method={"name": "lora"}))
    assert list(merged) == ["merge it", "serve it with vLLM, once it is merged", f"or with {by}, once it is merged"]
    assert merged["serve it with vLLM, once it is merged"][2] == "runs/my run/merged"


def test_a_line_renders_conversations_as_the_rows_were(tmp_path: Path) -> None:
    run = example_run(tmp_path / "demo")
    data = {"sources": ["org/pairs"], "chat_template_kwargs": {"enable_thinking": False}}
    recipe = Recipe.model_validate({"model": {"path": "org/base"}, "data": data, "objective": "reward"})
    served, asked = (shlex.split(line) for _, line in serving(run, recipe, run / "final", "demo"))
    assert served[-2:] == ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    assert 'function_to_apply="none"' in asked[2] and "add_special_tokens=False" in asked[2]
    assert '{"role": "assistant"' in asked[2] and "tokenize=False, enable_thinking=False" in asked[2]
    compile(asked[2], "line", "exec")


def test_vllm_has_no_line_where_it_would_read_another_head_or_format(tmp_path: Path) -> None:
    words = {"objective": "token_classification"}
    for kind, known in (("distilbert", False), ("modernbert", True), ("qwen3", True)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        assert ("serve it with vLLM" in lines(recipe_of(str(tmp_path / kind), **words))) == known
    assert list(lines(recipe_of("org/unknown", **words))) == ["use it with Transformers"]
    recipe, folder = recipe_of(), Path("runs/x/form")
    assert serving(Path("runs/x"), recipe, folder, "x", "int4")[0][0] == "serve it with vLLM"
    assert [what for what, _ in serving(Path("runs/x"), recipe, folder, "x", "nf4")] == ["use it with Transformers"]
    assert serving(Path("runs/x"), recipe, folder, "x", "gguf_q8_0") == []
