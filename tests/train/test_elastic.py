"""A run continues on other strategies and other numbers of processes as if nothing had changed."""

from __future__ import annotations

import json
import pickle
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models_doc
import pytest
import torch
from figures import record
from harness import metrics, write_jsonl, write_recipe
from matrix import ENGINES, Difference, Result
from ranks import ON_CPU, Ranks
from tiny import chat_rows, tiny_kind, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.seal import read_seal, seal
from toolkit.train.checkpoints import saved_state
from toolkit.train.checkpoints.elastic import drawn_from
from toolkit.train.checkpoints.saved_state import equal_parts

RECIPE = """
description: A training that is continued elsewhere
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
optimizer: {learning_rate: 1.0e-3, weight_decay: 0.1}
schedule: {name: linear, max_steps: 6, warmup_ratio: 0.2}
batch: {seq_len: 128, global_batch_size: 8, micro_batch_size: 2}
evaluation: {num_prompts: 0}
checkpoint: {save_steps: 3}
"""
STRATEGIES = {**ENGINES, "fsdp_full": ["strategy.name=fsdp", "strategy.state_dict_type=full"]}
MODELS = {"llama": "meta-llama/Llama-3.2-1B", "moe": "Qwen/Qwen3-30B-A3B", "gpt2": "openai-community/gpt2-xl"}
LIMIT = 1e-6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with tiny models, rows, and the recipe `elastic`; finished runs stay for the other tests."""
    folder = tmp_path_factory.mktemp("home")
    for name, of in MODELS.items():
        tiny_model(of, folder / name)
    shutil.copytree(folder / "llama", folder / "odd")
    widths = {"hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = AutoConfig.from_pretrained(folder / "llama", head_dim=6, **widths)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "odd")
    write_jsonl(folder / "chat.jsonl", chat_rows(60))
    write_recipe(folder, "elastic", RECIPE)
    return folder


def run(ranks: Ranks, home: Path, name: str, cell: str, *overrides: str) -> Path:
    """A finished run; a cell is a strategy and a number of processes, such as `zero2@4`."""
    strategy, _, processes = cell.partition("@")
    folder = home / "runs" / name
    if not (folder / "final").is_dir():
        arguments = ["recipe=elastic", *STRATEGIES[strategy], *overrides, f"output.name={name}"]
        done = ranks.run(home, *arguments, processes=int(processes), entry=ON_CPU)
        assert done.returncode == 0, done.stderr[-6000:]
        (folder / "said.txt").write_text(" ".join((done.stdout + done.stderr).split()), encoding="utf-8")
    return folder


def interrupted(straight: Path, name: str) -> Path:
    """A copy of a finished run as it was in the middle."""
    copy = straight.with_name(name)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(straight, copy)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "checkpoint-6")
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    (copy / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}), encoding="utf-8")
    return copy


def continued(ranks: Ranks, home: Path, before: str, after: str, *overrides: str) -> Difference:
    """How far a run that goes on elsewhere after half of its steps is from the same run without an interruption."""
    label = "-".join((*before.split("@"), *(each.rpartition("=")[2] for each in overrides)))
    straight = run(ranks, home, label, before, *overrides)
    copy = interrupted(straight, f"{label}-{after.replace('@', '-')}")
    # By this `drawn_from` finds the GPU of each process.
    assert read_seal(copy / "checkpoints" / "checkpoint-3")["local_world_size"] == int(before.partition("@")[2])
    rest = [row for row in metrics(copy) if row["step"] <= 3]
    run(ranks, home, copy.name, after, *overrides)
    assert before == after or "its state is divided anew" in (copy / "said.txt").read_text(encoding="utf-8")
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["resumed_from"].endswith("checkpoint-3") and manifest["status"] == "finished"
    # Those of the same rows, and the steps before are not taken again.
    assert [row.get("tokens") for row in metrics(copy)] == [row.get("tokens") for row in metrics(straight)]
    assert metrics(copy)[: len(rest)] == rest
    return Difference.between(Result.read(copy), Result.read(straight))


def assert_equal(difference: Difference) -> None:
    assert max(vars(difference).values()) <= LIMIT, difference


ODD = ["method.name=lora", "method.r=3"]
"""Trains matrices whose numbers do not fill whole units of 16 bytes, in the model `odd`."""
FAST = [("zero2@2", "zero3@4"), ("zero2@2", "single@1"), ("single@1", "fsdp@2"), ("fsdp@2", "zero2@1")]


@pytest.mark.parametrize(("before", "after"), FAST)
def test_a_run_continues_elsewhere(ranks: Ranks, home: Path, before: str, after: str) -> None:
    assert_equal(continued(ranks, home, before, after))


@pytest.mark.parametrize(
    ("cell", "setting", "overrides"),
    [("zero3@2", "sub_group_size=3000", []), ("zero2@2", "parameter_alignment=true", ["model.path=odd", *ODD])],
)
def test_a_run_continues_where_parameters_lie_elsewhere(
    ranks: Ranks, home: Path, cell: str, setting: str, overrides: list[str]
) -> None:
    """Of the same strategy and processes, which DeepSpeed takes for the same layout."""
    setting = f"extra.deepspeed.zero_optimization.{setting}"
    straight = run(ranks, home, f"laid-out-{cell}", cell, setting, *overrides)
    copy = interrupted(straight, f"laid-out-otherwise-{cell}")
    run(ranks, home, copy.name, cell, *overrides)
    said = (copy / "said.txt").read_text(encoding="utf-8")
    assert setting in said and "its state is divided anew" in said
    assert_equal(Difference.between(Result.read(copy), Result.read(straight)))


CELLS = ("single@1", "ddp@2", "zero1@2", "zero2@1", "zero2@2", "zero2@4", "zero3@1", "zero3@2", "zero3@4", "fsdp@2",
         "fsdp@4", "fsdp_full@2")  # fmt: skip
ALIKE = {"ddp@2": "single@1", "fsdp@4": "fsdp@2", "zero1@2": "zero2@2"}
"""Cells that read each other's checkpoints as they are, see `test_checkpoint.py`."""


