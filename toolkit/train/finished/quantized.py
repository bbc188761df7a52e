"""A run's model in fewer bits, for serving: quantized, saved, read back, and compared with the run's own.

Rounding is the point here, so nothing is proved equal but the files to what was quantized; how far that is from the
run's model is measured on real rows and told, see `export_proof`. An adapter is merged into its base first, see
`merge`. Heads stay in the precision of the run: they are small, and all that is read of a text goes through them.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, BitsAndBytesConfig, TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from toolkit.common import UserError, bytes_text, count_text, in_a_line
from toolkit.distributed.engines import dtypes
from toolkit.files import write_json
from toolkit.models import gguf_header, own_attention
from toolkit.models.heads import auto_class, from_config
from toolkit.models.load import ModelSource
from toolkit.models.losses.embedding import drop_pooler
from toolkit.models.quantization import packed_int4
from toolkit.models.sentence_files import write_modules
from toolkit.models.tiny import by_itself
from toolkit.models.untouched_files import copy_untouched
from toolkit.models.weight_reads import kept_whole
from toolkit.recipe import model_configs
from toolkit.recipe.load import load_resolved
from toolkit.report.card import EXPORT_PROOF, write_card
from toolkit.train.checkpoints.storage import build_new, check_new
from toolkit.train.finished import gguf
from toolkit.train.finished.export import final_model, load_trained, on_device, opened
from toolkit.train.finished.export_proof import Outputs, Probe, distance
from toolkit.train.finished.merge import merge

READ_BACK = 1e-3
"""Largest allowed distance of outputs of the files from those of the model that was saved, relative to the largest."""


@dataclass(frozen=True)
class Format:
    """How weights of linear layers are stored.

    Attributes:
        package: What has to be installed, by the name of its import.
        config: Transformers' settings of it, of the type that is computed in and the modules that are kept; none where
            a model is quantized once it is loaded.
        takes: Whether a module is stored so, if its name is not that of one that is kept.
    """

    package: str
    config: Callable[[torch.dtype, Sequence[str]], Any] | None = None
    # Falcon's linear layers multiply by their weight themselves, which torchao's cannot.
    takes: Callable[[Any], bool] = lambda each: isinstance(each, nn.Linear) and type(each).forward is nn.Linear.forward


def _torchao(name: str) -> Callable[[torch.dtype, Sequence[str]], Any]:
    def config(dtype: torch.dtype, whole: Sequence[str]) -> Any:
        from torchao import quantization

        return TorchAoConfig(getattr(quantization, name)(), modules_to_not_convert=[*whole] or None)

    return config


def _nf4(dtype: torch.dtype, whole: Sequence[str]) -> Any:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*whole] or None,
    )


FORMATS = {
    "int8": Format("torchao", _torchao("Int8WeightOnlyConfig")),
    "fp8": Format("torchao", _torchao("Float8WeightOnlyConfig")),
    "nf4": Format("bitsandbytes", _nf4, lambda each: type(each) is nn.Linear or isinstance(each, Conv1D)),
    "int4": Format("compressed_tensors"),
}
"""By the name that a user gives."""
_PACKED_ROWS = 32
_OF_LINEAR_LAYERS = ("nf4", "int4")
"""Formats that no library reads back, or serves, where experts are left as they are."""


def export(run: Path, form: str, output: Path) -> str:
    """Writes a run's model in fewer bits, or for llama.cpp; Transformers loads it as it is.

    Args:
        form: One of `FORMATS` or of `gguf.FORMATS`.
        output: The folder; there is nothing yet.

    Returns:
        What was compared, and how near it is.

    Raises:
        UserError: If a package is missing, the output exists, the adapter cannot be merged, or the files do not give
            the outputs of what was quantized; then nothing is written.
    """
    package = FORMATS[form].package if form in FORMATS else "gguf"
    if not importlib.util.find_spec(package):
        package = package.replace("_", "-")
        raise UserError(f"format={form}: {package} is not installed", f"run `pip install {package}`")
    headed = load_resolved(run / "recipe.yaml").headed
    if form in gguf.FORMATS:
        if headed:
            raise UserError(
                f"format={form}: Transformers reads no heads and no models of vectors from GGUF files, so nothing "
                "could be compared with the run's model",
                f"take one of {', '.join(FORMATS)}",
            )
        gguf.converter()
    check_new(output, "output=DIR")
    source = opened(run)
    recipe, final = source.recipe, final_model(run)
    if form in _OF_LINEAR_LAYERS and model_configs.fused_experts(source.config.to_dict()):
        raise UserError(
            f"format={form}: the experts of this model are no linear layers, which alone are stored so",
            "take format=int8, which leaves experts as they are, or gguf_q8_0",
        )
    _require_layers(source, form)
    tokenizer = source.tokenizer(saved=final)
    if form in gguf.FORMATS:
        _check_converter(source, final, tokenizer)
    probe = Probe.of(source, tokenizer)
    wanted = probe.outputs(on_device(load_trained(run)[1], recipe), dtypes(recipe).autocast)
    _free()
    exporting = _Exporting(source, form, probe, getattr(torch, dtypes(recipe).export))
    proof: dict[str, Any] = {"run": run.resolve().name, "format": form, "rows": probe.rows}
    if not headed:
        proof["tokens"] = sum(map(len, wanted))

    def write(folder: Path) -> None:
        whole = final
        if recipe.method.name == "lora":
            whole = folder / "merged"
            merge([run], whole)
        saved = exporting.write(whole, folder)
        tokenizer.save_pretrained(folder)
        copy_untouched(folder, source)
        if recipe.embeds:
            write_modules(folder, source)
        _free()
        proof["bytes"], proof["bytes_before"] = _size(folder), _size(whole)
        if whole != final:
            shutil.rmtree(whole)
        again = exporting.read(folder)
        proof.update(probe.compared(wanted, again), distance_as_saved=distance(saved or again, again))
        exporting.require("read back", proof["distance_as_saved"])
        if recipe.embeds and importlib.util.find_spec("sentence_transformers"):
            proof["distance_by_sentence_transformers"] = distance(again, exporting.sentence_vectors(folder))
            exporting.require("by sentence-transformers", proof["distance_by_sentence_transformers"], roundings=4)
        write_json(folder / EXPORT_PROOF, proof)
        write_card(folder, run, recipe, recipe.model.path, form)

    build_new(output, write, "output=DIR")
    text = (
        f"exported to {output}: {bytes_text(proof['bytes'])} of weights, {bytes_text(proof['bytes_before'])} before\n"
        f"{probe.sentence(proof)}; read back from the files: {proof['distance_as_saved']:.1e}"
    )
    if form in gguf.FORMATS:
        text += _said_of_gguf(output / gguf.FILE, source, tokenizer)
    if "distance_by_sentence_transformers" in proof:
        text += f", by sentence-transformers: {proof['distance_by_sentence_transformers']:.1e}"
    return text


def _said_of_gguf(file: Path, source: ModelSource, tokenizer: Any) -> str:
    """What such a file holds less than the run's model."""
    text = ""
    if source.config.get_text_config() is not source.config:
        text += (
            "\nthe file holds the model of text alone; llama.cpp reads images and sound by a second file, which its "
            "converter makes of the whole model with --mmproj"
        )
    if lost := gguf.lost_tokens(file, tokenizer):
        text += (
            f"\nllama.cpp's converter has left out {count_text(len(lost), 'added token')}, such as {lost[0]}: "
            "llama.cpp takes them for text"
        )
    return text


