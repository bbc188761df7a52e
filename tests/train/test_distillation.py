"""Learning from a teacher: the loss written out with all logits, and TRL's; who may teach whom; metrics; resuming."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, metrics, write_jsonl
from small import loss_and_gradients, populate, set_up, trained
from tiny import tiny_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolkit.common import UserError
from toolkit.data.batching.collate import documents_of
from toolkit.data.rows import IGNORE
from toolkit.models.load import ModelSource
from toolkit.models.streamed_layers import stream_layers
from toolkit.models.teacher import check_vocabulary, load_teacher, open_teacher
from toolkit.recipe.distillation import Teacher
from toolkit.recipe.rules import load_checked
from toolkit.train.evaluation.evaluate import evaluate
from toolkit.train.main import main
from toolkit.train.trainers.rollouts import uniform

DISTILL = ["objective=distillation", "distillation.teacher.path=teacher"]
OWN = [*DISTILL, "distillation.on_policy=1", "rollout.max_completion_tokens=6"]
LOSSES = {
    "forward": {},
    "reverse": {"beta": 1.0},
    "between": {"beta": 0.3},
    "softer": {"beta": 0.5, "temperature": 2.5, "ce_share": 0.25},
    "forward-softer": {"temperature": 0.7, "ce_share": 0.4},
}


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with two tiny Llamas, of which the teacher is deeper and its embeddings are filled up further."""
    folder = tmp_path_factory.mktemp("distillation")
    populate(folder, "llama", "gemma")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "teacher", seed=7, layers=3)
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model.resize_token_embeddings(len(model.model.embed_tokens.weight) + 24, mean_resizing=False)
        # Random models are all but uniform: nobody would learn much of their words.
        model.model.embed_tokens.weight.data.mul_(8)
    model.save_pretrained(folder / "teacher")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def written_out(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta=0.0, temperature=1.0, ce_share=0.0
) -> torch.Tensor:
    """The loss of tokens, of all their logits (tokens, vocabulary)."""
    common = min(student.shape[1], teacher.shape[1])
    s = (student[:, :common] / temperature).softmax(1)
    t = (teacher[:, :common] / temperature).softmax(1)
    m = beta * t + (1 - beta) * s
    if beta == 0:
        divergence = (t * (t.log() - s.log())).sum(1)
    elif beta == 1:
        divergence = (s * (s.log() - t.log())).sum(1)
    else:
        divergence = beta * (t * (t / m).log()).sum(1) + (1 - beta) * (s * (s / m).log()).sum(1)
    return (1 - ce_share) * divergence + ce_share * F.cross_entropy(student, labels, reduction="none")


