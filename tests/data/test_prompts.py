"""Prompts whose answers are scored: their columns, and what the audit says of references before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import write_jsonl

from toolkit.cli.main import main as toolkit
from toolkit.common import UserError
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.rows import Chat, Completion, Prompted, from_json, to_json
from toolkit.recipe.data import Source

USER = {"role": "user", "content": "2 + 2"}
ASSISTANT = {"role": "assistant", "content": "4"}
RECIPE = """
model: smollm2_135m_builtin
data: {sources: [rows.jsonl]}
objective: grpo
rewards: {numeric: true}
rollout: {max_completion_tokens: 16}
batch: {seq_len: 64, global_batch_size: 2}
"""


def converted(row: dict[str, Any], template: bool = True, system: str | None = None, **settings: Any) -> Prompted:
    row_format = recognise([row], Source(path="d", **settings), Task("grpo", "auto", template, system))
    found = row_format.convert(row, "d:1")
    assert isinstance(found, Prompted) and from_json(to_json(found)) == found
    return found


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"prompt": "2 + 2", "answer": "4"}, "4"),
        ({"question": "2 + 2", "answer": "It is 4.\n#### 4"}, "It is 4.\n#### 4"),
        ({"problem": "2 + 2", "solution": "4"}, "4"),
        ({"prompt": [USER], "ground_truth": 4}, "4"),
        ({"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}}, "4"),
        ({"prompt": "2 + 2", "answer": "4", "reward_model": {"ground_truth": "5"}}, "4"),
        ({"messages": [USER, ASSISTANT]}, "4"),
        ({"prompt": "2 + 2"}, ""),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "4"),
        ({"messages": [USER, {"role": "assistant", "content": "Four, I think."}], "answer": "4"}, "4"),
        ({"prompt": "2 + 2", "answer": 4.0}, "4"),
        ({"prompt": "2 + 2", "answer": float("nan")}, ""),
    ],
)
def test_prompts_and_references_under_their_usual_names(row: dict[str, Any], reference: str) -> None:
    found = converted(row)
    assert isinstance(found.asked, Chat) and [each["content"] for each in found.asked.messages] == ["2 + 2"]
    assert found.columns["answer"] == reference


def test_an_empty_prompt_is_an_empty_row() -> None:
    for prompt in (None, "", [], " "):
        assert is_empty(converted({"prompt": prompt, "answer": "4"}), Task("grpo", "auto", True))


def test_all_parts_of_a_question_are_asked() -> None:
    found = converted({"instruction": "Add.", "input": "2 and 2", "answer": "4"})
    assert isinstance(found.asked, Chat) and found.asked.messages[0]["content"] == "Add.\n\n2 and 2"
    shown = {"question": "Which? (A) red (B) blue", "choices": {"text": ["red", "blue"], "label": ["A", "B"]}}
    assert converted(shown | {"answer": "A"}).columns["choices"] == shown["choices"]
    asked = converted({"question": "What?", "context": "It was red.", "answer": "red"}, ignore=["context"]).asked
    assert isinstance(asked, Chat) and asked.messages[0]["content"] == "What?"


def test_other_columns_are_kept_for_rewards() -> None:
    found = converted({"prompt": "2 + 2", "answer": "4", "level": 3, "tests": ["a"]}, ignore=["tests"])
    assert found.columns == {"answer": "4", "level": 3}
    found = converted({"q": {"text": "2 + 2"}, "n": 4}, columns={"prompt": "q.text", "answer": "n"})
    assert found.columns == {"n": 4, "answer": "4"} and isinstance(found.asked, Chat)


def test_a_system_message_stands_before_prompts_that_have_none() -> None:
    asked = converted({"prompt": "2 + 2"}, system="Be brief.").asked
    assert isinstance(asked, Chat) and asked.messages[0] == {"role": "system", "content": "Be brief."}
    own = {"prompt": [{"role": "system", "content": "Mine."}, USER]}
    asked = converted(own, system="Be brief.").asked
    assert isinstance(asked, Chat) and [each["content"] for each in asked.messages] == ["Mine.", "2 + 2"]
    assert converted({"prompt": "2 + 2 ="}, template=False).asked == Completion("2 + 2 =", "")


def test_a_rows_own_system_message_tools_and_settings_are_asked_with_it() -> None:
    own = {"prompt": "2 + 2", "system": "In German."}
    asked = converted(own, system="Be brief.").asked
    assert isinstance(asked, Chat) and asked.messages[0]["content"] == "In German."
    assert converted(own, template=False, system="Be brief.").asked == Completion("In German.\n\n2 + 2", "")
    assert converted(own, template=False, ignore=["system"]).asked == Completion("2 + 2", "")
    settings, tool = {"enable_thinking": False}, {"name": "add", "parameters": {}}
    for prompt in ("2 + 2", [USER]):
        row = {"prompt": prompt, "chat_template_kwargs": settings, "functions": [tool]}
        assert converted(row).asked == Chat([USER], [{"type": "function", "function": tool}], settings)
        assert converted(row, ignore=["chat_template_kwargs", "functions"]).asked == Chat([USER])
    with pytest.raises(UserError, match="`chat_template_kwargs` is no object"):
        converted({"prompt": "2 + 2", "chat_template_kwargs": 3})
    for name, value in (("functions", [tool]), ("chat_template_kwargs", settings)):
        with pytest.raises(UserError, match=f"has `{name}`, which only chats have"):
            converted({"prompt": "2 + 2", name: value}, template=False)


@pytest.mark.parametrize("functions", ["def f(x): return x", ["f", "g"], [{"code": "f"}], {"f": "def f"}, [], None])
@pytest.mark.parametrize("template", [True, False])
def test_functions_that_are_no_definitions_of_tools_are_for_a_reward(functions: Any, template: bool) -> None:
    found = converted({"prompt": "2 + 2", "functions": functions}, template=template)
    assert found.asked == (Chat([USER]) if template else Completion("2 + 2", ""))
    assert found.columns == {"functions": functions, "answer": ""}
    with pytest.raises(UserError, match="`tools` is not a list of tool definitions"):
        converted({"prompt": "2 + 2", "functions": functions, "tools": ["f"]})


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"text": "a"}, {}, "none is known to hold a prompt"),
        ({"prompt": "a", "question": "b"}, {}, "`prompt` and `question` may each be the prompt"),
        ({"prompt": "a", "answer": "b", "solution": "c"}, {}, "`answer` and `solution` may each be the answer"),
        ({"prompt": "a"}, {"columns": {"answer": "x"}}, "has no column `x`"),
        ({"prompt": "a"}, {"columns": {"completion": "prompt"}}, "renames to `completion`"),
        ({"prompt": 3}, {}, "is neither a text nor messages"),
        ({"prompt": "a", "answer": ["b"]}, {}, "is a list, not a text or number"),
        (
            {"question": "Which?", "choices": ["red", "blue"], "answer": "red"},
            {},
            "`choices` looks like a part of what",
        ),
        ({"question": "What?", "context": "It was red.", "answer": "red"}, {}, "`context` looks like a part of what"),
        ({"prompt": "[{'role': 'user', 'content': 'a'}]"}, {}, "holds conversations, and would be asked as the plain"),
        ({"prompt": "a", "images": ["a.png"], "answer": "b"}, {}, "`images` looks like a part of what"),
    ],
)
def test_what_is_not_clear_is_asked(row: dict[str, Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        converted(row, **settings)


def audit(rows: list[dict[str, Any]], capsys: Any, *overrides: str) -> tuple[int, str]:
    write_jsonl(Path("rows.jsonl"), rows)
    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/asks.yaml").write_text(RECIPE, encoding="utf-8")
    code = toolkit(["data", "recipe=asks", *overrides])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_the_audit_knows_references_that_the_rewards_would_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    good = [{"prompt": f"{n} + 1", "answer": str(n + 1)} for n in range(8)]
    code, said = audit(good, capsys)
    assert code == 0 and "8 of 8 prompts have a reference; a right answer is given a full score" in said
    # In the recipe's own frame: the reward looks into the tag that the format asks for.
    code, said = audit(good, capsys, "rewards={numeric: {tag: answer}, format: {tags: [answer]}}")
    assert code == 0 and "is given a full score by every reward" in said
    code, said = audit([*good, {"prompt": "9 + 1", "answer": "ten"}, {"prompt": "0 + 1", "answer": "1.0"}], capsys)
    assert (
        code == 0
        and "`numeric` gives no full score to the reference itself in 1 of 10 rows, such as rows.jsonl:9" in said
    )
    assert "1 prompt is that of other rows, too" in said and "several numbers" not in said
    result = [{"prompt": f"{n} / 3", "answer": f"\\frac{{{n}}}{{3}}"} for n in range(7)]
    code, said = audit([*result, {"prompt": "2 + 2", "answer": "2 + 2 is 4.\n#### 4"}], capsys)
    assert code == 0 and "7 of 8 references hold several numbers" in said
    code, said = audit(good, capsys, "rewards={regex: {pattern: 'Answer: (?P<answer>.*)'}}")
    assert code != 0 and "the reward `regex` gives no full score to the reference itself in 8 of 8 rows" in said
    code, said = audit([{"prompt": row["prompt"]} for row in good], capsys)
    assert code != 0 and "8 of 8 rows have no reference, and no answer to them can be right" in said
    code, said = audit([*good, {"prompt": "1 + " * 40, "answer": "40"}], capsys)
    assert code != 0 and "leaves 48 tokens to a prompt" in said
    # A prompt is never cut.
    assert "or set `data.over_long` to drop" in said and "truncate" not in said
