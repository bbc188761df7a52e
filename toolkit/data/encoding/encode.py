"""Turns a row into tokens and labels: which characters are trained, and which tokens those are.

Characters are chosen on the rendered text (see `chat_spans`), tokens by where they stand in it (see `labelling`), so
that any chat template and any fast tokenizer work. The alternatives ask more of the model: Transformers' assistant mask
needs `{% generation %}` blocks, which few released templates have, and a search for the tokens of a header misses it
where they merge with what stands before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.common import UserError, in_a_line
from toolkit.data.encoding.chat_spans import (
    Conversation,
    Message,
    answer_of,
    render_accepted,
)
from toolkit.data.encoding.chat_template import TEMPLATE_ERRORS, next_conversation
from toolkit.data.encoding.label_encoding import text_ids, word_ids
from toolkit.data.encoding.labelling import Labeller, Span, giving_up_named
from toolkit.data.encoding.turns import Turns
from toolkit.data.formats.messages import ASIDE
from toolkit.data.rows import (
    IGNORE,
    Chat,
    Completion,
    Labelled,
    Pair,
    Prompted,
    Row,
    Segments,
    Tagged,
    Text,
    Tokens,
    sides,
)
from toolkit.data.thoughts import text_of


@dataclass(frozen=True)
class Encoded:
    """One row as tokens.

    Attributes:
        input_ids: tokens; of the source for encoder-decoder rows.
        labels: for decoder-only rows aligned with `input_ids`, the token itself where it is trained and -100 where it
            is not (always at 0, which nothing predicts); for encoder-decoder rows the tokens of the target.
        boundary_merged: whether a token holds both the end of a prompt and the start of what is trained, so that
            the prompt alone has other tokens.
        prompt_lost: whether the chat template leaves out a part of the prompt.
        token_type_ids: of two texts which of them each token belongs to, where the tokenizer says so.

    Of a labelled row, `labels` has one entry, 0; of tagged words the number of a word at its first token.
    """

    input_ids: list[int]
    labels: list[int]
    boundary_merged: bool = False
    prompt_lost: bool = False
    token_type_ids: list[int] = field(default_factory=list)


def no_embedding(holder: str, tokenizer: Any, token: int, vocab_size: int) -> UserError:
    """What to say of a token that the tokenizer has and the model does not."""
    text = tokenizer.convert_ids_to_tokens(token)
    return UserError(
        f"{holder} has the token {text!r} ({token}), but the model has embeddings for {vocab_size} tokens",
        "name tokens that the model has yet to learn in model.new_tokens, or set model.tokenizer to the model's own",
    )


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: What the chat template writes.
        ranges: Characters of it that are trained, in order.
        gaps: Characters within them that are not.
        prompt_lost: As in `Encoded`.
    """

    text: str
    ranges: list[Span]
    gaps: list[Span]
    prompt_lost: bool


