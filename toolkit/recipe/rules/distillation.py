"""Rules on students that learn from a teacher."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.recipe import model_configs
from toolkit.recipe.distillation import DISTILLATION
from toolkit.recipe.errors import Rule
from toolkit.recipe.rules.inputs import GGUF_PART, is_gguf_part, is_local, no_folder
from toolkit.recipe.schema import Model, Recipe
from toolkit.recipe.teaching import of_teacher

_TEACHER = "distillation.teacher"


def distillation_keys(recipe: Recipe) -> Iterable[str]:
    """Keys of the section that are set."""
    return [f"distillation.{key}" for key in recipe.distillation.changed()]


def _taught(recipe: Recipe) -> Model | None:
    """The teacher as a model, where the recipe has one and reads it."""
    teaches = of_teacher(recipe)
    return teaches.model if teaches else None


def _of_teacher(path: str, broken: Callable[[Model, Recipe], object], why: str, change: str) -> Rule:
    """What is wrong with a teacher."""

    def is_broken(recipe: Recipe) -> bool:
        model = _taught(recipe)
        return model is not None and bool(broken(model, recipe))

    return Rule(path, lambda r, _: is_broken(r), why, change)


def _own(path: str, broken: Callable[[Recipe], object], why: str, change: str) -> Rule:
    """What does not go with answers that the student writes itself."""
    return Rule(
        path,
        lambda r, _: r.on_policy and bool(broken(r)),
        f"{why}, and with distillation.on_policy the student writes answers",
        change if path.startswith("rollout.") else f"{change}, or set distillation.on_policy=0",
    )


def _config(model: Model) -> dict[str, Any]:
    return model_configs.config_of(model) or {}


def tokens_apart(recipe: Recipe) -> Sequence[str]:
    """Tokens that student and teacher do not share, as far as both tokenizers are on this disk."""
    models = (recipe.model, model) if (model := _taught(recipe)) else ()
    files = [file for each in models if (file := model_configs.tokenizer_file(each))]
    return _apart(*((file, file.stat().st_mtime_ns) for file in files)) if len(files) == 2 else ()


@functools.lru_cache(8)
def _apart(student: tuple[Path, int], teacher: tuple[Path, int]) -> tuple[str, ...]:
    """A plan asks for the same two many times; they may have 150,000 tokens each."""
    both = [model_configs.vocabulary(*each) for each in (student, teacher)]
    return tuple(model_configs.apart(*both)) if all(both) else ()


def _positions(recipe: Recipe) -> int | None:
    model = _taught(recipe)
    return model_configs.max_positions(_config(model)) if model else None


def _is_itself(recipe: Recipe) -> bool:
    """Whether the student begins as what it is to learn."""
    model, method = _taught(recipe), recipe.method
    teacher = recipe.distillation.teacher
    same = model and (model.path, model.revision) == (recipe.model.path, recipe.model.revision)
    return bool(same and teacher and teacher.quantization == method.quantization and not recipe.model.adapter)


def distillation_figures(recipe: Recipe) -> dict[str, Any]:
    """What the texts of these rules may name in braces."""
    apart = tokens_apart(recipe) if recipe.distills else []
    model = _taught(recipe)
    return {
        "distillation_keys": ", ".join(distillation_keys(recipe)),
        "tokens_apart": f"{len(apart):,} tokens are not the same, such as {apart[0]!r}" if apart else "",
        "teacher_positions": _positions(recipe) if recipe.distills else None,
        "teacher_type": model_configs.text_config(_config(model)).get("model_type") if model else None,
    }


DISTILLATION_RULES = {
    "distillation-objective": Rule(
        "distillation",
        lambda r, _: not r.distills and r.distillation.changed(),
        "objective {r.objective} learns from no teacher",
        f"remove {{distillation_keys}}, or set objective={DISTILLATION}",
        keys=distillation_keys,
    ),
    "teacher-none": Rule(
        _TEACHER,
        lambda r, _: r.distills and r.distillation.teacher is None,
        "nothing says which model is learnt from",
        f"name one with the same tokenizer, e.g. {_TEACHER}.path=Qwen/Qwen3-8B for Qwen3-0.6B",
    ),
    "teacher-no-folder": _of_teacher(
        f"{_TEACHER}.path",
        lambda model, _: no_folder(model.path),
        "there is no such folder or file",
        f"set {_TEACHER}.path to a folder with config.json, a GGUF file, or the id of a model on the hub",
    ),
    "teacher-gguf-part": _of_teacher(
        f"{_TEACHER}.path",
        lambda model, _: is_gguf_part(model.path),
        GGUF_PART,
        f"join them with `llama-gguf-split --merge FIRST WHOLE`, and set {_TEACHER}.path to that",
    ),
    "teacher-is-adapter": _of_teacher(
        f"{_TEACHER}.path",
        lambda model, _: Path(model.path, "adapter_config.json").is_file(),
        "is an adapter, not a whole model",
        f"merge it first with toolkit merge, and set {_TEACHER}.path to the merged folder",
    ),
    "teacher-revision-local": _of_teacher(
        f"{_TEACHER}.revision",
        lambda model, _: model.revision is not None and is_local(model),
        "only models on the hub have revisions",
        f"remove {_TEACHER}.revision",
    ),
    "teacher-code-unpinned": _of_teacher(
        f"{_TEACHER}.trust_remote_code",
        lambda model, _: (
            model.trust_remote_code and not is_local(model) and not re.fullmatch("[0-9a-f]{40}", model.revision or "")
        ),
        "code of the teacher's repository would run in whatever version it has that day",
        f"set {_TEACHER}.revision to the full commit (40 digits) whose code was read, or trust_remote_code to false",
    ),
    "teacher-architecture": _of_teacher(
        f"{_TEACHER}.path",
        lambda model, _: (
            model_configs.is_encoder_decoder(config := _config(model)) or model_configs.causal_key(config) is not None
        ),
        "a {teacher_type} does not predict the next token of a text from those before it",
        f"set {_TEACHER}.path to a decoder",
    ),
    "teacher-offload-quantized": Rule(
        f"{_TEACHER}.offload",
        lambda r, _: (
            (teacher := r.distillation.teacher) is not None and teacher.offload and teacher.quantization != "none"
        ),
        "quantized weights stay on the device",
        f"set {_TEACHER}.offload=false or {_TEACHER}.quantization=none",
    ),
    "teacher-positions": Rule(
        "batch.seq_len",
        lambda r, _: r.distills and (_positions(r) or r.batch.seq_len) < r.batch.seq_len,
        "the teacher has only {teacher_positions} positions",
        "set batch.seq_len={teacher_positions} or less",
    ),
    "teacher-vocabulary": _of_teacher(
        f"{_TEACHER}.path",
        lambda _, recipe: not recipe.model.new_tokens and tokens_apart(recipe),
        "has another tokenizer than the student: {tokens_apart}",
        f"set {_TEACHER}.path to a model of the student's family, or model.path to one of the teacher's",
    ),
    "teacher-new-tokens": _of_teacher(
        "model.new_tokens",
        lambda _, recipe: recipe.model.new_tokens,
        "the teacher does not know them, and would be asked for their likelihood",
        "remove model.new_tokens",
    ),
    "teacher-itself": Rule(
        f"{_TEACHER}.path",
        lambda r, _: r.distills and _is_itself(r),
        "is what the student begins as, so that there is nothing to learn of it",
        f"set {_TEACHER}.path to a larger model, or method=qlora to recover what a quantized base has lost",
        warns=True,
    ),
    "on-policy-prompts": _own(
        "data.train_on",
        lambda r: r.data.train_on == "all",
        "all tokens are trained, so that nothing says where a prompt ends",
        "remove data.train_on",
    ),
    "on-policy-packing": _own(
        "data.packing",
        lambda r: r.data.packing,
        "rows are packed by the lengths of the answers that are given",
        "set data.packing=false",
    ),
    "on-policy-streaming": _own(
        "data.streaming",
        lambda r: r.data.streaming,
        "micro-batches are made of rows whose prompts are not known before",
        "set data.streaming=false",
    ),
    "on-policy-generations": _own(
        "rollout.num_generations",
        lambda r: "num_generations" in r.rollout.changed(),
        "a row has one answer",
        "remove rollout.num_generations",
    ),
    "on-policy-system": _own(
        "rollout.system",
        lambda r: r.rollout.system is not None,
        "rows have the system messages that they are to be learnt with",
        "remove rollout.system",
    ),
    "on-policy-server": _own(
        "rollout.server",
        lambda r: r.rollout.server,
        "servers answer for objectives with rewards alone",
        "remove rollout.server",
    ),
    "on-policy-cross-entropy": Rule(
        "distillation.ce_share",
        lambda r, _: r.on_policy and r.distillation.on_policy == 1 and r.distillation.ce_share,
        "to predict the tokens that it has drawn itself teaches a student nothing, and no other tokens are left",
        "set distillation.ce_share=0, or distillation.on_policy below 1",
        warns=True,
    ),
    **{
        f"distillation-{way}": Rule(
            f"parallel.{way}",
            lambda r, _, way=way: r.distills and getattr(r.parallel, way) > 1,  # type: ignore[misc]
            "every process asks the whole teacher of whole rows, and would have a part of the student's",
            f"remove parallel.{way}: strategy.name=zero3 and fsdp shard larger students",
        )
        for way in ("sequence", "context", "tensor", "expert", "pipeline")
    },
}
