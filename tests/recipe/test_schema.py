"""What sections make of their values: sources, lengths of steps, texts, and what is left to the plan."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from recipes import recipe_of
from toolkit.data.encoding import chat_template
from toolkit.recipe import Recipe
from toolkit.recipe.schema import CHAT_TEMPLATES
from toolkit.recipe.sections import Batch, Optimizer

OWN = "data.sources='[{path: a, split: x, format: text, columns: {a: b}, ignore: [c], weight: 2.0, max_samples: 5}]' "
WHOLE = "data.format=alpaca data.columns='{d: e}' data.ignore=[f] "


def test_a_source_has_what_it_says_and_else_what_the_data_say() -> None:
    (own,) = recipe_of(OWN, WHOLE).data.training_sources()
    assert (own.format, own.columns, own.ignore) == ("text", {"a": "b"}, ["c"])
    (other,) = recipe_of("data.sources='[{path: a}]'", WHOLE).data.training_sources()
    assert (other.format, other.columns, other.ignore) == ("alpaca", {"d": "e"}, ["f"])
    (empty,) = recipe_of("data.sources='[{path: a, columns: {}, ignore: []}]'", WHOLE).data.training_sources()
    assert (empty.format, empty.columns, empty.ignore) == ("alpaca", {}, [])


def test_held_out_rows_are_a_split_of_the_same_sources_or_sources_of_their_own() -> None:
    assert (
        recipe_of(OWN).data.evaluation_sources()
        == recipe_of(OWN, "data.eval_split=0.1").data.evaluation_sources()
        == []
    )
    (split,) = recipe_of(OWN, WHOLE, "data.eval_split=held").data.evaluation_sources()
    # All of its rows, once each.
    assert (split.path, split.split, split.max_samples, split.weight) == ("a", "held", None, None)
    assert (split.format, split.columns) == ("text", {"a": "b"})
    both = recipe_of(OWN, WHOLE, "data.eval_split=held data.eval_sources='[{path: g}]'").data.evaluation_sources()
    assert [(source.path, source.format) for source in both] == [("g", "alpaca"), ("a", "text")]


def test_a_step_has_so_many_sequences_however_it_is_stated() -> None:
    for batch, expected in (
        (Batch(), 16),
        (Batch(seq_len=3), 16),
        (Batch(global_batch_size=5), 5),
        (Batch(seq_len=8, tokens_per_step=24), 3),
        (Batch(seq_len=8, tokens_per_step=4), 1),
    ):
        assert batch.sequences_per_step == expected


def test_what_is_left_to_the_plan() -> None:
    made = recipe_of()
    assert made.undecided == ("batch.micro_batch_size",) and made.knows_engine
    decided = recipe_of("batch.micro_batch_size=2")
    assert decided.undecided == () and decided.knows_engine
    for key in ("strategy.name", "activation_checkpointing.mode"):
        made = recipe_of(f"{key}=auto batch.micro_batch_size=2")
        assert made.undecided == (key,) and not made.knows_engine
    with pytest.raises(AssertionError, match="not decided"):
        _ = recipe_of("strategy.name=auto").strategy.zero_stage


def test_strategies_know_their_stage_and_whether_a_process_holds_all() -> None:
    names = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
    strategies = [recipe_of(f"strategy.name={name}").strategy for name in names]
    assert [strategy.zero_stage for strategy in strategies] == [0, 0, 1, 2, 3, 0]
    assert [strategy.shards_parameters for strategy in strategies] == [False, False, False, False, True, True]


def test_values_are_put_in_at_the_top_and_below_several_times() -> None:
    made = recipe_of().with_values({"seed": 7, "batch.seq_len": 8, "batch.global_batch_size": 4, "method.r": 2})
    assert (made.seed, made.batch.seq_len, made.batch.global_batch_size, made.method.r) == (7, 8, 4, 2)
    assert recipe_of().batch.seq_len == 2048 and made.model == recipe_of().model


def test_the_rate_of_adapters_stays_a_default() -> None:
    adapters = recipe_of("method.name=lora").optimizer
    assert (adapters.learning_rate, adapters.model_fields_set) == (2e-4, set())
    assert recipe_of("method.name=lora optimizer.learning_rate=0.5").optimizer.learning_rate == 0.5
    assert recipe_of().optimizer.learning_rate == recipe_of("optimizer.name=sgd").optimizer.learning_rate == 2e-5


def test_what_has_changed_is_what_differs_from_the_default() -> None:
    assert Optimizer(beta1=0.9, eps=1e-6, learning_rate=2e-5).changed() == ["eps"]


def taken(key: str, value: Any) -> bool:
    section, _, leaf = key.partition(".")
    base = {"model": {"path": "a"}, "data": {"sources": [{"path": "b"}]}}
    base[section] = value if not leaf else base.get(section, {}) | {leaf: value}
    try:
        Recipe.model_validate(base)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("key", "fitting", "wrong"),
    [
        ("description", ["", "  ", "two\nlines\tand a tab", "é 中"], ["a\x07", "a\x00b", "\x1f", "\ufffe"]),
        ("evaluation.prompts", [["two\nlines"], []], [[""], ["  "], ["a", "b\x07"]]),
        ("output.name", ["a b", "é\xa0中"], ["", " ", "a\tb", "a\nb", "a\rb", "a\x7fb", "a\x9fb", "a\uffff"]),
        ("data.columns", [{"a": "b"}, {}], [{"a": " "}, {" ": "a"}, {"a": "b\tc"}]),
        ("extra.training_arguments", [{"a": {"b": ["c", 1]}}], [{"a": {"b": ["c", ""]}}, {"a": [{"\x07": 1}]}]),
        *(
            (key, [{"a": 1}, {"A_1": 1}], [{"_target_": 1}, {"1a": 1}, {"a-b": 1}, {"": 1}])
            for key in ("optimizer.args", "schedule.args", "extra.lora", "data.chat_template_kwargs")
        ),
    ],
)
def test_texts_say_something_and_names_are_those_of_arguments(key: str, fitting: list[Any], wrong: list[Any]) -> None:
    assert [value for value in fitting if not taken(key, value)] == []
    assert [value for value in wrong if taken(key, value)] == []


def test_built_in_chat_templates_are_those_that_there_are() -> None:
    assert sorted(CHAT_TEMPLATES) == sorted(chat_template._BUILT_IN)
