"""Which attention a plan takes: documents by themselves, or on a CPU what was measured, by dtype and length."""

from __future__ import annotations

import dataclasses

import pytest

from toolkit.data.statistics import DataStatistics
from toolkit.planner.hardware import Hardware, find
from toolkit.planner.kernels import EAGER, backend, may_compile
from toolkit.recipe import Recipe

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
FALCON = {**LLAMA, "model_type": "falcon"}
"""Does not read where documents begin."""
SHORT = {"eager": {64: 40e9, 1024: 20e9}, "sdpa": {64: 20e9, 1024: 80e9}}
ROWS = DataStatistics(100, 6000, 6000, 100, 360_000, (50.0, 70.0))


def recipe(precision: str = "bf16", **sections: object) -> Recipe:
    given = {"batch": {"seq_len": 1024, "global_batch_size": 4, "micro_batch_size": 4}, **sections}
    model = {"path": "any", **given.pop("model", {})}  # type: ignore[dict-item]
    return Recipe.model_validate({"model": model, "data": {"sources": ["x.jsonl"]}, "precision": precision, **given})


@pytest.fixture
def cpu() -> Hardware:
    return dataclasses.replace(find("cpu"), attention={"bf16": SHORT})


def test_documents_are_attended_to_by_themselves_wherever_that_runs(cpu: Hardware) -> None:
    for precision in ("bf16", "fp32"):
        assert backend(recipe(precision), cpu, LLAMA, ROWS) == ("torch_varlen", "")
    assert backend(recipe(), find("h100"), LLAMA, ROWS) == ("torch_varlen", "")
    assert backend(recipe("fp32"), find("h100"), LLAMA, ROWS) == ("sdpa", "")
    assert backend(recipe(model={"attention": "sdpa"}), cpu, LLAMA, ROWS) == ("sdpa", "")
    chunked = {**LLAMA, "attention_chunk_size": 8192}
    assert backend(recipe(), find("h100"), chunked, ROWS) == ("sdpa", "")


def test_short_rows_get_eager_attention_where_it_was_measured_to_be_faster(cpu: Hardware) -> None:
    name, why = backend(recipe(), cpu, FALCON, ROWS)
    assert name == "eager" and why.startswith(EAGER) and "1.85 times as fast" in why and "71 tokens" in why
    bart = {"model_type": "bart", "is_encoder_decoder": True}
    assert backend(recipe(objective="seq2seq"), cpu, bart, ROWS) == (name, why)
    # Full rows where the data is not known; dtypes and devices for which nothing was measured; what the user says.
    assert backend(recipe(), cpu, FALCON, None) == ("sdpa", "")
    assert backend(recipe("fp32"), cpu, FALCON, ROWS) == ("sdpa", "")
    assert backend(recipe(), find("cpu"), FALCON, ROWS) == ("sdpa", "")
    assert backend(recipe(model={"attention": "sdpa"}), cpu, FALCON, ROWS) == ("sdpa", "")


def test_eager_attention_that_computes_something_else_is_not_taken(cpu: Hardware) -> None:
    assert backend(recipe(), cpu, {**FALCON, "alibi": True}, ROWS) == ("sdpa", "")


def test_what_reads_fused_kernels_keeps_them(cpu: Hardware) -> None:
    selective = recipe(activation_checkpointing={"mode": "selective"})
    assert backend(selective, cpu, FALCON, ROWS) == ("sdpa", "")


def test_where_compiling_may_pay() -> None:
    assert [name for name in ("cpu", "t4", "h200", "mi300x") if may_compile(find(name))] == ["cpu", "t4", "h200"]
