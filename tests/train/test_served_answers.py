"""Answers from a vLLM server: it answers by the weights of each step, on every engine; what is refused; one that dies.

In the server's place is `answering`, which draws by the files that it is told to load; with `VLLM` in the environment
`make matrix` asks a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import VERSION, answering, names
from figures import record
from harness import losses, metrics, write_jsonl, write_recipe
from matrix import ENGINES
from ranks import ON_CPU, Ranks
from small import set_up
from tiny import tiny_model

from toolkit.cli.main import main as toolkit
from toolkit.recipe import model_configs
from toolkit.recipe.rules import load_checked
from toolkit.train.identity import recipe_hash
from toolkit.train.main import main
from toolkit.train.trainers.policy import FILE, OF_SERVER
from toolkit.train.trainers.served_answers import FOLDER, seed_of

RECIPE = """
description: A small training on rewards, with answers from a server
model: {path: llama}
data: {sources: [prompts.jsonl], eval_split: 0.2}
objective: grpo
rollout: {num_generations: 4, max_completion_tokens: 6}
rewards: {file: own.py, trust_python: true, length: {max_tokens: 3, soft: 6}}
precision: fp32
optimizer: {learning_rate: 1.0e-2, eps: 1.0e-4}
schedule: {max_steps: 3}
batch: {seq_len: 64, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0}
checkpoint: {rehearse: false}
"""
OWN = """
def reward(completions, prompts, **columns):
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]
"""
ROWS = [{"prompt": f"{n}: " + "word " * (1 + n % 3), "answer": str(n)} for n in range(30)]
LORA = ["method.name=lora", "method.r=8"]
ALIKE = 1e-5
"""Nats per token between kernels in fp32; the same policy a step earlier is a thousand times as far away."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with tiny models, prompts, a reward of its own and a recipe."""
    folder = tmp_path_factory.mktemp("served")
    config = model_configs.bundled()["meta-llama/Llama-3.2-1B"].config
    tiny_model(config, folder / "llama", kv_heads=2)
    tiny_model(config | {"tie_word_embeddings": False}, folder / "untied")
    write_jsonl(folder / "prompts.jsonl", ROWS)
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def run(name: str, *overrides: str) -> Path:
    assert main(["recipe=small", f"output.name={name}", *overrides]) == 0
    return Path("runs") / name


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(folder) if "loss" in row]


def asked(place: Path) -> list[dict[str, Any]]:
    """What a server was asked."""
    return [json.loads(line) for line in (place / "requests.txt").read_text(encoding="utf-8").splitlines()]


def refused(capfd: Any, *overrides: str, name: str = "refused") -> str:
    """What is said where a run ends before its first step."""
    capfd.readouterr()
    assert main(["recipe=small", f"output.name={name}", "checkpoint.resume=never", *overrides]) != 0
    return " ".join(capfd.readouterr().err.split())


def test_a_server_answers_by_the_weights_of_each_step(place: Path, ranks: Ranks) -> None:
    """Adapters, PiSSA's that are published with twice the rank, and all weights; also several steps on the answers,
    another temperature, and RLOO."""
    colder = ["rollout.temperature=0.7", "evaluation.at_start=false"]
    ways = {
        "lora": [*LORA, "evaluation.every_steps=2", "evaluation.batch_size=1"],
        "pissa": [*LORA, "method.init_lora_weights=pissa", *colder, "objective=rloo", "policy.beta=0", "max_steps=2"],
        "full": [*colder, "policy.num_iterations=2"],
    }
    found = {}
    with answering(ranks, place) as address:
        for name, way in ways.items():
            found[name] = run(name, f"rollout.server={address}", *way)
            assert names(address) == ["llama"], "adapters are left"
            assert not (found[name] / FOLDER).exists()
            for row in steps_of(found[name]):
                assert row["server_difference"] < ALIKE and row["server_capped"] == 0, (name, row)
                assert row["server_weight"] == pytest.approx(1, abs=1e-4) and row["grad_norm"] > 1e-3
        requests = asked(place)
    loads = [each["lora_name"] for each in requests if each["path"] == "/v1/load_lora_adapter"]
    # Of each run the probe, and one for each rollout and evaluation: before the first step, after 2, and at the end.
    assert len(loads) == len({*loads}) == (1 + 3 + 3) + (1 + 2 + 1)
    assert sum(each["path"] == "/collective_rpc" and "method" in each for each in requests) == 2 + 1
    rewards = [row["eval_reward"] for row in metrics(found["lora"]) if "eval_reward" in row]
    assert len({*rewards}) > 1, "it was asked with the same weights"
    first, second, third = steps_of(found["full"])
    assert first["reward"] == second["reward"] != third["reward"] and second["clipped"] > 0 == third["clipped"]
    about = json.loads((found["lora"] / "manifest.json").read_text())["server"]
    assert about == {"address": address, "vllm": VERSION, "model": "llama"}
    assert "vLLM" in (found["lora"] / "final" / "README.md").read_text(encoding="utf-8")


