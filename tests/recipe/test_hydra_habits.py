"""What Hydra's users type is answered with what does it here."""

from __future__ import annotations

import itertools
import re
import shlex

import pytest

from toolkit.cli.main import main as toolkit_main
from toolkit.recipe import RecipeError, load
from toolkit.recipe.hydra_habits import Usage, refuse_flags, swept_values
from toolkit.recipe.schema import leaf_paths
from toolkit.recipe.show import keys_text
from toolkit.train.main import main as run_main

DEMO = "recipe=smollm2_135m_lora_demo"


def flags_of_hydra() -> list[str]:
    from hydra._internal.utils import get_args_parser

    options = [option for action in get_args_parser()._actions for option in action.option_strings]
    return [option for option in options if option not in ("-h", "--help", "--version")]


@pytest.mark.parametrize("flag", flags_of_hydra())
def test_every_flag_of_hydra_has_an_answer(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Usage) as caught:
        refuse_flags([DEMO, flag])
    assert caught.value.change and "\n" not in caught.value.change
    assert run_main([DEMO, flag]) == 2
    assert caught.value.change in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        toolkit_main(["show", DEMO, flag])
    assert ended.value.code == 2
    assert caught.value.change in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["seq_len=128,256", "optimizer.learning_rate=1e-3,2e-3", "seed=1"], 4),
        (["seq_len=range(128,512,128)"], 3),
        (["method=choice(lora,dora)"], 2),
        (["data=data/a.jsonl,data/b.jsonl"], 2),
        (["method.target_modules=[q_proj],[k_proj,v_proj]"], 2),
    ],
)
def test_the_answer_to_a_multirun_trains_every_combination(
    arguments: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Usage) as caught:
        refuse_flags([DEMO, "--multirun", *arguments])
    line = caught.value.change.partition("train each: `")[2].rstrip("`")
    program, *typed = shlex.split(line)
    assert program == "toolkit" and toolkit_main([*typed, "--print"]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == count


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("seed=shuffle(1,2,3)", ["1", "2", "3"]),
        ("seed=shuffle(choice(1,2))", ["1", "2"]),
        ("seed=sort(3,1,2)", ["1", "2", "3"]),
        ("seed=int(1,2)", ["1", "2"]),
        ("seed=int(1.0),int(2.0)", ["int(1.0)", "int(2.0)"]),
        ("seed=tag(x,choice(1,2))", ["1", "2"]),
        ("learning_rate=1e-3, 2e-4", ["1e-3", "2e-4"]),
        ("learning_rate=choice(1e-3,2e-4)", ["1e-3", "2e-4"]),
        ("lora_target=[[a,b],[c]],[d]", ["[[a,b],[c]]", "[d]"]),
        ("optimizer.args={a:{b:1,c:2}},{}", ["{a:{b:1,c:2}}", "{}"]),
        ("description='a,b','c'", ["'a,b'", "'c'"]),
    ],
)
def test_values_are_told_apart_as_hydra_does(argument: str, values: list[str]) -> None:
    assert swept_values(argument) == values


@pytest.mark.parametrize("argument", ["seq_len=glob(*)", "learning_rate=interval(1e-5,1e-3)"])
def test_what_is_no_list_of_values_is_named(argument: str) -> None:
    with pytest.raises(Usage) as caught:
        refuse_flags(["recipe=mine", "-m", argument])
    assert caught.value.change.startswith(f"{argument}: write the values")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("hydra.run.dir=x", "output.dir"),
        ("hydra.sweep.dir=x", "toolkit sweep"),
        ("hydra.job.name=x", "output.name"),
        ("hydra.verbose=true", "--verbose"),
        ("hydra/launcher=submitit_slurm", "--slurm"),
        ("+hydra/sweeper=optuna", "--sweep"),
        ("hydra.searchpath=[x]", "--recipes"),
        ("hydra.other=1", "leave it out"),
        ("method@model=lora", "method=lora"),
        ("/method=lora", "method=lora"),
        ("~method=lora", "~method"),
        ("seq_len=128,256", "--sweep batch.seq_len=128,256"),
        ("seq_len=choice(128,256)", "--sweep"),
        ("seq_len=range(128,512,128)", "for each: toolkit sweep … batch.seq_len=128,256,384"),
        ("seq_len=glob(*)", "write one value; glob(…) and interval(…)"),
        ("learning_rate=interval(1e-5,1e-3)", "write one value"),
        ("method.target_modules=[q_proj],[k_proj]", "--sweep 'method.target_modules=[q_proj],[k_proj]'"),
        ("method.target_modules=q_proj,k_proj", "for a list: 'method.target_modules=[q_proj,k_proj]'"),
    ],
)
def test_overrides_of_a_hydra_application(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load("smollm2_135m_lora_demo", [override])
    (problem,) = caught.value.problems
    assert hint in problem.hint and caught.value.exit_code == 2


def test_options_that_are_keys_are_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        toolkit_main(["show", DEMO, "--seq-len=5"])
    assert "without dashes: seq_len=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "run"])
def test_help_lists_every_key(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(["--help"]) if command == "run" else toolkit_main(["show", "--help"])
    assert ended.value.code == 0
    assert keys_text() in capsys.readouterr().out


def test_each_key_has_its_values_default_and_meaning() -> None:
    lines = keys_text().splitlines()
    after = [after for line, after in itertools.pairwise(lines) if line.endswith("e.g.")]
    assert all(line.startswith("      ") for line in [*after, lines[-1]]), "cut before the example"
    for places in leaf_paths().values():
        for place in places:
            (at,) = [at for at, line in enumerate(lines) if line.startswith(f"  {place}: ")]
            # The default of a key with many choices stands on a line of its own.
            meaning = next(line for line in lines[at + 1 :] if line.startswith("      "))
            assert len(meaning.strip()) > 10


def test_meanings_are_whole_sentences_also_for_keys_within_keys() -> None:
    text = keys_text()
    meanings = re.findall(r"(?:^      .*\n)+", text, re.M)
    assert len(meanings) > 200
    assert [meaning for meaning in meanings if meaning.count("(") != meaning.count(")")] == []
    assert [meaning for meaning in meanings if not meaning.endswith(".\n") or meaning.endswith("et al.\n")] == []
    for key in ("rewards.regex.pattern", "rewards.format.tags", "distillation.teacher.offload", "weight"):
        assert f"\n  {key}: " in text
    assert "seed: whole number, at least 0, below 4294967296 (42)" in text
