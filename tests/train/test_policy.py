"""Learning from rewards: TRL's own loss on the same answers, how answers are drawn, metrics, what a run depends on."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from small import set_up
from tiny import perturb, tiny_model, tiny_tokenizer
from transformers import CONFIG_MAPPING

from toolkit.cli.main import main as toolkit
from toolkit.data.batching.batches import FixedOrder
from toolkit.data.rewards import Scorer
from toolkit.models.tiny import tiny_model as shrunk
from toolkit.recipe.rules import load_checked
from toolkit.train.evaluation.evaluate import CannotGenerate, evaluate
from toolkit.train.main import main
from toolkit.train.trainers.policy import FILE
from toolkit.train.trainers.rollouts import Asker, Drawn, uniform

RECIPE = """
description: A small training on rewards
model: {path: llama}
data: {sources: [prompts.jsonl], eval_split: 0.2}
objective: grpo
rollout: {num_generations: 4, max_completion_tokens: 6}
rewards: {file: own.py, trust_python: true, length: {max_tokens: 3, soft: 6}}
precision: fp32
optimizer: {learning_rate: 3.0e-3}
schedule: {max_steps: 3}
batch: {seq_len: 64, global_batch_size: 4, micro_batch_size: 2}
evaluation: {num_prompts: 0}
"""
OWN = """
def reward(completions, prompts, level, **columns):
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]
"""
NOT_A_NUMBER = "def wrong(completions, prompts, **columns):\n    return [float('nan')] * len(completions)\n"
ROWS = [{"prompt": f"{n}: " + "word " * (1 + n % 3), "answer": str(n), "level": n} for n in range(30)]
LORA = ["method.name=lora", "optimizer.learning_rate=1e-2"]
SERVED = ["policy.loss=dapo"]
"""Tokens were drawn by a server, whose log-probabilities are others."""


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a tiny Llama, prompts, a reward of its own and a recipe."""
    folder = tmp_path_factory.mktemp("policy")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    write_jsonl(folder / "prompts.jsonl", ROWS)
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def run(name: str, *overrides: str) -> Path:
    assert main(["recipe=small", f"output.name={name}", *overrides]) == 0
    return Path("runs") / name


