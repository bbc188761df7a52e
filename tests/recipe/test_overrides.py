"""`key=value` of the command line: what each form sets, and what it replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes import values, write
from toolkit.recipe import RecipeError, load, shipped_recipes
from toolkit.recipe.files import list_recipes
from toolkit.recipe.load import load_resolved
from toolkit.recipe.overrides import parse, split_arguments
from toolkit.recipe.rules import load_checked
from toolkit.recipe.show import write_diff

pytestmark = pytest.mark.usefixtures("mine")


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["batch.seq_len=512"], "batch.seq_len", 512),
        (["seq_len=512"], "batch.seq_len", 512),
        (["max_steps=5"], "schedule.max_steps", 5),
        (["seq_len=512", "batch.seq_len=256"], "batch.seq_len", 256),
        (["batch.seq_len=256", "seq_len=512"], "batch.seq_len", 512),
        (["learning_rate=1e-4"], "optimizer.learning_rate", 1e-4),
        (["learning_rate=1E-4"], "optimizer.learning_rate", 1e-4),
        (["optimizer=sgd"], "optimizer.name", "sgd"),
        (["batch=8"], "batch.global_batch_size", 8),
        (["method=qlora"], "method.quantization", "nf4"),
        (["method.option=qlora"], "method.quantization", "nf4"),
        (["method={option: qlora, r: 4}"], "method.quantization", "nf4"),
        (["+method=qlora"], "method.quantization", "nf4"),
        (["model=gpt2"], "model.path", "openai-community/gpt2"),
        (["model=./folder"], "model.path", "./folder"),
        (["model=./folder", "model=gpt2"], "model.path", "openai-community/gpt2"),
        (["model=someone/thing-1.5B"], "model.path", "someone/thing-1.5B"),
        (["model=/home/josé/my model"], "model.path", "/home/josé/my model"),
        (["model={path: x, dtype: bf16}"], "model.dtype", "bf16"),
        (["optimizer={name: sgd, momentum: 0.8}"], "optimizer.momentum", 0.8),
        (["optimizer.args={nesterov: true}"], "optimizer.args", {"nesterov": True}),
        (["optimizer.args.nesterov=true"], "optimizer.args", {"nesterov": True}),
        (["columns.prompt=question"], "data.columns", {"prompt": "question"}),
        (["data.eval_split=null"], "data.eval_split", None),
        (["~data.eval_split"], "data.eval_split", None),
        (["~optimizer.learning_rate"], "optimizer.learning_rate", 2e-5),
        (["seed=7", "~seed"], "seed", 42),
        (["~seed", "seed=7"], "seed", 7),
        (["~batch", "batch.seq_len=7"], "batch.seq_len", 7),
        (["~data.eval_split", "data={eval_split: 0.5}"], "data.eval_split", 0.5),
        (["method=qlora", "~method"], "method.name", "full"),
        (["~method", "method=qlora"], "method.name", "lora"),
        (["++seed=6"], "seed", 6),
        (["target_modules=[q_proj,v_proj]"], "method.target_modules", ["q_proj", "v_proj"]),
        (["prompts=['a, b',c]"], "evaluation.prompts", ["a, b", "c"]),
        (["description=a b"], "description", "a b"),
        (["description=it's a=b #1 é中"], "description", "it's a=b #1 é中"),
        (["description='x, [y]'"], "description", "x, [y]"),
        (['description="x, {y}"'], "description", "x, {y}"),
        (["description=back\\slash é\\"], "description", "back\\slash é\\"),
        (["seed=${batch.seq_len}"], "seed", 2048),
        (["output.dir=~/runs"], "output.dir", str(Path.home() / "runs")),
    ],
)
def test_override(overrides: list[str], path: str, value: Any) -> None:
    loaded = load("mine", overrides)
    assert values(loaded, path) == [value]
    # What a run folder keeps says the same.
    assert load_resolved(write("kept", loaded.to_yaml(), "runs")) == loaded.recipe


@pytest.mark.parametrize(
    ("override", "paths"),
    [
        ("data=a.jsonl", ["a.jsonl"]),
        ("data=[a.jsonl,b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("data=my rows/é.jsonl", ["my rows/é.jsonl"]),
        ("data=rows/*.jsonl", ["rows/*.jsonl"]),
        ("data=[{path: a, weight: 2.0},b]", ["a", "b"]),
        ("data.sources=[a]", ["a"]),
        ("data=alpaca", ["tatsu-lab/alpaca"]),
    ],
)
def test_data_of_the_command_line(override: str, paths: list[str]) -> None:
    assert [source.path for source in load("mine", [override]).recipe.data.sources] == paths


def test_command_line_replaces_what_says_the_same_in_the_file(mine: Path) -> None:
    """A quick trial of a recipe that counts in epochs, and other data in place of the file's."""
    (mine / "recipes" / "long.yaml").write_text(
        "model: {path: m}\ndata: {sources: [a], format: alpaca, columns: {input: context}, eval_split: 0.1}\n"
        "schedule: {num_epochs: 3, warmup_ratio: 0.1}\n",
        encoding="utf-8",
    )
    recipe = load("long", ["max_steps=5", "warmup_steps=2", "data=b.jsonl"]).recipe
    assert recipe == load("long", ["schedule={max_steps: 5, warmup_steps: 2}", "data=b.jsonl"]).recipe
    assert (recipe.schedule.max_steps, recipe.schedule.num_epochs) == (5, None)
    assert (recipe.schedule.warmup_steps, recipe.schedule.warmup_ratio) == (2, None)
    assert (recipe.data.sources[0].path, recipe.data.format, recipe.data.columns) == ("b.jsonl", "auto", {})
    assert recipe.data.eval_split == 0.1
    kept = load("long", ["data=b.jsonl", "data.format=messages", "max_steps=null"]).recipe
    assert (kept.data.format, kept.schedule.num_epochs) == ("messages", 3)


