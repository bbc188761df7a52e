"""Continues from a checkpoint of another strategy or another number of processes.

Once the engine has prepared model and optimizer, each process copies the ranges that it holds of every parameter out of
what was saved, see `saved_state`, and gives them to the engine as it reads its own checkpoints. Schedule, loss scale
and random numbers follow. The order of rows needs nothing: it depends on no process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_pt_utils import safe_globals

from toolkit.common import UserError
from toolkit.models.adapted_layers import saved_names
from toolkit.models.parallel.layer_sums import dividing
from toolkit.models.parallel.parts import is_part, part_of, whole_shape
from toolkit.models.parallel.pipeline import chain, draw_apart
from toolkit.seal import read_seal
from toolkit.train.checkpoints.saved_state import MASTER, OVERFLOWS, SavedState, equal_parts
from toolkit.train.checkpoints.stage_files import whole_groups
from toolkit.train.checkpoints.swapped_state import restore_swapped


class Continues:
    """Of a trainer, how it goes on from a checkpoint. Set `converts` before it trains."""

    converts = False
    """Whether the checkpoint has another form than the engine's own, which then does not read it."""
    _draws_from: str | None = None
    """The checkpoint whose random numbers are yet to be gone on with."""

    def _load_from_checkpoint(self, *args: Any) -> None:
        if not self.converts:
            super()._load_from_checkpoint(*args)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Theirs warns where a checkpoint lacks weights, and training would go on with those of the base model."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or ()  # type: ignore[attr-defined]
        if lacking := [name for name in load_result.missing_keys if name not in tied]:
            raise UserError(
                f"the checkpoint lacks {len(lacking)} weights of the model, {lacking[0]} among them",
                "continue with the version of the toolkit that saved it, or begin anew with checkpoint.resume=never",
            )

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from: str | None) -> Any:
        self._draws_from = resume_from
        own = None if self.converts else resume_from
        prepared = super()._prepare_for_training(max_steps, loader, own)  # type: ignore[misc]
        if self.converts and resume_from:
            restore(self, Path(resume_from))
        elif resume_from and self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            engine = self.model_wrapped  # type: ignore[attr-defined]
            restore_swapped(engine.optimizer, Path(resume_from), engine.global_rank)
            scale_as_stated(engine)
        if resume_from:
            follow(self.lr_scheduler)  # type: ignore[attr-defined]
        return prepared

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Theirs takes over the checkpoint's intervals of saving and logging, which may be others now."""
        found = super()._init_training_state(max_steps, *args)  # type: ignore[misc]
        self.state.compute_steps(self.args, max_steps)  # type: ignore[attr-defined]
        return found

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Has random numbers go on as they were saved once the first batches are there. The loop would do so later,
        when some trainers have taken passes over these."""
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._load_rng_state(self._draws_from)
        return found

    def _load_rng_state(self, checkpoint: str | None) -> None:
        checkpoint, self._draws_from = self._draws_from, None
        args, size = self.args, dividing()  # type: ignore[attr-defined]
        # Those that divide layers draw alike, whoever saved.
        rank, alike = args.process_index // size * size, args.world_size if size == 1 else 0
        if checkpoint and not restore_random_numbers(Path(checkpoint), rank, alike):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif checkpoint and (own := chain()):
            draw_apart(own)


def scale_as_stated(engine: Any) -> None:
    """Has DeepSpeed scale losses of fp16 by the settings that it has now, from the scale on that was saved. It would
    take over those of the checkpoint: another scale or window were without effect."""
    if not engine.fp16_enabled():
        return
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

    optimizer = engine.optimizer
    saved, dynamic = optimizer.loss_scaler, engine.dynamic_loss_scale()
    stated = CreateLossScaler(torch.float16, engine.loss_scale(), dynamic, engine.dynamic_loss_scale_args())
    if dynamic and saved.dynamic:
        vars(stated).update({name: getattr(saved, name) for name in ("cur_scale", *OVERFLOWS)})
    optimizer.loss_scaler, optimizer.dynamic_loss_scale = stated, stated.dynamic


@torch.no_grad()
def restore(trainer: Any, checkpoint: Path) -> None:
    """Brings a trainer whose engine is prepared to where a checkpoint of any engine was saved.

    Args:
        checkpoint: One that has been compared with its seal.

    Raises:
        UserError: If the checkpoint holds other parameters.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    zero = trainer.model_wrapped.optimizer if trainer.is_deepspeed_enabled else None
    flats = list(_zero_flats(zero)) if zero else []
    if zero:
        order = [[name for each in flats if each.group == number for name in each.held]
                 for number in range(len(zero.optimizer.param_groups))]  # fmt: skip
    else:
        names = {parameter: name for name, parameter in model.named_parameters()}
        order = [[names[each] for each in group["params"]] for group in trainer.optimizer.param_groups]
    # Under ZeRO-3 a parameter itself is empty.
    numbers = {name: getattr(each, "ds_numel", whole_shape(each).numel()) for name, each in model.named_parameters()}
    aliases = saved_names(model)
    if own := chain():
        names = {parameter: own.name(name) for parameter, name in names.items()}
        order, aliases = whole_groups(order, own), own.aliases
        numbers = {name: shape.numel() for name, shape in own.sizes.items()}
    saved = SavedState(checkpoint, {name: numbers[name] for group in order for name in group}, aliases)
    chosen = [saved.group(group[0] if group else None) for group in order]
    if zero:
        _into_zero(trainer, zero, flats, saved, chosen)
    else:
        _into_parameters(trainer.optimizer.optimizer, names, saved, chosen)
        if saved.loss_scale and trainer.accelerator.scaler:
            scaler = trainer.accelerator.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": saved.loss_scale})
    schedule = torch.load(checkpoint / "scheduler.pt", map_location="cpu", weights_only=True)
    # Engines drop a group without parameters, such as adapters' without decay.
    per_group = {key: [value[number] for number in chosen] for key, value in schedule.items()
                 if isinstance(value, list) and len(value) == len(saved)}  # fmt: skip
    trainer.lr_scheduler.load_state_dict(schedule | per_group)


