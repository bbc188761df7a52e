"""Adapters of runs merged into their base, with proof, in the memory that one layer takes.

PEFT's merge is trusted only as far as it is proved: adapters, merged model and saved files must give the same logits on
real rows, or nothing is written. Several adapters are added up, each times a weight, which logits can prove; whether
TIES or DARE came out right, they could not. No model is ever whole in memory, but while one is read from a GGUF file
or restored from few bits, see `models/blockwise.py`: what fp32 weights would take (32 GB for 8 billion parameters, 282
GB for 70) is more than the machine has that trained them in 4 bits. Each comparison reads all files once more instead;
nothing else decides how long a merge takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from toolkit.common import UserError, bytes_text, count_text
from toolkit.data.batching.collate import IGNORE
from toolkit.data.prepare import prepare
from toolkit.distributed.engines import Dtypes, dtypes
from toolkit.files import write_json
from toolkit.models.adapters import cast_parameters, kept_in_fp32
from toolkit.models.blockwise import Blockwise, Merged, blocks
from toolkit.models.heads import from_config
from toolkit.models.load import ModelSource
from toolkit.models.sentence_files import write_modules
from toolkit.models.special_tokens import take_tokens
from toolkit.models.tiny import by_itself
from toolkit.models.untouched_files import copy_untouched
from toolkit.planner.hardware.detect import ram
from toolkit.planner.workload import WIDTH
from toolkit.recipe import Recipe
from toolkit.recipe.load import load_resolved
from toolkit.report.card import MERGE_PROOF, MERGED, write_card
from toolkit.report.load import read_manifest
from toolkit.train.checkpoints.save import state_dtype
from toolkit.train.checkpoints.storage import build_new, check_new
from toolkit.train.finished.export import final_model, opened
from toolkit.train.process import hand_back_memory

MERGE_TOLERANCE = 1e-4
"""Largest allowed distance of merged from adapter logits in fp32, relative to the largest logit: rounding is 1e-6."""
EFFECT_TOLERANCE = 1e-2
"""The same relative to what the adapter changes: of a weak adapter, even a lost one would else look like rounding."""
ROUNDING = 1e-5
"""A distance below this is rounding, whatever the adapter's effect."""
SHARD = 2_000_000_000
"""Bytes of a file of the merged model. It is written from memory, and its weights lie there once more on their way."""
_PROOF_ROWS, _PROOF_TOKENS = 8, 128
"""Rows that logits are compared on, of all runs, and how many tokens of each: the last ones, where rows differ."""

Logits = list[torch.Tensor]
"""(tokens, vocabulary) of each row, or (classes,) of a text, in fp32 on the host."""


