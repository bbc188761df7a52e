"""What really runs, compared with what the recipe asks for.

Libraries drop or replace settings in silence, each in its own way and from one version to the next. So the state of the
built engine is read before the first step and after it; a difference ends the run. The model itself is asked whether it
keeps documents apart, sees whole rows where processes share them, and how it scores labels.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import TrainerCallback

from toolkit.common import UserError
from toolkit.data.batching.collate import Collator, isolates
from toolkit.data.encoding.encode import IGNORE
from toolkit.distributed.engine_state import EngineState, expected_state
from toolkit.distributed.engines import fsdp_mesh
from toolkit.models import device
from toolkit.models.attention import attention_kernels, backends
from toolkit.models.load import ModelSource
from toolkit.models.output_heads import head_choice
from toolkit.models.parallel.pipeline import chain
from toolkit.models.tiny import tiny_model
from toolkit.recipe import Recipe
from toolkit.train import leaf_modules
from toolkit.train.evaluation.evaluate import evaluating
from toolkit.train.live_state import read, reshard
from toolkit.train.session import Session
from toolkit.train.trainers.distillation import check_heads
from toolkit.train.trainers.heads import check_padding

_log = logging.getLogger("toolkit.train")
_SCORED = 128
"""Tokens of each row that both output heads score before the first step."""
_PACKED = Collator(0, "packed")


class Verify(TrainerCallback):
    """Compares before the first step, and once more after it, when the optimizer has its state."""

    def __init__(self, session: Session) -> None:
        self._session, self._has_stepped, self._graphs = session, False, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._session.recipe.headed:
            check_padding(self._session)
        else:
            check_output_head(self._session)
        if self._session.recipe.distills:
            check_heads(self._session, _first_rows(self._session))
        self._check()
        leaf_modules.watch(self._session.trainer.model)
        packs = self._session.recipe.data.packing or self._session.attention in backends.VARLEN
        if packs and not self._session.recipe.headed:
            check_isolation(self._session)
        if self._session.layout.sharing > 1:
            check_parts(self._session)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._check()
            self._check_compiled()
        self._check_graphs(state.global_step)

    def _check_compiled(self) -> None:
        compiled = self._session.compiled
        if compiled is None or compiled.graphs:
            return
        what = "layers run as they are: torch's compiler takes none of them (TORCH_LOGS=dynamo tells why)"
        if self._session.recipe.activation_checkpointing.mode == "elementwise":
            raise UserError(
                f"activation_checkpointing.mode=elementwise: {what}", "set activation_checkpointing.mode=full"
            )
        if self._session.leads:
            _log.warning("%s", what)

    def _check_graphs(self, step: int) -> None:
        """Says so where batches of other shapes have the layers compiled again, which costs more than it saves."""
        compiled = self._session.compiled
        if compiled is None or compiled.graphs == self._graphs:
            return
        if self._graphs and self._session.leads:
            _log.warning("step %d: layers were compiled again, %d graphs so far", step, compiled.graphs)
        self._graphs = compiled.graphs

    def _check(self) -> None:
        session = self._session
        recipe, (kind, _) = session.recipe, session.trainer.optimizer_cls_and_kwargs
        attends = attention_kernels.implementation(session.attention)
        expected = expected_state(recipe, session.layout, kind.__name__, attends)
        if recipe.strategy.name == "fsdp":
            mesh = fsdp_mesh(recipe, session.world)
            replicas = session.layout.world_size // session.layout.tensor
            expected.sharded_over = mesh["dp_shard_size"] if mesh else replicas
        expected.compile = "layers" if session.compiled else "off"
        if own := chain():
            expected.stages = {stage: list(own.split.between(stage)) for stage in own.split.stages(own.place)}
        reshard(session.trainer.model_wrapped)
        state = read(session.trainer)
        if session.compiled:
            state.compiled_graphs = session.compiled.graphs
        verify(expected, state)
        if session.leads:
            session.folder.update_manifest(effective=state)


def verify(expected: EngineState, state: EngineState) -> None:
    """Stops a run that is not what was asked for.

    Args:
        expected: See `engine_state.expected_state`. What cannot be read yet (moments, before the first step) is not
            compared.
        state: See `live_state.read`.

    Raises:
        UserError: With every difference.
    """
    runs = state.model_dump()
    different = [
        f"{key}: the recipe asks for {value}, {runs[key]} runs"
        for key, value in expected.model_dump().items()
        if key in runs and runs[key] != value
    ]
    if different:
        raise UserError(
            "what was set up is not what the recipe asks for:\n  " + "\n  ".join(different),
            "this is a fault of the toolkit or of a library's version: `toolkit doctor` prints what to report",
        )


def check_isolation(session: Session) -> None:
    """Asks the model itself, on its device and in its precision, whether documents of a batch are kept apart.

    Of a pipeline each process asks its own stages.

    Raises:
        UserError: If they see each other.
    """
    place, backend, autocast = session.trainer.args.device, session.attention, session.dtypes.autocast
    collator = session.trainer.data_collator.whole
    if pipeline := session.trainer.pipeline:
        isolated = pipeline.isolates()
    else:
        precise = torch.autocast(place.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        with precise, _reducing_nothing(session.trainer.model_wrapped):
            isolated = isolates(session.module, collator, place)
    kind = session.source.config.model_type
    if isolated and session.recipe.distills:
        teacher = session.trainer.teacher.model
        isolated, kind = isolates(teacher, collator, place), f"the teacher, {teacher.config.model_type},"
    if not isolated:
        raise _seen(kind, backend, session.recipe)


@contextlib.contextmanager
def _reducing_nothing(engine: Any) -> Iterator[None]:
    """Keeps ZeRO-3 from taking gradients: of the layers of mixtures it does as soon as a backward pass has gone through
    one, also where it asks for no gradients of parameters, and would have them twice in the first step."""
    optimizer = getattr(engine, "optimizer", None)
    leaves = getattr(optimizer, "leaf_parameters", {})
    still: dict[str, Any] = {
        "reenter_backward_if_needed": lambda: None,
        "reduce_ready_partitions_and_remove_grads": lambda parameter: None,
        "should_refresh_expected_hook_count": lambda: False,
        "update_hook_state_and_maybe_run_epilogue": lambda expected: None,
    }
    for name in still if leaves else ():
        setattr(optimizer, name, still[name])
    try:
        yield
    finally:
        for name in still if leaves else ():
            delattr(optimizer, name)
        for parameter in itertools.chain(*leaves.values()):
            parameter.grad = None


def require_isolation(source: ModelSource, backend: str) -> None:
    """Asks a tiny copy of the model whether it keeps packed rows apart, before rows and weights are read.

    What takes the boundaries of documents is known to, of the models that get them (`backends.unfit`).

    Raises:
        UserError: If they see each other.
    """
    recipe = source.recipe
    if not recipe.data.packing or backend in backends.VARLEN:
        return
    if source.config.model_type in backends.OTHER_POSITIONS:
        what = f"{source.config.model_type} does not count the positions of a document from 0"
        raise UserError(f"{what}, as those of packed ones are", "set data.packing=false")
    attention_kernels.prepare(backend, recipe)
    try:
        isolated = isolates(tiny_model(source.config, recipe.objective, recipe.model.trust_remote_code), _PACKED)
    except Exception:  # A model's own code may raise anything for sizes that do not fit together: it is asked itself.
        return
    if not isolated:
        raise _seen(source.config.model_type, backend, recipe)


def _seen(kind: str, backend: str, recipe: Recipe) -> UserError:
    ways = ["data.packing=false"] * recipe.data.packing + ["model.attention=sdpa"] * (backend in backends.VARLEN)
    what = f"{kind} with attention {backend} lets documents of a batch see each other"
    return UserError(what, f"set {' and '.join(ways)}")


def check_parts(session: Session) -> None:
    """Asks the model itself whether parts of a row, on the processes that share it, get the logits of the whole row.

    Raises:
        UserError: If they do not, on any process.
    """
    trainer, size = session.trainer, session.layout.sharing
    collator, model = trainer.data_collator, trainer.model_wrapped
    ids = [1, 2, 3, 4, 5, 6, 7, 8] * size
    row = {"input_ids": ids, "labels": [IGNORE] * len(ids), "seq_lengths": [len(ids) // 2] * 2}
    with torch.no_grad(), evaluating(model):
        whole, part = (
            model(**trainer.output_head.plain(send_to_device(collate([row]), trainer.args.device))).logits[0].double()
            for collate in (collator.whole, collator)
        )
    mine = torch.cat([whole[first:end] for first, end in collator.pieces(len(whole))])
    difference = ((part - mine).norm() / mine.norm()).reshape(1)
    largest = trainer.accelerator.gather(difference).max().item()
    # Rounding in another order; tokens that other parts do not see are off by as much as the logits are large.
    exact = session.dtypes.compute == "float32" and not device.computes_tf32()
    if not largest < (1e-4 if exact else 0.1):
        raise UserError(
            f"{type(session.module).__name__} computes other logits for parts of rows than for whole ones: they differ "
            f"by {largest:.1g} of their size",
            f"remove {session.recipe.parallel.shares_by}",
        )


def _first_rows(session: Session) -> dict[str, Any]:
    """The beginning of the first two rows as a batch, all whose tokens are trained."""
    trainer, prepared = session.trainer, session.prepared
    rows = prepared.eval if session.recipe.data.streaming and prepared.eval is not None else prepared.train
    first = [{key: row[key][:_SCORED] for key in ("input_ids", "labels")} for row in itertools.islice(iter(rows), 2)]
    if session.recipe.objective != "seq2seq":
        first = [{"input_ids": row["input_ids"], "labels": [IGNORE, *row["input_ids"][1:]]} for row in first]
    return send_to_device(trainer.data_collator.whole(first), trainer.args.device)


def check_output_head(session: Session) -> None:
    """Asks the model itself, on its first rows, its device and in its precision, whether labels are scored as its own
    forward does. If not, on any process, all go on with its own forward, and with all logits if need be."""
    trainer = session.trainer
    head = trainer.output_head
    batch = _first_rows(session)
    compute = getattr(torch, session.dtypes.compute)

    def equal(fused: bool) -> tuple[bool, str]:
        with trainer.pipeline.at_last(batch) if trainer.pipeline else contextlib.nullcontext(batch) as given:
            # Of a pipeline the process with the last stage compares.
            difference, reason = 0.0, ""
            if given is not None:
                difference, reason = head_choice.compare(trainer.model_wrapped, given, head, compute, fused)
        largest = trainer.accelerator.gather(torch.tensor([difference], device=trainer.args.device)).max().item()
        return largest <= 1, reason

    if head.fused:
        head.fused, reason = equal(fused=True)
        if session.leads and not head.fused:
            _log.warning(
                "the model's own forward scores the labels: the fused output head is not what this model computes "
                "(%s). The plan does not count it, as the architecture does not show it",
                reason or "as another process found",
            )
    if head.selects and not head.fused:
        head.selects, _ = equal(fused=False)
