"""The generated folders: current, equal to what a run uses, and one new file from one new strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import ROOT

from toolkit.cli.main import main
from toolkit.distributed.config_files import render, stale
from toolkit.distributed.engines import training_arguments
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher_deepspeed import NVME_PLACEHOLDER
from toolkit.distributed.layout import World, batch_layout, run_length
from toolkit.recipe import load, shipped_recipes

ZERO = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]
RECIPE = "model: {path: m}\ndata: {sources: [d.jsonl]}\nschedule: {max_steps: 1}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "plain.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_committed_files_are_current() -> None:
    assert stale(render([shipped_recipes()]), ROOT) == []


@pytest.mark.parametrize("name", ZERO)
def test_committed_json_is_what_the_trainer_is_given(name: str, folder: Path) -> None:
    nvme = [f"nvme_path={NVME_PLACEHOLDER}"] if name == "zero3_nvme" else []
    recipe = load("plain", [f"strategy={name}", *nvme]).recipe
    layout = batch_layout(recipe, 2)
    given = training_arguments(recipe, layout, run_length(recipe, None, layout))["deepspeed"]
    assert json.loads((ROOT / "deepspeed_configs" / f"{name}.json").read_text()) == given


def test_every_zero_strategy_has_its_json_and_every_strategy_its_yaml() -> None:
    names = {file.stem for file in (shipped_recipes() / "strategy").glob("*.yaml")} - {"auto"}
    # One recipe divides in a way that accelerate's YAML can say, and says of the engine what its strategy says.
    divided = {"llama_3_1_70b_full_tp_fsdp": 8}
    assert {file.stem for file in (ROOT / "accelerate_configs").iterdir()} == names | divided.keys()
    for name, size in divided.items():
        said = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
        assert said.pop("parallelism_config") == {"parallelism_config_tp_size": size}
        plain = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp.yaml").read_text())
        plain["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
        assert said == plain
    assert sorted(file.stem for file in (ROOT / "deepspeed_configs").iterdir()) == ZERO


@pytest.mark.parametrize("name", ["fsdp", "fsdp_grad_op", "fsdp_hybrid", "fsdp_offload"])
def test_fsdp_yaml_says_what_the_run_exports(name: str, folder: Path) -> None:
    said = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())["fsdp_config"]
    variables = environment(load("plain", [f"strategy={name}"]).recipe, World(), {})
    exported = {key.lower(): value for key, value in variables.items() if key.startswith("FSDP_")}
    assert {key: str(said[key]).lower() for key in exported} == {k: str(v).lower() for k, v in exported.items()}


def test_new_strategy_is_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = folder / "recipes" / "strategy" / "big_buckets.yaml"
    own.parent.mkdir()
    own.write_text("name: zero2\nreduce_bucket_size: 500000000\n")
    assert main(["render"]) == 0
    written = json.loads((folder / "deepspeed_configs" / "big_buckets.json").read_text())
    assert written["zero_optimization"]["reduce_bucket_size"] == 500000000
    assert main(["render", "--check"]) == 0
    # Changed by hand, changed in the strategy, and a strategy that is gone.
    file = folder / "accelerate_configs" / "zero3.yaml"
    file.write_text(file.read_text().replace("true", "false"))
    own.rename(own.with_name("huge_buckets.yaml"))
    capsys.readouterr()
    assert main(["render", "--check"]) == 1
    said = capsys.readouterr().err
    for name in ("zero3.yaml", "big_buckets.yaml", "big_buckets.json", "huge_buckets.yaml", "huge_buckets.json"):
        assert name in said
    assert "zero2.yaml" not in said
    # Nothing is deleted behind the user's back.
    assert main(["render"]) == 1
    assert "big_buckets.yaml" in capsys.readouterr().err
    assert (folder / "deepspeed_configs" / "big_buckets.json").exists()


def test_strategy_may_extend_another_and_lie_in_a_folder_that_is_named(folder: Path) -> None:
    (folder / "elsewhere" / "strategy").mkdir(parents=True)
    (folder / "elsewhere" / "strategy" / "mine.yaml").write_text("defaults: [zero3_nvme]\npin_memory: false\n")
    assert main(["render", "--recipes", "elsewhere"]) == 0
    zero = json.loads((folder / "deepspeed_configs" / "mine.json").read_text())["zero_optimization"]
    offloaded = {"device": "nvme", "nvme_path": NVME_PLACEHOLDER, "pin_memory": False}
    assert (zero["stage"], zero["offload_param"]) == (3, offloaded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: zero2\nbucket: 5\n", "strategy.bucket: unknown key  (recipes/strategy/mine.yaml:2)"),
        ("name: [zero2\n", "recipes/strategy/mine.yaml:1"),
        ("zero2\n", "must be a mapping of keys  (recipes/strategy/mine.yaml:1)"),
        ("name: zero2\noffload_optimizer: nvme\n", "set strategy.offload_optimizer=cpu"),
    ],
)
def test_slip_in_a_strategy_file_names_the_file(
    text: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipes" / "strategy").mkdir()
    (folder / "recipes" / "strategy" / "mine.yaml").write_text(text)
    assert main(["render"]) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "accelerate_configs").exists()


@pytest.mark.parametrize(
    ("start", "overrides", "expected"),
    [
        ("", ["strategy=zero3_offload"], ("zero3", "cpu", "cpu")),
        ("defaults: [{strategy: zero3_offload}, _self_]\n", ["strategy=zero2"], ("zero2", "none", "none")),
        ("defaults: [{strategy: zero3_offload}, _self_]\n", ["strategy=fsdp_offload"], ("fsdp", "none", "cpu")),
        ("defaults: [{strategy: zero2}, _self_]\n", ["offload_optimizer=cpu"], ("zero2", "cpu", "none")),
        ("defaults: [{strategy: zero2_offload}, _self_]\n", ["strategy=ddp"], ("ddp", "none", "none")),
    ],
)
def test_strategy_on_the_command_line_replaces_the_recipes(
    start: str, overrides: list[str], expected: tuple[str, str, str], folder: Path
) -> None:
    (folder / "recipes" / "plain.yaml").write_text(start + RECIPE)
    strategy = load("plain", overrides).recipe.strategy
    assert (strategy.name, strategy.offload_optimizer, strategy.offload_param) == expected


def test_nvme_asks_for_its_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"strategy\.nvme_path: is required"):
        load("plain", ["strategy=zero3_nvme"])
