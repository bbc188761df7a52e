"""Answers judged one by one, in the forms of TRL, LLaMA-Factory and others: what follows the prompt is trained, or the
row is refused; and the answers that rows lend each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_fixtures import chatml_tokenizer, plain_tokenizer, recipe
from harness import write_jsonl

from toolkit.common import UserError
from toolkit.data.auditing.audit import in_sentences
from toolkit.data.auditing.problems import check_weights
from toolkit.data.batching.answer_batches import JudgedCollator
from toolkit.data.batching.collate import Collator
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.prepare import prepare
from toolkit.data.preview import show
from toolkit.data.rows import IGNORE, Judged, from_json, to_json
from toolkit.recipe.data import Source

STOP = "<|im_end|>"


def says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ASK, GOOD = says("user", "Is it late?"), says("assistant", "Not yet.")
EARLIER = [says("user", "Hello"), says("assistant", "Hi.")]


def judged(row: dict[str, Any], template: bool = True, **settings: Any) -> Judged:
    """A row in its normal form, by way of the file that it is kept in."""
    row_format = recognise([row], Source(path="d", **settings), Task("kto", "auto", template))
    converted = from_json(to_json(row_format.convert(row, "d:1")))
    assert isinstance(converted, Judged)
    return converted


def trained(row: dict[str, Any], template: bool = True, **settings: Any) -> tuple[bool, str, str] | str:
    """Whether the answer is good, what comes before it and what is trained, as text; or the refusal."""
    tokenizer = chatml_tokenizer() if template else plain_tokenizer()
    try:
        converted = judged(row, template, **settings)
        encoded = Encoder(tokenizer, "auto", frozenset({2}))(converted.answer)
    except UserError as error:
        assert error.change
        return f"{error.what}\n{error.change}"
    first = next(n for n, label in enumerate(encoded.labels) if label != IGNORE)
    labels = [label for label in encoded.labels if label != IGNORE]
    return converted.desirable, tokenizer.decode(encoded.input_ids[:first]), tokenizer.decode(labels)


def written(*messages: dict[str, str]) -> str:
    """What the template makes of messages, and of the beginning of an answer."""
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return f"{turns}<|im_start|>assistant\n"


CHATS: dict[str, Any] = {
    "TRL, conversational": ({"prompt": [ASK], "completion": [GOOD], "label": True}, True, [ASK]),
    "LLaMA-Factory's kto_en_demo": ({"messages": [*EARLIER, ASK, GOOD], "label": False}, False, [*EARLIER, ASK]),
    "LLaMA-Factory's alpaca form": (
        {"instruction": "Is it", "input": "late?", "output": "Not yet.", "kto_tag": "true"},
        True,
        [says("user", "Is it\n\nlate?")],
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "Is it late?"}, {"from": "gpt", "value": "Not yet."}],
            "Label": 0,
        },
        False,
        [ASK],
    ),
    "an earlier answer that is marked as trained": (
        {"messages": [EARLIER[0], EARLIER[1] | {"train": True}, ASK, GOOD], "label": "good"},
        True,
        [*EARLIER, ASK],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_what_follows_the_last_message_of_the_user_is_judged(name: str) -> None:
    row, good, prompt = CHATS[name]
    assert trained(row) == (good, written(*prompt), f"Not yet.{STOP}")


def test_texts_are_judged_as_they_stand() -> None:
    row = {"prompt": "Night", "completion": " fell.", "label": -1}
    assert trained(row, template=False) == (False, "Night", " fell.<|endoftext|>")


def test_columns_are_named_and_left_out_as_of_other_formats() -> None:
    row = {"question": "Is it late?", "reply": "Not yet.", "thumbs_up": True, "label": "time"}
    named = {"instruction": "question", "output": "reply", "label": "thumbs_up"}
    assert trained(row, columns=named, ignore=["label"]) == (True, written(ASK), f"Not yet.{STOP}")


REFUSED: dict[str, Any] = {
    "no verdict": ({"prompt": "p", "completion": "c"}, "no column says whether an answer is good"),
    "a verdict by another name": (
        {"prompt": "p", "completion": "c", "thumbs_up": True},
        "data.columns={label: thumbs_up}",
    ),
    "two verdicts": ({"prompt": "p", "completion": "c", "label": True, "kto_tag": True}, "`label` and `kto_tag` both"),
    "neither good nor bad": ({"prompt": "p", "completion": "c", "label": "so so"}, "`label` says neither good nor bad"),
    "an empty one": ({"prompt": "p", "completion": "c", "label": None}, "`label` says neither good nor bad"),
    "texts without an answer": ({"text": "Night fell.", "label": True}, "does not fit `objective: kto`"),
    "pairs": ({"prompt": "p", "chosen": "a", "rejected": "b", "label": True}, "preference pairs"),
    "pairs without a verdict": (
        {"prompt": "p", "chosen_response": "a", "rejected_response": "b"},
        "`chosen_response` and `rejected_response` are pairs of answers",
    ),
    "a second judgement": ({"prompt": "p", "completion": "c", "label": True, "rating": 0}, "`rating` is whether"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    row, said = REFUSED[name]
    result = trained(row)
    assert isinstance(result, str) and said in result


def test_other_objectives_are_told_of_this_one() -> None:
    row = {"prompt": "p", "completion": "c", "label": True}
    with pytest.raises(UserError, match="whether the answer is good") as caught:
        recognise([row], Source(path="d"), Task("sft", "auto", True)).convert(row, "d:1")
    assert "objective=kto" in caught.value.change


def test_a_row_without_an_answer_is_empty() -> None:
    task = Task("kto", "auto", True)
    assert not is_empty(judged({"messages": [ASK, GOOD], "label": True}), task)
    assert is_empty(judged({"messages": [*EARLIER, ASK], "label": True}), task)
    assert is_empty(judged({"prompt": "p", "completion": " ", "label": True}), task)


def prepared(tmp_path: Path, rows: list[dict[str, Any]], seq_len: int = 64, **data: Any) -> Any:
    path = write_jsonl(tmp_path / "judged.jsonl", rows)
    given = recipe(path, seq_len=seq_len, objective="kto", shuffle=False, **data)
    return prepare(given, chatml_tokenizer(), frozenset({2}), tmp_path / "cache")


def answered(prompt: str, answer: str, good: bool) -> dict[str, Any]:
    return {"instruction": prompt, "output": answer, "label": good}


ROWS = [
    answered(f"Say {word}.", f"{word} is {n}.", n % 3 == 0) for n, word in enumerate(("ab", "cd", "ef", "gh", "ij"))
]


def test_each_row_has_its_prompt_with_the_answer_of_another_one_and_lends_its_own_once(tmp_path: Path) -> None:
    found = prepared(tmp_path, ROWS)
    assert found.train.column_names == ["input_ids", "labels", "desirable", "seq_lengths"]
    assert found.train["desirable"][:] == [True, False, False, True, False]
    tokenizer, own, others = chatml_tokenizer(), [], []
    for row in found.train:
        first, second = row["seq_lengths"]
        assert first + second == len(row["input_ids"]) == len(row["labels"])
        answers = []
        for part in (slice(first), slice(first, None)):
            ids, labels = row["input_ids"][part], row["labels"][part]
            begins = next(n for n, label in enumerate(labels) if label != IGNORE)
            answers.append((tokenizer.decode(ids[:begins]), tokenizer.decode([n for n in labels if n != IGNORE])))
        assert answers[0][0] == answers[1][0] and answers[0][1] != answers[1][1]
        own.append(answers[0][1])
        others.append(answers[1][1])
    assert sorted(own) == sorted(others)
    # They do not come from the row before, which is often one of the same prompt.
    assert others != [own[-1], *own[:-1]]
    counted = found.statistics
    assert counted.rows == counted.documents == 5
    assert counted.tokens == found.audit.train.tokens == sum(row["seq_lengths"][0] for row in found.train)
    text = show(found, tokenizer, 2, color=False)
    assert "with a good answer" in text and "with a bad answer" in text and text.count("«") == 2


def test_a_borrowed_answer_is_cut_where_rows_are(tmp_path: Path) -> None:
    rows = [answered("word " * 8, "Yes.", True), answered("Count.", "one two three " * 12, False)]
    found = prepared(tmp_path, rows, over_long="truncate", seq_len=64)
    assert max(length for row in found.train for length in row["seq_lengths"]) == 64
    for row in found.train:
        first, second = row["seq_lengths"]
        assert row["labels"][first] == IGNORE and any(label != IGNORE for label in row["labels"][first:])
        assert len(row["labels"]) == first + second


def test_the_audit_says_how_many_answers_are_good_and_how_to_weigh_them(tmp_path: Path) -> None:
    audit = prepared(tmp_path, ROWS).audit
    assert audit.train.verdicts.desirable == 2
    assert "40% of the answers are good" in " ".join(in_sentences(audit))

    def warned(desirable: float, undesirable: float) -> list[str]:
        return [problem.what + problem.change for problem in check_weights(audit, desirable, undesirable).problems]

    assert warned(1.0, 1.0) == [] == warned(1.5, 1.0)
    (problem,) = warned(1.0, 3.0)
    assert "bad answers count 4.5 times as much" in problem and "preference.desirable_weight: 4.5" in problem
    (problem,) = warned(4.0, 1.0)
    assert "good answers count 2.7 times as much" in problem and "preference.undesirable_weight: 2.7" in problem


def test_one_kind_of_answers_is_warned_of(tmp_path: Path) -> None:
    audit = prepared(tmp_path, [row | {"label": True} for row in ROWS]).audit
    (problem,) = check_weights(audit, 1.0, 1.0).problems
    assert "all answers are good" in problem.what and "objective: sft" in problem.change


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_a_batch_holds_answers_and_apart_from_them_those_of_other_rows(layout: Any) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 5, 8], "labels": [IGNORE, 6, 7, IGNORE, 8], "seq_lengths": [3, 2]},
        {"input_ids": [1, 2, 3, 4], "labels": [IGNORE, 2, IGNORE, 4], "seq_lengths": [2, 2]},
    ]
    numbered = [row | {"row": number, "desirable": number == 4} for row, number in zip(rows, (9, 4), strict=True)]
    batch = JudgedCollator(Collator(0, layout))(numbered)
    assert batch["rows"].tolist() == [9, 4] and batch["desirable"].tolist() == [False, True]
    for part, wanted in ((batch, [6, 7, 2]), (batch["others"], [8, 4])):
        labels = part["labels"].flatten().roll(-1)[part["label_positions"]]
        assert labels[: sum(part["answer_tokens"])].tolist() == wanted
    assert (batch["answer_tokens"], batch["others"]["answer_tokens"]) == ([2, 1], [1, 1])
    if layout == "padded":
        assert batch["input_ids"].tolist() == [[5, 6, 7], [1, 2, 0]]
        assert batch["others"]["input_ids"].tolist() == [[5, 8], [3, 4]]