def test_a_loss_scale_that_is_still_sought_goes_on_falling(ranks: Ranks, home: Path) -> None:
    """DeepSpeed lets the first gradients that overflow pass before it lowers the scale, once in a run."""
    difference = continued(
        ranks, home, "zero2@2", "zero3@2", "precision=fp16", "extra.deepspeed.fp16.initial_scale_power=21"
    )
    straight, other = (home / "runs" / f"zero2-2-fp16-21{name}" for name in ("", "-zero3-2"))
    rates = [[row["learning_rate"] for row in metrics(each) if "loss" in row] for each in (straight, other)]
    # Steps that are skipped are none of the schedule's.
    assert rates[0] == rates[1] and rates[0].count(0.0) == 5 and rates[0][-1] > 0
    assert difference.loss < 1e-3


@pytest.mark.parametrize("cell", ["zero2@2", "zero3@2"])
def test_losses_are_scaled_as_the_continued_run_says(ranks: Ranks, home: Path, cell: str) -> None:
    """Where gradients overflowed in every step, which is why another scale is set."""
    strategy, _, processes = cell.partition("@")
    name, scale = f"scaled-{cell}", "extra.deepspeed.fp16"
    arguments = ["recipe=elastic", *STRATEGIES[strategy], "precision=fp16", f"output.name={name}"]
    done = ranks.run(home, *arguments, f"{scale}.initial_scale_power=32", processes=int(processes), entry=ON_CPU)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and "none of which updated a weight" in said and "initial_scale_power=8" in said
    shutil.rmtree(home / "runs" / name / "checkpoints" / "checkpoint-6")
    folder = run(ranks, home, name, cell, "precision=fp16", f"{scale}.loss_scale=128")
    rates = [row["learning_rate"] for row in metrics(folder) if "loss" in row]
    assert not any(rates[:4]) and len(rates) == 6 and all(rates[4:])


@pytest.mark.matrix
@pytest.mark.parametrize("before", CELLS)
def test_every_strategy_continues_what_every_other_saved(
    ranks: Ranks, home: Path, before: str, record_property: Callable[[str, object], None]
) -> None:
    figures = {}
    for after in CELLS:
        if ALIKE.get(after, after) != ALIKE.get(before, before):
            figures[after] = continued(ranks, home, before, after)
    shown = {after: f"{max(vars(figures[after]).values()):.0e}" if after in figures else "=" for after in CELLS}
    record(record_property, "Continued elsewhere: largest difference", saved_by=before, **shown)
    for difference in figures.values():
        assert_equal(difference)


