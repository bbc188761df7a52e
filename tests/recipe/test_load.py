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


def test_adapters_have_a_learning_rate_of_their_own_by_default() -> None:
    full, adapter = (load("smollm2_135m_lora", ["~optimizer", f"method={method}"]) for method in ("full", "dora"))
    assert (full.recipe.optimizer.learning_rate, adapter.recipe.optimizer.learning_rate) == (2e-5, 2e-4)
    assert "learning_rate: 0.0002" in adapter.to_yaml() and "# default of adapters" in with_origins(adapter)
    given = load("smollm2_135m_lora", ["learning_rate=2e-5"])
    assert given.recipe.optimizer.learning_rate == 2e-5 and "default of adapters" not in with_origins(given)
