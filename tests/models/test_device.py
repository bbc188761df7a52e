"""What follows from the GPU's generation, on GPUs that are not here: only the questions to torch are answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from toolkit.cli import doctor
from toolkit.common import UserError
from toolkit.distributed.device_limits import check_device, without_bf16
from toolkit.distributed.engines import dtypes
from toolkit.distributed.layout import World
from toolkit.models import device
from toolkit.models.attention import attention_kernels, backends
from toolkit.planner.hardware import find
from toolkit.recipe import model_configs
from toolkit.recipe.rules import check, load_checked
from toolkit.train import preflight

GPUS = {
    "v100": ("7.0", False),
    "t4": ("7.5", False),
    "rtx3090": ("8.6", True),
    "h100": ("9.0", True),
    "mi300x": ("gfx 9.4", False),
    "mi210": ("gfx 9.0", False),
    "cpu": ("", False),
}
"""Device to what the driver reports, and whether it computes TF32."""
BF16 = {"rtx3090", "h100", "mi300x", "mi210"}
VARLEN = {"rtx3090", "h100"}


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One such device in this machine."""
    name = request.param
    generation = GPUS[name][0]
    major, minor = map(int, generation.removeprefix("gfx ").split(".")) if generation else (0, 0)

    class Properties:
        name, total_memory = request.param, 2**34

    Properties.major, Properties.minor = major, minor
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(generation))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(bool(generation)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: Properties)
    monkeypatch.setattr(torch.version, "hip", "6.4" if generation.startswith("gfx") else None)
    yield name
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def checked(*overrides: str) -> Any:
    return load_checked("smollm2_135m_lora_demo", overrides).recipe


def test_tf32_is_on_where_the_device_has_it_and_may_be_switched_off(gpu: str) -> None:
    has = GPUS[gpu][1]
    device.set_tf32(checked().tf32)
    assert device.computes_tf32() is has
    device.set_tf32(False)
    assert not device.computes_tf32()