LORA = ["method.name=lora"]
# The biases of attention keys have no gradient but for rounding, of which a smaller `eps` makes updates.
GPT2 = ["model.path=gpt2", "optimizer.eps=1e-5"]
OTHERS = [
    ("zero2@2", "single@1", LORA),
    ("single@1", "zero3@2", LORA),
    ("fsdp@2", "zero1@4", LORA),
    ("zero3@2", "fsdp@4", LORA),
    ("zero3@2", "fsdp@4", [*LORA, "method.quantization=int4"]),
    ("single@1", "zero3@2", ["model.path=moe"]),
    # Drops numbers at random: the same ones on as many processes.
    ("zero2@2", "fsdp@2", GPT2),
    ("fsdp@2", "zero3@2", GPT2),
    ("zero2@2", "fsdp@4", ["data.streaming=true", "data.eval_split=null"]),
    ("zero2_offload@2", "zero3_offload@4", []),
    ("zero3_offload@4", "ddp@2", []),
    ("zero2@2", "single@1", ["optimizer.name=sgd"]),
    ("single@1", "zero3@2", ["optimizer.name=rmsprop"]),
    ("single@1", "zero2@2", ["optimizer.name=lion"]),
    ("zero3@2", "single@1", [*LORA, "method.use_dora=true"]),
    ("zero2@2", "single@1", [*LORA, "method.loraplus_lr_ratio=8"]),
    ("single@1", "zero2@2", [*LORA, "method.modules_to_save=[lm_head]"]),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("before", "after", "overrides"), OTHERS, ids=lambda value: "".join(value))
def test_other_trainings_continue_elsewhere(
    ranks: Ranks, home: Path, before: str, after: str, overrides: Sequence[str]
) -> None:
    assert_equal(continued(ranks, home, before, after, *overrides))


@pytest.mark.parametrize(
    ("before", "after"), [("fsdp@2", "fsdp@2"), ("fsdp_full@2", "fsdp_full@2"), ("ddp@2", "zero2@2")]
)
def test_what_never_had_a_gradient_has_no_state_to_go_on_from(
    ranks: Ranks, home: Path, before: str, after: str
) -> None:
    """BART's decoder has attention to an encoder that is not there."""
    if not (home / "bart").is_dir():
        config = models_doc.stated("bart", "sft")
        config.dropout = config.attention_dropout = config.activation_dropout = 0.0
        tiny_kind(config, home / "bart")
    # ZeRO would decay it.
    keys = ["model.path=bart", "optimizer.weight_decay=0", "optimizer.eps=1e-5"]
    assert_equal(continued(ranks, home, before, after, *keys))


