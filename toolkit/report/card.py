"""The model card beside the trained weights: what they are, how they were made, how to load them.

A card is made to be published, so it holds figures that were measured and settings that were used, and nothing of the
machine: local paths appear by their last name only, samples of the data not at all. `huggingface_hub` writes the
metadata, so that it is what the Hub reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from toolkit.common import compact, concealed, duration, perplexity_of, perplexity_text
from toolkit.data.reading.readers import KINDS
from toolkit.files import write_atomically
from toolkit.recipe import Recipe, model_configs
from toolkit.recipe.config_limits import read_config
from toolkit.recipe.heads import EMBEDDING, OF_TEXTS
from toolkit.recipe.preference import PREFERENCES
from toolkit.report import page
from toolkit.report.class_tables import class_tables
from toolkit.report.load import Record, number, read_run
from toolkit.report.plan_view import energy_text
from toolkit.report.rewards import MARGIN, held_out
from toolkit.report.run_page import percent_change
from toolkit.report.run_view import step_times, token_rates
from toolkit.report.scores import OF_VECTORS, of_tokens
from toolkit.report.serving import on_base, serving, vllm_line
from toolkit.report.teacher import NEARNESS

MERGED = "merged"
"""What a folder holds in which an adapter is merged into its base."""
MERGE_PROOF, EXPORT_PROOF = "merge_proof.json", "export_proof.json"
"""Beside a model that was merged or exported: how near its outputs are to those of the run's model."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE = re.compile(rf"({'|'.join(map(re.escape, [*KINDS, '.gguf']))})(\.\w+)?$", re.IGNORECASE)
_OBJECTIVES = {
    "sft": "supervised fine-tuning",
    "language_modelling": "continued pre-training",
    "seq2seq": "encoder-decoder training",
    "dpo": "direct preference optimisation (DPO)",
    "cpo": "contrastive preference optimisation (CPO)",
    "simpo": "simple preference optimisation (SimPO)",
    "orpo": "odds ratio preference optimisation (ORPO)",
    "kto": "Kahneman-Tversky optimisation (KTO)",
    "grpo": "group relative policy optimisation (GRPO)",
    "rloo": "REINFORCE leave-one-out (RLOO)",
    "distillation": "distillation",
    "reward": "reward modelling",
    "classification": "training to classify texts",
    "token_classification": "training to classify words",
    EMBEDDING: "contrastive training of text embeddings",
}
_TAGS = {"language_modelling": "continued-pretraining", "reward": "reward-model", EMBEDDING: "sentence-transformers"}
_TASKS = {
    "seq2seq": "text2text-generation",
    "token_classification": "token-classification",
    EMBEDDING: "sentence-similarity",
    **dict.fromkeys(OF_TEXTS, "text-classification"),
}
_CLASSES = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "token_classification": "AutoModelForTokenClassification",
    EMBEDDING: "AutoModel",
    **dict.fromkeys(OF_TEXTS, "AutoModelForSequenceClassification"),
}
_METRICS = (
    ("eval_loss", "loss", "loss"),
    ("eval_perplexity", "perplexity", "perplexity"),
    ("eval_accuracy", "accuracy", ""),
    ("eval_macro_f1", "f1", "F1, mean of classes"),
    ("eval_entity_f1", "f1", "F1 of entities"),
    ("eval_kl", "kl", NEARNESS["eval_kl"]),
    ("eval_agreement", "agreement", NEARNESS["eval_agreement"]),
    ("eval_cross_entropy", "cross_entropy", "cross-entropy of the labels"),
    *((key, key.removeprefix("eval_"), title) for key, title in OF_VECTORS.items()),
    ("eval_reward_margin", "reward_margin", "reward margin"),
    ("eval_bleu", "bleu", "BLEU"),
    ("eval_chrf", "chrf", "chrF"),
    ("eval_exact_match", "exact_match", "exact match"),
)
"""Key of an evaluation, the Hub's name of the metric, and ours."""


def _auto_class(folder: Path, recipe: Recipe) -> str:
    """Transformers' class that loads the model, or the base of the adapter."""
    file = folder / "config.json"
    config = read_config(file) if file.is_file() else model_configs.config_of(recipe.model)
    kind = (config or {}).get("model_type")
    if recipe.objective in _CLASSES:
        return _CLASSES[recipe.objective]
    if kind in model_configs.OF_SOUND:
        return "AutoModelForSeq2SeqLM"  # Among these Transformers counts them, though they have no encoder of text.
    return "AutoModelForImageTextToText" if kind in model_configs.OF_IMAGES else "AutoModelForCausalLM"