def merge(runs: Sequence[Path], output: Path, weights: Sequence[float] | None = None) -> str:
    """Merges adapters into the base they were trained on, proves that both say the same, and saves the result.

    A quantized base is dequantized: those are the weights that the adapters were trained on. What it all takes is
    printed before it is taken, and decides between GPU and host. Logits are compared in fp32 on real rows of the runs'
    data: the adapters' against the merged model's, and again against the saved files. The first run decides on the type
    of the files and on the tokenizer.

    Args:
        runs: Of which the adapters are added up.
        output: The folder of the merged model.
        weights: How much of each adapter is added; may be left out for one.

    Returns:
        What was compared and how close it was.

    Example:
        >>> print(merge([Path("runs/smollm2_135m_lora_demo")], Path("merged")))

    Raises:
        UserError: If there is no adapter, they cannot be added up, the output exists, or the merge is not equal; then
            nothing is written.
    """
    recipes = [load_resolved(run / "recipe.yaml") for run in runs]
    finals = [final_model(run) for run in runs]
    for run, recipe, final in zip(runs, recipes, finals, strict=True):
        if recipe.method.name != "lora":
            raise UserError(f"{run} holds a full model, there is no adapter to merge", f"use {final} as it is")
    _check_sum(runs, recipes, weights)
    check_new(output, "--output")
    sources = [opened(run) for run in runs]
    source, tokenizer = sources[0], sources[0].tokenizer(saved=finals[0])
    rows = [
        row
        for each, final in zip(sources, finals, strict=True)
        for row in proof_rows(each, each.tokenizer(saved=final), max(1, _PROOF_ROWS // len(runs)))
    ]
    proof: dict[str, Any] = {"run": runs[0].resolve().name, "rows": len(rows)}
    proof["tokens"] = sum(len(row["input_ids"]) for row in rows)
    adapters = dict(zip(finals, weights or [1.0], strict=True))
    if weights:
        proof["adapters"] = {str(run): weight for run, weight in zip(runs, adapters.values(), strict=True)}

    def write(folder: Path) -> None:
        work = folder / "work"
        proof.update(_merge_into(folder, source, tokenizer, adapters, rows, work))
        shutil.rmtree(work, ignore_errors=True)
        tokenizer.save_pretrained(folder)
        copy_untouched(folder, source)
        if source.recipe.embeds:
            write_modules(folder, source)
        write_json(folder / MERGE_PROOF, proof)
        if not weights:  # Of a sum nothing was measured.
            write_card(folder, runs[0], recipes[0], recipes[0].model.path, MERGED)

    build_new(output, write, "--output")
    text = (
        f"merged into {output}\n"
        f"proof: {count_text(proof['rows'], 'row')}, {proof['tokens']:,} tokens: "
        f"logits equal to {proof['distance']:.1e} of the largest in fp32 (allowed {proof['tolerance']:.0e}; "
        f"{'adapters move' if len(runs) > 1 else 'the adapter moves'} them by {proof['effect']:.1e}); "
        f"rounded to {proof['saved_dtype']}: {proof['distance_as_saved']:.1e}, read back from the files as rounded"
    )
    if "distance_to_quantized" in proof:
        text += f"; the {recipes[0].method.quantization} base itself: {proof['distance_to_quantized']:.1e}"
    return text


def _check_sum(runs: Sequence[Path], recipes: Sequence[Recipe], weights: Sequence[float] | None) -> None:
    """Refuses adapters that cannot be added up."""
    if len(weights or [1.0]) != len(runs) or (weights is None and len(runs) > 1):
        raise UserError(
            f"--weights must have a number for each of {len(runs)} adapters, and has {len(weights or ()) or 'none'}",
            f"say how much of each is added: --weights {','.join(f'{1 / len(runs):.2g}' for _ in runs)} is their mean",
        )
    if len({run.resolve() for run in runs}) < len(runs):
        raise UserError("a run is named twice", "name each once, with the sum of its weights")
    bases = set()
    for run, recipe in zip(runs, recipes, strict=True) if weights else ():
        method = recipe.method
        others = {
            "a head of its own": recipe.headed,
            "use_dora": method.use_dora,
            "modules_to_save": method.modules_to_save,
        }
        others |= {"model.new_tokens": recipe.model.new_tokens, "extra.lora.bias": recipe.trains_biases}
        # Each would make up for the same loss.
        others["init_lora_weights=loftq"] = method.init_lora_weights == "loftq"
        for key in (key for key, value in others.items() if value):
            raise UserError(
                f"{run} was trained with {key}, of which there is no weighted sum",
                "merge it alone, without --weights",
            )
        bases.add((read_manifest(run)[0].hashes.get("model"), method.quantization))
        if len(bases) > 1:
            raise UserError(
                f"the base of {run} is another than that of {runs[0]}: {recipe.model.path} with "
                f"quantization {method.quantization}",
                "merge adapters of the same weights, quantized alike",
            )


def _merge_into(
    folder: Path, source: ModelSource, tokenizer: Any, adapters: Mapping[Path, float], rows: list[Any], work: Path
) -> dict[str, Any]:
    """Writes the merged model into a folder. Returns what was compared."""
    types, probe = dtypes(source.recipe), _Probe(rows, tokenizer.pad_token_id)
    check_reading(source, types)
    base = source.in_files(types, work / "base")
    hand_back_memory()
    adapted_model = base.adapted(adapters)
    place, memory = place_for(adapted_model, probe.tokens * (source.vocab_size or 0))
    print(memory, flush=True)

    adapted = Blockwise(adapted_model, base, place)
    before = probe.logits(adapted)
    proof: dict[str, Any] = {"saved_dtype": types.export}
    if base.quantizer:
        trained = Blockwise(base.adapted(adapters, as_trained=True), base, place, as_trained=True)
        proof["distance_to_quantized"] = _distance(before, probe.logits(trained, types.autocast))
    with adapted.model.disable_adapter():
        proof["effect"] = _distance(before, probe.logits(adapted))
    proof["tolerance"] = min(MERGE_TOLERANCE, max(ROUNDING, EFFECT_TOLERANCE * proof["effect"]))
    adapted.merging = True
    try:
        wanted = probe.logits(adapted)
    except ValueError as error:
        raise UserError(f"the adapter cannot be merged: {error}", "nothing was written") from error
    proof["distance"] = _distance(before, wanted)
    _require("merged model", proof["distance"], proof["tolerance"])
    if types.export != "float32":
        adapted.rounded = getattr(torch, types.export)
        wanted = probe.logits(adapted)
    # How much rounding the weights moves scores is for people to judge: the fewer a head has, the more.
    proof["distance_as_saved"] = _distance(before, wanted)

    model = base.model()
    take_tokens(model, tokenizer)
    _save(model, Merged(adapted, getattr(torch, types.export)), types.export, folder)
    saved: dict[str, Any] = {
        "model.path": str(folder),
        "model.gguf_file": None,
        "model.revision": None,
        "model.new_tokens": [],
    }
    saved["method.quantization"] = "none"
    files = ModelSource.open(source.recipe.with_values(saved)).in_files(
        dataclasses.replace(types, load=types.export), work / "saved"
    )
    proof["distance_read_back"] = _distance(wanted, probe.logits(Blockwise(files.model(), files, place)))
    _require("saved model", proof["distance_read_back"], MERGE_TOLERANCE)
    return proof


def check_reading(source: ModelSource, types: Dtypes) -> None:
    """Says what it takes to read a base that is held whole meanwhile: of a GGUF file, or published in few bits.

    Raises:
        UserError: If the host has no room for it.
    """
    if not source.is_read_whole:
        return
    recipe = source.recipe
    with by_itself(), torch.device("meta"):
        model = from_config(recipe.objective, source.config, recipe.model.trust_remote_code)
    width = WIDTH[types.load if recipe.method.quantization == "none" else types.compute]
    # Threads that read are ahead of those that restore by most of the files.
    read = sum(file.stat().st_size for file in source.weight_files())
    whole, free = width * sum(each.numel() for each in model.parameters()) + read, _free()
    text = f"reading {recipe.model.path}, as a whole, takes {bytes_text(whole)} of the host; {bytes_text(free)} free"
    if whole > free:
        raise UserError(text, "merge on a machine with more memory; the adapter can be used as it is")
    print(text, flush=True)


def _free() -> int:
    return min(psutil.virtual_memory().available, ram())


def place_for(adapted: Any, logits: int) -> tuple[torch.device, str]:
    """Where a model with adapters is merged: on the GPU if there is room, on the host otherwise.

    Args:
        adapted: The model, whose base need not be in memory.
        logits: How many numbers are compared.

    Returns:
        The device, and how much is needed and free there, for people.

    Raises:
        UserError: If there is room nowhere.
    """
    rest, *layers = [block.sizes for block in blocks(adapted)]
    # What is outside of layers and one layer in fp32, its largest weight as it is read, changed and checked, and logits
    # beside what they come from.
    computing = 4 * (sum(rest) + max(sum(sizes) + 3 * max(sizes, default=0) for sizes in layers) + 4 * logits)
    # Adapters, one pass's logits, and a file's weights on their way to it.
    largest = max(each.numel() for each in adapted.parameters())
    adapters = sum(each.numel() for each in adapted.parameters() if not each.is_meta)
    held = 4 * (adapters + logits) + 2 * max(SHARD, 4 * largest)
    free = _free()
    text = f"merging layer by layer takes {bytes_text(computing)} to compute and {bytes_text(held)} of the host"
    shown = f"{bytes_text(free)} free on the host"
    on_gpu = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    if on_gpu:
        shown = f"{bytes_text(on_gpu)} free on the GPU, {shown}"
    if computing <= on_gpu and held <= free:
        return torch.device("cuda"), f"{text}; {shown}: merged on the GPU"
    if computing + held <= free:
        return torch.device("cpu"), f"{text}; {shown}: merged on the host"
    raise UserError(f"{text}; {shown}", "merge on a machine with more memory; the adapter can be used as it is")


def _save(model: Any, merged: Merged, dtype: str, folder: Path) -> None:
    """Has Transformers write a model that is not in memory, file by file, as one whose weights were offloaded."""
    kept = kept_in_fp32(model, getattr(torch, dtype))
    cast_parameters((each for name, each in model.named_parameters() if not kept(name)), dtype)
    model.config.use_cache = True
    model.hf_device_map, model._hf_hook = {"": "disk"}, SimpleNamespace(weights_map=merged)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, max_shard_size=SHARD)
    merged.close()
    state_dtype(model.config, getattr(torch, dtype))
    model.config.save_pretrained(folder)


class _Probe:
    """Real rows that logits are compared on.

    Args:
        rows: With `input_ids` and `labels`.
        pad: The token that shorter rows are filled up with.
    """

    def __init__(self, rows: list[dict[str, Any]], pad: int) -> None:
        self._rows, self._pad = rows, pad
        self.tokens = len(rows) * _PROOF_TOKENS

    def logits(self, blockwise: Blockwise, autocast: str | None = None) -> Logits:
        """Those of all rows, in one pass through the model."""
        model, place = blockwise.model, blockwise.place
        ids = [row["input_ids"] for row in self._rows]
        inputs = {"input_ids": _batch(ids, self._pad), "attention_mask": _batch([[1] * len(row) for row in ids], 0)}
        if model.config.is_encoder_decoder:
            ids = [row["labels"] for row in self._rows]
            inputs["labels"] = _batch(ids, IGNORE)
        context = torch.autocast(place.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        with torch.no_grad(), context:
            outputs = model(**{name: each.to(place) for name, each in inputs.items()}, use_cache=False)
        # A model of vectors ends with the outputs of its tokens.
        logits = outputs.logits if "logits" in outputs else outputs.last_hidden_state
        # Of a text there are those of its classes, and none of its tokens.
        ends = [None if logits.dim() == 2 else len(row) for row in ids]
        return [each[:end].float().cpu() for each, end in zip(logits, ends, strict=True)]


def _batch(rows: list[list[int]], fill: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def proof_rows(source: ModelSource, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Real rows of a run's data, held out ones if there are any: `input_ids` and `labels`, of each the last tokens."""
    prepared = prepare(source.recipe, tokenizer, source.stop_tokens(tokenizer), vocab_size=source.vocab_size)
    dataset = prepared.eval if prepared.eval is not None else prepared.train
    rows = itertools.islice(dataset, count)
    return [{key: row[key][-_PROOF_TOKENS:] for key in ("input_ids", "labels")} for row in rows]


def _distance(before: Logits, after: Logits) -> float:
    largest = max(float(one.abs().max()) for one in before)
    return max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True)) / largest


def _require(name: str, distance: float, allowed: float) -> None:
    if not distance <= allowed:  # NaN is not equal to anything.
        raise UserError(
            f"the {name} differs from the adapter: logits by {distance:.2e} of the largest, allowed {allowed:.0e}",
            "nothing was written; keep using the adapter and report this with `toolkit doctor`",
        )
