"""Full fine-tuning whose linear layers multiply in 8-bit floating point, by torchao.

Inputs, weights and gradients are rounded to e4m3 or e5m2 for each of a layer's three products, with a scale for the
whole tensor (`tensorwise`) or for each row (`rowwise`: nearer to bf16, and slower). What is rounded is what the same
training in bf16 would multiply, on every engine alike; weights, gradients and what is saved stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, float8_utils
from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.common import UserError
from toolkit.recipe.model_configs import experts

_largest = float8_utils.tensor_to_amax


def _largest_by_rows(
    x: torch.Tensor,
    reduce_amax: bool = False,
    device_mesh: Any = None,
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE,
    axiswise_dim: int | None = None,
) -> torch.Tensor:
    """The largest number of a tensor, of its rows' largest ones.

    Compiled for any number of rows, torch's search of all numbers at once divides the place of each by that of all, in
    64 bits: on an H200 it read 1.3 of 4 TB/s. Rows are searched at the speed of memory.
    """
    if scaling_granularity is ScalingGranularity.TENSORWISE and x.dim() > 1 and x.is_contiguous():
        x = x.abs().amax(-1)
    return _largest(x, reduce_amax, device_mesh, scaling_granularity, axiswise_dim)


float8_utils.tensor_to_amax = _largest_by_rows
# From torch 2.14 on compiled layers clamp by instructions beside which Triton writes some transposed fp8 numbers as NaN
# or infinity (triton-lang/triton issue 11111). torchao's conversion of models avoids them; nothing else calls it.
_patch_inductor_min_max_codegen()


class Fp8Products(Float8Linear):
    """A linear layer that is trained, with products in fp8; `tensorwise` or `rowwise` has a scale."""

    fp8_scaling: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in features); returns (..., out features) in the type that the layer would have returned."""
        place = input.device.type
        # torchao's own asks for the autocast of GPUs only, and rounds fp32 masters where an engine has none.
        dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else input.dtype
        weight = self.weight.to(dtype).t()
        product = matmul_with_hp_or_float8_args.apply(input.to(dtype), weight, self.linear_mm_config, self.config)
        return product if self.bias is None else product + self.bias.to(dtype)


def multiply_in_fp8(model: nn.Module, scaling: str) -> int:
    """Has the linear layers between the first and the last layer of each stack multiply in fp8; the model is changed.

    These, the embeddings, the output head and the routers of mixtures are known to lose the most by it.

    Args:
        model: A Transformers model, before engines wrap it.
        scaling: `tensorwise` or `rowwise`.

    Returns:
        Parameters whose products are in fp8.

    Raises:
        UserError: If there are none.
    """
    # Tokens of a batch, over which gradients of weights are summed, come in any number, and units of 16 are multiplied.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(scaling), pad_inner_dim=True)
    found = list(_inner(model))
    for parent, name, layer in found:
        replaced = Fp8Products.from_float(layer, config)
        replaced.fp8_scaling = scaling
        setattr(parent, name, replaced)
    if not found:
        raise UserError(
            "products in fp8: this model has no linear layer between its first and last layers with sides that are "
            "multiples of 16",
            "set precision=bf16, or pure_bf16 without fp32 masters",
        )
    return sum(layer.in_features * layer.out_features for _, _, layer in found)


def _inner(model: Any) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers that can, with where they hang."""
    routed = experts(model.config.to_dict())[0]
    for stack in model.modules():
        layers = [each for each in stack.children() if isinstance(each, GradientCheckpointingLayer)]
        for layer in layers[1:-1]:
            for parent in layer.modules():
                for name, child in parent.named_children():
                    # Subclasses compute something else as well.
                    if type(child) is not nn.Linear or child.out_features == routed > 1:
                        continue
                    if child.in_features % 16 == child.out_features % 16 == 0:
                        yield parent, name, child