def _require_layers(source: ModelSource, form: str) -> None:
    """Refuses a format in which nothing of a model is stored: its files would be as large as the run's."""
    if form not in FORMATS:
        return
    recipe = source.recipe
    trusted = recipe.model.trust_remote_code
    kept = kept_whole(source.config, recipe.objective, trusted)
    with by_itself(), torch.device("meta"):
        model = from_config(recipe.objective, source.config, trusted)
    as_by_default = kept or get_keys_to_not_convert(model)

    def stored(name: str) -> bool:
        if name == "int4":
            return bool(packed_int4.layers(model, kept))
        return any(
            FORMATS[name].takes(layer) and should_convert_module(path, as_by_default)
            for path, layer in model.named_modules()
        )

    if not stored(form):
        matrices = (each for each in model.modules() if getattr(getattr(each, "weight", None), "ndim", 0) == 2)
        kinds = {type(each).__name__ for each in matrices} - {"Embedding", "Linear"}
        others = [*(name for name in FORMATS if name != form and stored(name)), *(["gguf_q8_0"] * (not recipe.headed))]
        raise UserError(
            f"format={form}: no layer of this model would be stored in fewer bits: none is a linear layer that "
            f"{FORMATS[form].package} takes" + (f", but {' or '.join(sorted(kinds))}" if kinds else ""),
            f"take format={' or '.join(others)}" if others else "use the run's model as it is",
        )


def _check_converter(source: ModelSource, final: Path, tokenizer: Any) -> None:
    """Refuses what llama.cpp's converter does not take before an adapter is merged, which may take an hour."""
    recipe = source.recipe
    if recipe.method.name != "lora":
        gguf.check(final)
        return
    with by_itself(), torch.device("meta"):
        model = from_config(recipe.objective, copy.deepcopy(source.config), recipe.model.trust_remote_code)
    config = model.config
    config.architectures, config.get_text_config().vocab_size = [type(model).__name__], source.vocab_size
    if hasattr(config, "quantization_config"):  # What is merged has whole weights.
        del config.quantization_config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_untouched(Path(folder), source)
        gguf.check(Path(folder))


