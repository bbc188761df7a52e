"""What a model says before its first step, kept by all that it follows from: runs that begin alike ask it once.

Held-out loss and answers of the untrained model are a good third of the time to a short run's first step, and those of
a sweep's runs are all the same. The cache names them by a hash of weights, rows, settings, versions and device, so that
nothing is taken that would be computed otherwise.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

import toolkit
from toolkit.cache import cache_dir, find, keep
from toolkit.common import content_hash
from toolkit.data.reward_files import file_hashes
from toolkit.models import device
from toolkit.train.evaluation.evaluate import Evaluated, before_training, evaluate, session_answers
from toolkit.train.session import Session

_FORMAT = 2
"""Raise where the same untrained model would say something else."""
_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes")
_WORTH_KEEPING = 1.0
"""Seconds below which it is rather asked again."""
_IN_OTHER_WORDS = {"model", "method", "data", "evaluation", "batch", "compile", "seed"}
_OF_TRAINING = {"optimizer", "schedule", "checkpoint", "activation_checkpointing"}
_OF_TRAINING |= {"description", "logging", "output", "faults"}
"""Sections of a recipe that leave the untrained model as it is."""
_AS_IT_IS = ("default", "orthogonal", "gaussian")
"""Ways in which adapters begin by adding nothing."""


def evaluate_untrained(session: Session) -> Evaluated:
    """An evaluation before the first step, on all processes; see `evaluate`."""
    return Evaluated(*_kept(session, "evaluation", lambda: evaluate(session), together=True))


def untrained_answers(session: Session, prompts: list[list[int]], together: bool) -> list[str]:
    """Answers before the first step.

    Args:
        prompts: Token ids, see `evaluate.answer`.
        together: Whether all processes call this, or the first one alone.
    """
    return list(_kept(session, f"answers to {prompts}", lambda: session_answers(session, prompts), together))


def _kept(session: Session, what: str, compute: Callable[[], Any], together: bool) -> Any:
    """From the cache, or computed and, where that took a while, put there."""
    file = _file(session, what) if session.leads else None
    found = _read(file) if file else None
    if together:
        (found,) = broadcast_object_list([found])
    if found is not None:
        return found
    started = time.monotonic()
    with before_training(session):
        said = compute()
    if file and time.monotonic() - started >= _WORTH_KEEPING:
        with contextlib.suppress(OSError):  # Another run asks again.
            keep(file, json.dumps(said))
    return said


def _file(session: Session, what: str) -> Path | None:
    key = _key(session, what)
    return cache_dir() / "untrained" / f"{key}.json" if key else None


def _read(file: Path) -> Any:
    try:
        return json.loads(find(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def beginning(session: Session) -> dict[str, Any] | None:
    """What the untrained model's numbers follow from, beside rows; None where its weights have no hash yet, for which
    large ones take longer than an evaluation."""
    recipe, method = session.recipe, session.recipe.method
    if session.hashed:
        concurrent.futures.wait([session.hashed], _WORTH_KEEPING)
    hashes = session.folder.manifest().hashes
    if "model" not in hashes:
        return None
    adds = method.use_dora or method.modules_to_save or recipe.model.new_tokens
    plain = method.name == "lora" and method.init_lora_weights in _AS_IT_IS and not adds
    known = (plain or method.name == "full") and not recipe.headed
    return {
        "weights": [hashes["model"], hashes.get("adapter")],
        "model": recipe.model.model_dump(mode="json", exclude={"path", "adapter"}),
        # Of trained weights forward passes see other types than of frozen ones.
        "dtypes": [dataclasses.asdict(session.dtypes), method.name, recipe.precision, recipe.tf32],
        "attention": session.attention,
        "quantization": [method.quantization, method.double_quantization],
        # What begins at random, or by a part of the base.
        "begins": None if known else [method.model_dump(mode="json"), recipe.seed],
    }


def _key(session: Session, what: str) -> str:
    """A hash of all that is said follows from; empty where it is not known."""
    if (begins := beginning(session)) is None:
        return ""
    recipe, layout = session.recipe, session.layout
    content = begins | {
        "what": what,
        "rows": [session.prepared.fingerprint, recipe.data.packing],
        "stops": sorted(session.stop_token_ids),
        "evaluation": recipe.evaluation.model_dump(mode="json", exclude={"at_start", "every_steps", "prompts"}),
        # Sums are rounded otherwise in other batches, on other processes and by other kernels.
        "batches": [layout.micro_batch_size, session.world.world_size],
        **({"vectors": [session.trainer.pooling, session.trainer.group]} if recipe.embeds else {}),
        "compiled": session.compiled is not None,
        "device": _device(),
        "teacher": session.folder.manifest().hashes.get("teacher"),
        "rewards": file_hashes(recipe.rewards) if recipe.reinforces else {},
        "versions": [_FORMAT, toolkit.__version__, *(importlib.metadata.version(each) for each in _LIBRARIES)],
        "recipe": recipe.model_dump(mode="json", exclude=_IN_OTHER_WORDS | _OF_TRAINING),
    }
    return content_hash(content)[:32]


def _device() -> list[Any]:
    if device.kind() != "cpu":
        return [torch.cuda.get_device_name()]
    return [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
