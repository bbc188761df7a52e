"""Turns a row into tokens and labels: which characters are trained, and which tokens those are.

Characters are chosen on the rendered text (see `chat_spans`), tokens by the tokenizer's character offsets, so that any
chat template and any fast tokenizer work. The alternatives ask more of the model: Transformers' assistant mask needs
`{% generation %}` blocks, which few released templates have, and a search for the tokens of a header misses it where
they merge with what stands before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from toolkit.common import UserError
from toolkit.data.chat_spans import Conversation, Message, Span, answer_of, render
from toolkit.data.rows import Chat, Completion, Pair, Row, Text

IGNORE = -100
"""The label of a token that carries no loss."""

_BUILT_IN = {path.stem: path for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
_SENTINEL = "(the answer)"
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What a template may raise for a conversation that it was not written for."""


@dataclass(frozen=True)
class Encoded:
    """One row as tokens.

    Attributes:
        input_ids: tokens; of the source for encoder-decoder rows.
        labels: for decoder-only rows aligned with `input_ids`, the token itself where it is trained and -100 where it
            is not (always at 0, which nothing predicts); for encoder-decoder rows the tokens of the target.
        boundary_merged: whether a token holds both the end of a prompt and the start of what is trained, so that
            the prompt alone has other tokens.
    """

    input_ids: list[int]
    labels: list[int]
    boundary_merged: bool = False


def load_chat_template(name_or_path: str) -> str:
    """A built-in chat template by name, or the content of a Jinja file.

    Raises:
        UserError: If there is no such template, or it is not valid Jinja.
    """
    path = _BUILT_IN.get(name_or_path, Path(name_or_path))
    known = f"Set model.chat_template to a built-in name ({', '.join(_BUILT_IN)}) or to a Jinja file."
    if not path.is_file():
        raise UserError(f"model.chat_template: there is no file and no built-in template '{name_or_path}'.", known)
    try:
        template = path.read_text(encoding="utf-8")
        _compile_jinja_template(template)
    except UnicodeDecodeError as error:
        raise UserError(f"model.chat_template: {path} is not UTF-8 text.", known) from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"model.chat_template: {path}, line {error.lineno}: {error.message}", known) from error
    return template


