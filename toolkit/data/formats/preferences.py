"""Pairs of answers to one prompt, a chosen and a rejected one, as TRL, LLaMA-Factory, Axolotl and OpenAI write them:
beside the prompt, or as two whole conversations or texts that begin alike.

What both sides share is the prompt, and only what follows it is trained. Unlike the columns of other formats, those of
pairs are recognised under all published names: `chosen_response` beside `rejected_response` can mean nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toolkit.common import UserError
from toolkit.data.formats.columns import EMPTY, NOTHING, PAIRS_CALLED, by_lower_case, number, parsed, value_at, verdict
from toolkit.data.formats.messages import Message, are_messages, holds_messages
from toolkit.data.rows import Chat, Completion, Preference

_ASKED = ("messages", "conversations", "prompt", "instruction")
"""Columns that hold what was asked."""
_QUESTIONS = ("question", "query", "input")
"""What some data sets call a text that was asked."""
_WHICH = (
    *("better_response_id", "safer_response_id", "winner", "preference", "overall_preference", "preference_strength"),
    *("label", "labels"),
)
"""Columns that say row by row which of two answers is the better one: PKU's, Chatbot Arena's, HelpSteer's, SHP's."""
_TELLING = 10
"""Characters of a prompt with which no two answers begin by chance."""
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
_TURN = re.compile(r"\n\n(Human|Assistant):")
"""How a turn begins in Anthropic's hh-rlhf, whose conversations are texts."""

Side = Chat | Completion
_NOTHING = Preference(Completion("", ""), Completion("", ""))
"""A pair that is left out as an empty row."""


def preference_columns(columns: Mapping[str, str], row: Mapping[str, Any], source: str) -> dict[str, str]:
    """The columns of a source of pairs, those included that are published under other names.

    Args:
        columns: Those that `data.columns` names.
        row: The first row, without what is ignored.
        source: Path of the source.

    Raises:
        UserError: Which answer is the better one is another one in each row.
    """
    found = dict(columns)
    spelt = by_lower_case(name for name in row if name not in columns.values())
    if not {"chosen", "rejected"} & columns.keys():
        for chosen, rejected in PAIRS_CALLED:
            if chosen in spelt and rejected in spelt:
                found |= {"chosen": spelt[chosen], "rejected": spelt[rejected]}
                break
    if {"chosen", "rejected"} & columns.keys() or "chosen" not in found:
        _refuse_which(row, spelt, source)
    if not set(_ASKED) & columns.keys():
        if present := [name for name in _ASKED if name in spelt]:
            found |= {name: spelt[name] for name in present}
        elif are_messages(value_at(row, "input.messages")):
            found |= {"messages": "input.messages", "tools": "input.tools"}
        elif question := next((spelt[name] for name in _QUESTIONS if name in spelt), None):
            found["instruction"] = question
    return {name: actual for name, actual in found.items() if name in columns or name != actual}


def says_what_was_asked(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], ignored: Collection[str]
) -> bool:
    """Whether a column beside the answers says in the first rows what was asked."""
    places = {columns.get(name, name) for name in _ASKED} - {*ignored}
    return any(parsed(value_at(row, place)) not in EMPTY for row in rows for place in places)


def _refuse_which(row: Mapping[str, Any], spelt: Mapping[str, str], source: str) -> None:
    """Refuses rows whose better answer stands now in one column, now in another."""
    if which := next((spelt[name] for name in _WHICH if name in spelt and row[spelt[name]] not in EMPTY), None):
        # Beside a single answer it says whether that is good.
        judges = which.lower() == "label" and verdict(row[which]) is not None
        raise UserError(
            f"data source `{source}`: `{which}` seems to say in each row which of its answers is the better one",
            "write that one into `chosen` of the row and the other into `rejected`, or, if `data.columns` names them "
            f"for every row, set 'data.ignore=[{which}]'"
            + "; if rows have one answer each, which it judges, set objective=kto"
            * judges,
        )


def refuse_worse_chosen(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], ignored: Collection[str], source: str
) -> None:
    """Refuses answers that the recipe names for every row, if by numbers in columns that are named like them
    (`answer_0` and `score_0`, `response_a` and `winner_model_a`) now the one and now the other is better.

    Raises:
        UserError: They are, in the first rows.
    """
    if not {"chosen", "rejected"} <= columns.keys():
        return
    names = columns["chosen"], columns["rejected"]
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*names, strict=False)))
    better, worse = (name[alike:] for name in names)
    rows = list(rows)
    for name in dict.fromkeys(name for row in rows for name in row if name.endswith(better)):
        other = name.removesuffix(better) + worse
        if name == columns["chosen"] or {name, other} & {*ignored}:
            continue
        scores = [(number(row.get(name)), number(row.get(other))) for row in rows]
        if any(left < right for left, right in scores) and any(left > right for left, right in scores):
            raise UserError(
                f"data source `{source}`: by `{name}` and `{other}` now `{columns['chosen']}` seems to be the better "
                f"answer, now `{columns['rejected']}`",
                "write the better one into `chosen` of each row and the other into `rejected`, or, if these columns "
                f"say nothing of that, set 'data.ignore=[{name}, {other}]'",
            )


