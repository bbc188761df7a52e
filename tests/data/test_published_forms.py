"""Rows in the form of the demo files of LLaMA-Factory, Axolotl, TRL, OpenAI and ms-swift: what is trained, or refused.

The rows are written anew. A form is either trained on exactly the tokens that its project trains, or refused with what
to write; where that is a mapping, the mapping is tried, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from data_fixtures import plain_tokenizer

from toolkit.common import UserError
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.columns import MEDIA, REFUSED
from toolkit.data.formats.recognition import recognise
from toolkit.data.formats.task import Task
from toolkit.data.rows import IGNORE
from toolkit.recipe.data import Source

CHATML = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STOP = "<|im_end|>"


def outcome(row: dict[str, Any], train_on: Any = "auto", objective: str = "sft", **settings: Any) -> list[str] | str:
    """The runs of trained tokens as text, or the refusal."""
    tokenizer = plain_tokenizer()
    tokenizer.eos_token, tokenizer.chat_template = STOP, CHATML
    try:
        row_format = recognise([row], Source(path="d", **settings), Task(objective, train_on, True))
        labels = Encoder(tokenizer, train_on, frozenset({2}))(row_format.convert(row, "d:1")).labels
    except UserError as error:
        assert error.change
        return str(error)
    runs: list[list[int]] = [[]]
    for label in labels:
        if label != IGNORE:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def says(speaker: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"role": speaker, "content": text, **more}


def turn(speaker: str, text: str, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": text, **more}


def part(text: str, kind: str = "text", key: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, key: text, **more}


ASK, REPLY = says("user", "Is it late?"), says("assistant", "Not yet.")
TALK = [ASK, REPLY]
SHARED = [turn("human", "Is it late?"), turn("gpt", "Not yet.")]
ANSWER = [f"Not yet.{STOP}"]
CALL = {"name": "clock", "arguments": {"zone": "UTC"}}
CALLED = [f'<call>{{"name": "clock", "arguments": {{"zone": "UTC"}}}}</call>{STOP}', f"Nine.{STOP}"]
TOOL = {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}
V1 = [says("user", [part("Is it late?", key="value")]), says("assistant", [part("Not yet.", key="value")])]

LLAMA_FACTORY: dict[str, Any] = {
    "alpaca_en_demo.json": ({"instruction": "Is it late?", "input": "", "output": "Not yet."}, ANSWER),
    "identity.json": ({"instruction": "hi", "input": "", "output": "I am {{name}}."}, [f"I am {{{{name}}}}.{STOP}"]),
    "alpaca with history": (
        {"instruction": "And now?", "input": "", "output": "Yes.", "system": "S", "history": [["Late?", "No."]]},
        [f"No.{STOP}", f"Yes.{STOP}"],
    ),
    "prompt, query, response": (
        {"prompt": "Is it", "query": "late?", "response": "Not yet."},
        "data.columns={instruction: prompt, output: response, input: query}",
        ANSWER,
    ),
    "c4_demo.jsonl": ({"text": "Night fell."}, ["ight fell." + STOP]),
    "glaive_toolcall_en_demo.json": (
        {
            "conversations": [
                *(turn("human", "The time?"), turn("function_call", json.dumps(CALL))),
                *(turn("observation", '{"time": "nine"}'), turn("gpt", "Nine.")),
            ],
            "tools": json.dumps([TOOL]),
        },
        CALLED,
    ),
    "dpo_en_demo.json": (
        {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": turn("gpt", "Very.")},
        "data.columns={prompt: conversations, completion: chosen}",
        ANSWER,
    ),
    "dpo with a system prompt": (
        {"system": "S", "conversations": SHARED[:1], "chosen": SHARED[1], "rejected": turn("gpt", "Very.")},
        "data.columns={prompt: conversations, completion: chosen}",
        ANSWER,
    ),
    "kto_en_demo.json": ({"messages": TALK, "label": False}, "`label` is whether the answer is good"),
    "kto_tag": ({"instruction": "i", "output": "o", "kto_tag": True}, "`kto_tag` is whether the answer is good"),
    "mllm_demo.json": ({"messages": TALK, "images": ["1.jpg"]}, "`images` is pictures"),
    "mllm_video_demo.json": ({"messages": TALK, "videos": ["1.mp4"]}, "`videos` is pictures"),
    "mllm_audio_demo.json": ({"messages": TALK, "audios": ["1.mp3"]}, "`audios` is pictures"),
    "alpaca with images": ({"instruction": "i", "output": "o", "images": ["1.jpg"]}, "`images` is pictures"),
    "no images in this row": ({"messages": TALK, "images": []}, ANSWER),
    "v1_sft_demo.jsonl": (
        {"messages": [V1[0] | {"loss_weight": 0.0}, V1[1] | {"loss_weight": 1.0}]},
        ANSWER,
    ),
    "loss_weight 0": ({"messages": [*TALK, ASK, REPLY | {"loss_weight": 0.0}]}, ANSWER),
    "loss_weight of a user": ({"messages": [ASK | {"loss_weight": 1}, REPLY]}, [f"Is it late?{STOP}", *ANSWER]),
    "loss_weight 0.5": ({"messages": [ASK, REPLY | {"loss_weight": 0.5}]}, "`loss_weight: 0.5`"),
    "v1_dpo_demo.jsonl": (
        {"chosen_messages": V1, "rejected_messages": V1},
        "data.columns={messages: chosen_messages}",
        ANSWER,
    ),
    "v1_multimodal_demo.jsonl": (
        {"messages": [says("user", [part("1.jpg", "image_url", "value"), *V1[0]["content"]]), V1[1]]},
        "`messages[0]` has `image_url`: pictures",
    ),
    "reason_tool_use_demo_50.jsonl": (
        {
            "messages": [
                V1[0],
                says(
                    "assistant",
                    [part("Look.", "reasoning", "value"), part(json.dumps(CALL), "tool_call", "value")],
                ),
                *(says("tool", [part("nine", key="value")]), says("assistant", [part("Nine.", key="value")])),
            ],
            "tools": json.dumps([{"type": "function", "function": TOOL}]),
        },
        [f"<think>Look.</think>{CALLED[0]}", CALLED[1]],
    ),
}
AXOLOTL: dict[str, Any] = {
    "alpaca.json": ({"instruction": "Is it late?", "input": "", "output": "Not yet."}, ANSWER),
    "conversation.json": ({"conversations": SHARED}, ANSWER),
    "pygmalion": (
        {"conversations": [{"role": "user", "value": "Is it late?"}, {"role": "gpt", "value": "Not yet."}]},
        ANSWER,
    ),
    "conversation.tokenized.json": (
        {"input_ids": [80, 81, 82, 2], "attention_mask": [1, 1, 1, 1], "labels": [-100, -100, 82, 2]},
        ["o" + STOP],
    ),
    "padded tokens": (
        {"input_ids": [80, 81, 2, 3], "attention_mask": [1, 1, 1, 0], "labels": [80, 81, 2, -100]},
        ["n" + STOP],
    ),
    "labels shifted already": ({"input_ids": [80, 81, 2], "labels": [81, 2, -100]}, "`labels[0]` is 81"),
    "another vocabulary": ({"input_ids": [80, 99_999]}, "has the token 99999"),
    "input_output": (
        {
            "segments": [
                {"label": True, "text": "On "},
                {"label": False, "text": "and off "},
                {"label": True, "text": "on" + STOP},
            ]
        },
        ["n ", "on" + STOP],
    ),
    "chat_template with tool use": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
                {"role": "tool", "tool_call_id": "1", "name": "clock", "content": "nine"},
                says("assistant", "Nine."),
            ],
            "tools": [{"type": "function", "function": TOOL | {"parameters": json.dumps(TOOL["parameters"])}}],
        },
        CALLED,
    ),
    "train and train_detail": (
        {
            "conversations": [
                turn("system", "Be brief.", train=False),
                turn("human", "Hello", train=False),
                turn("assistant", "Hello", train=True),
                turn("human", "How?", train=True),
                turn(
                    "assistant",
                    "Very well, thanks",
                    train_detail=[
                        {"begin_offset": 0, "end_offset": 4, "train": False},
                        {"begin_offset": 5, "end_offset": 9, "train": True},
                    ],
                ),
                turn("human", "Good", train=False),
                turn("assistant", "Bye", train=False),
            ]
        },
        [f"Hello{STOP}", f"How?{STOP}", "well,"],
    ),
    "parts with train": (
        {"messages": [ASK, says("assistant", [part("Hm.", train=False), part(" Not yet.", train=True)])]},
        [f" Not yet.{STOP}"],
    ),
    "parts with weight": (
        {"messages": [ASK, says("assistant", [part("Not yet.", key="value", weight=1), part("!!", weight=0)])]},
        ["Not yet."],
    ),
    "reasoning_content in parts": (
        {
            "messages": [
                ASK,
                says(
                    "assistant",
                    [part("Not yet.", train=True)],
                    reasoning_content=[part("Eh?", train=False), part(" Nine.", train=True)],
                ),
            ]
        },
        ["<think>", f" Nine.</think>Not yet.{STOP}"],
    ),
    "jeopardy": (
        {"question": "Is it late?", "category": "TIME", "answer": "Not yet."},
        "data.columns={instruction: question, output: answer}",
        ANSWER,
    ),
    "oasst": (
        {"INSTRUCTION": "Is it late?", "RESPONSE": "Not yet."},
        "{instruction: INSTRUCTION, output: RESPONSE}",
        ANSWER,
    ),
    "gpteacher": ({"instruction": "Is it late?", "input": "", "response": "Not yet."}, "{output: response}", ANSWER),
    "reflection": (
        {"instruction": "i", "input": "", "output": "Late.", "reflection": "No.", "corrected": "Not yet."},
        "`reflection` is a second answer",
    ),
    "explainchoice": (
        {"question": "Is it late?", "choices": ["Not yet.", "Yes."], "solution": "Not yet.", "explanation": "Nine."},
        "data.columns={instruction: question, output: solution}",
        "`choices` is the choices of a question",
    ),
    "summarizetldr": (
        {"article": "Long.", "summary": "Short."},
        "{prompt: article, completion: summary}",
        [f"Short.{STOP}"],
    ),
    "load_camel_ai": (
        {"message_1": "Is it late?", "message_2": "Not yet."},
        "{instruction: message_1, output: message_2}",
        ANSWER,
    ),
    "load_open_orca": (
        {"system_prompt": "S", "question": "Is it late?", "response": "Not yet."},
        "{instruction: question, output: response, system: system_prompt}",
        ANSWER,
    ),
    "context_qa": (
        {"article": "Nine.", "question": "Is it late?", "answer": "Not yet."},
        "{instruction: question, output: answer, input: article}",
        ANSWER,
    ),
    "context_qa.load_404": ({"article": "a", "unanswerable_question": "q"}, "which no format fits"),
    "creative_acr": ({"instruction": "Is it late?", "revision": "Not yet."}, "{output: revision}", ANSWER),
    "metharme": ({"prompt": "Late? ", "generation": "No."}, "data.columns={", [f"No.{STOP}"]),
    "input, output": ({"input": "Is it late?", "output": "Not yet."}, "{instruction: input}", ANSWER),
    "stepwise": (
        {"prompt": "Late?\n", "completions": ["Nine.", "No."], "labels": [True, False]},
        "data.columns={completion: completions}",
        [f"Nine.\nNo.{STOP}"],
    ),
    "dpo chatml.argilla": (
        {"instruction": "Is it late?", "chosen_response": "Not yet.", "rejected_response": "Yes."},
        "data.columns={output: chosen_response}",
        ANSWER,
    ),
    "dpo chatml.intel": (
        {"system": "S", "question": "Is it late?", "chosen": "Not yet.", "rejected": "Yes."},
        "data.columns={instruction: question, output: chosen}",
        ANSWER,
    ),
    "dpo chatml.icr": (
        {"input": "Is it late?", "chosen": "Not yet.", "rejected": "Yes."},
        "data.columns={instruction: input, output: chosen}",
        ANSWER,
    ),
    "dpo chatml.ultra": (
        {"prompt": "Is it late?", "chosen": TALK, "rejected": TALK},
        "data.columns={messages: chosen}",
        ANSWER,
    ),
    "dpo chat_template": (
        {"messages": [ASK], "chosen": REPLY, "rejected": says("assistant", "Yes.")},
        "data.columns={prompt: messages, completion: chosen}",
        ANSWER,
    ),
    "zephyr.nectar": ({"prompt": "p", "answers": [{"answer": "a", "rank": 1}]}, "several answers to each prompt"),
    "kto with a system prompt": (
        {"system": "S", "prompt": "p", "completion": "c"},
        "data.columns={instruction: prompt, output: completion}",
        [f"c{STOP}"],
    ),
    "field_messages": ({"items": SHARED}, "data.columns={messages: items}", ANSWER),
}
TRL: dict[str, Any] = {
    "language modelling": ({"text": "Night fell."}, ["ight fell." + STOP]),
    "language modelling, conversational": ({"messages": TALK}, ANSWER),
    "prompt-only": ({"prompt": "p"}, "prompts alone are for objective=grpo"),
    "prompt-only, conversational": ({"prompt": [ASK]}, "prompts alone are for objective=grpo"),
    "prompt-completion": ({"prompt": "Night", "completion": " fell."}, [" fell." + STOP]),
    "prompt-completion, conversational": ({"prompt": [ASK], "completion": [REPLY]}, ANSWER),
    "preference": (
        {"prompt": "Night", "chosen": " fell.", "rejected": " rose."},
        "data.columns={completion: chosen}",
        [" fell." + STOP],
    ),
    "preference, implicit prompt": (
        {"chosen": "Night fell.", "rejected": "Night rose."},
        "data.columns={text: chosen}",
        ["ight fell." + STOP],
    ),
    "preference, conversational": (
        {"prompt": [ASK], "chosen": [REPLY], "rejected": [REPLY]},
        "data.columns={completion: chosen}",
        ANSWER,
    ),
    "preference, conversational, implicit": (
        {"chosen": TALK, "rejected": TALK},
        "data.columns={messages: chosen}",
        ANSWER,
    ),
    "unpaired": ({"prompt": "p", "completion": "c", "label": False}, "`label` is whether the answer is good"),
    "unpaired, conversational": ({"prompt": [ASK], "completion": [REPLY], "label": True}, "`label` is whether"),
    "stepwise": (
        {"prompt": "Late?\n", "completions": ["Nine.", "No."], "labels": [True, True]},
        "data.columns={completion: completions}",
        [f"Nine.\nNo.{STOP}"],
    ),
    "tool calling": (
        {
            "messages": [
                *(ASK, {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}),
                *(says("tool", "nine", name="clock"), says("assistant", "Nine.")),
            ],
            "tools": [{"type": "function", "function": TOOL}],
        },
        CALLED,
    ),
    "harmony": (
        {"messages": [says("developer", "Be brief."), ASK, says("assistant", "Not yet.", thinking="Nine.")]},
        [f"<think>Nine.</think>Not yet.{STOP}"],
    ),
    "chat_template_kwargs of a row": ({"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}}, ANSWER),
    "tokenised": ({"input_ids": [80, 81, 2], "completion_mask": [0, 0, 1]}, [STOP]),
    "tokenised chat": ({"input_ids": [80, 81, 2], "assistant_masks": [0, 1, 1]}, ["n" + STOP]),
    "packed": ({"input_ids": [80, 81], "seq_lengths": [1, 1]}, "`seq_lengths` is the documents of a packed row"),
    "vision": ({"messages": [says("user", [{"type": "image"}, part("?")]), REPLY], "images": ["1"]}, "pictures"),
}
OPENAI: dict[str, Any] = {
    "toy_chat_fine_tuning.jsonl": ({"messages": [says("system", "Be brief."), *TALK, *TALK]}, ANSWER * 2),
    "without a question": ({"messages": [says("system", "Be brief."), REPLY]}, ANSWER),
    "drone_training.jsonl": (
        {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": "call_id",
                            "type": "function",
                            # Encoded twice, as some rows of that file are.
                            "function": {"name": "clock", "arguments": json.dumps(json.dumps({"zone": "UTC"}))},
                        }
                    ],
                },
            ],
            "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": TOOL}],
        },
        CALLED[:1],
    ),
    "functions": (
        {"messages": [ASK, {"role": "assistant", "function_call": CALL}], "functions": [TOOL]},
        CALLED[:1],
    ),
    "weight": ({"messages": [ASK, REPLY | {"weight": 0}, ASK, REPLY | {"weight": 1}]}, ANSWER),
    "developer": ({"messages": [says("developer", "Be brief."), *TALK]}, ANSWER),
    "names": ({"messages": [ASK | {"name": "Ann"}, REPLY | {"name": "Bob"}]}, ANSWER),
    "refusal": ({"messages": [ASK, {"role": "assistant", "content": None, "refusal": "Not yet."}]}, ANSWER),
    "vision": (
        {"messages": [says("user", [{"type": "image_url", "image_url": {"url": "1"}}]), REPLY]},
        "`messages[0]` has `image_url`",
    ),
    "audio": ({"messages": [ASK, {"role": "assistant", "audio": {"id": "1"}}]}, "`messages[1]` has `audio`"),
    "preference": (
        {
            "input": {"messages": [ASK], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [REPLY],
            "non_preferred_output": [says("assistant", "Yes.")],
        },
        "data.columns={prompt: input.messages, completion: preferred_output}",
        ANSWER,
    ),
    "batch requests": (
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": TALK}},
        "data.columns={messages: body.messages}",
        ANSWER,
    ),
    "batch results": (
        {"id": "1", "custom_id": "1", "response": {"status_code": 200, "body": {}}, "error": None},
        "join the two files by `custom_id`",
    ),
    "example_requests_to_parallel_process.jsonl": (
        {"model": "m", "input": "0", "metadata": {}},
        "which no format fits",
    ),
    "reinforcement fine-tuning": (
        {"messages": [ASK], "reference_answer": "Not yet."},
        "data.columns={prompt: messages, completion: reference_answer}",
        ANSWER,
    ),
    "evals": (
        {"input": [says("system", "S"), ASK], "ideal": "Not yet."},
        "data.columns={prompt: input, completion: ideal}",
        ANSWER,
    ),
    "responses": (
        {
            "input": [says("user", [part("Is it late?", "input_text")])],
            "output": [says("assistant", [part("Not yet.", "output_text")], type="message")],
        },
        "data.columns={prompt: input, completion: output}",
        ANSWER,
    ),
    "stored completions": (
        {"messages": [ASK], "choices": [{"index": 0, "message": REPLY}]},
        "write it into `messages` as the last turn",
    ),
    "legacy prompt and completion": ({"prompt": "Night ->", "completion": " fell. END"}, [" fell. END" + STOP]),
}
MS_SWIFT: dict[str, Any] = {
    "messages with a channel": ({"messages": TALK, "channel": "chat"}, ANSWER),
    "loss of messages": ({"messages": [ASK, REPLY | {"loss": False}, ASK, REPLY | {"loss": True}]}, ANSWER),
    "pre-training": ({"messages": [says("assistant", "Night fell.")]}, [f"Night fell.{STOP}"]),
    "tool_call, tool_response": (
        {
            "tools": json.dumps([TOOL]),
            "messages": [
                ASK,
                says("tool_call", json.dumps(CALL)),
                says("tool_response", "9"),
                says("assistant", "Nine."),
            ],
        },
        CALLED,
    ),
    "query, response, history": (
        {"query": "And now?", "response": "Yes.", "history": [["Late?", "No."]]},
        "(`history` will be read, too)",
        [f"No.{STOP}", f"Yes.{STOP}"],
    ),
    "conversation of human and assistant": (
        {"system": "S", "conversation": [{"human": "Late?", "assistant": "No."}]},
        "data.columns={messages: conversation}",
        [f"No.{STOP}"],
    ),
    "rejected_response": ({"messages": TALK, "rejected_response": "Yes."}, "'data.ignore=[rejected_response]'"),
    "rejected_messages": ({"messages": TALK, "rejected_messages": TALK}, "'data.ignore=[rejected_messages]'"),
    "label": ({"messages": TALK, "label": True}, "`label` is whether the answer is good"),
    "embedding": ({"messages": [ASK], "positive_messages": [TALK]}, "`positive_messages` is what an embedding"),
    "grpo": (
        {"messages": [ASK], "solution": "Not yet."},
        "data.columns={prompt: messages, completion: solution}",
        ANSWER,
    ),
    "objects": ({"messages": TALK, "objects": {"bbox": [[1, 2, 3, 4]]}}, "`objects` is pictures"),
}
WRITTEN = {
    "messages": (TALK, "data.columns={messages: text}"),
    "ShareGPT's": (SHARED, "data.columns={messages: text}"),
    "a row": ({"messages": TALK}, "write its `messages` as a column"),
    "a row of ShareGPT's": ({"id": 1, "conversations": SHARED}, "write its `conversations` as a column"),
}
GENERAL: dict[str, Any] = {
    "chain of thought beside a question": (
        {"Question": "Is it late?", "Complex_CoT": "Nine.", "Response": "Not yet."},
        "{instruction: Question, output: Response, reasoning: Complex_CoT}",
        [f"<think>Nine.</think>Not yet.{STOP}"],
    ),
    "a list for each field": ({"messages": {"role": ["user", "assistant"], "content": ["Late?", "Not yet."]}}, ANSWER),
    "lists of ShareGPT's fields": ({"conversations": {"from": ["human", "gpt"], "value": ["?", "Not yet."]}}, ANSWER),
    "lists of different lengths": ({"messages": {"role": ["user"], "content": []}}, "`messages` differ in length"),
    "ipython": ({"messages": [ASK, REPLY, says("ipython", "nine"), REPLY]}, ANSWER * 2),
    "a list of what is trained": ({"messages": TALK, "train": [False, True]}, "`train` is what is not trained"),
    "correctness": ({"instruction": "i", "output": "o", "correctness": False}, "`correctness` is whether the answer"),
    "a token below 0": ({"input_ids": [80, -1]}, "has the token -1"),
    "a passage": ({"instruction": "i", "output": "o", "passage": "p"}, "`passage` would be left unused"),
    "loss_scale of a row": ({"messages": TALK, "loss_scale": [0.5]}, "`loss_scale` is the weight of a row"),
    "preferences in capitals": (
        {"Prompt": "Night", "Chosen": " fell.", "Rejected": " rose."},
        "data.columns={prompt: Prompt, completion: Chosen}",
        [" fell." + STOP],
    ),
    "steps in capitals": (
        {"prompt": "Late?\n", "Completions": ["Nine.", "No."], "Labels": [True, False]},
        "data.columns={completion: Completions}",
        [f"Nine.\nNo.{STOP}"],
    ),
    **{f"text that is {kind}": ({"text": json.dumps(value)}, change) for kind, (value, change) in WRITTEN.items()},
    **{f"text that Python prints, {kind}": ({"text": str(value)}, "as JSON") for kind, (value, _) in WRITTEN.items()},
    "a row as text, behind a line break": (
        {"text": f"\n{json.dumps({'messages': TALK})}"},
        "write its `messages` as a",
    ),
    "prompt and completion that Python prints": ({"prompt": str([ASK]), "completion": str([REPLY])}, "as JSON"),
    "messages that Python prints": ({"messages": str(TALK)}, "`messages` holds a conversation as Python prints it"),
    "an output that is messages": (
        {"instruction": "Is it late?", "output": json.dumps([REPLY])},
        "data.columns={prompt: instruction, completion: output}",
        ANSWER,
    ),
    "a completion that is other JSON": ({"prompt": "p", "completion": '{"role": "x"}'}, [f'{{"role": "x"}}{STOP}']),
    "text that is nested deep": ({"text": "[" * 9_999}, ["[" * 9_998 + STOP]),
    "text that begins like one": ({"text": "{'role': of a king}"}, ["'role': of a king}" + STOP]),
    "loss_mask of messages": ({"messages": [ASK, REPLY | {"loss_mask": 0}, ASK, REPLY | {"loss_mask": 1}]}, ANSWER),
    "calculate_loss": ({"messages": [ASK, REPLY | {"calculate_loss": False}, *TALK]}, ANSWER),
    "ignore_loss": ({"messages": [ASK, REPLY | {"ignore_loss": True}, *TALK]}, ANSWER),
    "loss_scale": ({"messages": [ASK, REPLY | {"loss_scale": 0.3}]}, "`loss_scale: 0.3`"),
    "label of a message": ({"messages": [ASK, REPLY | {"label": False}]}, "`label: False`"),
    "thought": ({"messages": [ASK, REPLY | {"thought": "Nine."}]}, [f"<think>Nine.</think>Not yet.{STOP}"]),
    "channel": (
        {"messages": [ASK, says("assistant", "Hm.", channel="analysis"), REPLY | {"channel": "final"}]},
        "leaves out `channel` of message 1 ('analysis')",
    ),
    "final channel": ({"messages": [ASK, REPLY | {"channel": "final", "recipient": "all"}]}, ANSWER),
    "recipient": ({"messages": [ASK, says("assistant", "{}", recipient="functions.clock")]}, "leaves out `recipient`"),
    "function_calls": ({"messages": [ASK, says("assistant", "", function_calls="clock()")]}, "out `function_calls`"),
    "tool_plan": ({"messages": [ASK, REPLY | {"tool_plan": "Look."}]}, "leaves out `tool_plan` of message 1 ('Look.')"),
    "reasoning_details": (
        {"messages": [ASK, REPLY | {"reasoning_details": [{"type": "reasoning.text", "text": "Nine."}]}]},
        "leaves out `reasoning_details` of message 1",
    ),
    "tools in a message": ({"messages": [says("system", "S", tools=[TOOL]), *TALK]}, "leaves out `tools` of message 0"),
    "functions in a message": ({"messages": [ASK | {"functions": "[clock]"}, REPLY]}, "leaves out `functions`"),
    "an answer beside messages": (
        {"messages": [*TALK, ASK], "response": "Not yet."},
        "data.columns={prompt: messages, completion: response}",
        ANSWER,
    ),
    "a chat with an output": ({"input": [ASK], "output": "Not yet."}, "{prompt: input, completion: output}", ANSWER),
    "two answers": ({"instruction": "Is it late?", "output": ["Not yet.", "Yes."]}, "`output` is a list"),
    "stepwise, as completion": (
        {"prompt": "Late?", "completion": ["Nine.", "No."], "labels": [True, False]},
        "`labels` is which steps of the answer are right",
    ),
    "kto_tag of a text": ({"text": "Night fell.", "kto_tag": False}, "`kto_tag` is whether the answer is good"),
    "kto_tag of tokens": ({"input_ids": [80, 81], "kto_tag": False}, "`kto_tag` is whether the answer is good"),
    "loss_mask of tokens": ({"input_ids": [80, 81, 2], "loss_mask": [0, 0, 1]}, [STOP]),
    "prompt_length": (
        {"input_ids": [80, 81, 2], "prompt_length": 2},
        "`prompt_length` is which tokens are not trained",
    ),
    "segments with a system prompt": (
        {"segments": [{"label": True, "text": "On"}], "system": "S"},
        "`system` is a part of the prompt",
    ),
    "segments with a weight": ({"segments": [{"label": True, "text": "On"}], "weight": 0.5}, "`weight` is the weight"),
}
PROJECTS = {"LLaMA-Factory": LLAMA_FACTORY, "Axolotl": AXOLOTL, "TRL": TRL, "OpenAI": OPENAI, "ms-swift": MS_SWIFT}
FORMS = {f"{project}: {name}": case for project, cases in PROJECTS.items() for name, case in cases.items()}
FORMS |= {f"general: {name}": case for name, case in GENERAL.items()}


@pytest.mark.parametrize("name", FORMS)
def test_a_published_form_is_trained_right_or_refused(name: str) -> None:
    row, expected, *mapped = FORMS[name]
    result = outcome(row)
    if isinstance(expected, list):
        assert result == expected
        return
    assert isinstance(result, str) and expected in result
    if mapped:
        (setting,) = re.findall(r"'data\.columns=\{(.*?)\}'", result)
        columns = dict(pair.split(": ") for pair in setting.split(", "))
        result = outcome(row, columns=columns)
        assert result == mapped[0] if isinstance(mapped[0], list) else mapped[0] in result


def test_conversations_written_as_text_are_trained_as_text_where_that_is_said() -> None:
    chat = json.dumps(TALK)
    assert outcome({"text": chat}, format="text") == [chat[1:] + STOP]
    tokenizer = plain_tokenizer()
    rows = [{"text": chat}, {"text": "A page on chats."}]
    assert recognise(rows, Source(path="d"), Task("sft", "auto", bool(tokenizer))).name == "text"


@pytest.mark.parametrize(
    ("row", "ignored"),
    [
        ({"messages": TALK, "images": ["1.jpg"]}, "images"),
        ({"messages": TALK, "label": False}, "label"),
        ({"instruction": "Is it late?", "output": "Not yet.", "system_prompt": "S"}, "system_prompt"),
        ({"instruction": "Is it late?", "output": "Not yet.", "history": [["a", "b"]]}, "history"),
        ({"messages": [ASK, REPLY | {"reasoning_content": "Nine."}]}, "reasoning_content"),
        ({"messages": [ASK, REPLY | {"images": ["1.jpg"]}]}, "images"),
    ],
)
def test_what_is_left_out_on_purpose(row: dict[str, Any], ignored: str) -> None:
    assert outcome(row) != ANSWER
    assert outcome(row, ignore=[ignored]) == ANSWER


def test_a_field_of_messages_that_says_what_is_trained_is_named_in_columns() -> None:
    row = {"messages": [ASK, REPLY | {"keep": 0}, ASK | {"keep": None}, REPLY | {"keep": True}]}
    assert "data.columns={train: keep}" in outcome(row)
    assert outcome(row, columns={"train": "keep"}) == ANSWER
    assert outcome({"talk": row["messages"]}, columns={"messages": "talk", "train": "keep"}) == ANSWER
    pair = {"prompt": [ASK, REPLY, ASK], "completion": [REPLY | {"keep": False}, ASK, REPLY]}
    assert outcome(pair, columns={"train": "keep"}) == ANSWER
    assert "no message of the first rows has the field `kept`" in outcome(row, columns={"train": "kept"})
    assert "no message" in outcome({"prompt": "a", "completion": "b"}, columns={"train": "keep"})
    masked = {"messages": [ASK, REPLY | {"mask": 0}, ASK, REPLY | {"mask": 1}]}
    assert "data.columns={train: mask}" in outcome(masked)
    assert outcome(masked, columns={"train": "mask"}) == ANSWER


def test_roles_to_train() -> None:
    rows = {"messages": [says("system", "Be brief."), ASK, REPLY, says("user", "Sure?", train=False), REPLY]}
    assert outcome(rows, ["user", "assistant"]) == [f"Is it late?{STOP}", *ANSWER, *ANSWER]
    assert outcome(rows, ["system"]) == [f"Be brief.{STOP}"]
    assert "data.train_on" in outcome({"text": "t"}, ["assistant"])
    # What the recipe names, a row only takes from.
    flagged = {"messages": [ASK | {"train": True}, REPLY]}
    assert outcome(flagged) == [f"Is it late?{STOP}", *ANSWER] and outcome(flagged, "assistant") == ANSWER


@pytest.mark.parametrize("project", PROJECTS)
def test_the_figures_on_the_page(project: str) -> None:
    cases = PROJECTS[project].values()
    trained = sum(isinstance(expected, list) for _, expected, *_ in cases)
    mapped = sum(isinstance(last, list) for _, _, *mapping in cases for last in mapping)
    figures = f"| {project} | {len(cases)} | {trained} | {mapped} | {len(cases) - trained - mapped} |"
    assert figures in (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_refused_column_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    names = {column for group in REFUSED for column in group} - {"pixel_values", "input_features", *MEDIA}
    for name in names - {"thinking", "reasoning_content", "system_message", "systeminstruction"}:
        assert f"`{name}`" in page, name