def write_card(folder: Path, run: Path, recipe: Recipe, base_model: str, form: str | None = None) -> Path:
    """Writes the model card `README.md`.

    Args:
        folder: Folder of the trained model or adapter, with its tokenizer.
        run: The run folder, for what was measured.
        base_model: Hub id, local path or `builtin:` name of the model that training started from.
        form: What was made of the run's model: `MERGED`, or the format in which it was exported.
    """
    record, base_model = read_run(run), concealed(base_model)
    adapter = recipe.method.name == "lora" and form is None
    gguf = recipe.model.gguf_file or (Path(base_model).name if base_model.endswith(".gguf") else "")
    content = page.render(
        "card.md.j2",
        card_data=_metadata(record, recipe, base_model, form).to_yaml(),
        record=record,
        recipe=recipe,
        adapter=adapter,
        description=_description(recipe, base_model, form),
        proof=form and (MERGE_PROOF if form == MERGED else EXPORT_PROOF),
        gguf_file=_is_gguf(form),
        results=_results_table(record),
        held_out_rows=record.audit.eval.rows if record.audit and record.audit.eval else 0,
        base_on_hub=is_hub_id(base_model),
        builtin_base=model_configs.BUILTIN_MODELS.get(base_model),
        gguf=f", gguf_file={gguf!r}" if gguf else "",
        # Transformers looks for such a file in a folder.
        gguf_path=adapter and base_model.endswith(".gguf"),
        chat=_is_chat(folder, record, recipe),
        auto_class=_auto_class(folder, recipe),
        labels=record.audit.classes if record.audit else [],
        classes=class_tables(record.result)[:-1] if recipe.classifies else [],
        served=_served(record, recipe, base_model, form),
        settings=_settings(record, recipe),
    )
    path = folder / "README.md"
    write_atomically(path, str(ModelCard(content)))
    return path


def _is_gguf(form: str | None) -> bool:
    return bool(form and form.startswith("gguf"))


def _metadata(record: Record, recipe: Recipe, base_model: str, form: str | None) -> ModelCardData:
    """What the Hub reads. No license: that of the base model and the data is not known here."""
    adapter = recipe.method.name == "lora" and form is None
    sources = list(dict.fromkeys(_source_paths(recipe)))
    datasets = [path for path in sources if is_hub_id(path)]
    task = _TASKS.get(recipe.objective, "text-generation")
    results = [
        EvalResult(
            task_type=task,
            # Of several sources together there is no id.
            dataset_type=datasets[0] if datasets == sources[:1] == sources else "custom",
            dataset_name="held-out rows",
            metric_type=metric,
            metric_value=round(value, 4),
        )
        for metric, _, _, value in _results(record)
        if value is not None and math.isfinite(value)
    ]
    on_hub = is_hub_id(base_model)
    return ModelCardData(
        base_model=base_model if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        library_name=None if _is_gguf(form) else "peft" if adapter else "transformers",
        pipeline_tag=None if recipe.objective == "seq2seq" else task,
        tags=[_method(recipe).lower().replace(" ", "-"), _TAGS.get(recipe.objective, recipe.objective)],
        datasets=datasets or None,
        eval_results=results or None,
        model_name=record.name if results else None,
    )


def _description(recipe: Recipe, base_model: str, form: str | None) -> str:
    adapter = recipe.method.name == "lora"
    sources = ", ".join(dict.fromkeys(_shown(path) for path in _source_paths(recipe)))
    what = f"A {_method(recipe)} adapter for" if adapter and form is None else "A fine-tuned version of"
    teacher = recipe.distillation.teacher if recipe.distills else None
    learnt_from = f" from {_shown(concealed(teacher.path))}" if teacher else ""
    text = f"{what} {_shown(base_model)}, made by {_OBJECTIVES[recipe.objective]}{learnt_from} on {sources}."
    if adapter and form:
        text += f" The {_method(recipe)} adapter that was trained is merged into it."
    if form and form != MERGED:
        text += f" It was exported as {form}."
    return text


def _results(record: Record) -> list[tuple[str, str, float | None, float | None]]:
    """Metric as the Hub calls it, its title, its value in the first and in the last evaluation; the loss first."""
    if record.result is None:
        return []
    if rewards := list(held_out(record.result)):
        before = {name: value for name, value, _ in held_out(record.evaluations[0])}
        return [
            ("reward" + (name and f"_{name}"), f"reward, {name}" if name else "reward", before.get(name), value)
            for name, value, _ in rewards
        ]
    first, last = (
        {key: number(value) for key, value in row.items()}
        | ({"eval_perplexity": _perplexity(row)} if of_tokens(row) else {})
        for row in (record.evaluations[0], record.result)
    )
    return [
        (metric, title or record.accuracy_of, first.get(key), last.get(key))
        for key, metric, title in _METRICS
        if last.get(key) is not None
    ]


def _perplexity(row: dict[str, Any]) -> float | None:
    loss = number(row["eval_loss"])
    return None if loss is None else perplexity_of(loss)