@pytest.mark.parametrize(
    ("codes", "runs"),
    [
        ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120", {"t4", "rtx3090", "h100"}),
        ("sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90", {"v100", "t4", "rtx3090", "h100"}),
        ("sm_70 compute_80", {"v100", "t4", "rtx3090", "h100"}),
        ("sm_90a", {"h100"}),
    ],
)
def test_a_gpu_for_which_torch_has_no_kernels_is_refused_before_anything_is_loaded(
    gpu: str, codes: str, runs: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a V100 is by builds for CUDA 13, where the first operation would fail."""
    monkeypatch.setattr(torch.cuda, "get_arch_list", codes.split)
    if gpu in runs or gpu == "cpu" or gpu.startswith("mi"):
        preflight.check_devices(checked("precision=fp32"), World(0, 0, 1, 1))
        assert doctor._devices().get("kernels", "ok") == "ok"
        return
    with pytest.raises(UserError, match=f"{gpu}.*no kernels for its compute capability {GPUS[gpu][0]}"):
        preflight.check_devices(checked("precision=fp32"), World(0, 0, 1, 1))
    assert "no kernels" in doctor._devices()["kernels"]


def test_tf32_is_refused_where_it_is_missing(gpu: str) -> None:
    asked, world = checked("tf32=true", "precision=fp32"), World(0, 0, 1, 1)
    if GPUS[gpu][1]:
        preflight.check_devices(asked, world)
        device.set_tf32(True)
        assert device.computes_tf32()
        return
    with pytest.raises(UserError, match=r"no TF32(.|\n)*remove tf32"):
        preflight.check_devices(asked, world)


def test_both_interfaces_of_torch_can_be_read_afterwards(gpu: str) -> None:
    """Set by the newer one alone, the older raises, which inductor reads when it compiles flex attention."""
    for wanted in ("auto", False):
        device.set_tf32(wanted)
        name = "tf32" if device.computes_tf32() else "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == name
        assert torch.backends.cuda.matmul.allow_tf32 is (name == "tf32")
        assert torch.backends.cudnn.allow_tf32 is (name == "tf32")


@pytest.mark.parametrize("own", [[], ["model.dtype=bf16"], ["precision=pure_bf16"], ["method=qlora"]])
def test_the_way_out_of_missing_bf16_leads_to_a_run(gpu: str, own: list[str]) -> None:
    recipe, world = checked("precision=bf16", *own), World(0, 0, 1, 1)
    if gpu in BF16 or gpu == "cpu":
        preflight.check_devices(recipe, world)
        return
    with pytest.raises(UserError, match="set precision=fp16") as caught:
        preflight.check_devices(recipe, world)
    changed = recipe.with_values(without_bf16(recipe))
    preflight.check_devices(changed, world)
    assert check(changed) == []
    assert all(f"{key}={value}" in str(caught.value) for key, value in without_bf16(recipe).items())
    # Losses are scaled by autocast over fp32 masters, and nothing is left in bf16.
    types = dtypes(changed)
    assert (types.compute, types.autocast, types.master) == ("float16", "float16", "float32")
    assert "bfloat16" not in vars(types).values()


@pytest.mark.parametrize("asked", [{"precision": "bf16"}, {"tf32": True}, {"precision": "fp16"}, {"precision": "fp32"}])
def test_a_plan_refuses_for_a_device_what_a_run_refuses_on_it(gpu: str, asked: dict[str, Any]) -> None:
    planned, made = find(gpu).device, checked("precision=fp32").with_values(asked)
    refusals = []
    for refuses in (
        lambda: preflight.check_devices(made, World(0, 0, 1, 1)),
        lambda: check_device(made, planned.kind, planned.capability, planned.title),
    ):
        try:
            refuses()
            refusals.append("")
        except UserError as error:
            refusals.append(str(error).replace(planned.title, "it").replace(device.name(), "it"))
    assert refusals[0] == refusals[1]


def test_a_plan_refuses_attention_that_cannot_run(gpu: str) -> None:
    """flash-attn may be installed there; but not where nothing of it runs."""
    planned = find(gpu).device
    llama = model_configs.bundled()["meta-llama/Llama-3.2-1B"].config
    for backend, runs in (
        ("torch_varlen", gpu in VARLEN or gpu == "cpu"),
        ("flash_attention_2", gpu in VARLEN or gpu.startswith("mi")),
    ):
        if runs:
            assert backends.planned(backend, llama, "float16", planned.kind, planned.capability) == backend
            continue
        with pytest.raises(UserError, match=r"set model\.attention=auto or one of: eager, sdpa") as refused:
            backends.planned(backend, llama, "float16", planned.kind, planned.capability)
        reason = attention_kernels.available()[backend]
        assert backend != "torch_varlen" or reason in refused.value.what
    assert backends.planned("torch_varlen", llama, "float16", "cuda", None) == "torch_varlen"


def test_attention_follows_the_generation_of_nvidia_alone(gpu: str) -> None:
    reasons = attention_kernels.available()
    assert (reasons["torch_varlen"] == "ok") is (gpu in VARLEN or gpu == "cpu")
    assert (reasons["flex"] == "ok") is (gpu in VARLEN or gpu.startswith("mi"))


@pytest.mark.parametrize("model", ["google/gemma-2-2b-it", "meta-llama/Llama-3.2-1B"])
def test_a_plan_takes_the_attention_that_a_run_takes(gpu: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flash-attn, which a plan cannot know of."""
    monkeypatch.setattr(attention_kernels, "_imports", lambda module: False)
    config = model_configs.bundled()[model].config
    backend = backends.resolve("auto", config, "bfloat16", attention_kernels.available())
    if gpu in ("t4", "h100", "mi300x", "cpu"):
        planned = find(gpu).device
        assert backend == backends.planned("auto", config, "bfloat16", planned.kind, planned.capability)
    usual = "torch_varlen" if gpu in VARLEN or gpu == "cpu" else "sdpa"
    capped = "flex" if gpu in VARLEN or gpu.startswith("mi") else "eager"
    assert backend == (capped if "gemma" in model else usual)


def test_doctor_says_which_precision_to_take(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = doctor._devices()
    if gpu == "cpu":
        assert "CPU" in lines["accelerator"]
        return
    assert ("precision=fp16" in lines["precision"]) is (gpu not in BF16)
    assert ("used" in lines["tf32"]) is GPUS[gpu][1]
    assert GPUS[gpu][0] in lines["cuda:0"]