def refuse_repeated_prompts(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], source: str) -> None:
    """Refuses answers that begin with their prompt, which then would be said twice: texts, all of the first rows.

    Args:
        rows: The first ones.
        columns: What the data calls columns of this format.
        source: Path of the source.

    Raises:
        UserError: They do.
    """
    rows = list(rows)
    for name in ("prompt", "instruction"):
        asked, *answers = (columns.get(each, each) for each in (name, "chosen", "rejected"))
        texts = [[value_at(row, each) for each in (asked, *answers)] for row in rows]
        said = [each for each in texts if all(isinstance(text, str) and text.strip() for text in each)]
        starts = all(text.startswith(prompt.strip()) for prompt, *both in said for text in both)
        # Whole dialogues are known by themselves, and read as such.
        of_dialogues = any(_is_whole(text) for _, *both in said for text in both)
        if starts and not of_dialogues and any(len(prompt.strip()) >= _TELLING for prompt, *_ in said):
            raise UserError(
                f"data source `{source}`: `{answers[0]}` and `{answers[1]}` begin with `{asked}`, which would be said "
                "twice",
                f"take it out of the answers, or set 'data.ignore=[{asked}]': then the prompt is what both begin with",
            )


def read_preference(
    row: Mapping[str, Any],
    where: str,
    has_chat_template: bool,
    asks: bool,
    read: Callable[[Any, str], list[Message]],
    chat: Callable[[list[Message], Mapping[str, Any], str], Chat],
    alpaca: Callable[[Mapping[str, Any], str], Side],
) -> Preference:
    """The two sides of a row, of which what follows their common prompt is trained.

    Args:
        row: Its columns, by the names of the format.
        where: Where it stands.
        has_chat_template: Whether the tokenizer renders chats.
        asks: Whether other rows say beside their answers what was asked.
        read: Reads what a column holds as messages.
        chat: Makes a chat of messages and what stands beside them.
        alpaca: Makes a row of an instruction and its answer.

    Raises:
        UserError: The prompt is not said, said twice, or not that of the answers.
    """
    answers = [row["chosen"], row["rejected"]]
    given = [name for name in _ASKED if parsed(row.get(name)) not in EMPTY]
    if not any(holds_messages(each) for each in (*answers, *(row.get(name) for name in given))):
        texts = [_text(row, name, where) for name in ("chosen", "rejected")]
        if len(given) == 1 and all(map(_is_whole, texts)):
            prompt = _text(row, given[0], where).strip()
            if not all(text.strip().startswith(prompt) for text in texts):
                _refuse_other_prompt(given[0], row[given[0]], [_dialogue(text) for text in texts], read, where)
            row, given = {**row, given[0]: None}, []
        if given == ["instruction"]:
            sides = [alpaca({**row, "output": text}, where) for text in texts]
            return _with_shared_prompt(sides)
        if not given and has_chat_template and all(_dialogue(text) for text in texts):
            return _with_shared_prompt(chat(_dialogue(text), row, where) for text in texts)
        if asks and not given and not all(map(_is_whole, texts)):
            return _NOTHING  # Its answers belong to a prompt that is missing.
        if of_chats := [name for name in ("system", "input", "history", "tools") if row.get(name) not in EMPTY]:
            raise UserError(
                f"{where}: `{of_chats[0]}` is for chats, not for plain prompts and answers",
                f"set 'data.columns={{instruction: prompt}}', or 'data.ignore=[{of_chats[0]}]'",
            )
        if len(given) > 1:
            raise _asked_twice(given, where)
        prompt = _text(row, given[0], where) if given else _common_prompt(*texts)
        return Preference(*(Completion(prompt, text if given else text[len(prompt) :]) for text in texts))

    # Beside messages, `[]` is a conversation without any.
    nothing = EMPTY if any(map(holds_messages, answers)) else NOTHING
    turns = [
        read(value, name)
        if holds_messages(value)
        else [{"role": "assistant", "content": _text(row, name, where, nothing)}]
        for name, value in zip(("chosen", "rejected"), answers, strict=True)
    ]
    beside = ("history",) if given == ["instruction"] else ("history", "input")
    if left := [each for each in beside if parsed(row.get(each)) not in EMPTY]:
        raise UserError(
            f"{where}: `{left[0]}` stands beside answers that are messages, and belongs to their prompt",
            f"write all of it into `messages`, or set 'data.ignore=[{left[0]}]'",
        )
    begin = {bool(side) and side[0]["role"] != "assistant" for side in turns}
    if begin == {True}:
        for name in given:
            _refuse_other_prompt(name, row[name], turns, read, where)
        return _with_shared_prompt(chat(side, row, where) for side in turns)
    if begin == {True, False} and all(turns):
        raise UserError(
            f"{where}: one of `chosen` and `rejected` is a whole conversation, the other an answer",
            "write both in the same way",
        )
    if len(given) > 1:
        raise _asked_twice(given, where)
    if asks and not given:
        return _NOTHING
    if not given:
        raise UserError(
            f"{where}: `chosen` and `rejected` are answers, and nothing says what was asked",
            "name its column, 'data.columns={prompt: NAME}', or write whole conversations",
        )
    name = given[0]
    before = read(row[name], name) if holds_messages(row[name]) else _questions(row, name, where)
    return _with_shared_prompt((chat([*before, *side], row, where) for side in turns), at_least=len(before))


