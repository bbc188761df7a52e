from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import environment

from toolkit.cli import doctor


@pytest.fixture(scope="module")
def sections():
    return doctor.collect()


def test_report_names_what_a_bug_report_needs(sections):
    text = doctor.render(sections)
    for expected in (
        "python",
        "memory",
        "torch",
        "transformers",
        "cuda" if "cuda:0" in text else "CPU",
        "toolkit cache",
    ):
        assert expected in text
    assert importlib.metadata.version("transformers") in text
    assert sections["libraries"]["bitsandbytes"].startswith("ok")
    assert sections["libraries"]["deepspeed"].startswith("ok")
    assert all(sections["libraries"][form].startswith("ok") for form in ("fp8", "int4"))


def test_attention_backends_are_reported_one_by_one(sections):
    assert sections["attention"]["sdpa"] == "ok"
    assert "flash_attention_2" in sections["attention"]


def test_a_tested_environment_has_no_problems(sections):
    assert sections["problems"] == []
    assert doctor.render(sections).endswith("no problems found")


def test_missing_and_untested_versions_are_flagged_with_the_pip_command(monkeypatch):
    stated = ["torch>=2.10", "transformers>=99,<100", "nowhere-to-be-found>=1", 'wandb; extra == "trackers"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: stated)
    packages, problems = doctor._packages()
    assert packages["nowhere-to-be-found"] == "missing"
    installed = importlib.metadata.version("transformers")
    assert problems == [
        f"transformers {installed} is outside the tested range: pip install 'transformers<100,>=99'",
        "nowhere-to-be-found is missing: pip install 'nowhere-to-be-found>=1'",
    ]


def test_a_library_that_breaks_at_import_is_a_line_and_not_a_crash(monkeypatch):
    def broken() -> str:
        raise OSError("libcuda.so.1: cannot open shared object file\nmore")

    monkeypatch.setattr(doctor, "_deepspeed", broken)
    sections = doctor.collect()
    assert "deepspeed: fails: OSError: libcuda.so.1: cannot open shared object file" in sections["problems"]
    assert "libcuda.so.1" in doctor.render(sections)


@pytest.mark.parametrize(("section", "name"), [("_devices", "torch"), ("_attention", "backends")])
def test_a_device_or_kernel_that_fails_is_a_problem(monkeypatch, section, name):
    def broken() -> dict[str, str]:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(doctor, section, broken)
    assert f"{name}: fails: RuntimeError: the driver is too old" in doctor.collect()["problems"]


def test_a_gpu_that_torch_has_no_kernels_for_is_a_problem(monkeypatch):
    properties = SimpleNamespace(major=6, minor=1, name="An old GPU", total_memory=2**33)
    said = {
        "is_available": True, "device_count": 1, "get_device_properties": properties, "get_arch_list": ["sm_90"],
        "get_device_capability": (6, 1),
    }  # fmt: skip
    for name, value in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("toolkit.models.device.kind", lambda: "cuda")
    (problem,) = [text for text in doctor.collect()["problems"] if "kernels" in text]
    assert problem.startswith("kernels: fails: torch ") and "capability 6.1" in problem


def test_no_secret_and_no_home_folder_leaks(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    monkeypatch.setenv("WANDB_API_KEY", "secretsecret")
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "deep" / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    text = doctor.render(doctor.collect())
    assert "secret" not in text
    assert str(tmp_path) not in text
    assert f"~{Path('/deep/cache')}" in text


def test_the_hugging_face_cache_is_where_its_library_keeps_it(tmp_path):
    variables = {key: value for key, value in environment().items() if not key.startswith("HF_")}
    program = "from toolkit.cli import doctor; print(doctor._places()['hugging face cache'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables | {"XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path}/huggingface/hub, "), done.stderr
