"""Which message rendered which characters, whatever loops and blocks a template is made of."""

from __future__ import annotations

from typing import Any

import pytest
from data_fixtures import plain_tokenizer

from toolkit.common import UserError
from toolkit.data.encoding.chat_spans import Conversation
from toolkit.data.formats.messages import FOR_TEMPLATES

HI = {"role": "user", "content": "Hi there"}
HELLO = {"role": "assistant", "content": "Hello you"}
WHY = {"role": "user", "content": "Why"}
SO = {"role": "assistant", "content": "So"}
CLOCK = [{"function": {"name": "clock", "arguments": {}}}]
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def conversation(template: str) -> Conversation:
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = template
    return Conversation(tokenizer, [HI, HELLO, WHY, SO], TOOLS)


@pytest.mark.parametrize(
    ("template", "turns"),
    [
        pytest.param(
            "<{% for m in messages %}{{ m.role }}:{% for w in m.content.split() %}{{ w }},{% endfor %};{% endfor %}>",
            [["user:Hi,there,;"], ["assistant:Hello,you,;"], ["user:Why,;"], ["assistant:So,;"]],
            id="a loop over what a message says belongs to it",
        ),
        pytest.param(
            "{% for m in messages if m.role == 'user' %}[{{ m.content }}"
            "{% for n in messages[loop.index * 2 - 1:][:1] %}({{ n.content }}){% endfor %}]{% endfor %}",
            [["[Hi there", "]"], ["(Hello you)"], ["[Why", "]"], ["(So)"]],
            id="an answer within the loop over questions, after which the question goes on",
        ),
        pytest.param(
            "{% for m in messages %}{% for n in messages %}{% if n is sameas m %}{{ n.content }}|{% endif %}"
            "{% endfor %}{% endfor %}",
            [["Hi there|"], ["Hello you|"], ["Why|"], ["So|"]],
            id="the innermost of two loops over messages owns what it writes",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.role }} {% endfor %}= {% for m in messages %}{{ m.content }}.{% endfor %}end",
            [["user ", "Hi there."], ["assistant ", "Hello you."], ["user ", "Why."], ["assistant ", "So."]],
            id="two loops after each other, and text between and after them of nobody",
        ),
        pytest.param(
            "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for i in range(4) %}{{ messages[i].content }}"
            "{% for t in tools %}+{% endfor %};{% endfor %}",
            [["Hi there+;"], ["Hello you+;"], ["Why+;"], ["So+;"]],
            id="messages by number, with loops over tools before and within",
        ),
        pytest.param(
            "{% for part in [messages[:2], messages[2:]] %}{% for m in part %}{{ m.content }};{% endfor %}--"
            "{% endfor %}",
            [["Hi there;"], ["Hello you;"], ["Why;"], ["So;"]],
            id="what an outer loop over parts of the conversation writes is of nobody",
        ),
    ],
)
def test_each_message_owns_what_its_iterations_write(template: str, turns: list[list[str]]) -> None:
    made = conversation(template)
    assert [[made.text[a:b] for a, b in made.turns[i]] for i in range(4)] == turns
    assert made.generation is None and made.assistants == [1, 3]


@pytest.mark.parametrize(
    ("template", "blocks"),
    [
        pytest.param(
            "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}!",
            [(0, "Hi there"), (1, "Hello you"), (2, "Why"), (3, "So")],
            id="in the loop",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}</s>{% endgeneration %} bye",
            [(3, "</s>")],
            id="after the loop, of the last answer",
        ),
        pytest.param(
            "{% generation %}{{ bos_token }}<s>{% endgeneration %}{% for m in messages %}"
            "{% for w in m.content.split() %}{% generation %}{{ w }}{% endgeneration %} {% endfor %}{% endfor %}",
            [(3, "<s>"), (0, "Hi"), (0, "there"), (1, "Hello"), (1, "you"), (2, "Why"), (3, "So")],
            id="before all loops and in a loop within the loop",
        ),
        pytest.param(
            "{% for m in messages %}{% generation %}{{ m.role }}{% generation %} {{ m.content }}{% endgeneration %};"
            "{% endgeneration %}{% endfor %}",
            [
                *((0, " Hi there"), (0, "user Hi there;"), (1, " Hello you"), (1, "assistant Hello you;")),
                *((2, " Why"), (2, "user Why;"), (3, " So"), (3, "assistant So;")),
            ],
            id="a block within a block",
        ),
    ],
)
def test_blocks_of_generation_have_their_message(template: str, blocks: list[tuple[int, str]]) -> None:
    made = conversation(template)
    assert [(message, made.text[a:b]) for message, (a, b) in made.generation or []] == blocks


