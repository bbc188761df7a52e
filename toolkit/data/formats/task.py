"""What the rows of a data set are for, and whether a row has anything to train on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.data.formats.messages import ROLES
from toolkit.data.formats.prompts import is_empty_prompt
from toolkit.data.formats.related import is_empty_related
from toolkit.data.rows import (
    IGNORE,
    Chat,
    Completion,
    Judged,
    Labelled,
    Pair,
    Preference,
    Prompted,
    Related,
    Row,
    Segments,
    Tagged,
    Text,
    Tokens,
)
from toolkit.recipe import Recipe, preference
from toolkit.recipe.embedding import Embedding
from toolkit.recipe.heads import EMBEDDING
from toolkit.recipe.reinforcement import REINFORCED

_MISSING = ("nan", "NaN", "<NA>")


@dataclass(frozen=True)
class Task:
    """What the rows are for: `objective` and `data.train_on` of the recipe, and whether the tokenizer renders chats."""

    objective: str
    train_on: str | Sequence[str]
    has_chat_template: bool
    system: str | None = None
    """A system message for prompts that have none, of `rollout` in the recipe."""
    embedding: Embedding = field(default_factory=Embedding)
    """The recipe's."""

    @classmethod
    def of(cls, recipe: Recipe, has_chat_template: bool) -> Task:
        """The task of a recipe."""
        return cls(recipe.rows_for, recipe.data.train_on, has_chat_template, recipe.rollout.system, recipe.embedding)

    @property
    def trains_prompts(self) -> bool:
        """Whether every token is trained, prompts included."""
        return self.objective == "language_modelling" or self.train_on == "all"

    @property
    def trained_roles(self) -> Collection[str]:
        """Whose messages are trained where they do not say it themselves."""
        if self.trains_prompts:
            return {*ROLES.values()}
        return ("assistant",) if isinstance(self.train_on, str) else self.train_on

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of answers."""
        return self.objective in preference.PAIRED

    @property
    def labelled(self) -> str | None:
        """The format of rows with labels, where these are learnt."""
        return {"classification": "labelled", "token_classification": "tagged"}.get(self.objective)

    @property
    def relates(self) -> bool:
        """Whether rows are texts that belong together."""
        return self.objective == EMBEDDING

    @property
    def judges(self) -> bool:
        """Whether rows are single answers, each of which is good or bad."""
        return self.objective == preference.JUDGED

    @property
    def reinforces(self) -> bool:
        """Whether rows are prompts, whose answers are scored."""
        return self.objective in REINFORCED


def is_empty(row: Row, task: Task) -> bool:
    """Whether a row has no content that could be trained on."""
    match row:
        case Text(content) | Completion(_, content):
            return not content.strip()
        case Pair(source, target):
            return not (source.strip() and target.strip())
        case Segments(parts):
            return not any(text and trained for text, trained in parts)
        case Tokens(_, labels):
            return all(label == IGNORE for label in labels)
        case Preference(chosen, rejected):
            return is_empty(chosen, task) or is_empty(rejected, task)
        case Judged(answer):
            return is_empty(answer, task)
        case Prompted():
            return is_empty_prompt(row)
        case Labelled(text, second, label):
            said = (
                text.text if isinstance(text, Text) else "".join(str(each["content"] or "") for each in text.messages)
            )
            return not (label and said.strip() and (second is None or second.strip()))
        case Related():
            return is_empty_related(row)
        case Tagged(words, tags):
            return not (words and any(tags))
    if task.trains_prompts:
        return not row.messages
    return not any(message["content"] or message.get("tool_calls") for message in _trained(row, task))


def is_missing_value(row: Row, task: Task) -> bool:
    """Whether what is learnt of a row is the word that pandas makes of a cell with nothing in it."""
    match row:
        case Text(content) | Completion(_, content) | Pair(_, content):
            return content.strip() in _MISSING
        case Preference(chosen, rejected):
            return is_missing_value(chosen, task) or is_missing_value(rejected, task)
        case Judged(answer):
            return is_missing_value(answer, task)
        case Chat():
            return any(str(message["content"]).strip() in _MISSING for message in _trained(row, task))
    return False


def has_empty_turn(row: Row, task: Task) -> bool:
    """Whether a turn of a conversation is trained in which nothing is said, so that the model would learn to end its
    turn at once."""
    if not isinstance(row, Chat) or task.trains_prompts:
        return False
    turns = _trained(row, task)
    said = ("content", "tool_calls", "reasoning_content")
    return any(
        not any(message.get(field) for field in said)
        for message in (turns[-1:] if task.train_on == "last_assistant" else turns)
    )


def _trained(row: Chat, task: Task) -> list[dict[str, Any]]:
    """The messages of whose turns tokens are trained, unless only the last one is."""
    return [message for message in row.messages if message.get("train", message["role"] in task.trained_roles)]
