"""What a finished run is good for: sampling from it, and merging its adapter into its base.

PEFT's merge is trusted only as far as it is proved: adapter, merged model and saved files must give the same logits on
real rows, or nothing is written. One copy of the model in fp32 is held at a time, on the GPU or else on the host; the
files are read back once it is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.common import UserError, build_once, write_json
from toolkit.data.audit import Audit
from toolkit.data.prepare import prepare
from toolkit.distributed.engines import dtypes
from toolkit.models import attention
from toolkit.models.adapters import cast_parameters
from toolkit.models.load import ModelSource, auto_class
from toolkit.recipe.load import load_resolved
from toolkit.train.dequantize import dequantize, place_for
from toolkit.train.evaluate import answer, as_prompt, evaluating
from toolkit.train.run_folder import RunFolder

MERGE_TOLERANCE = 1e-4
"""Largest allowed distance of merged from adapter logits in fp32, relative to the largest logit: rounding is 1e-6."""
EFFECT_TOLERANCE = 1e-2
"""The same relative to what the adapter changes: of a weak adapter, even a lost one would else look like rounding."""
ROUNDING = 1e-5
"""A distance below this is rounding, whatever the adapter's effect."""
SAVED_TOLERANCE = {"float32": MERGE_TOLERANCE, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest allowed distance of the files read back, whose weights are rounded to the type they are saved in."""
_PROOF_ROWS = 8


def load_trained(run: Path) -> tuple[ModelSource, Any, Any]:
    """What a run was trained from, and its model and tokenizer, in the precision it computes in.

    Raises:
        UserError: If the run has no final model.
    """
    source, final = ModelSource.open(load_resolved(run / "recipe.yaml")), _final(run)
    recipe, types = source.recipe, dtypes(source.recipe)
    backend = attention.with_mask(source.config.to_dict())
    if recipe.method.name == "lora":
        from peft import PeftModel

        model: Any = PeftModel.from_pretrained(source.load(types, backend), str(final))
    else:
        saved = {"model.path": str(final), "model.gguf_file": None, "model.revision": None}
        trained = ModelSource.open(recipe.with_values(saved))
        model = trained.load(dataclasses.replace(types, load=types.export), backend)
    return source, model.eval(), source.tokenizer(saved=final)


def chat(
    run: Path, prompts: Sequence[str] | None, max_new_tokens: int, sample: dict[str, Any] | None, seed: int
) -> None:
    """Prints the model's answers to prompts; without prompts, asks for one after the other until end of input."""
    source, model, tokenizer = load_trained(run)
    recipe = source.recipe
    if torch.cuda.is_available() and recipe.method.quantization == "none":
        model = model.cuda()
    stops = source.stop_tokens(tokenizer)
    audit = Audit.model_validate_json((run / "audit.json").read_bytes())
    torch.manual_seed(seed)

    for prompt in prompts or _typed(run.name):
        ids = as_prompt(tokenizer, prompt, audit, stops, recipe.data.chat_template_kwargs)
        print(answer(model, tokenizer, [ids], max_new_tokens, stops, dtypes(recipe).autocast, sample)[0], flush=True)


def _typed(name: str) -> Iterator[str]:
    """What the user types, line by line, until end of input."""
    print(f"{name}: write a prompt and press Enter; Ctrl-D ends")
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if prompt.strip():
            yield prompt


def merge(run: Path, output: Path) -> str:
    """Merges a run's adapter into the base it was trained on, proves that both say the same, and saves the result.

    A quantized base is dequantized first: those are the weights that the adapter was trained on. What it all takes is
    printed, and decides between GPU and host. Logits are compared in fp32 on real rows of the run's data: the adapter's
    against the merged model's, and again against the saved files.

    Returns:
        What was compared and how close it was.

    Example:
        >>> print(merge(Path("runs/smollm2_135m_lora_demo"), Path("merged")))

    Raises:
        UserError: If there is no adapter, the output exists, or the merge is not equal; then nothing is written.
    """
    from peft import PeftModel

    recipe = load_resolved(run / "recipe.yaml")
    final = _final(run)
    if recipe.method.name != "lora":
        raise UserError(f"{run} holds a full model, there is no adapter to merge", f"use {final} as it is")
    if output.exists():
        raise UserError(f"{output} exists already", "name another folder with --output")
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer(saved=final)
    rows = _proof_rows(source, tokenizer)
    types = dtypes(recipe)
    proof: dict[str, Any] = {"rows": len(rows), "tokens": sum(len(row["input_ids"]) for row in rows)}

    base: Any = source.load(types, "eager")
    if recipe.method.quantization != "none":
        quantized = PeftModel.from_pretrained(base, str(final))
        as_trained = [_logits(quantized, row, types.autocast) for row in rows]
        base = quantized.unload()
    place, memory = place_for(base)
    print(memory, flush=True)
    if recipe.method.quantization != "none":
        base = dequantize(base, place)
    model = PeftModel.from_pretrained(base.to(place).float(), str(final)).float()
    with model.disable_adapter():
        untrained = [_logits(model, row) for row in rows]
    before = [_logits(model, row) for row in rows]
    proof["effect"] = _distance(before, untrained)
    proof["tolerance"] = min(MERGE_TOLERANCE, max(ROUNDING, EFFECT_TOLERANCE * proof["effect"]))
    try:
        merged = model.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise UserError(f"the adapter cannot be merged: {error}", "nothing was written") from error
    proof["distance"] = _distance(before, [_logits(merged, row) for row in rows])
    _require("merged model", proof["distance"], proof["tolerance"])
    if recipe.method.quantization != "none":
        proof["distance_to_quantized"] = _distance(before, as_trained)
    merged.config.use_cache = True
    cast_parameters(merged.parameters(), types.export)

    def write(folder: Path) -> None:
        nonlocal merged, model, base
        merged.save_pretrained(folder)
        # The files are read back into the memory that it leaves.
        del merged, model, base
        tokenizer.save_pretrained(folder)
        reader = auto_class(recipe.objective)
        saved = reader.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(place)
        proof["saved_dtype"] = types.export
        proof["distance_as_saved"] = _distance(before, [_logits(saved, row) for row in rows])
        _require("saved model", proof["distance_as_saved"], SAVED_TOLERANCE[types.export])
        write_json(folder / "merge_proof.json", proof)

    try:
        build_once(output, write)
    finally:
        Path(f"{output}.lock").unlink(missing_ok=True)
    text = (
        f"merged into {output}\n"
        f"proof: {proof['rows']} rows, {proof['tokens']} tokens: logits equal to {proof['distance']:.1e} of the "
        f"largest in fp32 (allowed {proof['tolerance']:.0e}; the adapter moves them by {proof['effect']:.1e}); "
        f"read back from {types.export} files: {proof['distance_as_saved']:.1e}"
    )
    if "distance_to_quantized" in proof:
        text += f"; the {recipe.method.quantization} base itself: {proof['distance_to_quantized']:.1e}"
    return text


def _require(name: str, distance: float, allowed: float) -> None:
    if not distance <= allowed:  # NaN is not equal to anything.
        raise UserError(
            f"the {name} differs from the adapter: logits by {distance:.2e} of the largest, allowed {allowed:.0e}",
            "nothing was written; keep using the adapter and report this with `toolkit doctor`",
        )


def _final(run: Path) -> Path:
    final = RunFolder(run).final
    if not final.is_dir():
        raise UserError(f"{run} has no final model: the run is not finished", "run its recipe again, it continues")
    return final


def _proof_rows(source: ModelSource, tokenizer: Any) -> list[dict[str, Any]]:
    prepared = prepare(source.recipe, tokenizer, source.stop_tokens(tokenizer), vocab_size=source.vocab_size)
    dataset = prepared.eval if prepared.eval is not None else prepared.train
    return [row for row, _ in zip(dataset, range(_PROOF_ROWS), strict=False)]


def _logits(model: Any, row: dict[str, Any], autocast: str | None = None) -> torch.Tensor:
    """(tokens, vocabulary) logits of one row, in fp32 on the host."""
    inputs = {"input_ids": torch.tensor([row["input_ids"]], device=model.device)}
    if model.config.is_encoder_decoder:
        inputs["labels"] = torch.tensor([row["labels"]], device=model.device)
    context = torch.autocast(model.device.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
    with evaluating(model), torch.no_grad(), context:
        return model(**inputs).logits[0].float().cpu()


def _distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    largest = max(float(one.abs().max()) for one in before)
    return max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True)) / largest
