"""What a finished run is good for: sampling from it, and merging its adapter into its base with proof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from toolkit.cache import build_once
from toolkit.data.prepare import prepare
from toolkit.errors import UserError
from toolkit.evaluate import answer, as_prompt, evaluating
from toolkit.folder import RunFolder, write_json
from toolkit.model import load_model, load_tokenizer, stop_tokens
from toolkit.policy import dtypes
from toolkit.recipe import Recipe
from toolkit.recipe.load import load_resolved

MERGE_TOLERANCE = 1e-3
"""Largest allowed distance of merged from adapter logits, relative to the largest logit, both computed in fp32. A
correct merge differs by rounding, about 1e-6; a wrong scale or a forgotten module differs by more than 1e-2."""
_PROOF_ROWS = 8


def load_trained(run: Path) -> tuple[Recipe, Any, Any]:
    """The recipe, model and tokenizer of a run, in the precision it computes in.

    Raises:
        UserError: If the run has no final model.
    """
    recipe = load_resolved(run / "recipe.yaml")
    final = _final(run)
    types = dtypes(recipe)
    tokenizer = _tokenizer(recipe, final)
    if recipe.method.name == "lora":
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_model(recipe, types, "sdpa"), str(final))
    else:
        full = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(final), "gguf_file": None, "revision": None})})
        model = load_model(full, types, "sdpa")
    return recipe, model.eval(), tokenizer


def chat(run: Path, prompts: Sequence[str] | None, max_new_tokens: int, sample: dict[str, Any] | None, seed: int) -> None:
    """Prints the model's answers to prompts; without prompts, asks for one after the other until end of input."""
    recipe, model, tokenizer = load_trained(run)
    if torch.cuda.is_available() and recipe.method.quantization == "none":
        model = model.cuda()
    stops = stop_tokens(recipe, tokenizer)
    torch.manual_seed(seed)

    def say(prompt: str) -> None:
        ids = as_prompt(tokenizer, prompt) if recipe.objective == "sft" else list(tokenizer(prompt)["input_ids"])
        print(answer(model, tokenizer, [ids], max_new_tokens, stops, dtypes(recipe).autocast, sample)[0])

    if prompts:
        for prompt in prompts:
            say(prompt)
        return
    print(f"{run.name}: write a prompt and press Enter; Ctrl-D ends")
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if prompt.strip():
            say(prompt)


def merge(run: Path, output: Path) -> str:
    """Merges a run's adapter into its base, proves that both say the same, and saves the result.

    The proof compares logits of adapter and merged model on real rows of the run's data, in fp32 for weights as they
    are saved being rounded afterwards; the rounding's own effect is measured and reported too.

    Returns:
        What was compared and how close it was.

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
    tokenizer = _tokenizer(recipe, final)
    # A quantized base is merged in the precision its adapter saw: full weights, not 4-bit ones.
    exact = recipe.model_copy(
        update={
            "precision": "fp32",
            "method": recipe.method.model_copy(update={"quantization": "none"}),
            "model": recipe.model.model_copy(update={"dtype": "fp32"}),
        }
    )
    model = PeftModel.from_pretrained(load_model(exact, dtypes(exact), "eager"), str(final)).eval()
    rows = _proof_rows(recipe, tokenizer)
    before = [_logits(model, row) for row in rows]
    merged = model.merge_and_unload(safe_merge=True)
    after = [_logits(merged, row) for row in rows]
    distance = _distance(before, after)
    if not distance <= MERGE_TOLERANCE:
        raise UserError(
            f"the merged model differs from the adapter: logits by {distance:.2e} of the largest, allowed {MERGE_TOLERANCE:.0e}",
            "nothing was written; keep using the adapter and report this with `toolkit doctor`",
        )
    saved = merged.to(getattr(torch, dtypes(recipe).export))
    rounded = _distance(before, [_logits(saved, row) for row in rows])
    tokens = sum(len(row["input_ids"]) for row in rows)
    proof = {"rows": len(rows), "tokens": tokens, "distance": distance, "tolerance": MERGE_TOLERANCE, "saved_dtype": dtypes(recipe).export, "distance_as_saved": rounded}

    def write(folder: Path) -> None:
        saved.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / "merge_proof.json", proof)

    build_once(output, write)
    Path(f"{output}.lock").unlink(missing_ok=True)
    return (
        f"merged into {output}\n"
        f"proof: {len(rows)} rows, {tokens} tokens: logits equal to {distance:.1e} of the largest in fp32 "
        f"(allowed {MERGE_TOLERANCE:.0e}); saved in {dtypes(recipe).export}: {rounded:.1e}"
    )


def _final(run: Path) -> Path:
    final = RunFolder(run).final
    if not final.is_dir():
        raise UserError(f"{run} has no final model: the run is not finished", "run its recipe again, it continues")
    return final


def _tokenizer(recipe: Recipe, final: Path) -> Any:
    return load_tokenizer(recipe.model_copy(update={"model": recipe.model.model_copy(update={"tokenizer": str(final)})}))


def _proof_rows(recipe: Recipe, tokenizer: Any) -> list[dict[str, Any]]:
    prepared = prepare(recipe, tokenizer, stop_tokens(recipe, tokenizer))
    dataset = prepared.eval if prepared.eval is not None else prepared.train
    return [row for row, _ in zip(dataset, range(_PROOF_ROWS), strict=False)]


def _logits(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """(tokens, vocabulary) logits of one row, in fp32."""
    inputs = {"input_ids": torch.tensor([row["input_ids"]])}
    if model.config.is_encoder_decoder:
        inputs["labels"] = torch.tensor([row["labels"]])
    with evaluating(model), torch.no_grad():
        return model(**inputs).logits[0].float()


def _distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    largest = max(float(one.abs().max()) for one in before)
    return max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True)) / largest