def test_a_held_out_prompt_is_asked_as_a_training_one(place: Path, ranks: Ranks) -> None:
    """What a request says, so that nothing of the server's defaults decides over an answer."""
    with answering(ranks, place) as address:
        session = set_up(*LORA, f"rollout.server={address}", "rollout.top_p=0.9", "rollout.temperature=0.5")
        trainer = session.trainer
        together = {each.row: each for batch in trainer._rollouts([[3, 7], [1, 12]], 5) for each in batch}
        for rows in ([[12]], [[7, 3]]):
            for each in (rollout for batch in trainer._rollouts(rows, 5) for rollout in batch):
                assert each.answers == together[each.row].answers
        assert trainer._rollouts([[3]], 6)[0][0].answers != together[3].answers
        last = asked(place)[-1]
        trainer.measure(trainer.model, {"rows": torch.tensor(trainer.eval_dataset[:2]["row"])})
        greedy = asked(place)[-2:]
        trainer.served.close()
    whole = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    whole |= {"max_tokens": 6, "stop_token_ids": sorted(session.stop_token_ids), "ignore_eos": True}
    sampled = {"n": 4, "temperature": 0.5, "top_p": 0.9, "seed": seed_of(session.recipe.seed, 6, 3)}
    assert whole.items() <= last.items() and sampled.items() <= last.items()
    assert last["prompt"] == trainer._asked(3) and 0 <= last["seed"] < 2**48
    assert all(whole.items() <= each.items() and each["temperature"] == 0 and "seed" not in each for each in greedy)


