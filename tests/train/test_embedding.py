"""Training of vectors: equal however a step is divided, saved for sentence-transformers, and measured."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import losses, metrics, write_jsonl, write_recipe
from small import set_up, trained
from tiny import pair_rows, tiny_encoder, tiny_model

from toolkit.train.finished.merge import merge
from toolkit.train.main import main
from toolkit.train.trainers.embedding import Drawn, EmbeddingTrainer

RECIPE = """
description: A small training of vectors
model: {path: llama}
data: {sources: [rows.jsonl], eval_split: 0.25}
objective: embedding
precision: fp32
optimizer: {learning_rate: 1.0e-3, eps: 1.0e-3}
schedule: {max_steps: 3}
batch: {seq_len: 64, global_batch_size: 8, micro_batch_size: 2}
"""
LORA = ["method=lora", "method.r=4"]
HARD = ["data.sources=[hard.jsonl]", "embedding.negatives=2"]
SCORED = ["data.sources=[scored.jsonl]", "embedding.loss=cosent"]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder with a tiny Llama and a tiny BERT, rows of three kinds and a recipe."""
    folder = tmp_path_factory.mktemp("embedding")
    tiny_model("meta-llama/Llama-3.2-1B", folder / "llama")
    tiny_encoder("bert", folder / "bert")
    pairs = [row | {"positive": f"{n} {row['positive']}"} for n, row in enumerate(pair_rows(40, "anchor", "positive"))]
    hard = [{**row, "negatives": [f"unlike {row['anchor']}", f"not {row['positive']}"]} for row in pairs]
    scored = [
        {"sentence1": row["anchor"], "sentence2": pairs[(n + n % 3) % 40]["positive"], "score": 1 - (n % 3) / 2}
        for n, row in enumerate(pairs)
    ]
    for name, rows in (("rows", pairs), ("hard", hard), ("scored", scored)):
        write_jsonl(folder / f"{name}.jsonl", rows)
    write_recipe(folder, "small", RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def sentence_model(folder: Path) -> Any:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})


@pytest.mark.parametrize(
    "rows", [[], HARD, SCORED, ["embedding.dims=[64,16]"]], ids=["pairs", "hard", "scored", "dims"]
)
def test_training_does_not_depend_on_how_rows_fall_into_micro_batches(rows: list[str]) -> None:
    curves, norms, figures = [], [], []
    for size, attention in ((1, "auto"), (4, "auto"), (4, "eager"), (8, "auto")):
        name = f"cut-{'-'.join(rows)[:30].replace('.', '-').replace('=', '-').replace('[', '')}-{size}-{attention}"
        more = [f"batch.micro_batch_size={size}", f"model.attention={attention}", f"output.name={name}"]
        assert main(["recipe=small", *rows, *more]) == 0
        curves.append(losses(Path("runs") / name))
        norms.append([row["grad_norm"] for row in metrics(Path("runs") / name) if "loss" in row])
        figures.append([row["eval_loss"] for row in metrics(Path("runs") / name) if "eval_loss" in row])
    for curve, norm, held_out in zip(curves[1:], norms[1:], figures[1:], strict=True):
        assert curve == pytest.approx(curves[0], rel=1e-6) and held_out == pytest.approx(figures[0], rel=1e-6)
        assert norm == pytest.approx(norms[0], rel=1e-5)


def test_a_step_has_the_gradient_of_one_pass_over_all_its_rows() -> None:
    """Of what the trainer sends through the model in several micro-batches, against autograd through all at once."""
    session = set_up(*HARD)
    trainer = session.trainer
    rows = [trainer.train_dataset[row] for row in range(6)]
    batches = [trainer.data_collator(rows[start : start + 2]) for start in (0, 2, 4)]
    trainer.model.train()
    with torch.no_grad():
        vectors = [trainer.logits(trainer.model, batch) for batch in batches]
    total = torch.zeros(())
    for batch, share in zip(batches, trainer._shares(vectors, batches), strict=True):
        part, count, _ = trainer.score(trainer.model, batch | {"share": share})
        part.backward()
        total, _ = total + part.detach(), count
    found = {name: each.grad.clone() for name, each in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    whole = trainer.logits(trainer.model, trainer.data_collator(rows)).view(6, 4, -1)
    candidates = torch.cat([whole[:, 1], whole[:, 2:].flatten(0, 1)])
    wanted = torch.nn.functional.cross_entropy(whole[:, 0] @ candidates.T / 0.05, torch.arange(6), reduction="sum")
    wanted.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, each in trainer.model.named_parameters():
        assert (found[name] - each.grad).norm() <= 1e-4 * each.grad.norm() + 1e-6, name


def test_the_second_pass_drops_out_what_the_first_did() -> None:
    tiny = Path("noisy")
    shutil.copytree("bert", tiny)
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.3}))
    trainer = set_up("model.path=noisy").trainer
    batch, model = trainer.data_collator([trainer.train_dataset[0]]), trainer.model.train()
    state = Drawn.now()
    first = trainer.logits(model, batch)
    after = torch.get_rng_state()
    with state.again():
        again = trainer.logits(model, batch)
    assert torch.equal(first, again) and torch.equal(after, torch.get_rng_state())
    assert not torch.equal(first, trainer.logits(model, batch))


