"""A run's model in fewer bits, for serving: quantized, saved, read back, and compared with the run's own.

Rounding is the point here, so nothing is proved equal but the files to what was quantized; how far that is from the
run's model is measured on real rows and told. An adapter is merged into its base first, see `merge`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import BitsAndBytesConfig, TorchAoConfig

from toolkit.cache import build_once
from toolkit.common import UserError, bytes_text, in_a_line
from toolkit.distributed.engines import dtypes
from toolkit.files import write_json
from toolkit.models import attention
from toolkit.models.heads import auto_class
from toolkit.models.load import ModelSource
from toolkit.recipe.load import load_resolved
from toolkit.train import gguf
from toolkit.train.export import final_model, load_trained, on_device, refuse_head
from toolkit.train.merge import merge, proof_rows

READ_BACK = 1e-3
"""Largest allowed distance of logits of the files from those of the model that was saved, relative to the largest."""
_ROWS = 8


@dataclass(frozen=True)
class Format:
    """How weights of linear layers are stored.

    Attributes:
        config: Transformers' settings of it.
        package: What has to be installed.
    """

    config: Callable[[torch.dtype], Any]
    package: str


def _torchao(name: str) -> Callable[[torch.dtype], Any]:
    def config(dtype: torch.dtype) -> Any:
        from torchao import quantization

        return TorchAoConfig(getattr(quantization, name)())

    return config


FORMATS = {
    "int8": Format(_torchao("Int8WeightOnlyConfig"), "torchao"),
    "fp8": Format(_torchao("Float8WeightOnlyConfig"), "torchao"),
    "nf4": Format(
        lambda dtype: BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        "bitsandbytes",
    ),
}
"""By the name that a user gives."""


def export(run: Path, form: str, output: Path) -> str:
    """Writes a run's model in fewer bits, or for llama.cpp; Transformers loads it as it is.

    Args:
        form: One of `FORMATS` or of `gguf.FORMATS`.
        output: The folder; there is nothing yet.

    Returns:
        What was compared, and how near it is.

    Raises:
        UserError: If a package is missing, the output exists, the adapter cannot be merged, or the files do not give
            the logits of what was quantized; then nothing is written.
    """
    package = FORMATS[form].package if form in FORMATS else "gguf"
    if not importlib.util.find_spec(package):
        raise UserError(f"format={form}: {package} is not installed", f"run `pip install {package}`")
    if form in gguf.FORMATS:
        gguf.converter()
    if output.exists():
        raise UserError(f"{output} exists already", "name another folder with output=DIR")
    refuse_head(run, "use its final model as it is")
    source = ModelSource.open(load_resolved(run / "recipe.yaml"))
    recipe, final = source.recipe, final_model(run)
    tokenizer = source.tokenizer(saved=final)
    rows = proof_rows(source, tokenizer, _ROWS)
    wanted = _logits(on_device(load_trained(run)[1], recipe), rows, dtypes(recipe).autocast)
    _free()
    dtype = getattr(torch, dtypes(recipe).export)
    kind, backend = auto_class(recipe.objective), attention.with_mask(source.config.to_dict())
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": backend}
    settings["trust_remote_code"] = recipe.model.trust_remote_code
    if torch.cuda.is_available():
        settings["device_map"] = {"": torch.cuda.current_device()}
    proof: dict[str, Any] = {"format": form, "rows": len(rows), "tokens": sum(map(len, wanted))}

    def write(folder: Path) -> None:
        whole = final
        if recipe.method.name == "lora":
            whole = folder / "merged"
            merge([run], whole)
        saved: list[torch.Tensor] | None = None
        if form in FORMATS:
            model = kind.from_pretrained(whole, quantization_config=FORMATS[form].config(dtype), **settings).eval()
            # Before the first pass: on CPUs bitsandbytes then repacks weights, with scales of 16 bits.
            model.save_pretrained(folder)
            saved = _logits(model, rows)
            tokenizer.save_pretrained(folder)
            del model
        else:
            gguf.convert(whole, folder / gguf.FILE, form, dtype)
            # Transformers makes fp32 of what a GGUF file holds. Where nothing was rounded it has to be the same model.
            settings["dtype"] = torch.float32
            if form == "gguf":
                saved = _logits(kind.from_pretrained(whole, **settings).eval(), rows)
            settings["gguf_file"] = gguf.FILE
        _free()
        proof["bytes"], proof["bytes_before"] = _size(folder), _size(whole)
        if whole != final:
            shutil.rmtree(whole)
        try:
            again = _logits(kind.from_pretrained(folder, **settings).eval(), rows)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"Transformers cannot read the {form} weights of this model back: {in_a_line(error)}",
                "nothing was written; take another format",
            ) from error
        proof.update(_compared(wanted, again), distance_as_saved=_distance(saved or again, again))
        if not proof["distance_as_saved"] <= READ_BACK:  # NaN is not equal to anything.
            raise UserError(
                f"the saved {form} model differs from the one that was saved: logits by "
                f"{proof['distance_as_saved']:.2e} of the largest, allowed {READ_BACK:.0e}",
                "nothing was written; take another format, and report this with `toolkit doctor`",
            )
        write_json(folder / "export_proof.json", proof)

    try:
        build_once(output, write)
    finally:
        Path(f"{output}.lock").unlink(missing_ok=True)
    return (
        f"exported to {output}: {bytes_text(proof['bytes'])} of weights, {bytes_text(proof['bytes_before'])} before\n"
        f"of {proof['tokens']} tokens of {len(rows)} rows, the most likely next one is the run's for "
        f"{proof['same_token']:.1%}; KL divergence {proof['divergence']:.4f} nats a token, logits differ by "
        f"{proof['distance']:.1e} of the largest; read back from the files: {proof['distance_as_saved']:.1e}"
    )


def _logits(model: Any, rows: Sequence[Mapping[str, Any]], autocast: str | None = None) -> list[torch.Tensor]:
    """(tokens, vocabulary) of each row, in fp32 on the host."""
    found = []
    context = torch.autocast(model.device.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
    with torch.no_grad(), context:
        for row in rows:
            inputs = {"input_ids": torch.tensor([row["input_ids"]], device=model.device)}
            if model.config.is_encoder_decoder:
                inputs["labels"] = torch.tensor([row["labels"]], device=model.device)
            found.append(model(**inputs, use_cache=False).logits[0].float().cpu())
    return found


def _compared(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, float]:
    """How far predictions are from those of the run's model."""
    before, after = torch.cat(list(wanted)), torch.cat(list(found))
    divergence = functional.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="none")
    return {
        "distance": _distance(wanted, found),
        "divergence": float(divergence.sum(-1).mean()),
        "same_token": float((before.argmax(-1) == after.argmax(-1)).float().mean()),
    }


def _distance(wanted: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    largest = max(float(each.abs().max()) for each in wanted)
    return max(float((one - other).abs().max()) for one, other in zip(wanted, found, strict=True)) / largest


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".gguf"))


def _free() -> None:
    """Models hold themselves in circles; what one takes is needed by the next."""
    gc.collect()
    torch.cuda.empty_cache()
