"""Nothing is lost, whatever the engine: runs that are cut off continue as if nothing had happened, or say why not."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from matrix import ENGINES, METHODS, Difference, Result
from ranks import ON_CPU, Ranks
from tiny import chat_rows, tiny_model

from toolkit.common import UserError
from toolkit.recipe import Loaded, load
from toolkit.seal import read_seal, seal
from toolkit.train.checkpoints import checkpoint
from toolkit.train.run_folder import claim

RECIPE = """
description: A training that is interrupted
model: {path: llama}
data: {sources: [chat.jsonl], eval_split: 0.1}
precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {name: linear, max_steps: 6, warmup_ratio: 0.2}
batch: {seq_len: 128, global_batch_size: 8, micro_batch_size: 2}
evaluation: {num_prompts: 1, max_new_tokens: 4}
checkpoint: {save_steps: 3}
"""
ALL = {**ENGINES, "fsdp_full": ["strategy.name=fsdp", "strategy.state_dict_type=full"]}
LORA = [*METHODS["lora"], "method.lora_dropout=0.1"]
SETTINGS = {"full": [], "lora": LORA, "lora_bf16": [*LORA, "precision=bf16"], "int4": METHODS["int4"]}


def write_checkpoint(folder: Path, step: int, *overrides: str, processes: int = 2) -> Path:
    """What an engine leaves, as far as it matters here: some files, some of them in folders."""
    place = folder / f"checkpoint-{step}"
    for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth", f"global_step{step}/optim_states.pt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("content")
    seal(place, checkpoint.record(step, recipe_of(*overrides), processes, {}))
    return place


def recipe_of(*overrides: str) -> Loaded:
    return load("small", list(overrides))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the recipe `small`, and no model."""
    write_recipe(tmp_path, "small", RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_newest_whole_checkpoint_is_found_by_its_step(place: Path) -> None:
    three, nine, ten, hundred = (write_checkpoint(place, step) for step in (3, 9, 10, 100))
    assert checkpoint.newest(place) == (hundred, {})
    (hundred / "global_step100" / "optim_states.pt").write_text("cont")
    passed_over = {hundred: "is damaged: global_step100/optim_states.pt differs from what was saved"}
    assert checkpoint.newest(place) == (ten, passed_over)
    (ten / "rng_state_1.pth").unlink()  # One of the two processes was killed before.
    passed_over[ten] = "is damaged: it lacks rng_state_1.pth"
    assert checkpoint.newest(place) == (nine, passed_over)
    (nine / "seal.json").unlink()  # Killed when some processes had not written all.
    passed_over[nine] = "was cut off while saving"
    assert checkpoint.newest(place) == (three, passed_over)
    assert list(checkpoint.newest(place)[1]) == [hundred, ten, nine]


def test_steps_not_clocks_say_which_checkpoints_stay(place: Path) -> None:
    """Those of later steps, which are trained anew or damaged, go before all others."""
    saved = [write_checkpoint(place, step) for step in (9, 10, 11, 100)]
    for number, each in enumerate(saved):
        os.utime(each, (10**9 - number, 10**9 - number))
    checkpoint.rotate(place, 11, 2)
    assert sorted(each.name for each in place.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-11"]


ZERO2, ZERO3 = "strategy.name=zero2", "strategy.name=zero3"
FSDP, FSDP_FULL = ["strategy.name=fsdp"], ["strategy.name=fsdp", "strategy.state_dict_type=full"]
BLOCKS, ON_TWO = "optimizer.name=adamw_8bit", "strategy.name=zero2 on 2 processes"
LION_8BIT = ["optimizer.name=lion", "+optimizer.args.optim_bits=8"]
OFFLOADS = "strategy.offload_optimizer=cpu"
LAID = "extra.deepspeed.zero_optimization"
ON_NVME = [ZERO3, "strategy.offload_optimizer=nvme", "strategy.nvme_path=/scratch"]


@pytest.mark.parametrize(
    ("saved", "now", "processes"),
    [
        (["strategy=ddp"], ["strategy=single"], 1),
        ([ZERO2], ["strategy.name=zero1"], 2),
        ([ZERO2], [ZERO2, "strategy.offload_optimizer=cpu"], 2),
        ([ZERO3], [ZERO3, "strategy.offload_optimizer=cpu", "strategy.offload_param=cpu"], 2),
        (FSDP, [*FSDP, "strategy.sharding=shard_grad_op", "strategy.offload_param=cpu"], 4),
        (FSDP_FULL, FSDP_FULL, 4),
        ([ZERO2, BLOCKS], ["strategy.name=zero1", BLOCKS], 2),
        ([ZERO2, BLOCKS], [ZERO2, BLOCKS, f"{LAID}.parameter_alignment=false"], 2),
    ],
    ids=[
        "ddp-single",
        "zero2-zero1",
        "zero2-offload",
        "zero3-offload",
        "fsdp-reshard",
        "fsdp_full-reshard",
        "8bit",
        "said",
    ],
)
def test_checkpoint_that_its_engine_reads_itself(place: Path, saved: list[str], now: list[str], processes: int) -> None:
    folder, loaded = write_checkpoint(place, 3, *saved), recipe_of(*now)
    checkpoint.check_readable(folder, loaded, processes)
    assert checkpoint.conversion(folder, loaded, processes) == ""


@pytest.mark.parametrize(
    ("saved", "now", "processes", "said"),
    [
        ([ZERO2], [ZERO2], 4, "name=zero2 on 2 processes: its state is divided anew for strategy.name=zero2 on 4 proc"),
        ([ZERO2], [ZERO3], 2, "divided anew for strategy.name=zero3 on 2 processes"),
        ([ZERO2], ["strategy=ddp"], 1, "divided anew for strategy.name=ddp on 1 process"),
        (["strategy=ddp"], FSDP, 2, "strategy.name=ddp on 2 processes: its state is divided anew"),
        (FSDP, FSDP_FULL, 2, "for strategy.name=fsdp strategy.state_dict_type=full on 2 processes"),
        ([ZERO2, OFFLOADS], ["strategy=ddp"], 2, "zero2 strategy.offload_optimizer=cpu on 2 processes: its state"),
        (FSDP, [*FSDP_FULL, "optimizer.name=sgd"], 2, "divided anew"),
        ([ZERO3, f"{LAID}.sub_group_size=9"], [ZERO3], 2, "sub_group_size=9 on 2 processes: its state is divided anew"),
        ([ZERO2], [ZERO2, f"{LAID}.parameter_alignment=true"], 2, "parameter_alignment=true on 2 processes"),
    ],
)
def test_checkpoint_that_is_divided_anew(
    place: Path, saved: list[str], now: list[str], processes: int, said: str
) -> None:
    folder, loaded = write_checkpoint(place, 3, *saved), recipe_of(*now)
    checkpoint.check_readable(folder, loaded, processes)
    conversion = checkpoint.conversion(folder, loaded, processes)
    assert conversion.startswith("checkpoint-3 was saved by strategy.name=") and said in conversion


def test_what_a_launchers_file_lays_out_otherwise_is_divided_anew(place: Path) -> None:
    """Of settings that are taken over the recipe says nothing."""
    folder = write_checkpoint(place, 3, ZERO3)
    for size, anew in ((3000, True), (1e9, False)):
        taken_over = {"zero_optimization.sub_group_size": size}
        loaded = dataclasses.replace(recipe_of(ZERO3), taken_over=taken_over)
        assert bool(checkpoint.conversion(folder, loaded, 2)) == anew
        assert checkpoint.record(3, loaded, 2, {}).get("sub_group_size") == (size if anew else None)


@pytest.mark.parametrize(
    ("saved", "now", "processes", "words"),
    [
        (
            [ZERO2, BLOCKS],
            [ZERO2, BLOCKS],
            4,
            [ON_TWO, "strategy.name=zero2 on 4 processes", "optimizer.name=adamw_8bit"],
        ),
        (
            [ZERO2, BLOCKS],
            ["strategy=ddp", BLOCKS],
            2,
            [ON_TWO, "strategy.name=ddp on 2 processes", "cannot be divided"],
        ),
        (
            *(["strategy=ddp", "optimizer.name=ademamix"], [ZERO2, "optimizer.name=ademamix"], 2),
            ["strategy.name=ddp on 2 processes", ON_TWO, "optimizer.name=ademamix"],
        ),
        (
            *(["strategy=ddp", *LION_8BIT], [ZERO2, *LION_8BIT], 2),
            ["strategy.name=ddp on 2 processes", ON_TWO, "optimizer.name=lion"],
        ),
        (ON_NVME, [ZERO3, OFFLOADS], 2, ["zero3 strategy.offload_optimizer=nvme on 2 processes", "NVMe"]),
        ([ZERO2], ON_NVME, 2, [ON_TWO, "strategy.offload_optimizer=nvme on 2 processes", "NVMe"]),
    ],
    ids=["8bit-processes", "8bit-ddp", "ademamix", "lion", "from-nvme", "to-nvme"],
)
def test_checkpoint_that_cannot_be_read_is_refused_with_both_sides_and_the_reason(
    place: Path, saved: list[str], now: list[str], processes: int, words: list[str]
) -> None:
    folder = write_checkpoint(place / "runs" / "small" / "checkpoints", 3, *saved)
    loaded = recipe_of(*now, f"checkpoint.resume={folder}", "output.name=new")
    with pytest.raises(UserError) as refusal:
        claim(loaded, processes)
    assert refusal.value.what.startswith(f"{folder} was saved by ")
    assert all(word in refusal.value.what for word in words)
    assert refusal.value.change.startswith("continue with strategy.name=") and words[0] in refusal.value.change
    assert not (place / "runs" / "new").exists()


def test_a_named_checkpoint_must_be_whole_and_of_this_method_with_steps_left(place: Path) -> None:
    folder = write_checkpoint(place, 3)
    checkpoint.check_named(folder, recipe_of("schedule.max_steps=4").recipe)
    for overrides, what, change in (
        (["schedule.max_steps=3"], "is at step 3 already, schedule.max_steps is 3", "raise schedule.max_steps"),
        (["method.name=lora"], "holds a full model, the recipe trains an adapter", "set method.name"),
        (
            ["optimizer.name=lion"],
            "holds the state of optimizer.name=adamw, with which optimizer.name=lion cannot go on",
            "set the optimizer as the checkpoint was trained",
        ),
        (
            ["optimizer.args.amsgrad=true"],
            "holds the state of optimizer.name=adamw, with which optimizer.name=adamw optimizer.args.amsgrad=True "
            "cannot go on",
            "set the optimizer as the checkpoint was trained",
        ),
    ):
        with pytest.raises(UserError) as refusal:
            checkpoint.check_named(folder, recipe_of(*overrides).recipe)
        assert refusal.value.what == f"checkpoint.resume={folder} {what}" and change in refusal.value.change
    # One computes as the other, in fewer calls.
    checkpoint.check_named(folder, recipe_of("optimizer.name=adamw_torch").recipe)
    (folder / "seal.json").unlink()
    with pytest.raises(UserError, match="was cut off while saving"):
        checkpoint.check_named(folder, recipe_of().recipe)


def test_a_run_that_is_named_for_its_checkpoint_is_told_from_one_that_was_cut_off(place: Path) -> None:
    run = place / "run"
    (run / "final").mkdir(parents=True)
    newest = [write_checkpoint(run / "checkpoints", step) for step in (3, 10)][-1]
    for named in (run, run / "final", run / "checkpoints"):
        with pytest.raises(UserError, match=f"resume={named} is no checkpoint") as refusal:
            checkpoint.check_named(named, recipe_of().recipe)
        assert refusal.value.change == f"set checkpoint.resume={newest} for the newest of this run"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a tiny model, rows, and the recipe `small`; runs stay for the other tests."""
    folder = tmp_path_factory.mktemp("home")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    write_jsonl(folder / "chat.jsonl", chat_rows(60))
    write_recipe(folder, "small", RECIPE)
    return folder


def run(ranks: Ranks, home: Path, name: str, engine: str, *overrides: str, processes: int = 2) -> Path:
    """A finished run of this name; continues what is there."""
    folder = home / "runs" / name
    if not (folder / "final").is_dir():
        arguments = ["recipe=small", *ALL[engine], *overrides, f"output.name={name}"]
        done = ranks.run(home, *arguments, processes=processes, entry=ON_CPU)
        assert done.returncode == 0, done.stderr[-6000:]
        (folder / "said.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    return folder


def cut_off(run: Path, name: str) -> Path:
    """A copy of a finished run as a kill leaves it while the last checkpoint is being saved."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    (copy / "checkpoints" / "checkpoint-6" / "seal.json").unlink()
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    (copy / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}), encoding="utf-8")
    return copy