def test_vectors_of_a_step_are_those_of_the_weights_that_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedule-free optimizers evaluate other weights."""
    modes, seen = ["train"], []
    monkeypatch.setattr(torch.optim.AdamW, "train", lambda self: modes.append("train"), raising=False)
    monkeypatch.setattr(torch.optim.AdamW, "eval", lambda self: modes.append("eval"), raising=False)
    logits = EmbeddingTrainer.logits

    def noted(trainer: Any, model: Any, inputs: Any) -> torch.Tensor:
        seen.append((model.training, modes[-1]))
        return logits(trainer, model, inputs)

    monkeypatch.setattr(EmbeddingTrainer, "logits", noted)
    assert main(["recipe=small", "evaluation.every_steps=1", "output.name=modes"]) == 0
    # Three steps of four micro-batches, each of which passes twice.
    assert [mode for training, mode in seen if training] == ["train"] * (3 * 4 * 2)
    assert (False, "eval") in seen


@pytest.mark.parametrize(
    ("model", "more", "pooling"),
    [
        ("llama", [], "lasttoken"),
        ("bert", [], "mean"),
        ("bert", ["embedding.pooling=cls"], "cls"),
        ("llama", LORA, "lasttoken"),
    ],
)
def test_sentence_transformers_makes_the_vectors_of_what_is_saved(model: str, more: list[str], pooling: str) -> None:
    name = f"saved-{model}-{pooling}-{len(more)}"
    prompts = ["embedding.query_prompt='query: '", "embedding.document_prompt='text: '"]
    run = trained(name, *more, *prompts, f"model.path={model}")
    theirs = sentence_model(run / "final")
    assert theirs.max_seq_length == 64 and theirs[1].get_config_dict()["pooling_mode"] == pooling
    assert f"pooling {pooling.removesuffix('token')}" in (run / "final" / "README.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    held = set_up(*more, *prompts, f"model.path={model}").prepared.eval
    texts = {(" ".join(map(str, row["keys"]))) for row in held}
    assert len(texts) == len(held) == 10
    queries = theirs.encode_query([row["anchor"] for row in rows], convert_to_tensor=True).double()
    documents = theirs.encode_document([row["positive"] for row in rows], convert_to_tensor=True).double()
    assert torch.allclose(queries.norm(dim=-1), torch.ones(40, dtype=torch.float64), atol=1e-6)
    # The held-out rows are those whose anchors have these tokens.
    wanted = {tuple(row["input_ids"][: row["seq_lengths"][0]]) for row in held}
    at = [n for n, row in enumerate(rows) if tuple(theirs.tokenizer("query: " + row["anchor"])["input_ids"]) in wanted]
    queries, documents = queries[at], documents[at]
    cosines = queries @ documents.T
    places = 1 + (cosines > cosines.diagonal()[:, None] + 1e-9).sum(1)
    last = [row for row in metrics(run) if "eval_loss" in row][-1]
    assert last["eval_rows"] == 10 and last["eval_candidates"] == len({rows[n]["positive"] for n in at})
    assert last["eval_recall_at_1"] == pytest.approx((places <= 1).double().mean().item(), abs=1e-9)
    assert last["eval_mrr_at_10"] == pytest.approx((1 / places.double()).where(places <= 10, 0).mean().item(), abs=1e-6)


def test_a_merged_adapter_is_a_sentence_transformer() -> None:
    run = trained("merged", *LORA)
    assert "logits equal" in merge([run], run / "merged")
    adapted, whole = sentence_model(run / "final"), sentence_model(run / "merged")
    texts = ["str.split?", "Return a list of the words."]
    one, other = (each.encode(texts, convert_to_tensor=True) for each in (adapted, whole))
    assert torch.allclose(one, other, atol=1e-5)


def test_a_run_learns_and_says_how_well() -> None:
    run = trained("learns", "max_steps=40", "evaluation.every_steps=20", "learning_rate=3e-3")
    first, *_, last = [row for row in metrics(run) if "eval_loss" in row]
    assert last["eval_loss"] < first["eval_loss"] and "eval_perplexity" not in last
    # Ten rows of a random model: how far recall rises is the demo's to show.
    assert 0 < last["eval_recall_at_1"] <= last["eval_mrr_at_10"] <= last["eval_recall_at_10"] == 1
    assert 0 < last["eval_mrr_at_10_plus_minus"] < 0.5
    page, card = ((run / file).read_text(encoding="utf-8") for file in ("report.html", "final/README.md"))
    assert "Recall@10" in page and "erplexity" not in page and "toolkit chat" not in page
    assert "pipeline_tag: sentence-similarity" in card and "SentenceTransformer" in card and "recall@1" in card
    scored = trained("scored", *SCORED, "max_steps=40", "learning_rate=3e-3")
    first, *_, last = [row for row in metrics(scored) if "eval_loss" in row]
    assert last["eval_spearman"] > first["eval_spearman"] and 0 < last["eval_spearman_plus_minus"] < 1
    assert "Spearman correlation" in (scored / "report.html").read_text(encoding="utf-8")


def test_correlations_are_scipys() -> None:
    stats = pytest.importorskip("scipy.stats")
    from toolkit.train.trainers.retrieval import correlation_figures

    vectors = torch.nn.functional.normalize(torch.randn(30, 2, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    scores = torch.arange(30).double() // 4
    cosines = (vectors[:, 0] * vectors[:, 1]).sum(-1)
    found = correlation_figures(vectors, scores)
    assert found["eval_spearman"] == pytest.approx(stats.spearmanr(cosines, scores).statistic, abs=1e-6)
    theirs = stats.pearsonr(cosines, scores)
    assert found["eval_pearson"] == pytest.approx(theirs.statistic, abs=1e-6)
    low, high = theirs.confidence_interval(0.95)
    longer = max(high - theirs.statistic, theirs.statistic - low)
    assert found["eval_pearson_plus_minus"] == pytest.approx(longer, rel=1e-4)


def test_intervals_of_few_rows() -> None:
    """A mean's is Student's; a correlation's holds the truth at least as often as it says. Of too few there is none."""
    from toolkit.train.trainers.retrieval import correlation_figures, retrieval_figures

    vectors = torch.eye(8).expand(2, 8, 8).transpose(0, 1).clone()
    vectors[0, 0] = 0.8 * vectors[1, 1] + 0.6 * vectors[0, 1]  # Another row's positive is nearer.
    keys = torch.stack([torch.arange(8), torch.arange(8) + 8], dim=1)
    found = retrieval_figures(vectors, keys)
    nearness = torch.tensor([0.5] + [1.0] * 7)
    # The quantile of seven degrees of freedom, from a table.
    half = 2.36462 * nearness.std().item() / 8**0.5
    assert found["eval_mrr_at_10"] == pytest.approx(nearness.mean().item())
    assert found["eval_mrr_at_10_plus_minus"] == pytest.approx(half, rel=1e-4)
    assert "eval_mrr_at_10_plus_minus" not in retrieval_figures(vectors[:1], keys[:1])

    generator, times, rows = torch.Generator().manual_seed(0), 2000, 8
    held = {"pearson": 0, "spearman": 0}
    truth = {"pearson": 0.6, "spearman": 6 / math.pi * math.asin(0.3)}
    for _ in range(times):
        one, noise = torch.randn(2, rows, generator=generator, dtype=torch.float64)
        pairs = torch.stack([one, torch.ones(rows, dtype=torch.float64)], dim=1)[:, :, None]
        figures = correlation_figures(pairs, 0.6 * one + 0.8 * noise)
        for name in held:
            held[name] += abs(figures[f"eval_{name}"] - truth[name]) <= figures[f"eval_{name}_plus_minus"]
    assert all(0.95 < count / times < 0.99 for count in held.values()), held
    few = correlation_figures(vectors[:3], torch.arange(3.0))
    assert set(few) == {"eval_spearman", "eval_pearson"}