def _results_table(record: Record) -> list[tuple[str, ...]]:
    """The table of results with its head; empty where nothing was evaluated."""
    if record.result is None:
        return []
    first, last = record.evaluations[0], record.result
    rows: list[tuple[str, ...]] = [("", f"step {first['step']:,}", f"step {last['step']:,}", "change")]
    forms = {"loss": "{:.4f}".format, "perplexity": perplexity_text}
    for metric, title, before, after in _results(record):
        texts = ["" if value is None else forms.get(metric, "{:.4g}".format)(value) for value in (before, after)]
        margins = [number(row.get(f"eval_{metric}{MARGIN}")) for row in (first, last)]
        if None not in margins:  # Rewards have texts of their own.
            texts = [f"{text} ± {margin:.2g}" if text else "" for text, margin in zip(texts, margins, strict=True)]
        change = percent_change(before, after) if metric == "loss" and before is not None and after is not None else ""
        rows.append((title, *texts, change))
    return rows if first is not last else [(row[0], row[2]) for row in rows]


def _is_chat(folder: Path, record: Record, recipe: Recipe) -> bool:
    """Whether rows were rendered with the chat template: by the audit, else by whether there is one."""
    if record.audit:
        return record.audit.chat_template.needed
    return recipe.rows_for in ("sft", *PREFERENCES) and (folder / "chat_template.jinja").is_file()


def _served(record: Record, recipe: Recipe, base_model: str, form: str | None) -> list[str]:
    """The lines that serve the folder of the card; none where that takes what is not published."""
    if recipe.method.name == "full" or form:
        exported = None if form == MERGED else form
        return [line for _, line in serving(record.folder, recipe, Path("."), record.name, exported)]
    if recipe.headed or recipe.objective == "seq2seq":
        return []
    return [vllm_line(recipe, ".", record.name)] if on_base(recipe) and is_hub_id(base_model) else []


def _settings(record: Record, recipe: Recipe) -> list[tuple[str, str]]:
    method, optimizer = recipe.method, recipe.optimizer
    rows = [("method", _method(recipe))]
    if method.name == "lora":
        modules = method.target_modules if isinstance(method.target_modules, str) else ", ".join(method.target_modules)
        rows += [("rank, alpha, dropout", f"{method.r}, {method.lora_alpha:g}, {method.lora_dropout:g}")]
        rows += [("target modules", modules)]
    if stages := record.manifest.started_from:
        rows.append(("started from", ", then ".join(stages)))
    if counts := record.manifest.parameters:
        rows.append(("trained parameters", f"{compact(counts.trainable)} of {compact(counts.total)}"))
        rows += [("shares", counts.shares)] if counts.shares else []
    rows += [
        ("precision", recipe.precision),
        ("optimizer", f"{optimizer.name}, weight decay {optimizer.weight_decay:g}"),
        ("learning rate", f"{optimizer.learning_rate:g}, {recipe.schedule.name} schedule"),
        ("longest sequence", f"{recipe.batch.seq_len:,} tokens{', packed' if recipe.data.packing else ''}"),
    ]
    if recipe.prefers:
        rows.append(("preference", _preference(recipe)))
    if recipe.embeds:
        rows.append(("embedding", _embedding(recipe, record.manifest.chosen)))
    if recipe.reinforces:
        rewards = ", ".join(f"{name} ({weight:g})" for name, weight in recipe.rewards.weights().items())
        rows += [("rewards and their weights", rewards), ("policy", _policy(recipe, record.manifest.server))]
    if recipe.distills:
        rows.append(("distillation", _distillation(recipe)))
    if batch := record.manifest.batch:
        what = (
            "pairs"
            if recipe.pairs
            else "rows of texts"
            if recipe.embeds
            else "prompts"
            if recipe.reinforces
            else "sequences"
        )
        rows.append(("global batch size", f"{batch.global_batch_size:,} {what}"))
    if record.training:
        last = record.training[-1]
        epoch, tokens = number(last.get("epoch")), number(last.get("tokens"))
        rows.append(("steps", f"{last['step']:,}" + (f" ({epoch:.3g} epochs)" if epoch is not None else "")))
        if tokens is not None:
            rows.append(("tokens", compact(tokens)))
    if rates := token_rates(record):
        rows.append(("speed", rates))
    if speed := record.speed:
        rows.append(("time of a step", step_times(speed)))
    if record.manifest.published:
        rows.append(("published model", record.manifest.published.what))
    if record.train_seconds is not None:
        rows.append(("duration", duration(record.train_seconds)))
    measured, plan = record.manifest.measured, record.manifest.plan
    if measured and measured.energy_kwh is not None:
        limit = plan.work.energy_kwh if plan else None
        planned = f" (planned {energy_text(limit)}, at the devices' power limit)" if limit is not None else ""
        rows.append(("energy of the devices", f"{energy_text(measured.energy_kwh)} measured{planned}"))
    return [*rows, ("seed", str(recipe.seed))]


