"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import environment, write_jsonl, write_recipe
from tiny import chat_rows, tiny_model

from toolkit.cli.main import main
from toolkit.common import printable
from toolkit.recipe import RecipeError, list_recipes, shipped_recipes
from toolkit.recipe.rules import load_checked
from toolkit.recipe.show import json_schema

COMMANDS = ["ls", "show", "validate", "schema", "init", "cp", "doctor", "data", "report"]
COMMANDS += ["compare", "generate", "merge", "plan", "calibrate", "launch", "render"]
FAST = ["ls", "show recipe=gpt2_xl_clm", "validate recipe=gpt2_xl_clm", "schema", "init", "cp recipe=gpt2_xl_clm mine"]
SHIPPED = list(list_recipes([shipped_recipes()]))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, as wide a terminal as most."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment())


@pytest.mark.parametrize(
    "typed",
    [
        "plan recipe=smollm2_135m_lora hardware=h200 --html",
        "compare one two --html",
        "schema --output",
        "launch recipe=smollm2_135m_lora --slurm --gpus 1 --output",
        "sweep recipe=smollm2_135m_lora seed=1,2 --slurm --gpus 1 --output",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("taken").touch()
    Path("folder").mkdir()
    long = "x" * 300
    for file, reason in (
        ("taken/new/page", f"{Path.cwd()}/taken is no folder"),
        ("folder", "folder is a folder"),
        (long, "its path, or a name in it, is longer than this file system takes"),
        (f"{long}/page", "its path, or a name in it, is longer than this file system takes"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*typed.split(), file])
        assert ended.value.code == 2 and f"{file} cannot be written: {reason}" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(SystemExit):
        main([*typed.split(), "folder/page"])
    assert "folder is read-only, or another user's" in capsys.readouterr().err


def test_a_folder_for_a_file_is_made() -> None:
    assert main(["schema", "--output", "new/folder/schema.json"]) == 0
    assert json.loads(Path("new/folder/schema.json").read_text(encoding="utf-8")) == json_schema()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("plna recipe=x", "there is no command plna; did you mean `plan`?"),
        ("plan recipe=x --jsn", "unrecognized arguments: --jsn; did you mean --json?"),
        ("launch recipe=x --node 2", "unrecognized arguments: --node 2; did you mean --nodes?"),
        ("train recipe=x", "there is no command train; did you mean `launch`?"),
        ("eval runs/x", "there is no command eval; did you mean `evaluate`?"),
        ("serve runs/x", "invalid choice: 'serve'"),
        ("plan recipe=x --batch.seq_len 5", "keys of a recipe are written without dashes: batch.seq_len=VALUE"),
    ],
)
def test_misspelt_commands_and_options_are_told_what_they_may_mean(
    typed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(typed.split())
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and said in told and told.count("did you mean") == said.count("did you mean")


@pytest.mark.parametrize(("typed", "missing"), [("push runs/x", "OWNER/NAME"), ("export", "run"), ("evaluate", "run")])
def test_only_what_is_required_is_said_to_be(typed: str, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(typed.split())
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {missing}\n")


def test_from_an_empty_folder_to_a_recipe_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    assert json.loads(Path("recipes/schema.json").read_text()) == json_schema()
    assert main(["validate", "recipe=mine"]) == 0
    assert main(["cp", "recipe=mine", "bigger", "seq_len=1024", "method=qlora", "~schedule.max_steps"]) == 0
    assert yaml.safe_load(Path("recipes/bigger.yaml").read_text()) == {
        "description": "mine with seq_len=1024 method=qlora ~schedule.max_steps",
        "defaults": "mine",
        "method": "qlora",
        "schedule": {"max_steps": None},
        "batch": {"seq_len": 1024},
    }
    assert main(["validate", "--all"]) == 0
    capsys.readouterr()
    assert main(["show", "recipe=bigger"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"seq_len: 1024 +# recipes/bigger.yaml:\d+", shown)
    assert re.search(r"quantization: nf4 +# shipped:method/qlora.yaml:2", shown)
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out
    assert listed.index("mine") < listed.index("shipped") < listed.index("smollm2_135m_lora_demo")


def test_copy_with_other_data_leaves_format_and_columns_behind() -> None:
    assert main(["cp", "recipe=blenderbot_400m_seq2seq", "pairs", "data=rows.jsonl"]) == 0
    assert yaml.safe_load(Path("recipes/pairs.yaml").read_text())["data"] == ["rows.jsonl"]
    data = load_checked("pairs").recipe.data
    assert (data.format, data.columns, data.over_long) == ("auto", {}, "drop")


def test_first_recipe_trains_on_own_data_as_its_comment_says(place: Path) -> None:
    assert main(["init"]) == 0
    text = Path("recipes/mine.yaml").read_text()
    text = "".join(line for line in text.splitlines(keepends=True) if "option:" not in line)
    text = text.replace("# sources:", "sources:").replace("# eval_split:", "eval_split:")
    Path("recipes/mine.yaml").write_text(text)
    data = load_checked("mine").recipe.data
    assert (data.sources[0].path, data.eval_split, data.over_long) == ("data/train.jsonl", 0.05, "drop")


def test_the_lines_that_init_prints_can_be_typed_for_a_folder_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--recipes", "my recipes"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("check it:"))
    assert main(shlex.split(line.removeprefix("check it:  toolkit "))) == 0


@pytest.mark.parametrize("typed", ["init", "cp recipe=gpt2_xl_clm mine"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_command_that_was_cut_off_where_it_writes_can_be_typed_again(typed: str, at: int, place: Path) -> None:
    """At each of its files: nothing that is half there has a name for which it would refuse to start."""
    kill = f"""
import os, sys
left = {at}
def killed(event, args):
    global left
    if event == "open" and args[2] & os.O_CREAT and "/recipes/" in os.path.abspath(str(args[0])):
        left -= 1
        if not left:
            open(args[0], "wb", opener=lambda name, flags: os.open(name, flags)).close()
            os._exit(9)
sys.addaudithook(killed)
from toolkit.cli.main import main
sys.exit(main({typed.split()!r}))
"""
    ended = subprocess.run([sys.executable, "-c", kill], env=environment(), capture_output=True).returncode
    assert ended == (0 if typed.startswith("cp") and at == 2 else 9)
    if ended:
        assert main(typed.split()) == 0
    assert main(["validate", "recipe=mine"]) == 0
    if typed == "init":
        assert json.loads(Path("recipes/schema.json").read_text()) == json_schema()


def test_of_two_copies_of_one_name_the_later_one_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the name was free when it looked."""
    Path("recipes").mkdir()
    lexists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: Path(path).name != "mine.yaml" and lexists(path))
    Path("recipes/mine.yaml").write_text("mine\n")
    for typed in ("init", "cp recipe=gpt2_xl_clm mine"):
        assert main(typed.split()) == 1
        assert "recipes/mine.yaml exists already" in capsys.readouterr().err
    assert Path("recipes/mine.yaml").read_text() == "mine\n"


def test_a_link_to_nowhere_is_not_written_through(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").symlink_to("../gone.yaml")
    for typed in ("init", "cp recipe=gpt2_xl_clm mine"):
        assert main(typed.split()) == 1
        assert "recipes/mine.yaml exists already" in capsys.readouterr().err
    assert [each.name for each in Path("recipes").iterdir()] == ["mine.yaml"] and not Path("gone.yaml").exists()


def test_output_goes_into_pipes_and_through_links(place: Path) -> None:
    os.mkfifo("pipe")
    Path("elsewhere").mkdir()
    Path("link.json").symlink_to("elsewhere/schema.json")
    reader = subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE)
    for file in ("pipe", "link.json"):
        assert main(["schema", "--output", file]) == 0
    assert json.loads(reader.communicate(timeout=60)[0]) == json_schema()
    assert json.loads(Path("elsewhere/schema.json").read_text()) == json_schema()
    shell = f"{shlex.quote(sys.executable)} -m toolkit schema --output >(cat)"
    sent = subprocess.run(["bash", "-c", f"{shell} | cat"], env=environment(), capture_output=True, text=True)
    assert json.loads(sent.stdout) == json_schema(), sent.stderr


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    Path("recipes/schema.json").write_text("{}")
    assert main(["init"]) == 0
    Path("recipes/mine.yaml").write_text("mine\n")
    assert main(["init"]) == 1
    assert main(["cp", "recipe=gpt2_xl_clm", "mine"]) == 1
    assert "recipes/mine.yaml exists already" in capsys.readouterr().err
    assert Path("recipes/mine.yaml").read_text() == "mine\n"
    assert Path("recipes/schema.json").read_text() == "{}"


# What a user changes, one of these at random for each shipped recipe.
CHANGES = [
    ["seq_len=128"],
    ["method.name=lora", "method.r=4", "method.lora_dropout=0.1", "~optimizer.learning_rate"],
    ["method=dora", "seed=3"],
    ["model=gpt2", "batch.seq_len=512"],
    ["data=[a.jsonl,{path: b.jsonl, weight: 2.0}]", "data.eval_split=0.1", "data.columns.prompt=question"],
    ["data=wikitext", "data.format=text"],
    ["optimizer=sgd", "optimizer.args={nesterov: true}", "optimizer.momentum=0.8"],
    ["~checkpoint", "~evaluation", "description='a, b: {c}'"],
    ["output.dir='${oc.env:HOME}/runs'", "prompts=['a, b','é ${oc.env:HOME}']", "num_prompts=5"],
    [
        "schedule.num_epochs=null",
        "schedule.max_steps=7",
        "schedule.name=cosine_with_min_lr",
        "schedule.args.min_lr_rate=0.1",
    ],
]


@pytest.mark.parametrize("parent", SHIPPED)
def test_copy_loads_to_exactly_its_parent_with_the_changes(parent: str, place: Path) -> None:
    changes = random.Random(parent).choice(CHANGES)
    # A change that this recipe cannot take is refused by `cp` just as it is by `validate`, which looks at data too.
    try:
        valid = bool(load_checked(parent, changes))
    except RecipeError:
        valid = False
    assert main(["cp", f"recipe={parent}", "copy", *changes]) == (0 if valid else 2)
    assert Path("recipes/copy.yaml").exists() == valid
    if not valid:
        return
    wanted, copy = load_checked(parent, changes), load_checked("copy")
    described = any(change.startswith("description") for change in changes)
    ignored = set() if described else {"description"}
    assert copy.recipe.model_dump(exclude=ignored) == wanted.recipe.model_dump(exclude=ignored)
    text = Path("recipes/copy.yaml").read_text()
    assert len(text.splitlines()) < 30, "a diff, not a dump"
    assert str(Path.home()) not in text


def test_most_changes_are_taken_by_the_demo() -> None:
    """The test above must not pass because everything is refused."""
    refused = []
    for number, changes in enumerate(CHANGES):
        if main(["cp", "recipe=smollm2_135m_lora_demo", f"copy_{number}", *changes]):
            refused.append(changes)
    assert refused == []


def test_copy_of_a_copy_in_a_sub_folder() -> None:
    write_recipe(Path(), "team/first", "defaults: [smollm2_135m_lora_demo]\nseed: 5\n")
    assert main(["cp", "recipe=team/first", "elsewhere", "seq_len=64"]) == 1
    assert main(["cp", "recipe=team/first", "team/second", "seq_len=64"]) == 0
    assert main(["cp", "recipe=team/second", "--recipes", "recipes", "team/third", "method.r=4"]) == 0
    recipe = load_checked("team/third").recipe
    assert (recipe.seed, recipe.batch.seq_len, recipe.method.r) == (5, 64, 4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["cp", "recipe=gpt2_xl_clm"], 1, "one new name"),
        (["cp", "recipe=gpt2_xl_clm", "a", "b"], 1, "one new name"),
        (["cp", "recipe=gpt2_xl_clm", "../outside"], 1, "cannot name a recipe"),
        (["cp", "recipe=gpt2_xl_clm", "_part"], 1, "cannot name a recipe"),
        (["cp", "recipe=gpt2_xl_clm", "model/mine"], 1, "cannot name a recipe"),
        (["cp", "recipe=gpt2_xl_clm", "gpt2_xl_clm"], 1, "choose another name"),
        (["cp", "recipe=gpt2_xl_clm", "mine", "seed=x"], 2, "a whole number"),
        (["cp", "recipe=team/args", "team/less", "~optimizer.args.nesterov"], 1, "cannot take keys out"),
        (["validate"], 2, "name one recipe"),
        (["validate", "gpt2_xl_clm"], 2, "did you mean recipe=gpt2_xl_clm"),
        (["validate", "recipe=gpt2_xl_clm", "recipe=x"], 2, "name one recipe"),
        (["validate", "--all", "recipe=gpt2_xl_clm"], 1, "--all"),
        (["validate", "recipe=gpt2_xl_clm", "--recipes", "nowhere"], 2, "is not a folder"),
        (["ls", "--recipes", "nowhere"], 2, "is not a folder"),
        (["report", "nowhere"], 1, "there is no folder"),
        (["generate", "nowhere"], 1, "there is no folder"),
        (["compare", "nowhere", "there"], 1, "there is no folder nowhere"),
        (["merge", "nowhere"], 1, "there is no folder"),
    ],
)
def test_wrong_use_is_one_message(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "defaults: [smollm2_135m_lora_demo]\noptimizer: {name: sgd, args: {nesterov: true, dampening: 0}}\n"
    write_recipe(Path(), "team/args", text)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words in captured.err
    assert captured.out == ""
    assert [file.name for file in Path().rglob("*.yaml")] == ["args.yaml"]


@pytest.mark.parametrize(
    "arguments", [[], ["lss"], ["validate", "--al"], ["ls", "extra"], ["data", "recipe=x", "--show", "0"]]
)
def test_wrong_usage_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: toolkit" in capsys.readouterr().err


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(("sent", "said"), [("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP"), ("SIGINT", "Ctrl-C")])
def test_a_command_that_is_stopped_says_so(
    sent: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = signal.Signals[sent]
    monkeypatch.setattr("toolkit.cli.doctor.collect", lambda: os.kill(os.getpid(), number))
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["doctor"]) == 128 + number
    assert capsys.readouterr().err == (
        f"stopped by {said}: nothing unfinished is left; the same command starts again\n"
    )
    assert before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]


def test_options_may_stand_between_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path(), "mine", "defaults: [smollm2_135m_lora_demo]\n")
    assert main(["show", "--recipes", "recipes", "recipe=mine", "seq_len=64"]) == 0
    assert main(["show", "recipe=mine", "--recipes", "recipes", "seq_len=64"]) == 0
    first, second = capsys.readouterr().out.split("description:")[1:]
    assert first == second and "seq_len: 64" in first


@pytest.mark.parametrize("given", ["-0.5,1.5", "-.5,1.5", "-1,2e0"])
def test_a_value_may_begin_with_a_negative_number(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ["nowhere", "there", "--output", "out"]
    for arguments in (["--weights", given], [f"--weights={given}"]):
        assert main(["merge", *arguments, *runs]) == 1
        assert "there is no folder nowhere" in capsys.readouterr().err


def test_validate_all_reports_every_wrong_recipe_and_counts_them(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path(), "good", "defaults: [smollm2_135m_lora_demo]\n")
    write_recipe(Path(), "bad", "defaults: [smollm2_135m_lora_demo]\nsed: 1\n")
    write_recipe(Path(), "broken", "defaults: [\n")
    write_recipe(Path(), "no_data", "defaults: [smollm2_135m_lora_demo]\ndata: missing.jsonl\n")
    write_recipe(Path(), "no_folder", "defaults: [smollm2_135m_lora_demo]\noutput: recipes/bad.yaml\n")
    write_recipe(
        Path(), "unusual", "defaults: [smollm2_135m_lora_demo]\nbatch: {micro_batch_tokens: 5, micro_batch_size: 1}\n"
    )
    assert main(["validate", "--all"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "6 recipes checked, 4 with problems\n"
    for name in ("bad", "broken", "no_data", "no_folder"):
        assert f"recipe {name}: 1 problem" in captured.err
    assert "batch.micro_batch_tokens: " in captured.err and "recipes/unusual.yaml:2" in captured.err


def test_list_survives_files_that_are_no_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(Path(), "good", "description: |\n  two\n  lines\n")
    write_recipe(Path(), "broken", "[")
    Path("recipes/latin.yaml").write_bytes(b"description: caf\xe9\n")
    Path("recipes/dangling.yaml").symlink_to("nowhere")
    Path("recipes/two\nlines.yaml").touch()
    Path(b"recipes/\xff.yaml".decode("utf-8", "surrogateescape")).touch()
    assert main(["ls"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^good +two lines$", listed, re.MULTILINE)
    assert all(f"\n{name}" in listed for name in ("broken", "latin", "dangling"))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command}( |$)", text, re.MULTILINE) for command in COMMANDS)
    assert max(map(len, text.splitlines())) <= 90
    for line in re.findall(r"^  toolkit (cp .*?)  ", text, re.MULTILINE):
        Path("recipes/mine.yaml").unlink(missing_ok=True)
        assert main(line.split()) == 0


def test_fast_commands_import_no_framework() -> None:
    program = (
        "import sys; from toolkit.cli.main import main\n"
        f"codes = [main(line.split()) for line in {FAST}]\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy'} & set(sys.modules)\n"
        "print(codes, sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    # `cp` finds the recipe that `init` wrote, and leaves it alone.
    assert done.stderr.splitlines()[-1] == "[0, 0, 0, 0, 0, 1] []", done.stderr


@pytest.mark.parametrize("command", ["ls", "schema"])
def test_output_can_be_cut_short(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_wrong_recipe_ends_with_code_2() -> None:
    done = run("validate", "recipe=smollm2_135m_lora_demo", "seq_length=5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean `batch.seq_len`?" in done.stderr and "Traceback" not in done.stderr


def test_data_is_audited_and_shown(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", place / "model")
    write_jsonl(place / "rows.jsonl", chat_rows(20))
    write_recipe(place, "mine", f"model: {{path: {model}}}\ndata: {{sources: [rows.jsonl], over_long: truncate}}\n")
    assert main(["data", "recipe=mine", "--show", "2"]) == 0
    text = capsys.readouterr().out
    assert "rows" in text and "rows.jsonl" in text
    assert "what does str." in text
    assert main(["data", "recipe=mine", "--show", "20"]) == 0
    every = capsys.readouterr().out
    assert "── row 20: " in every and len(every.splitlines()) > 80
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["data", "recipe=mine", "--show", "20"]) == 0
    *_, rows = (shown := capsys.readouterr().out).partition("── row 1: ")
    assert len(rows.splitlines()) <= 40 and shown.endswith("all of it: the same command with `| less`\n")
    assert all(line.count("\x1b[0m") == len(re.findall(r"\x1b\[3?2m", line)) for line in rows.splitlines())


@pytest.mark.parametrize(
    ("command", "option", "wrong"),
    [
        ("generate", "--temperature", ["-1", "nan", "inf", "warm", ""]),
        ("generate", "--top-p", ["0", "-1", "1.5", "nan", "x"]),
        ("generate", "--seed", ["-1", "1.5", "x"]),
        ("generate", "--max-new-tokens", ["0", "-1", "1e3"]),
        ("plan", "--price", ["-1", "nan", "inf", "x"]),
        ("launch", "--gpus", ["-1", "1.5"]),
        ("launch", "--nodes", ["0", "x"]),
        ("launch", "--port", ["0", "70000"]),
        ("data", "--show", ["0", "-3", "x"]),
        ("calibrate", "--seconds", ["0", "x"]),
    ],
)
def test_a_wrong_number_of_an_option_is_named(
    command: str, option: str, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for value in wrong:
        with pytest.raises(SystemExit) as caught:
            main([command, f"{option}={value}"])
        assert caught.value.code == 2
        assert f"argument {option}: {value} is not a" in capsys.readouterr().err


def test_options_that_are_keys_are_answered_with_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["validate", "recipe=mine", "--per-device-train-batch-size", "4", "--max-steps=3", "--LoadIn4Bit"])
    said = capsys.readouterr().err
    assert "max_steps=VALUE" in said and "for per_device_train_batch_size: set batch.micro_batch_size" in said
    assert "for LoadIn4Bit: write method: {name: lora, quantization: nf4}" in said


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        *(("--num_processes", "--gpus N"), ("--nproc-per-node", "--gpus N"), ("--num_machines", "--nodes N")),
        *(("--node_rank", "--rank R"), ("--master_addr", "--head HOST"), ("--main_process_port", "--port P")),
        ("--config_file", "`accelerate launch` takes one"),
    ],
)
def test_options_of_other_launchers_are_answered_with_ours(
    option: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "recipe=mine", option, "2"])
    assert ours in capsys.readouterr().err


MANY = {
    "recipes": lambda: [write_recipe(Path(), f"r{number}", "description: \x1b[2J\n") for number in range(500)],
    "lines of extra": lambda: write_recipe(
        Path(),
        "many",
        "defaults: smollm2_135m_lora_demo\nextra: {lora: {" + ", ".join(f"k{n}: 1" for n in range(500)) + "}}\n",
    ),
    "sources": lambda: write_recipe(
        Path(),
        "many",
        "defaults: smollm2_135m_lora_demo\ndata: {sources: ["
        + ", ".join(f"{{path: a/b{n}}}" for n in range(500))
        + "]}\n",
    ),
    "a long value": lambda: write_recipe(
        Path(), "many", f"defaults: smollm2_135m_lora_demo\ndescription: {'x' * 100_000}\n"
    ),
}


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("command", ["ls", "show recipe=many", "validate recipe=many", "validate --all"])
def test_a_terminal_gets_no_flood(
    command: str, many: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    MANY[many]()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(command.split())
    for text in capsys.readouterr():
        own = 200 if command.startswith("show") else len(SHIPPED) if command == "ls" else 0
        assert len(text.splitlines()) <= 45 + own and len(text) < 60_000
        assert text == printable(text)
