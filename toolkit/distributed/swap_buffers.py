"""Buffers of host memory through which ZeRO-3 reads weights from drives: large enough, and never all taken.

DeepSpeed 0.19 has five of 10^8 elements. A part of a weight that is larger ends the run while it is loaded, as that of
Llama 3.1's embeddings on up to five processes. It reads ahead into all that are free, and weights that stay gathered
since they are used again soon keep theirs, so that the next weight finds none ("Not enough buffers 0 for swapping 1").
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

_LEAST = 2**20
"""Elements of a buffer at first. Smaller parts of weights stay in host memory (`MIN_AIO_BYTES`)."""


class SwapBuffers(AsyncPartitionedParameterSwapper):
    """DeepSpeed's swapper, whose buffers grow to the largest part of a weight and are taken from what can spare them.

    What lies in a buffer is also on the drive, as weights change in host memory and on drives only.
    """

    def __init__(self, ds_config: Any, model_dtype: Any) -> None:
        self._readers: dict[int, Any] = {}
        settings = ds_config.zero_config.offload_param
        # Those of GPUDirect Storage lie on the device, and stay as large as they are configured.
        if "buffer_size" not in settings.model_fields_set and not ds_config.aio_config["use_gds"]:
            settings.buffer_size = _LEAST
        super().__init__(ds_config, model_dtype)

    def get_buffer(self, param: Any, numel: int) -> Any:
        """A buffer for a part of a weight that is about to be written for the first time."""
        if numel > self.elements_per_buffer and not self.param_id_to_buffer_id and not self.use_gds:
            self._grow(numel)
        return super().get_buffer(param, numel)

    def swap_in(self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None) -> None:
        """Reads parts of weights into buffers; those of gathered ones are not needed, and may be asked for ahead."""
        params = [each for each in params if not _gathered(each)]
        if params:
            super().swap_in(params, async_op, swap_in_buffers)
            self._readers |= {each.ds_id: each for each in params}

    def remove_partition_and_release_buffers(self, params: Iterable[Any]) -> None:
        """Frees the buffers of weights."""
        params = list(params)
        super().remove_partition_and_release_buffers(params)
        for each in params:
            self._readers.pop(each.ds_id, None)

    def make_room(self, params: list[Any]) -> None:
        """Frees as many buffers as these weights lack to be gathered together: of gathered ones, then of those that
        were read ahead, the last first."""
        wanted = {each.ds_id for each in params}
        missing = sum(each.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE for each in params)
        if missing <= self.available_swap_in_buffers():
            return
        self.synchronize_reads()
        held = [each for each in reversed(self._readers.values()) if each.ds_id not in wanted]
        others = [each for each in held if each.ds_status != ZeroParamStatus.INFLIGHT]
        others.sort(key=lambda each: not _gathered(each))
        self.remove_partition_and_release_buffers(others[: missing - self.available_swap_in_buffers()])

    @contextlib.contextmanager
    def present(self, param: Any) -> Iterator[None]:
        """In it, a weight that is not gathered has its part in memory, as `ds_tensor`."""
        away = param.ds_tensor.status != PartitionedParamStatus.AVAILABLE and not _gathered(param)
        if away:
            self.make_room([param])
            self.swap_in([param], async_op=False)
        try:
            yield
        finally:
            if away:
                self.remove_partition_and_release_buffers([param])

    def drop(self, param: Any) -> None:
        """Frees the buffer of a weight that is about to change on the drive, if it has one."""
        if param.ds_id in self._readers:
            self.synchronize_reads()
            self.remove_partition_and_release_buffers([param])

    def _grow(self, numel: int) -> None:
        self.synchronize_writes()
        # They are pinned, which does not end with the tensor.
        self.aio_read_handle.free_cpu_locked_tensor(self.buffers)
        self.elements_per_buffer, self.aligned_elements_per_buffer = numel, self._io_aligned_numel(numel)
        one = torch.empty(1, dtype=self.dtype)
        self.buffers: torch.Tensor = self.aio_read_handle.new_cpu_locked_tensor(
            self.aligned_elements_per_buffer * self.param_buffer_count, one
        )


def _gathered(param: Any) -> bool:
    return param.ds_status != ZeroParamStatus.NOT_AVAILABLE


@contextlib.contextmanager
def managed() -> Iterator[None]:
    """In it, weights on drives are read through `SwapBuffers`."""
    swapper = partition_parameters.AsyncPartitionedParameterSwapper
    ensure = Init._ensure_availability_of_partitioned_params
    gather = partition_parameters._no_gather_coalesced
    update = DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out

    def gathered_alone(params: Iterable[Any]) -> Any:
        handle = gather(params := list(params))
        for each in params:
            if each.nvme_swapper is not None and each.data.is_cpu:
                # Otherwise it computes with the buffer itself, which is free before the backward pass.
                each.data = each.data.clone()
        return handle

    def with_room(self: Any, params: list[Any]) -> None:
        if self.param_swapper is not None:
            self.param_swapper.make_room(params)
        ensure(self, params)

    def on_the_drive(self: Any, group: int) -> None:
        # DeepSpeed changes what it finds in a buffer there alone, and it would be lost with the buffer.
        for each in self.fp16_groups[group]:
            if each.nvme_swapper is not None:
                each.nvme_swapper.drop(each)
        update(self, group)

    partition_parameters.AsyncPartitionedParameterSwapper = SwapBuffers
    partition_parameters._no_gather_coalesced = gathered_alone
    Init._ensure_availability_of_partitioned_params = with_room
    DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out = on_the_drive
    try:
        yield
    finally:
        partition_parameters.AsyncPartitionedParameterSwapper = swapper
        partition_parameters._no_gather_coalesced = gather
        Init._ensure_availability_of_partitioned_params = ensure
        DeepSpeedZeroOptimizer_Stage3._partitioned_params_swap_out = update
