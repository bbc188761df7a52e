"""The section of a recipe for distillation: the teacher, and what a student learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toolkit.recipe.base import Place, Section

DISTILLATION = "distillation"
"""The objective whose model, the student, learns the next-token distribution of another one, its teacher."""


class Teacher(Section):
    """The teacher model. It is frozen, and every process holds all of it."""

    main_key: ClassVar[str | None] = "path"

    path: Place
    """Hub id, local folder, GGUF file, `builtin:smollm2-135m-instruct`, or the folder of a run that trained a whole
    model. Its tokenizer must be the student's."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub; by default its main branch."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which its weights are stored and it computes; `auto` is that of `precision`."""
    quantization: Literal["none", "nf4", "int8", "fp8", "int4"] = "none"
    """How its weights are stored; values as in `method.quantization`."""
    double_quantization: bool = True
    """Whether `quantization: nf4` quantizes its constants too."""
    offload: bool = False
    """Whether its layers are kept in host memory and each is copied to the GPU when it computes. All of its weights are
    copied for every micro-batch, so this is for teachers that fit in no other way, and for large micro-batches."""
    trust_remote_code: bool = False
    """Whether Python code from its repository may run; for a repository on the hub, only at the full commit given in
    `revision`."""


class Distillation(Section):
    """What a student learns from a teacher, for `objective: distillation`: for each trained token the divergence
    between the two models' next-token distributions, and optionally the token itself."""

    teacher: Teacher | None = None
    """The teacher model, e.g. `{path: Qwen/Qwen3-8B, quantization: nf4}`."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Which divergence: 0 is the forward Kullback-Leibler divergence, with which the student covers everything that the
    teacher may say; 1 the reverse one, with which it keeps to what the teacher is likely to say (MiniLLM); between them
    the generalised Jensen-Shannon divergence, whose mixture has this share of the teacher (GKD, arXiv:2306.13649)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature by which the logits of both models are divided; as in GKD and TRL, the loss is not multiplied by its
    square."""
    ce_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the loss that is the cross-entropy of the trained tokens; the rest is the divergence."""
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of rows whose last answer the student generates itself, as `rollout` says, before it learns from them:
    GKD's `lmbda`. Evaluations use the given answers."""


def published(path: str) -> str:
    """The folder of a run's trained model, given that of the run; any other path as it is."""
    run, final = Path(path), Path(path) / "final"
    return str(final) if (run / "manifest.json").is_file() and final.is_dir() else path