class _Exporting:
    """A model on its way into files of a format, and out of them.

    Args:
        source: What the run was trained from.
        form: See `export`.
        probe: What is asked.
        dtype: In which it computes.
    """

    def __init__(self, source: ModelSource, form: str, probe: Probe, dtype: torch.dtype) -> None:
        self._source, self._form, self._probe, self._dtype = source, form, probe, dtype
        recipe = source.recipe
        self._kind = auto_class(recipe.objective)
        self._settings: dict[str, Any] = {
            "dtype": dtype,
            "attn_implementation": own_attention.with_mask(source),
            "trust_remote_code": recipe.model.trust_remote_code,
        }
        if torch.cuda.is_available():
            self._settings["device_map"] = {"": torch.cuda.current_device()}

    def write(self, whole: Path, folder: Path) -> Outputs | None:
        """Writes the model of a folder into another one.

        Returns:
            What it says before it is read back; None where no library can ask it.
        """
        if self._form not in FORMATS:
            gguf.convert(whole, folder / gguf.FILE, self._form, self._dtype)
            # Transformers makes fp32 of what a GGUF file holds. Where nothing was rounded it has to be the same model.
            self._settings["dtype"] = torch.float32
            saved = self._said(whole) if self._form == "gguf" else None
            self._settings |= {"gguf_file": gguf.FILE, "config": _config_of(folder / gguf.FILE)}
            return saved
        recipe, config = self._source.recipe, FORMATS[self._form].config
        kept = kept_whole(self._source.config, recipe.objective, recipe.model.trust_remote_code)
        quantization = {"quantization_config": config(self._dtype, kept)} if config else {}
        model = self._loaded(whole, **quantization)
        if config:
            _leave_out_loose(model.hf_quantizer)
            model.save_pretrained(folder)
        else:
            packed_int4.pack(model, kept)
            packed_int4.save(model, folder)
        try:
            return self._probe.outputs(model)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise UserError(
                f"Transformers cannot compute with {self._form} weights of this model: {in_a_line(error)}",
                "nothing was written; take another format",
            ) from error

    def read(self, folder: Path) -> Outputs:
        """What is said by the files.

        Raises:
            UserError: They cannot be read.
        """
        try:
            return self._said(folder)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise UserError(
                f"Transformers cannot read the {self._form} weights of this model back: {in_a_line(error)}",
                "nothing was written; take another format",
            ) from error

    def sentence_vectors(self, folder: Path) -> Outputs:
        """What sentence-transformers makes of the files.

        Raises:
            UserError: They cannot be read.
        """
        from sentence_transformers import SentenceTransformer

        trusted = self._source.recipe.model.trust_remote_code
        try:
            return self._probe.sentence_vectors(SentenceTransformer(str(folder), trust_remote_code=trusted).eval())
        except (RuntimeError, ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f"sentence-transformers cannot read the {self._form} weights of this model: {in_a_line(error)}",
                "nothing was written; take another format",
            ) from error

    def require(self, what: str, apart: float, roundings: int = 0) -> None:
        """Refuses files that are another model than the one that was saved.

        Args:
            roundings: How often outputs may be rounded otherwise to the type that the model computes in.
        """
        allowed = READ_BACK + roundings * torch.finfo(self._settings["dtype"]).eps
        if not apart <= allowed:  # NaN is not equal to anything.
            change = "take another format, and report this with `toolkit doctor`"
            if self._form in gguf.FORMATS:
                change = (
                    "take another format: GGUF does not hold all settings of every architecture, or Transformers reads "
                    "them otherwise than llama.cpp; to compare there, run its converter on the whole model yourself"
                )
            raise UserError(
                f"the saved {self._form} model differs from the one that was saved: {what} outputs are apart by "
                f"{apart:.2e} of the largest, allowed {allowed:.0e}",
                f"nothing was written; {change}",
            )

    def _loaded(self, folder: Path, **quantization: Any) -> Any:
        model = self._kind.from_pretrained(folder, **self._settings, **quantization).eval()
        if self._source.recipe.embeds:
            drop_pooler(model)
        for layer in model.modules():
            # On CPUs with bf16 bitsandbytes packs weights anew in their first pass, but not rows of other numbers.
            if hasattr(layer, "support_avx512bf16_for_cpu") and layer.out_features % _PACKED_ROWS:
                layer.support_avx512bf16_for_cpu = False
        return model

    def _said(self, folder: Path) -> Outputs:
        return self._probe.outputs(self._loaded(folder))


def _config_of(file: Path) -> Any:
    """The configuration that the header of a GGUF file states, as llama.cpp reads it."""
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    gguf_header.complete(config, file)
    return config


def _leave_out_loose(quantizer: Any) -> None:
    """Has torchao's metadata of a model not list tensors of the model itself, as BART's `final_logits_bias`: torchao
    0.18 writes their names, and takes none without a dot when it reads the files."""
    states = quantizer.get_state_dict_and_metadata

    def listed(model: Any) -> tuple[Any, dict[str, str]]:
        state, metadata = states(model)
        if names := metadata.get("tensor_names"):
            metadata["tensor_names"] = json.dumps([name for name in json.loads(names) if "." in name])
        return state, metadata

    quantizer.get_state_dict_and_metadata = listed


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))


def _free() -> None:
    """Models hold themselves in circles; what one takes is needed by the next."""
    gc.collect()
    torch.cuda.empty_cache()
