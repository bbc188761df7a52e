"""The bundled facts are true, and a recipe's model is found wherever its config lies."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from second_user import as_nobody, shared
from tiny import tiny_model

from toolkit.common import UserError
from toolkit.recipe import compilation, model_configs, module_names
from toolkit.recipe.schema import Model

__all__ = ["shared"]
PUBLISHED_PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "facebook/blenderbot-400M-distill": 364_802_560,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-3-1b-it": 999_885_952,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
}


def test_every_bundled_model_is_checked_against_its_published_size() -> None:
    assert {name: entry.parameters for name, entry in model_configs.bundled().items()} == PUBLISHED_PARAMETERS


@pytest.mark.parametrize("model_id", sorted(PUBLISHED_PARAMETERS))
def test_bundled_config_builds_a_model_of_the_published_size(model_id: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = model_configs.bundled()[model_id].config
    kind = AutoModelForSeq2SeqLM if model_configs.is_encoder_decoder(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(**config))
    assert type(model).__name__ == config["architectures"][0]
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[model_id]
    names = module_names.parameter_names(Model(path=model_id), config)
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


def test_what_is_done_to_a_config_is_not_done_to_the_next() -> None:
    """Transformers writes into nested settings; a plan would then look for another model's trace."""
    from transformers import AutoConfig

    model = Model(path="meta-llama/Llama-3.2-1B")
    before = json.dumps(model_configs.config_of(model))
    AutoConfig.for_model(**(model_configs.config_of(model) or {}))

    assert json.dumps(model_configs.config_of(model)) == before


@pytest.mark.parametrize("model_id", sorted(PUBLISHED_PARAMETERS))
def test_layers_and_positions_agree_with_transformers(model_id: str) -> None:
    from transformers import AutoConfig

    config = model_configs.bundled()[model_id].config
    known = AutoConfig.for_model(**config)
    layers = known.encoder_layers + known.decoder_layers if known.is_encoder_decoder else known.num_hidden_layers
    assert model_configs.num_layers(config) == layers
    assert model_configs.max_positions(config) == known.max_position_embeddings


def test_local_folder_wins_over_the_bundle(tmp_path: Path) -> None:
    tiny_model("meta-llama/Llama-3.2-1B", tmp_path)
    config = model_configs.config_of(Model(path=str(tmp_path)))
    assert config is not None
    assert model_configs.num_layers(config) == 2


def test_local_folder_without_config_is_unknown(tmp_path: Path) -> None:
    assert model_configs.config_of(Model(path=str(tmp_path), gguf_file="model.gguf")) is None


def test_broken_local_config_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        model_configs.config_of(Model(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "no object"),
        ("\ufeff{}", "begins with a byte order mark, which JSON must not: save it as UTF-8 without one"),
        ('{"model_type": "llama", "text_config": [1]}', "text_config"),
        ('{"model_type": "llama", "hidden_size": "96"}', 'hidden_size is "96"'),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "num_hidden_layers is 0"),
        ('{"model_type": "llama", "vocab_size": 1000001}', "at most 1,000,000"),
        ('{"model_type": "llama", "max_position_embeddings": "512"}', "max_position_embeddings"),
        ('{"model_type": "gemma3", "text_config": {"num_hidden_layers": [1]}}', "num_hidden_layers"),
    ],
)
def test_a_config_with_nonsense_names_the_file_and_the_key(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json") as caught:
        model_configs.config_of(Model(path=str(tmp_path)))
    assert words in caught.value.what


def test_a_config_that_was_changed_is_read_anew(tmp_path: Path) -> None:
    for layers in (2, 3, 4):
        (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "num_hidden_layers": {layers}}}')
        assert model_configs.num_layers(model_configs.config_of(Model(path=str(tmp_path))) or {}) == layers


def test_a_config_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """JSON has no infinity; without a kind, Transformers must say what a folder holds."""
    from transformers import BambaConfig

    BambaConfig().save_pretrained(tmp_path)
    config = model_configs.config_of(Model(path=str(tmp_path)))
    assert config and config["time_step_limit"] == [0.0, float("inf")]
    (tmp_path / "config.json").write_text('{"hidden_size": 96}', encoding="utf-8")
    assert model_configs.config_of(Model(path=str(tmp_path))) is None


