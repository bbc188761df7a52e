"""Which characters of a rendered conversation are trained: the turns that `data.train_on` names, each without the
header that the template writes before it and with the stop token behind it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from toolkit.data.encoding.chat_spans import (
    SENTINEL,
    Conversation,
    Message,
    Settings,
    Tools,
    render,
)
from toolkit.data.encoding.chat_template import TEMPLATE_ERRORS, fixed_prompt
from toolkit.data.encoding.labelling import Span


class Turns:
    """Finds what is trained of conversations. Picklable.

    Args:
        tokenizer: The one whose template renders them.
        train_on: `data.train_on` of the recipe.
        stop_token_ids: Every token that ends generation for this model.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, train_on: str | Sequence[str], stop_token_ids: frozenset[int]
    ) -> None:
        self.tokenizer, self.train_on = tokenizer, train_on
        self._fixed_prompts: dict[tuple[str, str], str] = {}
        stops = sorted(stop_token_ids)
        stop = f"(?:{_alternatives(tokenizer.convert_ids_to_tokens(stops))})"
        self._stop_before, self._stop_after = re.compile(rf"\s*{stop}\s*(?=\S)"), re.compile(rf"\s*{stop}")
        self._stop_at_end = re.compile(rf"{stop}\Z")
        added = (token.content for token in tokenizer.added_tokens_decoder.values())
        self._header_ends = re.compile(f"{_alternatives(added)}|\n")

    def trained(self, conversation: Conversation, messages: list[Message]) -> tuple[list[Span], list[Span]]:
        """The character ranges of the rendered conversation that are trained, in order, and gaps in them.

        Args:
            conversation: The rendered row.
            messages: Its messages with their flags.
        """
        text, located = conversation.text, conversation.turns
        flags = [message.get("train") for message in messages]
        excluded = [i for i, flag in enumerate(flags) if flag is False]
        partly = [i for i, message in enumerate(messages) if "untrained" in message]
        if self.train_on == "all":
            conversation.ensure_turns([*excluded, *partly])
            gaps = sorted(span for i in excluded for span in located.get(i, []))
            edges = [0, *itertools.chain(*gaps), len(text)]
            spans = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
            return spans, [gap for i in partly for gap in conversation.locate_parts(i, messages[i]["untrained"])]
        spans, gaps = [], []
        turns = self._trained_turns(conversation, flags)
        blocks = conversation.generation
        by_turn = [i for i in turns if blocks is None or i not in conversation.assistants]
        conversation.ensure_turns(by_turn)
        headers: dict[tuple[str, str], str] = {}
        for i in turns:
            if i not in by_turn:
                turn = [span for message, span in blocks or [] if message == i]
            else:
                speakers = (conversation.messages[i - 1]["role"] if i else "", conversation.messages[i]["role"])
                if speakers not in headers:
                    headers[speakers] = self._header(conversation, i)
                turn = self._trim(text, located.get(i, []), headers[speakers])
            if i in partly:
                gaps += conversation.locate_parts(i, messages[i]["untrained"])
            spans += turn
        return spans, gaps

    def _trained_turns(self, conversation: Conversation, flags: list[bool | None]) -> list[int]:
        """The messages that are trained: `auto` heeds every flag, what the recipe names only loses those excluded."""
        assistants = conversation.assistants
        if self.train_on in ("auto", "completion"):
            return [i for i, flag in enumerate(flags) if (i in assistants if flag is None else flag)]
        if isinstance(self.train_on, list):
            chosen = [i for i, message in enumerate(conversation.messages) if message["role"] in self.train_on]
        else:
            chosen = assistants[-1 if self.train_on == "last_assistant" else 0 :]
        return [i for i in chosen if flags[i] is not False]

    def _header(self, conversation: Conversation, i: int) -> str:
        """What the template writes before the speaker's own text in message `i`.

        For the model that is the generation prompt; for others, and for a template that has none, the text between
        the message before and the content of this one.
        """
        history, tools, settings = conversation.messages[:i], conversation.tools, conversation.settings
        role = conversation.messages[i]["role"]
        try:
            if history and role == "assistant":
                if fixed := self._fixed_prompt(tools, settings):
                    return fixed
                plain = render(self.tokenizer, history, tools, settings)
                prompted = render(self.tokenizer, history, tools, settings, prompt=True)
                common = _common_length(plain, prompted)
                if common < len(plain):  # The conversation itself ends with something (Phi-3: the end of the text).
                    common = self._last_header_end(prompted, common)
                if prompt := prompted[common:].lstrip():
                    return prompt
            probed = Conversation(self.tokenizer, [*history, {"role": role, "content": SENTINEL}], tools, settings)
        except TEMPLATE_ERRORS:
            return ""
        start = probed.turns.get(i, [(0, 0)])[0][0]
        return probed.text[start : max(probed.text.rfind(SENTINEL), start)].lstrip()

    def _fixed_prompt(self, tools: Tools, settings: Settings) -> str:
        """What stands before every answer, if the template shows that nothing else ever does."""
        key = (self.tokenizer.get_chat_template(tools=tools), str(settings))
        if key not in self._fixed_prompts:
            self._fixed_prompts[key] = (fixed_prompt(self.tokenizer, tools, settings) or "").lstrip()
        return self._fixed_prompts[key]

    def _trim(self, text: str, spans: list[Span], header: str) -> list[Span]:
        """Takes the header and what follows the stop token off a turn; adds a stop token written just after it."""
        if not spans:
            return []
        (start, first_end), end = spans[0], spans[-1][1]
        # Some templates write the stop token of a turn at the start of the next one.
        if late := self._stop_before.match(text, start, first_end):
            start = late.end()
        body = text[start:first_end].lstrip()
        skip = _common_length(header, body)
        if skip < len(header):
            # A partly different header, say a generation prompt that opens a reasoning block: its equal lines count.
            skip = self._last_header_end(body, skip)
        start = first_end - len(body) + skip if skip else start
        stripped = len(text[:end].rstrip())
        after = self._stop_after.match(text, end)
        ends_with_stop = self._stop_at_end.search(text, start, stripped)
        end = after.end() if after and not ends_with_stop else max(stripped, start)
        edges = [start, *list(itertools.chain(*spans))[1:-1], end]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _last_header_end(self, text: str, limit: int) -> int:
        """Where the last whole control token or line within the first `limit` characters ends."""
        return max((match.end() for match in self._header_ends.finditer(text) if match.end() <= limit), default=0)


def _common_length(first: str, second: str) -> int:
    """How many characters two texts begin with in common."""
    if second.startswith(first):
        return len(first)
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second))


def _alternatives(strings: Iterable[str]) -> str:
    """A pattern that matches one of the strings, the longest first; nothing if there are none."""
    return "|".join(map(re.escape, sorted(strings, key=len, reverse=True))) or "(?!)"