def test_a_number_picks_the_token_whose_share_it_falls_into() -> None:
    """Numbers spread evenly pick each token as often as it is likely, with and without a temperature and top-p."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    numbers = ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)[:, None]
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.6)):
        wanted = (logits[0].double() / temperature).softmax(-1)
        if top_p < 1:
            order = wanted.argsort(descending=True)
            kept = order[: int((wanted[order].cumsum(0) < top_p).sum()) + 1]
            wanted = torch.zeros_like(wanted).index_copy(0, kept, wanted[kept])
            wanted /= wanted.sum()
        picked = Drawn(numbers, temperature, top_p)(torch.zeros(20_000, 3), logits.expand(20_000, -1)).argmax(-1)
        shares = torch.bincount(picked, minlength=12) / 20_000
        assert (shares - wanted).abs().max() < 1e-3, (temperature, top_p)


def test_answers_do_not_depend_on_what_is_asked_beside_them() -> None:
    trainer = set_up().trainer
    together = [each for batch in trainer._rollouts([[3, 7], [1, 12]], 5) for each in batch]
    for rows in ([[12]], [[1], [3]], [[7, 3, 12]]):
        for found in (each for batch in trainer._rollouts(rows, 5) for each in batch):
            (same,) = (each for each in together if each.row == found.row)
            assert found.answers == same.answers and found.gains == pytest.approx(same.gains)
    assert len({str(ids) for each in together for ids in each.answers}) > 8
    later = trainer._rollouts([[3]], 6)[0][0]
    assert later.answers != together[0].answers
    assert (uniform(1, 2, 3, 4, 5) == uniform(1, 2, 3, 4, 5)).all() and (uniform(1, 2, 3, 4, 5) < 1).all()


@pytest.mark.parametrize("prompts", [[[5, 6, 7, 8], [9], [5, 6, 7, 8], [9]], [[9], [9], [8]]], ids=["several", "short"])
def test_a_prompt_is_read_once_for_all_of_its_answers(prompts: list[list[int]]) -> None:
    """And the answers are the same, drawn or likeliest."""
    trainer = set_up("seed=3").trainer
    read: list[int] = []
    model = trainer.model
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    numbers = np.random.default_rng(1).random((len(prompts), 6))
    asker, cpu = trainer.asker, torch.device("cpu")
    assert asker.reads_once
    once = asker.answers(model, prompts, cpu, numbers)
    first, longest = read[:2], max(3, *map(len, prompts))
    # The different prompts but for their last tokens, and then one token of each answer at a time.
    assert first == [2 * (longest - 1), len(prompts)]
    anew = dataclasses.replace(asker, reads_once=False)
    assert once == anew.answers(model, prompts, cpu, numbers) and len({*map(str, once)}) > 1


def test_answers_that_have_ended_leave_the_others() -> None:
    """Once half of them have; what the others say does not change."""
    trainer = set_up("seed=3", "rollout.max_completion_tokens=24").trainer
    read: list[int] = []
    model = trainer.model
    model.get_input_embeddings().register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    prompts = [[5, 6, 7, 8], [9, 10]] * 4
    numbers = np.random.default_rng(1).random((len(prompts), 24))
    cpu = torch.device("cpu")
    # Tokens that an answer to eight has among its first ones, so that they end at different times.
    free = dataclasses.replace(trainer.asker, stops=frozenset()).answers(model, prompts, cpu, numbers)
    asker = dataclasses.replace(trainer.asker, stops=frozenset(ids[2 * place + 1] for place, ids in enumerate(free)))
    read.clear()
    found = asker.answers(model, prompts, cpu, numbers)
    lengths = sorted(map(len, found))
    assert len({*lengths}) > 3
    _, *tokens = read
    # All go on until the fourth has ended, the four that are left until two more have, and so on.
    wanted = [8] * lengths[3] + [4] * (lengths[5] - lengths[3]) + [2] * (lengths[6] - lengths[5])
    assert tokens == wanted + [1] * (lengths[7] - lengths[6])
    anew = dataclasses.replace(asker, reads_once=False)
    assert found == anew.answers(model, prompts, cpu, numbers)


def test_a_model_that_cannot_write_is_told_with_what_to_do_for_this_training() -> None:
    """What evaluations advise, to do without samples, would not help."""
    asker = set_up().trainer.asker
    jamba = shrunk(CONFIG_MAPPING["jamba"](), "grpo")
    with pytest.raises(CannotGenerate, match="cannot write with this jamba") as failure:
        asker.answers(jamba, [[5, 6, 7]], torch.device("cpu"))
    assert "rollout.server" in failure.value.change and "num_prompts" not in failure.value.change


def trl_loss(kind: str, inputs: dict[str, Any], folder: Path, **settings: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """TRL's own loss and gradients of answers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    config, trainer_of = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
    model = AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32)
    arguments = config(
        output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, activation_checkpointing=False,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=6, **settings,
    )  # fmt: skip
    trainer = trainer_of(
        model, reward_funcs=lambda completions, **kwargs: [0.0] * len(completions), args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8), processing_class=AutoTokenizer.from_pretrained("llama"),
    )  # fmt: skip
    perturb(trainer.model, 0.02)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    # As if vLLM had drawn the answers, which is not installed here.
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("objective", "overrides", "settings"),
    [
        ("grpo", ["policy.loss=grpo"], {"loss_type": "grpo"}),
        ("grpo", [], {"loss_type": "dapo"}),
        ("grpo", ["policy.loss=dr_grpo"], {"loss_type": "dr_grpo"}),
        (
            "grpo",
            ["policy.loss=grpo", "policy.importance=sequence", "rollout.temperature=0.7"],
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "temperature": 0.7},
        ),
        ("rloo", ["policy.beta=0"], {"beta": 0.0}),
        ("grpo", SERVED, {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate"}),
    ],
    ids=["grpo", "dapo", "dr_grpo", "gspo", "rloo", "served"],
)
def test_loss_and_gradients_are_trls(
    objective: str, overrides: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    session = set_up(f"objective={objective}", "policy.num_iterations=2", "policy.epsilon=0.02", *overrides)
    trainer = session.trainer
    batch = trainer._rollouts([[3, 7]], 0)[0]
    inputs = trainer._laid_out(batch)
    trainer.score(trainer.model.train(), inputs)  # Notes what the policy that answered says.
    before = [torch.tensor(ids, dtype=torch.float32) for each in batch for ids in each.before]
    served = None
    if overrides is SERVED:
        served = [ids + torch.randn(len(ids), generator=torch.Generator().manual_seed(len(ids))) for ids in before]
        drawn = iter(served)
        for each in batch:
            each.served = [next(drawn).tolist() for _ in each.answers]
    perturb(trainer.model, 0.02)
    trainer._seen = None
    trainer._note(batch)
    total, _, _ = trainer.score(trainer.model.train(), inputs)
    answers = [ids for each in batch for ids in each.answers]
    count = {"dapo": sum(map(len, answers)), "dr_grpo": 8 * 6}.get(settings.get("loss_type", ""), 8)
    (total / count).backward()

    def padded(rows: list[Any], side: str) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [torch.as_tensor(row) for row in rows]
        masks = [torch.ones(len(row), dtype=torch.long) for row in rows]
        return tuple(  # type: ignore[return-value]
            torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_side=side) for each in (rows, masks)
        )

    asked, asked_mask = padded([each.asked for each in batch for _ in each.answers], "left")
    given, given_mask = padded(answers, "right")
    gains = torch.tensor(np.concatenate([each.gains for each in batch]), dtype=torch.float32)
    assert gains.abs().max() > 0.1
    known = {
        "prompt_ids": asked, "prompt_mask": asked_mask, "completion_ids": given, "completion_mask": given_mask,
        "advantages": gains, "num_items_in_batch": given_mask.sum(),
        "old_per_token_logps": padded(before, "right")[0], "old_logps": torch.stack([each.sum() for each in before]),
    }  # fmt: skip
    if served:
        # As TRL does for `token_truncate`, beyond what `_compute_loss` does.
        ratio = (known["old_per_token_logps"] - padded(served, "right")[0]).exp()
        known["importance_sampling_ratio"] = ratio.clamp(max=3.0)
        assert (ratio > 3.0).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, gradients = trl_loss(objective, known, tmp_path, epsilon=0.02, **settings)
    assert trainer.told(trainer._seen.tolist())["clipped"] > 0
    assert (total / count).item() == pytest.approx(wanted, rel=2e-5, abs=1e-7)
    own = {each: parameter.grad for each, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert own.keys() == gradients.keys()
    for each, gradient in gradients.items():
        assert (own[each] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, each


def test_advantages_are_those_of_the_rewards_by_weight() -> None:
    session = set_up("rewards.length.weight=0.5", "rewards.function_weight=2")
    for each in (rollout for batch in session.trainer._rollouts([[0, 4], [9]], 0) for rollout in batch):
        lengths = [min(1.0, max(0.0, 1 - (len(ids) - 3) / 6)) for ids in each.answers]
        texts = [session.tokenizer.decode(ids, skip_special_tokens=True) for ids in each.answers]
        vowels = [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in texts]
        assert each.scores == pytest.approx(np.column_stack([lengths, vowels]))
        total = 0.5 * np.array(lengths) + 2 * np.array(vowels)
        assert each.gains == pytest.approx((total - total.mean()) / (total.std(ddof=1) + 1e-4))


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_a_run_learns_and_says_how(objective: str) -> None:
    more = ["max_steps=16", "evaluation.every_steps=8", "evaluation.num_prompts=1", "optimizer.learning_rate=1e-2"]
    more += [f"objective={objective}", "policy.beta=0", "rollout.num_generations=8"]
    folder = run(f"learns-{objective}", *more)
    rows = metrics(folder)
    first, *_, last = [row for row in rows if "eval_loss" in row]
    assert last["eval_reward"] > first["eval_reward"] + 0.2 and last["eval_loss"] == -last["eval_reward"]
    assert first["eval_answers"] == 6 and {"eval_reward_length", "eval_reward_reward_plus_minus"} <= first.keys()
    steps = [row for row in rows if "loss" in row]
    said = {
        "reward",
        "reward_std",
        "reward_length",
        "reward_length_std",
        "no_spread",
        "answer_tokens",
        "cut",
        "clipped",
    }
    assert all(said <= row.keys() for row in steps)
    assert steps[0]["reward"] == pytest.approx(steps[0]["reward_length"] + steps[0]["reward_reward"], abs=1e-5)
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    # Eight answers to each of four prompts, counted as they are.
    assert steps[0]["tokens"] > 32 * steps[0]["answer_tokens"] and steps[1]["tokens"] > steps[0]["tokens"]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [row["step"] for row in steps] and len(lines[0]["answers"]) == 8
    assert {"prompt", "answer", "length", "reward"} == lines[0]["answers"][0].keys()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Held-out reward, length" in page and "Rewards by part" in page and "perplexity" not in page.lower()
    card = (folder / "final" / "README.md").read_text(encoding="utf-8")
    assert "| reward, length |" in card and "length (1), reward (1)" in card and "perplexity" not in card.lower()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["hashes"]["rewards.file"]) == 64
    assert manifest["plan"]["work"]["generation_seconds"] > 0


def test_rewards_see_tags_that_are_special_tokens_of_the_model() -> None:
    rewards = ["rewards.format.tags=[answer]", "rewards.numeric.tag=answer", "rewards.regex.pattern='\\[OK\\]'"]
    without = ["~rewards.file", "~rewards.trust_python", "~rewards.length"]
    recipe = load_checked("small", [*without, *rewards]).recipe
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<answer>", "</answer>", "[OK]", "<other>"], special_tokens=True)
    asker = Asker(recipe, tokenizer, frozenset({tokenizer.eos_token_id}), None, Scorer(recipe.rewards))
    ids = tokenizer("<answer>[OK]<other> 42</answer><|im_end|>", add_special_tokens=False)["input_ids"]
    assert asker.text(ids) == "<answer>[OK] 42</answer>"
    assert asker.scores([], [ids, ids[2:]], "a row", {"answer": "42"}).tolist() == [[1, 1, 1], [0, 0, 0.25]]


def test_the_reference_is_the_base_without_its_adapters() -> None:
    steps = [row for row in metrics(run("refers", "policy.beta=0.01", "max_steps=6", *LORA)) if "loss" in row]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[-1]["kl"] > 1e-4
    trainer = set_up("policy.beta=0.01", "method.name=lora").trainer
    inputs = trainer._laid_out(trainer._rollouts([[3, 7]], 0)[0])
    perturb(trainer.model, 0.02)
    with trainer.model.disable_adapter(), torch.no_grad():
        wanted = trainer._of_tokens(trainer.model, inputs)[0]
    with torch.no_grad():
        own = trainer._of_tokens(trainer.model, inputs)[0]
    assert trainer._by_reference(inputs).tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    assert (own - wanted).abs().max() > 1e-3


def test_training_does_not_depend_on_how_prompts_fall_into_micro_batches() -> None:
    curves, held_out = [], []
    ways = [("1", []), ("4", []), ("2", ["model.attention=torch_varlen"]), ("2", ["rollout.batch_size=3"])]
    for size, more in ways:
        folder = run(f"cut-{len(curves)}", f"batch.micro_batch_size={size}", "policy.scale_rewards=batch", *more)
        curves.append(losses(folder))
        held_out.append([row["eval_loss"] for row in metrics(folder) if "eval_loss" in row])
    for curve, figures in zip(curves[1:], held_out[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-6, abs=1e-6)
        assert figures == pytest.approx(held_out[0], rel=1e-6)


def test_a_prompt_that_ends_an_epoch_and_begins_the_next_is_trained_twice_in_a_step() -> None:
    """Also where both are of one process, of one micro-batch or two, and in a second step on the same answers."""
    curves = []
    for size in ("1", "2", "4"):
        few = ["data.max_samples=5", "policy.num_iterations=2", "max_steps=6"]
        curves.append(losses(run(f"again-{size}", f"batch.micro_batch_size={size}", *few)))
    rows = FixedOrder(5, 42, True).between(0, 12).reshape(3, 4)
    assert any(len(set(step)) < 4 for step in rows.tolist())
    assert curves[1] == pytest.approx(curves[0], rel=1e-6, abs=1e-6) == curves[2]


@pytest.mark.parametrize("times", [1, 2])
def test_a_run_goes_on_as_if_it_had_not_stopped(times: int) -> None:
    saving = [
        "checkpoint.save_steps=1",
        "checkpoint.save_total_limit=5",
        "checkpoint.rehearse=false",
        f"policy.num_iterations={times}",
        *LORA,
    ]
    folder = run(f"straight-{times}", *saving)
    wanted, manifest = losses(folder), json.loads((folder / "manifest.json").read_text())
    steps = [row for row in metrics(folder) if "loss" in row]
    answers = (folder / "answers.jsonl").read_text(encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(folder / "final")
    for step in (2, 3):
        shutil.rmtree(folder / "checkpoints" / f"checkpoint-{step}", ignore_errors=True)
    kept = folder / "checkpoints" / "checkpoint-1" / FILE
    assert kept.is_file() == (times == 2)
    run(f"straight-{times}", *saving)
    assert losses(folder) == wanted
    said = ("tokens", "reward", "reward_std", "no_spread", "answer_tokens", "cut", "clipped")
    for row, before in zip((row for row in metrics(folder) if "loss" in row), steps, strict=True):
        assert [row[name] for name in said] == [before[name] for name in said]
    # One of each step, also of those that were taken twice.
    assert (folder / "answers.jsonl").read_text(encoding="utf-8") == answers


def test_steps_on_the_same_answers_are_clipped_and_take_no_new_ones() -> None:
    folder = run("twice", "policy.num_iterations=2", "policy.epsilon=0.001", "max_steps=4")
    first, second, third, _ = [row for row in metrics(folder) if "loss" in row]
    assert first["clipped"] == 0 == third["clipped"] and second["clipped"] > 0
    assert first["reward"] == second["reward"] != third["reward"]


def test_steps_that_are_logged_together_are_told_together() -> None:
    """Also where a rollout serves steps of two rows of the metrics."""
    steps = ["max_steps=6", "policy.num_iterations=2"]
    each = [row for row in metrics(run("each-step", *steps)) if "loss" in row]
    both = [row for row in metrics(run("three-steps", *steps, "logging.every_steps=3")) if "loss" in row]
    assert [row["step"] for row in both] == [3, 6] and each[0]["reward"] != each[2]["reward"]
    for row, parts in zip(both, (each[:3], each[3:]), strict=True):
        for name in ("loss", "reward", "reward_length", "reward_std", "no_spread", "answer_tokens", "cut"):
            assert row[name] == pytest.approx(sum(part[name] for part in parts) / 3, abs=2e-6), name


def test_a_reward_of_ones_own_that_fails_or_has_changed_ends_the_run(capsys: Any) -> None:
    saving = ["checkpoint.save_steps=1", "checkpoint.rehearse=false", "output.name=own"]
    folder = run("own", *saving)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoints" / "checkpoint-3")
    assert "own.py (SHA-256" in capsys.readouterr().out
    Path("own.py").write_text(OWN.replace("1 + len", "2 + len"), encoding="utf-8")
    assert main(["recipe=small", *saving]) != 0
    assert "the rewards.file of runs/own changed since the run began" in " ".join(capsys.readouterr().err.split())
    Path("own.py").write_text(NOT_A_NUMBER, encoding="utf-8")
    assert main(["recipe=small", "output.name=wrong", "rewards.function=wrong"]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the reward `wrong` returns nan, which is no finite number, for prompts.jsonl:" in said
    Path("own.py").write_text(OWN, encoding="utf-8")


def test_held_out_prompts_are_answered_as_many_at_once_as_the_recipe_says() -> None:
    few = ["rollout.batch_size=4"]
    for overrides, wanted in (([], [6]), (few, [4, 2]), ([*few, "evaluation.batch_size=5"], [5, 1])):
        session = set_up(*overrides)
        with patch.object(Asker, "answers", autospec=True, side_effect=Asker.answers) as answers:
            evaluate(session)
        assert [len(call.args[2]) for call in answers.call_args_list] == wanted


def test_the_plan_counts_what_is_generated(capsys: Any) -> None:
    def planned(*overrides: str) -> dict[str, Any]:
        assert toolkit(["plan", "recipe=small", "hardware=h100", "--json", *overrides]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def cache(*overrides: str) -> int:
        phases = planned(*overrides)["memory"][0]["phases"]
        return int(phases["generation"]["cache"])

    less, more = planned("rollout.num_generations=5"), planned("rollout.num_generations=10")
    assert less["answers"] == 5 and more["work"]["tokens_per_step"] == pytest.approx(
        2 * less["work"]["tokens_per_step"]
    )
    # A prompt is read once for however many answers.
    assert more["work"]["generation_seconds"] < 2 * less["work"]["generation_seconds"]
    caches = [each["memory"][0]["phases"]["generation"]["cache"] for each in (less, more)]
    # Keys and values of 2 layers with 2 heads of 16, in fp32, for each token of each of the step's sequences.
    assert caches[1] == 2 * caches[0] > 0
    longer = planned("rollout.max_completion_tokens=24")
    assert longer["work"]["generation_seconds"] > 2 * less["work"]["generation_seconds"] > 0
    # Held-out prompts are answered too.
    few = cache("rollout.batch_size=2")
    assert cache("rollout.batch_size=2", "evaluation.batch_size=8") == 4 * few
    reference = planned(*LORA, "policy.beta=0.1")["work"]["step_seconds"]["value"]
    assert reference > planned(*LORA)["work"]["step_seconds"]["value"]
