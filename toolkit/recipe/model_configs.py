"""What is known about a model without loading it: its `config.json`, and what is bundled with this package.

`bundled/` holds the configs of the models that shipped recipes use, so that recipes are checked and planned with no
network and before any weight is downloaded. Other models are looked up in the hub's cache on disk. Transformers'
`AutoConfig` would do both, but takes seconds to import and completes configs with defaults of its own.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.common import UserError
from toolkit.hub_cache import hub_caches
from toolkit.recipe.config_limits import CHOSEN_KEYS, EXPERT_KEYS, LAYER_KEYS, POSITION_KEYS, read_config
from toolkit.recipe.schema import Model

QUANTIZED_SHARE = 0.9
"""Least share of the parameters in a model's layers that a quantized base must have quantized: of decoders without
experts bitsandbytes reaches more than 99%, of mixtures with fused ones 1 to 10%."""
BUILTIN_MODELS = {"builtin:smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Names of built-in weights to the hub id they come from."""

_BUNDLE = Path(__file__).resolve().parent / "bundled"
RESTORED_FORMS = ("compressed-tensors", "fp8", "mxfp4", "mxfp8")
"""Forms in few bits, by the `quant_method` of their configs, that Transformers restores as it reads them."""
OF_IMAGES = {
    *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v"),
    *("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lfm2_vl"),
    *("lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpmv4_6"),
    *("minimax_m3_vl", "mistral3", "mistral4", "mistral_large4", "mllama", "ovis2", "paligemma", "qianfan_ocr"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava"),
}
"""Architectures of images and text that are causal language models of text alone."""
OF_SOUND = {"audioflamingo3", "glmasr", "musicflamingo", "qwen2_audio", "qwen3_asr", "voxtral"}
"""Types of models of sound and text. Without Granite Speech, whose files hold adapters that must not be used for
text."""
_ENCODERS = {
    **dict.fromkeys(("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"), "is_decoder"),
    **dict.fromkeys(("ernie", "megatron-bert", "reformer", "rembert", "roberta", "roberta-prelayernorm"), "is_decoder"),
    **dict.fromkeys(("roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"), "is_decoder"),
    "xlm": "causal",
    "cpmant": "",
    "xlnet": "",
}
"""Architectures whose tokens see those after them, and the key of their config that makes them causal."""
_SEPARATE_EXPERTS = ("doge", "nllb-moe", "switch_transformers")
"""Architectures of Transformers 5.23 whose experts are modules of their own."""
_EXPERTS_AS_LAYERS = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), ("gate", "w1", "w2", "w3")),
    **dict.fromkeys(
        (
            *("afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
            *("exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe"),
            *("longcat_flash", "mellum", "olmoe", "qwen3_moe", "qwen3_next", "solar_open"),
        ),
        ("gate", "gate_proj", "up_proj", "down_proj"),
    ),
}
"""Architectures whose fused experts and routers PEFT adapts by the names that they had as linear layers."""
_OWN_LAYERS = ("falcon",)
"""Architectures of Transformers 5.23 whose linear layers are of a class of their own."""
_NO_LINEAR_LAYERS = ("ctrl", "gpt-sw3", "gpt2", "gpt_neox_japanese", "openai-gpt", "xlm", *_OWN_LAYERS)
"""Architectures of Transformers 5.23 whose layers have none of `torch.nn.Linear`, or are not marked as layers."""
_KEEPS_ACTIVATIONS = (
    *("albert", "bros", "cpmant", "ctrl", "flaubert", "fsmt", "funnel", "gpt_neox_japanese", "granite_speech"),
    *("granite_speech_plus", "ibert", "jetmoe", "layoutlmv2", "layoutlmv3", "markuplm", "mpnet", "openai-gpt"),
    *("perceiver", "reformer", "squeezebert", "xlm", "xlnet"),
)
"""Architectures of Transformers 5.23 whose layers it does not compute again in the backward pass."""
_SCORED_FLAT = {
    *("apertus", "arcee", "deepseek_v2", "deepseek_v3", "diffllama", "exaone4", "gemma", "gemma3_text", "glm", "glm4"),
    *("gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("jetmoe", "llama", "minicpm3", "ministral", "ministral3", "mistral", "mixtral", "olmo"),
    *("olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("seed_oss", "smollm3", "starcoder2"),
}
"""Decoders of Transformers 5.23 whose heads for texts and words were seen to score rows that lie end to end as they do
padded ones."""
_MOST_ADDED = 2**17
"""Twice as many as tokenizers for speech have. Transformers takes a second for 20,000, and copies them all."""


@dataclass(frozen=True)
class KnownModel:
    """A model whose config is bundled."""

    model: str
    """Hub id."""
    license: str
    """License tag as on the hub."""
    gated: bool
    """Whether the hub asks for an account and an accepted license."""
    parameters: int
    """Number of parameters, tied ones counted once."""
    names: list[str]
    """Names of its parameters, once for all layers: `<32>` stands for the numbers from 0 to 31."""
    config_json: str

    @property
    def config(self) -> dict[str, Any]:
        """The config, anew each time: Transformers completes nested settings of what it is given in place."""
        config: dict[str, Any] = json.loads(self.config_json)
        return config


@functools.cache
def bundled() -> dict[str, KnownModel]:
    """Every bundled model by its hub id."""
    models = {}
    for file in sorted(_BUNDLE.glob("*.json")):
        entry = json.loads(file.read_text(encoding="utf-8"))
        models[entry["model"]] = KnownModel(config_json=json.dumps(entry.pop("config")), **entry)
    return models


def known_model(model: Model) -> KnownModel | None:
    """The bundled entry of a recipe's model; None for a local or unknown one. Case does not matter, as on the hub."""
    model_id = BUILTIN_MODELS.get(model.path, model.path).lower()
    return next((known for known in bundled().values() if known.model.lower() == model_id), None)


def nearest(model_id: str) -> list[str]:
    """Up to three bundled hub ids that look like `model_id`, best first, for "did you mean"."""
    # Most slips are in the name, not in the organisation, so the name alone is compared too.
    spellings = {name.lower(): name for name in bundled()}
    spellings |= {name.partition("/")[2].lower(): name for name in bundled()}
    wanted = model_id.lower()
    close = difflib.get_close_matches(wanted, spellings, n=6, cutoff=0.6)
    close += difflib.get_close_matches(wanted.rpartition("/")[2], spellings, n=6, cutoff=0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]


def config_of(model: Model) -> dict[str, Any] | None:
    """The `config.json` of a recipe's model: from a local folder, the hub's cache on disk, or the bundle.

    Returns:
        The config, or None when it is not known without a download (or lies inside a GGUF file). Shared: whoever
        changes it works on a copy.

    Raises:
        UserError: As `read_config`, of a file on this disk.
    """
    files = local_files(model)
    config = _read(files / "config.json") if files else None
    if config is not None or Path(model.path).is_dir():
        return config
    known = known_model(model)
    return known.config if known else None


def local_files(model: Model) -> Path | None:
    """The folder of a model's files on this disk: its own, or that in the hub's cache; None if there is none."""
    folder = Path(model.path)
    return folder if folder.is_dir() else _hub_snapshot(model)


def tokenizer_file(model: Model) -> Path | None:
    """The `tokenizer.json` of a recipe's model, if it is on this disk."""
    own = model.model_copy(update={"path": BUILTIN_MODELS.get(model.path, model.path)})
    folder = local_files(own.model_copy(update={"path": own.tokenizer, "revision": None}) if own.tokenizer else own)
    file = folder / "tokenizer.json" if folder else None
    return file if file and file.is_file() else None


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether the model has an encoder whose output a decoder attends to."""
    return bool(config.get("is_encoder_decoder", False))


def causal_key(config: Mapping[str, Any]) -> str | None:
    """What would have to be true in the config of an encoder for it to predict the next token.

    Returns:
        The name of a key, empty if there is none; None for what is causal as it is.
    """
    key = _ENCODERS.get(config.get("model_type", ""))
    return None if key is None or (key and config.get(key)) else key


def scored_flat(config: Mapping[str, Any]) -> bool:
    """Whether a head for texts or words, and vectors of texts, may be had of rows that lie end to end: where no token
    sees those after it."""
    # Code of its own may look both ways, as that of embedding models from decoders often does.
    both_ways = config.get("use_bidirectional_attention") or config.get("is_causal") is False or "auto_map" in config
    return config.get("model_type") in _SCORED_FLAT and not both_ways


def max_positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence the model has positions for, in tokens; None if it is unlimited or not stated."""
    text = text_config(config)
    if "relative_attention_num_buckets" in text:  # T5: distances are bucketed, whatever `n_positions` says.
        return None
    return next((text[key] for key in POSITION_KEYS if (text.get(key) or 0) > 0), None)


def num_layers(config: Mapping[str, Any]) -> int | None:
    """Number of transformer layers, encoder and decoder together; None if not stated."""
    text = text_config(config)
    if "decoder_layers" in text:
        return text["decoder_layers"] + text.get("encoder_layers", 0)
    layers = next((text[key] for key in LAYER_KEYS if text.get(key)), None)
    if layers and is_encoder_decoder(config):
        return layers + (text.get("num_decoder_layers") or layers)
    return layers


def width(config: Mapping[str, Any]) -> int | None:
    """Numbers that the layers hand on for each token; None if not stated."""
    text = text_config(config)
    return next((text[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if text.get(key)), None)


def attention_widths(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Heads of queries, heads of keys and values, and numbers of a head; zeros where the config states no one number,
    as of layers that differ."""
    text = text_config(config)

    def stated(*keys: str) -> int:
        return next((text[key] for key in keys if type(text.get(key)) is int and text[key] > 0), 0)

    heads = stated("num_attention_heads", "n_head", "num_heads")
    size = stated("head_dim") or (stated("hidden_size", "d_model", "n_embd") // heads if heads else 0)
    return heads, stated("num_key_value_heads") or heads, size


def inner_width(config: Mapping[str, Any]) -> int:
    """Width inside of the MLPs; 0 where the config states no one number."""
    stated = text_config(config).get("intermediate_size")
    return stated if type(stated) is int and stated > 0 else 0


def experts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Experts of a layer, and those of them that each token meets; (1, 1) without any. The most where layers differ."""
    count, chosen = (max(_whole_numbers(config, keys), default=1) for keys in (EXPERT_KEYS, CHOSEN_KEYS))
    return (count, max(1, min(count, chosen))) if count > 1 else (1, 1)


def _whole_numbers(config: Mapping[str, Any], keys: Iterable[str]) -> Iterator[int]:
    """What a config states by these keys, of its layers or of their MLPs, alike for all or for each."""
    for place, key in itertools.product(_of_layers(config), keys):
        value = place.get(key)
        yield from (each for each in (value if isinstance(value, list) else [value]) if type(each) is int)


def _of_layers(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Where a config speaks of its layers: DBRX has a part of its own for their MLPs."""
    text = text_config(config)
    inside = text.get("ffn_config")
    return (text, inside) if isinstance(inside, Mapping) else (text,)


def meeting_share(experts: int, chosen: int, processes: int) -> float:
    """The share of tokens that meet an expert of one process, of those that divide them, where all are chosen equally
    often: those that meet none choose all of theirs among the experts of the others."""
    return 1 - math.comb(experts - experts // processes, chosen) / math.comb(experts, chosen)


def fused_experts(config: Mapping[str, Any]) -> int:
    """Experts that Transformers keeps in one tensor for a layer, which is no linear layer; 0 without any."""
    if text_config(config).get("model_type") in _SEPARATE_EXPERTS:
        return 0
    numbers = [place[key] for place in _of_layers(config) for key in EXPERT_KEYS if place.get(key)]
    # Of models with several kinds of layers some state a number for each.
    return max((number for number in numbers if type(number) is int and number > 1), default=0)


def hides_linear_layers(config: Mapping[str, Any]) -> bool:
    """Whether the model's linear layers are of a class of its own, which quantization passes over."""
    return text_config(config).get("model_type") in _OWN_LAYERS


def multiplies_in_fp8(config: Mapping[str, Any]) -> bool:
    """Whether there is a linear layer between the first and the last layer with sides that can, see
    `models.fp8_products`."""
    kind, layers = text_config(config).get("model_type"), num_layers(config)
    return kind not in _NO_LINEAR_LAYERS and (layers is None or layers > 2) and (width(config) or 0) % 16 == 0


def adapts_experts(targets: str | Collection[str], config: Mapping[str, Any]) -> bool:
    """Whether PEFT takes some of these target modules for fused experts; `all-linear` means them too."""
    names = _EXPERTS_AS_LAYERS.get(text_config(config).get("model_type") or "", ())
    return bool(fused_experts(config) and names) and (targets == "all-linear" or not set(names).isdisjoint(targets))


def keeps_activations(config: Mapping[str, Any]) -> bool:
    """Whether Transformers computes none of the model's layers again in the backward pass."""
    return bool({config.get("model_type"), text_config(config).get("model_type")} & {*_KEEPS_ACTIVATIONS})


def without_embedding(model: Model, config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Tokens of a local tokenizer, the model's own unless there is another, that the model has no embedding for.

    Returns:
        Those of its vocabulary, and those that were added to it, such as Gemma's for pictures that text never has.
    """
    folder, size = Path(model.tokenizer or model.path), text_config(config).get("vocab_size")
    file = folder / "tokenizer.json"
    if not (size and file.is_file()):
        return [], []
    added, vocabulary = _tokens(file, file.stat().st_mtime_ns)
    own = [token for token, number in vocabulary.items() if number >= size and token not in added]
    return own, [token for token, number in added.items() if number >= size]


def vocabulary(file: Path, modified: int) -> dict[str, int]:
    """Every token of a `tokenizer.json` with its number; empty if it is none."""
    added, own = _tokens(file, modified)
    return own | added


def apart(one: Mapping[str, int], other: Mapping[str, int]) -> list[str]:
    """Tokens that two vocabularies do not both have under the same number, in the order of their numbers."""
    either = {**other, **one}
    return sorted((token for token in either if one.get(token) != other.get(token)), key=lambda token: either[token])


@functools.cache
def _tokens(file: Path, modified: int) -> tuple[dict[str, int], dict[str, int]]:
    """Added tokens and the vocabulary of a `tokenizer.json`, with their numbers."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"].get("vocab") or {}
        if isinstance(vocabulary, list):  # Of [token, score].
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        if len(added) > _MOST_ADDED:
            raise UserError(
                f"{file} adds {len(added):,} tokens to its vocabulary: at most {_MOST_ADDED:,}",
                "put them into the vocabulary, or set model.tokenizer to another",
            )
        numbers = {type(number) for number in (*added.values(), *vocabulary.values())}
        return (added, vocabulary) if numbers <= {int} else ({}, {})
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}, {}  # What is wrong with it is said when it is loaded.


def stored_form(config: Mapping[str, Any]) -> str:
    """What a model's files hold in fewer bits than 16, by the name of its `quant_method`; empty if they do not."""
    stored = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not stored or not isinstance(stored, Mapping):
        return ""
    if stored.get("load_in_4bit") or stored.get("load_in_8bit"):
        return "bitsandbytes"
    return str(stored.get("quant_method", "an unknown form"))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model: multimodal configs nest it under `text_config`."""
    return config.get("text_config") or config


def _hub_snapshot(model: Model) -> Path | None:
    """Folder of the model's files in the hub's cache, laid out as `huggingface_hub` documents it.

    One with a file that is another user's and closed does not count: libraries would say that the file is missing, or
    nothing.
    """
    revision = model.revision or "main"
    for cache in hub_caches():
        repository = cache / f"models--{model.path.replace('/', '--')}"
        ref = repository / "refs" / revision
        with contextlib.suppress(PermissionError):
            commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
            snapshot = repository / "snapshots" / commit
            if snapshot.is_dir() and all(os.access(file, os.R_OK) for file in snapshot.iterdir()):
                return snapshot
    return None


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    state = file.stat()
    return _as_of(file, (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size))


@functools.lru_cache(8)
def _as_of(file: Path, version: tuple[int, ...]) -> dict[str, Any] | None:
    """A plan asks for the same file hundreds of times."""
    config = read_config(file)
    # Without its kind Transformers may still know what it is, or says what is missing.
    return config if isinstance(config.get("model_type"), str) else None