class Encoder:
    """Turns normalised rows into tokens and labels. Picklable.

    Args:
        tokenizer: A fast tokenizer (with character offsets).
        train_on: `data.train_on` of the recipe; that it suits the rows is checked where their format is recognised.
        stop_token_ids: Every token that ends generation for this model.
        template_kwargs: `data.chat_template_kwargs` of the recipe; those of a row come before them.
        vocab_size: Number of tokens that the model has embeddings for; None where it is not known.

    Raises:
        UserError: If the tokenizer has no offsets.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_on: str | Sequence[str],
        stop_token_ids: frozenset[int],
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"The tokenizer {type(tokenizer).__name__} has no character offsets, so labels cannot be placed.",
                "Set model.tokenizer to a folder or hub id that has a tokenizer.json (a fast tokenizer).",
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.vocab_size = vocab_size
        self.template_kwargs = dict(template_kwargs or {})
        self.stop_token_ids = stop_token_ids | ({tokenizer.eos_token_id} - {None})
        self._label = Labeller(tokenizer)
        self._turns = Turns(tokenizer, train_on, self.stop_token_ids)

    @giving_up_named()
    def __call__(self, row: Row | Rendered) -> Encoded:
        """Tokens and labels of one row.

        Raises:
            UserError: If the row does not suit the tokenizer, its chat template or the model's vocabulary.
        """
        match self.rendered(row):
            case Rendered(text, ranges, gaps, prompt_lost):
                encoded = Encoded(*self._label(text, ranges, gaps), prompt_lost)
            case Text(text):
                encoded = self._text(text)
            case Completion() as row:
                encoded = self._completion(row)
            case Pair() as row:
                encoded = self._pair(row)
            case Segments(parts):
                encoded = self._segments(parts)
            case Tokens() as row:
                encoded = self._tokens(row)
            case Labelled() as row:
                encoded = self._labelled(row)
            case Tagged(words):
                encoded = Encoded(*word_ids(self.tokenizer, words))
        # Those of labelled rows and tagged words are no tokens.
        labels = [] if isinstance(row, Labelled | Tagged) else encoded.labels
        self._check_embedded("The row", encoded.input_ids, labels)
        return encoded

    def rendered(self, row: Row | Rendered) -> Row | Rendered:
        """A conversation as text; any other row as it is.

        Raises:
            UserError: If there is no chat template, or it refuses the conversation or loses a part of it.
        """
        if isinstance(row, Labelled) and isinstance(row.text, Chat):
            return replace(row, text=self.rendered(row.text))  # type: ignore[arg-type]
        if not isinstance(row, Chat):
            return row
        if not self.tokenizer.chat_template:
            raise UserError(
                "The rows are conversations, but the tokenizer has no chat template.",
                "Set model.chat_template to a built-in name (chatml) or a Jinja file, or use an instruction-tuned "
                "model's tokenizer.",
            )
        next_conversation()
        try:
            conversation = Conversation(self.tokenizer, self._messages(row), row.tools, self._settings(row))
            ranges, gaps = self._turns.trained(conversation, row.messages)
            conversation.refuse_lost_content()
        except UserError:
            raise
        except TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        return Rendered(conversation.text, ranges, gaps, conversation.loses_of_prompt())

    def prompt_text(self, row: Row) -> tuple[str, str]:
        """What the model is asked for this row, and the reference answer.

        A document is cut in the middle. A chat's prompt is the rendered conversation up to the last assistant turn;
        it holds every special token, so see `prompt_ids` for its tokens. Of a pair of answers it is the chosen one's.
        The answer is what is read of one that a model gives: what the template makes of thoughts and calls of tools is
        in it, special tokens are not.
        """
        known, row = row, sides(row)[0]
        assert not isinstance(row, Labelled | Tagged), "labels are not generated"
        match row:
            case Text(text):
                cut = text.rfind(" ", 0, len(text) // 2 + 1)
                cut = cut if cut > 0 else len(text) // 2
                return text[:cut], text[cut:]
            case Completion(prompt, answer) | Pair(prompt, answer):
                return prompt, str(known.columns["answer"]) if isinstance(known, Prompted) else answer
            case Segments(parts):
                cut = max((i for i, (_, trained) in enumerate(parts) if trained), default=len(parts))
                prompt, answer = ("".join(text for text, _ in some) for some in (parts[:cut], parts[cut:]))
                return prompt, self._read(self.tokenizer(answer, add_special_tokens=False)["input_ids"])
            case Tokens(ids, labels):
                cut = _last_answer(labels)
                return str(self.tokenizer.decode(ids[:cut])), self._read(ids[cut:])
            case Chat():
                next_conversation()
                messages = self._messages(row)
                last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
                if isinstance(known, Prompted):  # Answers within it are a part of what is asked.
                    last = len(messages)
                try:
                    prompt, _ = render_accepted(
                        self.tokenizer, messages[:last], row.tools, self._settings(row), prompt=True
                    )
                except TEMPLATE_ERRORS as error:
                    raise _refused(error) from error
                if isinstance(known, Prompted):
                    return prompt, str(known.columns["answer"])
                return prompt, "" if last == len(messages) else self._said(prompt, messages[: last + 1], row)

    def _said(self, prompt: str, messages: list[Message], row: Chat) -> str:
        """The last message as a model writes it after a prompt, with its thoughts and calls of tools; what the message
        itself says where the template lets no answer follow that prompt."""
        with suppress(*TEMPLATE_ERRORS):
            text, _ = render_accepted(self.tokenizer, messages, row.tools, self._settings(row))
            if text.startswith(prompt):
                return self._read(self.tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]).strip()
        return answer_of(messages[-1])

    def _read(self, ids: list[int]) -> str:
        """Tokens as the text of an answer: up to the one that ends it, and without special ones."""
        end = next((place for place, token in enumerate(ids) if token in self.stop_token_ids), len(ids))
        return text_of(self.tokenizer, ids[:end])

    def prompt_lost(self, row: Row | Rendered) -> bool:
        """Whether the chat template leaves out a part of a prompt that the model is to answer by itself.

        Raises:
            UserError: If it leaves out what the assistant or a tool says in it.
        """
        if not isinstance(row, Chat):
            return False
        next_conversation()
        try:
            conversation = Conversation(self.tokenizer, self._messages(row), row.tools, self._settings(row))
            conversation.refuse_lost_content()
        except UserError:
            raise
        except TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        return conversation.loses_of_prompt()

    @giving_up_named()
    def prompt_ids(self, row: Row) -> list[int]:
        """The tokens of `prompt_text`, ready for `generate()`: with the special tokens a prompt begins with, and for
        decoder-only rows without the one a text ends with."""
        known, row = row, sides(row)[0]
        if isinstance(row, Tokens):
            return row.input_ids[: _last_answer(row.labels)]
        text = self.prompt_text(known)[0]
        ids = self.tokenizer(text, add_special_tokens=not isinstance(row, Chat | Segments))["input_ids"]
        self._check_embedded("The prompt", ids)
        return ids if isinstance(row, Pair) else self._without_eos(ids)

    def _text(self, text: str) -> Encoded:
        ids = [*self._without_eos(self.tokenizer(text)["input_ids"]), self._eos()]
        return Encoded(ids, [IGNORE, *ids[1:]])

    def _completion(self, row: Completion) -> Encoded:
        text, boundary = row.prompt + row.completion, len(row.prompt)
        encoding = self.tokenizer(text, return_offsets_mapping=True)
        ids = self._without_eos(encoding["input_ids"])
        labels, merged = self._label.by_offsets(ids, encoding["offset_mapping"], [(boundary, len(text))])
        if self.train_on == "all":
            labels, merged = [IGNORE, *ids[1:]], False
        return Encoded([*ids, self._eos()], [*labels, self._eos() if ids else IGNORE], merged)

    def _pair(self, row: Pair) -> Encoded:
        labels = self._without_eos(self.tokenizer(text_target=row.target)["input_ids"])
        return Encoded(self.tokenizer(row.source)["input_ids"], [*labels, self._eos()])

    def _segments(self, parts: list[tuple[str, bool]]) -> Encoded:
        ids: list[int] = []
        labels: list[int] = []
        for text, trained in parts:
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += tokens
            labels += tokens if trained or self.train_on == "all" else [IGNORE] * len(tokens)
        return Encoded(ids, [IGNORE, *labels[1:]] if ids else [])

    def _tokens(self, row: Tokens) -> Encoded:
        wrong = [token for token in row.input_ids if not 0 <= token < len(self.tokenizer)]
        if wrong:
            raise UserError(
                f"The row has the token {max(wrong, key=abs)}, the tokenizer {len(self.tokenizer)} tokens.",
                "Tokenise the rows with this model's tokenizer, or set model.tokenizer to the one they were made with.",
            )
        if self.train_on == "all":
            return Encoded(row.input_ids, [IGNORE, *row.input_ids[1:]])
        return Encoded(row.input_ids, row.labels)

    def _labelled(self, row: Labelled) -> Encoded:
        if isinstance(row.text, Text):
            ids, types = text_ids(self.tokenizer, row.text.text, row.second)
            return Encoded(ids, [0], token_type_ids=types)
        rendered: Any = row.text
        ids = self.tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
        return Encoded(ids, [0], prompt_lost=rendered.prompt_lost)

    def _messages(self, row: Chat) -> list[Message]:
        """The messages as the template gets them. OpenAI's `developer` is its newer name for the system role."""
        messages = [{key: m[key] for key in m if key not in ASIDE} for m in row.messages]
        if "developer" in str(self.tokenizer.chat_template):
            return messages
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]

    def _settings(self, row: Chat) -> dict[str, Any]:
        return self.template_kwargs | (row.template_kwargs or {})

    def _check_embedded(self, holder: str, *sequences: list[int]) -> None:
        largest = max(max(ids, default=0) for ids in sequences)
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise no_embedding(holder, self.tokenizer, largest, self.vocab_size)

    def _without_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no end-of-sequence token, so the model could not learn to stop.",
                "Set model.tokenizer to a tokenizer with an eos_token.",
            )
        return self.tokenizer.eos_token_id


def _last_answer(labels: list[int]) -> int:
    """Where the last run of trained tokens begins."""
    last = max((i for i, label in enumerate(labels) if label != IGNORE), default=len(labels))
    while last > 0 and last < len(labels) and labels[last - 1] != IGNORE:
        last -= 1
    return last


def _refused(error: Exception) -> UserError:
    return UserError(
        f"The chat template refuses this conversation: {error if str(error) else in_a_line(error)}",
        "Change the row (roles, order of turns, tools), or set model.chat_template to a template that accepts it.",
    )
