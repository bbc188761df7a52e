"""Which folders recipes are read from, and that nothing else is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from recipes import BASE, values, write
from toolkit.common import UserError, in_background
from toolkit.recipe import RecipeError, list_recipes, load, recipe_folders, shipped_recipes
from toolkit.recipe.files import locate, options, read, search_order, short
from toolkit.recipe.rules import load_checked
from toolkit.recipe.show import description

pytestmark = pytest.mark.usefixtures("mine")


def test_own_file_takes_the_place_of_a_shipped_one() -> None:
    write("method/lora", "name: lora\nr: 64\n")
    write("smollm2_135m_full", BASE + "description: mine now\n")
    assert load("smollm2_135m_lora_demo").recipe.method.r == 64
    assert load("smollm2_135m_full").recipe.description == "mine now"
    assert list_recipes(recipe_folders())["smollm2_135m_full"] == Path("recipes/smollm2_135m_full.yaml").resolve()


def test_recipe_in_a_sub_folder_extends_its_neighbours_its_folder_and_shipped_ones() -> None:
    write("team/first", "defaults: [mine]\nseed: 1\n")
    write("team/second", "defaults: [first]\nbatch: {seq_len: 64}\n")
    write("team/third", "defaults: [smollm2_135m_lora_demo]\n")
    assert values(load("team/second"), "seed", "batch.seq_len") == [1, 64]
    assert load("team/third").recipe.method.name == "lora"
    assert load("recipes/team/second.yaml").name == "team/second"
    assert {"mine", "team/first", "team/third"} <= set(list_recipes(recipe_folders()))


def test_folder_of_another_name(tmp_path: Path) -> None:
    write("other", BASE + "seed: 9\n", "elsewhere's [1]")
    assert load("other", folder="elsewhere's [1]").recipe.seed == 9
    assert load("other", ["method=qlora"], folder=tmp_path / "elsewhere's [1]").recipe.method.quantization == "nf4"
    with pytest.raises(RecipeError, match="no such recipe"):
        load("other")


def test_a_file_of_the_other_extension_is_named() -> None:
    write("team/first", BASE).rename("recipes/team/first.yml")
    with pytest.raises(RecipeError, match=r"recipe files end in \.yaml") as error:
        load("team/first")
    assert error.value.problems[0].hint == "rename recipes/team/first.yml to first.yaml"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside", "not a recipe name"),
        ("team/../../outside", "not a recipe name"),
        ("/etc/passwd", "not a recipe name"),
        ("outside.yaml", "outside the recipe folders"),
        ("recipes/../outside.yaml", "outside the recipe folders"),
        ("recipes/link.yaml", "outside the recipe folders"),
        ("link", "outside the recipe folders"),
        ("extends_link", "outside the recipe folders"),
        ("group_link", "outside the recipe folders"),
        ("up", "cannot be extended"),
        ("absolute", "cannot be extended"),
        ("group_up", "is not the name of an option"),
        ("word_link", "outside the recipe folders"),
        ("option_up", "is not the name of an option"),
    ],
)
def test_nothing_outside_the_folders_is_read(name: str, words: str, mine: Path) -> None:
    outside = write("outside", BASE + "description: secret\n", ".")
    write("group", "path: secret\n", ".")
    Path("recipes/model").mkdir()
    Path("recipes/link.yaml").symlink_to(outside.resolve())
    Path("recipes/model/link.yaml").symlink_to(mine / "group.yaml")
    write("extends_link", "defaults: [link]\n")
    write("group_link", "defaults: [{model: link}, {data: alpaca}]\n")
    write("up", "defaults: [../outside]\n")
    write("absolute", f"defaults: [{mine}/outside]\n")
    write("word_link", "model: link\ndata: alpaca\n")
    write("option_up", "model: {option: ../../group}\ndata: alpaca\n")
    write("group_up", "defaults: [{model: ../../group}, {data: alpaca}]\n")
    with pytest.raises(RecipeError, match=words) as caught:
        load(name)
    assert "secret" not in str(caught.value)
    for problem in caught.value.problems:
        assert all(isinstance(part, str) for part in vars(problem).values()), problem
        assert not name.endswith(".yaml") or problem.hint.startswith("move the file into one of these folders")


def test_a_folder_that_is_none_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_folders("nowhere")
    (problem,) = caught.value.problems
    assert (problem.path, problem.given) == ("--recipes", "nowhere") and "toolkit init" in problem.hint


def test_linked_recipes_folder_is_fine(mine: Path) -> None:
    Path("recipes").rename("shared")
    Path("recipes").symlink_to(mine / "shared")
    assert load("mine").name == load("recipes/mine.yaml").name == "mine"


def test_a_file_is_named_as_one_would_type_it(mine: Path) -> None:
    shipped = shipped_recipes().resolve()
    assert short(mine / "recipes" / "mine.yaml") == "recipes/mine.yaml"
    assert short(shipped / "model" / "gpt2.yaml") == "shipped:model/gpt2.yaml"
    assert short(shipped) == str(shipped) and short(Path("/elsewhere/a.yaml")) == "/elsewhere/a.yaml"


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(kind: str) -> None:
    write("mine", BASE)
    place = Path("recipes/endless.yaml")
    os.mkfifo(place) if kind == "pipe" else place.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"is no file, but a folder, a pipe or a device|leads outside the recipe"):
        in_background(lambda: load_checked("endless")).result(timeout=30)


@pytest.mark.parametrize("name", ["endless", "recipes/endless.yaml"])
def test_a_link_that_leads_to_itself_is_refused(name: str) -> None:
    write("mine", BASE)
    Path("recipes/endless.yaml").symlink_to("endless.yaml")
    with pytest.raises(UserError, match=r"is a link to endless\.yaml, where no file is|there is no such file"):
        load_checked(name)


def test_parts_and_options_are_no_recipes() -> None:
    write("_part", BASE)
    write("team/_part", BASE)
    write("team/whole", BASE)
    write("team/method/mine", "name: lora\n")
    assert {name for name in list_recipes(recipe_folders()) if "team" in name} == {"team/whole"}
    assert "_part" not in list_recipes(recipe_folders())
    assert list(list_recipes(recipe_folders())) == sorted(list_recipes(recipe_folders()))
    assert options("method", [Path("recipes"), Path("recipes/team")]) == ["mine"]


def test_a_name_is_looked_up_beside_a_recipe_in_a_sub_folder_first(mine: Path) -> None:
    folders = recipe_folders()
    own, team = (write(name, BASE).resolve() for name in ("own", "team/own"))
    assert search_order(own, folders) == folders
    assert search_order(team, folders) == [team.parent, *folders]
    assert locate("own", search_order(team, folders)) == team and locate("nothing", folders) is None


def test_lines_are_those_of_keys_and_entries_whatever_is_merged() -> None:
    file = write("lines", "a: &a\n  b: 1\n  c: off\nd:\n  <<: [*a, {e: 2}]\n  c: 0x3\nf:\n- g\n- h: i\n")
    result = read(file)
    assert not result.problems and result.defaults == []
    assert {key: int(place.rpartition(":")[2]) for key, place in result.origins.items()} == {
        **{"a": 1, "a.b": 2, "a.c": 3, "d": 4, "d.b": 2, "d.c": 6, "d.e": 5},
        **{"f": 7, "f.0": 8, "f.1": 9, "f.1.h": 9},
    }
    assert (result.texts["a.c"], result.texts["d.c"], result.texts["f.0"]) == ("off", "0x3", "g")
    assert result.values["d"] == {"b": 1, "e": 2, "c": 3}


def _laughs(merged: bool) -> str:
    """Nine times nine times … the same, as lists or as merged mappings."""
    first, each = ("{k0: 1}", "{{<<: [{}]}}") if merged else ("[x]", "[{}]")
    steps = (f"a{n}: &a{n} {each.format(', '.join([f'*a{n - 1}'] * 9))}\n" for n in range(1, 9))
    return f"a0: &a0 {first}\n{''.join(steps)}"


CHAIN = "".join(f", a{n}: '{f'${{extra.lora.a{n - 1}}}' * 10}'" for n in range(1, 8))
HOSTILE = {
    "aliases": (_laughs(merged=False), "aliases written out"),
    "merged-aliases": (_laughs(merged=True), "aliases written out"),
    "keys": ("".join(f"key{n}: {n}\n" for n in range(150_000)), "larger than 256 KiB"),
    "many-keys": ("".join(f"key{n}: {n}\n" for n in range(4_000)), "and 230 more"),
    "entries": (f"data: {{sources: [{', '.join(f'{n}.txt' for n in range(12_000))}]}}\n", "10,000 are the most"),
    "nested": (f"x: {'[' * 5000}{']' * 5000}\n", "nested too deep"),
    "interpolations": (f"extra: {{lora: {{a0: x{CHAIN}}}}}\n", "more than 1 seconds"),
    "steering": ('"\\e[2J\\e]0;title\\a\\x9b": 1\n', r"\x1b[2J\x1b]0;title\x07\x9b: unknown key"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_one_short_error_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = sys.modules["toolkit.recipe.rules.check"]
    monkeypatch.setattr(check, "_SECONDS", 1 if kind == "interpolations" else 10)
    text, words = HOSTILE[kind]
    write("hostile", BASE + text)
    with pytest.raises(RecipeError) as caught:
        load_checked("hostile")
    said = str(caught.value)
    assert words in " ".join(said.split()) and len(said) < 8000 and len(said.splitlines()) <= 40
    assert description(Path("recipes/hostile.yaml")) == ""  # Which `toolkit ls` asks for.


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        ("batch: [1]\n", "batch.seq_len=8", "batch"),
        ("method: {rank_pattern: [1]}\ndescription: 'seed ${seed}'\n", "seed=1", "method.rank_pattern: is not valid"),
        ("batch: {seq_len: {a: 1}}\nextends: [1]\n", "seed=1", "extends"),
        ("", f"seed={'9' * 5000}", "seed"),
        ("", f"model.chat_template={'a' * 5000}", "too long"),
        ("", f"data={'[' * 2000}", "data"),
    ],
)
def test_what_no_library_was_written_for_is_a_problem_too(text: str, override: str, words: str) -> None:
    write("hostile", BASE + text)
    with pytest.raises(RecipeError, match=words):
        load_checked("hostile", [override])


def test_a_link_that_leads_nowhere_is_named_whatever_reads_it() -> None:
    """Its name is in the folder, so no other one can be meant."""
    write("parent", "defaults: gone\n")
    write("chooses", f"{BASE}method: gone\n")
    for link in ("gone", "method/gone", "looped"):
        file = Path("recipes", f"{link}.yaml")
        file.parent.mkdir(exist_ok=True)
        file.symlink_to(file.name if link == "looped" else "removed.yaml")
    for recipe in ("gone", "parent", "chooses", "looped"):
        with pytest.raises(RecipeError, match=r"is a link to (removed|looped)\.yaml, where no file is"):
            load(recipe)


@pytest.mark.parametrize(
    ("written", "change"),
    [
        ("smollm2_135m_lora.yaml", "write `smollm2_135m_lora`"),
        ("../recipes/smollm2_135m_lora.yaml", "write `smollm2_135m_lora`"),
        ("../elsewhere/theirs", "copy it beside this one"),
    ],
)
def test_the_bare_name_of_a_recipe_extended_by_its_path_is_told(written: str, change: str) -> None:
    write("child", f"defaults: {written}\n")
    with pytest.raises(RecipeError, match=rf"cannot be extended: recipes beside it(.*\n)+    change   {change}"):
        load("child")
