"""What `auto` stands for where a model has code of its own, of which a config says nothing: a tiny copy is asked."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from toolkit.common import in_a_line
from toolkit.data.batching.collate import Collator, isolates
from toolkit.distributed.engines import teacher_dtype
from toolkit.models import device
from toolkit.models.attention import attention_kernels, backends
from toolkit.models.heads import auto_class
from toolkit.models.load import ModelSource
from toolkit.models.tiny import tiny_model

_log = logging.getLogger(__name__)
_FLAT = Collator(0, "flat")


def resolve(
    source: ModelSource, compute: str, kernels: Mapping[str, str], teacher: ModelSource | None = None
) -> tuple[str, bool]:
    """The backend that will run, see `backends.resolve`; of those that `auto` may take, one that the model's own code
    computes right, and its teacher's. And whether a plan has to be told: where such code refused another, which its
    config does not say, and of a package, which may not be where plans are for.

    Args:
        compute: Name of the compute dtype, e.g. `bfloat16`.
        kernels: See `attention_kernels.available`.

    Raises:
        UserError: If none can run, or not the one that is asked for.
    """
    recipe, config, refused = source.recipe, source.config.to_dict(), False
    # What is asked for by name is tried by the run itself, on its device.
    asked = [each for each in (source, teacher) if each and recipe.model.attention == "auto"]
    unfit: dict[str, str] = {}
    if teacher:
        unfit = backends.unfit_to_teach(teacher.config.to_dict(), teacher_dtype(teacher.recipe), device.kind())
    while True:
        backend = backends.resolve(
            recipe.model.attention, config, compute, kernels, recipe.parallel.shares_by, recipe.headed, unfit
        )
        why = next(filter(None, (_refusal(each, backend) for each in asked)), "")
        if not why:
            return backend, refused or backend not in backends.on_device(device.kind(), device.capability(), compute)
        _log.debug("attention %s: %s", backend, why)
        kernels, refused = {**kernels, backend: why}, True


def with_mask(source: ModelSource) -> str:
    """The backend for generation, see `backends.with_mask`, which the model's own code has, too."""
    backend = backends.with_mask(source.config.to_dict())
    return "eager" if _refusal(source, backend) else backend


def _refusal(source: ModelSource, backend: str) -> str:
    """Why a model's own code does not compute with a backend; empty if it does, and of models without such code."""
    recipe, kind = source.recipe, auto_class(source.recipe.objective).__name__
    own = recipe.model.trust_remote_code and kind in (getattr(source.config, "auto_map", None) or {})
    if not own or backend == "eager":
        return ""
    try:
        tiny_model(source.config, recipe.objective, trust_remote_code=True)
    except Exception:  # Sizes that do not fit together; it is asked itself then.
        return ""
    flat = backend in backends.VARLEN
    # All of these are told the same, and this one runs on CPUs.
    asked = "torch_varlen" if flat else backend
    attention_kernels.prepare(asked, recipe)
    try:
        model = tiny_model(source.config, recipe.objective, True, backends.IMPLEMENTATIONS[asked])
        if not flat or isolates(model, _FLAT):
            return ""
    except Exception as error:  # Its own code may raise anything.
        return f"the model's own code does not take it: {in_a_line(error)}"
    return "the model's own code does not read where documents begin"
