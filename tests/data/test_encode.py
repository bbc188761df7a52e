"""Which tokens of a row are trained, for the structures that chat templates of real models have."""

from __future__ import annotations

import copy
import pickle
import random
import time
import tracemalloc
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import pytest
from data_fixtures import chatml_tokenizer, plain_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from toolkit.common import UserError
from toolkit.data.encoding import chat_spans, chat_template, template_limits
from toolkit.data.encoding.chat_spans import ENOUGH, Conversation, render
from toolkit.data.encoding.chat_template import fixed_prompt, load_chat_template
from toolkit.data.encoding.encode import Encoded, Encoder
from toolkit.data.rows import IGNORE, Chat, Completion, Pair, Prompted, Row, Segments, Tagged, Text, Tokens

CHATML = load_chat_template("chatml")
LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + (tool_call.arguments | tojson) + "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {{- (tool_call.function|tojson) + ("]" if loop.last else ", ") }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
QWEN_3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + tool_call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
DEEPSEEK = """\
{% set ns = namespace(is_tool=false, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}\
{{'<|Assistant|><|call|>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] + '<|/call|>'}}\
{%- endfor %}{{ eos_token }}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}\
{%- if ns.is_tool %}{{'<|/outputs|>' + message['content'] + eos_token}}{%- set ns.is_tool = false -%}\
{%- else %}{{'<|Assistant|>' + message['content'].split('</think>')[-1] + eos_token}}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{'<|outputs|>' + message['content']}}{%- endif %}\
{%- endfor -%}{% if ns.is_tool %}{{'<|/outputs|>'}}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"""
PHI_3 = """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
ALPACA = """\
{% for message in messages %}
{%- if message.role == 'user' %}### Instruction:
{{ message.content }}

{% elif message.role == 'assistant' %}### Response:
{{ message.content }}{{ eos_token }}

