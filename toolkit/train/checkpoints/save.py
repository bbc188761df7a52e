"""The trained model or adapter as Hugging Face files, gathered from however the engine holds it.

Full weights are written in the type the model computes in, but for those that Transformers keeps in fp32, such as the
biases that balance experts; adapters as their masters. The engines' own checkpoints are something else, see
`checkpoint`: they hold optimizer state and are read by the engine that wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.core_model_loading import revert_weight_conversion

from toolkit.cache import share
from toolkit.common import UserError, brief, first_line
from toolkit.distributed.engines import Dtypes
from toolkit.models.adapters import cast_buffers, cast_parameters, kept_in_fp32, on_whole_base
from toolkit.models.parallel.parts import holds_parts, whole_of
from toolkit.models.parallel.pipeline import chain
from toolkit.train.checkpoints import stage_files
from toolkit.train.checkpoints.divided import whole_parameters
from toolkit.train.checkpoints.storage import flush


def publish(
    trainer: Any,
    folder: Path,
    dtypes: Dtypes,
    start: dict[str, torch.Tensor],
    chosen: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes model (in the precision it computes in) or adapter (as its masters), and tokenizer.

    Every process must call this: sharded weights are gathered from all, into host memory of the first.

    Args:
        start: See `adapter_init.begin_with_base`.
        chosen: Other weights than the model has now, see `snapshots.take`; nothing on other processes than the first.

    Raises:
        UserError: If what is read back from the disk is not what was written.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    adapter = hasattr(model, "peft_config")
    state = gathered(trainer, model, adapter) if chosen is None else chosen
    if start:
        trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
        state = on_whole_base(dict(trained) if state is None else state, start) if state != {} else state
    if not adapter:
        dtype = getattr(torch, dtypes.export)
        kept = kept_in_fp32(model, dtype)
        if state is None or holds_parts() or chain():
            as_saved(trainer, dtypes)
        state = model.state_dict() if state is None else state
        state = {
            name: value.to(dtype) if value.is_floating_point() and not kept(name) else value
            for name, value in state.items()
        }
    if trainer.accelerator.is_main_process:
        with stage_files.naming_adapters():
            model.save_pretrained(folder, state_dict=state)
        if not adapter:
            # It names the type of the parameters in memory, which are the masters under FSDP.
            state_dtype(model.config, dtype)
            model.config.save_pretrained(folder)
        trainer.processing_class.save_pretrained(folder)
        share(folder)
        for file in folder.iterdir():
            flush(file)
        held = dict(model.state_dict()) if state is None else state
        _compare(folder, held if adapter else revert_weight_conversion(model, held))
    trainer.accelerator.wait_for_everyone()


def state_dtype(config: Any, dtype: torch.dtype) -> None:
    """Has a configuration, and those of the model's parts, name the type of the weights."""
    config.dtype = dtype
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        state_dtype(part, dtype)


def as_saved(trainer: Any, dtypes: Dtypes) -> None:
    """Has a full model that each process holds whole compute with what is saved of it: what is evaluated is what was
    saved. Its masters have done their work."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    divided = trainer.is_deepspeed_enabled and trainer.model_wrapped.zero_optimization_stage() == 3
    if hasattr(model, "peft_config") or trainer.is_fsdp_enabled or divided:
        return
    kept = kept_in_fp32(model, getattr(torch, dtypes.export))
    cast_parameters((each for name, each in model.named_parameters() if not kept(name)), dtypes.export)
    cast_buffers(model, dtypes.export)
    if trainer.pipeline:
        trainer.pipeline.learn()


def _compare(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Reads what was saved, tensor by tensor, and compares it with what was to be saved.

    What is saved under another name than it has in memory, as PEFT does with modules that are trained whole, is only
    read.
    """
    held = {name.replace(".default", ""): value for name, value in state.items()}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                other = [name for name in names if not _equal(tensors.get_tensor(name), held.get(name))]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read back: {first_line(error)}", _AGAIN) from error
        if other:
            raise UserError(f"{file} does not hold what was saved: {brief(', '.join(other), columns=200)}", _AGAIN)


_AGAIN = "look at that disk, or set output.dir to another one; the same command saves the model anew"


def _equal(read: torch.Tensor, held: torch.Tensor | None) -> bool:
    """Bit by bit: a number that is none equals itself here."""
    if held is None:
        return True
    one, other = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (read, held))
    return read.dtype == held.dtype and torch.equal(one, other)


def gathered(trainer: Any, model: torch.nn.Module, adapter: bool) -> dict[str, torch.Tensor] | None:
    """Full tensors by name on the first process, nothing on the others; None where the model itself has them."""
    if trainer.is_fsdp_enabled:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=adapter)
        state: dict[str, Any] = dict(get_model_state_dict(model, options=options))
        # Weights that share their storage come out once under each name.
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            state.pop(name, None)
        # torch leaves out what is frozen under one of its names only: a tied head would stay.
        frozen = [name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad]
        for name in frozen if adapter else ():
            state.pop(name, None)
        return state
    if own := chain():
        return stage_files.whole_parameters(model, own)
    if trainer.is_deepspeed_enabled and adapter:
        return _masters(model)
    if holds_parts():
        return whole_parameters(model, trainer.accelerator.is_main_process)
    if not trainer.is_deepspeed_enabled:
        return None
    engine = trainer.model_wrapped
    return engine._zero3_consolidated_16bit_state_dict() if engine.zero_optimization_stage() == 3 else None


def _masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What DeepSpeed's optimizer holds in full precision of the trained parameters, gathered one by one."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: whole_of(parameter, safe_get_full_fp32_param(parameter).detach()).cpu()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
