"""Pairs of answers in the forms of TRL, LLaMA-Factory, Axolotl, OpenAI and their data sets: what follows the prompt
they share is trained, or the row is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fixtures import chatml_tokenizer, plain_tokenizer, recipe
from harness import write_jsonl

from toolkit.common import UserError
from toolkit.data.auditing.audit import in_sentences
from toolkit.data.batching.answer_batches import AnswerCollator
from toolkit.data.batching.collate import Collator
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task, is_empty
from toolkit.data.prepare import answer_lengths, prepare
from toolkit.data.preview import show
from toolkit.data.rows import IGNORE, Preference, from_json, to_json
from toolkit.recipe.data import Source

STOP = "<|im_end|>"


def pair(row: dict[str, Any], template: bool = True, **settings: Any) -> Preference:
    """A row in its normal form, by way of the file that it is kept in."""
    row_format = recognise([row], Source(path="d", **settings), Task("dpo", "auto", template))
    converted = from_json(to_json(row_format.convert(row, "d:1")))
    assert isinstance(converted, Preference)
    return converted


def sides(row: dict[str, Any], template: bool = True, **settings: Any) -> list[tuple[str, str]] | str:
    """Of both answers what comes before them and what is trained, as text; or the refusal."""
    tokenizer = chatml_tokenizer() if template else plain_tokenizer()
    encoder, found = Encoder(tokenizer, "auto", frozenset({2})), []
    try:
        converted = pair(row, template, **settings)
        for side in (converted.chosen, converted.rejected):
            encoded = encoder(side)
            trained = [label for label in encoded.labels if label != IGNORE]
            first = next(n for n, label in enumerate(encoded.labels) if label != IGNORE)
            found.append((tokenizer.decode(encoded.input_ids[:first]), tokenizer.decode(trained)))
    except UserError as error:
        assert error.change
        return f"{error.what}\n{error.change}"
    return found


def says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


ASK, GOOD, BAD = says("user", "Is it late?"), says("assistant", "Not yet."), says("assistant", "Yes.")
SYSTEM = says("system", "Be brief.")
EARLIER = [says("user", "Hello"), says("assistant", "Hi.")]


def written(*messages: dict[str, str]) -> str:
    """What the template makes of messages, and of the beginning of an answer."""
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
    return f"{turns}<|im_start|>assistant\n"


def both(*prompt: dict[str, str]) -> list[tuple[str, str]]:
    return [(written(*prompt), f"Not yet.{STOP}"), (written(*prompt), f"Yes.{STOP}")]


CHATS: dict[str, Any] = {
    "TRL, conversational": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, [ASK]),
    "TRL, implicit prompt (trl-lib/ultrafeedback_binarized)": (
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score_chosen": 8.0, "score_rejected": 2.0},
        [ASK],
    ),
    "several turns": ({"chosen": [*EARLIER, ASK, GOOD], "rejected": [*EARLIER, ASK, BAD]}, [*EARLIER, ASK]),
    "HuggingFaceH4/ultrafeedback_binarized, Axolotl's ultra and zephyr": (
        {
            **{"prompt": "Is it late?", "prompt_id": "1", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            **{"messages": [ASK, GOOD], "score_chosen": 8.0, "score_rejected": 2.0},
        },
        [ASK],
    ),
    "a system message before the prompt": (
        {"prompt": "Is it late?", "chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]},
        [SYSTEM, ASK],
    ),
    "LLaMA-Factory's dpo_en_demo": (
        {
            "conversations": [turn("human", "Is it late?")],
            "chosen": turn("gpt", "Not yet."),
            "rejected": turn("gpt", "Yes."),
        },
        [ASK],
    ),
    "the same with a system prompt": (
        {
            **{"system": "Be brief.", "conversations": [turn("human", "Is it late?")]},
            **{"chosen": turn("gpt", "Not yet."), "rejected": turn("gpt", "Yes.")},
        },
        [SYSTEM, ASK],
    ),
    "LLaMA-Factory's alpaca form": (
        {"instruction": "Is it late?", "input": "", "chosen": "Not yet.", "rejected": "Yes."},
        [ASK],
    ),
    "the same with an input and history": (
        {
            **{"instruction": "Is it", "input": "late?", "history": [["Hello", "Hi."]]},
            **{"chosen": "Not yet.", "rejected": "Yes."},
        },
        [*EARLIER, says("user", "Is it\n\nlate?")],
    ),
    "LLaMA-Factory's v1_dpo_demo": ({"chosen_messages": [ASK, GOOD], "rejected_messages": [ASK, BAD]}, [ASK]),
    "Axolotl's chatml.argilla": (
        {"instruction": "Is it late?", "chosen_response": "Not yet.", "rejected_response": "Yes."},
        [ASK],
    ),
    "Axolotl's chatml.intel": (
        {"system": "Be brief.", "question": "Is it late?", "chosen": "Not yet.", "rejected": "Yes."},
        [SYSTEM, ASK],
    ),
    "Axolotl's chatml.icr": ({"input": "Is it late?", "chosen": "Not yet.", "rejected": "Yes."}, [ASK]),
    "Axolotl's chat_template": ({"messages": [ASK], "chosen": GOOD, "rejected": BAD}, [ASK]),
    "OpenAI": (
        {
            **{"input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True}},
            **{"preferred_output": [GOOD], "non_preferred_output": [BAD]},
        },
        [ASK],
    ),
    "Anthropic/hh-rlhf": (
        {
            "chosen": "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: Is it late?\n\nAssistant: Not yet.",
            "rejected": "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: Is it late?\n\nAssistant: Yes.",
        },
        [*EARLIER, ASK],
    ),
    "a prompt as text with answers as messages": (
        {"prompt": "Is it late?", "chosen": [GOOD], "rejected": [BAD]},
        [ASK],
    ),
    "messages with answers as texts": ({"messages": [ASK], "chosen": "Not yet.", "rejected": "Yes."}, [ASK]),
}


@pytest.mark.parametrize("name", CHATS)
def test_both_answers_of_a_published_form_follow_its_prompt(name: str) -> None:
    row, prompt = CHATS[name]
    assert sides(row) == both(*prompt)


def test_what_is_the_same_in_both_conversations_is_not_trained() -> None:
    retry = [says("user", "Sure?"), GOOD]
    longer = pair({"chosen": [ASK, BAD, *retry], "rejected": [ASK, BAD, *retry[:1], BAD]})
    assert [message.get("train") for message in longer.chosen.messages] == [False, False, False, None]
    # From where they part on, all answers are.
    parted = pair({"chosen": [ASK, GOOD, *retry], "rejected": [ASK, BAD, *retry]})
    assert [message.get("train") for message in parted.rejected.messages] == [False, None, None, None]
    equal = pair({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]})
    assert [message.get("train") for message in equal.chosen.messages] == [False, None]


PLAIN: dict[str, Any] = {
    "TRL": ({"prompt": "Night", "chosen": " fell.", "rejected": " rose."}, "Night", " fell.", " rose."),
    "TRL, implicit prompt": ({"chosen": "Night fell.", "rejected": "Night rose."}, "Night", " fell.", " rose."),
    "in capitals": ({"Prompt": "Night", "Chosen": " fell.", "Rejected": " rose."}, "Night", " fell.", " rose."),
    "a shared beginning of the answers": (
        {"chosen": "\n\nHuman: Late?\n\nAssistant: It is not.", "rejected": "\n\nHuman: Late?\n\nAssistant: It is."},
        *("\n\nHuman: Late?\n\nAssistant:", " It is not.", " It is."),
    ),
    "a prompt that both repeat": (
        {
            "prompt": "\n\nHuman: Late?\n\nAssistant:",
            "chosen": "\n\nHuman: Late?\n\nAssistant: No.",
            "rejected": "\n\nHuman: Late?\n\nAssistant: Yes.",
        },
        *("\n\nHuman: Late?\n\nAssistant:", " No.", " Yes."),
    ),
    "lines": ({"chosen": "Q: 1\nA: 2", "rejected": "Q: 1\nB: 2"}, "Q: 1\n", "A: 2", "B: 2"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_texts_follow_what_they_share(name: str) -> None:
    row, prompt, chosen, rejected = PLAIN[name]
    assert sides(row, template=False) == [(prompt, f"{chosen}<|endoftext|>"), (prompt, f"{rejected}<|endoftext|>")]


REFUSED: dict[str, Any] = {
    "answers alone": ({"chosen": [GOOD], "rejected": [BAD]}, "nothing says what was asked"),
    "an answer and a conversation": ({"chosen": [ASK, GOOD], "rejected": [BAD]}, "the other an answer"),
    "another prompt beside": (
        {"prompt": "Is it early?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        "`prompt` is not what the conversations",
    ),
    "two prompts": (
        {"prompt": "Is it late?", "instruction": "Answer.", "chosen": "Not yet.", "rejected": "Yes."},
        "`prompt` and `instruction` all say what was asked",
    ),
    "a number": ({"prompt": "p", "chosen": 1, "rejected": 2}, "`chosen` is neither a text nor messages"),
    "no pairs": ({"messages": [ASK, GOOD]}, "has no column `chosen`"),
    "a system prompt of texts": (
        {"system": "S", "prompt": "p", "chosen": "a", "rejected": "b"},
        "data.columns={instruction: prompt}",
    ),
    "a prompt by a name that is not published": (
        {"problem": "p", "chosen": "a", "rejected": "b"},
        "data.columns={instruction: problem}",
    ),
    "an input beside messages": (
        {"prompt": [ASK], "input": "now", "chosen": [GOOD], "rejected": [BAD]},
        "`input` stands beside answers that are messages",
    ),
    "pictures": ({"prompt": "p", "chosen": "a", "rejected": "b", "images": ["1.jpg"]}, "`images` is pictures"),
    "answers that repeat a text that was asked": (
        {"prompt": "Is it late?", "chosen": "Is it late? Not yet.", "rejected": "Is it late? Yes."},
        "would be said twice",
    ),
    "answers that repeat an instruction": (
        {"question": "Is it late?", "chosen": "Is it late? Not yet.", "rejected": "Is it late? Yes."},
        "data.ignore=[question]",
    ),
    "dialogues beside another prompt": (
        {
            "prompt": "Is it early?",
            "chosen": "\n\nHuman: Is it late?\n\nAssistant: No.",
            "rejected": "\n\nHuman: Is it late?\n\nAssistant: Yes.",
        },
        "`prompt` is not what the conversations",
    ),
    "answers of which another column says which is better": (
        {"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": 0},
        "`better_response_id` seems to say in each row",
    ),
    "answers that are judged one by one": (
        {"prompt": "p", "completion": "a", "label": True},
        "which it judges, set objective=kto",
    ),
    "conversations as Python prints them": (
        {"chosen": "[{'role': 'user', 'content': 'a'}]", "rejected": "[{'content': 'a', 'role': 'user'}]"},
        "would be trained as the plain text",
    ),
    "several answers": ({"prompt": "p", "answers": ["a", "b"]}, "several answers to each prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    row, said = REFUSED[name]
    result = sides(row)
    assert isinstance(result, str) and said in result


def test_a_better_answer_that_changes_its_column_is_not_mapped() -> None:
    row = {"prompt": [ASK], "a": "Not yet.", "b": "Yes.", "winner": "model_a"}
    named = {"chosen": "a", "rejected": "b"}
    assert "`winner` seems to say in each row" in str(sides(row, columns=named))
    assert sides(row, columns=named, ignore=["winner"]) == both(ASK)
    # Where the answers have their own names it says nothing new.
    assert sides({"prompt": [ASK], "chosen": "Not yet.", "rejected": "Yes.", "winner": "model_a"}) == both(ASK)


@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [
        ("answer_0", "answer_1", ["score_0", "score_1"]),
        ("response_a", "response_b", ["winner_model_a", "winner_model_b"]),
        ("a", "a_2", ["score", "score_2"]),
    ],
)
def test_answers_whose_scores_say_which_is_better_are_not_mapped(first: str, second: str, scores: list[str]) -> None:
    """WebGPT's and Chatbot Arena's, of which half of the pairs were learnt the wrong way round."""
    asked = {"prompt": "Is it late?", first: "4", second: "5"}
    rows = [asked | dict(zip(scores, pair, strict=True)) for pair in ((1.0, 0.0), ("0", "1"))]
    named = {"chosen": first, "rejected": second}

    def read(rows: list[dict[str, Any]], **settings: Any) -> str:
        return recognise(rows, Source(path="d", columns=named, **settings), Task("dpo", "auto", True)).name

    with pytest.raises(UserError, match=f"by `{scores[0]}` and `{scores[1]}` now `{first}`") as refused:
        read(rows)
    assert f"data.ignore=[{', '.join(scores)}]" in refused.value.change
    assert read(rows[:1]) == read(rows, ignore=scores) == "preference"


def test_a_count_beside_pairs_is_no_conversation() -> None:
    """Nectar's `turns: 2` was to be mapped as messages."""
    row = {"prompt": [ASK], "chosen": "Not yet.", "rejected": "Yes."}
    assert sides(row | {"turns": 2}) == both(ASK)
    assert "looks like `messages`" in str(sides(row | {"turns": [ASK]}))