{% endif %}{% endfor %}"""
BY_INDEX = """\
{%- for index in range(messages|length) %}
    {%- if messages[index].role == 'system' %}{% continue %}{% endif %}
    {{- messages[index].role | upper + ': ' + messages[index].content + eos_token }}
{%- endfor %}
{{- 'ASSISTANT: ' if add_generation_prompt }}"""
# The stop token is written where the next turn begins, and after the last one.
STOP_BEFORE_NEXT = """\
{%- for message in messages %}
    {{- '<|end|>\\n' if not loop.first }}
    {{- '<|' + message.role + '|>\\n' + message.content }}
{%- endfor %}
{{- '<|end|>' }}{{ '\\n<|assistant|>\\n' if add_generation_prompt }}"""
# No loop over the messages, and a join that markers would disturb.
JOINED = "{{ messages | map(attribute='content') | join('<|end|>') }}<|end|>"
RECURSIVE_MACRO = """\
{%- macro turn(i) %}{% if i < messages|length %}
{{- '<|im_start|>' + messages[i].role + '\\n' + messages[i].content + '<|im_end|>\\n' + turn(i + 1) }}
{%- endif %}{% endmacro %}{{ turn(0) }}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""
GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}"""

# TRL carries the templates of released models; those for images read no plain text.
RELEASED = [
    Path(str(path))
    for path in sorted(files("trl").joinpath("chat_templates").iterdir(), key=str)
    if path.name.endswith(".jinja") and not path.name.startswith(("llava", "idefics", "smolvlm"))
]

SPECIAL = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<|user|>", "<|assistant|>", "<|system|>"]
SPECIAL += ["<|User|>", "<|Assistant|>", "<|call|>", "<|end|>", "<s>", "</s>"]
STOPS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")

USER = {"role": "user", "content": "Hi there"}
HELLO = {"role": "assistant", "content": "Hello!"}
MORE = {"role": "user", "content": "What is 2+2?"}
FOUR = {"role": "assistant", "content": "<b>4</b>, of\ncourse"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "4 from the tool"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = plain_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|im_start|>", "<|im_end|>"]})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "<s>", "</s>", template
    return tokenizer


def encoder_for(template: str, train_on: str | list[str] = "auto") -> Encoder:
    tokenizer = tokenizer_with(template)
    return Encoder(tokenizer, train_on, frozenset(tokenizer.convert_tokens_to_ids(list(STOPS))))


def trained(encoder: Encoder, row: Row) -> list[str]:
    """The runs of trained tokens as text; checks what holds for every decoder-only row."""
    encoded = encoder(row)
    assert encoded.labels[0] == IGNORE
    assert all(label in (IGNORE, token) for token, label in zip(encoded.input_ids, encoded.labels, strict=True))
    if isinstance(row, Chat):
        messages = [{k: v for k, v in m.items() if k not in ("train", "untrained")} for m in row.messages]
        assert encoded.input_ids == ids_of(encoder.tokenizer, messages, row.tools)
    return runs(encoder.tokenizer, encoded)


def ids_of(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    except TypeError:  # templates that want the arguments of tool calls as JSON text
        messages = copy.deepcopy(messages)
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"] = {**call["function"], "arguments": '{"a": 2, "b": 2}'}
        return tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]


def runs(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> list[str]:
    groups: list[list[int]] = []
    previous = IGNORE
    for label in encoded.labels:
        if label != IGNORE:
            if previous == IGNORE:
                groups.append([])
            groups[-1].append(label)
        previous = label
    return [tokenizer.decode(group) for group in groups]


CASES = {
    "chatml": (CHATML, "<|im_end|>", "", True),
    "llama_3": (LLAMA_3, "<|eot_id|>", "", True),
    "mistral": (MISTRAL, "</s>", " ", True),
    "gemma": (GEMMA, "<end_of_turn>", "", False),
    "zephyr": (ZEPHYR, "</s>", "", True),
    "llama_2": (LLAMA_2, " </s>", " ", True),
    "deepseek": (DEEPSEEK, "</s>", "", True),
    "phi_3": (PHI_3, "<|end|>", "", True),
    "alpaca": (ALPACA, "</s>", "", True),
    "by_index": (BY_INDEX, "</s>", "", True),
    "stop_before_next": (STOP_BEFORE_NEXT, "<|end|>", "", True),
    "recursive_macro": (RECURSIVE_MACRO, "<|im_end|>", "", True),
    "generation": (GENERATION, "<|im_end|>", "", True),
}


@pytest.mark.parametrize("name", CASES)
def test_assistant_turns_and_their_stop_tokens_are_trained(name: str) -> None:
    template, stop, lead, takes_system = CASES[name]
    messages = [*([SYSTEM] if takes_system else []), USER, HELLO, MORE, FOUR]
    first, second = (lead + turn["content"] + stop for turn in (HELLO, FOUR))
    assert trained(encoder_for(template), Chat(messages)) == [first, second]
    assert trained(encoder_for(template, "last_assistant"), Chat(messages)) == [second]
    muted = [m if m is not HELLO else {**HELLO, "train": False} for m in messages]
    assert trained(encoder_for(template), Chat(muted)) == [second]
    assert trained(encoder_for(template, "completion"), Chat(muted)) == [second]


@pytest.mark.parametrize(
    ("template", "call", "answer"),
    [
        (CHATML, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>', "<|im_end|>"),
        (LLAMA_3, '{"name": "add", "parameters": {"a": 2, "b": 2}}<|eot_id|>', "<|eot_id|>"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 2}}]</s>', "</s>"),
        (DEEPSEEK, '<|call|>add\n{"a": 2, "b": 2}<|/call|></s>', "</s>"),
    ],
    ids=["chatml", "llama_3", "mistral", "deepseek"],
)
def test_tool_calls_are_trained_and_tool_results_are_not(template: str, call: str, answer: str) -> None:
    row = Chat([MORE, CALL, RESULT, HELLO], TOOLS)
    lead = " " if template is MISTRAL else ""
    assert trained(encoder_for(template), row) == [call, f"{lead}Hello!{answer}"]


def test_reasoning_that_the_template_strips_from_history_is_trained_only_where_it_is_rendered() -> None:
    thinking = [{**HELLO, "content": "<think>\nhm\n</think>\n\nHello!"}, {**FOUR, "reasoning_content": "2 and 2"}]
    row = Chat([SYSTEM, USER, thinking[0], MORE, thinking[1]])
    last = "<think>\n2 and 2\n</think>\n\n<b>4</b>, of\ncourse<|im_end|>"
    assert trained(encoder_for(QWEN_3), row) == ["Hello!<|im_end|>", last]
    assert trained(encoder_for(QWEN_3, "last_assistant"), row) == [last]
    call = {**CALL, "reasoning_content": "use the tool"}
    assert trained(encoder_for(QWEN_3), Chat([MORE, call, RESULT, HELLO], TOOLS)) == [
        "<think>\nuse the tool\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\nHello!<|im_end|>",
    ]


def test_generation_blocks_give_the_mask_of_transformers() -> None:
    encoder = encoder_for(GENERATION)
    row = Chat([USER, HELLO, MORE, FOUR])
    mask = encoder.tokenizer.apply_chat_template(row.messages, return_dict=True, return_assistant_tokens_mask=True)
    assert [int(label != IGNORE) for label in encoder(row).labels] == mask["assistant_masks"]


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_templates_of_released_models_train_what_the_assistant_says_and_nothing_else(path: Path) -> None:
    encoder = encoder_for(path.read_text(encoding="utf-8"))
    pieces = trained(encoder, Chat([USER, HELLO, MORE, FOUR]))
    text = "".join(pieces)
    assert "Hello!" in text and "<b>4</b>, of\ncourse" in text
    assert "Hi there" not in text and "What is" not in text
    assert "Hello!" not in "".join(trained(encoder, Chat([USER, {**HELLO, "train": False}, MORE, FOUR])))


def test_everything_is_trained_on_request_except_turns_that_are_excluded() -> None:
    encoder = encoder_for(CHATML, "all")
    encoded = encoder(Chat([SYSTEM, USER, HELLO]))
    assert encoded.labels == [IGNORE, *encoded.input_ids[1:]]
    assert "".join(trained(encoder, Chat([SYSTEM, {**USER, "train": False}, HELLO]))) == (
        "system\nBe kind.<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    )


def test_a_template_that_hides_its_turns_is_refused_with_the_remedy() -> None:
    row = Chat([USER, HELLO, MORE, FOUR])
    hidden = "{{ messages | map(attribute='content') | join(' ') | upper }}{{ messages | length }}"
    with pytest.raises(UserError, match=r"last_assistant.*generation"):
        encoder_for(hidden)(row)
    assert trained(encoder_for(JOINED), row) == ["Hello!<|end|>", "<b>4</b>, of\ncourse<|end|>"]


def test_a_template_that_leaves_out_what_the_assistant_says_is_refused() -> None:
    silent = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(UserError, match=r"leaves out the tool calls of message 1[\s\S]*model\.chat_template"):
        encoder_for(silent)(Chat([MORE, CALL, RESULT, HELLO], TOOLS))
    part = "{% for p in m.content if p.words is defined %}{{ p.words }}{% endfor %}"
    parts_of_its_own = f"{{% for m in messages %}}{{{{ m.role }}}}:{part}{{% endfor %}}"
    with pytest.raises(UserError, match=r"leaves out the text of message 1"):
        encoder_for(parts_of_its_own, "all")(Chat([USER, HELLO]))


def test_what_a_template_refuses_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"System role not supported[\s\S]*model\.chat_template"):
        encoder_for(GEMMA)(Chat([SYSTEM, USER, HELLO]))
    with pytest.raises(UserError, match=r"no chat template[\s\S]*model\.chat_template"):
        Encoder(plain_tokenizer(), "auto", frozenset())(Chat([USER, HELLO]))


def test_markers_and_flags_never_reach_the_tokens() -> None:
    dump = "{% for m in messages %}{{ m | tojson }}<|end|>{% endfor %}"
    encoder = encoder_for(dump)
    text = encoder.tokenizer.decode(encoder(Chat([USER, {**HELLO, "train": True}])).input_ids)
    assert text == '{"role": "user", "content": "Hi there"}<|end|>{"role": "assistant", "content": "Hello!"}<|end|>'
    forged = {"role": "user", "content": "\U000ff0a0T0:1\U000ff0a1 not me"}
    assert trained(encoder_for(CHATML), Chat([forged, HELLO])) == ["Hello!<|im_end|>"]


def test_text_is_trained_whole_and_ends_with_the_end_of_sequence() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    encoded = encoder(Text("The quick brown fox"))
    assert encoder.tokenizer.decode(encoded.input_ids) == "The quick brown fox<|endoftext|>"
    assert encoded.labels == [IGNORE, *encoded.input_ids[1:]]


def test_a_token_that_the_model_has_no_embedding_for_is_refused_where_a_row_has_it() -> None:
    tokenizer = plain_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    encoder = Encoder(tokenizer, "auto", frozenset({0}), vocab_size=size)
    assert encoder(Text("fox")) == Encoder(tokenizer, "auto", frozenset({0}))(Text("fox"))
    for row in (Text("fox <tool>"), Pair("fox", "<tool>")):
        with pytest.raises(UserError, match=rf"'<tool>' \({size}\), but the model has embeddings for {size} tokens"):
            encoder(row)
    with pytest.raises(UserError, match=rf"The prompt has the token '<tool>' \({size}\)"):
        encoder.prompt_ids(Prompted(Completion("fox <tool>", ""), {"answer": ""}))


def test_words_of_a_row_may_be_more_than_the_tokens_of_the_vocabulary() -> None:
    tokenizer = plain_tokenizer()
    words = ["a"] * (len(tokenizer) + 1)
    encoded = Encoder(tokenizer, "auto", frozenset({0}), vocab_size=len(tokenizer))(Tagged(words, ["X"] * len(words)))
    assert max(encoded.labels) == len(tokenizer)


def test_only_the_completion_is_trained() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    row = Completion("The quick brown", " fox jumps")
    assert trained(encoder, row) == [" fox jumps<|endoftext|>"]
    assert not encoder(row).boundary_merged
    merged = encoder(Completion("The quick br", "own fox"))
    assert merged.boundary_merged
    assert runs(encoder.tokenizer, merged) == [" brown fox<|endoftext|>"]
    everything = Encoder(plain_tokenizer(), "all", frozenset({0}))(row)
    assert everything.labels == [IGNORE, *everything.input_ids[1:]]


def test_the_target_of_a_pair_is_trained_whole() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    encoded = encoder(Pair("What does this", "It returns"))
    assert encoder.tokenizer.decode(encoded.input_ids) == "What does this"
    assert encoder.tokenizer.decode(encoded.labels) == "It returns<|endoftext|>"


def test_prompts_end_where_the_model_speaks() -> None:
    encoder = Encoder(chatml_tokenizer(), "auto", frozenset({2}))
    prompt, answer = encoder.prompt_text(Chat([USER, HELLO, MORE, FOUR]))
    assert prompt.endswith("What is 2+2?<|im_end|>\n<|im_start|>assistant\n") and answer == FOUR["content"]
    row = Chat([USER, HELLO])
    encoded = encoder(row)
    first = next(i for i, label in enumerate(encoded.labels) if label != IGNORE)
    assert encoder.prompt_ids(row) == encoded.input_ids[:first]
    assert encoder.prompt_text(Completion("a", "b")) == ("a", "b")
    assert encoder.prompt_text(Text("one two three four")) == ("one two", " three four")


def test_an_encoder_survives_pickling() -> None:
    encoder = encoder_for(QWEN_3)
    row = Chat([USER, HELLO])
    assert pickle.loads(pickle.dumps(encoder))(row) == encoder(row)


def test_tokenizers_without_offsets_or_end_of_sequence_are_refused() -> None:
    tokenizer = plain_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-sequence"):
        Encoder(tokenizer, "auto", frozenset())(Text("a b c"))

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match=r"model\.tokenizer"):
        Encoder(Slow(), "auto", frozenset())  # type: ignore[arg-type]


def test_chat_templates_come_by_name_or_file(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(ZEPHYR, encoding="utf-8")
    assert load_chat_template(str(path)) == ZEPHYR
    path.write_text(ZEPHYR, encoding="utf-8-sig")
    assert load_chat_template(str(path)) == ZEPHYR, "a byte order mark is no part of a conversation"
    path.write_text("fine\n{% for m in messages %}", encoding="utf-8")
    with pytest.raises(UserError, match=r"own\.jinja, line 2"):
        load_chat_template(str(path))
    with pytest.raises(UserError, match="chatml"):
        load_chat_template("chatlm")


def test_prompts_of_tool_calls_for_templates_that_want_their_arguments_as_text() -> None:
    encoder = encoder_for(DEEPSEEK)
    prompt, answer = encoder.prompt_text(Chat([MORE, CALL, RESULT, HELLO], TOOLS))
    assert '<|call|>add\n{"a": 2, "b": 2}<|/call|>' in prompt and answer == "Hello!"


def test_an_answer_is_what_the_template_makes_of_thoughts_and_calls() -> None:
    plain = QWEN_3.replace("<think>", "<thought>").replace("</think>", "</thought>")  # Which are special tokens here.
    encoder = encoder_for(plain)
    calling, thinking = Chat([MORE, CALL], TOOLS), Chat([USER, {**HELLO, "reasoning_content": "Say hello."}])
    for row in (calling, thinking):
        (said,) = runs(encoder.tokenizer, encoder(row))
        assert encoder.prompt_text(row)[1] + "<|im_end|>" == said
    assert "<tool_call>" in encoder.prompt_text(calling)[1]
    assert encoder.prompt_text(thinking)[1] == "<thought>\nSay hello.\n</thought>\n\nHello!"
    assert encoder.prompt_text(Chat([*thinking.messages, MORE])) == encoder.prompt_text(thinking)


def test_settings_reach_the_template_in_training_and_in_prompts() -> None:
    encoder = encoder_for("{% if loud %}LOUD {% endif %}" + CHATML)
    loud = Encoder(encoder.tokenizer, "auto", encoder.stop_token_ids, {"loud": True})
    row = Chat([USER, HELLO])
    assert encoder.tokenizer.decode(loud(row).input_ids).startswith("LOUD ")
    assert runs(encoder.tokenizer, loud(row)) == ["Hello!<|im_end|>"]
    assert loud.prompt_text(row)[0] == "LOUD " + encoder.prompt_text(row)[0]
    quiet = Chat([USER, HELLO], template_kwargs={"loud": False})
    assert loud(quiet) == encoder(row) and loud.prompt_ids(quiet) == encoder.prompt_ids(row)


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, ZEPHYR, PHI_3, GENERATION], ids=lambda text: text[:12])
def test_turns_of_other_roles_are_trained_with_their_stop_tokens(template: str) -> None:
    asked, answered = trained(encoder_for(template, ["user", "assistant"]), Chat([USER, HELLO]))
    assert asked.startswith("Hi there") and answered.startswith("Hello!")
    assert any(asked.rstrip().endswith(stop) for stop in STOPS)


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_a_part_of_an_answer_is_left_out_under_templates_of_released_models(path: Path) -> None:
    encoder = encoder_for(path.read_text(encoding="utf-8"))
    partly = {"role": "assistant", "content": "Skip this. Learn that.", "untrained": {"content": [[0, 11]]}}
    text = "".join(trained(encoder, Chat([USER, partly])))
    assert "Skip" not in text and "Learn that." in text


def test_training_all_leaves_out_what_messages_leave_out() -> None:
    encoder = Encoder(chatml_tokenizer(), "all", frozenset({2}))
    whole = "".join(trained(encoder, Chat([USER, HELLO])))
    partly = HELLO | {"content": "Skip this. Learn that.", "untrained": {"content": [[0, 11]]}}
    for row, left_out, kept in (
        (Chat([USER, partly]), ["Skip"], [USER["content"], "Learn that."]),
        (Chat([USER | {"train": False}, HELLO]), [USER["content"]], [HELLO["content"]]),
        (
            Chat([USER | {"untrained": {"content": [[0, 1]]}}, HELLO]),
            [USER["content"]],
            [USER["content"][1:], whole[-5:]],
        ),
    ):
        text = "".join(trained(encoder, row))
        assert not any(part in text for part in left_out) and all(part in text for part in kept), text


def test_segments_and_tokens_are_trained_as_they_are() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    row = Segments([("The quick", False), (" brown fox", True), (" jumps", False), ("!<|endoftext|>", True)])
    assert trained(encoder, row) == [" brown fox", "!<|endoftext|>"]
    assert encoder.prompt_text(row) == ("The quick brown fox jumps", "!")
    assert encoder.prompt_ids(row) == encoder(row).input_ids[: -len(encoder.tokenizer("!<|endoftext|>")["input_ids"])]
    tokens = Tokens([5, 6, 7, 0], [IGNORE, IGNORE, 7, 0])
    assert encoder(tokens) == Encoded([5, 6, 7, 0], [IGNORE, IGNORE, 7, 0]) and encoder.prompt_ids(tokens) == [5, 6]
    assert encoder.prompt_text(tokens) == (encoder.tokenizer.decode([5, 6]), encoder.tokenizer.decode([7]))
    with pytest.raises(UserError, match="has the token 9999"):
        encoder(Tokens([9999], [IGNORE]))


def ending(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that ends every text itself, as T5's does."""
    from tokenizers.processors import TemplateProcessing

    processor = TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def test_a_text_ends_once_whether_or_not_the_tokenizer_ends_it() -> None:
    plain, ends = (
        Encoder(tokenizer, "auto", frozenset()) for tokenizer in (plain_tokenizer(), ending(plain_tokenizer()))
    )
    assert ends.tokenizer("fox")["input_ids"][-1] == 0 and plain.stop_token_ids == {0}
    for row in (Text("fox"), Completion("fox", " dog")):
        assert ends(row) == plain(row) and ends(row).input_ids.count(0) == 1
        assert ends.prompt_ids(row) == plain.prompt_ids(row) and 0 not in ends.prompt_ids(row)
    pair = Pair("fox", "dog")
    assert ends(pair).labels == plain(pair).labels and ends(pair).input_ids == [*plain(pair).input_ids, 0]
    assert ends.prompt_ids(pair) == ends(pair).input_ids
    segments = Segments([("fox", False), (" dog", True)])
    assert ends(segments) == plain(segments) and ends.prompt_ids(segments) == plain.prompt_ids(segments)


