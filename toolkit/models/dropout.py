"""Dropout on CPUs by a hash of each element's place, instead of torch's own.

torch draws the numbers of a CPU's dropout one after the other, on one core, and Inductor one by one in scalars: at
`lora_dropout: 0.05` LoRA on SmolLM2-135M took 1.5 times as long as without dropout, and compiled twice as long (two
cores of an AMD EPYC). A hash is worked out for many elements at once, by all cores, and a compiler fuses it with what
stands around it. Over 20 million elements the share that is dropped differs from `p` by no more than chance explains;
which elements are dropped depends on torch's generator, as before, so that a run that is resumed or computes a layer
again drops the same.
"""

from __future__ import annotations

from typing import Any

import torch

_of_torch = torch.nn.functional.dropout
_MOST = 2**31
"""Elements that places of 32 bits tell apart."""


def install() -> None:
    """Takes it wherever models and adapters call `torch.nn.functional.dropout`; other devices keep torch's."""
    torch.nn.functional.dropout = dropout


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """`torch.nn.functional.dropout`: each element is zero with probability `p`, or divided by `1 - p`."""
    if not training or not 0 < p < 1 or inplace or input.device.type != "cpu" or input.numel() >= _MOST:
        return _of_torch(input, p, training, inplace)
    return _Dropout.apply(input, p, _drawn(torch.empty(4, dtype=torch.int32)))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, p: float, numbers: torch.Tensor) -> torch.Tensor:
        ctx.p, keeps = p, kept(input.shape, p, numbers[:2])
        # Fused with others a hash takes less time than a mask, which Inductor stores bit by bit.
        ctx.save_for_backward(numbers if torch.compiler.is_compiling() else keeps)
        return torch.where(keeps, input * (1 / (1 - p)), 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        # From two other numbers, although they are the same: what is computed twice alike torch would keep.
        keeps = saved if saved.dtype == torch.bool else kept(gradient.shape, ctx.p, saved[2:])
        return torch.where(keeps, gradient * (1 / (1 - ctx.p)), 0.0), None, None


def kept(shape: torch.Size, p: float, numbers: torch.Tensor) -> torch.Tensor:
    """Which elements of a tensor of `shape` are kept, each with probability `1 - p`.

    Args:
        numbers: (2,) of 32 bits, at random.

    Source: the three rounds of triple32, without the steps that decide low bits only
    (github.com/skeeto/hash-prospector), of an element's place and these numbers.
    """
    first, second = numbers
    mixed = torch.arange(shape.numel(), dtype=torch.int32).bitwise_xor_(first).mul_(_signed(0xED5AD4BB))
    mixed.bitwise_xor_(mixed >> 11).bitwise_xor_(second).mul_(_signed(0xAC4C1B51))
    mixed.bitwise_xor_(mixed >> 15).mul_(_signed(0x31848BAB))
    return (mixed >= min(round(p * 2**32), 2**32 - 1) - 2**31).view(shape)


@torch.library.custom_op("toolkit::drawn", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _drawn(like: torch.Tensor) -> torch.Tensor:
    """Numbers by torch's generator, the same in both halves of a tensor. An operation of its own: Inductor would draw
    for every vector again. Of an argument that differs from call to call: torch takes two calls alike for one."""
    return torch.empty_like(like[:2]).random_(-(2**31), 2**31).repeat(2)


@_drawn.register_fake
def _(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


def _signed(number: int) -> int:
    return number - (number >> 31 << 32)
