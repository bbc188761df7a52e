"""Exports in fewer bits: files that Transformers loads as they are, and that say how far they are from the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import models_doc
import pytest
import torch
from safetensors import safe_open
from small import LORA, NF4, SEQ2SEQ, logits_of, place_with, trained
from tiny import tiny_kind
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from toolkit.cli.main import main as cli
from toolkit.train.finished import quantized
from toolkit.train.finished.export import load_trained
from toolkit.train.finished.merge import proof_rows

place = place_with("llama", "blenderbot")

STORED = {"int8": "I8", "fp8": "F8_E4M3", "nf4": "U8", "int4": "I32"}
"""What safetensors calls the types that weights lie in."""
KINDS = {"lora": LORA, "full": [], "qlora": NF4, "seq2seq": [*LORA, *SEQ2SEQ]}
CORE = [("int8", "full"), ("int8", "seq2seq"), ("fp8", "lora"), ("nf4", "qlora"), ("nf4", "seq2seq"), ("int4", "lora")]


@pytest.mark.parametrize(
    ("form", "name", "kind"),
    [
        pytest.param(form, name, kind, marks=[] if (form, name) in CORE else [pytest.mark.matrix])
        for form in STORED
        for name, kind in KINDS.items()
    ],
)
def test_files_in_fewer_bits_are_as_far_from_the_run_as_they_say(
    form: str, name: str, kind: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # A step of training that is taken back by rounding would prove nothing of the adapter.
    run = trained(f"{form}-{name}", *kind, "data.eval_split=0.2", "optimizer.learning_rate=3e-2")
    capsys.readouterr()
    assert cli(["export", str(run), f"format={form}"]) == 0
    shown = capsys.readouterr().out
    output, auto = run / form, AutoModelForSeq2SeqLM if name == "seq2seq" else AutoModelForCausalLM
    kinds = set()
    with safe_open(output / "model.safetensors", framework="pt") as tensors:
        kinds = {tensors.get_slice(each).get_dtype() for each in tensors.keys()}  # noqa: SIM118
    assert STORED[form] in kinds
    assert not (output / "merged").exists() and not Path(f"{output}.lock").exists()
    source, model, tokenizer = load_trained(run)
    rows = proof_rows(source, tokenizer, 8)
    exported = auto.from_pretrained(output)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=name == "qlora")
    with autocast:
        wanted = torch.cat([logits_of(model, row)[0] for row in rows])
    found = torch.cat([logits_of(exported, row)[0] for row in rows])
    proof = json.loads((output / "export_proof.json").read_text(encoding="utf-8"))
    same = (wanted.argmax(-1) == found.argmax(-1)).float().mean().item()
    assert proof["same_token"] == pytest.approx(same, abs=1e-3) and f"{proof['same_token']:.1%}" in shown
    distance = ((wanted - found).abs().max() / wanted.abs().max()).item()
    assert proof["distance"] == pytest.approx(distance, rel=1e-3)
    before = wanted.log_softmax(-1)
    divergence = (before.exp() * (before - found.log_softmax(-1))).sum(-1).mean().item()
    assert proof["divergence"] == pytest.approx(divergence, rel=1e-2, abs=1e-6)
    if name != "qlora":  # Which computes in 16 bits, and is quantized a second time.
        assert 0 < proof["distance"] < {"int8": 0.05, "fp8": 0.15, "nf4": 0.5, "int4": 0.5}[form]
    assert proof["bytes"] < proof["bytes_before"]
    chat = AutoTokenizer.from_pretrained(output)
    assert chat.chat_template == tokenizer.chat_template


def test_a_home_folder_is_filled_in_and_libraries_show_no_bars(tmp_path: Path) -> None:
    """No shell does it of `--output=~/merged`, and not every one of `output=~/exported`. A bar of packing, and one of
    restoring, are shown whatever tqdm is told."""
    run = trained("at-home", *LORA)
    for command in (["export", str(run), "format=int4", "output=~/exported"], ["merge", str(run), "--output=~/merged"]):
        done = subprocess.run(
            [sys.executable, "-m", "toolkit", *command],
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "exported" / "export_proof.json").is_file() and (tmp_path / "merged" / "config.json").is_file()
    with pytest.raises(SystemExit):
        cli(["merge", str(run), "--output", ""])


def test_rows_that_a_processor_does_not_repack_are_exported(tmp_path: Path) -> None:
    """On CPUs with bf16 bitsandbytes repacks 4-bit weights in their first pass, which needs rows by 32."""
    config = models_doc.stated("gemma3n_text", "sft")
    run = trained("unpacked", f"model.path={tiny_kind(config, tmp_path / 'gemma3n')}")
    assert cli(["export", str(run), "format=nf4"]) == 0
    assert (run / "nf4" / "export_proof.json").is_file()


@pytest.mark.parametrize(
    ("kind", "form", "words"),
    [
        *(("gpt2", form, ("but Conv1D", "take format=nf4 or gguf_q8_0")) for form in ("int8", "fp8", "int4")),
        *(("falcon", form, ("but FalconLinear", "or gguf_q8_0")) for form in ("int8", "nf4")),
    ],
)
def test_a_format_in_which_nothing_would_be_stored_is_refused_at_once(
    kind: str, form: str, words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny_kind(models_doc.stated(kind, "sft"), tmp_path / kind)
    run = trained(f"{kind}-{form}", *LORA, f"model.path={model}")
    monkeypatch.setattr(quantized, "load_trained", lambda run: pytest.fail("the model was loaded"))
    capsys.readouterr()
    assert cli(["export", str(run), f"format={form}"]) == 1
    error = capsys.readouterr().err
    assert "no layer of this model would be stored in fewer bits" in error and all(each in error for each in words)


def test_what_cannot_be_exported_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("refused", *LORA)
    files = sorted(run.iterdir())
    monkeypatch.setattr(quantized, "READ_BACK", -1.0)
    capsys.readouterr()
    assert cli(["export", str(run), "format=int8"]) == 1
    assert "the saved int8 model differs" in capsys.readouterr().err and sorted(run.iterdir()) == files
    monkeypatch.undo()
    monkeypatch.setattr(quantized, "_leave_out_loose", lambda quantizer: None)
    pairs = trained("pairs", *SEQ2SEQ)
    assert cli(["export", str(pairs), "format=int8"]) == 1, "torchao reads no names without a dot"
    assert "cannot read the int8 weights of this model back" in capsys.readouterr().err
    assert not (pairs / "int8").exists()
    monkeypatch.undo()
    assert cli(["export", str(run), "format=int8", "output=runs"]) == 1
    assert "runs exists already" in capsys.readouterr().err
    for output, reason in (("", "an empty text names no folder"), ("$TOO/far", "names a variable of the shell")):
        assert cli(["export", str(run), "format=int8", f"output={output}"]) == 1
        assert f"output={output}: " in (error := capsys.readouterr().err) and reason in error
    assert cli(["export", str(run), "format=int3"]) == 1
    error = capsys.readouterr().err
    assert "format=int3: Input should be 'int8', 'fp8', 'nf4', 'int4', 'gguf' or 'gguf_q8_0'" in error
    assert "docs/use.md" in error
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert cli(["export", str(run), "format=fp8"]) == 1
    assert "pip install torchao" in capsys.readouterr().err and sorted(run.iterdir()) == files
