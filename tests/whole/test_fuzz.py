"""Everything that is read from outside, damaged at random: an error of ours that fits a screen, or none, and soon.

5,000 inputs always, 100,000 with `make matrix`; a table counts them. What was found is a case of its own beside the
code that it broke.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from data_fixtures import CHATML, chatml_tokenizer
from example_run import example_run
from figures import record
from hypothesis import strategies as some
from small import populate
from tiny import tiny_gguf

from recipes import BASE
from toolkit.common import UserError, printable
from toolkit.data.encoding import chat_template
from toolkit.data.encoding.encode import Encoder
from toolkit.data.formats.task import Task
from toolkit.data.reading.sources import open_source
from toolkit.data.row_table import open_rows
from toolkit.data.rows import Chat
from toolkit.data.tokenization import Chunker
from toolkit.distributed.engines import dtypes
from toolkit.models.load import ModelSource
from toolkit.recipe.data import Source
from toolkit.recipe.module_names import parameter_names
from toolkit.recipe.rules import load_checked
from toolkit.recipe.schema import Model
from toolkit.report.run_page import write_report

SECONDS = 15
"""The longest that one input may take here, where recipes have ten."""
TEXTS = (
    *(
        "",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\0",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "\ufeff",
        "é",
        "\U0001f469",
        "'",
        '"',
        "`",
        "\\",
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        "{{",
        "}}",
        "{%",
        "%}",
        "(",
        ")",
        ":",
        ": ",
        ",",
        "- ",
        "&a ",
        "*a",
        "<<: ",
        "!!",
        "#",
        "|",
        "~",
    ),
    *("0", "-1", "1e999", "NaN", "Infinity", "9" * 30, "9" * 5000, "1_0", "0x", "true", "null", "${", "${oc.env:HOME}"),
    *(
        "${a.b}",
        "???",
        "=",
        "=[",
        "\\u0000",
        "\\ud800",
        "[" * 60,
        "{" * 60,
        '{"a":' * 2000,
        "a" * 5000,
        "../",
        "/",
        "%s",
    ),
    *(
        "for x in range(99999)",
        "set x = x ~ x",
        "messages",
        "model",
        "data",
        "lora",
        "role",
        "content",
        "loop",
        "__class__",
    ),
)
BYTES = (b"", b"\0", b"\0\0\0\0", b"\xff", b"\xff" * 8, b"\x80", b"\1", b"\x7f\xff\xff\xff", b"[", b'"', b"GGUF", b"{}")
ROWS = (
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", "weight": 1}], "id": 3},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}], "system": "Be brief."},
    {"prompt": "Hi", "completion": [{"role": "assistant", "content": "Yes"}], "score": 0.5},
    {"instruction": "Say hi.", "input": "", "output": "Hi", "history": [["a", "b"]]},
    {"text": "A text.", "meta": {"url": None}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "tools": [{"name": "f"}]},
    {"segments": [{"label": True, "text": "Hi"}], "input_ids": [1, 2], "labels": [-100, 2]},
)
WHOLE = {
    "defaults": [{"model": "smollm2_135m_builtin"}, {"data": "stdlib_docstrings"}, "_self_"],
    "model": {"path": "llama", "new_tokens": ["<a>"], "chat_template": "chatml"},
    "data": {"sources": [{"path": "chat.jsonl", "weight": 2, "columns": {"text": "x"}}], "eval_split": 0.1},
    "method": {"name": "lora", "r": 8, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "args": {"betas": [0.9, 0.99]}},
    "strategy": {"name": "zero3", "offload_optimizer": "cpu"},
    "schedule": {"name": "cosine", "max_steps": 3, "warmup_steps": 1, "args": {}},
    "batch": {"seq_len": 128, "global_batch_size": 4, "micro_batch_size": 2},
    "evaluation": {"prompts": ["Hi"], "num_prompts": 1},
    "extra": {"lora": {"bias": "none"}, "deepspeed": {"gradient_clipping": 1.0}, "fsdp": {}},
    "seed": 1,
}
OVERRIDES = (
    *("optimizer.learning_rate=1e-4", "data.sources=[{path: a.jsonl, weight: 2}]", "~schedule", "extra.lora={a: b}"),
    *(
        "method=lora",
        "batch={seq_len: 8}",
        "model.new_tokens=['<a>']",
        "strategy.name=zero3",
        "optimizer.args.nesterov=1",
    ),
)
VALUES = (
    *(
        None,
        True,
        -1,
        0,
        2,
        0.5,
        10**30,
        -(10**400),
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "1",
        "\ud800",
        "\x1b[2J",
    ),
    *(
        [],
        {},
        [1],
        ["x"],
        [[]],
        [{}],
        [None],
        {"x": 1},
        {"": ""},
        {"a": {"b": []}},
        "a" * 5000,
        "${a}",
        "nan",
        "/",
        ".",
    ),
)
ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "llama",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj"],
    "rank_pattern": {"q_proj": 4},
    "layers_to_transform": [0],
    "modules_to_save": ["embed_tokens"],
    "trainable_token_indices": {"embed_tokens": [500, 501]},
    "use_dora": False,
}
TEMPLATES = (
    CHATML,
    "{% for m in messages %}{{ m.role|upper ~ ': ' ~ m.content|trim }}{% generation %}x{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(9) %}{% set ns.x = ns.x ~ i * 3 %}{% endfor %}{{ ns.x }}",
    "{% macro m(x, y=2) %}{{ x ** y }}{% endmacro %}{{ m(3) }}{{ messages|tojson }}{{ tools|length if tools else '' }}",
)


def damaged(content: bytes | str, within: int | None = None) -> Any:
    """A content with a few places of its first bytes cut out, doubled, or replaced by what breaks parsers."""
    data = content.encode() if isinstance(content, str) else content
    parts = some.sampled_from(
        BYTES if isinstance(content, bytes) else [t.encode("utf-8", "surrogatepass") for t in TEXTS]
    )
    place = some.integers(0, min(len(data), within or len(data)))
    change = some.tuples(place, some.integers(0, 12), parts | some.binary(max_size=3), some.integers(0, 9))

    def apply(changes: list[tuple[int, int, bytes, int]]) -> bytes:
        result = data
        for at, cut, part, often in changes:
            repeated = result[at : at + cut] if often == 0 else b""
            result = result[:at] + part + repeated * 2 + result[at + cut :]
        return result

    return some.lists(change, min_size=1, max_size=3).map(apply)


def altered(content: Any) -> Any:
    """JSON with a few values taken out or replaced by others, of other kinds mostly."""
    change = some.tuples(some.integers(0, 10**6), some.sampled_from(VALUES), some.booleans())

    def apply(changes: list[tuple[int, Any, bool]]) -> bytes:
        result = [json.loads(json.dumps(content))]
        for number, value, removed in changes:
            places = list(_places(result))
            inside, key = places[number % len(places)]
            if removed and inside is not result:
                del inside[key]
            else:
                inside[key] = copy.deepcopy(value)
        return json.dumps(result[0]).encode()

    return some.lists(change, min_size=1, max_size=4).map(apply)


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value below, by what holds it and its key."""
    for key in list(content) if isinstance(content, dict) else range(len(content) if isinstance(content, list) else 0):
        yield content, key
        yield from _places(content[key])


