"""What all processes of a training do alike: as the plan of the first one says, and where each of them can."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch

from toolkit.common import UserError
from toolkit.data.statistics import DataStatistics
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import BatchLayout, batch_layout
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.distributed.stages import cut
from toolkit.models import compilers, device, liger_kernels, reach
from toolkit.models.attention import varlen, varlen_trials
from toolkit.models.compiled_layers import CompiledLayers
from toolkit.models.load import ModelSource
from toolkit.models.parallel.pipeline import Split
from toolkit.models.reach import Reach
from toolkit.planner.kernels import EAGER, UNCOMPILED
from toolkit.planner.plan import Plan
from toolkit.recipe import Loaded, Recipe
from toolkit.report.terminal import Progress
from toolkit.train.plan_guard import PlanGuard

_log = logging.getLogger("toolkit.train")


def decided(
    loaded: Loaded, layout: BatchLayout, guard: PlanGuard | None, rendezvous: Rendezvous
) -> tuple[Loaded, BatchLayout]:
    """The recipe with what the first process's plan has chosen beside the engine, and its layout."""
    size, workers = (guard.plan.micro_batch_size, guard.plan.num_workers) if guard else (layout.micro_batch_size, 0)
    values = {"batch.micro_batch_size": size, "data.num_workers": workers}
    values = {key: value for key, value in values.items() if attrgetter(key)(loaded.recipe) == "auto"}
    unplanned = {key: f"{value}: no plan can be made" for key, value in values.items()}
    own = [values, dict(guard.plan.chosen) if guard else {**loaded.chosen, **unplanned}]
    values, chosen = rendezvous.exchange("plan", own, lambda everybodys: everybodys[0])
    loaded = loaded.decided(loaded.recipe.with_values(values), chosen)
    return loaded, batch_layout(loaded.recipe, layout.world_size)


def stages_of(recipe: Recipe, source: ModelSource, rendezvous: Rendezvous, guard: PlanGuard | None) -> Split:
    """How the layers are cut into stages: as the first process's plan says, equally where none can be made."""
    parallel = recipe.parallel
    planned = rendezvous.exchange("stages", guard.plan.stages if guard else [], lambda every: every[0])
    layers = planned or cut(source.config.get_text_config().num_hidden_layers, parallel.stages)
    return Split(tuple(layers), parallel.pipeline, returns=parallel.schedule == "zero_bubble")


def compiles(recipe: Recipe, rendezvous: Rendezvous, guard: PlanGuard | None) -> bool:
    """Whether the layers are compiled: as the recipe or the plan says, and where every process can."""

    def judge(lacks: Mapping[int, str]) -> bool:
        planned = "layers" if guard and _compiles(guard.plan) else "off"
        wanted = "layers" if recipe.compiles_layers else planned if recipe.compile == "auto" else "off"
        rank, reason = next(((rank, each) for rank, each in lacks.items() if each), (0, ""))
        if wanted == "layers" and reason:
            _log.warning("layers are not compiled: %s%s", reason, f", on {rendezvous.name(rank)}" if rank else "")
        return wanted == "layers" and not reason

    return bool(rendezvous.exchange("compile", compilers.missing(device.kind()), judge))


def _compiles(plan: Plan) -> bool:
    """Whether layers are worth compiling by a plan, which counts them as they are where this machine cannot."""
    return bool(plan.work.compile_seconds) or any(note.startswith(UNCOMPILED) for note in plan.notes)


def compiled(recipe: Recipe, model: Any) -> CompiledLayers | None:
    """The layers of a model, which are compiled when they are first called; None where they are not marked as such.

    Raises:
        UserError: If graphs are to recompute what then would be kept.
    """
    elementwise = recipe.activation_checkpointing.mode == "elementwise"
    # Vectors are computed twice: once without gradients, and again with those that came of it.
    layers = CompiledLayers(model, elementwise=elementwise, draws_alike=recipe.embeds)
    if layers.layers:
        return layers
    if elementwise:
        raise UserError(
            "activation_checkpointing.mode=elementwise is done by compiled layers, and this model's are not marked as "
            "such",
            "set activation_checkpointing.mode=none",
        )
    _log.warning("layers are not compiled: this model's are not marked as such")
    return None