def all_logits(session: Any, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, vocabulary) of the student, with gradients, and of the teacher; and the labels: row by row."""
    trainer, found = session.trainer, []
    for row in range(rows):
        example = session.prepared.train[row]
        ids, labels = torch.tensor([example["input_ids"]]), torch.tensor(example["labels"])[1:]
        own = trainer.model.train()(input_ids=ids).logits[0, :-1]
        theirs = trainer.teacher.model(input_ids=ids).logits[0, :-1].detach()
        kept = labels != -100
        found.append((own[kept], theirs[kept], labels[kept]))
    return tuple(map(torch.cat, zip(*found, strict=True)))  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    session = set_up(*DISTILL, *(f"distillation.{key}={value}" for key, value in LOSSES[name].items()))
    loss, gradients = loss_and_gradients(session)
    student, teacher, labels = all_logits(session)
    assert teacher.shape[1] == student.shape[1] + 24
    wanted = written_out(student, teacher, labels, **LOSSES[name]).mean()
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=2e-6)
    for key, parameter in session.trainer.model.named_parameters():
        distance = (gradients[key] - parameter.grad).norm() / parameter.grad.norm()
        assert distance < 1e-5, key


def test_a_teacher_computes_in_its_own_type_within_a_student_of_16_bits() -> None:
    session = set_up(*DISTILL, "precision=bf16", "distillation.teacher.dtype=fp32", "distillation.beta=1")
    loss, _ = loss_and_gradients(session)
    with torch.autocast("cpu", torch.bfloat16):
        student, _, labels = all_logits(session)
    _, teacher, _ = all_logits(session)
    assert teacher.dtype == torch.float32
    wanted = written_out(student.float(), teacher, labels, beta=1.0).mean().item()
    rounded = written_out(student.float(), teacher.bfloat16().float(), labels, beta=1.0).mean().item()
    assert abs(loss - wanted) < 0.2 * abs(rounded - wanted)


def test_a_teacher_whose_layers_wait_on_the_host_teaches_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on a GPU: on a CPU there is nowhere to take them from."""
    asked: list[bool] = []
    fetched: list[int] = []

    def load(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        found = load_teacher(*arguments)
        stream_layers(found.model, torch.device("cpu"), "distillation.teacher.offload")
        found.model.model.layers[2].register_forward_pre_hook(lambda *_: fetched.append(1))
        return found

    both = [*DISTILL, "data.eval_split=0.3"]
    whole = trained("on_the_device", *both)
    monkeypatch.setattr("toolkit.train.setup.load_teacher", load)
    streamed = trained("on_the_host", *both, "distillation.teacher.offload=true")
    assert asked == [True] and len(fetched) > len(losses(streamed))
    assert losses(streamed) == losses(whole)
    assert [row.get("eval_kl") for row in metrics(streamed)] == [row.get("eval_kl") for row in metrics(whole)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_loss_is_trls(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    session = set_up(*DISTILL, f"distillation.beta={beta}", "distillation.temperature=1.5")
    loss, _ = loss_and_gradients(session)
    student, teacher, _ = all_logits(session)
    both = (student[None], teacher[None, :, : student.shape[1]])
    labels = torch.zeros(1, len(student))
    wanted = gkd.GKDTrainer.generalized_jsd_loss(*both, labels=labels, beta=beta, temperature=1.5)
    assert loss == pytest.approx(wanted.item(), rel=2e-6)


def test_a_run_teaches_another_and_says_how_near_it_comes() -> None:
    """The folder of a run is its model; intervals are those of rows; reports say both figures, and no perplexity."""
    taught = ["data.eval_split=0.3", "evaluation.every_steps=2", "distillation.ce_share=0.3"]
    trained("first", "model.path=teacher", "method.name=full")
    run = trained("taught", "objective=distillation", "distillation.teacher.path=runs/first", *taught)
    rows = metrics(run)
    first, *_, last = [row for row in rows if "eval_loss" in row]
    assert last["eval_kl"] < first["eval_kl"] and last["eval_loss"] < first["eval_loss"]
    assert {"kl", "agreement", "cross_entropy"} <= next(row for row in rows if "loss" in row).keys()
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    state = manifest["effective"]
    stated = {"teacher_dtype": "float32", "teacher_quantization": "none", "teacher_trained": 0}
    assert {key: state[key] for key in stated} == stated
    assert manifest["hashes"]["teacher"] != manifest["hashes"]["model"]
    plan = manifest["plan"]["memory"][0]["phases"]
    held = sum(file.stat().st_size for file in Path("runs/first/final").glob("*.safetensors"))
    assert plan["forward"]["teacher"] >= 0.9 * held and "teacher" in plan
    card = (run / "final" / "README.md").read_text(encoding="utf-8")
    assert "made by distillation from `first`" in card
    assert "KL(teacher \\|\\| student)" in card and "±" in card and "perplexity" not in card
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Same next token as the teacher" in page and "95% interval" in page and "perplexity" not in page


def test_intervals_are_those_of_a_ratio_over_rows() -> None:
    session = set_up(*DISTILL, "data.eval_split=0.3", "evaluation.batch_size=3")
    trainer = session.trainer
    found = evaluate(session).metrics
    total, kl, tokens = 0.0, [], []
    for row in session.prepared.eval:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            s = trainer.model.eval()(input_ids=ids).logits[0, :-1][labels != -100].log_softmax(1)
            t = trainer.teacher.model(input_ids=ids).logits[0, :-1][labels != -100][:, : s.shape[1]].log_softmax(1)
        kl.append((t.exp() * (t - s)).sum().item())
        tokens.append(len(s))
        total += (t.argmax(1) == s.argmax(1)).sum().item()
    x, n = torch.tensor(kl, dtype=torch.float64), torch.tensor(tokens, dtype=torch.float64)
    ratio, rows = x.sum() / n.sum(), len(n)
    error = ((x - ratio * n).square().sum() * rows / (rows - 1)).sqrt() / n.sum()
    assert found["eval_kl"] == pytest.approx(ratio.item(), rel=1e-5)
    assert rows == 12 and found["eval_kl_plus_minus"] == pytest.approx(2.2010 * error.item(), rel=1e-4)
    assert found["eval_agreement"] == pytest.approx(total / n.sum().item())
    assert found["eval_tokens"] == n.sum().item() and found["eval_loss"] == pytest.approx(found["eval_kl"], rel=1e-5)
    # One row says nothing of how much rows differ.
    alone = trainer.figures([1.0, 2.0], torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0]]))
    assert alone["eval_kl"] == 0.5 and not any(key.endswith("_plus_minus") for key in alone)