def assert_continued(continued: Path, straight: Path) -> None:
    manifest = json.loads((continued / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "finished"
    assert manifest["resumed_from"].endswith("checkpoint-3")
    assert "checkpoint-6 was cut off" in (continued / "said.txt").read_text(encoding="utf-8")
    difference = Difference.between(Result.read(continued), Result.read(straight))
    assert max(vars(difference).values()) <= 1e-6, difference
    assert [row["step"] for row in metrics(continued)] == [row["step"] for row in metrics(straight)]
    samples = [json.loads((each / "samples.json").read_text(encoding="utf-8")) for each in (continued, straight)]
    assert samples[0] == samples[1]


FAST = [("zero2", "lora_bf16"), ("zero3", "full"), ("fsdp", "lora")]
SLOW = [("ddp", "full"), ("fsdp_full", "full")]
REST = [
    (engine, method)
    for engine in ("ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp", "fsdp_full")
    for method in SETTINGS
    if (engine, method) not in FAST + SLOW
]


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        *FAST,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in REST),
    ],
)
def test_continued_run_equals_one_that_was_never_stopped(ranks: Ranks, home: Path, engine: str, method: str) -> None:
    straight = run(ranks, home, f"{engine}-{method}", engine, *SETTINGS[method])
    continued = cut_off(straight, f"{engine}-{method}-cut")
    run(ranks, home, continued.name, engine, *SETTINGS[method])
    assert_continued(continued, straight)


