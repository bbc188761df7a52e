"""GGUF files by llama.cpp's converter: what is said where it is missing or fails; where it is there, equal logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from harness import SUPPORT
from small import LORA, populate, trained

from toolkit.cli.main import main
from toolkit.common import UserError
from toolkit.train.finished import gguf


def script(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "convert_hf_to_gguf.py").write_text(text)
    monkeypatch.setenv("LLAMA_CPP", str(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there_at_all", ["needs not_there_at_all", "pip install not_there_at_all"]),
        ("import sys; sys.exit('Model XForCausalLM is not supported')", ["XForCausalLM is not supported", "newer"]),
        ("", ["does not take this model"]),
    ],
)
def test_a_converter_that_fails_says_what_to_do(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, text, monkeypatch)
    with pytest.raises(UserError) as caught:
        gguf.convert(tmp_path, tmp_path / gguf.FILE, "gguf", torch.float32)
    assert all(word in str(caught.value) for word in words), caught.value


def test_without_a_converter_it_is_said_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=r"git clone(.|\n)*LLAMA_CPP"):
        gguf.converter()
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="not in the PATH"):
        gguf.converter()


def test_a_converter_ends_with_an_export_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = "import os, sys, time; print(os.getpid(), file=open(sys.argv[3], 'w'), flush=True); time.sleep(600)"
    script(tmp_path, writes, monkeypatch)
    line = f"gguf.convert(Path({str(tmp_path)!r}), Path({str(tmp_path / gguf.FILE)!r}), 'gguf', torch.float32)"
    imports = "from pathlib import Path; import torch; from toolkit.train.finished import gguf"
    exporting = subprocess.Popen([sys.executable, "-c", f"{imports}; {line}"])
    within(60, lambda: (tmp_path / gguf.FILE).is_file() and (tmp_path / gguf.FILE).read_text())
    converting = int((tmp_path / gguf.FILE).read_text())
    exporting.kill()
    exporting.wait()
    within(10, lambda: not psutil.pid_exists(converting))


def within(seconds: float, happened: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_file_is_read_back_with_positions_scaled_as_those_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which Transformers does not take from its header."""
    monkeypatch.chdir(tmp_path)
    populate(tmp_path, "llama")
    config = json.loads(Path("llama/config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] |= {"rope_theta": 1e4}
    Path("llama/config.json").write_text(json.dumps(config), encoding="utf-8")
    writes = f"""
import sys
from pathlib import Path
sys.path.append({str(SUPPORT)!r})
from tiny import tiny_gguf
if "--vocab-only" in sys.argv:
    Path(sys.argv[3]).touch()
else:
    config = Path(sys.argv[1], "config.json")
    text = config.read_text()
    config.write_text(text.replace('"rms_norm_eps": 1e-05', EPSILON))
    tiny_gguf(Path(sys.argv[1]), Path(sys.argv[3]))
    config.write_text(text)
"""
    script(tmp_path, writes.replace("EPSILON", repr('"rms_norm_eps": 1e-05')), monkeypatch)
    run = trained("scaled", *LORA)
    assert main(["export", str(run), "format=gguf"]) == 0
    proof = json.loads((run / "gguf" / "export_proof.json").read_text(encoding="utf-8"))
    assert proof["distance_as_saved"] == 0 and proof["distance"] < 1e-5

    # Not all that a configuration says gets into every file, or out of it again.
    script(tmp_path, writes.replace("EPSILON", repr('"rms_norm_eps": 1.0')), monkeypatch)
    assert main(["export", str(run), "format=gguf", "output=other"]) == 1
    assert "Transformers reads them otherwise than llama.cpp" in " ".join(capsys.readouterr().err.split())
    assert not Path("other").exists()


def test_what_a_file_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    populate(tmp_path, "llama")
    writes = f"""
import sys
from pathlib import Path
import gguf
sys.path.append({str(SUPPORT)!r})
from tiny import tiny_gguf
types = gguf.GGUFWriter.add_token_types
gguf.GGUFWriter.add_token_types = lambda writer, kinds: types(writer, [*kinds[:3], KIND, *kinds[4:]])
if "--vocab-only" in sys.argv:
    Path(sys.argv[3]).touch()
else:
    tiny_gguf(Path(sys.argv[1]), Path(sys.argv[3]))
"""
    script(tmp_path, writes.replace("KIND", "5"), monkeypatch)  # Unused.
    run = trained("lacking", *LORA)
    assert main(["export", str(run), "format=gguf"]) == 0
    assert "left out 1 added token, such as <|pad|>" in " ".join(capsys.readouterr().out.split())
    script(tmp_path, writes.replace("KIND", "3"), monkeypatch)
    assert main(["export", str(run), "format=gguf", "output=whole"]) == 0
    said = capsys.readouterr().out
    assert "exported to whole" in said and "left out" not in said


@pytest.mark.parametrize("method", [LORA, ["method=full"]], ids=["lora", "full"])
def test_what_it_does_not_take_is_said_before_weights_are_merged(
    method: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    populate(tmp_path, "llama")
    # As the real one: architecture and vocabulary are all that it reads.
    knows = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
assert "--vocab-only" in sys.argv and (folder / "tokenizer.json").is_file()
sys.exit("Model {architectures[0]} of {vocab_size} tokens is not supported".format_map(
    json.loads((folder / "config.json").read_text())
))
"""
    script(tmp_path, knows, monkeypatch)
    run = trained("unknown", *method)
    size = json.loads(Path("llama/config.json").read_text(encoding="utf-8"))["vocab_size"]
    capsys.readouterr()
    assert main(["export", str(run), "format=gguf"]) == 1
    said = capsys.readouterr()
    assert f"Model LlamaForCausalLM of {size} tokens is not supported" in said.err and not said.out
    assert not (run / "gguf").exists()


@pytest.mark.matrix
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="takes a checkout of llama.cpp, named by LLAMA_CPP")
def test_files_hold_the_runs_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from toolkit.train.main import main as train

    assert train(["recipe=smollm2_135m_lora_demo", "max_steps=2"]) == 0
    for form, apart in (("gguf", 1e-4), ("gguf_q8_0", 0.1)):
        assert main(["export", "runs/smollm2_135m_lora_demo", f"format={form}"]) == 0
        proof = json.loads(Path(f"runs/smollm2_135m_lora_demo/{form}/export_proof.json").read_text())
        assert proof["distance"] < apart and proof["distance_as_saved"] < 1e-4