@pytest.mark.parametrize(
    "method", [["method=full"], LORA, [*LORA, "method.lora_dropout=0.3"]], ids=["full", "lora", "dropout"]
)
def test_a_run_that_goes_on_takes_the_steps_of_one_that_was_not_stopped(method: list[str]) -> None:
    saving = [*method, "schedule.max_steps=4", "checkpoint.save_steps=2", "checkpoint.rehearse=false"]
    run = trained(f"straight-{len(method)}", *saving)
    wanted = losses(run)
    _interrupt(run)
    trained(run.name, *saving)
    assert losses(run) == pytest.approx(wanted, rel=1e-6)


def _interrupt(run: Path) -> None:
    """As if it had ended after its second step of four."""
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"status": "interrupted", "final": None}))
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "checkpoint-4")


def test_only_runs_that_begin_are_refused_for_what_their_base_does_beyond_pooling(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Runs from before it was looked at are continued and merged, and what is merged is not warned of again."""
    shutil.copytree("bert", "base")
    begun = [*LORA, "model.path=base", "checkpoint.save_steps=2", "checkpoint.rehearse=false"]
    run = trained("begun", *begun)
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Dense")]
    Path("base/modules.json").write_text(json.dumps(modules))
    Path("base/config_sentence_transformers.json").write_text('{"prompts": {"query": "find: "}}')
    _interrupt(run)
    trained("begun", *begun)
    assert "logits equal" in merge([run], run / "merged")
    assert "find: " not in caplog.text + capsys.readouterr().err
    assert main(["recipe=small", "output.name=anew", *begun, "data.sources=[nowhere.jsonl]"]) == 1
    assert "has Dense, which is neither read nor trained" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
def test_other_encoders_train(kind: str) -> None:
    tiny_encoder(kind, Path(kind))
    run = trained(kind, f"model.path={kind}", "schedule.max_steps=2")
    assert sentence_model(run / "final").encode(["Return a list."]).shape == (1, 64)
