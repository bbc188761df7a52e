"""The run folder: whose it is, whether the disk will hold it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from harness import write_recipe
from small import populate, set_up

from toolkit.common import UserError, in_background
from toolkit.recipe import Loaded, load
from toolkit.train import setup
from toolkit.train.run_folder import claim, hash_files, recipe_hash


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `small`."""
    write_recipe(tmp_path, "small", "model: {path: nowhere}\ndata: {sources: [a.jsonl]}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(*overrides: str) -> Loaded:
    return load("small", list(overrides))


def test_identity_is_what_moves_the_weights() -> None:
    same = ["logging.every_steps=5", "output.dir=elsewhere", "evaluation.num_prompts=0", "checkpoint.save_steps=3"]
    same += ["batch.micro_batch_size=2", "activation_checkpointing.mode=full"]
    assert recipe_hash(small(*same).recipe) == recipe_hash(small().recipe)
    same = ["extra.deepspeed.dump_state=true"]
    assert recipe_hash(small(*same).recipe) == recipe_hash(small().recipe)
    for other in ("extra.lora.bias=all", "extra.training_arguments.neftune_noise_alpha=5"):
        assert recipe_hash(small(other).recipe) != recipe_hash(small().recipe)
    for other in ("seed=1", "batch.seq_len=100", "data.sources=[b.jsonl]", "optimizer.beta2=0.95", "precision=fp32"):
        assert recipe_hash(small(other).recipe) != recipe_hash(small().recipe)


def test_attempt_without_results_can_be_repeated_with_another_recipe(place: Path) -> None:
    claim(small(), 1).update_manifest(hashes={"recipe": recipe_hash(small().recipe)}, status="failed")
    assert claim(small("seed=1"), 1).path == Path("runs/small")


def test_foreign_folder_is_refused(place: Path) -> None:
    (place / "runs" / "small").mkdir(parents=True)
    (place / "runs" / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"output\.name"):
        claim(small(), 1)
    assert [file.name for file in (place / "runs" / "small").iterdir()] == ["thesis.tex"]


def test_file_in_place_of_the_folder_is_refused(place: Path) -> None:
    (place / "runs").mkdir()
    (place / "runs" / "small").write_text("a file")
    with pytest.raises(UserError, match="is a file"):
        claim(small(), 1)
    assert claim(small("checkpoint.resume=never"), 1).path == Path("runs/small-2")


def test_hash_follows_content_and_trusts_a_hub_blobs_name(place: Path) -> None:
    one, two = place / "a.safetensors", place / "b.safetensors"
    one.write_bytes(b"weights")
    two.write_bytes(b"other weights")
    before = hash_files([one, two])
    assert hash_files([two, one]) == before
    one.write_bytes(b"Weights")
    assert hash_files([one, two]) != before
    blob = place / ("ab" * 32)
    blob.write_bytes(b"never read")
    (place / "c.safetensors").symlink_to(blob)
    named = hash_files([place / "c.safetensors"])
    blob.write_bytes(b"still not read")
    assert hash_files([place / "c.safetensors"]) == named


def test_two_threads_write_the_manifest_together(place: Path) -> None:
    folder = claim(small(), 1)
    writing = [in_background(lambda n=n: folder.update_manifest(hashes={str(n): "x"})) for n in range(20)]
    folder.update_manifest(status="running")
    assert [each.result() for each in writing] == [None] * 20
    assert len(folder.manifest().hashes) == 20 and folder.manifest().status == "running"


def test_nobody_waits_until_the_model_is_hashed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    populate(place, "llama")
    hashing = threading.Event()

    def slowly(files: list[Path]) -> str:
        assert hashing.wait(60)
        return hash_files(files)

    monkeypatch.setattr(setup, "hash_files", slowly)
    session = set_up()
    assert "model" not in session.folder.manifest().hashes
    hashing.set()
    session.hashed.result()
    assert session.folder.manifest().hashes["model"] == hash_files(session.source.weight_files())