@pytest.mark.parametrize(
    ("split", "data", "held_out"),
    [
        ("eval_split: test_sft", "data=b.jsonl", (0.05, [])),
        ("eval_split: 0.1", "data=b.jsonl", (0.1, [])),
        ("eval_sources: [d]", "data=b.jsonl", (0.05, [])),
        ("shuffle: true", "data=b.jsonl", (None, [])),
        ("eval_split: test_sft", "data=b.jsonl data.eval_split=0.2", (0.2, [])),
        ("eval_split: test_sft", "data=b.jsonl data.eval_split=null", (None, [])),
        ("eval_split: test_sft", "data=b.jsonl data.eval_sources=[c]", (None, ["c"])),
        ("eval_split: test_sft", "data.sources=[b.jsonl]", ("test_sft", [])),
        ("eval_split: 0.1", "data=b.jsonl data=wikitext", ("validation", [])),
    ],
)
def test_a_split_of_other_sources_is_left_behind_and_a_fraction_is_not(
    mine: Path, split: str, data: str, held_out: tuple[object, object]
) -> None:
    """On the command line, in a file that extends the recipe, and in a copy."""
    write("long", f"model: {{path: m}}\ndata: {{sources: [a], {split}}}\n")
    recipe = load("long", data.split()).recipe
    assert (recipe.data.eval_split, [source.path for source in recipe.data.eval_sources]) == held_out
    if data == "data=b.jsonl":
        write("mine", "defaults: long\ndata: b.jsonl\n")
        assert load("mine").recipe == recipe
    write_diff("long", data.split(), "copy")
    assert load("copy").recipe.data == recipe.data


@pytest.mark.parametrize("name", list_recipes([shipped_recipes()]))
def test_every_shipped_recipe_takes_own_rows(mine: Path, name: str) -> None:
    loaded = load_checked(name, ["data=mine.jsonl"])
    assert [source.path for source in loaded.recipe.data.sources] == ["mine.jsonl"]
    assert not [warning for warning in loaded.warnings if "held out" in warning.what]


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["description.a=b"], "description"),
        (["batch.seq_len.max=3"], "batch.seq_len"),
        (["description.a.b=c"], "description"),
    ],
)
def test_a_mapping_typed_in_the_place_of_a_plain_value_is_said_to_be_typed(
    mine: Path, overrides: list[str], path: str
) -> None:
    write("long", "description: x\nmodel: {path: m}\ndata: [a]\nbatch: {seq_len: 5}\n")
    with pytest.raises(RecipeError) as refused:
        load("long", overrides)
    (problem,) = refused.value.problems
    assert (problem.path, problem.where) == (path, "command line")


