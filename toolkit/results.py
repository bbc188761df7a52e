"""What a training leaves behind: answers before and after, the final model, card, report, and a summary on screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from toolkit.assemble import Training
from toolkit.callbacks import peak_host_bytes
from toolkit.card import write_card
from toolkit.evaluate import answer, as_prompt
from toolkit.facts import BUILTIN_MODELS
from toolkit.folder import now, write_json
from toolkit.forecast import measured
from toolkit.model import restore_config
from toolkit.progress import duration, prompts_before_after, summary
from toolkit.publish import publish
from toolkit.report import write_report


def answer_before(training: Training) -> None:
    """Answers the prompts with the untrained model; the answers of a continued run are read back."""
    if training.leads:
        file = training.folder.path / "samples.json"
        if training.resume_from and file.is_file():
            training.samples = json.loads(file.read_text(encoding="utf-8"))
        else:
            training.samples = [dict(sample) for sample in _prompts(training)][: training.recipe.evaluation.num_prompts]
    if training.all_compute:
        box = [training.samples]
        broadcast_object_list(box)
        training.samples = box[0]
    if all("before" in sample for sample in training.samples):
        return
    if training.leads:
        training.progress.message(f"Answering {len(training.samples)} prompts before training")
    _answer_samples(training, "before")


def _prompts(training: Training) -> list[dict[str, Any]]:
    given = training.recipe.evaluation.prompts
    if not given:
        return list(training.prepared.samples)
    audit, stops = training.prepared.audit, training.stop_token_ids
    return [
        {"prompt": text, "input_ids": as_prompt(training.tokenizer, text, audit, stops), "reference": None}
        for text in given
    ]


def _answer_samples(training: Training, when: str) -> None:
    """The leading process answers; where parameters are sharded all must help it, and give the same answers."""
    if not training.samples or not (training.leads or training.all_compute):
        return
    answers = answer(
        training.module,
        training.tokenizer,
        [sample["input_ids"] for sample in training.samples],
        training.recipe.evaluation.max_new_tokens,
        training.stop_token_ids,
        training.dtypes.autocast,
        device=training.trainer.args.device,
    )
    for sample, text in zip(training.samples, answers, strict=True):
        sample[when] = text
    if training.leads:
        shown = [{key: value for key, value in sample.items() if key != "input_text"} for sample in training.samples]
        write_json(training.folder.path / "samples.json", shown)


def _save_final(training: Training) -> None:
    trainer, recipe = training.trainer, training.recipe
    optimizer = trainer.optimizer
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
    if recipe.method.name == "full":
        restore_config(training.module, recipe)
    publish(trainer, training.folder.final, training.dtypes)
    if training.leads and recipe.method.name == "lora":
        _name_base(training.folder.final / "adapter_config.json", recipe.model.path)


def _name_base(file: Path, path: str) -> None:
    """Says which model an adapter belongs to as the recipe does, not by where this machine keeps it.

    Only in the saved file: while saving, PEFT would look the name up on the hub.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {**config, "base_model_name_or_path": BUILTIN_MODELS.get(path, path)})


def _seconds(training: Training) -> float:
    """Time of training so far, over all the sessions of a run that was continued."""
    return round(training.meter.seconds(), 1) if training.meter else 0.0


def interrupted(training: Training) -> None:
    """Notes where the run stopped and how it goes on."""
    if training.stop:
        training.stop.restore()
    if not training.leads:
        return
    step = training.trainer.state.global_step
    training.folder.update_manifest(status="interrupted", finished=now())
    write_report(training.folder.path)
    training.progress.message(
        f"Stopped at step {step} of {training.length.total_steps}; a checkpoint is saved in {training.folder.path}.\n"
        "The same command continues from there."
    )


def finish(training: Training) -> None:
    """Saves the model, then evaluates what was saved, answers the prompts again, and writes card and report."""
    trainer, folder = training.trainer, training.folder
    _save_final(training)
    if training.stop:
        # From here on nothing can be lost, and Ctrl-C means what it always does.
        training.stop.restore()
    if training.leads:
        folder.update_manifest(status="finished", finished=now(), train_seconds=_seconds(training))
    if training.evaluator:
        training.evaluator.finish(trainer.state.global_step)
    _answer_samples(training, "after")
    if not training.leads:
        return
    folder.update_manifest(finished=now(), train_seconds=_seconds(training), peak_memory_bytes=peak_host_bytes())
    if meter := training.meter:
        tokens = meter.last.get("tokens", 0)
        plan = training.outlook.plan if training.outlook else None
        folder.update_manifest(measured=measured(plan, meter.time_left.measured, _seconds(training), tokens))
    write_card(folder.final, folder.path, training.recipe, training.recipe.model.path)
    report = write_report(folder.path)
    _say_results(training, report)


def _say_results(training: Training, report: Path) -> None:
    folder, evaluator = training.folder, training.evaluator
    if training.samples:
        print("\n" + prompts_before_after(training.samples))
    rows: list[tuple[str, str]] = []
    if evaluator and evaluator.last:
        last = evaluator.last["eval_loss"]
        text = f"{last:.4f} (perplexity {evaluator.last['eval_perplexity']:.2f})"
        if evaluator.first:
            before = evaluator.first["eval_loss"]
            text = f"{before:.4f} -> {text}, {(last - before) / before:+.1%}"
        rows.append(("held-out loss", text))
    if training.meter and training.meter.last:
        rows.append(("training loss", f"{training.meter.last['loss']:.4f}"))
    rows.append(("steps", f"{training.trainer.state.global_step}"))
    rows.append(("time", duration(_seconds(training))))
    rows.append(("peak memory", f"{peak_host_bytes() / 2**30:.2f} GiB (host)"))
    if torch.cuda.is_available():
        rows.append(("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB (GPU)"))
    rows += [("run folder", str(folder.path)), ("model", str(folder.final)), ("report", str(report))]
    print("\n" + summary(rows))