def _embedding(recipe: Recipe, chosen: Mapping[str, str]) -> str:
    """The loss of vectors with what it was set to."""
    settings, pooling = recipe.embedding, chosen.get("embedding.pooling", recipe.embedding.pooling)
    parts = [f"loss {settings.loss}", f"temperature {settings.temperature:g}", f"pooling {pooling}"]
    parts += [f"{settings.negatives} hard negatives"] if settings.negatives else []
    parts += [f"dims {', '.join(map(str, settings.dims))}"] if settings.dims else []
    return ", ".join(parts)


def _preference(recipe: Recipe) -> str:
    """The objective with its loss and what it was set to."""
    settings = recipe.preference
    if recipe.headed:
        given = [f"{name} {value:g}" for name in ("margin", "center_rewards") if (value := getattr(settings, name))]
        return ", ".join(["reward", *given])
    parts = [f"loss {settings.loss}"] if recipe.objective == "dpo" else []
    parts.append(f"beta {settings.beta:g}")
    shown = ("label_smoothing", "sft_weight", *(("margin",) if recipe.objective == "simpo" else ()))
    parts += [f"{name} {value:g}" for name in shown if (value := getattr(settings, name))]
    kinds = ("desirable_weight", "undesirable_weight") if recipe.judges else ()
    parts += [f"{name} {getattr(settings, name):g}" for name in kinds]
    parts += ["per token"] if settings.length_normalized else []
    return f"{recipe.objective}, {', '.join(parts)}"


def _policy(recipe: Recipe, server: Mapping[str, str]) -> str:
    """How answers were drawn and learnt from.

    Args:
        server: What is known of the one that drew them.
    """
    asked, settings = recipe.rollout, recipe.policy
    parts = [f"{asked.num_generations} answers to a prompt, of up to {asked.max_completion_tokens:,} tokens"]
    parts.append(f"temperature {asked.temperature:g}" + (f", top-p {asked.top_p:g}" if asked.top_p < 1 else ""))
    if recipe.objective == "grpo":
        parts.append(f"loss {settings.loss}, advantages scaled by {settings.scale_rewards}")
    low, high = settings.bounds
    parts.append(f"beta {settings.beta:g}, ratios clipped to {low:g} … {high:g}")
    parts += [f"{settings.num_iterations} steps on each rollout"] if settings.num_iterations > 1 else []
    if recipe.rollout.server:
        parts.append(f"generated by vLLM {server.get('vllm', '')}, weights up to {settings.server_cap:g}")
    return f"{recipe.objective}, {'; '.join(parts)}"


def _distillation(recipe: Recipe) -> str:
    """From whom, and what, was learnt."""
    settings = recipe.distillation
    teacher = settings.teacher
    assert teacher is not None
    stored = f" in {teacher.quantization}" if teacher.quantization != "none" else ""
    parts = [f"from {_shown(concealed(teacher.path))}{stored}", f"beta {settings.beta:g}"]
    parts.append(f"temperature {settings.temperature:g}")
    parts += [f"cross-entropy {settings.ce_share:.0%} of the loss"] if settings.ce_share else []
    if settings.on_policy:
        asked = recipe.rollout
        drawn = f"up to {asked.max_completion_tokens:,} tokens at temperature {asked.temperature:g}"
        drawn += f", top-p {asked.top_p:g}" if asked.top_p < 1 else ""
        parts.append(f"{settings.on_policy:.0%} of the answers the student's own, of {drawn}")
    return ", ".join(parts)


def _method(recipe: Recipe) -> str:
    method = recipe.method
    if method.name == "full":
        return "full fine-tuning"
    name = "DoRA" if method.use_dora else "rsLoRA" if method.use_rslora else "LoRA"
    return {
        "nf4": f"Q{name}" if name == "LoRA" else f"{name} on 4-bit",
        "int8": f"{name} on 8-bit",
        "fp8": f"{name} on fp8",
        "int4": f"{name} on int4",
    }.get(method.quantization, name)


def _source_paths(recipe: Recipe) -> list[str]:
    return [concealed(source.path) for source in recipe.data.training_sources()]


def is_hub_id(path: str) -> bool:
    return bool(_HUB_ID.fullmatch(path)) and not _FILE.search(path) and not Path(path).exists()


def _shown(path: str) -> str:
    """A name that may be published: the hub id, or the last part of anything else."""
    return (
        f"[{path}](https://huggingface.co/{path})"
        if is_hub_id(path)
        else f"`{Path(path.removeprefix('builtin:')).name}`"
    )
