"""Dropout on CPUs: its rate, its independence, and that backward passes, recomputation and compilers drop the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from small import LORA, place_with, set_up
from torch.utils.checkpoint import checkpoint

from toolkit.models.dropout import _of_torch, dropout

place = place_with("llama")
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def of_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", _of_torch)  # Earlier tests of this process may have had ours.
        torch.manual_seed(5)
        yield


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_each_element_is_dropped_independently_at_its_rate(p: float) -> None:
    size, columns, found = 2**20, 576, []
    for _ in range(8):
        each = (dropout(torch.ones(size), p) != 0).double() - (1 - p)
        deviations = [each.sum() / math.sqrt(size * p * (1 - p))]
        # Neighbours, the same place in other rows, and powers of two, at which hashes are weak.
        for lag in (1, 2, 3, 64, columns, 1024, 1536, 2**16, 2**19):
            deviations.append((each[lag:] * each[:-lag]).sum() / (math.sqrt(size - lag) * p * (1 - p)))
        by_column = each[: size // columns * columns].view(-1, columns).sum(0) / math.sqrt(
            size // columns * p * (1 - p)
        )
        deviations.append((by_column.square().sum() - columns) / math.sqrt(2 * columns))
        found.append(torch.stack(deviations))
    # Each is of a normal distribution: beyond 4.5 lies one of 150,000.
    assert torch.stack(found).abs().max() < 4.5
    assert (torch.stack(found).sum(0) / math.sqrt(8)).abs().max() < 4.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_divided_by_its_rate_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    inputs = torch.randn(64, 48, dtype=dtype).requires_grad_()
    outputs = dropout(inputs, 0.25)
    (gradients,) = torch.autograd.grad(outputs, inputs, torch.ones_like(outputs))
    kept = outputs != 0
    assert outputs.dtype == dtype and 0.15 < 1 - kept.float().mean() < 0.35
    torch.testing.assert_close(outputs[kept], inputs[kept] / 0.75)
    assert torch.equal(gradients, torch.where(kept, torch.tensor(1 / 0.75, dtype=dtype), 0))


def three_times(inputs: torch.Tensor) -> Tensors:
    hidden = torch.nn.functional.rms_norm(inputs, (32,))
    return dropout(hidden, 0.5), dropout(hidden, 0.5), dropout(hidden, 0.5)


def masks_and_gradients(function: Callable[[torch.Tensor], Tensors]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of three passes from the same seed, and the gradient of another output in each."""
    masks, gradients = [], []
    for number in range(3):
        torch.manual_seed(7)
        inputs = torch.randn(96, 32).requires_grad_()
        output = function(inputs)[number]
        masks.append(output != 0)
        gradients += torch.autograd.grad(output.sum(), inputs)
    return masks, gradients


def compiled(function: Callable[[torch.Tensor], Tensors]) -> Callable[[torch.Tensor], Tensors]:
    torch._dynamo.reset()
    return torch._dynamo.config.patch(specialize_float=True)(torch.compile(function, dynamic=True))


def checkpointed(function: Callable[[torch.Tensor], Tensors]) -> Callable[[torch.Tensor], Tensors]:
    return lambda inputs: checkpoint(function, inputs, use_reentrant=False)


@pytest.mark.parametrize("kind", ["as it is", "compiled", "checkpointed", "compiled and checkpointed"])
def test_backward_passes_drop_what_forward_passes_dropped(kind: str) -> None:
    function = compiled(three_times) if "compiled" in kind else three_times
    function = checkpointed(function) if "checkpointed" in kind else function
    masks, gradients = masks_and_gradients(function)
    for mask, gradient in zip(masks, gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient(mask))
    again, _ = masks_and_gradients(function)
    assert all(torch.equal(mask, same) for mask, same in zip(masks, again, strict=True))
    # Of one input and one rate, and yet no two are alike.
    assert not any(torch.equal(masks[first], masks[second]) for first, second in ((0, 1), (0, 2), (1, 2)))


def test_compiled_layers_keep_no_masks() -> None:
    model = set_up(*LORA, "method.lora_dropout=0.5", "compile=layers").trainer.model.train()
    kept: list[torch.dtype] = []
    ids = torch.randint(128, (2, 24))
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.dtype) or each, lambda each: each):
        model(input_ids=ids, labels=ids)
    assert torch.int32 in kept and torch.bool not in kept


def expected_gradient(mask: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    inputs = torch.randn(96, 32).requires_grad_()
    hidden = torch.nn.functional.rms_norm(inputs, (32,))
    return torch.autograd.grad((hidden * mask * 2).sum(), inputs)[0]


@pytest.mark.parametrize(
    ("rate", "training", "inplace"), [(0.0, True, False), (1.0, True, False), (0.5, False, False), (0.5, True, True)]
)
def test_all_else_is_left_to_torch(rate: float, training: bool, inplace: bool) -> None:
    inputs = torch.randn(16, 16)
    torch.manual_seed(3)
    expected = torch.dropout(inputs.clone(), rate, training)
    torch.manual_seed(3)
    given = inputs.clone()
    outputs = dropout(given, rate, training, inplace)
    torch.testing.assert_close(outputs, expected)
    assert (outputs is given) == (inplace or not training or rate == 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(inputs, 1.5)


def test_adapters_and_models_of_a_run_drop_so() -> None:
    model = set_up(*LORA, "method.lora_dropout=0.5").trainer.model
    assert torch.nn.functional.dropout is dropout
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    inputs = torch.ones(4, layer.in_features)
    torch.manual_seed(3)
    expected = dropout(inputs, 0.5)
    torch.manual_seed(3)
    assert torch.equal(layer.lora_dropout["default"].train()(inputs), expected)
