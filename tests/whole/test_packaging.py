from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from harness import write_jsonl
from packaging.requirements import Requirement
from tiny import chat_rows, tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MINE = """\
defaults: smollm2_135m_lora
model:
  path: tiny
data:
  sources: [rows.jsonl]
  eval_split: 0.25
batch:
  seq_len: 128
  global_batch_size: 4
"""


def _lock() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_light_modules_import_without_a_framework():
    program = (
        "import sys, toolkit.recipe.rules, toolkit.recipe.model_configs;"
        "import toolkit.distributed.environment, toolkit.distributed.launcher;"
        "print(sorted({'torch', 'transformers', 'datasets', 'accelerate', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_no_module_hides_a_dependency_or_a_standard_module():
    # `python toolkit/run.py` puts toolkit/ first on the path.
    names = {path.stem for path in (ROOT / "toolkit").iterdir() if path.suffix == ".py" or path.is_dir()}
    dependencies = {Requirement(text).name.replace("-", "_") for text in PROJECT["project"]["dependencies"]}
    assert not (names - {"__init__", "__main__"}) & (dependencies | sys.stdlib_module_names | {"hydra", "yaml"})


def test_lock_pins_every_dependency_inside_its_range():
    lock = {name.lower().replace("_", "-"): version for name, version in _lock().items()}
    project = PROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(lock[requirement.name.lower()]), text


def test_lock_is_for_every_platform_and_names_no_place():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"\+c(pu|u\d)|nvidia-(?!ml-py)|triton|://|find-links|index-url| @ ", text)
    assert not re.search(r"find-links|index-url|://", (ROOT / "Makefile").read_text())


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Python of a new environment that has the wheel installed; dependencies come from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder, ROOT]
    _run(sys.executable, "-m", *build, cwd=folder)
    [wheel] = folder.glob("accelerate_toolkit-*.whl")

    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [site_packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    # A path in a .pth file is added after this folder, and its own .pth files (the editable checkout) are not read.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def own_repo(tmp_path) -> Path:
    """A user's folder: one recipe that extends a shipped one, a model and data."""
    tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "tiny")
    write_jsonl(tmp_path / "rows.jsonl", chat_rows(24))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_wheel_carries_the_package_the_recipes_and_the_model_facts(python, tmp_path):
    program = (
        "import toolkit, pathlib, json; root = pathlib.Path(toolkit.__file__).parent;"
        "print(json.dumps(sorted(str(path.relative_to(root)) for path in root.rglob('*') if path.is_file())))"
    )
    installed = set(json.loads(_run(python, "-c", program, cwd=tmp_path)))
    package, recipes = ROOT / "toolkit", ROOT / "recipes"
    expected = {
        str(path.relative_to(package))
        for kind in ("py", "json", "yaml", "j2", "css", "js")
        for path in package.rglob(f"*.{kind}")
    }
    expected |= {f"_recipes/{path.relative_to(recipes)}" for path in recipes.rglob("*.yaml")}
    assert expected <= installed


@pytest.mark.slow
def test_installed_wheel_trains_a_recipe_of_the_users_own_folder(python, own_repo):
    where = _run(python, "-c", "import toolkit; print(toolkit.__file__)", cwd=own_repo)
    assert where.startswith(str(python.parent.parent))

    console = python.parent / "toolkit"
    listed = _run(console, "ls", cwd=own_repo)
    assert "mine" in listed and "llama_3_2_1b_lora" in listed
    _run(console, "validate", "recipe=mine", cwd=own_repo)

    _run(python, "-m", "toolkit.run", "recipe=mine", "schedule.max_steps=2", "precision=fp32", cwd=own_repo)
    [run] = (own_repo / "runs").iterdir()
    losses = [record["loss"] for line in (run / "metrics.jsonl").open() if "loss" in (record := json.loads(line))]
    assert len(losses) == 2
    assert all(0 < loss < 20 for loss in losses)
    assert list(run.rglob("adapter_model.safetensors"))