def test_builtin_model_has_the_known_model_smollm2() -> None:
    known = model_configs.known_model(Model(path="builtin:smollm2-135m-instruct"))
    assert known is not None
    assert known.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_configs.config_of(Model(path="builtin:smollm2-135m-instruct")) == known.config


def test_hub_cache_is_read_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "n_layer": 3}), encoding="utf-8")
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for model in (Model(path="someone/model"), Model(path="someone/model", revision="abc")):
        assert model_configs.config_of(model) == {"model_type": "llama", "n_layer": 3}
    assert model_configs.config_of(Model(path="someone/model", revision="other")) is None


def test_unknown_model_is_none_and_a_slip_finds_the_right_name() -> None:
    assert model_configs.config_of(Model(path="nobody/nothing-7b")) is None
    assert model_configs.nearest("meta-llama/Llama-3.2-1B-instuct")[0] == "meta-llama/Llama-3.2-1B-Instruct"
    assert model_configs.nearest("Qwen3-8B")[0] == "Qwen/Qwen3-8B"
    assert model_configs.nearest("mistral/Mistral-7B-v0.3")[0] == "mistralai/Mistral-7B-v0.3"
    assert model_configs.nearest("zzzz") == []


def test_multimodal_and_relative_position_configs() -> None:
    nested = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 34, "max_position_embeddings": 131072}}
    assert (model_configs.num_layers(nested), model_configs.max_positions(nested)) == (34, 131072)
    t5 = {"is_encoder_decoder": True, "num_layers": 6, "n_positions": 512, "relative_attention_num_buckets": 32}
    assert (model_configs.num_layers(t5), model_configs.max_positions(t5)) == (12, None)


