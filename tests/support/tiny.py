"""Tiny random models of real architectures, with a small real tokenizer, and rows to train them on."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from toolkit.recipe import model_configs

BOS, EOS, PAD = "<|endoftext|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, "<|im_start|>", EOS, PAD]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    config: dict[str, Any] | str, folder: Path, seed: int = 0, kv_heads: int | None = None, layers: int = 2
) -> Path:
    """Saves a random model of the same architecture, small enough to train in seconds on a CPU.

    Args:
        config: A `config.json`, or the hub id of a bundled one.
        folder: Where model and tokenizer are saved.
        seed: Seed of the weights.
        kv_heads: See `shrink`.
        layers: See `shrink`.

    Returns:
        `folder`, usable as `model.path`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if isinstance(config, str):
        config = model_configs.bundled()[config].config
    tokenizer = tiny_tokenizer(model_configs.is_encoder_decoder(config))
    small = shrink(config, kv_heads, layers) | {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if "decoder_start_token_id" in small:
        small |= {"decoder_start_token_id": tokenizer.bos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    kind = AutoModelForSeq2SeqLM if model_configs.is_encoder_decoder(config) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(AutoConfig.for_model(**small), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_encoder(kind: str, folder: Path) -> Path:
    """Saves a random encoder that predicts masked words, with no head for texts or words. Returns the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM

    tokenizer = tiny_tokenizer(False)
    width = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}
    if kind != "distilbert":
        width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0, "eos_token_id": 2}
    tokens |= {"cls_token_id": 0, "sep_token_id": 2} if kind == "modernbert" else {}
    # Dropout would depend on how rows fall into micro-batches.
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"), 0.0)
    still |= dict.fromkeys(("seq_classif_dropout", "classifier_dropout", "embedding_dropout", "mlp_dropout"), 0.0)
    config = AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), max_position_embeddings=1024, **width, **tokens, **still
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_kind(config: Any, folder: Path) -> Path:
    """Saves a random causal language model of any kind, shrunk by its configuration. Returns the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from toolkit.models.tiny import shrink as shrunk

    tokenizer = tiny_tokenizer()
    small = type(config)(**shrunk(config.to_dict()))
    small.get_text_config().vocab_size = len(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_gguf(model: Path, file: Path) -> Path:
    """Writes a tiny Llama and its tokenizer as a GGUF file, as llama.cpp's converter does. Returns the file."""
    import gguf
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", plain / scaled.numpy())
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 0))
    writer.add_key_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(bpe["vocab"], key=bpe["vocab"].__getitem__))
    writer.add_token_types([3 if index < len(SPECIAL_TOKENS) else 1 for index in range(len(bpe["vocab"]))])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in load_file(model / "model.safetensors").items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp rotates neighbours, Transformers the two halves of a head.
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def models_and_rows(folder: Path, models: dict[str, str], kv_heads: int | None = None, layers: int = 2) -> None:
    """Saves a tiny model for each of the hub ids in a folder of its name, `chat.jsonl` and `pairs.jsonl`.

    Args:
        kv_heads: See `shrink`.
        layers: See `shrink`.

    The models drop nothing, since masks are drawn by each process and device for the rows that it has.
    """
    for name, hub_id in models.items():
        config = model_configs.bundled()[hub_id].config
        without = {key: 0.0 if "drop" in key and value else value for key, value in config.items()}
        tiny_model(without, folder / name, kv_heads=kv_heads, layers=layers)
    for name, rows in (("chat", chat_rows(67)), ("pairs", pair_rows(67))):
        write_jsonl(folder / f"{name}.jsonl", rows)


def shrink(config: dict[str, Any], kv_heads: int | None = None, layers: int = 2) -> dict[str, Any]:
    """The config with two layers or more, narrow widths and few experts; what makes the architecture special is kept.

    Args:
        kv_heads: Heads of keys and values; by default one where several queries share them, else two.
        layers: How many.
    """
    small = copy.deepcopy(config)
    small.pop("torch_dtype", None)
    small.pop("dtype", None)

    def put(**values: Any) -> None:
        """Sets those keys that the architecture has (and uses)."""
        small.update({key: value for key, value in values.items() if small.get(key) is not None})

    query_heads = config.get("num_attention_heads")
    if query_heads:
        ratio = query_heads // config.get("num_key_value_heads", query_heads)
        kv_heads = kv_heads or (1 if ratio > 2 else 2)
        heads, hidden = kv_heads * ratio, 32 * kv_heads * ratio
        # head_dim x heads differs from hidden_size where it does in the original (Qwen3, Gemma).
        square = config.get("head_dim", 0) * query_heads == config["hidden_size"]
        head_dim = 32 if square else 64  # bitsandbytes on a CPU wants multiples of 32
        put(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden, head_dim=head_dim)
        put(
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            max_window_layers=layers,
            query_pre_attn_scalar=head_dim,
        )
        put(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
        # Shorter than the rows, so that it matters; one sliding and one full layer.
        put(sliding_window=16, sliding_window_pattern=2)
    put(n_embd=64, n_layer=2, n_head=2)
    put(d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128)
    put(decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=128)
    return small


def tiny_tokenizer(encoder_decoder: bool = False) -> Any:
    """Byte-level BPE of 512 tokens. Decoder-only: ChatML; encoder-decoder: ends every text with the stop token."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(_trained())
    if encoder_decoder:
        stop = (EOS, backend.token_to_id(EOS))
        backend.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[stop])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=["<|im_start|>"],
    )
    if not encoder_decoder:
        tokenizer.chat_template = CHATML
    return tokenizer


def perturb(model: Any, size: float) -> None:
    """Adds normal noise of this standard deviation to all weights, the same each time."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Short conversations of one or two turns about Python's string methods."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(1 + number % 2):
            name, doc = _documented()[(number + turn) % len(_documented())]
            messages += [
                {"role": "user", "content": f"{number}: what does {name} do?"},
                {"role": "assistant", "content": doc},
            ]
        rows.append({"messages": messages})
    return rows


def text_rows(count: int) -> list[dict[str, Any]]:
    """Short documents."""
    return [{"text": f"{number}. {name}: {doc}"} for number, (name, doc) in enumerate(_cycled(count))]


def pair_rows(count: int, source: str = "source", target: str = "target") -> list[dict[str, Any]]:
    """Rows for encoder-decoders, under any column names."""
    return [{source: f"{number}: {name}?", target: doc} for number, (name, doc) in enumerate(_cycled(count))]


def write_splits(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes train, validation and test JSONL files; the last two get a tenth of the rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    tenth = max(1, len(rows) // 10)
    splits = {"train": rows[2 * tenth :], "validation": rows[:tenth], "test": rows[tenth : 2 * tenth]}
    for split, part in splits.items():
        write_jsonl(folder / f"{split}.jsonl", part)
    return folder


def _cycled(count: int) -> list[tuple[str, str]]:
    documented = _documented()
    return [documented[number % len(documented)] for number in range(count)]


@functools.cache
def _documented() -> list[tuple[str, str]]:
    """Name and first sentence of the documentation of string and list methods."""
    members = [(f"{kind.__name__}.{name}", getattr(kind, name)) for kind in (str, list) for name in sorted(dir(kind))]
    docs = [(name, (inspect.getdoc(member) or "").partition("\n")[0]) for name, member in members]
    return [(name, doc) for name, doc in docs if "__" not in name and doc]


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([inspect.getdoc(getattr(str, name)) or "" for name in sorted(dir(str))], trainer)
    return tokenizer.to_str()


def labelled_rows(count: int) -> list[dict[str, Any]]:
    """Texts of three classes, which a word tells; two of them are rare."""
    words = {"red": "colour", "green": "colour", "seven": "number", "cat": "animal"}
    return [
        {"text": f"{name} is what text {number} is about, more or less{' and so on' * (number % 3)}", "label": label}
        for number, (name, label) in zip(range(count), itertools.cycle(words.items()))
    ]


def tagged_rows(count: int) -> list[dict[str, Any]]:
    """Sentences of words with tags of entities (IOB2), some of which have several words."""
    people, places = (["Ada"], ["Alan", "Turing"], ["Grace", "Hopper"]), (["London"], ["New", "York"], ["Oslo"])
    rows = []
    for number in range(count):
        who, where = people[number % 3], places[number // 3 % 3]
        words = [*who, "went", "to", *where, "in", str(1900 + number), "."]
        tags = ["B-PER", *["I-PER"] * (len(who) - 1), "O", "O", "B-LOC", *["I-LOC"] * (len(where) - 1), "O", "O", "O"]
        rows.append({"tokens": words, "ner_tags": tags})
    return rows
