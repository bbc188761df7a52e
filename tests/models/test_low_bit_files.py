"""Models whose files hold few bits are trained, divided, saved and merged as those in full, on every engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import models_doc
import pytest
import torch
from harness import losses, write_jsonl, write_recipe
from ranks import ON_CPU, Ranks
from safetensors.torch import load_file, save_file
from small import LORA, RECIPE
from tiny import chat_rows, tiny_kind
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from toolkit.cli.main import main as cli
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.models.low_bit_files import restoring
from toolkit.models.quantization import packed_int4
from toolkit.recipe.rules import load_checked
from toolkit.train.main import main

BLOCK = 24
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FORMS = {"llama": "fp8", "qwen3_moe": "fp8", "gpt_oss": "mxfp4", "qwen2": "compressed-tensors"}
"""The form that each kind's model is published in: in files of `qwen3_moe` experts are apart, in the model they are
fused."""


def in_fp8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Blocks with a scale each, of which the last ones are cut off."""
    rows, columns = weight.shape
    down, across = (-(-size // BLOCK) for size in weight.shape)
    whole = torch.zeros(down * BLOCK, across * BLOCK)
    whole[:rows, :columns] = weight
    blocks = whole.view(down, BLOCK, across, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    restored = (codes.float() * scales[:, None, :, None]).view_as(whole)
    return {"": codes.view(whole.shape)[:rows, :columns], "_scale_inv": scales}, restored[:rows, :columns]


def in_mxfp4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(experts, in, out): 32 inputs of an output share an exponent, two codes of 4 bits share a byte."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    grid = torch.cat([FP4, -FP4])
    codes = (groups / exponents.exp2()[..., None])[..., None].sub(grid).abs().argmin(-1)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    restored = (grid[codes] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    return {"_blocks": packed, "_scales": (exponents + 127).to(torch.uint8)}, restored


def publish(kind: str, folder: Path) -> None:
    """Writes a tiny model in few bits, `few`, and the same in full, `full`."""
    whole = tiny_kind(models_doc.stated(kind, "sft"), folder / "full")
    few = Path(shutil.copytree(whole, folder / "few"))
    if FORMS[kind] == "compressed-tensors":
        model = AutoModelForCausalLM.from_pretrained(few, dtype=torch.float32)
        packed_int4.pack(model, [])
        packed_int4.save(model, few)
        restored = AutoModelForCausalLM.from_pretrained(few, dtype=torch.float32)
        weights = {name: weight.contiguous() for name, weight in restored.named_parameters()}
        save_file(weights, whole / "model.safetensors", {"format": "pt"})
        written = json.loads((few / "config.json").read_text(encoding="utf-8"))
        assert written["quantization_config"].pop("dequantize")
        (few / "config.json").write_text(json.dumps(written), encoding="utf-8")
        return
    stored, full = {}, {}
    for name, weight in load_file(whole / "model.safetensors").items():
        full[name] = weight = weight.bfloat16()
        stored[name] = weight
        if FORMS[kind] == "fp8" and "_proj.weight" in name:
            parts, full[name] = in_fp8(weight)
        elif FORMS[kind] == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            parts, full[name] = in_mxfp4(weight)
        else:
            continue
        del stored[name]
        stored |= {name + ending: part.contiguous() for ending, part in parts.items()}
    assert len(stored) > len(full)
    save_file(
        {name: weight.contiguous() for name, weight in full.items()}, whole / "model.safetensors", {"format": "pt"}
    )
    save_file(stored, few / "model.safetensors", {"format": "pt"})
    config = json.loads((few / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = FP8 if FORMS[kind] == "fp8" else MXFP4
    (few / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(("rows", "columns"), [(100, 48), (40, 50), (20, 60), (48, 24)])
def test_blocks_of_fp8_may_be_cut_off_at_the_end(rows: int, columns: int) -> None:
    """As in files of DeepSeek-V3, whose shapes are no multiples of its blocks."""
    scales = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    each = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    with restoring(FP8):
        found = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert torch.equal(found, codes.float() * each)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    for kind in FORMS:
        publish(kind, folder / kind)
        write_jsonl(folder / kind / "chat.jsonl", chat_rows(20))
        write_recipe(folder / kind, "small", RECIPE)
    return {kind: folder / kind for kind in FORMS}


@pytest.fixture(params=FORMS)
def kind(request: pytest.FixtureRequest, published: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of them; its folder is the current one."""
    monkeypatch.chdir(published[request.param])
    return str(request.param)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_is_read_in_the_dtype_that_is_asked_for_and_saved_in_full(
    kind: str, precision: str, tmp_path: Path
) -> None:
    def read(path: str) -> torch.nn.Module:
        recipe = load_checked("small", [f"model.path={path}", f"precision={precision}", *LORA]).recipe
        model = ModelSource.open(recipe).load(dtypes(recipe), "eager")
        model.save_pretrained(tmp_path / path)
        return model

    model, full = read("few"), dict(read("full").named_parameters())
    asked = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == full[name].dtype == asked, name
        torch.testing.assert_close(parameter, full.pop(name), msg=name)
    assert not full
    saved = [load_file(tmp_path / path / "model.safetensors") for path in ("few", "full")]
    assert saved[0].keys() == saved[1].keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=asked)
    assert not hasattr(again.config, "quantization_config")
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_in_few_bits_trains_as_the_same_in_full(kind: str, method: str) -> None:
    asked = [f"method.name={method}", "optimizer.name=sgd", "optimizer.learning_rate=0.1"]
    for path in ("few", "full"):
        assert main(["recipe=small", f"model.path={path}", f"output.name={path}-{method}", *asked]) == 0
    runs = [Path("runs", f"{path}-{method}") for path in ("few", "full")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-6)
    file = "final/model.safetensors" if method == "full" else "final/adapter_model.safetensors"
    trained, expected = (load_file(run / file) for run in runs)
    assert trained.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(trained[name], weight, msg=name)
    if method == "lora":
        assert cli(["merge", str(runs[0])]) == 0
        proof = json.loads((runs[0] / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
        assert proof["distance"] < 1e-5


DIVIDED = {
    "zero3": ["strategy.name=zero3", "strategy.param_persistence_threshold=0"],
    "fsdp": ["strategy.name=fsdp"],
    "pipeline": ["parallel.pipeline=2"],
    "tensor": ["parallel.tensor=2"],
}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, engine) for kind in FORMS for engine in DIVIDED if engine != "tensor"), ("llama", "tensor")],
    indirect=["kind"],
)
def test_engines_divide_what_is_restored(kind: str, engine: str, ranks: Ranks) -> None:
    asked = ["optimizer.name=sgd", "optimizer.learning_rate=0.1", "batch.micro_batch_size=1"]
    assert main(["recipe=small", "model.path=full", f"output.name=alone-{engine}", *asked]) == 0
    launched = ["recipe=small", "model.path=few", f"output.name={engine}", *DIVIDED[engine], *asked]
    entry = ON_CPU if engine in ("zero3", "fsdp") else "toolkit.run"
    done = ranks.run(Path.cwd(), *launched, processes=2, entry=entry)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(Path("runs", engine)) == pytest.approx(losses(Path("runs", f"alone-{engine}")), rel=1e-5)
    trained, expected = (
        load_file(Path("runs", name, "final", "model.safetensors")) for name in (engine, f"alone-{engine}")
    )
    assert trained.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("form", ["nf4", "int4", "fp8", "int8"])
def test_what_is_restored_can_be_stored_in_other_few_bits(kind: str, form: str) -> None:
    if form == "int8" and kind in ("gpt_oss", "qwen3_moe"):
        pytest.skip("bitsandbytes has no int8 for fused experts, which a rule says")
    asked = [*LORA, f"method.quantization={form}", "precision=bf16"]
    recipes = [load_checked("small", [f"model.path={path}", *asked]).recipe for path in ("few", "full")]
    sources = [ModelSource.open(recipe) for recipe in recipes]
    models = [source.load(dtypes(recipes[0]), "eager") for source in sources]
    stored, expected = (dict(model.named_parameters()) for model in models)
    assert stored.keys() == expected.keys()
    assert len({each.dtype for each in stored.values()}) == 2
    for name, weight in expected.items():
        assert stored[name].dtype == weight.dtype and torch.equal(stored[name].data, weight.data), name


@pytest.mark.parametrize("form", ["nf4", "fp8"])
def test_adapters_on_what_was_stored_again_are_merged(kind: str, form: str) -> None:
    asked = [*LORA, f"method.quantization={form}", "precision=bf16", "model.path=few", "max_steps=4"]
    assert main(["recipe=small", f"output.name={form}", *asked]) == 0
    assert cli(["merge", f"runs/{form}"]) == 0
    proof = json.loads(Path("runs", form, "merged", "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-4 < proof["effect"]


@pytest.mark.parametrize("kind", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_engines_divide_what_is_restored_and_stored_again(kind: str, engine: str, ranks: Ranks) -> None:
    asked = [*LORA, "method.quantization=nf4", "precision=bf16", "batch.micro_batch_size=1", "optimizer.name=sgd"]
    assert main(["recipe=small", "model.path=full", f"output.name=nf4-alone-{engine}", *asked]) == 0
    launched = ["recipe=small", "model.path=few", f"output.name=nf4-{engine}", *DIVIDED[engine], *asked]
    done = ranks.run(Path.cwd(), *launched, processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(Path("runs", f"nf4-{engine}")) == pytest.approx(losses(Path("runs", f"nf4-alone-{engine}")), rel=2e-3)