def test_tokens_without_an_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a local tokenizer whose model says how many it has; what is not known is no reason to refuse."""
    monkeypatch.chdir(tmp_path)
    vocabulary = {"a": 0, "b": 1, "c": 2, "<tool>": 3}
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 3, "content": "<tool>"}]}
    for place in (tmp_path, tmp_path / "tokenizer"):
        place.mkdir(exist_ok=True)
        (place / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    own, alone = Model(path="a/b", tokenizer="tokenizer"), Model(path="tokenizer")
    assert model_configs.without_embedding(alone, {"vocab_size": 3}) == ([], ["<tool>"])
    for size, expected in ((4, ([], [])), (3, ([], ["<tool>"])), (2, (["c"], ["<tool>"]))):
        assert model_configs.without_embedding(own, {"vocab_size": size}) == expected
        assert model_configs.without_embedding(own, {"text_config": {"vocab_size": size}}) == expected
    for model, config in (
        (Model(path="a/b"), {"vocab_size": 2}),
        (Model(path="empty"), {"vocab_size": 2}),
        (own, {}),
        (Model(path="a/b", tokenizer="empty"), {"vocab_size": 2}),
        (Model(path="a/b", tokenizer="c/d"), {"vocab_size": 2}),
    ):
        assert model_configs.without_embedding(model, config) == ([], [])


LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
SIZES = ("hidden_size", "vocab_size", "head_dim", "num_attention_heads")
BOTH_STACKS = ("decoder_layers", "encoder_layers", "num_decoder_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")


def test_every_name_of_a_size_is_read_and_must_be_a_number(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for key in (*LAYERS, *POSITIONS, *SIZES, *BOTH_STACKS):
        for value, fits in (
            (3, True),
            (1, True),
            ("3", False),
            (2.5, False),
            (True, False),
            (0, key in (*POSITIONS, "head_dim")),
        ):
            for config in ({key: value}, {"text_config": {key: value}}):
                file.write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
                if fits:
                    assert model_configs.config_of(Model(path=str(tmp_path)))
                    continue
                with pytest.raises(UserError, match=f"{key} is {json.dumps(value)}, not a whole number above 0"):
                    model_configs.config_of(Model(path=str(tmp_path)))
    for key in LAYERS:
        assert model_configs.num_layers({key: 3}) == model_configs.num_layers({"text_config": {key: 3}}) == 3
    for key in POSITIONS:
        assert model_configs.max_positions({key: 3}) == 3 and model_configs.max_positions({key: -1}) is None
    assert model_configs.max_positions({"max_position_embeddings": 0, "n_positions": 5}) == 5
    assert model_configs.num_layers({}) is model_configs.max_positions({}) is None


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}, (8, 2, 32)),
        ({"num_attention_heads": 8, "hidden_size": 512}, (8, 8, 64)),
        ({"n_head": 12, "n_embd": 768}, (12, 12, 64)),
        ({"text_config": {"num_attention_heads": 4, "hidden_size": 64}}, (4, 4, 16)),
        # Other numbers for each layer, or nonsense.
        ({"num_attention_heads": [4, 8], "hidden_size": 64}, (0, 0, 0)),
        ({"num_attention_heads": "8", "hidden_size": 64}, (0, 0, 0)),
        ({"num_attention_heads": 8, "num_key_value_heads": [2, 4], "hidden_size": 64}, (8, 8, 8)),
        ({}, (0, 0, 0)),
    ],
)
def test_widths_of_attention(config: dict[str, Any], widths: tuple[int, int, int]) -> None:
    assert model_configs.attention_widths(config) == widths


def test_layers_of_encoder_and_decoder_are_counted_together() -> None:
    both = {"is_encoder_decoder": True}
    assert model_configs.num_layers({"decoder_layers": 3}) == 3
    assert model_configs.num_layers({"decoder_layers": 3, "encoder_layers": 2, "num_hidden_layers": 2} | both) == 5
    assert model_configs.num_layers({"num_layers": 3, "num_decoder_layers": 2} | both) == 5
    assert model_configs.num_layers({"num_layers": 3} | both) == 6
    assert model_configs.num_layers({"num_layers": 3, "num_decoder_layers": 2}) == 3


def test_every_name_of_experts_is_read() -> None:
    for key in EXPERTS:
        assert model_configs.experts({key: 8, "num_experts_per_tok": 2}) == (8, 2)
        assert model_configs.experts({"text_config": {key: 8}}) == (8, 1)
        assert model_configs.fused_experts({key: 8}) == model_configs.fused_experts({"text_config": {key: 8}}) == 8
        assert model_configs.fused_experts({"ffn_config": {key: 8}}) == 8
    for key in CHOSEN:
        assert model_configs.experts({"num_experts": 8, key: 2}) == (8, 2)
        assert model_configs.experts({"ffn_config": {"num_experts": 8, key: 2}}) == (8, 2)
    # Hunyuan states numbers for each layer.
    assert model_configs.experts({"num_experts": [1, 64], "moe_topk": [1, 8]}) == (64, 8)
    assert model_configs.experts({"num_experts": "8", "ffn_config": 5}) == (1, 1)
    assert model_configs.fused_experts({"ffn_config": {"moe_num_experts": 16}}) == 16
    assert model_configs.fused_experts({"num_experts": [1, 8], "num_local_experts": 4}) == 4
    for config in ({}, {"num_experts": 1}, {"num_local_experts": None}, {"ffn_config": 5, "num_experts": True}):
        assert model_configs.fused_experts(config) == 0
    assert model_configs.experts({}) == model_configs.experts({"num_experts": 1, "num_experts_per_tok": 2}) == (1, 1)
    assert model_configs.experts({"num_experts": 2}) == (2, 1)


def test_every_architecture_with_experts_in_one_tensor_is_a_mixture() -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(kind).to_dict()
        except Exception:  # Some have no defaults that fit together.
            continue
        (experts, chosen), fused = model_configs.experts(config), model_configs.fused_experts(config)
        assert experts == max(1, fused) or not fused, kind
        assert experts == 1 or 1 <= chosen < experts, kind
        found += fused > 0
    assert found > 30


def test_architectures_that_are_named_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    outcomes = (compilation._DECODERS, compilation._ENCODER_DECODERS)
    tried = " ".join(names for each in outcomes for names in each.values()).split()
    named = (*tried, *model_configs._ENCODERS, *model_configs._SEPARATE_EXPERTS)
    assert set(named) <= set(CONFIG_MAPPING_NAMES)


@pytest.mark.matrix
def test_architectures_that_keep_activations_are_those_of_transformers() -> None:
    from transformers.models.auto import modeling_auto

    found = set()
    for objective in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"):
        classes: Any = getattr(modeling_auto, f"MODEL_FOR_{objective}_MAPPING")
        for config in classes:
            with contextlib.suppress(ValueError):  # Some are named that are not there.
                found |= set() if classes[config].supports_gradient_checkpointing else {config.model_type}
    assert found == {*model_configs._KEEPS_ACTIVATIONS}


def test_experts_that_peft_adapts_as_layers_are_those_of_its_tables() -> None:
    from peft.utils import transformers_weight_conversion as conversion
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = conversion._MOE_TARGET_MODULE_MAPPING
    as_layers = {
        kind: set(names[like])
        for kind, like in conversion._MODEL_TO_CONVERSION_PATTERN.items()
        if like in names and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    assert {kind: set(layers) for kind, layers in model_configs._EXPERTS_AS_LAYERS.items()} == as_layers
    mixture = {"model_type": "mixtral", "num_local_experts": 8}
    for targets, adapts in (("all-linear", True), (["q_proj", "w2"], True), (["q_proj"], False)):
        assert model_configs.adapts_experts(targets, mixture) == adapts
        assert not model_configs.adapts_experts(targets, mixture | {"num_local_experts": 1})
        assert not model_configs.adapts_experts(targets, mixture | {"model_type": "gpt_oss"})


def test_an_encoder_is_causal_by_its_own_key() -> None:
    for kind, key in (
        ("bert", "is_decoder"),
        ("xlm-roberta", "is_decoder"),
        ("electra", "is_decoder"),
        ("xlm", "causal"),
    ):
        assert model_configs.causal_key({"model_type": kind}) == key
        assert model_configs.causal_key({"model_type": kind, key: False}) == key
        assert model_configs.causal_key({"model_type": kind, key: True}) is None
    assert model_configs.causal_key({"model_type": "xlnet"}) == model_configs.causal_key({"model_type": "cpmant"}) == ""
    assert model_configs.causal_key({"model_type": "llama"}) is model_configs.causal_key({}) is None
    assert model_configs.is_encoder_decoder({"is_encoder_decoder": True}) and not model_configs.is_encoder_decoder({})


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_lies_where_the_hub_puts_it(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    repository = tmp_path / below / "models--a--b"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n", encoding="utf-8")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").touch()
    assert model_configs.local_files(Model(path="a/b")) == snapshot
    assert model_configs.tokenizer_file(Model(path="a/b")) == snapshot / "tokenizer.json"
    # The revision is the model's; a tokenizer of its own has none.
    assert model_configs.tokenizer_file(Model(path="c/d", revision="x", tokenizer="a/b")) == snapshot / "tokenizer.json"
    assert model_configs.local_files(Model(path="a/b", revision="other")) is None
    assert model_configs.tokenizer_file(Model(path="a/b", tokenizer="c/d")) is None


@pytest.mark.parametrize(
    "closed",
    [
        *("", ".", "models--a--b", "models--a--b/refs/main"),
        *(SNAPSHOT := f"models--a--b/snapshots/{'c' * 40}", f"{SNAPSHOT}/config.json", f"{SNAPSHOT}/model.safetensors"),
    ],
)
def test_a_model_in_a_hub_cache_of_another_user_is_read_as_a_whole_or_not_at_all(closed: str, shared: Path) -> None:
    hub = shared / "hub"
    tiny_model("meta-llama/Llama-3.2-1B", hub / SNAPSHOT)
    (hub / "models--a--b" / "refs").mkdir()
    (hub / "models--a--b" / "refs" / "main").write_text("c" * 40, encoding="utf-8")
    for place in (hub, *hub.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    (hub / closed).chmod(0 if closed else 0o755)
    imports = "from toolkit.recipe import model_configs, schema"
    code = "print((model_configs.config_of(schema.Model(path='a/b')) or {}).get('model_type'))"
    done = as_nobody(shared, imports, code, HF_HUB_CACHE=str(hub))
    assert done.stdout == ("None\n" if closed else "llama\n") and not done.stderr