def test_a_run_goes_on_as_if_it_had_not_stopped() -> None:
    whole = trained("whole", *DISTILL, "checkpoint.save_steps=2", "checkpoint.rehearse=false")
    shutil.copytree(whole, "runs/stopped")
    for name in ("final", "checkpoints/checkpoint-4"):
        shutil.rmtree(Path("runs/stopped") / name, ignore_errors=True)
    manifest = Path("runs/stopped/manifest.json")
    content = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps(content | {"status": "interrupted", "final": None}), encoding="utf-8")
    rows = [row for row in metrics(whole) if row["step"] <= 2]
    write_jsonl(Path("runs/stopped/metrics.jsonl"), rows)
    trained("stopped", *DISTILL, "checkpoint.save_steps=2", "checkpoint.rehearse=false")
    assert losses(Path("runs/stopped")) == losses(whole)


def step_of(trainer: Any, rows: list[list[int]], step: int) -> tuple[list[dict[str, Any]], Any]:
    """The micro-batches of a step as they are trained, and the number of their trained tokens."""
    trainer.state.global_step = step
    given = [trainer.data_collator([trainer.train_dataset[row] for row in part]) for part in rows]
    batches, count = trainer.get_batch_samples(iter(given), len(given), trainer.args.device)
    return batches, count


def rows_in(batches: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[int]]]:
    """Prompt to the tokens behind it and their labels."""
    found = {}
    for row in (row for batch in batches for row in documents_of(batch) if set(row["labels"]) != {IGNORE}):
        ids, labels = row["input_ids"], row["labels"]
        place = max(place for place in range(len(ids)) if labels[place] != IGNORE and labels[place - 1] == IGNORE)
        found[str(ids[:place])] = (ids[place:], labels[place:])
    return found


