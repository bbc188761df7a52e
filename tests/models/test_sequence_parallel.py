"""Parts of rows for heads and back, without other processes; with them see whole/test_matrix.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from toolkit.common import UserError
from toolkit.models.attention.attention_kernels import register, varlen_attention
from toolkit.models.parallel import sequence_parallel, shared_rows


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, which shares rows with itself."""
    monkeypatch.setattr(shared_rows, "_GROUP", {})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    register()
    shared_rows.group_processes("sequence", 1)
    shared_rows.share_rows(sequence_parallel.exchange)
    yield
    dist.destroy_process_group()
    register()


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, 12, 8, requires_grad=True) for heads in (6, 2, 2)]


def test_attention_of_a_whole_row_is_that_of_the_backend(alone: None) -> None:
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32), "max_length_q": 7}
    exchanged, plain = AttentionInterface()["torch_varlen"], varlen_attention
    results = []
    for attend, rows in ((exchanged, {"row_tokens": 12}), (plain, {})):
        given = tensors()
        out, _ = attend(None, *given, None, **boundaries, **rows)
        out.square().sum().backward()
        results.append([out, *(each.grad for each in given)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # Without parts it is the backend itself: a model that is asked something else beside training.
    whole, _ = exchanged(None, *tensors(), None, **boundaries)
    torch.testing.assert_close(whole, results[1][0], rtol=0, atol=0)


def test_without_a_group_no_rows_are_shared() -> None:
    assert shared_rows.sharing() == 1


def test_a_balance_loss_that_is_not_known_is_refused() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    with pytest.raises(UserError, match="balance loss of a llama would be that of parts of rows") as caught:
        shared_rows.share_balance(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)), "parallel.sequence")
    assert caught.value.change == "remove parallel.sequence"
