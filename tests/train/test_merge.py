"""Merging with proof, layer by layer: what the files say, what it takes, and what is refused."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models_doc
import psutil
import pytest
import torch
from harness import environment
from safetensors.torch import load_file
from small import FP8, INT4, INT8, LORA, NF4, SEQ2SEQ, logits_of, place_with, trained
from tiny import tiny_gguf, tiny_kind
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.common import UserError
from toolkit.data.prepare import prepare
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.rules import load_checked
from toolkit.train.finished.export import load_trained
from toolkit.train.finished.merge import check_reading, merge, place_for, proof_rows
from toolkit.train.run_folder import RunFolder

place = place_with("llama", "moe", "gemma", "gpt2", "blenderbot", "qwen")


MERGES = {
    "lora": LORA,
    "lora-bf16": [*LORA, "precision=bf16"],
    "rslora": [*LORA, "method.use_rslora=true", "model.new_tokens=[str, list]"],
    "dora": [*LORA, "method.use_dora=true"],
    "tied-embeddings": [*LORA, "method.modules_to_save=[embed_tokens, lm_head]"],
    "untied-head": [*LORA, "method.modules_to_save=[lm_head]", "model.path=qwen"],
    "norms": [*LORA, "method.modules_to_save=[input_layernorm]"],
    "nf4": [*NF4, "model.path=moe", "model.new_tokens=[str]"],
    "nf4-dora": [*NF4, "method.use_dora=true"],
    "int8": INT8,
    "fp8": [*FP8, "model.path=moe", "model.new_tokens=[str]"],
    "seq2seq-fp8": [*FP8, *SEQ2SEQ],
    "int4": [*INT4, "model.path=moe", "model.new_tokens=[str]"],
    "gpt2": [*LORA, "model.path=gpt2"],
    "moe": [*LORA, "model.path=moe"],
    "gemma": [*LORA, "model.path=gemma"],
    "seq2seq": [*LORA, *SEQ2SEQ],
    "seq2seq-nf4": [*NF4, *SEQ2SEQ],
}
QUICK = ("lora-bf16", "tied-embeddings", "untied-head", "nf4", "nf4-dora", "moe", "seq2seq-nf4")
"""Those that `make test` trains; what each kind's weights become is compared in `tests/models/test_blockwise.py`."""