class Payload:
    """What a pickle runs that names `open`: it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> object:
        return open, (str(self.trace), "w")


@pytest.mark.parametrize(
    ("before", "after", "planted"),
    [
        ("zero2@2", "single@1", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("fsdp@2", "single@1", ".metadata"),
        *(pytest.param(before, "ddp@2", "", marks=pytest.mark.matrix) for before in ("zero2@2", "zero3@2", "fsdp@2")),
        *(pytest.param(before, "zero2@2", "", marks=pytest.mark.matrix) for before in ("single@1", "fsdp_full@2")),
    ],
)
def test_no_code_in_a_checkpoint_runs_when_it_is_divided_anew(
    ranks: Ranks, home: Path, before: str, after: str, planted: str
) -> None:
    """It is sealed again, as by whoever planted the code: in files of this name, or in each file in turn."""
    straight = run(ranks, home, before.replace("@", "-"), before)
    strategy, _, processes = after.partition("@")
    good = straight / "checkpoints" / "checkpoint-3"
    names = [name for name in read_seal(good)["files"] if not planted or Path(name).name == planted]
    assert names
    for name in names:
        place, trace = home / "planted" / "checkpoint-3", home / "trace"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(good, place)
        if name.endswith((".pt", ".pth", ".bin")):
            torch.save({"state": Payload(trace)}, place / name)
        else:
            (place / name).write_bytes(pickle.dumps(Payload(trace)))
        seal(place, {key: value for key, value in read_seal(good).items() if key != "files"})
        settings = [*STRATEGIES[strategy], f"checkpoint.resume={place}", "output.name=planted"]
        done = ranks.run(home, "recipe=elastic", *settings, processes=int(processes), entry=ON_CPU)
        shutil.rmtree(home / "runs" / "planted", ignore_errors=True)
        assert not trace.exists(), name
        if planted:
            assert done.returncode != 0 and "names" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7])
def test_parts_of_zero3_hold_every_number_once(processes: int) -> None:
    shapes = {"a": torch.Size([5, 3]), "b": torch.Size([1]), "c": torch.Size([8]), "d": torch.Size([2, 0])}
    held: dict[str, list[int]] = {name: [] for name in shapes}
    for rank in range(processes):
        end = 0
        for name, start, at, count in equal_parts(shapes, rank, processes):
            assert at >= end
            end = at + count
            held[name] += range(start, start + count)
    assert held == {name: list(range(shape.numel())) for name, shape in shapes.items()}


@pytest.mark.parametrize("before", ["zero2@2", "single@1"])
def test_a_checkpoint_of_other_parameters_is_refused(ranks: Ranks, home: Path, before: str) -> None:
    straight = run(ranks, home, before.replace("@", "-"), before)
    settings = [
        "model.path=gpt2",
        f"checkpoint.resume={straight / 'checkpoints' / 'checkpoint-3'}",
        "output.name=other",
    ]
    strategy = STRATEGIES["fsdp" if before == "single@1" else "single"]
    processes = 2 if before == "single@1" else 1
    done = ranks.run(home, "recipe=elastic", *strategy, *settings, processes=processes, entry=ON_CPU)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "holds 344,704 weights of a LlamaForCausalLM, the recipe trains 198,400" in " ".join(done.stderr.split())
    assert not [file for file in (home / "runs" / "other").rglob("[!.]*") if file.is_file()]


def test_a_number_of_processes_into_which_the_batch_does_not_divide_is_refused(ranks: Ranks, home: Path) -> None:
    copy = interrupted(run(ranks, home, "zero2-2", "zero2@2"), "zero2-2-on-three")
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    done = ranks.run(
        home, "recipe=elastic", *STRATEGIES["zero2"], f"output.name={copy.name}", processes=3, entry=ON_CPU
    )
    assert done.returncode == 1
    assert "a global batch of 8 sequences does not divide into 3 processes" in " ".join(done.stderr.split())
    assert "or start 2 processes" in " ".join(done.stderr.split())
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before


def test_of_divided_layers_one_chunk_is_in_memory_at_a_time() -> None:
    whole, read = torch.arange(48.0).view(6, 8), list[weakref.ref[torch.Tensor]]()

    def ranges(offset: int) -> list[Any]:
        def chunk() -> torch.Tensor:
            read.append(weakref.ref(kept := whole[:, offset : offset + 4].clone()))
            return kept

        about = SimpleNamespace(sizes=torch.Size([6, 4]), offsets=torch.Size([0, offset]))
        return list(saved_state._ranges(about, whole.shape, chunk))

    found = torch.zeros(48)
    for start, count, numbers in [*ranges(0), *ranges(4)]:
        found[start : start + count] = numbers()
    assert torch.equal(found.view(6, 8), whole) and len(read) == 2, "each is read once"
    assert read[0]() is None


def test_random_numbers_go_on_from_the_gpu_that_the_process_which_saved_them_computed_on() -> None:
    """Not from the one whose number this process has: nothing was drawn there."""
    devices = [torch.tensor([number]) for number in range(4)]
    # On two nodes: with a process for each GPU, and where two GPUs have none.
    for local, wanted in ((4, [0, 1, 2, 3, 0, 1, 2, 3]), (None, [0, 1, 2, 3, 0, 1, 2, 3]), (2, [0, 1, 0, 1])):
        assert [drawn_from(devices, saver, local).item() for saver in range(len(wanted))] == wanted
    assert drawn_from(devices[:1], 3, 4).item() == 0  # Each process sees its own.
    assert drawn_from(devices[2], 5, 8).item() == 2  # One process saves that of its own alone.
