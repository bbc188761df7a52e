"""Keys and values of whole rows, gathered by several processes; in whole trainings see whole/test_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.checkpoint import checkpoint

from toolkit.data.batching.collate import Collator
from toolkit.data.batching.part_batches import PartCollator
from toolkit.models.attention.attention_kernels import varlen_attention
from toolkit.models.parallel import context_parallel, shared_rows

DOCUMENTS = [5, 1, 20, 3]


def batch(size: int, rank: int | None = None) -> dict:
    """A row of four documents, whole or the part of a process."""
    tokens = sum(DOCUMENTS)
    row = {"input_ids": list(range(tokens)), "labels": [-100] * tokens, "seq_lengths": DOCUMENTS}
    whole = Collator(0, "flat", 2 * size)
    return (whole if rank is None else PartCollator(whole, rank, size, 2))([row])


def tensors(tokens: int, heads: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, each, tokens, 8, requires_grad=True) for each in (heads, 1, 1)]


def compare(rank: int, size: int, store: str, window: int | None, recomputed: bool) -> None:
    """Attention and gradients of a process's part are those of the whole row."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    shared_rows._GROUP.update(way="context", rows=dist.group.WORLD)
    attend = context_parallel.gather(varlen_attention)
    whole, mine = batch(size), batch(size, rank)
    tokens = whole["input_ids"].shape[1]
    part = PartCollator(Collator(0, "flat", 2 * size), rank, size, 2).part
    given, weights = tensors(tokens, 3), torch.randn(1, tokens, 3, 8)
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    known = {"sliding_window": window, **{name: whole[name] for name in names}}
    expected, _ = varlen_attention(None, *given, None, **known)
    (expected * weights).sum().backward()
    parts = [part(each.detach().transpose(1, 2)).transpose(1, 2).requires_grad_() for each in given]

    def run(*heads: torch.Tensor) -> torch.Tensor:
        return attend(None, *heads, None, row_chunks=mine["row_chunks"], **known)[0]

    out = checkpoint(run, *parts, use_reentrant=False) if recomputed else run(*parts)
    (out * part(weights)).sum().backward()
    torch.testing.assert_close(out, part(expected), rtol=1e-5, atol=1e-6)
    for one, other in zip(parts, given, strict=True):
        wanted = part(other.grad.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(one.grad, wanted, rtol=1e-5, atol=1e-6)
    # One that leaves while another still hears of it would abort that one.
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("window", "recomputed"), [(None, False), (4, False), (4, True)])
def test_parts_get_the_attention_of_the_whole_row(
    size: int, window: int | None, recomputed: bool, tmp_path: Path
) -> None:
    arguments = (size, str(tmp_path / "store"), window, recomputed)
    torch.multiprocessing.spawn(compare, arguments, nprocs=size)


def test_layers_keep_their_part_and_not_the_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    monkeypatch.setattr(shared_rows, "_GROUP", {"way": "context", "rows": dist.group.WORLD})
    times = []
    gathers = context_parallel._all_gather
    monkeypatch.setattr(context_parallel, "_all_gather", lambda part: times.append(1) or gathers(part))
    try:
        row = batch(1, 0)
        out, _ = context_parallel.gather(varlen_attention)(
            None, *tensors(row["input_ids"].shape[1], 3), None, row_chunks=row["row_chunks"]
        )
        assert len(times) == 2
        out.sum().backward()
        # Keys and values once more, though both pieces of the row need them.
        assert len(times) == 4
    finally:
        dist.destroy_process_group()
