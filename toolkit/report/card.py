"""The model card beside the trained weights: what they are, how they were made, how to load them.

A card is made to be published, so it holds figures that were measured and settings that were used, and nothing of the
machine: local paths appear by their last name only, samples of the data not at all.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from toolkit.common import compact, duration, perplexity_of, perplexity_text
from toolkit.recipe import Recipe
from toolkit.report.load import Record, number, read_run
from toolkit.report.run_page import percent_change

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|txt|md|arrow|gguf)(\.\w+)?$", re.IGNORECASE)
_OBJECTIVES = {
    "sft": "supervised fine-tuning",
    "language_modelling": "continued pre-training",
    "seq2seq": "encoder-decoder training",
}
_TAGS = {"sft": "sft", "language_modelling": "continued-pretraining", "seq2seq": "seq2seq"}


def write_card(folder: Path, run: Path, recipe: Recipe, base_model: str) -> Path:
    """Writes the model card `README.md`.

    Args:
        folder: Folder of the trained model or adapter, with its tokenizer.
        run: The run folder, for what was measured.
        recipe: What was trained.
        base_model: Hub id, local path or `builtin:` name of the model that training started from.

    Returns:
        Path of the card.
    """
    record = read_run(run)
    parts = [
        f"---\n{yaml.safe_dump(_metadata(recipe, base_model), sort_keys=False, allow_unicode=True)}---",
        f"# {record.name}",
        _description(recipe, base_model),
        _results(record),
        "## Use\n\n" + _usage(folder, record, recipe, base_model),
        "## Training\n\n" + _table([("setting", "value"), *_settings(record, recipe)]),
        _versions(record),
    ]
    path = folder / "README.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def _metadata(recipe: Recipe, base_model: str) -> dict[str, Any]:
    """The YAML head that the Hub reads. No license: that of the base model and the data is not known here."""
    adapter = recipe.method.name == "lora"
    metadata: dict[str, Any] = {}
    if _is_hub_id(base_model):
        metadata["base_model"] = base_model
        metadata["base_model_relation"] = "adapter" if adapter else "finetune"
    metadata["library_name"] = "peft" if adapter else "transformers"
    if recipe.objective != "seq2seq":
        metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = [_method(recipe).lower().replace(" ", "-"), _TAGS[recipe.objective]]
    datasets = list(dict.fromkeys(path for path in _source_paths(recipe) if _is_hub_id(path)))
    if datasets:
        metadata["datasets"] = datasets
    return metadata


def _description(recipe: Recipe, base_model: str) -> str:
    sources = ", ".join(dict.fromkeys(_shown(path) for path in _source_paths(recipe)))
    what = f"A {_method(recipe)} adapter for" if recipe.method.name == "lora" else "A fine-tuned version of"
    return f"{what} {_shown(base_model)}, made by {_OBJECTIVES[recipe.objective]} on {sources}."


def _results(record: Record) -> str:
    if not record.evaluations:
        return ""
    first, last = record.evaluations[0], record.evaluations[-1]
    several = first is not last
    head = (
        ["", f"step {first['step']:,}", f"step {last['step']:,}", "change"]
        if several
        else ["", f"step {last['step']:,}"]
    )
    rows = [tuple(head)]
    measures = (("eval_bleu", "BLEU"), ("eval_chrf", "chrF"), ("eval_exact_match", "exact match"))
    before, after = number(first.get("eval_loss")), number(last.get("eval_loss"))
    if before is not None and after is not None:
        losses = ("loss", f"{before:.4f}", f"{after:.4f}", percent_change(before, after))
        perplexities = ("perplexity", perplexity_text(perplexity_of(before)), perplexity_text(perplexity_of(after)), "")
        rows += [line if several else (line[0], line[2]) for line in (losses, perplexities)]
    for key, title in measures:
        before, after = number(first.get(key)), number(last.get(key))
        if after is not None:
            start = "" if before is None else f"{before:.4g}"
            rows.append((title, start, f"{after:.4g}", "") if several else (title, f"{after:.4g}"))
    held_out = record.audit.eval if record.audit else None
    on = f"On {held_out.rows:,} held-out rows:" if held_out and held_out.rows else "On held-out rows:"
    return f"## Results\n\n{on}\n\n{_table(rows)}"


def _usage(folder: Path, record: Record, recipe: Recipe, base_model: str) -> str:
    """A snippet that runs as it stands inside the folder."""
    kind = "AutoModelForSeq2SeqLM" if recipe.objective == "seq2seq" else "AutoModelForCausalLM"
    trust = ", trust_remote_code=True" if recipe.model.trust_remote_code else ""
    lines = [f"from transformers import {kind}, AutoTokenizer"]
    place = 'folder = "."  # this folder, or its id on the Hub'
    note = ""
    if recipe.method.name == "lora":
        gguf = recipe.model.gguf_file or (Path(recipe.model.path).name if recipe.model.path.endswith(".gguf") else "")
        extra = (f", gguf_file={gguf!r}" if gguf else "") + trust
        lines = ["from peft import PeftConfig, PeftModel", *lines, "", place]
        lines.append("base = PeftConfig.from_pretrained(folder).base_model_name_or_path")
        lines.append(f"model = PeftModel.from_pretrained({kind}.from_pretrained(base{extra}), folder)")
        if not _is_hub_id(base_model):
            note = "The base model was a local one: set `base` to where you keep it.\n\n"
    else:
        lines += ["", place, f"model = {kind}.from_pretrained(folder{trust})"]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained(folder{trust})", ""]
    if _is_chat(folder, record, recipe):
        lines += [
            'messages = [{"role": "user", "content": "Hello!"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines.append('inputs = tokenizer("Once upon a time", return_tensors="pt")')
    lines.append("output = model.generate(**inputs, max_new_tokens=64)[0]")
    answer = "output" if recipe.objective == "seq2seq" else 'output[inputs["input_ids"].shape[1] :]'
    lines.append(f"print(tokenizer.decode({answer}, skip_special_tokens=True))")
    return f"{note}```python\n" + "\n".join(lines) + "\n```"


def _is_chat(folder: Path, record: Record, recipe: Recipe) -> bool:
    """Whether rows were rendered with the chat template: by the audit, else by whether there is one."""
    if record.audit:
        return record.audit.chat_template.needed
    return recipe.objective == "sft" and (folder / "chat_template.jinja").is_file()


def _settings(record: Record, recipe: Recipe) -> list[tuple[str, str]]:
    method, optimizer = recipe.method, recipe.optimizer
    rows = [("method", _method(recipe))]
    if method.name == "lora":
        modules = method.target_modules if isinstance(method.target_modules, str) else ", ".join(method.target_modules)
        rows += [("rank, alpha, dropout", f"{method.r}, {method.lora_alpha:g}, {method.lora_dropout:g}")]
        rows += [("target modules", modules)]
    if counts := record.manifest.parameters:
        rows.append(("trained parameters", f"{compact(counts.trainable)} of {compact(counts.total)}"))
    rows += [
        ("precision", recipe.precision),
        ("optimizer", f"{optimizer.name}, weight decay {optimizer.weight_decay:g}"),
        ("learning rate", f"{optimizer.learning_rate:g}, {recipe.schedule.name} schedule"),
        ("longest sequence", f"{recipe.batch.seq_len:,} tokens{', packed' if recipe.data.packing else ''}"),
    ]
    if batch := record.manifest.batch:
        rows.append(("global batch size", f"{batch.global_batch_size:,} sequences"))
    if record.training:
        last = record.training[-1]
        epoch, tokens = number(last.get("epoch")), number(last.get("tokens"))
        rows.append(("steps", f"{last['step']:,}" + (f" ({epoch:.3g} epochs)" if epoch is not None else "")))
        if tokens is not None:
            rows.append(("tokens", compact(tokens)))
    if record.train_seconds is not None:
        rows.append(("duration", duration(record.train_seconds)))
    return [*rows, ("seed", str(recipe.seed))]


def _versions(record: Record) -> str:
    versions = record.manifest.versions
    if not versions:
        return ""
    return "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in versions.items())


def _method(recipe: Recipe) -> str:
    method = recipe.method
    if method.name == "full":
        return "full fine-tuning"
    name = "DoRA" if method.use_dora else "rsLoRA" if method.use_rslora else "LoRA"
    return {"nf4": f"Q{name}" if name == "LoRA" else f"{name} on 4-bit", "int8": f"{name} on 8-bit"}.get(
        method.quantization, name
    )


def _source_paths(recipe: Recipe) -> list[str]:
    return [source.path for source in recipe.data.training_sources()]


def _is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not _DATA_FILE.search(path) and not Path(path).exists()


def _shown(path: str) -> str:
    """A name that may be published: the hub id, or the last part of anything else."""
    return (
        f"[{path}](https://huggingface.co/{path})"
        if _is_hub_id(path)
        else f"`{Path(path.removeprefix('builtin:')).name}`"
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; the first row is its head."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