@pytest.mark.parametrize(("kind", "keys"), [("granite_swa", LORA), ("llama4_text", NF4)])
def test_layers_without_weights_and_experts_in_another_layout_are_merged(
    kind: str, keys: list[str], tmp_path: Path
) -> None:
    model = tiny_kind(models_doc.stated(kind, "sft"), tmp_path / kind)
    run = trained(f"merged-{kind}", *keys, f"model.path={model}", "optimizer.learning_rate=1e-2")
    assert cli(["merge", str(run)]) == 0
    proof = json.loads((run / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-4 < proof["effect"]


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.matrix) for kind in MERGES]
)
def test_merged_files_say_what_the_adapter_says(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    run = trained(kind, *MERGES[kind])
    assert cli(["merge", str(run)]) == 0
    assert not [each for each in recwarn if "_pattern" in str(each.message)], "patterns of experts do match"
    proof = json.loads((run / "merged" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-5 < 1e-2 < proof["effect"]
    assert proof["distance_read_back"] < 1e-6
    source, adapted, _ = load_trained(run)
    recipe = source.recipe
    bf16 = "precision=bf16" in MERGES[kind]
    auto = AutoModelForSeq2SeqLM if recipe.objective == "seq2seq" else AutoModelForCausalLM
    merged = auto.from_pretrained(run / "merged", attn_implementation="eager")
    assert merged.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert merged.config.use_cache is True
    assert not hasattr(merged.config, "quantization_config")
    row = prepare(recipe, *_tokens(recipe)).train[0]
    expected = logits_of(adapted, row)
    distance = float((logits_of(merged.float(), row) - expected).abs().max() / expected.abs().max())
    # The quantized base itself computes in bf16 (and int8 quantizes its inputs too).
    assert distance < (5e-2 if bf16 else 1e-5)
    if kind == "tied-embeddings":
        assert merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert list((run / "merged").glob("tokenizer.json"))


def _tokens(recipe: Any) -> tuple[Any, frozenset[int]]:
    from toolkit.models.load import ModelSource

    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    return tokenizer, source.stop_tokens(tokenizer)


def test_answers_of_a_merged_model_end_where_those_of_one_trained_in_full_do(tmp_path: Path) -> None:
    """Of a base whose own answers end with other tokens than those of the tokenizer that it is trained with."""
    base = shutil.copytree("llama", tmp_path / "base")
    config = json.loads((base / "config.json").read_text(encoding="utf-8")) | {"eos_token_id": 0}
    (base / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Transformers saves no top-p without `do_sample` once anything else was changed.
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 1], "top_p": 0.9}', encoding="utf-8")
    full, lora = trained("ends", f"model.path={base}"), trained("ends-lora", *LORA, f"model.path={base}")
    assert cli(["merge", str(lora)]) == 0
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (full / "final", lora / "merged")]
    whole, merged = (each.generation_config.to_diff_dict() for each in models)
    assert whole == merged
    assert set(merged["eos_token_id"]) == {0, 1, AutoTokenizer.from_pretrained(base).eos_token_id}
    assert merged["top_p"] == 0.9
    assert models[0].config.eos_token_id == models[1].config.eos_token_id


def test_an_adapter_of_a_gguf_file_is_merged_and_exported(tmp_path: Path) -> None:
    """Of which Transformers reads no single layer."""
    file = tiny_gguf(Path("llama"), tmp_path / "tiny.gguf")
    run = trained("from-gguf", *LORA, f"model.path={file}", "model.new_tokens=[str]")
    assert cli(["merge", str(run)]) == 0
    assert cli(["export", str(run), "format=int8"]) == 0
    source, adapted, tokenizer = load_trained(run)
    (row,) = proof_rows(source, tokenizer, 1)
    expected = logits_of(adapted, row)
    found = logits_of(AutoModelForCausalLM.from_pretrained(run / "merged", attn_implementation="eager"), row)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not (run / "merged" / "work").exists()


@pytest.mark.parametrize("weakly", [False, True])
def test_merge_that_is_not_equal_is_refused_and_leaves_nothing(weakly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that loses the adapter, also when the adapter changes the logits by less than any fixed tolerance."""
    from peft.tuners.lora.layer import Linear

    run = trained(f"corrupt-{weakly}", *LORA, *(["optimizer.learning_rate=1e-7"] if weakly else []))
    delta = Linear.get_delta_weight
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "get_delta_weight", lambda self, adapter: 0 * delta(self, adapter))
        with pytest.raises(UserError, match="differs from the adapter"):
            merge([run], run / "merged")
    assert not [file.name for file in run.iterdir() if "merged" in file.name]
    merge([run], run / "merged")
    (run / "link").symlink_to("nowhere")
    for there in (run / "merged", run / "link"):
        with pytest.raises(UserError, match="exists already"):
            merge([run], there)
    monkeypatch.setattr("toolkit.train.finished.merge.opened", lambda run: pytest.fail("that takes minutes"))
    with pytest.raises(UserError, match=r"recipe.yaml/new cannot be written: .*recipe.yaml is no folder"):
        merge([run], run / "recipe.yaml" / "new")


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_where_the_files_have_no_room_it_is_said_and_nothing_is_left(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By safetensors, also where the experts of a mixture are written anew to be read; the files are larger."""
    run = trained(f"no-room-{model}", *LORA, f"model.path={model}")
    before, limits = sorted(run.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    for command in (["merge"], ["export", "format=fp8"]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            assert cli([command[0], str(run), *command[1:]]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = capsys.readouterr().err
        assert "cannot be written: a file would be larger than this process may write" in error
        assert "nothing was written" in error and sorted(run.iterdir()) == before


def test_broken_adapter_and_full_model_are_refused() -> None:
    from safetensors.torch import save_file

    run = trained("broken", *LORA)
    file = run / "final" / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    with pytest.raises(UserError, match=r"is damaged: adapter_model.safetensors differs from what was saved"):
        merge([run], run / "merged")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    (run / "manifest.json").write_text(json.dumps(manifest | {"final": None}), encoding="utf-8")
    with pytest.raises(UserError, match="nothing was written"):
        merge([run], run / "merged")
    assert not (run / "merged").exists()
    with pytest.raises(UserError, match="no adapter to merge"):
        merge([trained("whole")], Path("runs/whole/merged"))


SUMS = {
    "lora": (LORA, ["method.r=4", "method.target_modules=[q_proj, up_proj]"]),
    "nf4": (NF4, ["method.use_rslora=true"]),
    "moe": ([*LORA, "model.path=moe"], ["method.rank_pattern={q_proj: 2}"]),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "lora" else pytest.param(kind, marks=pytest.mark.matrix) for kind in SUMS]
)
def test_several_adapters_are_added_up_by_weight(kind: str, tmp_path: Path) -> None:
    """Also those of different ranks and on different layers."""
    common, other = SUMS[kind]
    runs = [trained(f"sum-{kind}-one", *common), trained(f"sum-{kind}-two", *common, "seed=7", *other)]
    assert cli(["merge", *map(str, runs), "--weights=0.7,-0.4", "--output", str(tmp_path / "sum")]) == 0
    proof = json.loads((tmp_path / "sum" / "merge_proof.json").read_text(encoding="utf-8"))
    assert proof["distance"] < 1e-5 < 1e-2 < proof["effect"]
    assert list(proof["adapters"].values()) == [0.7, -0.4]
    if kind != "lora":
        return
    expected = load_file("llama/model.safetensors")
    for run, weight in zip(runs, (0.7, -0.4), strict=True):
        config = json.loads((run / "final" / "adapter_config.json").read_text(encoding="utf-8"))
        adapter = load_file(run / "final" / "adapter_model.safetensors")
        for name in (name for name in adapter if ".lora_A." in name):
            change = adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
            merged = name.removeprefix("base_model.model.").replace(".lora_A", "")
            expected[merged] = expected[merged] + weight * config["lora_alpha"] / config["r"] * change
    for name, tensor in load_file(tmp_path / "sum" / "model.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=name)


def test_adapters_that_do_not_add_up_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nf4 = ["method.quantization=nf4"]
    kinds = {"plain": [], "dora": ["method.use_dora=true"], "other": nf4}
    kinds |= {"loftq": [*nf4, "method.init_lora_weights=loftq"], "biases": ["extra.lora={bias: all}"]}
    runs = [RunFolder(Path("runs") / name) for name in kinds]
    for run, settings in zip(runs, kinds.values(), strict=True):
        run.final.mkdir(parents=True)
        (run.path / "recipe.yaml").write_text(load_checked("small", [*LORA, *settings]).to_yaml(), encoding="utf-8")
    plain, dora, other, loftq, biases = (str(run.path) for run in runs)
    out = ["--output", str(tmp_path / "sum")]
    for arguments, said in (
        ([plain, dora], "no folder is named"),
        ([plain, other, *out], "a number for each of 2 adapters, and has none"),
        ([plain, other, "--weights=1", *out], "a number for each of 2 adapters, and has 1"),
        ([plain, f"{plain}/", "--weights=1,1", *out], "a run is named twice"),
        ([plain, dora, "--weights=1,1", *out], "use_dora, of which there is no weighted sum"),
        ([other, loftq, "--weights=1,1", *out], "loftq, of which there is no weighted sum"),
        ([biases, "--weights=0.5", *out], "extra.lora.bias, of which there is no weighted sum"),
        ([plain, other, "--weights=1,1", *out], "the base of runs/other is another than that of runs/plain"),
    ):
        assert cli(["merge", *arguments]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli(["merge", plain, "--weights", "much"])
    assert not (tmp_path / "sum").exists()


GPU, HOST = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(("on_gpu", "on_host", "chosen"), [(24, 64, GPU), (4, 64, HOST), (0, 64, HOST), (4, 8, None)])
def test_a_layer_decides_where_a_model_of_8_billion_parameters_is_merged(
    on_gpu: int, on_host: int, chosen: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 all of it would take 32 GB; a layer of it, and what its largest weight becomes, take a tenth."""
    layers = torch.nn.ModuleList(torch.nn.Linear(16_000, 16_000, bias=False, device="meta") for _ in range(32))
    model = torch.nn.Sequential(layers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu > 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (on_gpu * 10**9, 0))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=on_host * 10**9, total=2**60))
    if chosen is None:
        with pytest.raises(UserError, match=r"takes 3\.\d\d GiB to compute .* 3\.73 GiB free on the GPU, 7\.45 GiB"):
            place_for(model, logits=10**6)
        return
    assert place_for(model, logits=10**6)[0] == chosen


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_model_that_is_read_as_a_whole_is_refused_before_where_there_is_no_room(
    precision: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_gguf(place / "llama", place / "base.gguf")
    settings = [*LORA, "model.path=base.gguf", f"precision={precision}"]
    source = ModelSource.open(load_checked("small", settings).recipe)
    tensors = load_file(place / "llama" / "model.safetensors").values()
    whole = {"bf16": 2, "fp32": 4}[precision] * sum(each.numel() for each in tensors) + file.stat().st_size
    for free in (whole, whole - 1):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: SimpleNamespace(available=free, total=2**60))
        with nullcontext() if free == whole else pytest.raises(UserError, match=r"as a whole, takes .* of the host"):
            check_reading(source, dtypes(source.recipe))
    assert "reading base.gguf, as a whole, takes" in capsys.readouterr().out
    plain = ModelSource.open(load_checked("small", LORA).recipe)
    check_reading(plain, dtypes(plain.recipe))
    assert not capsys.readouterr().out


WIDE = """
import json, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaForCausalLM
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.rules import load_checked
from toolkit.train.finished import merge as merging
from toolkit.train.process import peak_host_bytes

config = AutoConfig.from_pretrained("llama")
config.update(dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=32, head_dim=64, dtype="bfloat16"))
config.update(dict(num_attention_heads=8, num_key_value_heads=8))
config.save_pretrained("wide")
with torch.device("meta"):
    model = LlamaForCausalLM(config)
weights = {name: 0.05 * torch.randn(each.shape, dtype=torch.bfloat16) for name, each in model.named_parameters()}
print(sum(each.numel() for each in weights.values()))
save_file(weights, "wide/model.safetensors", metadata={"format": "pt"})
adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
final = Path("runs/wide/final")
adapted.peft_config["default"].save_pretrained(final)
names = {name.replace(".default", ""): each for name, each in adapted.named_parameters() if "lora_" in name}
save_file({name: 0.05 * torch.randn(each.shape) for name, each in names.items()}, final / "adapter_model.safetensors")
Path("runs/wide/recipe.yaml").write_text(load_checked("small", sys.argv[1:]).to_yaml())
del model, adapted, weights
merging.SHARD, merging._PROOF_TOKENS = 20_000_000, 8
place_for = merging.place_for

def noted(*arguments):
    Path("/proc/self/clear_refs").write_text("5")
    print(peak_host_bytes())
    return place_for(*arguments)

merging.place_for = noted
merging.merge([Path("runs/wide")], Path("runs/wide/merged"))
print(peak_host_bytes())
"""


@pytest.mark.matrix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux resets the peak of a process")
def test_merging_takes_the_memory_that_it_states(place: Path) -> None:
    for folder in (place / "wide", place / "runs" / "wide" / "final"):
        folder.mkdir(parents=True)
        for file in [*(place / "llama").glob("*token*"), *(place / "llama").glob("*.jinja")]:
            (folder / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-c", WIDE, *LORA, "model.path=wide"]
    out = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout
    parameters, before, peak = (int(line) for line in out.splitlines() if line.isdigit())
    bound = sum(1e9 * float(size) for size in re.findall(r"([\d.]+) GB (?:to compute|of the host)", out))
    assert peak - before < bound < parameters