PAIRS = [
    ("schedule.max_steps", "schedule.num_epochs"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
    ("checkpoint.save_steps", "checkpoint.save_epochs"),
    ("batch.global_batch_size", "batch.tokens_per_step"),
]


@pytest.mark.parametrize(("stated", "other"), [*PAIRS, *(pair[::-1] for pair in PAIRS)])
def test_each_key_replaces_the_one_that_says_the_same(stated: str, other: str) -> None:
    assert parse([f"{stated}=1"], []).removed == [other]
    assert parse([f"{stated}=null"], []).removed == []
    assert parse([f"{stated}=1", f"{other}=2"], []).removed == [], "both were asked for: the schema says no"


@pytest.mark.parametrize(
    ("overrides", "groups", "set_to", "removed"),
    [
        (["optimizer.args.a=1", "optimizer.args={b: 2}"], {}, {"optimizer.args.a": 1, "optimizer.args": {"b": 2}}, []),
        (["optimizer.args={b: 2}", "optimizer.args.a=1"], {}, {"optimizer.args": {"b": 2}, "optimizer.args.a": 1}, []),
        (["a=1", "b=2", "a=3"], {}, {"b": 2, "a": 3}, []),
        (["optimizer.args={a: 1, b: 2}", "~optimizer.args.a"], {}, {"optimizer.args": {"b": 2}}, ["optimizer.args.a"]),
        (["optimizer.args.a=1", "seed=7", "~optimizer.args"], {}, {"seed": 7}, ["optimizer.args"]),
        (["seed=7", "seeds=1", "~seed"], {}, {"seeds": 1}, ["seed"]),
        (["optimizer.args={seed: 1}", "~seed"], {}, {"optimizer.args": {"seed": 1}}, ["seed"]),
        (["method=qlora", "~method"], {}, {}, ["method"]),
        (["~method", "method=qlora"], {"method": "qlora"}, {}, []),
        (["~batch", "~method", "method.option=lora"], {"method": "lora"}, {}, ["batch"]),
        (["model=./folder", "model=gpt2"], {"model": "gpt2"}, {}, []),
        (["model=gpt2", "model.path=x"], {"model": "gpt2"}, {"model.path": "x"}, []),
        (["data.format=chat", "data=[b]"], {}, {"data.format": "chat", "data.sources": ["b"]}, []),
        (["data.sources=[b]"], {}, {"data.sources": ["b"]}, []),
    ],
)
def test_order_of_overrides(
    mine: Path, overrides: list[str], groups: dict[str, str], set_to: dict[str, Any], removed: list[str]
) -> None:
    parsed = parse(overrides, [shipped_recipes()])
    assert not parsed.problems
    assert parsed.groups == groups
    assert list(parsed.values.items()) == list(set_to.items()), "in this order"
    assert parsed.removed == removed


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("seed", ["seed", "is not an override", "key=value, or ~key"]),
        ("~seed=3", ["~seed=3", "is not an override"]),
        ("=3", ["=3", "is not an override"]),
        ("optimizer.=3", ["optimizer.=3", "is not an override", "key=value, or ~key", "write optimizer=3"]),
        ("optimizer..beta1=.3", ["optimizer..beta1=.3", "is not an override", "write optimizer.beta1=.3"]),
        ("seed.", ["seed.", "is not an override", "write seed=VALUE"]),
        ("name=sgd", ["name", "several keys", "optimizer.name", "schedule.name", "write all of it"]),
        (
            "batch_size=8",
            [
                "several keys",
                "batch.global_batch_size, batch.micro_batch_size, rollout.batch_size, evaluation.batch_size",
            ],
        ),
        ("sources.0.path=x", ["sources.0.path", "one entry of a list", "sources=[…]"]),
        ("optimizer.args.betas.1=3", ["one entry of a list", "write all of it: optimizer.args.betas=[…]"]),
        (
            "seed=1,2",
            ["seed", "one value", "1,2", "for each: toolkit sweep … seed=1,2, or toolkit plan … --sweep seed=1,2"],
        ),
        ("prompts=[a", ["evaluation.prompts", "cannot be read", "close every bracket"]),
        ("optimizer.args={nesterov: true, nesterov: false}", ["optimizer.args.nesterov", "is given twice", "remove"]),
        ("optimizer={name: sgd,name:lion}", ["optimizer.name", "is given twice"]),
        ("data=[{path: a, columns: {text: b, text: c}}]", ["data.text", "is given twice"]),
        ("new_tokens=[<a>, b]", ["cannot be read", """quote each: 'model.new_tokens=["<a>", "b"]'"""]),
        ("~sed", ["sed", "unknown key", "did you mean `~seed`?"]),
        ("~optimizer.learning_rat", ["unknown key", "did you mean `~optimizer.learning_rate`?"]),
        ("~nothing.like", ["nothing.like", "unknown key"]),
        ("method=qlor", ["method", "is not known", "qlora", "did you mean `qlora`?"]),
        ("model=zzzz", ["model", "is not known", "zzzz", "for something else write model.path=zzzz"]),
        ("evaluation=3", ["evaluation", "is a section", "evaluation.num_prompts"]),
        ("batch=null", ["batch", "is a section", "~batch puts all of it back"]),
    ],
)
def test_what_is_wrong_with_an_override_and_what_to_write(mine: Path, override: str, parts: list[str]) -> None:
    parsed = parse([override, "max_steps=1"], [shipped_recipes()])
    (problem,) = parsed.problems
    text = " ".join(vars(problem).values())
    assert [part for part in (*parts, "command line") if part not in text] == []
    assert parsed.values == {"schedule.max_steps": 1}, "the others count"
    assert parsed.texts == {"schedule.max_steps": "1"}