def test_what_a_template_leaves_out_is_refused_where_it_would_have_been_trained() -> None:
    """Thoughts before an earlier answer are left out by many templates; those before the last one must be there."""
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    thinking, thanks = {**HELLO, "reasoning_content": "secret"}, {**SO, "role": "user"}
    for messages, words in (
        ([HI, HELLO], None),
        ([HI, thinking, WHY, SO], None),
        ([HI, thinking, thanks], None),
        ([{**HI, "reasoning_content": "secret"}], None),
        ([HI, thinking], "the reasoning of message 1"),
        (
            [HI, {**HELLO, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}],
            "the tool calls of message 1",
        ),
    ):
        made = Conversation(tokenizer, messages, None)
        if words is None:
            made.refuse_lost_content()
            continue
        with pytest.raises(UserError, match=f"leaves out {words}") as refused:
            made.refuse_lost_content()
        assert ("data.ignore" in refused.value.change) == ("reasoning" in words)


@pytest.mark.parametrize(
    ("written", "answer", "lost"),
    [
        ("{{ m.content }}", {"reasoning_content": "Let me see what it is."}, "reasoning"),
        ("{{ m.content }}{{ m.reasoning_content }}", {"reasoning_content": "Let me see what it is."}, ""),
        ("{{ m.content }}", {"content": "", "tool_calls": CLOCK}, "tool calls"),
        ("{{ m.content }}", {"content": "I ask the clock.", "tool_calls": CLOCK}, "tool calls"),
        ("{{ m.content }}" + CALLS, {"content": "I ask the clock.", "tool_calls": CLOCK}, ""),
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}" + CALLS, {"tool_calls": CLOCK}, "text"),
        ("{{ m.content | upper }}" + CALLS, {"tool_calls": CLOCK}, ""),
    ],
)
def test_what_is_left_out_is_noticed_though_the_question_has_its_words(
    written: str, answer: dict[str, Any], lost: str
) -> None:
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.role }}}}:{written};{{% endfor %}}"
    asked = {"role": "user", "content": "Let me ask: What is IT by the clock?"}
    made = Conversation(tokenizer, [asked, {"role": "assistant", "content": "It is four.", **answer}], None)
    if not lost:
        return made.refuse_lost_content()
    with pytest.raises(UserError, match=f"leaves out the {lost} of message 1"):
        made.refuse_lost_content()


@pytest.mark.parametrize("begin, end", [("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]")])
def test_thoughts_within_the_last_answer_are_not_cut_off(begin: str, end: str) -> None:
    """DeepSeek's templates keep what follows `</think>`: a model that thinks would have learnt to answer at once."""
    cut, whole = f"m.content.split('{end.strip()}')[-1]", "m.content"
    thoughts, nothing = f"{begin}Two and two.{end}It is four", f"{begin}{end}It is four"
    for written, texts, lost in (
        (cut, (thoughts, thoughts), True),
        (cut, (thoughts, "It is four"), False),
        (cut, ("It is four", nothing), False),
        (whole, (thoughts, thoughts), False),
        (f"{whole} | replace('two.', '2!')", (thoughts, thoughts), False),
    ):
        tokenizer = plain_tokenizer()
        tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.role }}}}:{{{{ {written} }}}};{{% endfor %}}"
        first, last = ({"role": "assistant", "content": text} for text in texts)
        made = Conversation(tokenizer, [HI, first, WHY, last], None)
        if not lost:
            made.refuse_lost_content()
            continue
        with pytest.raises(UserError, match="leaves out the reasoning that stands in the text of message 3"):
            made.refuse_lost_content()


@pytest.mark.parametrize(
    "part", ["line in m.content if line.type == 'text'", "line in m.content|selectattr('type', 'eq', 'text')"]
)
def test_a_template_for_parts_alone_is_given_parts(part: str) -> None:
    """Of models that see many have one; some do not take a message that says nothing."""
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ ':' if m.content[0]['type'] == 'image' }} "
        f"{{% for {part} %}}{{{{ line.text }}}}{{% endfor %}};{{% endfor %}}"
    )
    said = {"role": "assistant", "content": "I am a user"}
    made = Conversation(tokenizer, [HI, said, WHY, said], None)
    made.refuse_lost_content()
    made.ensure_turns([1, 3])
    text = f"user {HI['content']};assistant I am a user;user {WHY['content']};assistant I am a user;"
    assert made.text.endswith(text) and made.messages[1]["content"] == "I am a user"
    for turn in (1, 3):
        assert "".join(made.text[a:b] for a, b in made.turns[turn]) == "assistant I am a user;"
    spans = made.locate_parts(3, {"content": [[5, 11]]})
    assert [made.text[a:b] for a, b in spans] == ["a user;"]


def test_who_speaks_in_parts_is_asked_of_each() -> None:
    tokenizer = plain_tokenizer()
    loop = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' or m.role == 'tool' %}" + loop + ";"
        "{% else %}{{ m.content }}|{% endif %}{% endfor %}"
    )
    system, result = {"role": "system", "content": "Be kind"}, {"role": "tool", "content": "4"}
    made = Conversation(tokenizer, [system, HI, HELLO, result, HELLO], None)
    assert made.text == f"Be kind|{HI['content']};{HELLO['content']}|4;{HELLO['content']}|"
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + (
        "{% for m in messages %}" + loop + ";{% endfor %}"
    )
    assert Conversation(tokenizer, [HI, HELLO], None).text == f"{HI['content']};{HELLO['content']};"