def test_rows_without_a_token_are_rows_without_a_token() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset())
    assert encoder(Text("")) == Encoded([0], [IGNORE])
    assert encoder(Completion("", "")) == Encoded([0], [IGNORE])
    assert encoder(Segments([])) == encoder(Segments([("", True)])) == Encoded([], [])
    assert encoder(Tokens([], [])) == Encoded([], [])
    assert encoder(Completion("", "fox dog")).labels[:1] == [IGNORE]
    assert encoder(Pair("", "")) == Encoded([], [0])


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        (Text("one two three four"), "one two", " three four"),
        (Text("onetwothreefour"), "onetwot", "hreefour"),
        (Text(" ab"), " ", "ab"),
        (Text("a"), "", "a"),
        (Pair("a", "b"), "a", "b"),
        (Segments([("a", False), ("b", True), ("c", False)]), "a", "bc"),
        (Segments([("a", True), ("b", False), ("c", True), ("d", True)]), "abc", "d"),
        (Segments([("a", False), ("b", False)]), "ab", ""),
        (Segments([("a", True)]), "", "a"),
    ],
)
def test_a_row_is_asked_and_answered(row: Row, prompt: str, answer: str) -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    assert encoder.prompt_text(row) == (prompt, answer)
    assert encoder.prompt_ids(row) == encoder.tokenizer(prompt)["input_ids"]


