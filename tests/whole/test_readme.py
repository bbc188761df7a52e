"""The README says what is there: its recipe is the demo's, its table lists the shipped recipes, its commands load."""

from __future__ import annotations

import re
import shlex

import pytest
from harness import ROOT

from toolkit.recipe import RecipeError, list_recipes, load, shipped_recipes, split_arguments
from toolkit.recipe.show import description

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_recipe_shown_is_the_demos() -> None:
    shown = re.search(r"```yaml\n# (recipes/\S+)\n(.*?)```", README, re.S)
    assert shown
    assert (ROOT / shown[1]).read_text(encoding="utf-8") == shown[2]


def test_table_lists_every_recipe() -> None:
    table = README.split("<!-- recipes -->\n")[1].split("<!-- /recipes -->")[0]
    rows = [f"| `{name}` | {description(file)} |" for name, file in list_recipes([shipped_recipes()]).items()]
    assert table == "\n".join(["| recipe | what it does |", "| --- | --- |", *rows]) + "\n"


def test_run_commands_load() -> None:
    commands = [line.partition("#")[0] for line in README.splitlines() if re.search(r"toolkit/run\.py recipe=", line)]
    assert len(commands) >= 4
    for command in commands:
        name, overrides = split_arguments(shlex.split(command.partition("run.py")[2]))
        load(name, overrides)


def test_error_shown_is_what_is_printed() -> None:
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", ["optimizer.learning_rat=5e-4", "batch.seq_len=long"])
    shown = README.split("```\nerror: ")[1].split("\n```")[0]
    assert sorted(str(caught.value).split("\n")) == sorted(shown.split("\n"))


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for target in re.findall(r"`(tests/\S+?\.py)`", text):
        assert (ROOT / target).exists(), target