def test_a_template_that_takes_both_is_given_texts_as_they_are() -> None:
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }};"
        "{% else %}{% for line in m.content %}[{{ line.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert Conversation(tokenizer, [HI, HELLO], None).text == f"{HI['content']};{HELLO['content']};"


@pytest.mark.parametrize("field", FOR_TEMPLATES)
def test_a_field_that_changes_what_is_learnt_is_written_or_refused(field: str) -> None:
    tokenizer = plain_tokenizer()
    talk = [HI, {**HELLO, field: "clock"}]
    spellings = ("m.get('%s')", "m.%s", "m['%s']", "m | tojson if m.%s else m.content")
    for written in spellings:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m.content }}{{ " + written % field + " or '' }};{% endfor %}"
        )
        Conversation(tokenizer, talk, None).refuse_lost_content()
    # A name in the template is not enough: most have `tools`.
    tokenizer.chat_template = "{{ tools }}{{ '" + field + "' }}{% for m in messages %}{{ m.content }};{% endfor %}"
    with pytest.raises(UserError, match=rf"leaves out `{field}` of message 1 \('clock'\)") as refused:
        Conversation(tokenizer, talk, None).refuse_lost_content()
    assert f"data.ignore=[{field}]" in refused.value.change
    for nothing in ("", [], {}, *FOR_TEMPLATES[field][0]):
        Conversation(tokenizer, [HI, {**HELLO, field: nothing}], None).refuse_lost_content()


def test_a_system_message_that_is_not_written_is_noticed() -> None:
    tokenizer = plain_tokenizer()
    system = {"role": "system", "content": "Be kind"}
    for template, lost in (("{{ messages[1].content }}", True), ("{{ messages[0].content }}", False)):
        tokenizer.chat_template = template
        # Also where what is written has its words.
        for asked in (HI, {"role": "user", "content": "Be so kind and help"}):
            assert Conversation(tokenizer, [system, asked], None).loses_of_prompt() == lost
        assert not Conversation(tokenizer, [{"role": "system", "content": " "}, HI], None).loses_of_prompt()


@pytest.mark.parametrize(
    ("template", "tools", "settings", "lost"),
    [
        ("", [{"name": "f"}], {}, True),
        ("{{ tools }}", [{"name": "f"}], {}, False),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", [{"name": "f"}], {}, False),
        ("", [], {"instructions": "Be kind"}, True),
        ("{{ instructions }}", None, {"instructions": "Be kind"}, False),
        ("", None, {"python_tools": ["f"]}, True),
        (
            "",
            None,
            {"instructions": "", "python_tools": [], "enable_thinking": False, "budget": 5, "date": None},
            False,
        ),
    ],
)
def test_tools_and_texts_that_the_template_does_not_read_are_noticed(
    template: str, tools: Any, settings: dict[str, Any], lost: bool
) -> None:
    tokenizer = plain_tokenizer()
    tokenizer.chat_template = template + "{% for m in messages %}{{ m.content }};{% endfor %}"
    assert Conversation(tokenizer, [HI, HELLO], tools, settings).loses_of_prompt() == lost


def test_turns_without_loops_are_found_by_cutting_the_conversation() -> None:
    tokenizer = plain_tokenizer()
    parts = "".join(
        f"{{% if messages|length > {i} %}}{{{{ messages[{i}].content|trim }}}};{{% endif %}}" for i in range(4)
    )
    for beginning, first in (("", "Hi there;"), ("BEGIN ", "BEGIN Hi there;")):
        tokenizer.chat_template = beginning + parts
        made = Conversation(tokenizer, [HI, HELLO, WHY, SO], None)
        made.turns.clear()
        made.ensure_turns([0, 1, 3])
        assert {i: [made.text[a:b] for a, b in spans] for i, spans in made.turns.items()} == {
            **{0: [first], 1: ["Hello you;"], 3: ["So;"]},
        }
        del made.turns[1], made.turns[3]  # What is known already stays.
        made.ensure_turns([0, 1, 3])
        assert {i: [made.text[a:b] for a, b in made.turns[i]] for i in (1, 3)} == {1: ["Hello you;"], 3: ["So;"]}
    tokenizer.chat_template = "{{ messages|length }}{% for m in messages %}{{ m.content|trim }}{% endfor %}"
    made = Conversation(tokenizer, [HI, HELLO], None)
    made.turns.clear()
    with pytest.raises(UserError, match="does not show where the assistant's turns begin and end"):
        made.ensure_turns([1])


def test_a_template_of_its_own_for_tools_is_the_one_that_is_followed() -> None:
    tokenizer = plain_tokenizer()
    loop = "{% for m in messages %}{{ m.content }};{% endfor %}"
    tokenizer.chat_template = {"default": loop, "tool_use": f"{{{{ tools|length }}}} tools: {loop}"}
    for tools, beginning in ((TOOLS, "1 tools: "), (None, "")):
        made = Conversation(tokenizer, [HI, HELLO], tools)
        assert made.text == f"{beginning}Hi there;Hello you;"
        assert [made.text[a:b] for a, b in made.turns[1]] == ["Hello you;"]