def follow(schedule: Any) -> None:
    """Has the next step take the rate that the recipe's schedule says of it. What was saved is that of the schedule
    which the checkpoint was trained by: where that one ended there, often zero."""
    if isinstance(schedule, LambdaLR):  # Not what stands in for it where there is an optimizer for each parameter.
        schedule.last_epoch -= 1
        schedule.step()
        schedule._step_count -= 1


def restore_random_numbers(checkpoint: Path, rank: int, processes: int) -> bool:
    """Has a process go on with the random numbers of the one of the same rank, where another number of them was saved.

    Further processes than were saved go on with those of an earlier one: all begin with the same, for other rows.

    Returns:
        Whether another number was saved; else nothing is done.
    """
    saved = sorted(checkpoint.glob("rng_state*.pth"), key=lambda file: (len(file.name), file.name))
    if len(saved) == processes:
        return False
    saver = rank % len(saved)
    with safe_globals():
        state = torch.load(saved[saver], map_location="cpu", weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and "cuda" in state:
        local = read_seal(checkpoint).get("local_world_size")
        torch.cuda.set_rng_state(drawn_from(state["cuda"], saver, local))
    return True


def drawn_from(states: torch.Tensor | list[torch.Tensor], saver: int, local: int | None) -> torch.Tensor:
    """Of the states of a process's GPUs, as it saved them, that of the GPU that it computed on.

    Several processes save those of all GPUs that each sees, of which it has drawn numbers from its own alone.

    Args:
        saver: The rank of that process.
        local: How many were on each node; None if that is not known, for as many as there are GPUs.
    """
    return states[saver % (local or len(states)) % len(states)] if isinstance(states, list) else states


def _into_parameters(optimizer: Any, names: dict[Any, str], saved: SavedState, chosen: list[int]) -> None:
    """Of one process, DDP, alone or with divided layers, and FSDP, whose parameters are their own masters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(parameters):
        name, local, start = names[parameter], parameter.data, 0
        part: tuple[slice, ...] = ()
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            shape, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start = offsets[0] * math.prod(parameter.shape[1:])
            part = tuple(slice(first, first + size) for first, size in zip(offsets, shape, strict=True))[1:]

        def filled(
            kind: str,
            name: str = name,
            like: torch.Tensor = local,
            start: int = start,
            part: tuple[slice, ...] = part,
            parameter: Any = parameter,
        ) -> torch.Tensor:
            # Of rows that are divided, too, all.
            shape = torch.Size([*like.shape[:1], *parameter.shape[1:]]) if part else like.shape
            shape = whole_shape(parameter) if is_part(parameter) else shape
            flat = torch.empty(shape.numel(), dtype=like.dtype, device=like.device)
            saved.copy(name, kind, start, flat)
            rows = flat.view(shape)[(slice(None), *part)] if part else flat.view(shape)
            return part_of(parameter, rows).contiguous()

        local.copy_(filled(MASTER))
        state[number] = saved.rest(name)
        for kind in saved.kinds(name):
            value = filled(kind)
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(
                    value, parameter.device_mesh, parameter.placements,
                    run_check=False, shape=parameter.shape, stride=parameter.stride(),
                )  # fmt: skip
            state[number][kind] = value
    groups = _with_settings(optimizer.state_dict()["param_groups"], saved, chosen)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _with_settings(groups: list[dict[str, Any]], saved: SavedState, chosen: list[int]) -> list[dict[str, Any]]:
    return [{**saved.settings(number), "params": group["params"]} for number, group in zip(chosen, groups, strict=True)]


@dataclass(frozen=True)
class _Flat:
    """Masters that ZeRO keeps end to end, and updates as one parameter.

    Args:
        group: Of the optimizer.
        held: Its parameters by name, on all processes.
        parts: Of this process: a name, the first number that it has of that parameter, where that lies, and how many.
            Of a parameter that processes divide with its layer they are numbers of the part that this one has.
    """

    master: torch.Tensor
    group: int
    held: dict[str, Any]
    parts: list[tuple[str, int, int, int]]

    def filled(self, into: torch.Tensor, kind: str, saved: SavedState) -> torch.Tensor:
        for name, start, at, count in self.parts:
            if not is_part(parameter := self.held[name]):
                saved.copy(name, kind, start, into[at : at + count])
                continue
            whole = torch.empty(whole_shape(parameter), dtype=into.dtype, device=into.device)
            saved.copy(name, kind, 0, whole.view(-1))
            into[at : at + count] = part_of(parameter, whole).reshape(-1)[start : start + count]
        return into


def _zero_flats(zero: Any) -> Iterator[_Flat]:
    named = zero.param_names
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        for number, (master, group) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
            shapes = {named[each]: each.ds_shape for each in group}
            parts = equal_parts(shapes, torch.distributed.get_rank(), torch.distributed.get_world_size())
            yield _Flat(master, zero.sub_group_to_group_id[number], {named[each]: each for each in group}, list(parts))
        return
    # With bf16, stage 1 has an optimizer of its own.
    of_bf16 = hasattr(zero, "bf16_groups")
    masters = zero.fp32_groups_flat_partition if of_bf16 else zero.single_partition_of_fp32_groups
    groups = zero.bf16_groups if of_bf16 else zero.bit16_groups
    for number, (master, group) in enumerate(zip(masters, groups, strict=True)):
        fragments = [(named[each], each._hp_mapping) for each in group if each._hp_mapping]
        held = [(name, each.lp_fragment_address.start, each.hp_fragment_address.start, each.hp_fragment_address.numel)
                 for name, each in fragments]  # fmt: skip
        yield _Flat(master, number, {named[each]: each for each in group}, held)


def _into_zero(trainer: Any, zero: Any, flats: list[_Flat], saved: SavedState, chosen: list[int]) -> None:
    """As DeepSpeed reads what this very process saved."""
    stage3 = hasattr(zero, "fp16_partitioned_groups_flat")
    if stage3:
        zero.checkpoint_event_prologue()
    state: dict[int, dict[str, Any]] = {}
    for number, flat in enumerate(flats):
        flat.filled(flat.master.data, MASTER, saved)
        first = next((name for name in flat.held if saved.kinds(name)), next(iter(flat.held)))
        kept = {kind: flat.filled(torch.zeros_like(flat.master.data), kind, saved) for kind in saved.kinds(first)}
        state[number] = saved.rest(first) | kept
    own = zero.state_dict()
    optimizer = own["optimizer_state_dict" if stage3 else "base_optimizer_state"]
    optimizer["state"] = state
    optimizer["param_groups"] = _with_settings(optimizer["param_groups"], saved, chosen)
    if saved.loss_scale and own.get("dynamic_loss_scale"):
        vars(own["loss_scaler"]).update(saved.overflows, cur_scale=saved.loss_scale)
    rank = torch.distributed.get_rank(zero.dp_process_group)
    zero.load_state_dict({rank: own}, load_optimizer_states=True, load_from_fp32_weights=True)
    if stage3:
        zero.checkpoint_event_epilogue()
    else:
        zero.update_lp_params()
    # Names the folder inside of its checkpoints.
    trainer.model_wrapped.global_steps = trainer.state.global_step
