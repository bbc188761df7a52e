"""What a recipe names in a model is there, or `validate` says so without loading anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.recipe.model_configs import bundled
from toolkit.recipe.module_names import tensor_files
from toolkit.recipe.rules import check
from toolkit.recipe.schema import Recipe

LLAMA = "meta-llama/Llama-3.1-8B"
STORED = [
    "model.embed_tokens.weight", "model.layers.0.attn.wq.weight", "model.layers.1.attn.wq.weight", "model.norm.weight"
]  # fmt: skip


def problems(path: str, **method: object) -> list[str]:
    sections = {"model": {"path": path}, "data": {"sources": ["a"]}, "method": method}
    return [f"{each.path}: {each.what}; {each.hint}" for each in check(Recipe.model_validate(sections))]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            {"target_modules": ["q_prj", "v_proj"]},
            "target_modules: this model has no module 'q_prj'; did you mean",
        ),
        ({"target_modules": ["layers.31.self_attn.q_proj"], "modules_to_save": ["lm_head"]}, ""),
        ({"target_modules": ["layers.32.self_attn.q_proj"]}, "no module 'layers.32.self_attn.q_proj'"),
        ({"modules_to_save": ["embed_in"]}, "modules_to_save: this model has no module 'embed_in'"),
        (
            {"target_modules": ["q_proj", "mlp"]},
            "'mlp' is no layer that an adapter can be added to; modules with weights: down_proj",
        ),
        ({"rank_pattern": {"q_proj": 8, r"layers\.3\..*": 4}}, ""),
        ({"rank_pattern": {"gate_up": 8}}, "rank_pattern: 'gate_up' matches nothing"),
        ({"alpha_pattern": {"c_attn": 8}}, "alpha_pattern: 'c_attn' matches nothing"),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            "target_parameters: 'mlp.experts.down_proj' matches",
        ),
        ({"freeze": ["model.embed_tokens*", "model.layers.[0-9].*"]}, ""),
        ({"freeze": ["model.layer.0.*"]}, "freeze: no parameter of this model matches 'model.layer.0.*'; did"),
    ],
)
def test_names_that_match_nothing_are_refused(method: dict[str, object], expected: str) -> None:
    found = problems(LLAMA, name="full" if "freeze" in method else "lora", **method)
    assert expected in found[0] if expected else not found, found


def test_experts_are_adapted_by_their_parameters() -> None:
    mixture = problems("Qwen/Qwen3-30B-A3B", name="lora", target_modules=["q_proj", "experts"])
    assert "added to; for experts set method.target_parameters=[experts.down_proj, experts.gate_up_proj]" in mixture[0]
    renamed = problems("Qwen/Qwen3-30B-A3B", name="lora", target_modules=["gate_proj"])
    assert "no module 'gate_proj'" in renamed[0] and "set method.target_parameters=[experts.down_proj" in renamed[0]
    assert not problems("Qwen/Qwen3-30B-A3B", name="lora", modules_to_save=["mlp"])


@pytest.mark.parametrize("indexed", [True, False])
def test_a_folder_of_safetensors_is_read_without_torch(tmp_path: Path, indexed: bool) -> None:
    saved(tmp_path, STORED, indexed)
    assert not problems(str(tmp_path), name="lora", target_modules=["wq"], modules_to_save=["lm_head"])
    assert "no module 'wk'" in problems(str(tmp_path), name="lora", target_modules=["wk"])[0]
    code = "import sys; from toolkit.recipe import module_names, rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (STORED, {"num_local_experts": 8}),
        (STORED, {"text_config": {"model_type": "llama"}}),
        (STORED, {"quantization_config": {}}),
        (["h.0.attn.c_attn.weight"], {}),
        ([], {}),
    ],
)
def test_nothing_is_said_of_what_transformers_may_rename(
    tmp_path: Path, names: list[str], config: dict[str, object]
) -> None:
    saved(tmp_path, names, False, **config)
    assert not problems(str(tmp_path), name="lora", target_modules=["anything"])


def test_what_to_name_instead_is_said() -> None:
    def hint(**method: object) -> str:
        (problem,) = problems(LLAMA, name="full" if "freeze" in method else "lora", **method)
        return problem.partition("; ")[2]

    modules = "modules with weights: down_proj, embed_tokens, gate_proj, input_layernorm, k_proj, lm_head, norm, o_proj"
    assert hint(target_modules=["zzz"]).startswith(modules)
    assert hint(target_modules=["q_prj"]).startswith(f"did you mean 'q_proj'? {modules}")
    assert hint(freeze=["model.layer.0.*"]).startswith("did you mean 'layers'? parameters are named like model.embed")
    assert hint(freeze=["zzz"]).startswith("parameters are named like model.embed_tokens.weight, model.layers.")
    assert hint(rank_pattern={"q_prj": 4}) == "did you mean 'q_proj'? "
    assert hint(rank_pattern={"zzz": 4}).startswith("names are like model.layers.")
    # What PEFT cannot read as a pattern it says itself.
    assert not problems(LLAMA, name="lora", rank_pattern={"(": 8})


def test_files_that_hold_no_names_are_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in (
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b"["),
        ("model.safetensors", b"short"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    ):
        (tmp_path / name).write_bytes(content)
        assert not problems(str(tmp_path), name="lora", target_modules=["anything"]), name
        (tmp_path / name).unlink()
    saved(tmp_path, ["transformer.h.0.attn.c_attn.weight"], True)
    assert not problems(str(tmp_path), name="lora", target_modules=["c_attn"], modules_to_save=["lm_head"])
    assert problems(str(tmp_path), name="lora", target_modules=["c_attm"])


@pytest.mark.parametrize("sharded", [True, False])
def test_other_forms_of_the_weights_beside_a_model_are_not_read(tmp_path: Path, sharded: bool) -> None:
    """As Mistral's repositories hold them twice, and others an export in 8 bits."""

    def write(name: str, tensor: str, dtype: str) -> Path:
        head = json.dumps({tensor: {"dtype": dtype, "shape": [1], "data_offsets": [0, 0]}}).encode()
        (tmp_path / name).write_bytes(len(head).to_bytes(8, "little") + head)
        return tmp_path / name

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    first, second = ("model-1-of-2.safetensors", "model-2-of-2.safetensors") if sharded else ("model.safetensors", "")
    files = [write(each, "model.layers.0.attn.wq.weight", "BF16") for each in (first, second) if each]
    if sharded:
        index = {f"model.layers.{n}.attn.wq.weight": file.name for n, file in enumerate(files)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    write("consolidated.safetensors", "layers.0.attention.wk.weight", "BF16")
    write("model_int8.safetensors", "model.layers.0.attn.wq.weight", "I8")
    assert tensor_files(tmp_path) == files
    assert not problems(str(tmp_path), name="lora", target_modules=["wq"])
    assert "no module 'wk'" in problems(str(tmp_path), name="lora", target_modules=["wk"])[0]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert tensor_files(tmp_path) == ([] if sharded else files)


def test_every_bundled_model_lists_its_names() -> None:
    assert all(each.names for each in bundled().values())


def saved(folder: Path, names: list[str], indexed: bool, **config: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if indexed:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, "a")}))
    else:
        head = json.dumps({"__metadata__": {}, **{name: {} for name in names}}).encode()
        (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)


@pytest.mark.parametrize("excluded", [["q_prj"], ["q_prj", "v_proj"]])
def test_modules_to_leave_out_that_match_nothing_are_refused(excluded: list[str]) -> None:
    """PEFT takes a list of which one does."""
    values = {"model": {"path": LLAMA}, "data": {"sources": ["a"]}, "method": {"name": "lora"}}
    recipe = Recipe.model_validate(values | {"extra": {"lora": {"exclude_modules": excluded}}})
    found = [f"{each.path}: {each.what}; {each.hint}" for each in check(recipe)]
    said = "extra.lora.exclude_modules: 'q_prj' matches nothing in this model; did you mean 'q_proj'?"
    assert [said in each for each in found] == [True] * (len(excluded) == 1)
