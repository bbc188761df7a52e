"""The section of a recipe that says from which model another one learns, and what it learns of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toolkit.recipe.base import Place, Section

DISTILLATION = "distillation"
"""The objective whose model, the student, learns the next-token distribution of another one, its teacher."""


class Teacher(Section):
    """The model that is learnt from. It is frozen, and every process holds all of it."""

    main_key: ClassVar[str | None] = "path"

    path: Place
    """Hub id, local folder, GGUF file, `builtin:smollm2-135m-instruct`, or the folder of a run that trained a whole
    model. Its tokenizer must be the student's."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub; by default its main branch."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type in which its weights are stored and it computes; `auto` is that of `precision`."""
    quantization: Literal["none", "nf4", "int8", "fp8", "int4"] = "none"
    """How its weights are stored, as `method.quantization` says it."""
    double_quantization: bool = True
    """Whether `quantization: nf4` quantizes its constants too."""
    offload: bool = False
    """Whether its layers wait in the host's memory and each comes to the GPU when it computes: all its weights cross
    the bus for every micro-batch, so this is for teachers that fit in no other way, and for large micro-batches."""
    trust_remote_code: bool = False
    """Whether Python code from its repository may run; of one on the hub only at the full commit in `revision`."""


class Distillation(Section):
    """What a student learns from a teacher, for `objective: distillation`: of each trained token a divergence of both
    models' next-token distributions, and as a share of the loss the token itself."""

    teacher: Teacher | None = None
    """The model that is learnt from, e.g. `{path: Qwen/Qwen3-8B, quantization: nf4}`."""
    beta: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Which divergence: 0 the forward Kullback-Leibler divergence, which has the student cover all that the teacher may
    say; 1 the reverse one, which has it keep to what the teacher is likely to say (MiniLLM); between them the
    generalised Jensen-Shannon divergence, whose mixture has this share of the teacher (GKD, arXiv 2306.13649)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """By what the logits of both models are divided; the loss is not multiplied by its square, as in GKD and TRL."""
    ce_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the loss that is the ordinary cross-entropy of the trained tokens; the rest is the divergence."""
    on_policy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of rows whose last answer the student writes itself, as `rollout` says, before it learns from
    them: GKD's `lmbda`. Evaluations keep to given answers."""


def published(path: str) -> str:
    """The folder of a run's trained model, given that of the run; any other path as it is."""
    run, final = Path(path), Path(path) / "final"
    return str(final) if (run / "manifest.json").is_file() and final.is_dir() else path