@pytest.mark.parametrize(("engine", "method"), [("zero3", []), ("fsdp", LORA)], ids=["zero3-full", "fsdp-lora"])
def test_two_processes_ask_as_one_does(engine: str, method: list[str], place: Path, ranks: Ranks) -> None:
    with answering(ranks, place) as address:
        common = [*method, f"rollout.server={address}", "evaluation.every_steps=3"]
        one = run(f"one-{engine}", *common)
        two = place / "runs" / f"two-{engine}"
        done = ranks.run(
            place, "recipe=small", f"output.name={two.name}", *ENGINES[engine], *common, processes=2, entry=ON_CPU
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert names(address) == ["llama"]
    for mine, other in zip(steps_of(two), steps_of(one), strict=True):
        assert mine["server_difference"] < ALIKE and mine["reward"] == pytest.approx(other["reward"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    figures = [[row["eval_reward"] for row in metrics(folder) if "eval_reward" in row] for folder in (one, two)]
    assert figures[0] == pytest.approx(figures[1])


def test_answers_of_another_model_are_weighed_and_those_of_a_stranger_end_the_run(
    place: Path, ranks: Ranks, capfd: Any
) -> None:
    """The server has weights that are a little, or far, from those in training."""
    _sure_of_itself(place)
    with answering(ranks, place) as address:
        trainer = set_up(f"rollout.server={address}", "policy.server_cap=1.1").trainer
        kept = trainer._rollouts([[3, 7]], 0)[0]
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.mul_(1.05)
        trainer._note(kept)
        trainer.score(trainer.model.train(), trainer._laid_out(kept))
        told = trainer.told(trainer._seen.tolist())
        assert 1e-3 < told["server_difference"] < 0.5 and 0 < told["server_capped"] < 1
        assert told["server_weight"] < 1.1
    with answering(ranks, place, "--model", "other") as address:
        said = refused(capfd, *LORA, f"rollout.server={address}", "schedule.max_steps=1")
    assert "drew its answers by another model than the one in training" in said, said


def test_a_run_whose_server_dies_goes_on(place: Path, ranks: Ranks, capfd: Any) -> None:
    """Also between two steps on the same answers, which a checkpoint holds."""
    common = [*LORA, "policy.num_iterations=2", "max_steps=3", "checkpoint.save_steps=1", "checkpoint.rehearse=false"]
    common += ["data.eval_split=null", "checkpoint.save_total_limit=9", "output.name=dies"]
    with answering(ranks, place) as address:
        wanted = run("straight", *common[:-1], f"rollout.server={address}")
    # Three questions are asked before training, and four prompts are answered in a rollout: the next one fails.
    with answering(ranks, place, "--dies-after", str(3 + 4)) as address:
        capfd.readouterr()
        assert main(["recipe=small", *common, f"rollout.server={address}"]) != 0
        said = " ".join(capfd.readouterr().err.split())
    assert f"the vLLM server at {address} does not answer" in said and "goes on from the newest checkpoint" in said
    kept = place / "runs" / "dies" / "checkpoints"
    shutil.rmtree(kept / "checkpoint-2")
    assert (kept / "checkpoint-1" / FILE).is_file()
    with answering(ranks, place) as address:
        found = run("dies", *common, f"rollout.server={address}")
    assert losses(found) == losses(wanted)
    assert [row["tokens"] for row in steps_of(found)] == [row["tokens"] for row in steps_of(wanted)]


def test_no_server_is_an_error_that_says_how_it_is_started(place: Path, capfd: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    line = "vllm serve llama --enable-lora --max-lora-rank 8 --dtype float32 --max-model-len 64 --logprobs-mode"
    said = refused(capfd, *LORA, f"rollout.server={address}", name="alone")
    assert f"the vLLM server at {address} does not answer" in said
    assert f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True {line} processed_logprobs" in said
    assert not (place / "runs" / "alone" / "metrics.jsonl").exists()
    said = refused(capfd, f"rollout.server={address}")
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve llama --dtype float32" in said


@pytest.mark.parametrize(
    ("flags", "overrides", "wanted"),
    [
        (["--longest", "63"], LORA, "takes rows of 63 tokens, and batch.seq_len is 64"),
        (["--rank", "8"], ["method.name=lora", "method.r=16"], "makes no room for adapters of rank 16"),
        (["--without", "lora"], LORA, "was started without adapters"),
        (["--without", "updates"], LORA, "loads no adapters while it runs"),
        (["--without", "sight"], LORA, "output.dir must be a folder that it shares"),
        (["--without", "development"], [], "takes no new weights"),
        (["--without", "tokens"], LORA, "serves llama, whose tokens are others than those of llama"),
        (["--raw"], [*LORA, "rollout.temperature=0.5"], "as they are before rollout.temperature"),
        (["--model", "short"], LORA, "does not answer what ends with the last token of llama"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_a_server_that_will_not_do_is_told_apart(
    flags: list[str], overrides: list[str], wanted: str, place: Path, ranks: Ranks, capfd: Any
) -> None:
    if "short" in flags:
        _with_fewer_tokens(place)
    with answering(ranks, place, *flags) as address:
        said = refused(capfd, *overrides, f"rollout.server={address}")
    assert wanted in said and "vllm serve llama" in said, said


def _sure_of_itself(place: Path) -> None:
    """A model that is far from uniform, unlike other random ones."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(place / "llama", place / "other")
    model = AutoModelForCausalLM.from_pretrained(place / "llama")
    model.get_output_embeddings().weight.data.mul_(10)
    model.save_pretrained(place / "other")


def _with_fewer_tokens(place: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(place / "llama", place / "short")
    model = AutoModelForCausalLM.from_pretrained(place / "llama")
    model.resize_token_embeddings(model.config.vocab_size - 1)
    model.save_pretrained(place / "short")


@pytest.mark.parametrize(
    "address",
    ["node:8000", "ftp://node", "http://", "http://node:x", "http://node:70000", "http://node/v1", "http://a@b"],
)
def test_an_address_that_is_none_is_a_problem(address: str, capfd: Any) -> None:
    assert "is no address of a server such as http://localhost:8000" in refused(capfd, f"rollout.server={address}")


def test_a_run_may_go_on_with_a_server_elsewhere_but_not_without_one() -> None:
    here, there, without = (
        recipe_hash(load_checked("small", overrides).recipe)
        for overrides in (["rollout.server=http://a:8000"], ["rollout.server=https://b/"], [])
    )
    assert here == there != without


def test_a_plan_without_what_a_server_does(capsys: Any) -> None:
    def planned(*overrides: str) -> dict[str, Any]:
        assert toolkit(["plan", "recipe=small", "hardware=h100", "--json", *overrides]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    here, there = planned(*LORA), planned(*LORA, "rollout.server=http://node:8000")
    assert "generation" in here["memory"][0]["phases"] and "generation" not in there["memory"][0]["phases"]
    assert here["work"]["generation_seconds"] > 0 and there["work"]["generation_seconds"] is None
    assert there["work"]["step_seconds"]["value"] < here["work"]["step_seconds"]["value"]
    (note,) = (each for each in there["notes"] if "rollout.server" in each)
    assert "is not known" in note and "vllm serve llama --enable-lora" in note


@contextmanager
def vllm(place: Path, model: str, *flags: str) -> Iterator[str]:
    """The address of a real server, which takes as long to start as it takes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    line = [os.environ["VLLM"], "serve", model, "--dtype", "float32", "--max-model-len", "64", "--port", str(port)]
    line += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager", *flags]
    log = place / f"vllm-{model}.log"
    with log.open("w") as file:
        server = subprocess.Popen(line, cwd=place, env={**os.environ, **own}, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 600
        while True:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/version").close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.matrix
@pytest.mark.skipif("VLLM" not in os.environ, reason="VLLM does not name the executable of vLLM, in its environment")
@pytest.mark.parametrize(
    ("model", "flags", "method"),
    [("llama", ["--enable-lora", "--max-lora-rank", "8"], LORA), ("untied", [], [])],
    ids=["lora", "full"],
)
def test_vllm_itself_answers_by_the_weights_of_each_step(
    model: str, flags: list[str], method: list[str], place: Path, record_property: Any
) -> None:
    """Full fine-tuning of an untied model: on CPUs vLLM's output head keeps a copy of embeddings, which it does not
    read anew."""
    with vllm(place, model, *flags) as address:
        common = [f"model.path={model}", f"rollout.server={address}", *method, "rollout.temperature=0.8"]
        one = run(f"real-{model}", *common, "schedule.max_steps=6")
        other = run(f"again-{model}", *common, "schedule.max_steps=6", "batch.micro_batch_size=1")
    rows = steps_of(one)
    title = "Answers from vLLM: means over tokens, of the step where they are largest"
    largest = {name: f"{max(row[name] for row in rows):.1e}" for name in OF_SERVER}
    record(record_property, title, model=model, reward=f"{rows[0]['reward']:.3f} … {rows[-1]['reward']:.3f}", **largest)
    assert all(row["server_difference"] < ALIKE for row in rows)
    assert [row["reward"] for row in steps_of(other)] == pytest.approx([row["reward"] for row in rows], abs=1e-5)