def test_an_answer_may_begin_as_its_prompt_does() -> None:
    rows = [{"prompt": "Hello, my friend", "chosen": "Hello, my friend!", "rejected": "Bye."}]
    rows.append({"prompt": "Hi", "chosen": "Hi there", "rejected": "Hi!"})
    for each in ([rows[0]], [rows[1]], rows):
        assert recognise(each, Source(path="d"), Task("dpo", "auto", True)).name == "preference"


def test_the_audit_counts_pairs_whose_scores_say_the_opposite(tmp_path: Path) -> None:
    scores = [(8, 6), (5, 5), (2, 7), ("1.5", "9"), (None, 3)]
    rows = [
        answered(f"{n}", "Not yet.", "Yes.") | {"score_chosen": a, "score_rejected": b}
        for n, (a, b) in enumerate(scores)
    ]
    audit = prepared(tmp_path, rows).audit
    assert audit.sources[0].worse == {"score_chosen": 2}
    assert any("in 2 of the 5 rows" in problem.what for problem in audit.problems)


def test_columns_are_named_and_left_out_as_of_other_formats() -> None:
    row = {"q": "Is it late?", "good": "Not yet.", "bad": "Yes.", "prompt": "other"}
    named = {"instruction": "q", "chosen": "good", "rejected": "bad"}
    assert sides(row, columns=named, ignore=["prompt"]) == both(ASK)
    assert "does not fit `objective: dpo`" in str(sides({"text": "t"}, format="text"))
    with pytest.raises(UserError, match="preference pairs") as caught:
        recognise([{"chosen": "a", "rejected": "b"}], Source(path="d", format="preference"), Task("sft", "auto", True))
    assert "objective=dpo" in caught.value.change


