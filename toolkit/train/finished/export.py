"""What a finished run is good for: sampling from it."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from toolkit.common import PAGED, UserError, brief, first_line, in_a_line, on_screen, printable
from toolkit.data.auditing.audit import Audit
from toolkit.distributed.engines import dtypes
from toolkit.files import read_file
from toolkit.models import own_attention
from toolkit.models.load import ModelSource
from toolkit.recipe import Recipe
from toolkit.recipe.load import load_resolved
from toolkit.report.load import read_manifest
from toolkit.report.serving import serving
from toolkit.train.evaluation.evaluate import answer, as_prompt, positions_left
from toolkit.train.run_folder import RunFolder, check_final, hash_files


def load_trained(run: Path) -> tuple[ModelSource, Any, Any]:
    """What a run's model is loaded from, and the model and its tokenizer, in the precision it computes in.

    Raises:
        UserError: If the run has no final model, or an adapter's base is not there.
    """
    final, recipe = final_model(run), load_resolved(run / "recipe.yaml")
    if recipe.method.name == "lora":
        source = opened(run)
        model = with_adapter(source, str(final))
    else:
        # It is whole: where the run was copied to, its base need not be.
        saved = {"model.path": str(final), "model.gguf_file": None, "model.revision": None}
        source = ModelSource.open(recipe.with_values(saved))
        model = load_base(source)
    return source, model, source.tokenizer(saved=final)


def opened(run: Path) -> ModelSource:
    """What a run was trained from, with the labels that its head has."""
    source = ModelSource.open(load_resolved(run / "recipe.yaml"))
    if not source.recipe.headed:
        return source
    return source.labelled(read_audit(run).classes, source.tokenizer(saved=final_model(run)), trained=True)


def refuse_head(run: Path) -> None:
    """Refuses a run whose model has no head for the vocabulary.

    Raises:
        UserError: It has another one.
    """
    recipe = load_resolved(run / "recipe.yaml")
    if recipe.headed:
        lora = recipe.method.name == "lora"
        _, line = serving(run, recipe, run / ("merged" if lora else "final"), run.name)[-1]
        once = f", once `toolkit merge {run}` has merged it," if lora else ""
        raise UserError(
            f"{run} was trained with objective {recipe.objective}: its model says no words",
            f"`toolkit report {run}` shows its held-out scores; it is asked{once} by\n  {line}",
        )


def load_begun(run: Path) -> Any:
    """The model that a run began with: the base, with the adapter that the run went on from, if there was one.

    Raises:
        UserError: If that adapter is not there any more, or is another one.
    """
    source = ModelSource.open(load_resolved(run / "recipe.yaml"))
    earlier = source.recipe.model.adapter
    if earlier is None:
        return load_base(source)
    then = read_manifest(run)[0].hashes.get("adapter")
    files = [*Path(earlier).glob("adapter_*")]
    if not files or (then and hash_files(files) != then):
        raise UserError(
            f"{run} went on from the adapter {earlier}, which {'is another one now' if files else 'is gone'}",
            "restore it, or leave out what the run began with: before=false",
        )
    return with_adapter(source, earlier)


def with_adapter(source: ModelSource, folder: str) -> Any:
    """The model with a saved adapter, all of whose layers must be there: PEFT warns, and leaves those as they begin."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        try:
            return PeftModel.from_pretrained(load_base(source), folder).eval()
        except UserWarning as warning:
            raise UserError(
                f"{folder} lacks weights of its adapters, or has them under other names: {first_line(warning)}",
                "read it with the versions of PEFT and Transformers that saved it (manifest.json names them)",
            ) from warning


def load_base(source: ModelSource) -> Any:
    """The model of a source without what was trained, in the precision that the trained one computes in."""
    types = dtypes(source.recipe)
    if source.recipe.method.name == "full":
        types = dataclasses.replace(types, load=types.export)
    return source.load(types, own_attention.with_mask(source)).eval()


def on_device(model: Any, recipe: Recipe) -> Any:
    """The model where it answers: on the GPU, if there is one. Quantized ones were put there while they were loaded."""
    return model.cuda() if torch.cuda.is_available() and recipe.method.quantization == "none" else model


def answer_prompts(
    run: Path, prompts: Sequence[str] | None, max_new_tokens: int, sample: dict[str, Any] | None, seed: int
) -> None:
    """Prints the model's answers to prompts; without prompts, asks for one after the other until end of input.

    Raises:
        UserError: If the run has no final model, or a prompt is no text.
    """
    refuse_head(run)
    for prompt in prompts or ():
        if said := no_text(prompt):
            raise UserError(said, "write it in UTF-8")
    source, model, tokenizer = load_trained(run)
    recipe = source.recipe
    model = on_device(model, recipe)
    stops, audit = source.stop_tokens(tokenizer), read_audit(run)
    torch.manual_seed(seed)

    for prompt in prompts or _typed(run.name):
        ids = as_prompt(tokenizer, prompt, audit, stops, recipe.data.chat_template_kwargs)
        if (left := positions_left(model, ids)) < 1:
            error = UserError(
                f"the prompt has {len(ids):,} tokens, and the model reads {len(ids) + left:,}", "shorten it"
            )
            if prompts:
                raise error
            print(error)
            continue
        texts = answer(model, tokenizer, [ids], max_new_tokens, stops, dtypes(recipe).autocast, sample)
        print(on_screen(printable(texts[0]), PAGED), flush=True)


def read_audit(run: Path) -> Audit:
    """The audit of a run's data.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        return Audit.model_validate_json(read_file(run / "audit.json"))
    except (OSError, ValidationError) as error:
        what = f"{run / 'audit.json'}, which says how prompts are written, cannot be read: {in_a_line(error)}"
        raise UserError(what, "restore the file, or run the recipe again with another output.name") from None


def _typed(name: str) -> Iterator[str]:
    """What the user types, line by line, until end of input."""
    take_any_bytes()
    print(f"{printable(name)}: write a prompt and press Enter; Ctrl-D ends")
    while True:
        try:
            prompt = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if said := no_text(prompt):
            print(said)
        elif prompt.strip():
            yield prompt


def take_any_bytes() -> None:
    """Has standard input give bytes that are no text to `no_text`, in every locale, in place of an error."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def no_text(prompt: str) -> str:
    """What is said of bytes that are no characters, which no tokenizer takes; empty for a text."""
    if prompt.isascii() or prompt == prompt.encode(errors="replace").decode():
        return ""
    return f"the prompt `{brief(printable(prompt), 1, 80)}` holds bytes that are no UTF-8, or half a character"


def final_model(run: Path) -> Path:
    """The folder of a run's trained model or adapter.

    Raises:
        UserError: If the run has none, its files are not as they were written, or no library can open them.
    """
    final = RunFolder(run).final
    if str(final) != str(final).encode(errors="replace").decode():
        raise UserError(f"{final} is no name in UTF-8, and safetensors opens no other", "rename the folder")
    if not final.is_dir():
        raise UserError(f"{run} has no final model: the run is not finished", "run its recipe again, it continues")
    check_final(str(final))
    return final
