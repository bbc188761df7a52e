"""Models of images or sound, which Transformers has no class of for text alone: text is trained, the rest stays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import models_doc
import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file
from small import LORA, RECIPE
from tiny import chat_rows, tiny_kind
from transformers import AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from toolkit.cli.main import main as cli
from toolkit.models.tiny import shrink
from toolkit.train.main import main

KINDS = {
    **dict.fromkeys(("mistral3", "mllama", "paligemma", "qwen2_5_vl", "qwen3_vl"), AutoModelForImageTextToText),
    **dict.fromkeys(("qwen2_audio", "voxtral"), AutoModelForSeq2SeqLM),
}
"""With Transformers' class for what they were made for."""
WITH_TEMPLATE = '{"image_seq_length": 5, "chat_template": "{{ messages[0] }}"}'
PROCESSOR = '{"image_processor_type": "PixtralImageProcessor"}'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("of_images_or_sound")
    for kind in KINDS:
        tiny_kind(models_doc.stated(kind, "sft"), folder / kind)
        (folder / kind / "preprocessor_config.json").write_text(PROCESSOR, encoding="utf-8")
        (folder / kind / "processor_config.json").write_text(WITH_TEMPLATE, encoding="utf-8")
    write_jsonl(folder / "chat.jsonl", chat_rows(20))
    write_recipe(folder, "small", RECIPE)
    return folder


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, models: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(models)
    return str(request.param)


def of_no_text(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = ("vision", "visual", "projector", "audio_tower")
    return {name: each for name, each in weights.items() if any(part in name for part in parts)}


def test_text_is_trained_and_the_model_still_takes_what_it_did(kind: str) -> None:
    assert main(["recipe=small", f"model.path={kind}", f"output.name={kind}", "evaluation.num_prompts=1"]) == 0
    final = Path("runs", kind, "final")
    _, found = KINDS[kind].from_pretrained(final, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert (final / "preprocessor_config.json").read_text(encoding="utf-8") == PROCESSOR
    # The template that was trained with stands in a file of its own, before which a processor's would be taken.
    assert json.loads((final / "processor_config.json").read_text(encoding="utf-8")) == {"image_seq_length": 5}
    assert (final / "chat_template.jinja").is_file()
    assert f"{KINDS[kind].__name__}.from_pretrained" in (final / "README.md").read_text(encoding="utf-8")
    before, after = (load_file(folder / "model.safetensors") for folder in (Path(kind), final))
    assert before.keys() == after.keys() and of_no_text(before)
    for name, weight in before.items():
        assert torch.equal(after[name].float(), weight.float()) == (name in of_no_text(before)), name


def test_adapters_are_of_text_alone_and_are_merged(kind: str) -> None:
    assert main(["recipe=small", f"model.path={kind}", f"output.name={kind}-lora", "max_steps=4", *LORA]) == 0
    run = Path("runs", f"{kind}-lora")
    adapted = load_file(run / "final" / "adapter_model.safetensors")
    assert adapted and not of_no_text(adapted)
    assert cli(["merge", str(run)]) == 0
    proof = json.loads((run / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-5 < proof["effect"]
    assert (run / "merged" / "preprocessor_config.json").is_file()
    KINDS[kind].from_pretrained(run / "merged")


def test_all_parts_of_a_merged_models_config_name_the_type_of_its_files(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    asked = [
        "recipe=small",
        "model.path=qwen3_vl",
        "output.name=in-16-bits",
        "model.dtype=fp32",
        "precision=bf16",
        "max_steps=2",
        *LORA,
    ]
    assert main(asked) == 0 and cli(["merge", "runs/in-16-bits"]) == 0
    merged = Path("runs/in-16-bits/merged")
    config = json.loads((merged / "config.json").read_text(encoding="utf-8"))
    stated = [each.get("dtype") for each in (config, config["text_config"], config["vision_config"])]
    assert stated == ["bfloat16"] * 3
    assert {each.dtype for each in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_engines_train_them_as_one_process(kind: str, engine: str, ranks: Ranks) -> None:
    asked = [
        "recipe=small",
        f"model.path={kind}",
        "optimizer.name=sgd",
        "learning_rate=0.1",
        "batch.micro_batch_size=1",
    ]
    shutil.rmtree("runs/alone", ignore_errors=True)
    assert main([*asked, "output.name=alone"]) == 0
    done = ranks.run(
        Path.cwd(), *asked, f"output.name={kind}-{engine}", f"strategy.name={engine}", processes=2, entry=ON_CPU
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(Path("runs", f"{kind}-{engine}")) == pytest.approx(losses(Path("runs/alone")), rel=1e-5)


def test_positions_on_three_axes_are_narrowed_with_the_heads() -> None:
    """By which plans and checks make their small copies."""
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    text = {"model_type": "qwen2_5_vl_text", "hidden_size": 3584, "num_attention_heads": 28, "rope_parameters": rope}
    assert shrink({"text_config": text})["text_config"]["rope_parameters"]["mrope_section"] == [2, 3, 3]
