"""By which files the scores of rewards are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.common import UserError
from toolkit.data.reward_files import file_hashes
from toolkit.recipe.reinforcement import Rewards


def own(folder: Path, body: str = "def reward(): ...\n") -> Rewards:
    file = folder / "own.py"
    file.write_text(body, encoding="utf-8")
    return Rewards(file=str(file), trust_python=True)


def test_files_of_rewards_are_known_by_their_hashes(tmp_path: Path) -> None:
    before = file_hashes(own(tmp_path))
    assert before == file_hashes(own(tmp_path))
    assert before.keys() == {"rewards.file"} and before != file_hashes(own(tmp_path, "def reward(): 1\n"))
    schema = Rewards(json_schema={"schema_file": str(tmp_path / "own.py")})
    assert list(file_hashes(schema)) == ["rewards.json_schema.schema_file"] and file_hashes(Rewards()) == {}
    with pytest.raises(UserError, match="cannot be read"):
        file_hashes(Rewards(file=str(tmp_path / "none.py"), trust_python=True))


def test_modules_that_a_file_imports_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is run: one fails where it is imported, another imports the first."""
    here, place, installed = tmp_path / "here", tmp_path / "place", tmp_path / "site-packages"
    files = {
        "place/helper.py": "from pack.deep import parts\nimport helper, numpy, there\n1 / 0\n",
        "place/pack/__init__.py": "",
        "place/pack/deep/__init__.py": "from . import words\nfrom ..beside import one\nfrom ....... import far",
        "place/pack/deep/parts.py": "",
        "place/pack/deep/words.py": "",
        "place/pack/beside.py": "not Python\n",
        "place/pack/unread.py": "",
        "here/near.py": "",
        "site-packages/numpy.py": "",
        "elsewhere/there.py": "",
    }
    for name, body in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{tmp_path / 'elsewhere'}")
    rewards = own(place, "import os, toolkit, near\ndef reward():\n    import helper\n")
    before = file_hashes(rewards)
    assert before.keys() == {"rewards.file"} | {
        f"module {name}"
        for name in (
            *("helper.py", "near.py", "there.py", "pack/__init__.py", "pack/beside.py"),
            *("pack/deep/__init__.py", "pack/deep/parts.py", "pack/deep/words.py"),
        )
    }
    (place / "pack" / "deep" / "words.py").write_text("another = 1\n", encoding="utf-8")
    after = file_hashes(rewards)
    assert [key for key in before if before[key] != after[key]] == ["module pack/deep/words.py"]