class Payload:
    """What a pickle runs that names `open`: it makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return open, (str(self.trace), "w")


# Of a checkpoint, what is no pickle, or read by nobody.
NO_PICKLES = (".json", ".safetensors", ".jinja", ".py", "latest")
EVERY = ("single", "ddp", "zero2", "zero3", "fsdp", "fsdp_full")
PLANTED = [
    ("zero2", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("fsdp", ".metadata"),
    *(pytest.param(engine, "", marks=pytest.mark.matrix) for engine in EVERY),
]


@pytest.mark.parametrize(("engine", "only"), PLANTED)
def test_no_code_in_a_checkpoint_runs(ranks: Ranks, home: Path, engine: str, only: str) -> None:
    """It is sealed again, as by whoever planted the code: in files called `only`, or in each file in turn."""
    processes = 1 if engine == "single" else 2
    straight = run(ranks, home, f"{engine}-full", engine, processes=processes)
    good = straight / "checkpoints" / "checkpoint-3"
    names = [name for name in read_seal(good)["files"] if not only or Path(name).name == only]
    assert names
    for number, name in enumerate(names):
        planted, trace = home / "planted" / "checkpoint-3", home / "trace"
        shutil.rmtree(planted, ignore_errors=True)
        shutil.copytree(good, planted)
        if zipfile.is_zipfile(good / name):
            torch.save({"state": Payload(trace)}, planted / name)
        else:
            (planted / name).write_bytes(pickle.dumps(Payload(trace)))
        seal(planted, {key: value for key, value in read_seal(good).items() if key != "files"})
        settings = [*ALL[engine], f"checkpoint.resume={planted}", f"output.name={engine}-planted-{number}"]
        done = ranks.run(home, "recipe=small", *settings, processes=processes, entry=ON_CPU)
        assert not trace.exists(), name
        assert done.returncode != 0 or name.endswith(NO_PICKLES), name
        if only:
            assert f"{planted} names io.open, which" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("engine", "method"), [FAST[0], *(pytest.param(*each, marks=pytest.mark.matrix) for each in (*FAST[1:], SLOW[0]))]
)
def test_another_learning_rate_is_said_to_be_without_effect(ranks: Ranks, home: Path, engine: str, method: str) -> None:
    straight = run(ranks, home, f"{engine}-{method}", engine, *SETTINGS[method])
    changed = ("learning_rate=1e-5", f"checkpoint.resume={straight / 'checkpoints' / 'checkpoint-3'}")
    continued = run(ranks, home, f"{engine}-{method}-slower", engine, *SETTINGS[method], *changed)
    assert losses(continued) == pytest.approx(losses(straight)[3:], rel=1e-6)
    said = " ".join((continued / "said.txt").read_text(encoding="utf-8").split())
    assert "optimizer.learning_rate=1e-05 has no effect: checkpoint-3 goes on with" in said
    assert "Steps 1 to 3 count as taken, and this recipe's rows for them as trained on." in said


def test_a_momentum_is_compared_as_it_acts(ranks: Ranks, home: Path) -> None:
    sgd = ("optimizer.name=sgd", "optimizer.momentum=0.9")
    straight = run(ranks, home, "sgd-full", "single", *sgd, processes=1)
    named = f"checkpoint.resume={straight / 'checkpoints' / 'checkpoint-3'}"
    said = []
    for momentum in ("null", "0.5"):
        settings = (*sgd[:1], f"optimizer.momentum={momentum}", named)
        continued = run(ranks, home, f"sgd-{momentum}", "single", *settings, processes=1)
        said.append(" ".join((continued / "said.txt").read_text(encoding="utf-8").split()))
    assert "optimizer.momentum" not in said[0]
    assert "optimizer.momentum=0.5 has no effect: checkpoint-3 goes on with 0.9" in said[1]


@pytest.mark.parametrize(("before", "after"), [("ddp", "ddp"), ("ddp", "zero2"), ("zero2", "zero2")])
def test_a_finished_run_that_is_named_goes_on_by_the_longer_schedule(
    ranks: Ranks, home: Path, before: str, after: str
) -> None:
    finished = run(ranks, home, f"{before}-finished", before, *SETTINGS["lora"])
    longer = [*SETTINGS["lora"], "schedule.max_steps=9", f"checkpoint.resume={finished}/checkpoints/checkpoint-6"]
    rates = [row["learning_rate"] for row in metrics(run(ranks, home, f"{before}-{after}-longer", after, *longer))
             if "loss" in row]  # fmt: skip
    # 7 of 9 steps are after the warm-up.
    assert rates == pytest.approx([1e-3 * left / 7 for left in (3, 2, 1)])


@pytest.mark.parametrize(
    ("before", "after", "processes"),
    [
        ("fsdp", "fsdp_grad_op", 4),
        pytest.param("fsdp_full", "fsdp_full", 4, marks=pytest.mark.slow),
        ("zero2", "zero1", 2),
        pytest.param("zero3", "zero3_offload", 2, marks=pytest.mark.slow),
        pytest.param("zero2_offload", "zero2", 2, marks=pytest.mark.slow),
        pytest.param("ddp", "single", 1, marks=pytest.mark.slow),
    ],
)
def test_run_continues_on_other_processes_or_another_strategy(
    ranks: Ranks, home: Path, before: str, after: str, processes: int
) -> None:
    straight = run(ranks, home, f"{before}-full", before)
    continued = cut_off(straight, f"{before}-{after}-{processes}")
    run(ranks, home, continued.name, after, processes=processes)
    assert_continued(continued, straight)
    assert len(list((continued / "checkpoints").iterdir())) == 2


def test_adapters_are_averaged_over_the_checkpoints_of_several_engines(ranks: Ranks, home: Path) -> None:
    """FSDP gathers a frozen head that is tied to the embeddings beside them, which no other engine has saved."""
    settings = [*METHODS["lora"], "checkpoint.average_last=2"]
    straight = run(ranks, home, "averaged", "ddp", *settings)
    continued = cut_off(straight, "averaged-cut")
    run(ranks, home, continued.name, "fsdp", *settings)
    assert_continued(continued, straight)
    assert Result.read(continued).weights.keys() == Result.read(straight).weights.keys()


def test_weights_that_the_hub_names_otherwise_are_read_back(ranks: Ranks, home: Path) -> None:
    """Transformers 5 joins the experts of a layer while it loads them, and saves them apart."""
    tiny_model("Qwen/Qwen3-30B-A3B", home / "moe")
    straight = run(ranks, home, "moe", "single", "model.path=moe", processes=1)
    continued = cut_off(straight, "moe-cut")
    run(ranks, home, continued.name, "single", "model.path=moe", processes=1)
    assert_continued(continued, straight)
    # As they were saved before: refused, where only a warning was given.
    hub = cut_off(straight, "moe-hub")
    place = hub / "checkpoints" / "checkpoint-3"
    shutil.copy(straight / "final" / "model.safetensors", place)
    seal(place, {key: value for key, value in read_seal(place).items() if key != "files"})
    done = ranks.run(home, "recipe=small", *ALL["single"], "model.path=moe", "output.name=moe-hub", entry=ON_CPU)
    assert done.returncode != 0 and "the checkpoint lacks 4 weights of the model" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "sent"),
    [
        ("zero2", signal.SIGKILL),
        ("zero3", signal.SIGINT),
        pytest.param("fsdp", signal.SIGINT, marks=pytest.mark.matrix),
    ],
    ids=["zero2-killed", "zero3-ctrl-c", "fsdp-ctrl-c"],
)
def test_interrupted_processes_continue(ranks: Ranks, home: Path, engine: str, sent: signal.Signals) -> None:
    """All processes get the signal, as from a terminal."""
    folder, settings = home / "runs" / f"{engine}-interrupted", [*ALL[engine], "batch.micro_batch_size=1"]
    endless = ["schedule.max_steps=4000", "checkpoint.save_steps=4", f"output.name={folder.name}"]
    running = ranks.start(home, "recipe=small", *settings, *endless, processes=2, entry=ON_CPU)
    end = time.monotonic() + 200
    while not (folder / "metrics.jsonl").is_file() or len(losses(folder)) < 6:
        assert running.running() and time.monotonic() < end, running.wait(0).stderr[-3000:]
        time.sleep(0.05)
    running.send(sent)
    done = running.wait()
    newest, _ = checkpoint.newest(folder / "checkpoints")
    assert newest, done.stderr[-3000:]
    step = checkpoint.step_of(newest)
    if sent == signal.SIGINT:
        assert done.codes == [0, 0], done.stderr[-3000:]
        assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["status"] == "interrupted"
        assert step == len(losses(folder))
    more = [f"schedule.max_steps={step + 2}", f"checkpoint.resume={newest}", f"output.name={engine}-more"]
    done = ranks.run(home, "recipe=small", *settings, *more, processes=2, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in metrics(home / "runs" / f"{engine}-more") if "loss" in row] == [step + 1, step + 2]
