"""The model card: its snippet runs, its figures are those of the run, and nothing of the machine is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_run import AUDIT, MANIFEST
from harness import write_jsonl
from pages import step_line
from snippets import run_snippet
from tiny import tiny_gguf, tiny_model

from toolkit.recipe import Recipe
from toolkit.report.card import write_card

LLAMA, BLENDERBOT = "HuggingFaceTB/SmolLM2-135M-Instruct", "facebook/blenderbot-400M-distill"


def make_recipe(path: str = LLAMA, sources: list[Any] | None = None, **sections: Any) -> Recipe:
    data = {"sources": sources or ["org/chats"]}
    return Recipe.model_validate({"model": {"path": path}, "data": data} | sections)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    rows = [
        {"step": 0, "eval_loss": 3.96},
        step_line(40, epoch=0.5, loss=2.8, tokens=34_800, seconds=120.0, step_seconds=2.0),
        {"step": 40, "eval_loss": 2.74},
    ]
    write_jsonl(run / "metrics.jsonl", rows)
    manifest = {
        "name": "demo",
        "command": f"python {tmp_path}/toolkit/run.py hub_token=hf_secret",
        "versions": {"torch": "2.13.0"},
        "parameters": {"total": 139_400_000, "trainable": 4_884_480},
        "batch": MANIFEST["batch"],
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "samples.json").write_text(
        json.dumps([{"prompt": "a private row", "input_ids": [], "before": "", "after": ""}])
    )
    return run


def metadata(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_full_model_loads_and_chats_as_the_card_says(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(LLAMA, run / "final")
    card = write_card(run / "final", run, make_recipe(), LLAMA).read_text()
    assert "apply_chat_template" in card
    variables = run_snippet(card, run / "final", monkeypatch)
    assert len(variables["output"]) > variables["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out


# PEFT 0.21 reads the old name of a property that transformers has renamed.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_loads_as_the_card_says(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    base = tiny_model(LLAMA, tmp_path / "base")
    # On CPUs with AVX-512 for bf16, bitsandbytes takes rows of whole blocks of 64 only.
    sizes = {"hidden_size": 192, "intermediate_size": 192, "head_dim": 64}
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base, **sizes)).save_pretrained(base)
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(run / "final")
    AutoTokenizer.from_pretrained(base).save_pretrained(run / "final")
    (run / "audit.json").write_text(json.dumps(AUDIT | {"chat_template": {"source": "none", "needed": False}}))
    recipe = make_recipe(str(base), method={"name": "lora"})
    card = write_card(run / "final", run, recipe, str(base)).read_text()
    assert "Once upon a time" in card, "completions were trained, so no chat template"
    assert isinstance(run_snippet(card, run / "final", monkeypatch)["model"], PeftModel)
    assert "On 64 held-out rows" in card
    other = recipe.with_values({"model.tokenizer": str(base)})
    card = write_card(run / "final", run, other, str(base)).read_text()
    assert "eos_token_id=tokenizer.eos_token_id" in card, "the base model's answers may end otherwise"
    run_snippet(card, run / "final", monkeypatch)
    loftq = {"name": "lora", "quantization": "nf4", "init_lora_weights": "loftq"}
    card = write_card(run / "final", run, make_recipe(str(base), method=loftq), str(base)).read_text()
    variables = run_snippet(card, run / "final", monkeypatch)
    assert "belongs on the base in nf4" in card and variables["model"].config.quantization_config.load_in_4bit


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("inside", [False, True], ids=["the file", "its folder"])
def test_an_adapter_of_a_gguf_file_loads_as_the_card_says(
    inside: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(LLAMA, tmp_path / "base")
    file = tiny_gguf(folder, tmp_path / "tiny.gguf")
    named, stated = (str(tmp_path), {"gguf_file": file.name}) if inside else (str(file), {})
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = named
    adapted.save_pretrained(run / "final")
    AutoTokenizer.from_pretrained(folder).save_pretrained(run / "final")
    recipe = make_recipe(method={"name": "lora"}, model={"path": named, **stated})
    card = write_card(run / "final", run, recipe, named).read_text()
    assert isinstance(run_snippet(card, run / "final", monkeypatch)["model"], PeftModel)


def test_an_encoder_decoder_loads_as_the_card_says(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(BLENDERBOT, run / "final")
    card = write_card(run / "final", run, make_recipe(BLENDERBOT, objective="seq2seq"), BLENDERBOT).read_text()
    assert "AutoModelForSeq2SeqLM" in card
    run_snippet(card, run / "final", monkeypatch)


def test_the_metadata_is_what_the_hub_reads(run: Path) -> None:
    sources = ["org/chats", {"path": "org/more", "weight": 2.0}, "rows/train.jsonl", "builtin:stdlib-docstrings"]
    recipe = make_recipe(sources=sources, method={"name": "lora", "quantization": "nf4"})
    head = metadata(write_card(run / "final", run, recipe, LLAMA).read_text())
    (results,) = head.pop("model-index")
    assert results["name"] == "demo"
    assert results["results"][0]["metrics"] == [
        {"type": "loss", "value": 2.74},
        {"type": "perplexity", "value": 15.487},
    ]
    assert head == {
        "base_model": LLAMA,
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["qlora", "sft"],
        "datasets": ["org/chats", "org/more"],
    }


def test_the_hub_library_accepts_the_card(run: Path) -> None:
    from huggingface_hub import ModelCard

    path = write_card(run / "final", run, make_recipe(), LLAMA)
    data = ModelCard.load(path).data
    assert (data.base_model, data.library_name) == (LLAMA, "transformers")
    assert [(result.metric_type, result.dataset_type) for result in data.eval_results] == [
        ("loss", "org/chats"),
        ("perplexity", "org/chats"),
    ]


def test_results_and_settings_are_those_of_the_run(run: Path) -> None:
    recipe = make_recipe(method={"name": "lora", "r": 8}, optimizer={"learning_rate": 1e-3})
    card = write_card(run / "final", run, recipe, LLAMA).read_text()
    for row in (
        "|  | step 0 | step 40 | change |",
        "| loss | 3.9600 | 2.7400 | \N{MINUS SIGN}30.8% |",
        "| perplexity | 52.46 | 15.49 |  |",
        "| rank, alpha, dropout | 8, 32, 0 |",
        "| learning rate | 0.001, cosine schedule |",
        "| trained parameters | 4.88M of 139M |",
        "| global batch size | 8 sequences |",
        "| steps | 40 (0.5 epochs) |",
        "| speed | 400 tokens a second, 160 of them trained: 310 GFLOP/s, 23.0% of the dense peak |",
        "| time of a step | Half of the steps took at most 2.00 s, 90% at most 2.00 s, 99% at most 2.00 s |",
        "torch 2.13.0",
    ):
        assert row in card


def test_nothing_of_the_machine_or_of_the_data_is_published(run: Path, tmp_path: Path) -> None:
    base, rows = tmp_path / "secret" / "base-model", tmp_path / "secret" / "rows.jsonl"
    base.mkdir(parents=True)
    rows.touch()
    recipe = make_recipe(str(base), [str(rows)], method={"name": "lora"})
    card = write_card(run / "final", run, recipe, str(base)).read_text()
    assert "`base-model`" in card and "`rows.jsonl`" in card
    for private in (str(tmp_path), "secret", "hf_", "a private row", str(Path.home())):
        assert private not in card
    assert not {"base_model", "datasets", "license"} & metadata(card).keys()


def test_a_gguf_base_is_loaded_from_its_file(run: Path) -> None:
    recipe = make_recipe("/models/tiny.Q4_1.gguf", method={"name": "lora"})
    card = write_card(run / "final", run, recipe, "/models/tiny.Q4_1.gguf").read_text()
    assert "from_pretrained(base, gguf_file='tiny.Q4_1.gguf')" in card
    assert "/models" not in card


@pytest.mark.parametrize(
    ("path", "objective", "said"),
    [
        ("/models/base", "sft", "The base model was a local one: set `base` to where you keep it."),
        ("/models/base", "embedding", "set `base_model_name_or_path` in `adapter_config.json` to where you keep it"),
        ("builtin:smollm2-135m-instruct", "sft", f"built-in model, which is `{LLAMA}` in 4 bits"),
        (LLAMA, "sft", None),
    ],
)
def test_an_adapter_of_a_base_that_is_not_on_the_hub_says_where_to_name_it(
    run: Path, path: str, objective: str, said: str | None
) -> None:
    recipe = make_recipe(path, method={"name": "lora"}, objective=objective)
    use = write_card(run / "final", run, recipe, path).read_text().split("## Use\n\n")[1]
    told = " ".join(use.split("```")[0].split())
    assert said in told if said else not told
    assert said is None or "`base`" not in told or "base = " in use, "the code has no such variable"


@pytest.mark.parametrize(
    ("revision", "method", "told"), [("abc", "lora", True), (None, "lora", False), ("abc", "full", False)]
)
def test_vectors_of_an_adapter_on_a_pinned_base_take_a_merge(
    run: Path, revision: str | None, method: str, told: bool
) -> None:
    """sentence-transformers loads the base of an adapter in its newest version."""
    recipe = make_recipe(method={"name": method}, objective="embedding").with_values({"model.revision": revision})
    use = write_card(run / "final", run, recipe, LLAMA).read_text(encoding="utf-8").split("## Use\n\n")[1]
    said = " ".join(use.split("```")[0].split())
    assert ("revision `abc`" in said and "toolkit merge" in said) == told


def test_a_run_without_anything_measured_still_gets_a_card(tmp_path: Path) -> None:
    card = write_card(tmp_path, tmp_path, make_recipe(), LLAMA).read_text()
    assert "## Results" not in card
    assert "full fine-tuning" in card


@pytest.mark.parametrize(
    ("path", "method", "lines"),
    [
        (LLAMA, {}, ["vllm serve . --served-model-name demo", "transformers serve ."]),
        (LLAMA, {"name": "lora"}, [f"vllm serve {LLAMA} --enable-lora --max-lora-rank 16 --lora-modules demo=."]),
        (LLAMA, {"name": "lora", "use_dora": True}, []),
        ("/home/me/base", {"name": "lora"}, []),
    ],
)
def test_the_lines_that_serve_it_need_only_what_is_published(
    run: Path, path: str, method: dict[str, Any], lines: list[str]
) -> None:
    card = write_card(run / "final", run, make_recipe(path, method=method), path).read_text(encoding="utf-8")
    shown = re.search(r"```sh\n(.*?)```", card, flags=re.DOTALL)
    assert (shown[1].splitlines() if shown else []) == lines
