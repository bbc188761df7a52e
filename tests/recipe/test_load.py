"""Interpolations: values from the environment and from other keys."""

from __future__ import annotations

import pytest

from recipes import BASE, values, write
from toolkit.recipe import load
from toolkit.recipe.load import load_resolved
from toolkit.recipe.show import with_origins

pytestmark = pytest.mark.usefixtures("mine")


def test_environment_is_read_but_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "hidden-name")
    monkeypatch.setenv("MY_NUMBER", "12")
    write("env", BASE + "output: {dir: '${oc.env:MY_FOLDER}/x', name: '${oc.env:NOT_SET,plain}'}\n")
    loaded = load("env", ["seed=${oc.decode:${oc.env:MY_NUMBER}}", "data=['${oc.env:MY_FOLDER}.jsonl']"])
    assert values(loaded, "output.dir", "output.name", "seed") == ["hidden-name/x", "plain", 12]
    assert loaded.recipe.data.sources[0].path == "hidden-name.jsonl"
    assert "hidden-name" not in loaded.to_yaml() + with_origins(loaded)
    assert load_resolved(write("kept", loaded.to_yaml(), "runs")) == loaded.recipe