def test_a_margin_of_each_pair_is_not_left_unused() -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}
    with pytest.raises(UserError, match="`margin` is by how much each pair differs"):
        recognise([row], Source(path="d"), Task("reward", "auto", True))
    assert recognise([row], Source(path="d", ignore=["margin"]), Task("reward", "auto", True)).name == "preference"


@pytest.mark.parametrize("rest", [{"prompt": None}, {"prompt": []}, {}])
def test_a_pair_that_lacks_the_prompt_that_others_have_is_empty(rest: dict[str, Any]) -> None:
    task = Task("dpo", "auto", True)
    for answers in ({"chosen": "It is not.", "rejected": "It is."}, {"chosen": [GOOD], "rejected": [BAD]}):
        rows = [{"prompt": "Late?", **answers}, {**rest, **answers}]
        found = recognise(rows, Source(path="d"), task)
        assert [is_empty(found.convert(row, "d"), task) for row in rows] == [False, True]
    # Whole conversations need none.
    whole = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert not is_empty(
        recognise([{"prompt": "Is it late?", **whole}], Source(path="d"), task).convert(whole, "d"), task
    )


def test_a_pair_that_lacks_an_answer_is_empty() -> None:
    task = Task("dpo", "auto", True)
    assert not is_empty(pair({"prompt": "p", "chosen": "a", "rejected": "b"}), task)
    assert is_empty(pair({"prompt": "p", "chosen": "a", "rejected": " "}), task)
    assert is_empty(pair({"prompt": [ASK], "chosen": [], "rejected": [BAD]}), task)