@pytest.mark.parametrize(
    ("trained_at", "begins"),
    [("00110011", 6), ("00110010", 6), ("0111", 1), ("0000", 4), ("0001", 3), ("01100", 1), ("", 0)],
)
def test_tokens_are_asked_up_to_their_last_answer(trained_at: str, begins: int) -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    ids = [40 + n for n in range(len(trained_at))]
    row = Tokens(ids, [token if flag == "1" else IGNORE for token, flag in zip(ids, trained_at, strict=True)])
    assert encoder.prompt_ids(row) == ids[:begins]
    assert encoder.prompt_text(row) == (encoder.tokenizer.decode(ids[:begins]), encoder.tokenizer.decode(ids[begins:]))


def test_a_chat_is_asked_up_to_its_last_answer() -> None:
    encoder = Encoder(chatml_tokenizer(), "auto", frozenset({2}))
    whole, answer = encoder.prompt_text(Chat([USER]))
    assert whole.endswith("Hi there<|im_end|>\n<|im_start|>assistant\n") and answer == ""
    prompt, answer = encoder.prompt_text(Chat([USER, HELLO, MORE]))
    assert prompt == whole and answer == "Hello!"
    prompt, answer = encoder.prompt_text(Chat([USER, CALL]))
    assert prompt == whole and '"name": "add"' in answer, "of a template that writes no calls"
    assert encoder.prompt_ids(Chat([USER])) == encoder.tokenizer(whole)["input_ids"]
    refusing = encoder_for("{{ raise_exception('no') }}")
    with pytest.raises(UserError, match=r"refuses this conversation: no"):
        refusing.prompt_text(Chat([USER]))