@cache
def place() -> Path:
    """A folder with a tiny model, its GGUF file and a finished run, in which everything is damaged."""
    folder = Path(tempfile.mkdtemp())
    populate(folder, "llama")
    tiny_gguf(folder / "llama", folder / "tiny.gguf")
    (folder / "run").mkdir()
    example_run(folder / "run")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER), encoding="utf-8")
    shutil.copytree(folder / "llama", folder / "hostile")
    shutil.copytree(folder / "run", folder / "hostile-run")
    return folder


@pytest.fixture(autouse=True)
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place())
    monkeypatch.setattr(chat_template, "_SECONDS", 0.3)
    yield


def recipe(content: bytes) -> None:
    Path("recipes/hostile.yaml").write_bytes(content)
    load_checked("hostile")


def override(content: bytes) -> None:
    load_checked("small", [content.decode("utf-8", "replace")])


def rows(content: bytes) -> None:
    Path("hostile.jsonl").write_bytes(content)
    task = Task("sft", "auto", has_chat_template=True)
    form, read = open_rows(open_source(Source(path="hostile.jsonl")), task)
    encode = Chunker(encoder(), 64, "truncate")
    for where, row in read:
        encode([(form.convert(row, where), where)])


@cache
def encoder() -> Encoder:
    return Encoder(chatml_tokenizer(), "auto", frozenset([2]))


def run_folder(file: str, content: bytes) -> None:
    Path("hostile-run", file).write_bytes(content)
    try:
        page = write_report(Path("hostile-run")).read_text(encoding="utf-8")
        assert printable(page) == page
    finally:
        shutil.copy(Path("run", file), "hostile-run")


def template(content: bytes) -> None:
    Path("hostile.jinja").write_bytes(content)
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = chat_template.load_chat_template("hostile.jinja")
    encode = Encoder(tokenizer, "auto", frozenset([2]))
    row = Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}])
    encode.prompt_text(row)
    Chunker(encode, 64, "truncate")([(row, "row")])


def model(file: str, content: bytes) -> None:
    Path("hostile", file).write_bytes(content)
    try:
        loaded = load_checked("small", ["model.path=hostile"]).recipe
        parameter_names(Model(path="hostile"), {"model_type": "llama"})
        source = ModelSource.open(loaded)
        source.stop_tokens(source.tokenizer())
        if file.endswith(".safetensors"):
            source.load(dtypes(loaded), "sdpa")
    finally:
        shutil.copy(Path("llama", file), "hostile")