@pytest.mark.parametrize("asked", ["prompt", "instruction"])
def test_an_answer_may_be_an_empty_list(asked: str) -> None:
    found = sides({asked: "Extract.", "chosen": "[]", "rejected": "null"})
    assert [answer for _, answer in found] == [f"[]{STOP}", f"null{STOP}"]
    of_messages = pair({"prompt": [ASK], "chosen": "[]", "rejected": "null"})
    assert [side.messages[-1]["content"] for side in (of_messages.chosen, of_messages.rejected)] == ["[]", "null"]
    assert is_empty(pair({"prompt": [ASK], "chosen": [GOOD], "rejected": "[]"}), Task("dpo", "auto", True))


def prepared(tmp_path: Path, rows: list[dict[str, Any]], seq_len: int = 64, **data: Any) -> Any:
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    given = recipe(path, seq_len=seq_len, objective="dpo", shuffle=False, **data)
    return prepare(given, chatml_tokenizer(), frozenset({2}), tmp_path / "cache")


def answered(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"instruction": prompt, "chosen": chosen, "rejected": rejected}


def test_a_pair_is_two_documents_of_one_row_and_counts_as_such(tmp_path: Path) -> None:
    rows = [answered("Late?", "Not yet.", "Yes, it is very late."), answered("Early?", "No.", "Yes.")]
    found = prepared(tmp_path, rows)
    assert found.train.column_names == ["input_ids", "labels", "seq_lengths"]
    tokenizer, lengths = chatml_tokenizer(), answer_lengths(found.train)
    for row, pair_lengths in zip(found.train, lengths.tolist(), strict=True):
        assert sum(pair_lengths) == len(row["input_ids"]) and row["labels"][pair_lengths[0]] == IGNORE
    first = found.train[0]
    chosen = tokenizer.decode(first["input_ids"][: lengths[0, 0]])
    assert chosen.endswith("Not yet.<|im_end|>\n") and "Yes" not in chosen
    counted = found.statistics
    assert counted.rows == 2 and counted.documents == 4 and counted.tokens == lengths.sum()
    # A batch is padded to the longer answer.
    assert counted.quantiles[-1] == lengths.max() and counted.squared_tokens == (lengths**2).sum()
    assert found.samples[0].prompt == "Late?" and found.samples[0].reference == "Not yet."
    text = show(found, tokenizer, 1, color=False)
    assert "the chosen answer" in text and "the rejected answer" in text and "«Not yet.<|im_end|>»" in text