def test_developers_are_systems_where_the_template_does_not_know_them() -> None:
    developer = {"role": "developer", "content": "Be kind."}
    ordinary, knowing = encoder_for(CHATML), encoder_for("{# developer #}" + CHATML)
    assert ordinary(Chat([developer, USER, HELLO])) == ordinary(Chat([SYSTEM, USER, HELLO]))
    assert "developer\nBe kind." in knowing.tokenizer.decode(knowing(Chat([developer, USER, HELLO])).input_ids)
    assert "system\nBe kind." in ordinary.prompt_text(Chat([developer, USER]))[0]
    assert "developer\nBe kind." in knowing.prompt_text(Chat([developer, USER]))[0]


@pytest.mark.parametrize("train_on", ["auto", "all"])
@pytest.mark.parametrize(
    "template", [CHATML, LLAMA_3, GENERATION, ZEPHYR], ids=["chatml", "llama_3", "generation", "zephyr"]
)
@pytest.mark.parametrize("seed", range(5))
def test_of_several_gaps_in_several_answers_no_character_is_trained(seed: int, template: str, train_on: str) -> None:
    """And every token that touches none of them is as it was."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = []
    for number in range(3):
        messages.append({"role": "user", "content": f"Question {number}?"})
        messages.append({"role": "assistant", "content": f"<{number}> " + " ".join(f"w{number}{n}" for n in range(12))})
    marked = [dict(message) for message in messages]
    for message in marked[1::2]:
        edges = sorted(draw.sample(range(len(message["content"])), 4))
        message["untrained"] = {"content": [edges[:2], edges[2:]]}
    encoder = encoder_for(template, train_on)
    before, after = encoder(Chat(messages)), encoder(Chat(marked))
    assert before.input_ids == after.input_ids
    text = encoder.tokenizer.apply_chat_template(messages, tokenize=False)
    gaps = [
        range(text.index(message["content"]) + start, text.index(message["content"]) + end)
        for message in marked[1::2]
        for start, end in message["untrained"]["content"]
    ]
    offsets = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    touched = [any(set(range(*offset)) & set(gap) for gap in gaps) for offset in offsets]
    expected = [IGNORE if hit else label for hit, label in zip(touched, before.labels, strict=True)]
    assert after.labels == expected and any(touched)


def test_a_gap_to_the_end_takes_the_stop_token_along() -> None:
    content = "Learn this. Skip that."
    for end in (len(content), len(content) + 3):
        partly = {"role": "assistant", "content": content, "untrained": {"content": [[11, end]]}}
        assert trained(encoder_for(CHATML), Chat([USER, partly])) == ["Learn this."]
    inner = {"role": "assistant", "content": content, "untrained": {"content": [[0, 12]]}}
    assert trained(encoder_for(CHATML), Chat([USER, inner])) == ["Skip that.<|im_end|>"]
    spaced = {"role": "assistant", "content": f"  {content}\n", "untrained": {"content": [[0, 14]]}}
    assert trained(encoder_for(LLAMA_3), Chat([USER, spaced])) == ["Skip that.<|eot_id|>"]
    both = {
        "role": "assistant",
        "content": "same",
        "reasoning_content": "same",
        "untrained": {"reasoning_content": [[0, 4]]},
    }
    assert trained(encoder_for(QWEN_3), Chat([USER, both])) == ["<think>\n", "\n</think>\n\nsame<|im_end|>"]
    upper = encoder_for(
        CHATML.replace("message.content", "(message.content | upper)").replace(
            "message['content']", "(message['content'] | upper)"
        )
    )
    with pytest.raises(UserError, match="changes the content of message 1, of which only a part is trained"):
        upper(Chat([USER, inner]))


def test_tokens_of_other_vocabularies_are_refused() -> None:
    encoder = Encoder(plain_tokenizer(), "auto", frozenset({0}))
    size = len(encoder.tokenizer)
    assert encoder(Tokens([0, size - 1], [IGNORE, size - 1])).input_ids == [0, size - 1]
    for wrong in ([0, size], [-1, 5]):
        with pytest.raises(UserError, match=f"the tokenizer {size} tokens"):
            encoder(Tokens(wrong, [IGNORE, IGNORE]))
    everything = Encoder(encoder.tokenizer, "all", frozenset({0}))
    assert everything(Tokens([5, 6, 7], [IGNORE, IGNORE, 7])).labels == [IGNORE, 6, 7]
    segments = Segments([("fox", False), (" dog", True)])
    assert everything(segments).labels == [IGNORE, *everything(segments).input_ids[1:]]
    limited = Encoder(encoder.tokenizer, "auto", frozenset({0}), vocab_size=size)
    assert limited(Tokens([0, size - 1], [IGNORE, size - 1])).labels == [IGNORE, size - 1]
    smaller = Encoder(encoder.tokenizer, "auto", frozenset({0}), vocab_size=size - 1)
    for row in (Tokens([0, size - 1], [IGNORE, IGNORE]), Tokens([size - 1, 0], [IGNORE, 0])):
        with pytest.raises(UserError, match=rf"\({size - 1}\), but the model has embeddings for {size - 1} tokens"):
            smaller(row)


def test_a_template_that_is_no_text_or_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"a\.jinja is not UTF-8 text"):
        load_chat_template(str(tmp_path / "a.jinja"))
    with pytest.raises(UserError, match="there is no file and no built-in template"):
        load_chat_template(str(tmp_path))


def test_a_turn_is_trained_whole_where_the_prompt_is_written_otherwise() -> None:
    """Nothing says then which of it is a header."""
    turns = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}</s>{% endfor %}"
    for prompt in ("Bot> ", "A> "):
        encoder = encoder_for(f"{turns}{{% if add_generation_prompt %}}{prompt}{{% endif %}}")
        row = Chat([USER, HELLO, MORE, FOUR])
        assert trained(encoder, row) == [f"ASSISTANT: {turn['content']}</s>" for turn in (HELLO, FOUR)]
    assert trained(encoder_for(turns), row) == [f"{turn['content']}</s>" for turn in (HELLO, FOUR)]


PROMPTED = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}"


@pytest.mark.parametrize(
    ("template", "settings", "fixed"),
    [
        (PROMPTED + "Answer:{% endif %}", {}, "Answer:"),
        (
            PROMPTED + "{{ bos_token }}{% if calm %}Calm{% else %}Loud{% endif %}:{% endif %}",
            {"calm": True},
            "<s>Calm:",
        ),
        (PROMPTED + "{{ bos_token }}{% if calm %}Calm{% else %}Loud{% endif %}:{% endif %}", {}, "<s>Loud:"),
        # What may depend on the conversation, or is not the end of the text without it.
        (PROMPTED + "{{ messages[-1].role }}{% endif %}", {}, None),
        ("{% set name = messages[0].role %}" + PROMPTED + "{{ name }}{% endif %}", {}, None),
        (PROMPTED + "Answer{% else %}Done{% endif %}", {}, None),
        (PROMPTED + "Answer{% endif %}.", {}, None),
        (PROMPTED + "{{ raise_exception('no') }}{% endif %}", {}, None),
        ("{% if add_generation_prompt %}Question{% endif %}" + PROMPTED + "Answer{% endif %}", {}, None),
        (PROMPTED.replace("prompt %}", "prompt and messages %}") + "Answer{% endif %}", {}, None),
    ],
)
def test_what_stands_before_every_answer_is_known_from_the_template(
    template: str, settings: dict[str, Any], fixed: str | None
) -> None:
    assert fixed_prompt(tokenizer_with(template), None, settings) == fixed


def test_what_stands_before_every_answer_is_what_released_templates_write() -> None:
    known = 0
    for template in [*(each.read_text("utf-8") for each in RELEASED), *(case[0] for case in CASES.values())]:
        tokenizer = tokenizer_with(template)
        for settings in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            fixed = fixed_prompt(tokenizer, None, settings)
            known += fixed is not None
            for history in ([USER], [SYSTEM, USER, HELLO, MORE]) if fixed is not None else ():
                with suppress(jinja2.TemplateError):
                    text = render(tokenizer, history, None, settings)
                    assert render(tokenizer, history, None, settings, prompt=True) == text + (fixed or "")
    assert known > 60


def test_what_agreed_often_enough_goes_on_to_agree() -> None:
    """From then on the marked text alone is rendered, where the syntax of a template shows that it cannot differ."""
    trusted = 0
    for template in [*(each.read_text("utf-8") for each in RELEASED), *(case[0] for case in CASES.values())]:
        tokenizer = tokenizer_with(template)
        chat_spans._AGREED.clear()
        with suppress(jinja2.TemplateError, UserError):
            for _ in range(ENOUGH):
                Conversation(tokenizer, [USER, HELLO, MORE, FOUR], None)
        trusted += chat_spans._AGREED[template] == ENOUGH
        odd = {"role": "user", "content": "\U000ff0a0T0:0\U000ff0a1?"}
        thinks = FOUR | {"reasoning_content": "Two and two."}
        for messages, tools, settings in (
            ([USER, HELLO, MORE, FOUR], None, None),
            ([SYSTEM, USER, FOUR], None, {"enable_thinking": False}),
            ([odd, HELLO], None, None),
            ([USER, thinks], None, None),
            ([USER | {"name": None}, HELLO], None, None),
            ([USER, CALL, RESULT, FOUR], TOOLS, None),
        ):
            with suppress(jinja2.TemplateError, TypeError, UserError):
                made = Conversation(tokenizer, messages, tools, settings)
                assert made.text == render(tokenizer, made.messages, tools, settings)
                agreed, chat_spans._AGREED[template] = chat_spans._AGREED[template], 0
                assert Conversation(tokenizer, messages, tools, settings).turns == made.turns
                chat_spans._AGREED[template] = agreed
    assert trusted > 15
    chat_spans._AGREED.clear()


@pytest.mark.parametrize(
    "template",
    [
        "{% set text %}{% for m in messages %} {{ m.content }}{% endfor %}{% endset %}{{ text | length }}",
        "{% macro all() %}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}{{ all() | length }}",
        "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
        "{% for m in messages recursive %}{{ m.content }}{% if loop.depth < 2 %}{{ loop(messages) | length }}"
        "{% endif %}{% endfor %}",
    ],
)
def test_a_template_that_could_see_the_markers_is_never_taken_to_agree(template: str) -> None:
    tokenizer = tokenizer_with(template)
    for count in range(ENOUGH + 2):
        messages = [{"role": "user", "content": "a" * count}, HELLO]
        assert Conversation(tokenizer, messages, None).text == render(tokenizer, messages, None, None)
    assert not chat_spans._AGREED[template]


HOSTILE = {
    "loops": (
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "more than 0.2 seconds",
    ),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "repetition": ("{{ 'x' * 10**10 }}", "repeats a text 10000000000 times"),
    "power": ("{{ 9**9**9 }}", "to the power of 9"),
    **{
        code: (f"{{{{ {code} }}}}", "with the number 10000000000")
        for code in (
            "'a'.center(10**10)",
            "'a'|center(10**10)",
            "'a'|indent(width=10**10)",
            "'7'.zfill(10**10)",
            "(1).to_bytes(10**10, 'big')",
            "'%10000000000d' % 1",
            "'%*d' % (10**10, 1)",
            "'%.10000000000f'|format(1.5)",
            "'{:>10000000000}'.format(1)",
            "'{:>{}}'.format(1, 10**10)",
            "'{:{w}}'.format_map({'w': 10**10})",
            "['a']|batch(10**10, 'x')|list",
            "5|round(-10**10)",
        )
    },
    **{
        name: (
            f"{{{{ ('<' * 2**21)|{name} }}}}",
            f"has `{name.partition('(')[0]}` work on a text of more than 1,048,576 characters",
        )
        for name in ("pprint", "striptags", "title", "urlize", "wordwrap(10)")
    },
    "replacing": ("{{ ('a' * 10**7)|replace('a', 'b' * 10**7) }}", "a text of 10000000 characters"),
    "joining": ("{{ ('a' * 10**7).join('b' * 10**7) }}", "a text of 10000000 characters"),
    "long numbers": (
        "{% set n = namespace(x=9) %}{% for i in range(90) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "multiplies numbers",
    ),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "refusal": ("{{ raise_exception('no\x1b[2J') }}", r"no\x1b[2J"),
    "infinity": ("{{ 1e999 * 2 }}", "inf"),
    "no-attribute": ("{{ messages.foo.bar }}", "foo"),
    "forbidden": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "elsewhere": ("{% include '/etc/passwd' %}", "loader"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_one_short_error_soon(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    template, words = HOSTILE[kind]
    row = Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}])
    for encode in (encoder_for(template), encoder_for(template + CHATML)):
        for ask in (encode, encode.prompt_text):
            with pytest.raises(UserError, match="chat template") as caught:
                ask(row)
            assert words in str(caught.value) and len(str(caught.value)) < 500


GROWING = {
    **{
        step: f"{{% macro m(x) %}}{{{{ x }}}}{{{{ x }}}}{{% endmacro %}}{{% set n = namespace(x='ab', l=[1, 2]) %}}"
        f"{{% for i in range(90000) %}}{{% set n.{step[0]} = {step[4:]} %}}{{% endfor %}}"
        for step in (
            *("x = n.x ~ n.x", "x = n.x + n.x", "l = n.l + n.l", "l = n.l + ['ab' * 400000 ~ i]", "x = m(n.x)"),
            *("x = [n.x, n.x]|join", "x = [n, n]|map(attribute='x')|join(n.x)", "x = n.x.join([n.x, n.x])"),
            *("x = '%s%s' % (n.x, n.x)", "x = '%s%s'|format(n.x, n.x)", "x = '{0}{0}'.format(n.x)"),
            *("x = n.x|replace('a', 'aaa')", "x = n.x.replace('b', 'bbb')", "x = n.x|list|string", "x = n.x|tojson"),
            *("l = n.l + [('ab' * 400000)[1:]]", "l = n.l + [('ab' * 400000)|upper]"),
        )
    },
    "block": "{% set n = namespace(x='ab') %}{% for i in range(90) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "written": "{% set x = 'ab' * 400000 %}{% for i in range(900) %}{{ x }}{% endfor %}",
    "joined": "{{ (['ab' * 400000] * 100000)|join }}",
}


@pytest.mark.parametrize("kind", GROWING)
def test_a_template_takes_no_more_memory_than_its_limit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "_LARGEST", 2**20)
    monkeypatch.setattr(template_limits, "_ALL_LONG", 2**24)
    # Counting memory takes a slow processor past the limit of time, which is not what is tested here.
    monkeypatch.setattr(chat_template, "_SECONDS", 60.0)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"makes (a text|texts)|puts a text"):
            encoder_for(GROWING[kind]).prompt_text(Chat([{"role": "user", "content": "Hi"}]))
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "uses",
    [
        *("n.l", "n.l|tojson", "n.l|string", "'a' ~ n.l", "[n.l]|join", "'%s' % (n.l,)", "'%s'|format(n.l)"),
        *("'{}'.format(n.l)", "raise_exception(n.l)", "n.l|pprint", "{'a': n.l}|xmlattr"),
        *("n.l == n.m", "1 < 2 != n.l", "n.l in [n.m]", "n.l is eq(n.m)", "n.l is in([n.m])", "[n.l].index(n.m)"),
        *("[n.l]|select('eq', n.m)|list", "[n.l, n.m]|sort", "[n.l, n.m]|max", "{1: n.l} == {1: n.m}"),
        *("{n.t: 1}", "{}[n.t]", "{}.get(n.t)", "[n.t]|unique|list", "1 if n.t > 2 else 3"),
    ],
)
def test_lists_that_hold_one_list_twice_are_not_gone_through(uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's own code, where no time limit ends it, for as long as 2**60 entries take."""
    monkeypatch.setattr(template_limits, "_LARGEST", 2**14)
    template = (
        "{% set n = namespace(l=1, m=1, t=1) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}"
        f"{{% set n.m = [n.m, n.m] %}}{{% set n.t = (n.t, n.t) %}}{{% endfor %}}{{{{ {uses} }}}}"
    )
    with pytest.raises(UserError, match="makes a text or list of more than 16,384 entries"):
        encoder_for(template).prompt_text(Chat([{"role": "user", "content": "Hi"}]))