def adapter(content: bytes) -> None:
    Path("hostile-adapter").mkdir(exist_ok=True)
    Path("hostile-adapter", "adapter_config.json").write_bytes(content)
    load_checked("small", ["model.adapter=hostile-adapter"])


def gguf(content: bytes) -> None:
    Path("hostile.gguf").write_bytes(content)
    source = ModelSource.open(load_checked("small", ["model.path=hostile.gguf"]).recipe)
    source.tokenizer()


Survives = Callable[[bytes], None]


def kinds() -> dict[str, tuple[Survives, Callable[[], Any], int]]:
    """Of each kind of input who reads it, what is damaged, and how often in the fast tests."""

    def files(folder: str, read: Callable[[str, bytes], None], text: bool, *names: str, times: int) -> dict[str, Any]:
        def contents(name: str) -> Any:
            data = (place() / folder / name).read_bytes()
            either = damaged(data.decode() if text else data, within=2000)
            if name.endswith(".json"):
                either |= altered(json.loads(data))
            if name == "metrics.jsonl":
                first, *rest = data.split(b"\n")
                either |= altered(json.loads(first)).map(lambda line: b"\n".join([line, *rest]))
            return either

        return {name: (partial(read, name), partial(contents, name), times) for name in names}

    recipes = (
        f"{BASE}batch: {{seq_len: 512, micro_batch_size: auto}}\nextra: {{lora: {{a: &x [1, 2], b: *x}}}}\n",
        "model: {path: llama}\ndata:\n  sources:\n  - {path: chat.jsonl, weight: 2}\nmethod: {name: lora, r: 8}\n"
        "optimizer:\n  learning_rate: 1e-3\n  args: {betas: [0.9, 0.99]}\nschedule: {max_steps: '${oc.decode:3}'}\n",
    )
    return {
        "recipe": (recipe, lambda: some.sampled_from(recipes).flatmap(damaged) | altered(WHOLE), 200),
        "override": (override, lambda: some.sampled_from(OVERRIDES).flatmap(damaged), 300),
        "rows": (
            rows,
            lambda: some.sampled_from(ROWS).flatmap(lambda row: damaged(json.dumps(row)) | altered(row)),
            3300,
        ),
        "template": (template, lambda: some.sampled_from(TEMPLATES).flatmap(damaged), 400),
        **files("run", run_folder, True, "manifest.json", "metrics.jsonl", "audit.json", times=100),
        **files(
            "run", run_folder, True, "samples.json", "recipe.yaml", "evaluation.json", "held_out_rows.json", times=100
        ),
        **files("llama", model, True, "config.json", "generation_config.json", "tokenizer_config.json", times=50),
        **files("llama", model, True, "tokenizer.json", times=20),
        **files("llama", model, False, "model.safetensors", times=50),
        "adapter_config.json": (
            adapter,
            lambda: damaged(json.dumps(ADAPTER)) | altered(ADAPTER),
            50,
        ),
        "tiny.gguf": (gguf, lambda: damaged((place() / "tiny.gguf").read_bytes(), within=600), 30),
    }


KINDS = kinds()
MANY = 100_000 / sum(times for _, _, times in KINDS.values())


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_from_outside_ends_in_a_stack_trace(
    kind: str, many: bool, record_property: Callable[[str, Any], None]
) -> None:
    read, contents, times = KINDS[kind]

    uncaught: list[tuple[bytes, str]] = []
    inputs = 0

    def survives(content: bytes) -> None:
        nonlocal inputs
        inputs += 1
        began = time.thread_time()
        try:
            read(content)
        except UserError as error:
            said = str(error)
            if printable(said) != said or len(said.splitlines()) > 40 or len(said) > 40_000:
                uncaught.append((content, f"said: {said[:2000]}"))
        except BaseException:
            uncaught.append((content, traceback.format_exc()))
        if (took := time.thread_time() - began) > SECONDS:
            uncaught.append((content, f"took {took:.0f} s"))

    settings = {"max_examples": round(times * MANY) if many else times, "deadline": None, "database": None}
    checks = hypothesis.HealthCheck
    hypothesis.settings(
        **settings, derandomize=not many, suppress_health_check=list(checks), phases=[hypothesis.Phase.generate]
    )(hypothesis.given(contents())(survives))()
    record(record_property, "Fuzzed inputs", kind=kind, inputs=f"{inputs:,}", uncaught=f"{len(uncaught)}")
    assert inputs >= settings["max_examples"], "the table promises so many"
    assert not uncaught, f"{len(uncaught)} of {inputs}: {uncaught[0][0]!r}\n{uncaught[0][1]}"