def test_a_prompt_that_runs_into_both_answers_is_the_same_one(tmp_path: Path) -> None:
    found = prepared(tmp_path, [{"prompt": "The quick bro", "chosen": "wn fox", "rejected": "ken"}])
    assert found.audit.train.boundary_merged_rows == 1 and found.audit.train.pairs.apart == 0


def test_the_audit_says_whether_pairs_can_teach_a_preference(tmp_path: Path) -> None:
    rows = [
        answered("One", "A long answer of many words, and more of them.", "Short."),
        answered("Two", "Another long answer of very many words indeed.", "No."),
        answered("Three", "The same.", "The same."),
        {"chosen": [says("user", "Four"), GOOD], "rejected": [says("user", "Five"), BAD]},
        answered("Six", "", "Nothing."),
    ]
    audit = prepared(tmp_path, rows).audit
    pairs = audit.train.pairs
    assert audit.train.rows == 3 and (pairs.equal, pairs.apart, pairs.longer_chosen) == (1, 1, 3)
    assert audit.untrained_rows == 1  # Of which one side is empty.
    said = " ".join(f"{problem.what} {problem.change}" for problem in audit.problems)
    for part in ("1 pair both answers are the same", "1 pair the two answers follow different", "times as long"):
        assert part in said
    assert "the chosen one is longer in 100% of the pairs" in " ".join(in_sentences(audit))
    with pytest.raises(UserError, match=r"no usable row: .*, both answers of 2 are the same"):
        prepared(tmp_path, [answered(prompt, "The same.", "The same.") for prompt in ("One", "Two")])


def test_answers_are_cut_by_themselves_and_a_pair_that_loses_one_is_left_out(tmp_path: Path) -> None:
    long = "word " * 60
    rows = [answered("a", "Not yet.", long), answered(long, "Not yet.", "Yes."), answered("b", "Not yet.", "Yes.")]
    cut = prepared(tmp_path, rows, over_long="truncate")
    # Of the second the prompt fills all; the first keeps the beginning of its rejected answer.
    assert len(cut.train) == 2 and answer_lengths(cut.train).max() == 64
    assert cut.audit.train.over_long.rows == 2
    dropped = prepared(tmp_path, rows, over_long="drop")
    assert len(dropped.train) == 1 and dropped.audit.train.untrained_rows == 0
    with pytest.raises(UserError, match="longer than"):
        prepared(tmp_path, rows)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_a_batch_holds_both_answers_of_each_pair_in_order(layout: Any) -> None:
    pairs = [
        {"input_ids": [5, 6, 7, 5, 8], "labels": [IGNORE, 6, 7, IGNORE, 8], "seq_lengths": [3, 2], "row": 9},
        {"input_ids": [1, 2, 3, 4], "labels": [IGNORE, 2, IGNORE, 4], "seq_lengths": [2, 2], "row": 4},
    ]
    collator = AnswerCollator(Collator(0, layout))
    batch = collator(pairs)
    assert batch["rows"].tolist() == [9, 4] and batch["answer_tokens"] == [2, 1, 1, 1]
    trained = batch["labels"].flatten().roll(-1)[batch["label_positions"]]
    assert trained[: sum(batch["answer_tokens"])].tolist() == [6, 7, 8, 2, 4]
    if layout == "padded":
        assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 8, 0], [1, 2, 0], [3, 4, 0]]
        assert collator.width(np.array([[3, 2], [2, 2]])).tolist() == [[3, 3], [2, 2]]
    else:
        assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 9]
        assert collator.width(np.array([[3, 2], [2, 2]])).tolist() == [[5], [4]]
