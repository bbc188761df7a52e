"""FlashAttention 3 and 4 as one operation, and when a run computes with them (packages that compute on a CPU)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flash_stand_ins
import fourth_compiled
import pytest
import torch
from harness import SUPPORT
from transformers import AutoConfig

from toolkit.distributed.layout import World, batch_layout
from toolkit.models import device
from toolkit.models.attention import varlen, varlen_trials
from toolkit.models.attention.varlen_trials import Documents, Trial
from toolkit.recipe import model_configs
from toolkit.recipe.rules import load_checked
from toolkit.train import agreed

CPU = torch.device("cpu")
GROUPED = Documents(heads=4, shared_heads=2, size=16, length=64, window=24, dtype="bfloat16")
PACKAGES = list(varlen.PACKAGES)


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both packages, in this process and those that it starts."""
    folder = flash_stand_ins.place(tmp_path / "packages", *PACKAGES)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(SUPPORT)]))
    yield
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        sys.modules.pop(name, None)


@pytest.fixture
def nothing_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trials are kept."""
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "a GPU")
    return tmp_path / "cache" / "attention"


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(90, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def _from_the_first(query: Any, key: Any, value: Any, boundaries: Any, *_: Any) -> Any:
    """Attention of one document whose first query sees the first key alone, however many keys there are."""
    heads = (each.transpose(0, 1)[None].float() for each in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).to(query.dtype)


def _refuses(query: Any, key: Any, *_: Any) -> Any:
    if len(query) < len(key):
        raise RuntimeError("there are fewer queries than keys")
    return query


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_asked_whose_keys_the_last_queries_see(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert varlen.continues(CPU, dtype)
    for other in (_from_the_first, _refuses):
        monkeypatch.setattr(varlen, "_on_cpu", other)
        assert not varlen.continues(CPU, dtype)


@pytest.mark.parametrize(("package", "window"), [*itertools.product(PACKAGES, [0, 8])])
def test_a_package_computes_what_torch_does_in_compiled_layers_too(package: str, window: int) -> None:
    ends = torch.tensor([0, 40, 41, 90], dtype=torch.int32)

    def results(package: str, compiled: bool) -> list[torch.Tensor]:
        q, k, v = given = inputs(torch.bfloat16)

        def layer(q: Any, k: Any, v: Any) -> Any:
            return varlen.attended(package, 2 * q, k, v, (ends, ends), (49, 49), 0.25, window).sin()

        compute = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        out = compute(q, k, v)
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    expected = results(varlen.OWN, False)
    for compiled in (False, True):
        for own, others in zip(expected, results(package, compiled), strict=True):
            torch.testing.assert_close(others, own)


@pytest.mark.matrix
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_the_fourth_package_compiles_as_it_is_called(capability: str) -> None:
    """The real one, for a GPU that need not be here."""
    cases = [(32, 8, 64, 0), (32, 8, 128, 1024), (9, 3, 64, 0), (16, 16, 96, 0)]
    command = [sys.executable, fourth_compiled.__file__, json.dumps(cases)]
    environ = {**os.environ, **fourth_compiled.environment(capability)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for (heads, shared, size, _), found in zip(cases, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        queries, keys = [2048, heads, size], [2048, shared, size]
        assert found == [queries, [heads, 2048], queries, keys, keys]


def test_what_is_installed_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert varlen.installed() == PACKAGES
    assert not {"flash_attn", "flash_attn_interface"} & {*sys.modules}
    (tmp_path / "packages/flash_attn/cute/interface.py").unlink()
    assert varlen.installed() == ["FlashAttention 3"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", ""),
        ("dropped", "its results differ from those of torch's kernels by up to"),
        ("flipped", "its gradients of keys differ"),
        ("raises", "no kernel image is available"),
    ],
)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_trial_tells_a_package_that_computes_the_same(
    package: str, fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_STAND_IN", fault)
    state = torch.get_rng_state()
    found = varlen_trials.trial(package, GROUPED, CPU)
    assert said in found.fault and bool(said) == bool(found.fault) and "\n" not in found.fault and found.lasting
    if not fault:
        assert found.seconds > 0 < found.own and found.first > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fault", ["memory", "context", "missing"])
def test_a_gpu_without_room_and_a_missing_part_are_another_matter_another_time(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_STAND_IN", fault)
    found = varlen_trials.trial(PACKAGES[0], GROUPED, CPU)
    assert found.fault and not found.lasting


def test_a_trial_that_dies_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_STAND_IN", "chatty")
    assert not varlen_trials.tried(PACKAGES[1], GROUPED, CPU).fault
    monkeypatch.setenv("FLASH_STAND_IN", "killed")
    found = varlen_trials.tried(PACKAGES[1], GROUPED, CPU)
    assert "ended with code -9" in found.fault and not found.lasting


def given(monkeypatch: pytest.MonkeyPatch, trials: dict[str, Trial], own: float = 0.01) -> list[str]:
    """Trials that come out like that; returns which were made."""
    made: list[str] = []
    monkeypatch.setattr(varlen_trials, "_measured", lambda *args: own)
    monkeypatch.setattr(varlen_trials, "tried", lambda name, *args: made.append(name) or trials[name])
    return made


def test_a_run_takes_the_fastest_that_is_right(nothing_tried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = {PACKAGES[0]: Trial(0.008, 0.012, 1.0), PACKAGES[1]: Trial(0.004, 0.010, 20.0)}
    made = given(monkeypatch, trials)

    def chosen(calls: float, *packages: str) -> tuple[str, str]:
        return varlen_trials.choose(GROUPED, calls, CPU, packages)

    # 10 ms each: less than a minute is not worth a trial.
    assert chosen(5999, *PACKAGES) == chosen(1e9) == ("", "") and not made
    package, said = chosen(1e5, *PACKAGES)
    assert package == PACKAGES[1] and "2.50 times as fast" in said and "64 tokens" in said and made == PACKAGES
    # What came of it is kept.
    assert chosen(1e5, *PACKAGES)[0] == PACKAGES[1] and made == PACKAGES
    assert chosen(1e5, PACKAGES[0])[0] == PACKAGES[0]
    given(monkeypatch, {PACKAGES[0]: Trial(fault="wrong"), PACKAGES[1]: Trial(0.0099, 0.01, 1.0)})
    for file in nothing_tried.iterdir():
        file.write_text("{")  # Cut off.
    package, said = chosen(1e5, *PACKAGES)
    assert not package and "FlashAttention 3 is not used: wrong" in said and "1.01 times" in said


@pytest.mark.usefixtures("nothing_tried")
def test_a_first_call_that_takes_longer_than_it_saves_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {PACKAGES[1]: Trial(0.005, 0.01, 60.0)})
    assert not varlen_trials.choose(GROUPED, 10_000, CPU, PACKAGES[1:])[0]
    assert varlen_trials.choose(GROUPED, 13_000, CPU, PACKAGES[1:])[0]


def test_a_gpu_that_is_full_leaves_it_at_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(varlen_trials, "_measured", full)
    assert varlen_trials.choose(GROUPED, 1e9, CPU, PACKAGES) == (varlen.OWN, "")


@pytest.mark.usefixtures("nothing_tried")
def test_a_fault_that_may_pass_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = given(monkeypatch, {PACKAGES[0]: Trial(fault="no room", lasting=False)})
    for _ in range(2):
        assert not varlen_trials.choose(GROUPED, 1e5, CPU, PACKAGES[:1])[0]
    assert len(made) == 2


def test_attention_of_a_model() -> None:
    llama, gemma = (
        model_configs.bundled()[name].config for name in ("meta-llama/Llama-3.2-1B", "google/gemma-3-1b-it")
    )
    documents = varlen_trials.documents_of(llama, 2, 600.0, "bfloat16")
    assert documents == Documents(16, 4, 64, 512, 0, "bfloat16")
    assert json.dumps(dataclasses.asdict(documents))
    windowed = varlen_trials.documents_of(gemma, 1, 5.0, "float16")
    assert windowed and (windowed.window, windowed.length, windowed.size) == (512, 16, 256)
    # Layers whose heads differ, and queries that differ from values.
    assert varlen_trials.documents_of(llama | {"global_head_dim": 512}, 1, 600.0, "bfloat16") is None
    assert varlen_trials.documents_of({"model_type": "rwkv", "hidden_size": 8}, 1, 600.0, "bfloat16") is None


@pytest.mark.parametrize(
    ("attention", "backend", "kind", "used"),
    [
        ("auto", "torch_varlen", "cuda", PACKAGES[0]),
        ("torch_varlen", "torch_varlen", "cuda", varlen.OWN),
        ("auto", "flex", "cuda", varlen.OWN),
        ("auto", "torch_varlen", "cpu", varlen.OWN),
    ],
)
def test_all_processes_take_what_each_of_them_has(
    attention: str, backend: str, kind: str, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(varlen_trials, "choose", lambda *args: asked.append(args) or (args[3][0], "it is faster"))
    # The other process lacks the second package.
    together: Any = SimpleNamespace(
        exchange=lambda topic, own, judge: judge({0: own, 1: PACKAGES[:1]}), world=World(2, 0, 2, 2)
    )
    chosen = ["precision=bf16", f"model.attention={attention}", "batch.global_batch_size=8", "batch.micro_batch_size=2"]
    loaded = load_checked("smollm2_135m_lora_demo", chosen)
    layout = batch_layout(loaded.recipe, 2)
    model: Any = SimpleNamespace(config=AutoConfig.for_model("llama", num_hidden_layers=30, hidden_size=64))
    messages: list[str] = []
    progress: Any = SimpleNamespace(remark=messages.append)
    varlen.use("another run's")
    monkeypatch.setattr(device, "kind", lambda: kind)
    decided = agreed.with_flash_attention(loaded, model, backend, layout, None, 50, together, progress)
    assert varlen.used() == used
    assert decided.chosen.get("model.attention") == ("torch_varlen: it is faster" if used else None)
    assert messages == ["it is faster"] * bool(used)
    if used:
        ((documents, calls, at, packages),) = asked
        assert (documents.length, calls, at, packages) == (512, 30 * 50 * 2, torch.device("cuda:0"), PACKAGES[:1])
    varlen.use(varlen.OWN)
