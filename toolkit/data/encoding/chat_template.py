"""Chat templates: where they are, and what one shows of every conversation at once, mostly by its syntax tree.

That is what it reads, what it writes before every answer, and whether it could see marks in what its loops write.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from toolkit.common import UserError, in_a_line
from toolkit.data.encoding import template_limits as template_limits
from toolkit.recipe.rules.inputs import TEMPLATE_ARGUMENTS
from toolkit.recipe.spelling import did_you_mean
from toolkit.recipe.time_limit import TimeLimit

_BUILT_IN = {path.stem: path for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
OF_PROCESSORS = ("chat_template.json", "processor_config.json")
"""Files in which processors of images keep a template that Transformers' tokenizers do not look for."""
_OF_CONVERSATIONS = ("messages", "tools", "documents", "loop")
TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, MemoryError, NameError, RecursionError, SyntaxError),
)
"""What a template may raise for a conversation that it was not written for, or for any."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SECONDS, _SHORT = 2.0, 0.05
"""How long a template may take for one conversation, and how long one rendering that does not count."""


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()
"""What this thread has spent on the conversation at hand."""


def next_conversation() -> None:
    """What is rendered from here on is another conversation."""
    _spent.seconds = 0.0


@contextmanager
def in_time() -> Iterator[None]:
    """What a template is compiled and rendered under: it is a program, and may be one without an end.

    A conversation is rendered several times, a long one once for each of its messages, so that only renderings that
    take long count together.
    """
    began = time.thread_time()
    try:
        with TimeLimit(max(_SECONDS - _spent.seconds, 0.0), _endless):
            yield
    finally:
        _spent.seconds += max(time.thread_time() - began - _SHORT, 0.0)
    if _spent.seconds > _SECONDS:  # In a call into C, which nothing ends.
        raise _endless()


def _endless() -> UserError:
    return UserError(
        f"The chat template takes more than {_SECONDS:g} seconds for one conversation.",
        "Set model.chat_template to a template that ends, or take the row out if it is far longer than the others.",
    )


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
        template = path.read_text(encoding="utf-8-sig")
        next_conversation()
        with in_time():
            _compile_jinja_template(template)
    except UnicodeDecodeError as error:
        raise UserError(f"model.chat_template: {path} is not UTF-8 text.", known) from error
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"model.chat_template: {path}, line {error.lineno}: {error.message}", known) from error
    except (RecursionError, SyntaxError, ValueError) as error:
        raise UserError(f"model.chat_template: {path} cannot be compiled: {in_a_line(error)}", known) from None
    return template


def processor_template(file: Path) -> str | None:
    """The template in one of `OF_PROCESSORS`; None where it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {in_a_line(error)}", "Download it again.") from None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None


@lru_cache(maxsize=16)
def part_roles(source: str) -> frozenset[str]:
    """Whose text a template writes only where the content is a list of typed parts, as many do of models that see."""
    words = {"system": "winter", "user": "summer", "assistant": "spring"}

    def written(roles: list[str], form: Callable[[str], Any]) -> str | None:
        messages = [{"role": role, "content": form(words[role])} for role in roles]
        given = {**dict.fromkeys(_SPECIAL, ""), "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            with in_time():
                return _compile_jinja_template(source).render(messages=messages, **given)
        except TEMPLATE_ERRORS:
            return None

    for roles in ([*words], ["user", "assistant"]):  # Some refuse a system message.
        parts = written(roles, lambda word: [text_part(word)])
        if parts is not None:
            plain = written(roles, str) or ""
            # A list that is written where a text was meant has quotes around it.
            lists = {role for role in roles if re.search(f"[\"']{words[role]}[\"']", parts)}
            return frozenset({role for role in roles if words[role] in parts and words[role] not in plain} - lists)
    return frozenset()


def text_part(text: str) -> dict[str, str]:
    """A text as one of the parts of a message's content."""
    return {"type": "text", "text": text}


@lru_cache(maxsize=16)
def variables(template: str) -> frozenset[str]:
    """What a chat template reads of what it is given."""
    environment = _compile_jinja_template(template).environment
    return frozenset(find_undeclared_variables(environment.parse(template)) - set(environment.globals))


def check_variables(tokenizer: PreTrainedTokenizerBase, given: Mapping[str, Any]) -> None:
    """Refuses variables that no chat template reads: a slip of typing would leave all as it is.

    Raises:
        UserError: Names the unknown ones, and what the template reads.
    """
    if not given:
        return
    if not tokenizer.chat_template:
        raise UserError("data.chat_template_kwargs: this tokenizer has no chat template", "set model.chat_template too")
    read = variables(tokenizer.get_chat_template())
    if unread := sorted(set(given) - read):
        own = sorted(name for name in read - TEMPLATE_ARGUMENTS if not name.endswith("_token"))
        close = did_you_mean(unread[0], own)
        raise UserError(
            f"data.chat_template_kwargs: the chat template reads no {' and no '.join(unread)}",
            (f"did you mean {close}? " if close else "")
            + (f"it reads {', '.join(own)}" if own else "remove data.chat_template_kwargs: it reads none"),
        )


def fixed_prompt(
    tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, settings: Mapping[str, Any] | None
) -> str | None:
    """What the template writes before an answer, whatever the conversation is; None if that may depend on it."""
    last = _prompt_template(tokenizer.get_chat_template(tools=tools))
    if last is None:
        return None
    with in_time():
        return last.render({**tokenizer.special_tokens_map, **(settings or {})})


@lru_cache(maxsize=16)
def _prompt_template(source: str) -> jinja2.Template | None:
    """The end of a template, if only that asks for `add_generation_prompt`, and reads nothing that another part of it
    or the conversation gives; else None."""
    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    last = tree.body[-1] if tree.body else None
    if not (isinstance(last, nodes.If) and isinstance(last.test, nodes.Name) and not (last.elif_ or last.else_)):
        return None
    asks = [each for each in tree.find_all(nodes.Name) if each.name == "add_generation_prompt"]
    if asks != [last.test] or any(last.find_all((nodes.Call, nodes.Filter, nodes.For, nodes.Assign))):
        return None
    written = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    part = nodes.Template(last.body, lineno=1)
    part.set_environment(environment)
    if find_undeclared_variables(part) & {*written, *_OF_CONVERSATIONS}:
        return None
    return environment.from_string(part)


@lru_cache(maxsize=16)
def writes_straight(source: str) -> bool:
    """Whether what a template's loops write becomes part of the text as it is: it is neither collected in a variable, a
    macro or a block before, nor returned by a recursive loop, so no other part of the template sees the markers."""
    tree = _compile_jinja_template(source).environment.parse(source)
    collecting = (nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)
    nested = any(any(each.find_all((nodes.For, nodes.CallBlock))) for each in tree.find_all(collecting))
    return not nested and not any(loop.recursive for loop in tree.find_all(nodes.For))