def _with_shared_prompt(answers: Iterable[Side], at_least: int = 0) -> Preference:
    """The two sides, of which messages that they begin with alike are not trained."""
    chosen, rejected = answers
    if not (isinstance(chosen, Chat) and isinstance(rejected, Chat)):
        return Preference(chosen, rejected)
    both = list(zip(chosen.messages, rejected.messages, strict=False))
    alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    # Of equal conversations the last messages are the answers.
    shared = max(at_least, min(alike, len(chosen.messages) - 1, len(rejected.messages) - 1))

    def side(talk: Chat) -> Chat:
        prompt = [message | {"train": False} for message in talk.messages[:shared]]
        return Chat([*prompt, *talk.messages[shared:]], talk.tools, talk.template_kwargs)

    return Preference(side(chosen), side(rejected))


def _questions(row: Mapping[str, Any], name: str, where: str) -> list[Message]:
    """What was asked as a text, with what stands beside an instruction."""
    texts = [_text(row, each, where) for each in ((name, "input") if name == "instruction" else (name,))]
    return [{"role": "user", "content": "\n\n".join(filter(None, texts))}]


def _refuse_other_prompt(
    name: str, value: Any, turns: list[list[Message]], read: Callable[[Any, str], list[Message]], where: str
) -> None:
    """Whole conversations hold their prompt; what stands beside them may repeat it, or the chosen one, and no more."""
    if holds_messages(value):
        messages = read(value, name)
        if messages == turns[0] or all(side[: len(messages)] == messages for side in turns):
            return
    elif all(any(str(value).strip() == str(message["content"]).strip() for message in side) for side in turns):
        return
    raise UserError(
        f"{where}: `{name}` is not what the conversations in `chosen` and `rejected` begin with",
        f"correct the row, or set 'data.ignore=[{name}]' to read the conversations alone",
    )


def _asked_twice(given: list[str], where: str) -> UserError:
    names = " and ".join(f"`{name}`" for name in given)
    return UserError(f"{where}: {names} all say what was asked", f"set 'data.ignore=[{given[-1]}]', or keep one")


def _text(row: Mapping[str, Any], name: str, where: str, nothing: Collection[Any] = NOTHING) -> str:
    value = row.get(name)
    if value in nothing:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: `{name}` is neither a text nor messages", "write one of them, or remove the row")
    return value


def _dialogue(text: str) -> list[Message]:
    """A text in which Human and Assistant take turns, as messages; none for any other text."""
    head, *parts = _TURN.split(text)
    if head.strip() or not parts:
        return []
    return [
        {"role": _SPEAKERS[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _is_whole(text: str) -> bool:
    """Whether a text is a dialogue, prompt and answer, and not an answer alone."""
    dialogue = _dialogue(text)
    return len(dialogue) > 1 and dialogue[0]["role"] == "user"


def _common_prompt(chosen: str, rejected: str) -> str:
    """What two texts begin with, up to the last turn of an assistant, or to the end of a word."""
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    common = chosen[:length]
    if (turn := common.rfind("\n\nAssistant:")) >= 0:
        return common[: turn + len("\n\nAssistant:")]
    # The space before a word belongs to its token.
    return common[: max(common.rfind(" "), common.rfind("\n") + 1, 0)]