def test_a_student_answers_by_its_current_weights_token_by_token() -> None:
    """Each token is the one that a number picks of the model's distribution, recomputed by plain forward passes."""
    session = set_up(*OWN, "rollout.temperature=0.7")
    trainer = session.trainer
    before, _ = step_of(trainer, [[0, 3], [5, 7]], 2)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(
                0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    batches, count = step_of(trainer, [[0, 3], [5, 7]], 2)
    found = rows_in(batches)
    assert len(found) == 4 and found != rows_in(before)
    total = 0
    for row in (0, 3, 5, 7):
        example = session.prepared.train[row]
        ids, length = example["input_ids"], last_prompt(example["labels"])
        _, *numbers = uniform(session.recipe.seed, 2, ids, 1, 7)[0]
        asked, wanted = ids[:length], []
        while len(wanted) < 6 and not (wanted and wanted[-1] in session.stop_token_ids):
            with torch.no_grad():
                logits = trainer.model.eval()(input_ids=torch.tensor([[*asked, *wanted]])).logits[0, -1]
            shares = (logits.double() / 0.7).softmax(0).cumsum(0)
            wanted.append(int(torch.searchsorted(shares, torch.tensor(numbers[len(wanted)], dtype=torch.float64))))
        assert found[str(asked)] == (wanted, wanted)
        total += len(wanted)
    assert int(count) == total
    assert trainer.take_tokens() > total and trainer.shown[0].keys() == {"prompt", "answer"}


def last_prompt(labels: list[int]) -> int:
    """Tokens before the last run of trained ones."""
    end = max(place for place, label in enumerate(labels) if label != IGNORE)
    return 1 + max(place for place in range(end) if labels[place] == IGNORE)


def test_which_rows_are_answered_and_how_depends_on_nothing_beside_them() -> None:
    """Neither on the rows beside them, nor, of the answers, on the share; without an answer a row stays what it is."""
    half, every = (set_up(*OWN, f"distillation.on_policy={share}").trainer for share in (0.5, 1))
    rows = [*range(12)]
    together = rows_in(step_of(half, [rows], 1)[0])
    apart = rows_in(step_of(half, [rows[7:], rows[3:7], rows[:3]], 1)[0])
    assert together == apart
    whole, given = (
        rows_in(step_of(every, [rows], 1)[0]),
        rows_in([half.data_collator([*map(half.train_dataset.__getitem__, rows)])]),
    )
    own = {prompt for prompt, answer in together.items() if answer != given[prompt]}
    assert 2 <= len(own) <= 10
    assert all(together[prompt] == (whole if prompt in own else given)[prompt] for prompt in together)
    assert rows_in(step_of(half, [rows], 2)[0]) != together


@pytest.mark.parametrize("more", [[], ["model.attention=torch_varlen"]], ids=["padded", "flat"])
@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_the_loss_of_own_answers_is_that_of_all_their_logits_and_trls(beta: float, more: list[str]) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer")
    session = set_up(*OWN, f"distillation.beta={beta}", *more)
    trainer = session.trainer
    batches, count = step_of(trainer, [[1, 2], [4, 8, 9]], 0)
    losses = [trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=count) for batch in batches]
    own, theirs, labels = [], [], []
    for prompt, (answer, _) in rows_in(batches).items():
        asked = json.loads(prompt)
        ids = torch.tensor([[*asked, *answer]])
        with torch.no_grad():
            own.append(trainer.model.eval()(input_ids=ids).logits[0, len(asked) - 1 : -1])
            theirs.append(trainer.teacher.model(input_ids=ids).logits[0, len(asked) - 1 : -1])
        labels += answer
    student, teacher = torch.cat(own), torch.cat(theirs)
    assert len(labels) == int(count) == len(student)
    wanted = written_out(student, teacher, torch.tensor(labels), beta=beta).sum() / count
    assert sum(loss.item() for loss in losses) == pytest.approx(wanted.item(), rel=2e-6)
    both = (student[None], teacher[None, :, : student.shape[1]])
    trls = gkd.GKDTrainer.generalized_jsd_loss(*both, labels=torch.zeros(1, len(student)), beta=beta)
    assert sum(loss.item() for loss in losses) == pytest.approx(trls.item(), rel=2e-6)