def reach_of(recipe: Recipe, source: ModelSource, rendezvous: Rendezvous) -> Reach:
    """What text reaches of the model, as all processes find."""
    found = reach.reach_of(source.config, recipe.objective, recipe.model.trust_remote_code)
    if recipe.model.adapter:
        found = Reach(found.inside and not found.outside)  # An adapter says itself which layers it is for.

    def judge(every: Mapping[int, list[Any]]) -> list[Any]:
        insides, *lists = zip(*every.values(), strict=True)
        return [all(insides), *(sorted(set.intersection(*map(set, each))) for each in lists)]

    inside, outside, fixed = rendezvous.exchange("reach", [found.inside, found.outside, found.fixed], judge)
    return Reach(inside, tuple(outside), tuple(fixed))


def has_liger(rendezvous: Rendezvous) -> bool:
    """Whether Liger's kernels are there for every process."""
    return bool(rendezvous.exchange("liger", liger_kernels.missing(), lambda every: not any(every.values())))


def use_liger(base: Any, where: Any, progress: Progress) -> None:
    """Has Liger's kernels compute parts of layers that are not compiled."""
    reason = liger_kernels.use_liger(base, where)
    progress.remark(f"Liger's kernels are not used: {reason}" if reason else "Liger's kernels run in the layers")


def with_flash_attention(
    loaded: Loaded, source: ModelSource, backend: str, layout: BatchLayout, statistics: DataStatistics | None,
    steps: int, rendezvous: Rendezvous, progress: Progress,
) -> Loaded:  # fmt: skip
    """Has a package of FlashAttention compute what `auto` leaves to `torch_varlen` on GPUs: where all processes have it
    and the first one finds it faster.

    Args:
        backend: Of attention.
        statistics: Of the data; where they are not known, rows are taken to be full.
        steps: Of the run.

    Returns:
        The recipe, with that among what was chosen.
    """
    varlen.use(varlen.OWN)
    if (loaded.recipe.model.attention, backend, device.kind()) != ("auto", "torch_varlen", "cuda"):
        return loaded

    def judge(everybodys: Mapping[int, list[str]]) -> tuple[str, str]:
        packages = [name for name in everybodys[0] if all(name in each for each in everybodys.values())]
        length = statistics.squared_tokens / statistics.tokens if statistics else layout.seq_len
        heads_among, compute = layout.tensor * layout.sequence, dtypes(loaded.recipe).compute
        documents = varlen_trials.documents_of(source.config.to_dict(), heads_among, length, compute)
        if documents is None or not packages:
            return varlen.OWN, ""
        calls = source.config.get_text_config().num_hidden_layers / layout.pipeline
        calls *= steps * layout.gradient_accumulation_steps
        return varlen_trials.choose(documents, calls, torch.device("cuda", rendezvous.world.local_rank), packages)

    package, said = rendezvous.exchange("attention kernels", varlen.installed(), judge)
    varlen.use(package)
    if said:
        progress.remark(said)
    chosen = {"model.attention": f"torch_varlen: {said}"} if package else {}
    return loaded.decided(loaded.recipe, {**loaded.chosen, **chosen})


def attention_for_rows(backend: str, rendezvous: Rendezvous, guard: PlanGuard | None) -> str:
    """Eager attention instead of `sdpa` where the first process's plan takes it for rows as long as these."""
    eager = guard is not None and (backend, guard.plan.attention) == ("sdpa", "eager")
    if guard and eager:
        _log.info("%s", next(note for note in guard.plan.notes if note.startswith(EAGER)))
    return "eager" if rendezvous.exchange("attention", eager, lambda planned: planned[0]) else backend
