"""What comes from the environment is used and shown nowhere: every byte that a run leaves or prints is looked at."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import leave_unmeasured
from ranks import ON_CPU, Ranks
from small import MODELS, populate
from tiny import CHATML, tiny_model

from toolkit.cli.main import main as command
from toolkit.recipe.parallel import Parallel
from toolkit.train.main import main

SECRET = "hunter2hunter2"
VARIABLE = "${oc.env:MY_VARIABLE}"
RECIPE = [
    *("recipe=small", "max_steps=2", "checkpoint.save_steps=1", "data.eval_split=0.2", "num_prompts=2"),
    *(f"{key}='{VARIABLE}'" for key in ("description", "model.path", "model.tokenizer")),
    *(f"model.chat_template='{VARIABLE}.jinja'", f"data.chat_template_kwargs={{who: '{VARIABLE}'}}"),
    *(f"data=['{VARIABLE}.jsonl']", f"data.columns={{messages: '{VARIABLE}'}}", f"data.ignore=['{VARIABLE}x']"),
    *(f"evaluation.prompts=['hello {VARIABLE}','{VARIABLE}']", f"output.dir='runs/{VARIABLE}'"),
    "logging.trackers=[tensorboard]",
]


SLOW = pytest.mark.matrix
VALUES = {
    "quotes": pytest.param("{} & <b>'s \\x"),
    "word": pytest.param("{}", marks=SLOW),
    "path": pytest.param("{folder}/{}", marks=SLOW),
}


@pytest.fixture(params=VALUES.values(), ids=VALUES)
def value(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A value of the environment, which names a model, rows, a template and a column of what lies in a folder."""
    value: str = request.param.format(SECRET, folder=tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_VARIABLE", value)
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path / "cache"))
    leave_unmeasured(tmp_path / "cache")
    populate(tmp_path, "llama")
    Path(value).parent.mkdir(exist_ok=True)
    (tmp_path / "llama").rename(value)
    Path(f"{value}.jinja").write_text("{% if who is defined %}{% set x = who %}{% endif %}" + CHATML, encoding="utf-8")
    rows = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text(encoding="utf-8").splitlines()]
    (tmp_path / "chat.jsonl").unlink()
    lines = [json.dumps({value: row["messages"]}) + "\n" for row in rows]
    Path(f"{value}.jsonl").write_text("".join(lines), encoding="utf-8")
    return value


def _parts(file: Path) -> Iterator[bytes]:
    """What a file holds; of an archive, such as torch's, each part."""
    yield file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            yield from map(archive.read, archive.namelist())


def left(folder: Path) -> list[Path]:
    """The files that hold the secret."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert files
    return [file for file in files if any(SECRET.encode() in part for part in _parts(file))]


def test_a_value_of_the_environment_reaches_no_file_and_no_terminal(
    value: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], formulas: None
) -> None:
    assert command(["show", *RECIPE]) == command(["validate", *RECIPE]) == 0
    assert main([*RECIPE, "method.name=lora"]) == 0
    (manifest,) = (tmp_path / "runs").rglob("manifest.json")
    run = str(manifest.parent)
    assert command(["report", run]) == command(["generate", run, "--prompt", "hi"]) == command(["merge", run]) == 0
    assert command(["evaluate", run, "rows=2", "max_new_tokens=4"]) == 0
    Path(f"{value}.jsonl").write_text("{}\n", encoding="utf-8")
    assert main([*RECIPE, "checkpoint.resume=never"]) == 1
    shown = "".join(capfd.readouterr())
    assert SECRET not in shown and f"{VARIABLE}.jsonl" in shown
    assert left(tmp_path / "runs") == left(tmp_path / "cache") == []
    assert VARIABLE in json.loads((manifest.parent / "samples.json").read_text(encoding="utf-8"))[0]["prompt"]
    assert VARIABLE in (manifest.parent / "final" / "README.md").read_text(encoding="utf-8")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "engine",
    [
        "strategy=zero2",
        "strategy=zero3",
        "strategy=fsdp",
        *(f"parallel.{way}=2" for way in Parallel.model_fields if way != "schedule"),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_nor_do_checkpoints_of_engines_hold_it(
    engine: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    monkeypatch.setenv("MY_VARIABLE", SECRET)
    populate(tmp_path)
    tiny_model(MODELS["moe" if "expert" in engine else "llama"], tmp_path / SECRET, kv_heads=2)
    profile = f"extra.deepspeed={{flops_profiler: {{enabled: false, output_file: '{VARIABLE}'}}}}"
    own = [f"model.path='{VARIABLE}'", f"output.dir='runs/{VARIABLE}'", *[profile] * ("zero" in engine)]
    arguments = [engine, f"method.name={method}", "optimizer=sgd", "checkpoint.save_steps=1", "max_steps=2", *own]
    done = ranks.run(tmp_path, "recipe=small", *arguments, processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert left(tmp_path / "runs") == []