def test_the_recipe_is_named_once() -> None:
    assert split_arguments(["seed=1", "recipe=a=b", "recip=x"]) == ("a=b", ["seed=1", "recip=x"])
    for arguments, hint in (
        (["small", "seed=1"], "did you mean recipe=small?"),
        (["recipe="], "`toolkit ls`"),
        (["recipe=a", "recipe=b", "c"], "`toolkit ls`"),
        ([], "`toolkit ls`"),
    ):
        with pytest.raises(RecipeError) as refused:
            split_arguments(arguments)
        (problem,) = refused.value.problems
        assert problem.path == "recipe" and hint in problem.hint and problem.given == " ".join(arguments)


@pytest.mark.parametrize("number", [31, 200, 3_000, 60_000])
@pytest.mark.parametrize(
    "form", ["a{}=1", "~a{}", "extra.training_arguments{}=1", "extra.lora{}={{a: 1}}", "++seed{}=1"]
)
def test_a_key_of_endless_parts_is_one_short_error(form: str, number: int) -> None:
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [form.format(".b" * number)])
    assert len(str(caught.value)) < 3000 and "parts" in str(caught.value)


@pytest.mark.parametrize("number", [31, 100, 200, 400, 900, 3_000])
@pytest.mark.parametrize("pair", ["[]", "{}"])
@pytest.mark.parametrize("key", ["x", "model", "data.sources", "data.columns", "extra.lora", "description"])
def test_a_value_in_endless_brackets_is_one_short_error(key: str, pair: str, number: int) -> None:
    opening = "[" if pair == "[]" else "{a: "
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [f"{key}={opening * number}1{pair[1] * number}"])
    assert len(str(caught.value)) < 4000 and caught.value.problems


@pytest.mark.parametrize("change", ["data=b.jsonl", "data=alpaca", "data={option: alpaca}"])
@pytest.mark.parametrize("old", ["sources: [a]", "option: wikitext", "option: wikitext, sources: [a]"])
def test_what_describes_the_old_data_does_not_go_over_to_others(mine: Path, old: str, change: str) -> None:
    """On the command line, in a file that extends the recipe, and in a copy."""
    about = "format: text, columns: {text: body}, ignore: [label], eval_sources: [c], shuffle: false, eval_split: old"
    write("long", f"model: {{path: m}}\ndata: {{{old}, {about}}}\n")
    kept = load("long").recipe.data
    assert (kept.format, kept.columns, kept.ignore, len(kept.eval_sources)) == ("text", {"text": "body"}, ["label"], 1)
    write("child", f"defaults: long\n{change.replace('=', ': ')}\n")
    write_diff("long", [change], "copied")
    for recipe in (load("long", [change]).recipe, load("child").recipe, load("copied").recipe):
        data = recipe.data
        is_alpaca = "alpaca" in change
        assert [source.path for source in data.sources] == ["tatsu-lab/alpaca" if is_alpaca else "b.jsonl"]
        assert (data.format, data.columns, data.ignore) == ("alpaca" if is_alpaca else "auto", {}, [])
        assert (data.eval_sources, data.eval_split, data.shuffle) == ([], 0.01 if is_alpaca else 0.05, False)


@pytest.mark.parametrize("old", ["sources: [a]", "option: wikitext"])
@pytest.mark.parametrize("change", ["data=b.jsonl", "data=bare", "data=wide", "data=alpaca"])
@pytest.mark.parametrize("held", ["eval_split: old", "eval_sources: [c]"])
def test_one_rule_for_what_other_data_hold_out(mine: Path, held: str, change: str, old: str) -> None:
    """A fraction if they say nothing of that; whether they are a word or an option, and wherever the old data stood."""
    write("data/bare", "sources: [bare.jsonl]\n")
    write("data/more", "eval_sources: [e.jsonl]\n")
    write("data/wide", "defaults: [_self_, more]\nsources: [wide.jsonl]\n")
    write("long", f"model: {{path: m}}\ndata: {{{old}, {held}}}\n")
    write("child", f"defaults: long\n{change.replace('=', ': ')}\n")
    write_diff("long", [change], "copied")
    for loaded in (load("long", [change]), load("child"), load("copied")):
        data = loaded.recipe.data
        says = {"data=wide": (None, ["e.jsonl"]), "data=alpaca": (0.01, [])}
        assert (data.eval_split, [source.path for source in data.eval_sources]) == says.get(change, (0.05, []))
        assert not loaded.warnings
    assert load("long", [change, "data.eval_split=null"]).recipe.data.eval_split is None


