"""What DeepSpeed leaves out of a checkpoint whose optimizer lies on drives is read all the same.

That a whole training goes on as if it had not stopped is tested where DeepSpeed's async_io compiles, see
`distributed/test_nvme.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from toolkit.common import UserError
from toolkit.train.checkpoints.swapped_state import restore_swapped


class Zero:
    """DeepSpeed's optimizer as far as it is used, as it is once the files are back on the drive: a large group, whose
    master is read from there, and a small one, which nothing has read."""

    swap_optimizer = True

    def __init__(self, drive: Path) -> None:
        self.fp32_partitioned_groups_flat = [torch.empty(0), torch.zeros(2)]
        self.fp32_partitioned_groups_flat[0].ds_id = "0_7"  # type: ignore[attr-defined]
        self.optimizer = torch.optim.AdamW([{"params": [each]} for each in self.fp32_partitioned_groups_flat])
        self.optimizer_swapper = SimpleNamespace(swap_folder=str(drive))
        self.done: list[str] = []

    def _prepare_sub_group(self, number: int, timers: set[str]) -> None:
        if not number:
            self.fp32_partitioned_groups_flat[0].data = torch.arange(3.0)

    def _swappable_optimizer_subgroup(self, number: int) -> bool:
        return not number

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.done.append(name)


def checkpoint(folder: Path) -> Path:
    """One of rank 1, as DeepSpeed writes it: what lies on the drive is empty there."""
    empty, small = {"exp_avg": torch.empty(0), "step": torch.tensor(4.0)}, torch.tensor([5.0, 6.0])
    inner = {
        "state": {0: empty, 1: {"exp_avg": small / 2, "step": torch.tensor(4.0)}},
        "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.25, "params": [1]}],
    }
    saved = {"optimizer_state_dict": inner, "fp32_flat_groups": [torch.empty(0), small]}
    saved |= {"loss_scaler": LossScaler(scale=8.0), "overflow": False}
    (folder / "global_step4").mkdir()
    file = folder / "global_step4" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": saved}, file)
    return folder


def test_moments_steps_and_small_groups_go_on(tmp_path: Path) -> None:
    # Drives are written in blocks.
    torch.tensor([7.0, 8.0, 9.0, 0.0]).numpy().tofile(tmp_path / "exp_avg-0_7.tensor.swp")
    zero = Zero(tmp_path)
    restore_swapped(zero, checkpoint(tmp_path), rank=1)
    large, small = zero.fp32_partitioned_groups_flat
    assert large.tolist() == [0, 1, 2] and small.tolist() == [5, 6]
    assert [zero.optimizer.state[each]["exp_avg"].tolist() for each in (large, small)] == [[7, 8, 9], [2.5, 3]]
    assert [zero.optimizer.state[each]["step"].item() for each in (large, small)] == [4, 4]
    assert [group["lr"] for group in zero.optimizer.param_groups] == [0.5, 0.25]
    assert zero.loss_scaler.loss_scale == 8
    each = ["_reassign_or_swap_out_partitioned_parameters", "_release_sub_group"]
    assert zero.done == ["checkpoint_event_prologue", *each, *each, "checkpoint_event_epilogue"]


@pytest.mark.parametrize("left", [None, 8])
def test_a_file_that_is_missing_or_too_short_is_named(left: int | None, tmp_path: Path) -> None:
    if left:
        (tmp_path / "exp_avg-0_7.tensor.swp").write_bytes(bytes(left))
    with pytest.raises(UserError, match=r"the checkpoint lacks exp_avg-0_7\.tensor\.swp of the optimizer's state"):
        restore_swapped(Zero(tmp_path), checkpoint(tmp_path), rank=1)


def test_nothing_is_read_where_no_optimizer_lies_on_drives(tmp_path: Path) -> None:
    restore_swapped(SimpleNamespace(swap_optimizer=False), tmp_path, rank=0)
    restore_swapped(SimpleNamespace(), tmp_path, rank=0)
