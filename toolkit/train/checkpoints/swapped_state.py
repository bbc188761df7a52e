"""Continues an optimizer whose state lies on drives: what DeepSpeed leaves out when it reads its own checkpoint.

It copies the files that lay on the drives back to them, and reads of them the masters alone. The moments, which its
optimizer does not know of before a first step, would begin at zero, the count of steps too; and groups of parameters
too small for a drive would keep the weights they began with, since the file that has them is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.common import UserError
from toolkit.train.checkpoints.saved_state import load_saved


@torch.no_grad()
def restore_swapped(zero: Any, checkpoint: Path, rank: int) -> None:
    """Completes what DeepSpeed has read of a checkpoint; does nothing where no optimizer lies on drives.

    Args:
        zero: DeepSpeed's optimizer, its files copied to the drive.
        rank: Of this process.

    Raises:
        UserError: If a file is not there.
    """
    if not getattr(zero, "swap_optimizer", False):
        return
    (file,) = checkpoint.glob(f"*/*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt")
    saved = load_saved(file)["optimizer_state_dict"]
    inner, timers = saved["optimizer_state_dict"], set[str]()
    zero.loss_scaler, zero.overflow = saved["loss_scaler"], saved["overflow"]
    for group, then in zip(zero.optimizer.param_groups, inner["param_groups"], strict=True):
        group.update({key: value for key, value in then.items() if key != "params"})
    zero.checkpoint_event_prologue()
    for number, master in enumerate(zero.fp32_partitioned_groups_flat):
        zero._prepare_sub_group(number, timers)
        if not zero._swappable_optimizer_subgroup(number):
            master.data.copy_(saved["fp32_flat_groups"][number])
        zero.optimizer.state[master] = {
            key: _restored(zero, key, value, master) for key, value in inner["state"].get(number, {}).items()
        }
        zero._reassign_or_swap_out_partitioned_parameters(number)
        zero._release_sub_group(number, timers)  # To the drive, with the moments that it learns of only here.
    zero.checkpoint_event_epilogue()


def _restored(zero: Any, key: str, value: Any, master: torch.Tensor) -> Any:
    """A part of a group's state: what is empty in the checkpoint's own file is one by itself."""
    if not torch.is_tensor(value):
        return value
    if value.numel() or not master.numel():
        return value.clone().to(master.device if value.ndim else value.device)
    file = Path(zero.optimizer_swapper.swap_folder) / f"{key}-{master.ds_id}.tensor.swp"  # type: ignore[attr-defined]
    size = master.numel() * value.element_size()
    if not file.is_file() or file.stat().st_size < size:
        raise UserError(
            f"the checkpoint lacks {file.name} of the optimizer's state",
            "continue from an earlier one, which checkpoint.resume names, or begin anew with checkpoint.resume=never",
        )
    return torch.from_numpy(np.fromfile(file, np.uint8, size)).view(value.dtype).to(master.device)
