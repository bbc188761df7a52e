"""Rewards: what each built-in one gives, a user's own function, and errors that name reward, row and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.common import UserError
from toolkit.data.rewards import Answer, Scorer
from toolkit.recipe.reinforcement import Rewards

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def score(reward: dict[str, Any], text: str, reference: str = "", tokens: int = 5) -> float:
    found = Scorer(Rewards(**reward))([Answer(text, tokens, "", {"answer": reference}, "rows.jsonl:1")])
    return float(found[0, 0])


@pytest.mark.parametrize(
    ("reward", "text", "reference", "wanted"),
    [
        ({"exact_match": True}, " Paris \n", "Paris", 1),
        ({"exact_match": True}, "paris", "Paris", 0),
        ({"exact_match": {"ignore_case": True}}, "paris", "Paris", 1),
        ({"exact_match": {"tag": "answer"}}, "so <answer>Paris</answer>", "Paris", 1),
        ({"exact_match": {"tag": "answer"}}, "Paris", "Paris", 0),
        ({"exact_match": True}, "", " ", 0),
        ({"exact_match": True}, "<think>cut", "", 0),
        ({"exact_match": {"tag": "answer"}}, "<answer></answer>", "", 0),
        ({"regex": {"pattern": r"Answer: (?P<answer>\w*)"}}, "Answer: ", "", 0),
        ({"exact_match": True}, "<think>London?</think>\n\nParis", "Paris", 1),
        ({"exact_match": True}, "[THINK]London?[/THINK]Paris", "Paris", 1),
        ({"numeric": True}, "<think>3 + 4 = 7", "7", 0),
        ({"numeric": {"tag": "answer"}}, "<think>3 + 4 <answer>7</answer>", "7", 1),
        ({"numeric": True}, "3 + 4 = 7", "He has 3 and 4.\n#### 7", 1),
        ({"numeric": True}, "so \\boxed{\\frac{1,200}{1}} or \\boxed{1,200} of 3", "1200", 1),
        ({"numeric": True}, "so \\boxed{4} of 3. Then \\boxed{", "4", 1),
        ({"numeric": True}, "so {\\boxed{4} of {3}. Then \\boxed{ 5 or {3}", "4", 1),
        ({"numeric": True}, "so } \\boxed{4} or \\boxed{about \\boxed{7}}", "7", 1),
        ({"numeric": True}, "so \\boxed{4", "4", 1),
        ({"numeric": True}, "It is 7, not 8", "7", 0),
        ({"numeric": True}, "none", "7", 0),
        ({"numeric": True}, "7", "none", 0),
        ({"numeric": True}, "It is .5", "0.5", 1),
        ({"numeric": True}, "It is .5", "5", 0),
        ({"numeric": True}, "x = \u22125", "-5", 1),
        ({"numeric": True}, "x = \u22125", "5", 0),
        ({"numeric": True}, "so x = 9 \u2212 5", "5", 1),
        ({"numeric": True}, "so 2.5e-3, or 1,000E+2", "100000", 1),
        ({"numeric": True}, "It is 0.00001", str(0.00001), 1),
        ({"numeric": True}, "It is 5", str(0.00001), 0),
        ({"numeric": True}, "Room 5e is 1e9999999", "9999999", 1),
        ({"numeric": {"tolerance": 0.01}}, "3.14", "3.1416", 1),
        ({"numeric": {"tolerance": 0.0001}}, "3.14", "3.1416", 0),
        ({"numeric": {"tag": "answer"}}, "<answer>7</answer> of 9", "7", 1),
        ({"numeric": {"tag": "answer"}}, "7", "7", 0),
        ({"regex": {"pattern": r"\bA\w+"}}, "one Apple", "", 1),
        ({"regex": {"pattern": r"^A\w+"}}, "one Apple", "", 0),
        ({"regex": {"pattern": r"Answer: (?P<answer>\w+)"}}, "Answer: B", "B", 1),
        ({"regex": {"pattern": r"Answer: (?P<answer>\w+)"}}, "Answer: C", "B", 0),
        ({"json_schema": True}, '{"a": 1}', "", 1),
        ({"json_schema": True}, '```{"a": 1}```', "", 0),
        ({"json_schema": True}, '<think>{"b": 2}</think>{"a": 1}', "", 1),
        ({"length": {"min_tokens": 5, "max_tokens": 5}}, "x", "", 1),
        ({"length": {"max_tokens": 4}}, "x", "", 0),
        ({"length": {"max_tokens": 3, "soft": 4}}, "x", "", 0.5),
        ({"length": {"min_tokens": 6, "soft": 4}}, "x", "", 0.75),
        ({"language": {"code": "ru"}}, "привет мир ok", "", 9 / 11),
        ({"language": {"code": "de"}}, "Das ist nicht die Antwort", "", 1),
        ({"language": {"code": "de"}}, "This is not the answer", "", 0),
        ({"language": {"code": "en"}}, "12 + 3", "", 0),
        ({"format": True}, "<think>so</think>\n<answer>7</answer>", "", 1),
        ({"format": True}, "<answer>7</answer><think>so</think>", "", 0.5),
        ({"format": True}, "<answer>7</answer>", "", 0.25),
        ({"format": {"tags": ["answer"]}}, "It is <answer>7</answer>", "", 0.5),
        ({"format": {"tags": ["answer"]}}, "<answer>7", "", 0.25),
        ({"format": {"tags": ["answer"]}}, "<answer>7</answer><answer>8</answer>", "", 0),
        ({"format": {"tags": ["answer"], "partial": 0.0}}, "It is <answer>7</answer>", "", 0),
    ],
)
def test_built_in_rewards(reward: dict[str, Any], text: str, reference: str, wanted: float) -> None:
    assert score(reward, text, reference) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("reward", "cut"),
    [
        ({"exact_match": True}, "7"),
        ({"numeric": True}, "3 + 4 = 7"),
        ({"json_schema": True}, "[7]"),
        ({"format": {"tags": ["think", "answer"], "partial": 0.0}}, "7"),
        ({"regex": {"pattern": r"</think>\s*<answer>"}}, "7"),
    ],
)
def test_an_answer_goes_on_behind_the_mark_with_which_its_prompt_ends(reward: dict[str, Any], cut: str) -> None:
    said = {"exact_match": "7", "json_schema": "[7]"}.get(next(iter(reward)), "<answer>7</answer>")
    prompt, whole = "<|im_start|>assistant\n<think>\n", f"so it is 7\n</think>\n{said}"
    found = Scorer(Rewards(**reward))([Answer(text, 5, prompt, {"answer": "7"}) for text in (cut, whole)])
    assert found.tolist() == [[0.0], [1.0]]


def test_json_that_fits_a_schema_counts_more_than_any(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    reward = {"json_schema": {"schema_file": str(file)}}
    assert [score(reward, text) for text in ('{"a": 1}', '{"a": "1"}', "a")] == [1, 0.5, 0]
    file.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is no JSON Schema that can be read"):
        score({"json_schema": {"schema_file": str(file.rename(tmp_path / "broken.json"))}}, "{}")


def test_several_rewards_keep_their_order_and_weights() -> None:
    scorer = Scorer(Rewards(format={"tags": ["answer"], "weight": 0.5}, numeric={"weight": 2.0}))
    found = scorer([Answer(text, 3, "", {"answer": "7"}) for text in ("<answer>7</answer>", "7", "")])
    assert scorer.names == ["numeric", "format"] and scorer.weights.tolist() == [2.0, 0.5]
    assert found.tolist() == [[1, 1], [1, 0], [0, 0]]


def own(folder: Path, body: str, **more: Any) -> Rewards:
    file = folder / "own.py"
    file.write_text(body, encoding="utf-8")
    return Rewards(file=str(file), trust_python=True, **more)


def asked(count: int = 3) -> list[Answer]:
    return [
        Answer(f"text {n}", 2, f"prompt {n}", {"answer": str(n), "level": n}, f"rows.jsonl:{n}") for n in range(count)
    ]


def test_a_function_of_the_users_gets_texts_prompts_and_columns(tmp_path: Path) -> None:
    body = (
        "def reward(completions, prompts, answer, level, **columns):\n"
        "    assert columns == {} and prompts[1] == 'prompt 1' and answer[2] == '2'\n"
        "    return [len(text) + n for text, n in zip(completions, level)]\n"
    )
    scorer = Scorer(own(tmp_path, body, function_weight=0.5, length={"max_tokens": 1}))
    assert scorer.names == ["length", "reward"] and scorer.weights.tolist() == [1.0, 0.5]
    assert scorer(asked())[:, 1].tolist() == [6, 7, 8]


@pytest.mark.parametrize("names", ["prompts, completions, answer, **columns", "completions, **columns"])
def test_a_function_may_have_answers_and_prompts_in_any_order(names: str, tmp_path: Path) -> None:
    body = f"def reward({names}):\n    return [float(text.startswith('text')) for text in completions]\n"
    assert Scorer(own(tmp_path, body))(asked()).tolist() == [[1.0]] * 3


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_file_of_ones_own_is_a_module_like_any(future: str, tmp_path: Path) -> None:
    """With annotations as it says itself, data classes, and functions that other processes can run."""
    body = (
        f"{future}import pickle\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Found:\n    score: float = 2.0\n\n"
        "def one(text): return Found().score\n\n"
        "def reward(completions, **columns):\n"
        f"    assert isinstance(Found.__annotations__['score'], {'str' if future else 'type'})\n"
        "    return [pickle.loads(pickle.dumps(one))(text) for text in completions]\n"
    )
    assert Scorer(own(tmp_path, body))(asked()).tolist() == [[2.0]] * 3


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("texts, prompts, **columns", "missing a required argument: 'texts'"),
        ("completions, prompts, answer", "got an unexpected keyword argument 'level'"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_by_which_names_it_is(names: str, said: str, tmp_path: Path) -> None:
    scorer = Scorer(own(tmp_path, f"def reward({names}):\n    return [1.0] * len(prompts)\n"))
    with pytest.raises(UserError) as caught:
        scorer(asked())
    assert f"called with `completions`, `prompts`, `answer`, `level`: {said}" in caught.value.what
    assert "**columns" in str(caught.value)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("1 / 0", "raises ZeroDivisionError: division by zero"),
        ("[1.0]", "returns 1 scores for 3 answers"),
        ("None", "returns None for 3 answers"),
        ("{0: 1.0, 1: 2.0, 2: 3.0}", "for 3 answers, no list"),
        ("exit(0)", "raises SystemExit"),
        ("[1.0, 10**400, 2.0]", "which is no finite number, for rows.jsonl:1: 'text 1'"),
        ("[1.0, 2.0, 1j]", "returns 1j, which is no finite number"),
        ("[1.0, 2.0, [3.0]]", "returns [3.0], which is no finite number"),
        ("[1.0, float('nan'), 2.0]", "returns nan, which is no finite number, for rows.jsonl:1: 'text 1'"),
        ("[1.0, 2.0, None]", "returns None, which is no finite number, for rows.jsonl:2: 'text 2'"),
    ],
)
def test_a_reward_that_is_no_number_names_reward_row_and_value(result: str, said: str, tmp_path: Path) -> None:
    scorer = Scorer(
        own(tmp_path, f"def mine(completions, prompts, **columns):\n    return {result}\n", function="mine")
    )
    with pytest.raises(UserError) as caught:
        scorer(asked())
    assert "the reward `mine`" in caught.value.what and said in caught.value.what and "rows.jsonl" in caught.value.what


@pytest.mark.parametrize(
    "body",
    [
        "async def reward(completions, **columns):\n    return [1.0] * 3\n",
        "async def one(text):\n    return 1.0\ndef reward(completions, **more):\n    return [*map(one, completions)]\n",
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_reward_that_is_to_be_awaited_is_refused_without_a_warning_of_python(body: str, tmp_path: Path) -> None:
    scorer = Scorer(own(tmp_path, body))
    with pytest.raises(UserError, match="`async def` makes no scores until then") as caught:
        scorer(asked())
    assert "asyncio.run" in str(caught.value)


@pytest.mark.parametrize(
    "result", ["np.ones(3)", "torch.ones(3)", "[np.True_] * 3", "list(torch.ones(3))", "(1, 1, 1)"]
)
def test_scores_may_be_arrays_and_tensors(result: str, tmp_path: Path) -> None:
    body = f"import numpy as np, torch\ndef reward(completions, prompts, **columns):\n    return {result}\n"
    assert Scorer(own(tmp_path, body))(asked()).tolist() == [[1.0]] * 3


def test_a_column_by_the_name_of_the_answers_is_refused(tmp_path: Path) -> None:
    scorer = Scorer(own(tmp_path, "def reward(completions, prompts, **columns):\n    return [1.0] * len(prompts)\n"))
    with pytest.raises(UserError, match=r"the rows have a column `prompts`, too"):
        scorer([Answer("text", 2, "prompt", {"answer": "", "prompts": "other"}, "rows.jsonl:1")])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def other(): ...", "has no function `reward`"),
        ("1 +", "does not run: SyntaxError"),
        ("exit(0)", "does not run: SystemExit"),
    ],
)
def test_a_file_without_the_function_is_refused(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        Scorer(own(tmp_path, body))
