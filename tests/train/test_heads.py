"""Heads of the objectives' own in training: losses written out and TRL's own, figures, what is saved, and resuming."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from safetensors.torch import load_file
from small import set_up, trained
from tiny import labelled_rows, pair_rows, tagged_rows, tiny_encoder, tiny_model
from transformers import LlamaModel

from toolkit.cli.evaluate import Questions, evaluate
from toolkit.common import UserError
from toolkit.models.attention import varlen
from toolkit.report.load import read_run
from toolkit.train.finished.chat import chat
from toolkit.train.finished.export import answer_prompts, load_trained, opened
from toolkit.train.finished.merge import _Probe, merge
from toolkit.train.main import main
from toolkit.train.trainers import heads
from toolkit.train.trainers.heads import check_padding

RECIPE = """
description: A small training of a head
model: {path: llama}
data: {sources: [pairs.jsonl], eval_split: 0.2}
objective: reward
precision: fp32
optimizer: {learning_rate: 1.0e-3, eps: 1.0e-5}
schedule: {max_steps: 4}
batch: {seq_len: 96, global_batch_size: 4, micro_batch_size: 2}
"""
CLASSES = ["objective=classification", "data.sources=[texts.jsonl]"]
WORDS = ["objective=token_classification", "data.sources=[words.jsonl]"]
LORA = ["method=lora", "method.r=4"]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a tiny Llama and a tiny BERT, rows of three kinds and a recipe."""
    folder = tmp_path_factory.mktemp("heads")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    tiny_encoder("bert", folder / "bert")
    shutil.copytree(folder / "llama", folder / "still")
    # Transformers' heads for words drop out a tenth of what they read.
    config = json.loads((folder / "still" / "config.json").read_text(encoding="utf-8")) | {"classifier_dropout": 0.0}
    (folder / "still" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Of other lengths than the chosen ones, and with a word that tells them.
    answers = itertools.pairwise(pair_rows(41, "prompt", "chosen"))
    pairs = [row | {"rejected": f"never {other['chosen']}"} for row, other in answers]
    for name, rows in (("pairs", pairs), ("texts", labelled_rows(40)), ("words", tagged_rows(40))):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def alone(session: Any, ids: list[int]) -> torch.Tensor:
    """Scores of one text without padding, by the model's own forward."""
    with torch.no_grad():
        return session.trainer.model.eval()(input_ids=torch.tensor([ids])).logits[0].double()


def first_batch(session: Any, count: int) -> dict[str, Any]:
    trainer = session.trainer
    return trainer.data_collator([trainer.train_dataset[row] for row in range(count)])


@pytest.mark.parametrize(("margin", "center"), [(0.0, 0.0), (0.7, 0.05)])
def test_the_loss_of_rewards_is_that_of_bradley_and_terry(margin: float, center: float) -> None:
    session = set_up(f"preference.margin={margin}", f"preference.center_rewards={center}")
    trainer, rows = session.trainer, session.prepared.train
    total, count, _ = trainer.score(trainer.model.eval(), first_batch(session, 4))
    wanted = 0.0
    for row in rows.select(range(4)):
        first = row["seq_lengths"][0]
        chosen, rejected = (
            alone(session, ids).squeeze() for ids in (row["input_ids"][:first], row["input_ids"][first:])
        )
        wanted += -torch.log(1 / (1 + torch.exp(-(chosen - rejected - margin)))) + center * (chosen + rejected) ** 2
    assert count == 4 and total.item() == pytest.approx(float(wanted), rel=1e-5)


def test_loss_and_gradients_of_rewards_are_trls(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    session = set_up("preference.center_rewards=0.02", "data.columns={instruction: prompt}")
    trainer, rows = session.trainer, session.prepared.train.select(range(4))
    total, count, _ = trainer.score(trainer.model.train(), first_batch(session, 4))
    (total / count).backward()
    trainer.model.save_pretrained(tmp_path / "begun")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "begun", dtype=torch.float32)
    arguments = RewardConfig(
        output_dir=str(tmp_path), center_rewards_coefficient=0.02, report_to=[], use_cpu=True, bf16=False,
        per_device_train_batch_size=4, activation_checkpointing=False,
    )  # fmt: skip
    pairs = [
        {
            "chosen_ids": row["input_ids"][: row["seq_lengths"][0]],
            "rejected_ids": row["input_ids"][row["seq_lengths"][0] :],
        }
        for row in rows
    ]
    tokenizer = AutoTokenizer.from_pretrained("llama")
    theirs = RewardTrainer(model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    loss = theirs.compute_loss(theirs.model.train(), theirs.data_collator(pairs))
    loss.backward()
    assert (total / count).item() == pytest.approx(loss.item(), rel=1e-5)
    own = {name: each.grad for name, each in trainer.model.named_parameters() if each.grad is not None}
    for name, each in theirs.model.named_parameters():
        if each.grad is not None:
            assert (own[name] - each.grad).norm() <= 1e-4 * each.grad.norm() + 1e-7, name


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_the_loss_of_classes_is_the_cross_entropy_of_each_row(model: str) -> None:
    session = set_up(*CLASSES, f"model.path={model}")
    trainer, rows = session.trainer, session.prepared.train
    total, count, _ = trainer.score(trainer.model.eval(), first_batch(session, 6))
    assert session.prepared.classes == ["animal", "colour", "number"]
    wanted = -sum(alone(session, row["input_ids"]).log_softmax(-1)[row["labels"][0]] for row in rows.select(range(6)))
    assert count == 6 and total.item() == pytest.approx(float(wanted), rel=1e-5)


def test_the_loss_of_words_is_the_cross_entropy_of_their_first_tokens() -> None:
    session = set_up(*WORDS)
    trainer, rows = session.trainer, session.prepared.train
    total, count, _ = trainer.score(trainer.model.eval(), first_batch(session, 5))
    wanted, words = 0.0, 0
    for row in rows.select(range(5)):
        scores = alone(session, row["input_ids"]).log_softmax(-1)
        for place, label in enumerate(row["labels"]):
            if label != -100:
                wanted, words = wanted - scores[place, label], words + 1
    assert count == words > 5 and total.item() == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", ["full", "lora"])
def test_a_saved_reward_model_gives_the_rewards_it_was_evaluated_with(way: str, side: str) -> None:
    """By Transformers alone, with rows of different lengths in one batch, padded on either side."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    method = LORA if way == "lora" else ["method=full"]
    run = Path("runs") / f"saved-{way}"
    if not run.exists():
        trained(run.name, *method)
    tokenizer = AutoTokenizer.from_pretrained(run / "final", padding_side=side)
    head = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id, "dtype": torch.float32}
    if way == "lora":
        base = AutoModelForSequenceClassification.from_pretrained("llama", **head)
        model: Any = PeftModel.from_pretrained(base, run / "final")
    else:
        model = AutoModelForSequenceClassification.from_pretrained(run / "final", dtype=torch.float32)
        assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    prepared = set_up(*method).prepared.eval
    texts = []
    for row in prepared:
        first = row["seq_lengths"][0]
        texts += [row["input_ids"][:first], row["input_ids"][first:]]
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt", padding_side=side)
    with torch.no_grad():
        rewards = model.eval()(**batch).logits.double().view(-1, 2)
    last = [row for row in metrics(run) if "eval_loss" in row][-1]
    won = (rewards[:, 0] > rewards[:, 1]).double().mean().item()
    assert last["eval_accuracy"] == pytest.approx(won, abs=1e-9) and last["eval_pairs"] == len(prepared)
    loss = -torch.nn.functional.logsigmoid(rewards[:, 0] - rewards[:, 1]).mean().item()
    # Published weights are rounded to what the model computes in, which is fp32 here.
    assert last["eval_loss"] == pytest.approx(loss, rel=1e-4)
    assert last["eval_reward_mean"] == pytest.approx(rewards.mean().item(), abs=1e-5)
    assert last["eval_reward_std"] == pytest.approx(rewards.std(correction=0).item(), rel=1e-3)


def test_a_trained_adapter_with_its_head_merges_into_an_equal_model() -> None:
    from transformers import AutoModelForSequenceClassification

    run = trained("merged", *CLASSES, *LORA)
    said = merge([run], run / "merged")
    assert "logits equal" in said
    model = AutoModelForSequenceClassification.from_pretrained(run / "merged", dtype=torch.float32).eval()
    assert model.config.id2label == {0: "animal", 1: "colour", 2: "number"}
    _, adapted, tokenizer = load_trained(run)
    batch = tokenizer(["seven is a text", "red"], return_tensors="pt", padding=True)
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, adapted(**batch).logits, atol=1e-4)


def test_a_merge_is_proved_by_all_classes_of_a_short_text() -> None:
    training = set_up(*CLASSES, "model.attention=sdpa", "output.name=short")
    blockwise: Any = SimpleNamespace(model=training.trainer.model.eval(), place=torch.device("cpu"))
    compared = _Probe([{"input_ids": [5, 6]}, {"input_ids": [7]}], 0).logits(blockwise)
    assert [tuple(each.shape) for each in compared] == [(3,), (3,)]


@pytest.mark.parametrize(
    "cuts",
    [
        ((1, []), (2, ["model.attention=eager"]), (4, [])),
        pytest.param(tuple(itertools.product((1, 2, 4), ([], ["model.attention=eager"]))), marks=pytest.mark.matrix),
    ],
    ids=["each once", "all"],
)
@pytest.mark.parametrize(
    "rows", [[], CLASSES, [*WORDS, "model.path=still"]], ids=["reward", "classification", "token_classification"]
)
def test_training_does_not_depend_on_how_rows_fall_into_micro_batches(rows: list[str], cuts: Any) -> None:
    curves, figures = [], []
    for size, more in cuts:
        name = f"cut-{len(cuts)}-{len(rows) and rows[0].partition('=')[2]}-{size}-{len(curves)}"
        assert main(["recipe=small", *rows, f"batch.micro_batch_size={size}", f"output.name={name}", *more]) == 0
        curves.append(losses(Path("runs") / name))
        measured = [row for row in metrics(Path("runs") / name) if "eval_loss" in row]
        figures.append([row[key] for row in measured for key in ("eval_loss", "eval_entity_f1") if key in row])
    for curve, held_out in zip(curves[1:], figures[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-6) and held_out == pytest.approx(figures[0], rel=1e-6)


def test_no_evaluation_keeps_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the last one, behind the saved model, whose config has caches on for those who generate."""
    asked: list[bool] = []
    forward = LlamaModel.forward

    def seen(model: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(model, *args, **kwargs)
        asked.append(found.past_key_values is not None)
        return found

    monkeypatch.setattr(LlamaModel, "forward", seen)
    run = trained("no-cache", *CLASSES, "max_steps=2")
    assert asked and not any(asked)
    assert json.loads((run / "final/config.json").read_text(encoding="utf-8"))["use_cache"] is True


@pytest.mark.parametrize("rows", [[], CLASSES, WORDS], ids=["reward", "classification", "token_classification"])
def test_a_run_learns_and_says_how_well(rows: list[str]) -> None:
    name = f"learns-{len(rows) and rows[0].partition('=')[2]}"
    run = trained(name, *rows, "max_steps=60", "evaluation.every_steps=30", "learning_rate=3e-3")
    first, *_, last = [row for row in metrics(run) if "eval_loss" in row]
    assert last["eval_loss"] < first["eval_loss"] and "eval_perplexity" not in last
    steps = [row for row in metrics(run) if "loss" in row]
    assert all(0 <= row["accuracy"] <= 1 for row in steps)
    page, card = ((run / file).read_text(encoding="utf-8") for file in ("report.html", "final/README.md"))
    assert "erplexity" not in page and "toolkit chat" not in page
    if not rows:
        assert last["eval_accuracy"] > 0.6 and {"reward_margin", "reward_mean", "reward_std"} <= steps[0].keys()
        assert "Answers preferred rightly" in page and "pipeline_tag: text-classification" in card
        return
    assert last["eval_accuracy"] > 0.9 and last["eval_macro_f1"] > 0.8
    table = last["eval_confusion"]
    assert sum(map(sum, table)) == last["eval_labels"]
    assert sum(row[n] for n, row in enumerate(table)) / last["eval_labels"] == pytest.approx(last["eval_accuracy"])
    assert "Classes told rightly" in page and "were taken for" in page
    names = read_run(run).audit.classes  # type: ignore[union-attr]
    assert [*last["eval_classes"]] == names and all(f"<th>{each}</th>" in page for each in names)
    task = "token-classification" if rows == WORDS else "text-classification"
    assert f"pipeline_tag: {task}" in card and f"AutoModelFor{'Token' if rows == WORDS else 'Sequence'}" in card
    assert ("eval_entity_f1" in last) == (rows == WORDS)
    if rows == WORDS:
        assert last["eval_entity_f1"] > 0.8 and {*last["eval_entities"]} == {"PER", "LOC"} and "F1 of entities" in page


@pytest.mark.parametrize("rows", [CLASSES, WORDS], ids=["classification", "token_classification"])
def test_of_many_classes_all_is_said_but_what_they_were_taken_for(
    rows: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000 that would be 800 MB in each batch, and a line as long for each evaluation."""
    few = [row for row in metrics(trained(f"few-{rows[0]}", *rows)) if "eval_loss" in row or "loss" in row]
    monkeypatch.setattr(heads, "MOST_CONFUSED", 1)
    many = [row for row in metrics(trained(f"many-{rows[0]}", *rows)) if "eval_loss" in row or "loss" in row]
    for one, other in zip(few, many, strict=True):
        assert ("eval_confusion" in one) == ("eval_loss" in one) and "eval_confusion" not in other
        said = [key for key in one if key.startswith(("accuracy", "eval_")) and key != "eval_confusion"]
        assert said and {key: one[key] for key in said} == {key: other[key] for key in said}


def test_what_classes_were_taken_for_is_counted_of_held_out_rows_alone() -> None:
    """It is told nowhere else, and of 128 classes there are 16,384 numbers in each step's metrics."""
    training = set_up(*CLASSES, "model.path=bert", "output.name=counted")
    trainer, size = training.trainer, len(training.prepared.classes)
    batch = trainer.data_collator([training.prepared.train[row] for row in range(4)])
    numbers = [len(trainer.measure(trainer.model.train(on), batch).sums) for on in (True, False)]
    assert numbers == [2 + 3 * size, 2 + 3 * size + size**2]


@pytest.mark.parametrize("method", [["method=full"], LORA], ids=["full", "lora"])
def test_a_run_that_goes_on_takes_the_steps_of_one_that_was_not_stopped(method: list[str]) -> None:
    saving = [*CLASSES, *method, "checkpoint.save_steps=2", "checkpoint.rehearse=false"]
    run = trained(f"straight-{len(method)}", *saving)
    wanted, table = losses(run), [row for row in metrics(run) if "eval_loss" in row][-1]["eval_confusion"]
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")
    trained(run.name, *saving)
    assert losses(run) == pytest.approx(wanted, rel=1e-6)
    assert [row for row in metrics(run) if "eval_loss" in row][-1]["eval_confusion"] == table


@pytest.mark.parametrize("method", [["method=full"], LORA], ids=["full", "lora"])
def test_what_is_missing_after_the_saved_model_is_completed(method: list[str]) -> None:
    run = trained(f"completed-{len(method)}", *CLASSES, *method)
    last = [row for row in metrics(run) if "eval_loss" in row][-1]
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted"}))
    rows = [row for row in metrics(run) if not (row["step"] == 4 and "eval_loss" in row)]
    write_jsonl(run / "metrics.jsonl", rows)
    trained(run.name, *CLASSES, *method)
    again = [row for row in metrics(run) if "eval_loss" in row][-1]
    assert again["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)
    assert again["eval_confusion"] == last["eval_confusion"]


def test_the_best_model_is_the_one_with_the_highest_f1() -> None:
    run = trained("best", *CLASSES, "evaluation.every_steps=1", "checkpoint.keep_best=eval_macro_f1")
    rows = [row for row in metrics(run) if "eval_loss" in row and row["step"]]
    best = max(row["eval_macro_f1"] for row in rows)
    published = read_run(run)
    assert published.result and published.result["eval_macro_f1"] == best and published.manifest.published


def test_the_best_model_by_entities_is_refused_where_tags_name_none(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"tokens": ["it", "rains", f"{n}"], "pos_tags": ["PRON", "VERB", "NUM"]} for n in range(20)]
    write_jsonl(Path("parts.jsonl"), rows)
    best = ["evaluation.every_steps=1", "checkpoint.keep_best=eval_entity_f1", "output.name=parts"]
    assert main(["recipe=small", *WORDS, "data.sources=[parts.jsonl]", *best]) != 0
    assert "the classes are NUM, PRON, VERB" in " ".join(capsys.readouterr().err.split())


def test_a_model_without_a_vocabulary_says_nothing() -> None:
    run = Path("runs/mute")
    trained(run.name)
    for ask in (
        lambda: answer_prompts(run, ["Hello"], 4, None, 0),
        lambda: chat([run], None, 4, None, 0),
        lambda: evaluate(run, Questions()),
    ):
        with pytest.raises(UserError, match=r"objective reward: its model says no words(.|\n)*pipeline\(\"text-class"):
            ask()
    assert opened(run).config.num_labels == 1


def test_training_goes_on_from_a_trained_head_and_begins_one_anew_for_other_labels(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = trained("head", *CLASSES)
    logging.getLogger("toolkit").addHandler(caplog.handler)
    saved = load_file(run / "final" / "model.safetensors")["score.weight"]
    again = set_up(*CLASSES, f"model.path={run / 'final'}")
    assert torch.equal(again.trainer.model.score.weight.detach(), saved)
    assert "begins anew" not in caplog.text
    rows = [row | {"label": row["label"].upper()} for row in labelled_rows(40)]
    write_jsonl(Path("upper.jsonl"), rows)
    other = set_up(*CLASSES, "data.sources=[upper.jsonl]", f"model.path={run / 'final'}")
    assert not torch.equal(other.trainer.model.score.weight.detach(), saved)
    assert "animal, colour, number" in caplog.text and "begins anew for ANIMAL" in caplog.text


def test_a_head_goes_on_for_labels_whose_order_is_not_that_of_the_alphabet() -> None:
    rows = [row | {"label": number % 12} for number, row in enumerate(labelled_rows(60))]
    write_jsonl(Path("numbers.jsonl"), rows)
    numbers = [*CLASSES, "data.sources=[numbers.jsonl]"]
    run = trained("numbers", *numbers)
    saved = load_file(run / "final" / "model.safetensors")["score.weight"]
    again = set_up(*numbers, f"model.path={run / 'final'}")
    assert again.trainer.model.config.id2label[2] == "2"
    assert torch.equal(again.trainer.model.score.weight.detach(), saved)


@pytest.mark.parametrize(("model", "layer"), [("llama", "score"), ("bert", "classifier")])
def test_outputs_of_a_published_head_are_those_of_their_labels(model: str, layer: str) -> None:
    from transformers import AutoModelForSequenceClassification

    order = ["number", "animal", "colour"]
    names = {"id2label": dict(enumerate(order)), "label2id": {name: n for n, name in enumerate(order)}}
    published = AutoModelForSequenceClassification.from_pretrained(model, **names)
    saved = {key: tensor.clone() for key, tensor in published.get_submodule(layer).state_dict().items()}
    shutil.copytree(model, f"published-{model}")
    published.save_pretrained(f"published-{model}")
    head = set_up(*CLASSES, f"model.path=published-{model}").trainer.model
    assert [*head.config.label2id] == ["animal", "colour", "number"]
    for key, tensor in head.get_submodule(layer).state_dict().items():
        assert torch.equal(tensor, saved[key][[1, 2, 0]])


def test_how_a_head_begins_is_not_said_where_the_trained_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("modernbert").exists():
        tiny_encoder("modernbert", Path("modernbert"))
    anew = [*CLASSES, "model.path=modernbert", "method.name=lora"]
    run = trained("following", *anew)
    logging.getLogger("toolkit").addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "toolkit")
    set_up(*anew)
    # The files of a model of masked words have its first layer, but not the one for labels.
    assert "tensors of the head are not in the model's files" in caplog.text
    caplog.clear()
    load_trained(run)
    merge([run], Path("followed"))
    assert "of the head are not" not in caplog.text
    with pytest.raises(UserError, match=f"once `toolkit merge {run}` has merged it, by\n"):
        evaluate(run, Questions())


@pytest.mark.parametrize(
    ("kind", "alike"), [("fnet", False), ("convbert", False), ("deberta-v2", True), ("bert", True)]
)
def test_what_padding_does_to_scores_is_found_whatever_the_first_rows_are(kind: str, alike: bool) -> None:
    """Of rows that are as long, too. FNet mixes all tokens and knows no mask, ConvBERT neighbours before it looks at
    it, and DeBERTa has no code for `sdpa`."""
    if not Path(kind).exists():
        tiny_encoder(kind, Path(kind))
    rows = [{"text": f"word {number}", "label": "ab"[number % 2]} for number in range(10, 30)]
    write_jsonl(Path("alike.jsonl"), rows)
    session = set_up(*CLASSES, "data.sources=[alike.jsonl]", f"model.path={kind}")
    with torch.no_grad():  # As drawn, weights mix little.
        for parameter in session.trainer.model.parameters():
            parameter.mul_(4)
    with contextlib.nullcontext() if alike else pytest.raises(UserError, match="scores rows otherwise beside longer"):
        check_padding(session)


def test_texts_that_see_each_other_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    session = set_up(*CLASSES)
    assert session.trainer.data_collator.layout == "flat"
    assert set_up(*CLASSES, "model.path=bert").trainer.data_collator.layout == "padded"
    check_padding(session)
    within = varlen.attended

    def across(package: str, query: Any, key: Any, value: Any, boundaries: Any, *others: Any) -> torch.Tensor:
        ends = boundaries[0][[0, -1]]
        return within(package, query, key, value, (ends, ends), *others)

    monkeypatch.setattr(varlen, "attended", across)
    with pytest.raises(UserError, match=r"end to end with others(.|\n)*set model.attention=sdpa"):
        check_padding(session)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
@pytest.mark.parametrize("rows", [CLASSES, WORDS], ids=["texts", "words"])
def test_encoders_train_their_heads_in_full_beside_adapters(kind: str, rows: list[str]) -> None:
    if not Path(kind).exists():
        tiny_encoder(kind, Path(kind))
    run = trained(f"{kind}-{rows[0]}".replace("=", "-"), *rows, *LORA, f"model.path={kind}")
    _, model, _ = load_trained(run)
    last = [row for row in metrics(run) if "eval_loss" in row][-1]
    session = set_up(*rows, *LORA, f"model.path={kind}")
    figures = [
        session.trainer.scored(model, session.trainer.data_collator([row]))[1].sums for row in session.prepared.eval
    ]
    total, count, *_ = torch.stack([each[:2] for each in figures]).sum(0).tolist()
    assert total / count == pytest.approx(last["eval_loss"], rel=1e-4)
