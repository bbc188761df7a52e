"""Rules on model and data: what is trained, and on what."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.errors import Rule
from toolkit.recipe.model_configs import RESTORED_FORMS
from toolkit.recipe.module_names import whole_numbers
from toolkit.recipe.schema import CHAT_TEMPLATES, VARLEN_ATTENTION, Model, Recipe


def is_local(model: Model) -> bool:
    """Whether a model comes from no hub."""
    path = model.path
    return path.startswith("builtin:") or path.endswith(".gguf") or Path(path).is_dir()


def no_folder(path: str | None) -> bool:
    """Whether it can only be a local path, and nothing is there: the hub's ids are `name` or `owner/name`."""
    text = path or ""
    local = not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text) or text.endswith(".gguf")
    return bool(text) and local and not text.startswith("builtin:") and not Path(text).exists()


def is_gguf_part(name: str | None) -> bool:
    """Whether a GGUF file is one of several that hold a model, which llama.cpp tells by their names too."""
    parts = re.search(r"-\d{5}-of-(\d{5})\.gguf$", name or "")
    return parts is not None and int(parts[1]) > 1


def _no_model(path: str) -> bool:
    """Whether a path means a file, and none that holds a model."""
    return Path(path).is_file() and not path.endswith(".gguf")


def _is_also_adapter(model: Model) -> bool:
    """Whether an adapter lies where the model does."""
    folder = model_configs.local_files(model)
    return folder is not None and all((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _twice(columns: Mapping[str, str] | None) -> bool:
    """Whether two columns are read from the same one."""
    return len(set((columns or {}).values())) < len(columns or {})


def _is_number(text: object) -> bool:
    return isinstance(text, str) and bool(re.fullmatch(r"[\d.]+(e-?\d+)?%?", text))


def _is_stored_as(form: str) -> Callable[[Recipe, Mapping[str, Any]], bool]:
    """Whether bitsandbytes has stored a model in this form, and a recipe asks for another."""

    def broken(recipe: Recipe, config: Mapping[str, Any]) -> bool:
        if recipe.method.quantization == form or model_configs.stored_form(config) != "bitsandbytes":
            return False
        stored = config["quantization_config"]
        return bool(form == ("int8" if stored.get("load_in_8bit") else stored.get("bnb_4bit_quant_type")))

    return broken


TEMPLATE_ARGUMENTS = {
    *("messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
}
"""Arguments of `apply_chat_template` that follow from the rows and from what they are used for."""

GGUF_PART = "is one of the parts of a GGUF file, and Transformers reads no more than that one"

INPUT_RULES = {
    "model-no-folder": Rule(
        "model.path",
        lambda r, _: no_folder(r.model.path),
        "there is no such folder or file",
        "set model.path to a folder with config.json, a GGUF file, or the id of a model on the hub",
    ),
    "model-no-config": Rule(
        "model.path",
        lambda r, _: (
            Path(r.model.path).is_dir() and not r.model.gguf_file and not Path(r.model.path, "config.json").is_file()
        ),
        "this folder holds no model: it has no config.json",
        "set model.path to a folder with config.json; a GGUF file in it is named by model.gguf_file, and a folder with "
        "adapter_config.json by model.adapter",
    ),
    "model-other-file": Rule(
        "model.path",
        lambda r, _: _no_model(r.model.path),
        "this file is no model: of files only GGUF ones are",
        "set model.path to the folder with config.json, a GGUF file, or the id of a model on the hub",
    ),
    "model-is-adapter": Rule(
        "model.path",
        lambda r, _: _is_also_adapter(r.model),
        "an adapter_config.json lies there: Transformers would load the base that it names, and not what lies here",
        "set model.path to the base and model.adapter to this folder, or take that file out of it",
    ),
    "model-whole-numbers": Rule(
        "model.path",
        lambda r, c: not r.model.gguf_file and whole_numbers(model_configs.local_files(r.model), c),
        "holds whole or complex numbers for weights, such as {whole_numbers}, and no quantization_config that says "
        "what they mean",
        "set model.path to weights in floating point, or to a whole quantized model",
    ),
    **{
        f"model-stored-{form}": Rule(
            "method.quantization",
            _is_stored_as(form),
            f"the model is stored in {form} by bitsandbytes, and stays so",
            f"set method={option}, or model.path to the model in 16 bits",
        )
        for form, option in (("nf4", "qlora"), ("int8", "lora_int8"))
    },
    "model-stored-frozen": Rule(
        "model.path",
        lambda r, c: model_configs.stored_form(c) not in ("", "bitsandbytes", *RESTORED_FORMS),
        "the model is stored in {stored_form}, through which nothing is trained here",
        "set model.path to the model in 16 bits, which method.quantization can store in fewer; of forms in fewer bits, "
        f"bitsandbytes, {', '.join(RESTORED_FORMS)} can be read",
    ),
    "tokenizer-no-folder": Rule(
        "model.tokenizer",
        lambda r, _: no_folder(r.model.tokenizer),
        "there is no such folder",
        "set model.tokenizer to a folder with tokenizer.json, or the id of a model on the hub",
    ),
    "tokenizer-vocabulary": Rule(
        "model.tokenizer",
        lambda r, c: r.model.tokenizer and model_configs.without_embedding(r.model, c)[0],
        "it is another model's: of its tokens {tokens_without_embedding}",
        "remove model.tokenizer",
    ),
    "chat-template-file": Rule(
        "model.chat_template",
        lambda r, _: r.model.chat_template not in (None, *CHAT_TEMPLATES) and not Path(r.model.chat_template).is_file(),
        "there is no such file and no built-in template of this name",
        f"set model.chat_template to a Jinja file, or to {', '.join(CHAT_TEMPLATES)}",
    ),
    "new-tokens-twice": Rule(
        "model.new_tokens",
        lambda r, _: len(set(r.model.new_tokens)) < len(r.model.new_tokens),
        "names a token twice",
        "name each token once",
    ),
    "gguf-twice": Rule(
        "model.gguf_file",
        lambda r, _: r.model.path.endswith(".gguf") and r.model.gguf_file is not None,
        "model.path names a GGUF file already",
        "remove model.gguf_file, or set model.path to the folder",
    ),
    "gguf-part-path": Rule(
        "model.path",
        lambda r, _: is_gguf_part(r.model.path),
        GGUF_PART,
        "join them with `llama-gguf-split --merge FIRST WHOLE`, and set model.path to that",
    ),
    "gguf-part-gguf_file": Rule(
        "model.gguf_file",
        lambda r, _: is_gguf_part(r.model.gguf_file),
        GGUF_PART,
        "join them with `llama-gguf-split --merge FIRST WHOLE`, and set model.gguf_file to that",
    ),
    "gguf-file": Rule(
        "model.gguf_file",
        lambda r, _: (
            r.model.gguf_file is not None
            and Path(r.model.path).is_dir()
            and not Path(r.model.path, r.model.gguf_file).is_file()
        ),
        "model.path has no such file",
        "set model.gguf_file to a GGUF file in that folder, or remove it",
    ),
    "revision-local": Rule(
        "model.revision",
        lambda r, _: r.model.revision is not None and is_local(r.model),
        "only models on the hub have revisions",
        "remove model.revision",
    ),
    "remote-code-unpinned": Rule(
        "model.trust_remote_code",
        lambda r, _: (
            r.model.trust_remote_code
            and not is_local(r.model)
            and not re.fullmatch("[0-9a-f]{40}", r.model.revision or "")
        ),
        "code of the model's repository would run in whatever version it has that day",
        "set model.revision to the full commit (40 digits) whose code was read, or trust_remote_code to false",
    ),
    "attention-fp32": Rule(
        "model.attention",
        lambda r, _: r.precision == "fp32" and r.model.attention.startswith("flash"),
        "FlashAttention kernels compute in 16 bits",
        "set model.attention=sdpa, or precision=bf16",
    ),
    "attention-seq2seq": Rule(
        "model.attention",
        lambda r, _: r.objective == "seq2seq" and r.model.attention in VARLEN_ATTENTION,
        "encoder-decoders are not fed by the boundaries of documents",
        "set model.attention=sdpa",
    ),
    "architecture-causal": Rule(
        "objective",
        lambda r, c: c and r.objective == "seq2seq" and not model_configs.is_encoder_decoder(c),
        "this model is decoder-only",
        "set objective=sft or language_modelling",
    ),
    "architecture-seq2seq": Rule(
        "objective",
        lambda r, c: c and r.objective != "seq2seq" and model_configs.is_encoder_decoder(c),
        "this model is an encoder-decoder",
        "set objective=seq2seq",
    ),
    "architecture-encoder": Rule(
        "model.path",
        lambda r, c: r.objective != "seq2seq" and not r.headed and model_configs.causal_key(c) is not None,
        "this model is an encoder: its tokens see those that come after them, which training is to predict",
        "name a decoder{causal_change}",
    ),
    "positions": Rule(
        "batch.seq_len",
        lambda r, c: (model_configs.max_positions(c) or r.batch.seq_len) < r.batch.seq_len,
        "the model has only {max_positions} positions",
        "set batch.seq_len={max_positions} or less",
    ),
    "streaming-length": Rule(
        "data.streaming",
        lambda r, _: r.data.streaming and not r.schedule.max_steps,
        "the number of rows of a stream is not known, so an epoch has no length",
        "set schedule.max_steps",
    ),
    "streaming-epochs": Rule(
        "checkpoint.save_epochs",
        lambda r, _: r.data.streaming and r.checkpoint.save_epochs is not None,
        "a stream has no epochs to save at",
        "use checkpoint.save_steps",
    ),
    "streaming-fraction": Rule(
        "data.eval_split",
        lambda r, _: r.data.streaming and isinstance(r.data.eval_split, float),
        "a share of a stream cannot be held out, its length is not known",
        "name a split (data.eval_split=validation) or data.eval_sources",
    ),
    "streaming-workers": Rule(
        "data.num_workers",
        lambda r, _: r.data.streaming and r.data.decided_workers > 1,
        "a stream is read by one process, in its order",
        "set data.num_workers=1, or auto",
    ),
    "streaming-whole-data": Rule(
        "data.streaming",
        lambda r, _: r.data.streaming and (r.data.deduplicate or r.data.max_samples is not None),
        "deduplicate and max_samples of the mixture need all rows at hand",
        "set data.streaming=false, or max_samples per source",
    ),
    "columns-twice": Rule(
        "data.columns",
        lambda r, _: _twice(r.data.columns),
        "one column of the data would be read as two",
        "name another column for one of them",
    ),
    "source-columns-twice": Rule(
        "data.sources",
        lambda r, _: any(_twice(each.columns) for each in [*r.data.sources, *r.data.eval_sources]),
        "the columns of a source read one column of its data as two",
        "name another column for one of them in its columns",
    ),
    "eval-split-number": Rule(
        "data.eval_split",
        lambda r, _: _is_number(r.data.eval_split),
        "is text, so it would be taken for the name of a split",
        "write a number between 0 and 1 without quotes",
    ),
    "eval-split-is-train": Rule(
        "data.eval_split",
        lambda r, _: (
            not _is_number(r.data.eval_split) and r.data.eval_split in [source.split for source in r.data.sources]
        ),
        "the training rows would be their own held-out rows",
        "name another split, or a fraction: data.eval_split=0.05",
    ),
    "split-needs-text": Rule(
        "data.over_long",
        lambda r, _: r.data.over_long == "split" and r.objective != "language_modelling",
        "cutting a chat or completion in two would train an answer without its question",
        "use data.over_long=drop or truncate; of plain text, objective=language_modelling",
    ),
    "lm-trains-all": Rule(
        "data.train_on",
        lambda r, _: r.objective == "language_modelling" and r.data.train_on not in ("auto", "all"),
        "language modelling trains every token",
        "remove data.train_on, or set objective=sft",
    ),
    "template-kwargs-reserved": Rule(
        "data.chat_template_kwargs",
        lambda r, _: bool(TEMPLATE_ARGUMENTS & r.data.chat_template_kwargs.keys()),
        "names what the toolkit itself gives the template",
        f"leave out {', '.join(sorted(TEMPLATE_ARGUMENTS))}",
    ),
    "seq2seq-packing": Rule(
        "data.packing",
        lambda r, _: r.objective == "seq2seq" and r.data.packing,
        "packed documents cannot be isolated in the cross-attention of an encoder-decoder",
        "set data.packing=false",
    ),
    "seq2seq-train-on": Rule(
        "data.train_on",
        lambda r, _: r.objective == "seq2seq" and r.data.train_on != "auto",
        "an encoder-decoder always trains its whole target",
        "remove data.train_on",
    ),
}
