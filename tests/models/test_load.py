"""Loading: where a model comes from, and one clear word when it cannot be used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models_doc
import pytest
import torch
from harness import RUN, environment, leave_unmeasured
from safetensors.torch import load_file, save_file
from small import INT8, LORA, NF4, place_with, set_up
from tiny import tiny_gguf, tiny_kind, tiny_model
from transformers import LlamaConfig

from toolkit.common import UserError, printable
from toolkit.data.encoding.chat_template import OF_PROCESSORS
from toolkit.distributed.engines import dtypes
from toolkit.models import device
from toolkit.models import load as load_module
from toolkit.models import tiny as tiny_copies
from toolkit.models.coverage import parameter_counts
from toolkit.models.load import ModelSource
from toolkit.recipe import load
from toolkit.recipe.rules import load_checked

place = place_with("llama")


def recipe(*overrides: str):  # type: ignore[no-untyped-def]
    return load_checked("small", list(overrides)).recipe


@pytest.fixture(scope="module")
def gguf_file(place: Path) -> Path:
    smollm2 = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", place / "smollm2")
    (place / "gguf").mkdir()
    return tiny_gguf(smollm2, place / "gguf" / "tiny.gguf")


def test_gguf_file_is_found_by_its_own_path_and_inside_a_folder(gguf_file: Path) -> None:
    file = gguf_file
    one = ModelSource.open(recipe(f"model.path={file}"))
    two = ModelSource.open(recipe(f"model.path={file.parent}", f"model.gguf_file={file.name}"))
    assert one.location == two.location and one.location["gguf_file"] == file.name
    assert one.config.model_type == "llama"


def change(words: str) -> str:
    """The line of code in what an error says to change."""
    return words.partition('`python -c "')[2].partition('"`')[0]


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_in_pickles_are_refused_before_the_data_is_prepared_and_converted_as_is_said(
    parts: int, tmp_path: Path
) -> None:
    folder = shutil.copytree("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"pytorch_model-{part}-of-{parts}.bin" for part in range(parts)] if parts > 1 else ["pytorch_model.bin"]
    places = {name: files[number % parts] for number, name in enumerate(weights)}
    for file in files:
        torch.save({name: weights[name] for name in places if places[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match=r"(?s)lacks model\.safetensors.*may run code") as caught:
        set_up(f"model.path={folder}", "data.sources=[nothing.jsonl]")
    exec(change(str(caught.value)), {})
    converted = load_file(folder / "model.safetensors")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)
    ModelSource.open(recipe(f"model.path={folder}")).require_weights()


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("model-00002-of-00002.safetensors", "1 of the 2 files that model.safetensors.index.json names"),
        ("model.safetensors.index.json", "lacks model.safetensors.index.json"),
    ],
)
def test_files_of_weights_that_are_missing_are_named_before_the_data_is_prepared(
    gone: str, words: str, tmp_path: Path
) -> None:
    folder = shutil.copytree("llama", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name] for name in places if places[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    ModelSource.open(recipe(f"model.path={folder}")).require_weights()
    (folder / gone).unlink()
    with pytest.raises(UserError, match=words):
        set_up(f"model.path={folder}", "data.sources=[nothing.jsonl]")


def test_a_tokenizer_that_names_no_token_pads_all_the_same(tmp_path: Path) -> None:
    """As that of a folder with `tokenizer.json` alone does."""
    folder = shutil.copytree("llama", tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    assert ModelSource.open(recipe(f"model.path={folder}")).tokenizer().pad_token_id == 0


def test_what_reads_a_tokenizer_of_sentencepiece_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.23 falls back to another library, and asks for that."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    folder = shutil.copytree("llama", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x00")
    with pytest.raises(UserError, match="pip install sentencepiece"):
        ModelSource.open(recipe(f"model.path={folder}")).tokenizer()


def test_gguf_file_of_the_hub_is_all_of_its_model(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--tiny-GGUF" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    file = snapshot / "tiny.gguf"
    file.symlink_to(gguf_file)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = ModelSource.open(recipe("model.path=org/tiny-GGUF", "model.gguf_file=tiny.gguf"))
    assert source.weight_files() == [file]
    assert source.stop_tokens(source.tokenizer())


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_byte_order_mark_is_said_in_our_words(file: str, place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "llama", tmp_path / "marked"))
    (folder / file).write_bytes(b"\xef\xbb\xbf" + (folder / file).read_bytes())
    source = ModelSource.open(recipe(f"model.path={folder}"))
    with pytest.raises(UserError, match=rf"marked/{file} begins with a byte order mark, which JSON must not"):
        source.stop_tokens(source.tokenizer())


def test_a_tokenizer_that_is_nowhere_is_not_called_a_model(place: Path) -> None:
    source = ModelSource.open(recipe(f"model.path={place / 'llama'}", "model.tokenizer=nothing/here"))
    with pytest.raises(UserError, match=r"^model.tokenizer: nothing/here") as caught:
        source.tokenizer()
    assert "Set model.tokenizer" in caught.value.change and "SmolLM2" not in caught.value.change


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_git_has_not_fetched_is_said_to_be_so(file: str, place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "llama", tmp_path / "cloned"))
    (folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(UserError, match=rf"cloned/{file} is a Git LFS pointer") as caught:
        set_up(f"model.path={folder}")
    assert "git lfs pull" in caught.value.change


def test_a_folder_without_a_tokenizer_lacks_no_weights(place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "llama", tmp_path / "bare", ignore=shutil.ignore_patterns("token*")))
    with pytest.raises(UserError, match="cannot be loaded as AutoTokenizer") as caught:
        set_up(f"model.path={folder}")
    assert "set model.tokenizer" in caught.value.change and "safetensors" not in caught.value.change


def test_a_folder_that_is_there_is_not_taken_for_a_misspelt_name(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2-x"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        set_up(f"model.path={folder}", "model.tokenizer=llama")
    assert "did you mean" not in caught.value.change


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing/here", ["nothing/here", "model.path"]),
        ("meta-llama/Llama-3.2-1", ["meta-llama/Llama-3.2-1B"]),
        ("nothing.gguf", ["nothing.gguf", "no such folder or file"]),
        ("empty", ["empty", "config.json"]),
        ("damaged", ["damaged", "model.path"]),
        ("images", ["images is a vit", "causal language model"]),
        ("uneven", ["uneven", "not a multiple of the number of attention heads (7)"]),
        ("remote", ["remote", "model.trust_remote_code=true"]),
    ],
)
def test_model_that_cannot_be_loaded_is_one_clear_message(path: str, words: list[str], place: Path) -> None:
    (place / "empty").mkdir(exist_ok=True)
    (place / "damaged").mkdir(exist_ok=True)
    (place / "damaged" / "config.json").write_text((place / "llama" / "config.json").read_text())
    (place / "damaged" / "model.safetensors").write_bytes((place / "llama" / "model.safetensors").read_bytes()[:1000])
    configs = {
        "images": {"model_type": "vit"},
        "uneven": {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 7},
        "remote": {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}},
    }
    for folder, config in configs.items():
        (place / folder).mkdir(exist_ok=True)
        (place / folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (place / "damaged" / name).write_text((place / "llama" / name).read_text())
    with pytest.raises(UserError) as caught:
        set_up(f"model.path={path}", *(["model.tokenizer=llama"] if path in configs else []))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_generic_head_takes_the_body_of_a_models_own_code(place: Path, tmp_path: Path) -> None:
    """Which Transformers makes by itself; it asked on the terminal whether that code may run, and refused."""
    folder = Path(shutil.copytree(place / "llama", tmp_path / "own"))
    (folder / "own_llama.py").write_text(
        "from transformers import LlamaConfig, LlamaModel, LlamaPreTrainedModel\n"
        "from transformers.modeling_layers import GenericForSequenceClassification\n"
        "class Config(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class Body(LlamaModel):\n    config_class = Config\n"
        "class Texts(GenericForSequenceClassification, LlamaPreTrainedModel):\n    config_class = Config\n"
    )
    names = {"AutoConfig": "Config", "AutoModel": "Body", "AutoModelForSequenceClassification": "Texts"}
    auto_map = {key: f"own_llama.{name}" for key, name in names.items()}
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "own_llama", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    made = recipe(f"model.path={folder}", "model.trust_remote_code=true", "objective=reward")
    source = ModelSource.open(made)
    model = source.labelled([], source.tokenizer()).load(dtypes(made), "sdpa")
    assert (type(model).__name__, type(model.model).__name__) == ("Texts", "Body")


@pytest.mark.parametrize(
    ("file", "key", "names"),
    [
        ("config.json", "AutoConfig", "some/other--own.Config"),
        ("tokenizer_config.json", "AutoTokenizer", ["some/other--own.Slow", None]),
    ],
)
def test_code_of_a_further_repository_is_refused(file: str, key: str, names: Any, place: Path, tmp_path: Path) -> None:
    """Its newest version would run, whichever commit of the model has been read."""
    folder = Path(shutil.copytree(place / "llama", tmp_path / "own"))
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(config | {"auto_map": {key: names}}))
    trusting = recipe(f"model.path={folder}", "model.trust_remote_code=true")
    with pytest.raises(UserError, match="takes its code from another repository, some/other--own") as caught:
        ModelSource.open(trusting).tokenizer()
    assert file in caught.value.change
    assert ModelSource.open(recipe(f"model.path={folder}")).tokenizer()


def test_a_tiny_copy_runs_no_code_that_may_not_run(tmp_path: Path) -> None:
    class Own(LlamaConfig):
        model_type = "own"

    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Body: pass\n")
    config = Own(auto_map={"AutoModel": "own.Body"})
    config._name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        tiny_copies.tiny_model(config, "reward")
    assert not (tmp_path / "ran").exists()


def test_a_model_that_needs_a_language_is_refused_without_one(tmp_path: Path) -> None:
    said = {"model_type": "xmod", "is_decoder": True, "languages": ["en_XX", "de_DE"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match="names no default_language") as caught:
        ModelSource.open(recipe(f"model.path={tmp_path}"))
    assert caught.value.change == "set default_language there to one of: en_XX, de_DE"
    (tmp_path / "config.json").write_text(json.dumps({**said, "default_language": "de_DE"}))
    assert ModelSource.open(recipe(f"model.path={tmp_path}"))


def test_code_of_another_commit_than_the_recipes_never_runs(place: Path, tmp_path: Path) -> None:
    """Neither to ask a tiny copy, nor to trace the model: who set `revision` has read the code of that commit alone."""
    repository, read, newest = tmp_path / "hub" / "models--some--own", "a" * 40, "b" * 40
    for commit in (read, newest):
        folder = Path(shutil.copytree(place / "llama", repository / "snapshots" / commit))
        ran = f"open({str(tmp_path / commit)!r}, 'w').close()"
        (folder / "own.py").write_text(
            f"from transformers import LlamaForCausalLM\n{ran}\nclass Own(LlamaForCausalLM):\n    pass\n"
        )
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(newest)
    leave_unmeasured(tmp_path / "cache")
    caches = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    asked = ["recipe=small", "model=some/own", f"model.revision={read}", "model.trust_remote_code=true"]

    done = subprocess.run(
        [sys.executable, RUN, *asked, "max_steps=1", f"output.dir={tmp_path}"],
        env=environment() | caches | {"HF_HUB_OFFLINE": "1", "TOOLKIT_CACHE": str(tmp_path / "cache")},
        cwd=place, capture_output=True, text=True,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "small" / "manifest.json").read_text())["plan"]
    assert plan["origin"] == "traced"
    assert (tmp_path / read).exists() and not (tmp_path / newest).exists()


def test_a_folder_that_is_gone_since_a_run_began_is_said_to_be(place: Path) -> None:
    """Its recipe was checked then; the model may have moved, or the run is named from another folder."""
    source = ModelSource.open(recipe(f"model.path={place / 'llama'}"))
    for path, seen, change in (
        ("./gone", f", seen from {place}", "put it back, or go to the folder that the run was started in"),
        (f"{place}/gone", "", "put it back"),
    ):
        with pytest.raises(UserError) as of_model:
            ModelSource.open(source.recipe.with_values({"model.path": path}))
        with pytest.raises(UserError) as of_tokenizer:
            moved = source.recipe.with_values({"model.tokenizer": path})
            dataclasses.replace(source, recipe=moved).tokenizer()
        for key, error in (("model.path", of_model.value), ("model.tokenizer", of_tokenizer.value)):
            assert (error.what, error.change) == (f"{key}: there is no folder or file {path}{seen}", change)


def test_tokenizer_takes_the_recipes_template_and_always_pads(place: Path) -> None:
    (place / "mine.jinja").write_text("{{ messages[0]['content'] }}")
    tokenizer = ModelSource.open(recipe("model.chat_template=mine.jinja")).tokenizer()
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    bare = place / "bare"
    bare.mkdir()
    for file in (place / "llama").iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    assert ModelSource.open(recipe("model.path=bare")).tokenizer().pad_token is not None


def test_a_byte_order_mark_is_no_part_of_a_models_template(place: Path) -> None:
    shutil.copytree(place / "llama", marked := place / "marked")
    (marked / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    tokenizer = ModelSource.open(recipe("model.path=marked")).tokenizer()
    said = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(said, tokenize=False) == "hi"


@pytest.mark.parametrize("name", OF_PROCESSORS)
def test_a_template_that_stands_with_the_processor_is_the_models(place: Path, name: str) -> None:
    shutil.copytree(place / "llama", folder := place / Path(name).stem)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    written.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    assert not ModelSource.open(recipe(f"model.path={folder.name}")).tokenizer().chat_template
    (folder / name).write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    for given in (f"model.path={folder.name}", f"model.tokenizer={folder.name}"):
        assert ModelSource.open(recipe(given)).tokenizer().chat_template == "{{ messages[0].content }}"
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=f"{name} is not JSON"):
        ModelSource.open(recipe(f"model.path={folder.name}")).tokenizer()


def test_padding_that_the_model_has_no_embedding_for_is_refused(place: Path) -> None:
    source = ModelSource.open(recipe())
    tokenizer = source.tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(place / "padded")
    with pytest.raises(UserError, match=rf"'\[PAD\]' \({source.vocab_size}\)") as refused:
        ModelSource.open(recipe("model.tokenizer=padded")).tokenizer()
    assert "model.tokenizer" in refused.value.change and "model.new_tokens" in refused.value.change


def test_stop_tokens_are_the_tokenizers_and_those_of_the_generation_config(place: Path) -> None:
    source = ModelSource.open(recipe())
    tokenizer = source.tokenizer()
    file = place / "llama" / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "eos_token_id": [5, 6, 151645, -1]}))
    try:
        assert source.stop_tokens(tokenizer) == {tokenizer.eos_token_id, 5, 6}
    finally:
        file.write_text(before)


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "on_cpu"),
    [
        ([], 3, None),
        (["strategy=zero2"], 3, None),
        (["strategy=zero3"], None, None),
        (["strategy=fsdp"], None, None),
        (NF4, 3, "cpu"),
        ([*NF4, "strategy=fsdp"], 3, "cpu"),
        (["model.path=some.gguf"], None, None),
    ],
    ids=str,
)
def test_weights_are_read_to_the_device_unless_they_are_divided_first(
    overrides: list[str], on_gpu: int | None, on_cpu: str | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataclasses.replace(ModelSource.open(recipe()), recipe=load("small", overrides).recipe)
    maps = []

    def read(of: Any, arguments: dict[str, Any], *args: Any, **how: Any) -> Any:
        maps.append(arguments)
        return SimpleNamespace(config=None)

    monkeypatch.setattr(load_module, "read_model", read)
    monkeypatch.setattr(load_module, "keep_unpacked", lambda model: None)
    source.load(dtypes(source.recipe), "eager")
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    source.load(dtypes(source.recipe), "eager")
    assert [(given.get("device_map") or {}).get("") for given in maps] == [on_cpu, on_gpu]


def test_the_files_of_a_model_are_those_that_are_read(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "llama", tmp_path / "twice")
    shutil.copy(tmp_path / "twice/model.safetensors", tmp_path / "twice/consolidated.safetensors")
    source = ModelSource.open(recipe(f"model.path={tmp_path / 'twice'}"))
    assert sorted(file.name for file in source.weight_files()) == ["config.json", "model.safetensors"]


def test_what_processes_divide_is_read_as_it_lies_in_its_files(place: Path, tmp_path: Path) -> None:
    """Mapped into memory, once for all of them; what is not in 16 bits throughout is converted as ever."""
    kinds = {"half": {}, "mixed": {"model.norm.weight": torch.float32}}
    for name, others in kinds.items():
        shutil.copytree(place / "llama", tmp_path / name)
        for file in (tmp_path / name).glob("*.safetensors"):
            held = load_file(file)
            save_file(
                {key: each.to(others.get(key, torch.bfloat16)) for key, each in held.items()}, file, {"format": "pt"}
            )
    for path, tensor, read in (
        (tmp_path / "half", 2, torch.bfloat16),
        (tmp_path / "half", 1, torch.float32),
        (tmp_path / "mixed", 2, torch.float32),
        (place / "llama", 2, torch.float32),
    ):
        made = load("small", [f"model.path={path}", f"parallel.tensor={tensor}", "strategy.name=ddp"]).recipe
        model = ModelSource.open(made).load(dtypes(made), "sdpa")
        assert {each.dtype for each in model.parameters()} == {read}, (path, tensor)


def test_quantized_weights_count_as_what_they_stand_for() -> None:
    plain = parameter_counts(set_up(*LORA).trainer.model)
    assert plain["quantized"] == 0 < plain["reached"] < plain["base"] == plain["total"] - plain["trainable"]
    for method in (NF4, INT8):
        # All linear layers but the head have adapters, and are quantized.
        assert parameter_counts(set_up(*method).trainer.model) == plain | {"quantized": plain["reached"]}


@pytest.mark.parametrize("double", ["true", "false"])
def test_double_quantization_is_what_the_recipe_says(double: str) -> None:
    model = set_up(*NF4, f"method.double_quantization={double}").trainer.model
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    assert states and {state.nested for state in states} == {double == "true"}
    assert {state.quant_type for state in states} == {"nf4"}
    assert {state.dtype for state in states} == {torch.bfloat16}


def test_stored_types_follow_the_recipe() -> None:
    assert dtypes(recipe("precision=bf16")).load == "float32"
    assert dtypes(recipe("precision=bf16", *LORA)).load == "bfloat16"
    model = set_up(*LORA, "precision=bf16", "model.dtype=fp32").trainer.model
    assert {p.dtype for p in model.parameters()} == {torch.float32}


CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
NORM = "model.layers.0.input_layernorm.weight"
WEIGHTS, GENERATION = "model.safetensors", "generation_config.json"
DEEP, BOM = b'{"a":' * 100_000, b"\xef\xbb\xbf{}"
DAMAGES = [
    *(
        (file, content)
        for file in (CONFIG, TOKENIZER, SETTINGS)
        for content in (b"\xff\xfe\x00", b"[]", b"3", DEEP, BOM)
    ),
    (CONFIG, b""),
    (CONFIG, b'{"model_type": "llama", "vocab_size": 1000000000000}'),
    (CONFIG, b'{"model_type": "llama", "num_hidden_layers": 1000000000}'),
    (CONFIG, b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}"),
    (CONFIG, b'{"model_type": "llama", "hidden_act": "\\ud800\\u001b[2J"}'),
    (CONFIG, b'{"model_type": "llama", "intermediate_size": "x"}'),
    (CONFIG, b'{"model_type": "llama\\u001b[2J"}'),
    (CONFIG, b'{"model_type": "llama", "quantization_config": "x"}'),
    (CONFIG, b'{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}'),
    (TOKENIZER, b'{"model": {"vocab": 3}, "added_tokens": "x"}'),
    (
        TOKENIZER,
        b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "abb": 2}, '
        b'"merges": [["a", "b"]], "continuing_subword_prefix": "xxx"}}',
    ),
    (SETTINGS, b'{"tokenizer_class": 3, "eos_token": ["x"]}'),
    (GENERATION, b"[]"),
    (GENERATION, b'{"eos_token_id": "x"}'),
    (WEIGHTS, b""),
    (WEIGHTS, b"\xff" * 100),
    (WEIGHTS, (100).to_bytes(8, "little") + b"{" * 100),
    (WEIGHTS, (99_999_999).to_bytes(8, "little") + b" " * 100),
    ("adapter_config.json", b'{"base_model_name_or_path": "../llama"}'),
]


@pytest.mark.parametrize(("file", "content"), DAMAGES, ids=lambda part: str(part)[:40])
def test_garbage_in_a_models_folder_is_one_clear_error(file: str, content: bytes, place: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place / "llama", tmp_path / "hostile"))
    (folder / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        source = ModelSource.open(load_checked("small", [f"model.path={folder}"]).recipe)
        source.stop_tokens(source.tokenizer())
        source.load(dtypes(source.recipe), "sdpa")
    said = str(caught.value)
    assert "hostile" in said and len(said) < 2000 and printable(said) == said


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"GGUF\3\0\0\0" + b"\xff" * 64, b"GGUF\3\0\0\0" + b"\0" * 16, b"GGUF9" * 50]
)
def test_garbage_for_a_gguf_file_is_one_clear_error(content: bytes, place: Path, tmp_path: Path) -> None:
    (tmp_path / "hostile.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.path"):
        ModelSource.open(recipe(f"model.path={tmp_path / 'hostile.gguf'}"))


def test_weights_that_are_pickles_are_not_read(place: Path) -> None:
    folder = place / "pickled"
    shutil.copytree(place / "llama", folder)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        set_up("model.path=pickled", "model.tokenizer=llama")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.pop(NORM), f"lacks 1 of the model's 20 weights, such as {NORM}"),
        (lambda weights: weights.clear(), "hollow lacks 2"),
        (lambda weights: weights.update({NORM: torch.ones(3)}), f"{NORM} of hollow is 3, which its config makes 128"),
        (lambda weights: weights.update({"\x1b[2J": torch.ones(3)}), ""),
    ],
    ids=["missing", "empty", "of another size", "unknown"],
)
def test_a_model_is_never_drawn_at_random(
    change: Callable[[dict[str, Any]], Any],
    says: str,
    place: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hollow = place / "hollow"
    shutil.copytree(place / "llama", hollow)
    weights = load_file(hollow / "model.safetensors")
    change(weights)
    save_file(weights, hollow / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource.open(load("small", ["model.path=hollow"]).recipe)
    types = dtypes(source.recipe)
    try:
        with pytest.raises(UserError, match=re.escape(says)) if says else contextlib.nullcontext():
            source.load(types, "eager")
        if "lacks" in says:
            with pytest.raises(UserError, match="hollow lacks"):
                source.in_files(types, tmp_path)
        if not says:
            assert "holds 1 weights that this model has no place for, such as" in caplog.text
    finally:
        shutil.rmtree(hollow)


@pytest.mark.parametrize(
    ("kind", "name"), [("glm4_moe", "model.layers.46.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")]
)
def test_weights_that_predict_further_tokens_are_said_to_be_left_out(
    kind: str, name: str, place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers passes over them in silence."""
    folder = tiny_kind(models_doc.stated(kind, "sft"), tmp_path / kind)
    asked = recipe(*LORA, f"model.path={folder}")
    ModelSource.open(asked).load(dtypes(asked), "sdpa")
    assert not caplog.messages
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.ones(2, 2)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")
    ModelSource.open(asked).load(dtypes(asked), "sdpa")
    assert f"1 weight that predicts further tokens (MTP), such as {name}" in caplog.text
    assert "num_nextn_predict_layers=1" in caplog.text
