"""Whatever happens to a checkpoint's files, it is either whole, byte for byte, or nothing of it is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.seal import build_sealed, fault, read_seal, seal

VALUES = {"step": 3, "method": "full", "strategy": "zero2", "world_size": 2}
FILES = ["model.safetensors", "rng_state_0.pth", "global_step3/optim_states.pt", "trainer_state.json"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-3"
    draw = random.Random(0)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw.randbytes(5000))
    seal(folder, VALUES)
    return folder


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_whole_checkpoint_has_no_fault_and_says_who_wrote_it(saved: Path) -> None:
    assert fault(saved) == ""
    assert {**read_seal(saved), "files": None} == {**VALUES, "files": None}
    assert list(read_seal(saved)["files"]) == sorted(FILES)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged: {} differs from what was saved"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"0"), "is damaged: {} differs from what was saved"),
    "zeros": (lambda file: file.write_bytes(bytes(5000)), "is damaged: {} differs from what was saved"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged: {} differs from what was saved"),
    "missing": (Path.unlink, "is damaged: it lacks {}"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "is damaged: it lacks {}"),
    "a dead link": (lambda file: (file.unlink(), file.symlink_to("nowhere")), "cannot be read: "),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_every_file_is_named(saved: Path, name: str, damage: str) -> None:
    do, said = DAMAGES[damage]
    do(saved / name)
    assert fault(saved).startswith(said.format(name))


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    """Of files and of the record itself; none of them changes what is read from it."""
    whole = read_seal(saved)
    draw = random.Random(1)
    for name in (*FILES, "seal.json"):
        for _ in range(50):
            bit = draw.randrange(8 * (saved / name).stat().st_size)
            flip(saved / name, bit)
            assert fault(saved) or (name == "seal.json" and read_seal(saved) == whole)
            flip(saved / name, bit)
    assert fault(saved) == ""


def test_what_was_added_is_not_read_either(saved: Path) -> None:
    (saved / "global_step3" / "mp_rank_07_model_states.pt").write_bytes(b"more")
    assert fault(saved) == "holds what was not saved with it: global_step3/mp_rank_07_model_states.pt"


def test_of_many_files_some_are_named(saved: Path) -> None:
    for number in range(5):
        (saved / f"more{number}").touch()
    assert fault(saved) == "holds what was not saved with it: more0, more1, more2 and 2 more"


def test_a_record_that_is_not_as_it_was_written(saved: Path) -> None:
    record = saved / "seal.json"
    changed = {**json.loads(record.read_text()), "step": 4}
    for text in ("", "{", "[]", "null", "3", "{}", '{"sha256": 5}', json.dumps(changed)):
        record.write_text(text)
        assert read_seal(saved) == {}
        assert fault(saved) == "is damaged: seal.json is not as it was written"
    record.write_bytes(b"\xff\xfe")
    assert read_seal(saved) == {}
    record.unlink()
    assert fault(saved) == "was cut off while saving"
    record.mkdir()
    assert read_seal(saved) == {} and fault(saved).startswith("cannot be read: is no file")


def test_a_folder_is_built_once_and_again_when_it_is_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built: list[Path] = []

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "rows").write_text("rows")

    place = tmp_path / "made"
    for _ in range(2):
        assert build_sealed(place, build) == place
    assert len(built) == 1 and not caplog.text
    (place / "rows").write_text("crow")
    build_sealed(place, build)
    assert len(built) == 2 and (place / "rows").read_text() == "rows"
    assert f"{place} is damaged: rows differs from what was saved, and is made again" in caplog.text


def test_a_record_by_its_former_name_is_read(saved: Path) -> None:
    """As in run folders of before."""
    former = (saved / "seal.json").rename(saved / "checkpoint.json")
    assert fault(saved) == "" and read_seal(saved)["step"] == 3
    former.write_text("{}")
    assert fault(saved) == "is damaged: checkpoint.json is not as it was written"
    former.unlink()
    assert fault(saved) == "was cut off while saving"