class Encoder:
    """Turns normalised rows into tokens and labels. Picklable.

    Args:
        tokenizer: A fast tokenizer (with character offsets).
        train_on: `data.train_on` of the recipe; that it suits the rows is checked where their format is recognised.
        stop_token_ids: Every token that ends generation for this model.

    Raises:
        UserError: If the tokenizer has no offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str, stop_token_ids: frozenset[int]) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"The tokenizer {type(tokenizer).__name__} has no character offsets, so labels cannot be placed.",
                "Set model.tokenizer to a folder or hub id that has a tokenizer.json (a fast tokenizer).",
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.stop_token_ids = stop_token_ids | ({tokenizer.eos_token_id} - {None})
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        stops = sorted(self.stop_token_ids)
        self._stop = f"(?:{_alternatives(tokenizer.convert_ids_to_tokens(stops))})"
        added = (token.content for token in tokenizer.added_tokens_decoder.values())
        self._header_ends = re.compile(f"{_alternatives(added)}|\n")

    def __call__(self, row: Row) -> Encoded:
        """Tokens and labels of one row.

        Raises:
            UserError: If the row does not suit the tokenizer or its chat template.
        """
        encoders: dict[type[Row], Callable[[Any], Encoded]]
        encoders = {Text: self._text, Completion: self._completion, Chat: self._chat, Pair: self._pair}
        return encoders[type(row)](row)

    def prompt_text(self, row: Row) -> tuple[str, str]:
        """What the model is asked for this row, and the reference answer.

        A document is cut in the middle. A chat's prompt is the rendered conversation up to the last assistant turn;
        it holds every special token, so see `prompt_ids` for its tokens.
        """
        match row:
            case Text(text):
                cut = text.rfind(" ", 0, len(text) // 2 + 1)
                cut = cut if cut > 0 else len(text) // 2
                return text[:cut], text[cut:]
            case Completion(prompt, answer) | Pair(prompt, answer):
                return prompt, answer
            case Chat():
                messages = _without_flags(row)
                last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
                answer = "" if last == len(messages) else answer_of(messages[last])
                try:
                    return render(self.tokenizer, messages[:last], row.tools, prompt=True), answer
                except _TEMPLATE_ERRORS as error:
                    raise _refused(error) from error

    def prompt_ids(self, row: Row) -> list[int]:
        """The tokens of `prompt_text`, ready for `generate()`: with the special tokens a prompt begins with, and for
        decoder-only rows without the one a text ends with."""
        text = self.prompt_text(row)[0]
        ids = self.tokenizer(text, add_special_tokens=not isinstance(row, Chat))["input_ids"]
        return ids if isinstance(row, Pair) else self._without_eos(ids)

    def _text(self, row: Text) -> Encoded:
        ids = [*self._without_eos(self.tokenizer(row.text)["input_ids"]), self._eos()]
        return Encoded(ids, [IGNORE, *ids[1:]])

    def _completion(self, row: Completion) -> Encoded:
        text, boundary = row.prompt + row.completion, len(row.prompt)
        encoding = self.tokenizer(text, return_offsets_mapping=True)
        ids = self._without_eos(encoding["input_ids"])
        labels, merged = self._labels(ids, encoding["offset_mapping"], [(boundary, len(text))])
        if self.train_on == "all":
            labels, merged = [IGNORE, *ids[1:]], False
        return Encoded([*ids, self._eos()], [*labels, self._eos() if ids else IGNORE], merged)

    def _pair(self, row: Pair) -> Encoded:
        labels = self._without_eos(self.tokenizer(text_target=row.target)["input_ids"])
        return Encoded(self.tokenizer(row.source)["input_ids"], [*labels, self._eos()])

    def _chat(self, row: Chat) -> Encoded:
        if not self.tokenizer.chat_template:
            raise UserError(
                "The rows are conversations, but the tokenizer has no chat template.",
                "Set model.chat_template to a built-in name (chatml) or a Jinja file, or use an instruction-tuned "
                "model's tokenizer.",
            )
        untrained = [i for i, message in enumerate(row.messages) if message.get("train") is False]
        try:
            conversation = Conversation(self.tokenizer, _without_flags(row), row.tools)
            spans = self._trained_spans(conversation, untrained)
            conversation.refuse_lost_answers()
        except UserError:
            raise
        except _TEMPLATE_ERRORS as error:
            raise _refused(error) from error
        encoding = self.tokenizer(conversation.text, add_special_tokens=False, return_offsets_mapping=True)
        labels, merged = self._labels(encoding["input_ids"], encoding["offset_mapping"], spans)
        return Encoded(encoding["input_ids"], labels, merged)

    def _trained_spans(self, conversation: Conversation, untrained: list[int]) -> list[Span]:
        """The character ranges of the rendered conversation that are trained, in order."""
        text, located = conversation.text, conversation.turns
        if self.train_on == "all":
            conversation.ensure_turns(untrained)
            gaps = sorted(span for i in untrained for span in located.get(i, []))
            edges = [0, *itertools.chain(*gaps), len(text)]
            return list(zip(edges[::2], edges[1::2], strict=True))
        last_only = self.train_on == "last_assistant"
        turns = [i for i in conversation.assistants[-1 if last_only else 0 :] if i not in untrained]
        if conversation.generation is not None:
            return [span for message, span in conversation.generation if message in turns]
        conversation.ensure_turns(turns)
        headers: dict[str, str] = {}
        spans: list[Span] = []
        for i in turns:
            before = conversation.messages[i - 1]["role"] if i else ""
            if before not in headers:
                headers[before] = self._header(conversation, i)
            spans += self._trim(text, located.get(i, []), headers[before])
        return spans

    def _header(self, conversation: Conversation, i: int) -> str:
        """What the template writes before the model speaks in message `i`.

        That is the generation prompt; for a template that has none, the text between the message before and the
        content of this one.
        """
        history, tools = conversation.messages[:i], conversation.tools
        try:
            if history:
                plain = render(self.tokenizer, history, tools)
                prompted = render(self.tokenizer, history, tools, prompt=True)
                common = _common_length(plain, prompted)
                if common < len(plain):  # The conversation itself ends with something (Phi-3: the end of the text).
                    common = self._last_header_end(prompted, common)
                if prompt := prompted[common:].lstrip():
                    return prompt
            probe = {"role": "assistant", "content": _SENTINEL}
            probed = Conversation(self.tokenizer, [*history, probe], tools)
        except _TEMPLATE_ERRORS:
            return ""
        start = probed.turns.get(i, [(0, 0)])[0][0]
        return probed.text[start : max(probed.text.rfind(_SENTINEL), start)].lstrip()

    def _trim(self, text: str, spans: list[Span], header: str) -> list[Span]:
        """Takes the header and what follows the stop token off a turn; adds a stop token written just after it."""
        if not spans:
            return []
        (start, first_end), end = spans[0], spans[-1][1]
        # Some templates write the stop token of a turn at the start of the next one.
        if late := re.compile(rf"\s*{self._stop}\s*(?=\S)").match(text, start, first_end):
            start = late.end()
        body = text[start:first_end].lstrip()
        skip = _common_length(header, body)
        if skip < len(header):
            # A partly different header, say a generation prompt that opens a reasoning block: its equal lines count.
            skip = self._last_header_end(body, skip)
        start = first_end - len(body) + skip if skip else start
        stripped = len(text[:end].rstrip())
        after = re.compile(rf"\s*{self._stop}").match(text, end)
        ends_with_stop = re.search(rf"{self._stop}\Z", text[start:stripped])
        end = after.end() if after and not ends_with_stop else max(stripped, start)
        edges = [start, *list(itertools.chain(*spans))[1:-1], end]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _last_header_end(self, text: str, limit: int) -> int:
        """Where the last whole control token or line within the first `limit` characters ends."""
        return max((match.end() for match in self._header_ends.finditer(text) if match.end() <= limit), default=0)

    def _labels(self, ids: list[int], offsets: list[Span], spans: list[Span]) -> tuple[list[int], bool]:
        """Labels of the tokens that overlap one of `spans`, and whether one of those tokens begins before its span."""
        labels = [IGNORE] * len(ids)
        merged = False
        remaining = iter(spans)
        start, end = next(remaining, (0, 0))
        for position, (token, (left, right)) in enumerate(zip(ids, offsets, strict=False)):
            while left >= end and end > 0:
                start, end = next(remaining, (0, 0))
            # Control tokens that swallow the whitespace after them (Phi-3) belong to the header.
            if left >= end or right <= start or (left < start and token in self._added_ids):
                continue
            merged |= left < start
            if position > 0:
                labels[position] = token
        return labels, merged

    def _without_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] == self.tokenizer.eos_token_id else ids

    def _eos(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no end-of-sequence token, so the model could not learn to stop.",
                "Set model.tokenizer to a tokenizer with an eos_token.",
            )
        return self.tokenizer.eos_token_id


def _without_flags(row: Chat) -> list[Message]:
    return [{key: value for key, value in message.items() if key != "train"} for message in row.messages]


def _common_length(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    if second.startswith(first):
        return len(first)
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def _alternatives(strings: Iterable[str]) -> str:
    """A pattern that matches one of the strings, the longest first; nothing if there are none."""
    return "|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or "(?!)"


def _refused(error: Exception) -> UserError:
    return UserError(
        f"The chat template refuses this conversation: {error}",
        "Change the row (roles, order of turns, tools), or set model.chat_template to a template that accepts it.",
    )
