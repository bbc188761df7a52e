"""Where a recipe's model is, and everything that is built from there: config, tokenizer, weights.

A `ModelSource` is opened once in a run and passed on, so that the place is looked up and the config read once, and all
parts of the run see the same one. Opening reads a small file (or a GGUF file's header); only `load` reads weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import cached_file

from toolkit.common import UserError
from toolkit.data.encoding.chat_template import OF_PROCESSORS, load_chat_template, processor_template
from toolkit.data.encoding.encode import no_embedding
from toolkit.data.reading import hub
from toolkit.distributed.engines import Dtypes, loads_on_device
from toolkit.models import device, gguf_header, zero3_loading
from toolkit.models.adapters import keep_unpacked, kept_in_fp32, quantization_config
from toolkit.models.attention import attention_kernels
from toolkit.models.blockwise import Weights
from toolkit.models.heads import auto_class, called, forget_drawn, pin, with_labels
from toolkit.models.low_bit_files import finish_restoring, restoring, take_form
from toolkit.models.quantization import experts
from toolkit.models.reading import read, read_model, require_weights
from toolkit.models.sentence_files import POOLING, pooling_of
from toolkit.models.tokenizer_limits import check_growth
from toolkit.recipe import Recipe
from toolkit.recipe.heads import OF_TEXTS, REWARD
from toolkit.recipe.module_names import tensor_files

_log = logging.getLogger("toolkit.models")
_IN_16_BITS = {"BF16": "bfloat16", "F16": "float16"}
"""Of safetensors."""
_BY_TRAINERS = ("output_router_logits", "router_aux_loss_coef")
"""Keys of a config that trainers change, beside `use_cache`."""
_IN_FULL_ON_HOST = {"device_map": None, "quantization_config": None}


@dataclass(frozen=True)
class ModelSource:
    """A recipe's model, located, with its config read. Made by `open`.

    Args:
        recipe: What names the model and says how it is stored.
        location: Arguments of `from_pretrained` that say where the model is: path, revision, GGUF file, remote code.
        config: The model's configuration. Shared: whoever changes one works on a copy.
        stored: The one in its files, where `config` has other labels.
        low_bits: The few bits in which its files are and from which it is restored, see `low_bit_files.take_form`.
        head_follows: Whether the weights of its head come with an adapter, so that how it begins is not said.
    """

    recipe: Recipe
    location: Mapping[str, Any]
    config: Any
    stored: Any = None
    low_bits: Mapping[str, Any] | None = None
    head_follows: bool = False

    @classmethod
    def open(cls, recipe: Recipe) -> ModelSource:
        """Locates the model and reads its config.

        Example:
            >>> source = ModelSource.open(load_checked("smollm2_135m_lora_demo").recipe)
            >>> tokenizer = source.tokenizer()
            >>> model = source.load(dtypes(source.recipe), "sdpa")

        Raises:
            UserError: If the model cannot be found, with the nearest known one; or if it is none for the objective.
        """
        hub.ask_for(recipe.model.path, recipe.model.tokenizer)
        location = _locate(recipe)
        if recipe.model.trust_remote_code:
            at = f" at commit {recipe.model.revision}" if recipe.model.revision else ""
            _log.info("model.trust_remote_code: runs the Python code of %s%s", recipe.model.path, at)
        config, auto = read(AutoConfig, recipe, location), auto_class(recipe.objective)
        if recipe.model.trust_remote_code:
            pin(config, recipe.model.revision, recipe.objective)
        if type(config) not in auto._model_mapping and auto.__name__ not in getattr(config, "auto_map", {}):
            known = called(recipe.objective)
            raise UserError(
                f"model.path: {recipe.model.path} is a {config.model_type}, which Transformers cannot load as {known}",
                "set model.path to a model for text",
            )
        if config.model_type == "xmod" and config.default_language is None:
            raise UserError(
                f"model.path: {recipe.model.path} has layers of its own for each language, and its config.json "
                "names no default_language",
                f"set default_language there to one of: {', '.join(config.languages)}",
            )
        source = cls(recipe, location, config, low_bits=take_form(config))
        if "gguf_file" in location:
            gguf_header.complete(config, source.weight_files()[0])
        return source

    def labelled(self, labels: Sequence[str], tokenizer: Any, trained: bool = False) -> ModelSource:
        """The same with a head that has an output for each label; unchanged where the head scores the vocabulary, and
        where there is none.

        Args:
            labels: Names of classes; of a reward model there are none.
            tokenizer: Pads texts, whose last token the head looks for.
            trained: Whether an adapter with the head has been trained, and is loaded once the model is.
        """
        if not self.recipe.headed or self.recipe.embeds:
            return self
        whole, names = self.recipe.objective in OF_TEXTS, [*labels] or [REWARD]
        config = with_labels(self.config, names, tokenizer.pad_token_id, whole)
        return dataclasses.replace(self, config=config, stored=self.config, head_follows=trained)

    @functools.cached_property
    def vocab_size(self) -> int | None:
        """Number of tokens that the model has embeddings for once loaded; None for the few configs that do not say."""
        size = self._saved_vocab_size
        return max(size, len(self.tokenizer())) if size and self.recipe.model.new_tokens else size

    @property
    def _saved_vocab_size(self) -> int | None:
        return getattr(self.config.get_text_config(), "vocab_size", None)

    def tokenizer(self, saved: Path | None = None) -> PreTrainedTokenizerBase:
        """The tokenizer, with the recipe's chat template and a padding token.

        Args:
            saved: Folder of a trained model, whose tokenizer is taken as it was saved.

        Raises:
            UserError: If it cannot be loaded, or the model has no embedding for what it pads with.
        """
        model, arguments = self.recipe.model, {**self.location, "config": self.config}
        if other := saved or model.tokenizer:
            # Of another repository no commit is named whose code could have been read.
            trusted = model.trust_remote_code and Path(other).is_dir()
            arguments = {"pretrained_model_name_or_path": str(other), "trust_remote_code": trusted}
        tokenizer = read(AutoTokenizer, self.recipe, arguments)
        check_growth(tokenizer, f"the tokenizer of {arguments['pretrained_model_name_or_path']}")
        if model.chat_template and not saved:
            tokenizer.chat_template = load_chat_template(model.chat_template)
        elif not tokenizer.chat_template and not saved:
            tokenizer.chat_template = self._processor_template()
        elif isinstance(tokenizer.chat_template, str):
            # Transformers reads the mark with which some editors begin a file as a character of every conversation.
            tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
        if tokenizer.pad_token is None:
            # Labels are masked by position, not by token, so any token can pad without being lost as a label.
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        size = self._saved_vocab_size
        if size is not None and not model.new_tokens and (tokenizer.pad_token_id or 0) >= size:
            raise no_embedding("model.tokenizer, for padding,", tokenizer, tokenizer.pad_token_id, size)
        tokenizer.add_tokens(model.new_tokens, special_tokens=True)
        return tokenizer

    def _processor_template(self) -> str | None:
        """The template that stands beside a tokenizer without one."""
        other = self.recipe.model.tokenizer
        beside = (Path(other, name) if other else self.file(name) for name in OF_PROCESSORS)
        found = (processor_template(file) for file in beside if file and file.is_file())
        return next(filter(None, found), None)

    def stop_tokens(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Ids that end an answer: the tokenizer's end token and those of the model's generation config that are tokens
        of the tokenizer, which need not be the model's own."""
        ids = {tokenizer.eos_token_id}
        file = self.file("generation_config.json")
        if file:
            where = {"pretrained_model_name_or_path": str(file.parent)}
            stops = read(GenerationConfig, self.recipe, where).eos_token_id
            stops = stops if isinstance(stops, list) else [stops]
            if not all(isinstance(token, int | None) for token in stops):
                raise UserError(f"{file}: eos_token_id is {stops}, not numbers of tokens", "correct the file")
            ids.update(set(stops) & set(tokenizer.get_vocab().values()))
        return frozenset(token for token in ids if token is not None)

    @functools.cached_property
    def pooling(self) -> str:
        """How outputs of tokens become a text's vector, see `sentence_files.pooling_of`."""
        return pooling_of(self.recipe, self.config, self.file(POOLING))

    def weight_files(self) -> list[Path]:
        """The files on disk that the model is loaded from: of a GGUF file, which holds everything, that alone."""
        gguf = self.location.get("gguf_file")
        opened = self.file(gguf or "config.json")
        assert opened, "what was opened is there"
        if gguf:
            return [opened]
        return [*tensor_files(opened.parent), opened]

    def require_weights(self) -> None:
        """Refuses a folder without the weights that are read from it, see `reading.require_weights`."""
        folder = Path(self.location["pretrained_model_name_or_path"])
        if "gguf_file" not in self.location and folder.is_dir():
            require_weights(folder, self.config, self.recipe.objective)

    def load(self, dtypes: Dtypes, backend: str, elsewhere: Sequence[str] = ()) -> PreTrainedModel:
        """The weights, stored as the recipe says.

        Args:
            backend: The attention backend, see `backends.resolve`.
            elsewhere: Modules whose weights other processes have; here they stay empty.

        Raises:
            UserError: If the files cannot be read, or cannot be quantized as the recipe asks.
        """
        attention_kernels.prepare(backend, self.recipe)
        experts.autocast_grouped_products()
        experts.quantize_fused()
        arguments: dict[str, Any] = {
            "dtype": getattr(torch, self._read_in(dtypes)),
            "attn_implementation": attention_kernels.implementation(backend),
        }
        quantization = quantization_config(self.recipe, dtypes, self.config)
        if quantization:
            arguments["quantization_config"] = quantization
            arguments["dtype"] = getattr(torch, dtypes.compute)
        if loads_on_device(self.recipe) and (quantization or device.kind() != "cpu"):
            arguments["device_map"] = {"": device.current()}
        arguments |= {**self.location, **_only_safetensors(self.location), "config": self.config}
        if self.recipe.headed:
            trusted, files = self.recipe.model.trust_remote_code, self.weight_files()
            renamed = zero3_loading.other_heads(self.config, self.recipe.objective, trusted, files)
            arguments |= {"key_mapping": renamed} if renamed else {}
        if elsewhere:
            arguments["device_map"] = {"": "cpu", **arguments.get("device_map", {}), **dict.fromkeys(elsewhere, "meta")}
        if quantization and "gguf_file" in self.location:
            # Which Transformers can read in full only: held whole once, in 16 bits, on the host.
            arguments["state_dict"] = self._read({**arguments, **_IN_FULL_ON_HOST}, self.stored).state_dict()
        with _not_dispatched() if elsewhere else contextlib.nullcontext():
            model = self._read(arguments, self.stored)
        if "state_dict" in arguments:
            # It does not know from where its weights are, which its adapters note.
            model.name_or_path = model.config.name_or_path = self.location["pretrained_model_name_or_path"]
        keep_unpacked(model)
        if getattr(model.config, "rescale_every", 0):
            # RWKV would divide its weights whenever it is evaluated, also in checkpoints, but not its adapters.
            model.config.rescale_every = 0
        if self.vocab_size != self._saved_vocab_size:
            # New rows are drawn around the mean of the others, by the seed.
            model.resize_token_embeddings(self.vocab_size)
        return model

    def _read(self, arguments: dict[str, Any], stored: Any = None) -> PreTrainedModel:
        """The weights in the type that the arguments name, restored where the files hold few bits."""
        if "state_dict" in arguments:
            arguments = {key: value for key, value in arguments.items() if key != "gguf_file"}
        elif "gguf_file" in arguments:
            # Otherwise the weights keep a quantizer that refuses to train and to save.
            arguments |= {"quantization_config": GgufConfig(dequantize=True)}
        with restoring(self.low_bits):
            model = read_model(self.recipe, arguments, stored, head_follows=self.head_follows)
        if self.low_bits:
            finish_restoring(model, arguments["dtype"])
        return model

    def _read_in(self, dtypes: Dtypes) -> str:
        """The dtype in which weights are read. Of layers that processes divide each keeps a part, which it converts by
        itself: as they lie in the files, weights are mapped into memory, once for all processes of a node."""
        if self.recipe.parallel.tensor == 1 or dtypes.load != "float32" or "gguf_file" in self.location:
            return dtypes.load
        kinds = set()
        for file in self.weight_files():
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    kinds |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        return _IN_16_BITS.get("+".join(kinds), dtypes.load)

    @property
    def is_read_whole(self) -> bool:
        """Whether the files are such that Transformers reads all or nothing of them."""
        return "gguf_file" in self.location or bool(self.low_bits)

    def in_files(self, dtypes: Dtypes, folder: Path) -> Weights:
        """The weights where they are, in their files, and the model without them.

        Args:
            folder: Where what the files hold in another form, such as the experts of some mixtures, is written anew.

        Raises:
            UserError: If the files cannot be read.
        """
        experts.quantize_fused()
        quantization = quantization_config(self.recipe, dtypes, self.config)
        dtype = getattr(torch, dtypes.compute if quantization else dtypes.load)
        arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "config": self.config}
        location = self.location
        if self.is_read_whole:
            # It is held whole once, and written as what is read in parts.
            self._read({**location, **arguments}).save_pretrained(folder / "whole")
            location = {"pretrained_model_name_or_path": str(folder / "whole")}
        arguments |= {"device_map": {"": "disk"}, "offload_folder": str(folder), **_only_safetensors(location)}
        model = read_model(self.recipe, {**location, **arguments}, head_follows=self.head_follows)
        maps = (getattr(getattr(module, "_hf_hook", None), "weights_map", None) for module in model.modules())
        files = next(each.dataset for each in maps if each is not None)
        if self.recipe.headed:
            forget_drawn(model)
        remove_hook_from_submodules(model)
        del model.hf_device_map
        # Of what is kept in fp32, the offload knows nothing.
        for name in filter(kept_in_fp32(model, dtype), files):
            files.index[name]["dtype"] = "float32"
        for name, buffer in model.named_buffers():
            if name in files:
                buffer.copy_(files[name])
        if self.vocab_size != self._saved_vocab_size:
            model.resize_token_embeddings(self.vocab_size, mean_resizing=False)
        # For files that are quantized already, experts of Llama 4 would be laid out otherwise.
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False) if quantization else None
        return Weights(files, model, quantizer)

    @contextlib.contextmanager
    def config_to_save(self, model: PreTrainedModel) -> Iterator[None]:
        """Undoes what trainers change in a model's config, until it is saved: caches are switched off, routers return
        their logits. What is evaluated then is computed as before."""
        before, config = self.config.get_text_config(), model.config.get_text_config()
        wanted = {key: getattr(before, key) for key in _BY_TRAINERS if hasattr(before, key)} | {"use_cache": True}
        changes = [(config, key, value) for key, value in wanted.items()]
        if hasattr(self.config, "rescale_every"):
            changes.append((model.config, "rescale_every", self.config.rescale_every))
        kept = [(owner, key, getattr(owner, key, value)) for owner, key, value in changes]
        for owner, key, value in changes:
            setattr(owner, key, value)
        try:
            yield
        finally:
            for owner, key, value in kept:
                setattr(owner, key, value)

    def file(self, name: str) -> Path | None:
        """A file of the model's folder or, from the cache, of its hub repository; None if it has no such file."""
        path, revision = self.location["pretrained_model_name_or_path"], self.location.get("revision", "main")
        try:
            file = cached_file(path, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise UserError(
                f"model.path: {name} of {path} cannot be read: {error}", "try again, or download it"
            ) from error
        return Path(file) if file else None


@contextlib.contextmanager
def _not_dispatched() -> Iterator[None]:
    """Transformers would have layers on several devices fetch what they read; here what is empty is taken out."""
    dispatch = modeling_utils.accelerate_dispatch
    modeling_utils.accelerate_dispatch = lambda *args, **kwargs: None
    try:
        yield
    finally:
        modeling_utils.accelerate_dispatch = dispatch


def _locate(recipe: Recipe) -> dict[str, Any]:
    model = recipe.model
    path, gguf = model.path, model.gguf_file
    if path.startswith("builtin:"):
        from toolkit.models.builtin import builtin_model

        path = str(builtin_model(path.removeprefix("builtin:")))
    elif path.endswith(".gguf"):
        if not Path(path).is_file():
            raise UserError(f"model.path: there is no file {path}", "set model.path to an existing GGUF file")
        path, gguf = str(Path(path).parent), Path(path).name
    arguments = {"pretrained_model_name_or_path": path, "trust_remote_code": model.trust_remote_code}
    if model.revision:
        arguments["revision"] = model.revision
    if gguf:
        arguments["gguf_file"] = gguf
    return arguments


def _only_safetensors(location: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for weights: those of old models are pickles, which may run code when they are read."""
    return {} if "gguf_file" in location else {"use_safetensors": True}
