"""`toolkit plan` as a user types it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, environment, write_recipe

from toolkit.cli import plan
from toolkit.cli.main import _parser, main
from toolkit.cli.plan import questions
from toolkit.planner.plan import Plan, Refused, json_schema
from toolkit.recipe import split_arguments
from toolkit.recipe.rules import load_checked
from toolkit.report.plan_view import ALL_PARTS

SMALL = ["recipe=smollm2_135m_lora", "max_steps=100", "hardware=h200"]
DOCS, README = EXAMPLES = ROOT / "docs" / "plan.md", ROOT / "README.md"
BLOCK = re.compile(r"```\n\$ (toolkit plan (?:.*\\\n)*.*)\n((?:.*\n)*?)```")
GIB = 2**30


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, as wide a terminal as most."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def planned(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_terminal_gets_a_screen_and_a_file_the_whole_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("recipe=llama_3_1_8b_lora", "hardware=h200")
    assert "Allocated by phase" in planned(*arguments, capsys=capsys)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = planned(*arguments, capsys=capsys).splitlines()
    assert len(lines) <= 40 and "same command with `| less`" in lines[-1]


@pytest.mark.parametrize("override", ["optimizer.learning_rate=1e-4,1e-3", "sed=1", "seq_len=x"])
def test_nothing_is_measured_for_a_recipe_that_is_wrong(
    place: Path, override: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(place / "cache"))
    assert main(["plan", "recipe=smollm2_135m_lora_demo", override]) == 2
    assert "1 problem" in capsys.readouterr().err
    assert not list(place.rglob("*.*")), "no figures of this machine"


def test_nothing_is_measured_for_a_model_that_cannot_be_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_CACHE", str(place / "cache"))
    monkeypatch.setattr("toolkit.planner.hardware.calibration.subprocess.run", None)
    assert main(["plan", "recipe=smollm2_135m_lora_demo", "model.path=nobody/nothing", "hardware=cpu"]) == 1
    assert "nobody/nothing is neither a folder here nor in the hub's cache" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "compare", "sweeps", "asked"),
    [
        (["recipe=a", "seed=1"], [], [], ["recipe=a seed=1"]),
        (["recipe=a", "x=1"], ["b", "c y=2"], [], ["recipe=a x=1", "recipe=b x=1", "recipe=c x=1 y=2"]),
        ([], ["a", "b", "hardware=h100"], [], ["recipe=a hardware=h100", "recipe=b hardware=h100"]),
        (["recipe=a"], ["recipe=b x=1"], [], ["recipe=a", "recipe=b x=1"]),
        ([], ["a", "a"], [], ["recipe=a"]),
        (
            ["recipe=a"],
            [],
            [("x", ["1", "2"]), ("hardware", ["h100", "cpu"])],
            [f"recipe=a x={x} hardware={name}" for x in (1, 2) for name in ("h100", "cpu")],
        ),
        (["recipe=a", "x=1"], [], [("recipe", ["b", "c"])], ["x=1 recipe=b", "x=1 recipe=c"]),
        ([], ["a", "b"], [("x", ["1"])], ["recipe=a x=1", "recipe=b x=1"]),
    ],
    ids=["one", "beside", "only", "named", "twice", "grid", "of-recipes", "both"],
)
def test_what_a_command_line_asks_for(
    arguments: list[str], compare: list[str], sweeps: list[tuple[str, list[str]]], asked: list[str]
) -> None:
    assert [" ".join(row) for row in questions(arguments, compare, sweeps)] == asked


def test_a_value_of_a_recipe_beside_others_may_have_spaces() -> None:
    assert questions([], ["a  x=[1, 2] y='b c'"], None) == [["recipe=a", "x=[1, 2]", "y='b c'"]]


def test_a_plan_says_what_its_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(*SMALL, "--price", "2.5", capsys=capsys)
    plan = Plan.model_validate_json(planned(*SMALL, "--price", "2.5", "--json", capsys=capsys))
    assert text.startswith("smollm2_135m_lora max_steps=100 on h200\nFITS: ")
    assert (plan.hardware, plan.devices, plan.work.steps, plan.fit.answer) == ("h200", 1, 100, "yes")
    assert plan.overrides == ["max_steps=100"]
    total = plan.memory[0].total.value / 2**30
    assert f"{total:.2f} of 139.8 GiB device memory" in text or f"{total:.1f} of 139.8 GiB device memory" in text
    assert plan.work.cost == pytest.approx(2.5 * (plan.work.gpu_hours or 0))
    assert plan.advice, "there is something to say about a single plan"
    assert "What to change" in text
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text


def test_the_schema_describes_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(planned("--schema", capsys=capsys))
    assert schema == json_schema()
    described = schema["$defs"]["Plan"]["properties"]
    plan = json.loads(planned(*SMALL, "--json", capsys=capsys))
    assert plan.keys() == described.keys()
    for name, field in described.items():
        assert "description" in field or "description" in schema["$defs"][field["$ref"].rpartition("/")[2]], name


def test_a_sweep_is_a_row_for_each_value_and_says_why_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "strategy=ddp,single,zero3", "--sweep", "hardware=h200x2,a100"]
    rows = json.loads(planned(*SMALL[:2], *sweep, "--json", capsys=capsys))
    assert [(row["overrides"][-1], row["hardware"]) for row in rows] == [
        (f"strategy={name}", hardware) for name in ("ddp", "single", "zero3") for hardware in ("h200x2", "a100")
    ]
    refused = [Refused.model_validate(row) for row in rows if "reason" in row]
    assert [(row.overrides[-1], row.hardware) for row in refused] == [("strategy=single", "h200x2")]
    text = planned(*SMALL[:2], *sweep, capsys=capsys)
    assert re.search(r"^hardware=h200x2 strategy=single\s+refused$", text, re.M)
    assert len(re.findall(r"^  [A-Z]+ *│", text, re.M)) == 5
    assert max(map(len, text.splitlines())) <= 80


def test_a_terminal_gets_no_flood_of_plans(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", f"seed={','.join(map(str, range(30)))}"]
    assert len(planned(*SMALL, *sweep, capsys=capsys).splitlines()) > 60
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = planned(*SMALL, *sweep, capsys=capsys).splitlines()
    assert len(lines) == 40 and "more lines" in lines[-2] and "all of it: the same command with `| less`" in lines[-1]


def test_hybrid_sharding_is_planned_over_nodes_and_advised_on(capsys: pytest.CaptureFixture[str]) -> None:
    """One of fewer devices, on a single node, cannot take it; that must not end the plan."""
    wide = ["recipe=smollm2_135m_lora", "max_steps=100", "hardware=h200x8x2", "strategy=fsdp_hybrid"]
    plan = Plan.model_validate_json(planned(*wide, "global_batch_size=16", "--json", capsys=capsys))
    assert (plan.devices, plan.nodes) == (16, 2) and plan.advice
    assert {"NVLink", "network"} <= {link.name for link in plan.work.links}


def test_longer_sequences_take_more(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["--sweep", "seq_len=512,1024,2048", "micro_batch_size=1"]
    plans = [Plan.model_validate(row) for row in json.loads(planned(*SMALL, *sweep, "--json", capsys=capsys))]
    peaks = [plan.memory[0].allocated for plan in plans]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    assert [plan.seq_len for plan in plans] == [512, 1024, 2048]
    assert not any(plan.advice for plan in plans), "a table has no room for it"


def test_recipes_are_compared_by_name(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    write_recipe(place, "mine", "defaults: [smollm2_135m_lora]\nbatch: {seq_len: 1024}\n")
    names = ["--compare", "smollm2_135m_lora", "mine", "mine seq_len=512", "hardware=h200"]
    text = planned(*names, "--html", "pages/plans.html", capsys=capsys)
    labels = re.findall(r"^(\S.*?) +yes ", text, re.M)
    assert labels == ["smollm2_135m_lora", "mine", "mine seq_len=512"]
    html = Path("pages/plans.html").read_text(encoding="utf-8")
    assert html.count('class="track"') == 3 and "mine seq_len=512" in html


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "name one recipe"),
        (["smollm2_135m_lora"], 2, "did you mean recipe=smollm2_135m_lora"),
        (["recipe=smollm2_135m_lra", "hardware=h200"], 2, "smollm2_135m_lora"),
        (["recipe=smollm2_135m_lora", "hardware=a100_80gb"], 1, "did you mean `a100`"),
        (["recipe=smollm2_135m_lora", "hardware=h200", "model=qwen3_9b"], 2, "did you mean `qwen3_8b`"),
        (["recipe=smollm2_135m_lora", "hardware=h200", "model.path=Qwen/Qwen3-9B"], 1, "Qwen/Qwen3-8B"),
        (["recipe=smollm2_135m_lora", "hardware=h200", "--sweep", "seq_lenn=1,2"], 2, "did you mean `batch.seq_len`"),
        (["recipe=smollm2_135m_lora", "--sweep", "hardware=h200,h21"], 1, "recipes/_hardware.yaml"),
        (["recipe=smollm2_135m_lora", "--compare", "strategy=fsdp"], 1, "--compare names no recipe"),
        (["recipe=smollm2_135m_lora", "hardware=h200x8", "global_batch_size=12"], 1, "global_batch_size=8 or 16"),
        (["recipe=smollm2_135m_lora", "hardware=cpux2", "strategy=zero2"], 1, "set strategy=ddp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_message(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error


def test_all_that_is_misspelt_in_a_sweep_is_told_before_its_first_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "estimate", lambda *of, **what: pytest.fail("it is planned"))
    assert main(["plan", "recipe=smollm2_135m_lora", "--sweep", "hardware=h200,h201,a100_80gb"]) == 1
    error = capsys.readouterr().err
    assert all(words in error for words in ("hardware=h201: there", "hardware=a100_80gb: there", "did you mean `a100`"))
    sweeps = ["--sweep", "seed=1,x", "--sweep", "hardware=h200,h201"]
    assert main(["plan", "recipe=smollm2_135m_lora", *sweeps]) == 2
    error = capsys.readouterr().err
    assert error.count("hardware=h201: there") == 1 and "seed" in error


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llamma", "hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 64}, "`llamma`"),
        ({"model_type": "vit", "hidden_size": 96, "num_hidden_layers": 2}, "vocabulary"),
    ],
    ids=["unknown", "images"],
)
def test_formulas_do_not_plan_what_transformers_cannot_build(
    config: dict[str, Any], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "config.json").write_text(json.dumps(config))
    assert main(["plan", *SMALL, f"model.path={place}"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["seq_len", "seq_len=", "=1,2", "seq_len=1,,2", "seq_len=1,"])
def test_a_malformed_sweep_is_explained(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *SMALL, "--sweep", text])
    assert caught.value.code == 2
    assert f"{text} is not KEY=V1,V2,… such as seq_len=2048,4096" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["-1", "nan", "cheap", "inf"])
def test_a_price_is_an_amount(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SMALL, f"--price={price}"])
    assert "is not a price" in capsys.readouterr().err


def test_a_known_trace_needs_no_framework_and_little_work(capsys: pytest.CaptureFixture[str]) -> None:
    """Work is counted in calls and returns, with imports: 4.0 million, about a second on a quick machine."""
    planned(*SMALL, capsys=capsys)
    program = (
        "import itertools, sys; events = itertools.count()\n"
        "sys.setprofile(lambda *_: next(events))\n"
        "from toolkit.cli.main import main\n"
        f"code = main({['plan', *SMALL]!r})\n"
        "sys.setprofile(None)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)\n"
        "print(code, sorted(heavy), next(events), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    code, heavy, events = done.stderr.splitlines()[-1].rsplit(" ", 2)
    assert (code, heavy) == ("0", "[]"), done.stderr
    assert int(events) < 6_000_000


def test_local_data_is_sampled_without_a_framework(place: Path) -> None:
    rows = (json.dumps({"prompt": "How many?", "completion": "word " * (number % 90)}) for number in range(1, 3000))
    (place / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    arguments = ["plan", *SMALL, "data=[rows.jsonl]", "data.eval_split=0.1", "--json"]
    program = (
        "import sys; from toolkit.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print(code, sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stderr.splitlines()[-1] == "0 []", done.stderr
    plan = Plan.model_validate_json(done.stdout)
    assert plan.work.tokens_from == "sampled" and plan.lengths.startswith("row lengths are from a sample of 300 rows")
    # The longest row need not be among them.
    asked = [*SMALL, "data=builtin:stdlib-docstrings", "data.eval_split=0.1", "--json"]
    full = Plan.model_validate_json(printed(f"toolkit plan {' '.join(asked)}", place))
    assert plan.memory[0].total.value < full.memory[0].total.value <= plan.memory[0].total.high


def printed(command: str, cache: Path) -> str:
    """What a command line of the documentation prints. Advice knows the traces that are shipped or in the cache."""
    words = shlex.split(command.replace("\\\n", " "))
    own = environment() | {"TOOLKIT_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-m", *words], env=own, cwd=cache, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_examples_are_what_the_commands_print(file: Path, place: Path) -> None:
    """To renew them: `python tests/cli/test_plan.py`."""
    blocks = BLOCK.findall(file.read_text(encoding="utf-8"))
    assert blocks
    for command, shown in blocks:
        assert printed(command, place) == shown, command


def test_the_worked_example_is_right_by_hand() -> None:
    """The arithmetic that docs/plan.md does beside the figures."""
    parameters, adapters = 8_030_261_248, 41_943_040
    shown = BLOCK.findall(DOCS.read_text(encoding="utf-8"))[0][1]
    assert re.search(rf"^  parameters +{2 * parameters / GIB:.1f} ", shown, re.M)
    assert re.search(rf"^  adapters +{4 * adapters / GIB:.2f} ", shown, re.M)
    assert re.search(rf"^  optimizer +· +{8 * adapters / GIB:.2f} ", shown, re.M)


def test_every_part_and_every_key_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    parts, keys = (
        set(re.findall(r"`(\w+)`", text.split(start)[1].split(end)[0]))
        for start, end in (("### Parts", "### Phases"), ("## JSON", "## Limits"))
    )
    assert parts == set(ALL_PARTS)
    assert set(Plan.model_fields) <= keys


def test_commands_of_the_readme_load() -> None:
    commands = re.findall(r"^toolkit plan (.*?)(?: #.*)?$", README.read_text(encoding="utf-8"), re.M)
    assert len(commands) >= 3
    for command in commands:
        options = _parser().parse_args(["plan", *shlex.split(command)])
        for row in questions(options.arguments, options.compare, options.sweep):
            name, overrides = split_arguments([word for word in row if not word.startswith("hardware=")])
            load_checked(name, overrides)


def renew(file: Path) -> None:
    """Replaces the examples of a file by what their commands print."""
    with tempfile.TemporaryDirectory() as cache:
        text = file.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda block: f"```\n$ {block[1]}\n{printed(block[1], Path(cache))}```", text)
        file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    for example in EXAMPLES:
        renew(example)