@pytest.mark.parametrize("held", ["eval_split: test", "eval_sources: [held]"])
@pytest.mark.parametrize("old", ["sources: [a]", "option: wikitext"])
def test_in_place_of_rows_held_out_of_other_data_a_stream_has_none(mine: Path, old: str, held: str) -> None:
    write("long", f"model: {{path: m}}\ndata: {{{old}, {held}}}\nschedule: {{max_steps: 5}}\n")
    write("child", "defaults: long\ndata: fineweb_edu\n")
    write_diff("long", ["data=fineweb_edu"], "copied")
    for loaded in (load("long", ["data=fineweb_edu"]), load("child"), load("copied")):
        assert (loaded.recipe.data.eval_split, loaded.recipe.data.eval_sources) == (None, [])
        (warning,) = map(str, loaded.warnings)
        assert "nothing is held out" in warning and held.partition(": ")[0 if "sources" in held else 2] in warning
    for own in ("data.eval_split=null", "data.eval_split=validation", "data.eval_sources=[c]"):
        assert not load("child", [own]).warnings
    assert not load("long", ["~data.eval_split", "~data.eval_sources", "data=fineweb_edu"]).warnings
    write("streamed", "defaults: long\ndata: {streaming: true}\n")
    assert load("streamed", ["data=b.jsonl"]).recipe.data.eval_split is None


@pytest.mark.parametrize(
    ("old", "again"),
    [
        ("option: alpaca", "data=alpaca"),
        ("sources: [tatsu-lab/alpaca], format: alpaca", "data=alpaca"),
        ("sources: [{path: rows.jsonl}]", "data=rows.jsonl"),
        ("sources: [rows.jsonl]", "data=[{path: rows.jsonl}]"),
    ],
)
def test_the_same_data_again_change_nothing(mine: Path, old: str, again: str) -> None:
    about = "columns: {input: context}, ignore: [label], eval_split: test"
    write("long", f"model: {{path: m}}\ndata: {{{old}, {about}}}\n")
    write("middle", "defaults: long\ndata: {over_long: drop, ignore: [other]}\n")
    write("child", f"defaults: middle\n{again.replace('=', ': ')}\n")
    kept = load("middle").recipe
    assert (kept.data.columns, kept.data.ignore) == ({"input": "context"}, ["other"])
    for recipe in (load("middle", [again]).recipe, load("child").recipe):
        assert (recipe.data.columns, recipe.data.ignore) == ({"input": "context"}, ["other"])
        # An option that a file chooses lies on what the file extends.
        assert recipe == kept or (old.startswith("sources: [tatsu") and recipe.data.eval_split == 0.01)


@pytest.mark.parametrize("change", ["model=org/other", "model=smollm2_360m_instruct"])
@pytest.mark.parametrize("old", ["path: m", "option: smollm2_135m_builtin"])
def test_a_tokenizer_does_not_go_over_to_another_model(mine: Path, old: str, change: str) -> None:
    write("long", f"model: {{{old}, tokenizer: ./own, chat_template: chatml}}\ndata: {{sources: [a]}}\n")
    assert load("long").recipe.model.tokenizer == "./own" and not load("long").warnings
    write("child", f"defaults: long\n{change.replace('=', ': ')}\n")
    write_diff("long", [change], "copied")
    for loaded in (load("long", [change]), load("child"), load("copied")):
        model = loaded.recipe.model
        assert model.path in ("org/other", "HuggingFaceTB/SmolLM2-360M-Instruct")
        assert (model.tokenizer, model.chat_template) == (None, "chatml")
    if old == "path: m":
        (warning,) = load("child").warnings
        assert warning.path == "model.chat_template" and "was written for m, and stays" in warning.what
    kept = load("long", [change, "model.tokenizer=./mine", "~model.chat_template"])
    assert (kept.recipe.model.tokenizer, kept.recipe.model.chat_template, kept.warnings) == ("./mine", None, ())
    assert load("long", ["model.path=org/other"]).recipe.model.tokenizer == "./own"
