"""What a training does, decided before there is a process group: data, plan, and what follows from both.

Every process comes here. What can be refused is refused before what is slow: one process tokenises while the others
wait on a file lock, which cannot time out, and a run that would not fit ends before an engine is prepared and weights
are loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from toolkit.data.auditing.audit import Audit, DataError
from toolkit.data.auditing.problems import with_settings
from toolkit.data.prepare import Prepared, prepare
from toolkit.data.preview import render
from toolkit.data.streaming import Stream
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import batch_layout, run_length
from toolkit.distributed.rendezvous import Rendezvous
from toolkit.files import check_disk, write_json
from toolkit.models import compiled_layers, device, own_attention
from toolkit.models.attention import attention_kernels
from toolkit.models.load import ModelSource
from toolkit.models.parallel.parts import require_plans
from toolkit.models.sentence_files import check_base
from toolkit.models.teacher import check_vocabulary, open_teacher
from toolkit.planner.build import run_folder_bytes
from toolkit.planner.notes import SLOWER
from toolkit.planner.plan import UnknownSize
from toolkit.recipe import Loaded
from toolkit.report.plan_text import brief_text
from toolkit.report.terminal import Progress
from toolkit.train import agreed
from toolkit.train.plan_guard import PlanGuard, plan_run
from toolkit.train.run_folder import RunFolder
from toolkit.train.session import Decided
from toolkit.train.slow_disk import open_folder
from toolkit.train.startup import StartUp
from toolkit.train.trainers.classes import require_entities
from toolkit.train.trainers.objectives import head_of, trainer_class
from toolkit.train.trainers.served_answers import connect
from toolkit.train.verify import require_isolation

_log = logging.getLogger("toolkit.train")


def decide(
    loaded: Loaded,
    rendezvous: Rendezvous,
    source: ModelSource,
    folder: RunFolder,
    progress: Progress,
    start_up: StartUp,
    force: bool = False,
) -> Decided:
    """Decides all of it; see `set_up`.

    Raises:
        UserError: Any error the user can fix.
    """
    recipe, world = loaded.recipe, rendezvous.world
    first = world.rank == 0
    layout, types = batch_layout(recipe, world.world_size), dtypes(recipe)

    source.require_weights()
    if recipe.embeds and not folder.resume_from:
        check_base(recipe, source.file)
    # Architecture: asked before TrainingArguments, after which ZeRO-3 would divide every model among the processes.
    require_plans(source.config, layout.expert)
    teacher = open_teacher(recipe)
    kind: Any = trainer_class(recipe)
    if not recipe.headed:
        kind = functools.partial(kind, choice=head_of(source, first))

    # Data
    kernels = attention_kernels.available(types.compute)
    backend, settled = own_attention.resolve(source, types.compute, kernels, teacher)
    require_isolation(source, backend)
    tokenizer = source.tokenizer()
    stops = source.stop_tokens(tokenizer)
    server, about_server = connect(rendezvous, recipe, tokenizer, folder.path) if recipe.rollout.server else (None, {})
    common_tokens = check_vocabulary(source, tokenizer, teacher) if teacher else 0
    prepared = _prepare(source, tokenizer, stops, folder if first else None, progress)
    require_entities(recipe, prepared.classes)
    source = source.labelled(prepared.classes, tokenizer)
    start_up.ended("data")

    # Plan
    guard = None
    if first:
        known = recipe.with_values({"model.attention": backend}) if settled else recipe
        planned = dataclasses.replace(loaded, recipe=known)
        guard = _checked(plan_run(planned, world, source, prepared.statistics), folder, progress, force)
    loaded, layout = agreed.decided(loaded, layout, guard, rendezvous)
    compiles = recipe.compile != "off" and agreed.compiles(recipe, rendezvous, guard)
    if compiles:
        compiled_layers.prepare(device.kind())
    if recipe.model.attention == "auto":
        backend = agreed.attention_for_rows(backend, rendezvous, guard)
    split = agreed.stages_of(recipe, source, rendezvous, guard) if layout.pipeline > 1 else None
    _log.debug("attention: %s; on this machine: %s", backend, kernels)
    rows = None if isinstance(prepared.train, Stream) else len(prepared.train)
    length = run_length(recipe, rows, layout)
    liger = recipe.compile == "auto" and not compiles and device.kind() == "cuda" and agreed.has_liger(rendezvous)
    reach = agreed.reach_of(recipe, source, rendezvous)
    loaded = agreed.with_flash_attention(
        loaded, source, backend, layout, prepared.statistics, length.total_steps, rendezvous, progress
    )
    # Last of all, because who goes on from here removes it where the start is refused.
    loaded, guard, fast = open_folder(loaded, guard, rendezvous, folder, progress.remark)
    start_up.ended("plan")
    return Decided(
        loaded=loaded,
        world=world,
        source=source,
        folder=folder,
        layout=layout,
        length=length,
        dtypes=types,
        trainer_class=kind,
        attention=backend,
        kernels=kernels,
        compiles=compiles,
        liger=liger,
        reach=reach,
        split=split,
        teacher=teacher,
        common_tokens=common_tokens,
        prepared=prepared,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        guard=guard,
        fast=fast,
        server=server,
        about_server=about_server,
    )


def _prepare(
    source: ModelSource, tokenizer: Any, stops: frozenset[int], folder: RunFolder | None, progress: Progress
) -> Prepared:
    """Tokenised data; its audit is printed and saved, also when it ends the run."""

    def show(audit: Audit) -> None:
        if folder:
            folder.once_accepted(lambda: write_json(folder.path / "audit.json", audit.model_dump()))
            progress.remark(render(audit, str(folder.path / "audit.json")))
            for problem in audit.problems if progress.quiet else ():
                if problem.level == "warning":  # Others end the run, and are said then.
                    _log.warning("%s\n  %s", problem.what, problem.change)

    try:
        prepared = prepare(source.recipe, tokenizer, stops, vocab_size=source.vocab_size)
    except DataError as error:
        show(error.audit)
        raise
    show(with_settings(prepared.audit, source.recipe, prepared.statistics))
    return prepared


def _checked(guard: PlanGuard, folder: RunFolder, progress: Progress, force: bool) -> PlanGuard | None:
    """The plan, printed and kept in the run folder, for which the disk must do. No run ends for want of a plan."""
    try:
        folder.update_manifest(plan=guard.plan)
    except UnknownSize as error:
        progress.message(error.what)
        return None
    progress.remark(brief_text(guard.plan).plain)
    for note in guard.plan.notes:
        # One that was left to the plan stays as the run began.
        if note.startswith(SLOWER) and "precision" not in guard.loaded.chosen:
            _log.warning("%s", note)
    if not force:
        guard.check()
    kept = folder.kept_bytes()
    check_disk(
        folder.path,
        run_folder_bytes(guard.loaded.recipe, guard.plan.disk) - kept,
        f"checkpoints and models {'still ' * bool(kept)}need up to",
        "set output.dir to another disk, or lower checkpoint.save_total_limit",
    )
    return guard