def test_rows_whose_prompts_leave_no_room_keep_their_answers() -> None:
    longest, known = 6, set_up(*OWN).prepared.train
    lengths = sorted(last_prompt(row["labels"]) for row in known)
    room = lengths[len(lengths) // 2]
    tight = set_up(*OWN, "data.over_long=truncate", f"batch.seq_len={room + longest}").trainer
    rows = [*range(len(tight.train_dataset))]
    given = rows_in([tight.data_collator([tight.train_dataset[row] for row in rows])])
    found = rows_in(step_of(tight, [rows], 0)[0])
    for prompt, answer in found.items():
        assert (answer != given[prompt]) == (len(json.loads(prompt)) <= room)
    said = tight.told([1.0, *tight._seen.tolist()[1:]])
    assert said["on_policy"] == sum(found[each] != given[each] for each in found) / len(found) < 1
    assert 0 < said["answer_tokens"] <= longest and 0 <= said["cut"] <= 1


def test_a_run_on_its_own_answers_says_so_and_goes_on_as_if_it_had_not_stopped() -> None:
    """Whatever the micro-batch and its layout."""
    settings = [
        *OWN,
        "distillation.on_policy=0.7",
        "optimizer.learning_rate=1e-3",
        "checkpoint.save_steps=2",
        "checkpoint.rehearse=false",
    ]
    run = trained("own", *settings, "data.eval_split=0.3", "evaluation.every_steps=2")
    first, *_, last = [row for row in metrics(run) if "eval_loss" in row]
    assert last["eval_kl"] < first["eval_kl"]
    steps = [row for row in metrics(run) if "loss" in row]
    assert all(0 <= row["on_policy"] <= 1 for row in steps) and {"answer_tokens", "cut"} <= steps[-1].keys()
    lines = [json.loads(line) for line in (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines and {"prompt", "answer"} == lines[0]["answers"][0].keys()
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["plan"]["work"]["generation_seconds"] > 0
    assert "70% of the answers the student's own" in (run / "final" / "README.md").read_text(encoding="utf-8")
    for way in (
        ["batch.micro_batch_size=1"],
        ["batch.micro_batch_size=4", "model.attention=torch_varlen"],
        ["rollout.batch_size=1"],
    ):
        other = trained("-".join(["own", *way]).replace("/", "-"), *settings, "data.eval_split=0.3", *way)
        assert losses(other) == pytest.approx(losses(run), rel=1e-5)
    wanted, tokens = losses(run), [row["tokens"] for row in steps]
    (run / "manifest.json").write_text(
        json.dumps(manifest | {"status": "interrupted", "final": None}), encoding="utf-8"
    )
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    trained("own", *settings, "data.eval_split=0.3", "evaluation.every_steps=2")
    assert losses(run) == wanted
    assert [row["tokens"] for row in metrics(run) if "loss" in row] == tokens
    assert [json.loads(line) for line in (run / "answers.jsonl").read_text(encoding="utf-8").splitlines()] == lines


def test_a_teacher_with_other_tokens_is_refused_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("teacher", "other")
    file = Path("other/tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = [token for token in vocabulary if token.isalpha()][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content), encoding="utf-8")
    assert main(["recipe=small", "objective=distillation", "distillation.teacher.path=other"]) == 2
    assert "2 tokens are not the same" in " ".join(capsys.readouterr().err.split())
    recipe = load_checked("small", DISTILL).recipe
    other = recipe.with_values({"distillation.teacher": Teacher(path="other")})
    with pytest.raises(UserError, match=f"'{first}' .*of the student.*of the teacher"):
        check_vocabulary(ModelSource.open(recipe), AutoTokenizer.from_pretrained("llama"), open_teacher(other))


def test_models_whose_logits_are_capped_learn_and_teach() -> None:
    """Gemma 2 caps its logits, and TRL's head knows: the loss is that of the logits which the models have."""
    session = set_up("model.path=gemma", "objective=distillation", "distillation.teacher.path=teacher")
    loss, _ = loss_and_gradients(session)
    student, teacher, labels = all_logits(session)
    assert loss == pytest.approx(written_out(student, teacher, labels).mean().item(), rel=1e-5)
    other = [*DISTILL, "distillation.teacher.path=gemma", "distillation.teacher.quantization=nf4"]
    with pytest.raises(UserError, match=r"caps its attention logits.*\n.*model.attention to one of: auto, eager"):
        set_up(*other, "model.attention=sdpa")
    taught = set_up(*other)
    assert taught.attention == taught.guard.plan.attention == "eager"
    assert loss_and_gradients(taught)[0] > 0
    assert taught.trainer.teacher.model.model.layers[0].mlp.up_proj.weight.quant_state.quant_type == "nf4"