def test_powers_and_repetitions_that_templates_need_are_as_ever() -> None:
    template = (
        "{{ '  ' * 3 }}{{ [1, 2] * 2 }}{{ 2 ** 10 }}{{ 3 * 2.5 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    row = [{"role": "user", "content": "Hi"}]
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template
    assert render(tokenizer, row, None, None) == "      [1, 2, 1, 2]10247.5Hi"


@pytest.mark.parametrize(
    "text", ["{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "{% if 1 %}" * 400 + "{% endif %}" * 400]
)
def test_a_template_that_python_cannot_compile_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "deep.jinja").write_text(text)
    with pytest.raises(UserError, match="cannot be compiled"):
        load_chat_template(str(tmp_path / "deep.jinja"))


def test_renderings_of_a_conversation_have_one_time_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would end in time, and short ones do not count."""
    monkeypatch.setattr(chat_template, "_SECONDS", 1.0)

    def render(seconds: float) -> None:
        with chat_template.in_time():
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass

    for _ in range(2):
        chat_template.next_conversation()
        render(0.6)
    with pytest.raises(UserError, match="more than 1 seconds"):
        render(0.9)
    chat_template.next_conversation()
    # One call into C, during which nobody looks on.
    with pytest.raises(UserError, match="more than 1 seconds"), chat_template.in_time():
        sum(range(15 * 10**7))
    chat_template.next_conversation()
    for _ in range(30):
        render(0.04)


LOOK = {"type": "function", "function": {"name": "look", "arguments": {"city": "Paris"}}}
CALLED = '\n<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("train_on", ["auto", ["assistant"], "last_assistant"])
def test_a_part_beside_tool_calls_is_left_out_without_them(train_on: Any) -> None:
    encoder = encoder_for(CHATML, train_on)
    said = {"role": "assistant", "content": "Good. Bad", "tool_calls": [LOOK]}
    assert trained(encoder, Chat([USER, said | {"untrained": {"content": [[5, 9]]}}])) == ["Good.", CALLED]
    said["content"] = "Paris"  # Which the call says, too.
    assert trained(encoder, Chat([USER, said | {"untrained": {"content": [[0, 5]]}}])) == [CALLED]
    said["content"] = "\nParis"
    assert trained(encoder, Chat([USER, said | {"untrained": {"content": [[0, 6]]}}])) == ["\n", CALLED]
