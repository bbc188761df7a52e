"""What a wrong recipe prints: every problem at once, each with place, value, allowed values and the likely fix."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment

from toolkit.recipe import Problem, RecipeError, did_you_mean, load
from toolkit.recipe.rules import load_checked
from toolkit.recipe.schema import leaf_paths, sections

BASE = "defaults: [{model: smollm2_135m_builtin}, {data: stdlib_docstrings}, _self_]\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path


def problems(text: str | bytes, *overrides: str) -> str:
    """The message for a recipe with this text."""
    content = text.encode() if isinstance(text, str) else text
    Path("recipes/mine.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_checked("mine", overrides)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert all(isinstance(part, str) for part in vars(problem).values()), "None would be left out in silence"
        assert problem.where or problem.what == "is required", problem
    assert max(map(len, message.splitlines())) <= 100
    assert "ScalarNode" not in message and "searchpath" not in message and "provider=" not in message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["mine.yaml:1", "is empty", "model:"]),
        ("# nothing\n", ["is empty"]),
        ("- a\n- b\n", ["mine.yaml:1", "must be a mapping"]),
        (BASE + "batch:\n\tseq_len: 5\n", ["mine.yaml:3", "tab"]),
        (BASE + "batch:\n  seq_len: 5\n  seq_len: 6\nseed: 1\nseed: 2\n", ["2 problems", "mine.yaml:4", "mine.yaml:6"]),
        (BASE.encode() + b"description: caf\xe9\n", ["mine.yaml:2", "UTF-8"]),
        (BASE + "---\nseed: 2\n", ["mine.yaml:2", "second document"]),
        (BASE + "description: a: b\n", ["mine.yaml:2", "quotes"]),
        (BASE + "1: 2\nbatch: {5: 6}\n", ["mine.yaml:2", "mine.yaml:3", "not text"]),
        (BASE + "seed: !!python/object/apply:os.system ['exit 1']\n", ["mine.yaml:2", "python/object", "not allowed"]),
        (BASE + "seed: [1\nbatch: 2\n", ["mine.yaml:", "is not valid YAML: expected ',' or ']'", "correct that line"]),
        (BASE + "batch: {<<: 5}\n", ["mine.yaml:2", "not valid YAML", "merging"]),
        (BASE + "batch: {seq_len: ${seed}}\n", ["mine.yaml:2", "not valid YAML", "put `${…}` in quotes"]),
        (BASE + "evaluation: &a {prompts: *a}\n", ["mine.yaml:2", "alias"]),
        ("# @package other\n" + BASE, ["mine.yaml:1", "@package"]),
        (BASE + "hydra: {run: {dir: x}}\n", ["mine.yaml:2", "hydra", "unknown key"]),
    ],
    ids=lambda value: "",
)
def test_file_that_is_no_recipe(text: str | bytes, words: list[str]) -> None:
    message = problems(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: smollm2_135m_lora_dmo\n", ["mine.yaml:1", "did you mean `smollm2_135m_lora_demo`"]),
        ("defaults:\nseed: 1\n", ["mine.yaml:1", "must be a name or a list"]),
        ("defaults: {model: x}\n", ["must be a name or a list"]),
        ("defaults: [smollm2_135m_lora_dmo]\n", ["mine.yaml:1", "did you mean `smollm2_135m_lora_demo`"]),
        ("defaults: [qwen3_0_6b]\n", ["did you mean `model: qwen3_0_6b`"]),
        ("defaults:\n  - {modle: gpt2}\n", ["mine.yaml:2", "no such group", "did you mean `model`"]),
        ("defaults:\n  - {model: gpt3}\n", ["mine.yaml:2", "no such option", "smollm2_135m", "did you mean `gpt2`"]),
        ("defaults: [smollm2_135m_lora_demo, {override /model: x}]\n", ["no such option"]),
        ("defaults: [{model: gpt2}, {model: gpt2}]\n", ["mine.yaml:1", "is chosen in", "remove one"]),
        ("model: gpt2\ndefaults: [{model: gpt2}]\n", ["mine.yaml:2", "is chosen in recipes/mine.yaml:1", "remove one"]),
        ("defaults: [smollm2_135m_lora, llama_3_2_1b_full]\n", ["model: is chosen in", "the recipe that extends both"]),
        ("defaults: [{method: [lora, qlora]}]\n", ["is not an entry", "override"]),
        ("defaults: [{optional model: gpt2}]\n", ["is not an entry"]),
        ("defaults: [mine]\n", ["leads back", "mine.yaml", "another name"]),
        ("defaults: [{data: loop}]\n", ["leads back", "loop.yaml"]),
        ("defaults: [{data: crossing}]\n", ["crossing.yaml:1", "its own group"]),
        ("defaults: [{data: wrapped}]\n", ["wrapped.yaml:1", "below `data:` already"]),
        ("extends: smollm2_135m_lora\nsed: 1\n", ["2 problems", "mine.yaml:1", "write defaults: smollm2_135m_lora"]),
        ("base: recipes/x.yaml\n", ["1 problem\n", "mine.yaml:1", "change   write defaults: x"]),
        ("inherits: [../a.yml, b]\n", ["1 problem\n", "write defaults: [a, b]"]),
        (
            "defaults: [{model: gpt3}, {modle: x}, {override /method: qlra}]\nsed: 1\nbatch: {seq_len: '5'}\n",
            ["5 problems", "gpt3", "modle", "qlora", "mine.yaml:2", "batch.seq_len"],
        ),
    ],
    ids=lambda value: "",
)
def test_defaults_that_lead_nowhere(text: str, words: list[str]) -> None:
    Path("recipes/data").mkdir()
    Path("recipes/data/loop.yaml").write_text("defaults: [loop]\n")
    Path("recipes/data/crossing.yaml").write_text("defaults: [{model: gpt2}]\nsources: [a]\n")
    Path("recipes/data/wrapped.yaml").write_text("data: {sources: [a]}\n")
    message = problems(text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch:\n  seq.len: ${seed}\n", ["seq.len: unknown key", "mine.yaml:3", "did you mean `batch.seq_len`?"]),
        ("batch: {grad.accum: 2}\n", ["batch.grad.accum: unknown key", "allowed  seq_len"]),
        (
            "method: {name: lora, target_modules: [q_proj, 3, null]}\n",
            ["2 problems", "method.target_modules.1: is not valid", "given    3 (", "target_modules.2: is not valid"],
        ),
        ("sed: 1\n", ["sed: unknown key", "mine.yaml:2", "given    1", "did you mean `seed`"]),
        ("learning_rate: 1e-3\n", ["did you mean `optimizer.learning_rate`"]),
        ("optimizer: {lr: 1e-3}\n", ["did you mean `optimizer.learning_rate`"]),
        # Sections that may be left out are sections.
        ("distillation: {teacher: {quantisation: nf4}}\n", ["did you mean `distillation.teacher.quantization`"]),
        ("distillation: {teacher: gpt2}\n", ["must be a section", "write distillation.teacher: {path: gpt2}"]),
        ("rewards: {regex: a+}\n", ["must be a section", "write rewards.regex: {pattern: a+}"]),
        ("rewards: {numeric: or}\n", ["tolerance, tag below it, or true for their", "write rewards.numeric: true"]),
        ("rewards: {language: true}\n", ["allowed  weight, code\n", "write rewards.language: {code: true}"]),
        ("batch: {seq_len: '${batch.tokens_per_step}'}\n", ["set what ${batch.tokens_per_step} stands for"]),
        # A section whose name is misspelt, or another tool's.
        ("metod: {name: lora, r: 3}\n", ["did you mean `method`?"]),
        ("Batch: {Seq_Len: 64, global_batch_size: 3}\n", ["did you mean `batch`?"]),
        ("\u043eptimizer: {name: sgd, learning_rate: 1e-4}\n", ["did you mean `optimizer`?"]),
        ("scheduler: {max_steps: 3}\n", ["did you mean `schedule`?"]),
        ("optim: {name: sgd}\n", ["did you mean `optimizer`?"]),
        ("seqlen: 5\n", ["did you mean `batch.seq_len`"]),
        ("batch: {seqlen: 5}\n", ["batch.seqlen: unknown key", "did you mean `batch.seq_len`"]),
        ("x: {y: {z: 1}}\n", ["x: unknown key", "{y: {z: 1}}"]),
        ("data: {sources: [{path: a, wieght: 2}]}\n", ["data.sources.0.wieght", "`data.sources.0.weight`"]),
        ("_target_: os.system\n", ["_target_: unknown key"]),
        ("model: {_target_: os.system}\n", ["model._target_: unknown key"]),
        ("optimizer: {args: {_target_: builtins.print}}\n", ["optimizer.args._target_: unknown key"]),
        ("model: null\n", ["model: must be a section", "given    null"]),
        ("data: {sources: [[a]]}\n", ["data.sources.0: must be a section"]),
        ("data: {sources: [3]}\n", ["data.sources.0", "{path: 3}"]),
        ("data: {sources: x.jsonl}\n", ["data.sources: is not valid", "a list", "write [x.jsonl]"]),
        ("data: {sources: []}\n", ["data.sources", "at least one entry"]),
        ("logging: {trackers: wandb}\n", ["a list", "write [wandb]"]),
        ("logging: {trackers: [wandbb]}\n", ["tensorboard, wandb, mlflow, trackio", "did you mean `wandb`"]),
        ("seed: null\n", ["seed: is not valid", "given    null", "a whole number"]),
        ("seed: -1\n", ["given    -1", ">= 0"]),
        ("seed: abc\n", ["abc (text)", "a whole number"]),
        ("seed: '8'\n", ["'8' (text)", "without quotes"]),
        ("schedule: {max_steps: 1e3}\n", ["1e3 (number)", "write 1000"]),
        ("batch: {seq_len: 5.5}\n", ["5.5 (number)", "a whole number"]),
        ("optimizer: {learning_rate: -1e-4}\n", ["> 0"]),
        ("optimizer: {weight_decay: .inf}\n", ["a finite number"]),
        ("optimizer: {eps: .nan}\n", ["a finite number"]),
        ("optimizer: {beta1: 2}\n", ["< 1"]),
        ("data: {packing: 'yes'}\n", ["'yes' (text)", "true or false"]),
        ("tf32: 1\n", ["true or false"]),
        ("precision: bf-16\n", ["fp32, fp16, bf16, pure_bf16", "did you mean `bf16`"]),
        ("optimizer: {name: adamv}\n", ["schedule_free_sgd", "did you mean `adamw`"]),
        ("method: {target_modules: {a: b}}\n", ["text or a list"]),
        ("output: {dir: '${oc.env:UNSET_A}', name: '${oc.env:UNSET_B}'}\n", ["2 problems", "UNSET_A", "UNSET_B"]),
        ("seed: ${batch.seq_len}\nbatch: {seq_len: '${seed}'}\n", ["recursive interpolation", "mine.yaml:2"]),
        ("seed: ${batch.seqlen}\n", ["'batch.seqlen' not found", "mine.yaml:2"]),
        ("seed: ${foo:1}\n", ["interpolation type foo", "write ${section.key} for another value"]),
        (
            "batch: {seq_len: 0512}\nseed: x\n",
            ["2 problems", "batch.seq_len: 0512 would be read in base 8", "write 512"],
        ),
        ("batch: {seq_len: 00_512}\n", ["batch.seq_len: 00_512 would be read in base 8", "write 512"]),
        ("output: {name: 012}\n", ["output.name: 012 would be read in base 8", "or '012' for text", "mine.yaml:2"]),
        ("schedule: {max_steps: 1:30}\n", ["schedule.max_steps: 1:30 would be read in base 60", "one number"]),
        ("seed: '???'\n", ["to be filled in", "mine.yaml:2"]),
        ("data: {sources: ['${oc.env:NOT_SET}', b, 5]}\n", ["data.sources.0", "NOT_SET", "data.sources.2"]),
    ],
    ids=lambda value: "",
)
def test_wrong_key_or_value(text: str, words: list[str]) -> None:
    message = problems(BASE + text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: qlra\n", ["method: is not known", "mine.yaml:2", "dora, full, lora", "did you mean `qlora`"]),
        ("method: {option: qlra}\n", ["method: there is no such option", "mine.yaml:2", "did you mean `qlora`"]),
        ("method:\n  r: 4\n  option: [qlora]\n", ["is not the name of an option", "mine.yaml:4", "given    [qlora]"]),
        ("method: {option: ../lora}\n", ["is not the name of an option"]),
        ("method: lora\nmethod: {r: 4}\n", ["method: is given twice", "mine.yaml:3", "its key `option`"]),
        ("method: 5\n", ["method: is not known", "given    5"]),
        ("optimizer: sdg\n", ["optimizer: is not known", "did you mean `sgd`"]),
        ("optimizer: [sgd]\n", ["optimizer.name: is not valid", "mine.yaml:2", "[sgd] (list)"]),
        ("batch: '8'\n", ["batch.global_batch_size", "mine.yaml:2", "without quotes"]),
        ("evaluation: often\n", ["evaluation: is a section", "mine.yaml:2", "evaluation.at_start"]),
        ("checkpoint: 5\n", ["checkpoint: is a section", "checkpoint.save_steps"]),
        ("output: ???\n", ["output.dir: is required", "mine.yaml:2"]),
        ("output: ${oc.env:NOT_SET}\n", ["output.dir: the environment variable NOT_SET is not set", "mine.yaml:2"]),
    ],
    ids=lambda value: "",
)
def test_word_that_means_nothing(text: str, words: list[str]) -> None:
    message = problems(BASE + text)
    for word in words:
        assert word in message


def test_word_that_is_no_model_and_no_data() -> None:
    message = problems("model: smollm2_135n\ndata: alpacka\n")
    for word in ("2 problems", "mine.yaml:1", "did you mean `smollm2_135m`", "mine.yaml:2", "did you mean `alpaca`"):
        assert word in message
    assert "write model: {path: unheard_of}" in problems("model: unheard_of\ndata: alpaca\n")


def test_option_that_a_parent_names_does_not_exist() -> None:
    Path("recipes/parent.yaml").write_text("model: gpt2\ndata:\n  option: alpacka\n")
    message = problems("defaults: parent\nseed: 1\n")
    assert "data: there is no such option  (recipes/parent.yaml:3)" in message and "`alpaca`" in message
    Path("recipes/parent.yaml").write_text("model: gpt2\nmethod: lara\ndata: alpaca\n")
    assert "method: is not known  (recipes/parent.yaml:2)" in problems("defaults: parent\nseed: 1\n")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("name=x", ["several keys", "method.name, strategy.name, optimizer.name, schedule.name, output.name"]),
        ("every_steps=4", ["evaluation.every_steps, logging.every_steps"]),
        ("args.x=1", ["optimizer.args.x, schedule.args.x"]),
        ("seqlen=5", ["did you mean `batch.seq_len`"]),
        ("foo.bar=1", ["foo: unknown key", "command line"]),
        ("extends=smollm2_135m_lora", ["extends: unknown key", "one recipe, recipe=NAME"]),
        ("defaults=smollm2_135m_lora", ["defaults: unknown key", "one recipe, recipe=NAME"]),
        ("seed", ["is not an override", "key=value"]),
        ("=5", ["is not an override"]),
        ("seq-len=5", ["is not an override"]),
        ("data.train_on=user", ["change   write [user]"]),
        ("data.train_on=[assistant,users]", ["did you mean `user`?"]),
        ("data.train_on=[humans]", ["change   write what is allowed"]),
        ("model@x=y", ["is not an override"]),
        ("seed=", ["a whole number"]),
        ("data=a,b", ["one value", "data=[a,b]", "data='\"a,b\"'"]),
        ("seed=range(1,3)", ["one value"]),
        ("prompts=[a,'b]", ["cannot be read", "bracket and quote"]),
        ("method=qlra", ["dora, full, lora", "did you mean `qlora`"]),
        ("model=smollm2_135n", ["did you mean `smollm2_135m`"]),
        ("model=unheard_of", ["model.path=unheard_of"]),
        ("optimizer=sdg", ["did you mean `sgd`"]),
        ("evaluation=5", ["is a section", "evaluation.at_start"]),
        ("method=null", ["is a section", "~method"]),
        ("~metod", ["unknown key", "did you mean `~method`"]),
        ("~method.rr", ["unknown key"]),
        ("~model", ["model: is required"]),
        ("method.option=qlra", ["no such option", "did you mean `qlora`"]),
        ("method={option: qlra}", ["no such option", "did you mean `qlora`"]),
        ("data.sources.0.weight=2", ["data.sources=[…]"]),
        ("hydra.run.dir=x", ["unknown key"]),
        ("defaults=[x]", ["defaults: unknown key"]),
        ("_target_=os.system", ["unknown key"]),
        ("output.dir=${oc.env:NOT_SET}", ["NOT_SET is not set", "${oc.env:NOT_SET,default}"]),
        ("seed=???", ["to be filled in"]),
    ],
)
def test_wrong_override(override: str, words: list[str]) -> None:
    message = problems(BASE, override)
    assert "command line" in message or override == "~model"
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("logging=wandb", "write 'logging.trackers=[wandb]'"),
        *(
            (f"activation_checkpointing={on}", "write activation_checkpointing.mode=full")
            for on in ("true", "on", "yes")
        ),
        *((f"activation_checkpointing={off}", "write activation_checkpointing.mode=none") for off in ("false", "off")),
        *((f"strategy={name}", "write strategy.name=zero2") for name in ("deepspeed", "2")),
        ("strategy=tp", "set parallel.tensor"),
        ("strategy=ep", "set parallel.expert"),
        *((f"evaluation={off}", "set data.eval_split: null") for off in ("false", "none", "off")),
        ("schedule=3", "write schedule.num_epochs=3"),
        ("compile=true", "write compile=layers"),
        ("precision=float16", "write precision=fp16"),
        ("objective=ppo", "not supported yet"),
        ("data.eval_split=200", "write 'data={eval_split: 0.05, eval_max_samples: 200}'"),
        ("data={path: a}", "write 'data.sources=[a]'"),
        ("extra.model={a: 1}", "`model` stands at the top of a recipe"),
        ("optimizer.learning_rate=.inf", "write what is allowed"),
        ("optimizer.learning_rate=2e-4x", "write what is allowed"),
        ("optimizer.learning_rate='2e-4'", "write optimizer.learning_rate=2e-4"),
        *((("seed=007", "write seed=7"), ("tf32=yes", "write tf32=true"))),
        *((("checkpoint.resume=true", "write checkpoint.resume=auto"), ("data.eval_split=0", "nothing is held out"))),
        ("deepspeed=ds.json", "set strategy.name: zero1, zero2 or zero3"),
        ("logging.trackers=none", "write 'logging.trackers=[]'"),
        ("model.dtype=bfloat16", "write model.dtype=bf16"),
        ("evaluation.prompts='Hello, world'", "write ['Hello, world']"),
        ("data.sources={path: a}", "write [{path: a}]"),
        ("description=${", "${section.key} for another value"),
        *((f"{key}=4", "write batch.micro_batch_size=4") for key in ("per-device-train-batch-size", "MicroBatch")),
        ("--per_device_train_batch_size=4", "write batch.micro_batch_size=4"),
        ("Load_In_4Bit=true", "write 'method={name: lora, quantization: nf4}'"),
        (
            "training_args={num_train_epochs: 3, max_steps: 4}",
            "write schedule.num_epochs=3; write schedule.max_steps=4",
        ),
        (
            "datasets=[{path: a/b, ds_type: json}]",
            "leave out ds_type, which a source does not take, and write data.sources",
        ),
        *((f"{key}=512", "write batch.seq_len=512") for key in ("batch/seq_len", "batch/seq-len", "--batch.seq_len")),
        *((text, "write seq_len=512") for text in ("seq_len:512", "seq-len=512", ".seq_len=512", " seq_len=512 ")),
        ("seq_len", "write seq_len=VALUE"),
        ("data.sources[0].path=x", "write all of it: data.sources=[…]"),
        ("~foo", "`toolkit show --help` lists all keys"),
        ("wandb_entity=me", "WANDB_ENTITY=me"),
        ("report_to=wandb", "write 'logging.trackers=[wandb]'"),
        ("load_in_4bit=true", "write 'method={name: lora, quantization: nf4}'"),
    ],
)
def test_the_change_of_a_wrong_override(override: str, change: str) -> None:
    (found,) = re.findall(r"    change   (.*(?:\n {13}.*)*)", problems(BASE, override))
    assert change in " ".join(found.split())


@pytest.mark.parametrize(
    ("line", "path", "change"),
    [
        ("batch.seq_len: 4", "batch.seq_len", "write batch: {seq_len: 4}"),
        ("schedule.args.num_cycles: 2", "schedule.args.num_cycles", "write schedule: {args: {num_cycles: 2}}"),
        ("schedule: {args.num_cycles: 2}", "schedule.args.num_cycles", "write args: {num_cycles: 2}"),
        ("? [a, b]\n: 4", "recipe", "write `key: value`"),
        ("'': 4", "recipe", "write `key: value`"),
        ("description: 'of ${'", "description", "${section.key} for another value"),
        (f"extra: {{training_arguments: {'{a: ' * 99}1{'}' * 99}}}", "extra", "close brackets"),
        (f"description: {'[' * 3000}{']' * 3000}", "recipe", "brackets that are not closed"),
    ],
    ids=lambda value: "",
)
def test_what_yaml_allows_and_a_recipe_does_not(line: str, path: str, change: str) -> None:
    message = problems(BASE + line + "\n")
    assert "1 problem\n" in message and f"\n{path}: " in message, message
    assert change in " ".join(message.partition("    change   ")[2].split())


@pytest.mark.parametrize("character", "\u200b\u2028\u202e\u2060\u2066\ufeff")
def test_characters_that_no_editor_shows_are_refused_and_shown(character: str) -> None:
    message = problems(BASE, f"output.name=a{character}b")
    assert "control characters" in message and f"a\\u{ord(character):04x}b" in message.lower().replace(
        "\\u2028  b", "\\u2028b"
    )  # YAML breaks its line there.
    load("mine", ["output.name=é\u200d漢"])


OTHER_KEYS = """
    roles_to_train processor_type relora_steps token hub_token wandb_watch use_galore use_unsloth
    use_badam packing_strategy mix_strategy logging_strategy hub_strategy cosine_min_lr_ratio float16 rl type
    unfrozen_parameters save_safetensors hub_always_push gradient_kwargs model_parallel layer_types
"""


@pytest.mark.parametrize("key", OTHER_KEYS.split())
def test_a_key_of_another_meaning_is_no_slip_of_typing(key: str) -> None:
    assert "did you mean" not in problems(BASE + f"{key}: 1\n")


@pytest.mark.parametrize("path", sorted(path for paths in leaf_paths().values() for path in paths))
def test_a_slip_of_typing_leads_to_the_key(path: str) -> None:
    """A letter left out, one doubled, and two that changed places; unless that is a key too."""
    section, _, key = path.partition(".")
    names = set(sections()[section].model_fields)
    slips = {key[:2] + key[3:], key[:2] + key[1:], key[0] + key[2] + key[1] + key[3:]} if len(key) > 3 else set()
    for slip in slips - names:
        assert did_you_mean(slip, names) == key


def test_the_end_of_a_key_says_more_than_its_letters() -> None:
    """As few changes lead to its opposite."""
    assert did_you_mean("dpo_desirable_weight", sections()["preference"].model_fields) == "desirable_weight"


def test_of_very_many_unknown_keys_some_are_enough() -> None:
    """The libraries' own, too, each of which is compared with all that are known."""
    extra = "".join(f"      unknown_key_{number}: 1\n" for number in range(900))
    text = problems(f"{BASE}strategy: zero3\nextra:\n  deepspeed:\n    zero_optimization:\n{extra}")
    assert "250 problems or more" in text


def test_several_recipes_are_compared() -> None:
    with pytest.raises(RecipeError, match="--compare a b"):
        load("a,b")


def test_an_option_that_an_option_extends_does_not_exist() -> None:
    Path("recipes/strategy").mkdir()
    Path("recipes/strategy/mine.yaml").write_text("defaults:\n- zero3_offlod\nname: zero3\n")
    message = problems(BASE + "strategy: mine\n")
    assert "strategy: there is no such option  (recipes/strategy/mine.yaml:2)" in message
    assert "zero3_offlod" in message and "did you mean `zero3_offload`" in message
    Path("recipes/strategy/mine.yaml").write_text("defaults:\n- mine\nname: zero3\n")
    assert "leads back to recipes/strategy/mine.yaml  (recipes/strategy/mine.yaml:2)" in problems(
        BASE + "strategy: mine\n"
    )


def test_a_default_is_named_where_there_is_one() -> None:
    default = "write what is allowed, or remove it for the default 16"
    for text, hint in (("method: {r: [1, 2]}\n", default), ("model: {path: [a, b]}\n", "write what is allowed")):
        assert problems(BASE + text).endswith(f"    change   {hint}")


@pytest.mark.parametrize(
    ("text", "overrides", "given"),
    [
        ("optimizer: {eps: 1}\n", ["optimizer=[{learning_rate: 1e-4}]"], "[{learning_rate: 1e-4}]"),
        ("", ["optimizer={learning_rate: -1e-4}"], "-1e-4"),
        ("", ["logging.trackers=[{a: 1e3}, 'b, c']"], "{a: 1e3}"),
        ("method: {r: [1e-4, off]}\n", [], "[1e-4, off]"),
        ("method: {r: 1e+1}\noptimizer: {name: [3e1]}\n", [], "[3e1]"),
        ("data: {sources: [3e0], eval_sources: [4e0]}\n", [], "3e0"),
        ("optimizer: {momentum: 9.0e-1}\n", [], "9.0e-1"),
        ("optimizer: {momentum: '${optimizer.beta1}'}\n", [], "${optimizer.beta1}"),
        ("", ["optimizer.momentum=9.0e-1"], "9.0e-1"),
    ],
)
def test_a_value_is_shown_as_it_was_written(text: str, overrides: list[str], given: str) -> None:
    """What the schema refuses, whole lists and mappings, and what a rule refuses."""
    message = problems(BASE + text, *overrides)
    assert re.search(rf"given    {re.escape(given)}( \(|\n)", message), message


def test_a_key_given_twice_is_named_whole() -> None:
    message = problems(BASE + "optimizer:\n  eps: 1\n  eps: 2\nseed: 1\nseed: 2\n")
    assert "optimizer.eps: is given twice  (recipes/mine.yaml:4)" in message
    assert "seed: is given twice  (recipes/mine.yaml:6)" in message


def test_a_problem_is_printed_in_a_line_where_it_fits_and_else_below() -> None:
    short = Problem("a.b", "is wrong", "f.yaml:3", "1", "2 or 3", "write 2")
    assert str(short).splitlines() == [
        "a.b: is wrong  (f.yaml:3)", "    given    1", "    allowed  2 or 3", "    change   write 2"
    ]  # fmt: skip
    assert str(Problem("", "is wrong")) == "recipe: is wrong"
    # A hundred columns hold this one, and no more.
    for length, where in (
        (100 - 4 - 8 - len("a.b: "), "(f.yaml:3)"),
        (101 - 4 - 8 - len("a.b: "), "where    f.yaml:3"),
    ):
        text = str(Problem("a.b", "x" * length, "f.yaml:3"))
        assert text.endswith(where) and max(map(len, text.splitlines())) <= 100
    wrapped = str(Problem("a", "is wrong", hint="word " * 30)).splitlines()
    assert wrapped[1].startswith("    change   word") and wrapped[2].startswith(" " * 13 + "word")
    assert str(Problem("a", "b\x07")) == "a: b\\x07"


def test_all_problems_come_together() -> None:
    """File, command line, types and rules between keys, in one message."""
    message = problems(
        BASE + "sed: 1\nschedule: {num_epochs: 2, max_steps: 5}\nmethod: {quantization: nf4}\noptimizer: {eps: x}\n",
        *("foo", "data=a,b", "batch.seq_len=-1", "output.dir=${oc.env:NOT_SET}"),
    )
    assert "8 problems" in message
    for word in ("sed", "foo", "data:", "batch.seq_len", "NOT_SET", "optimizer.eps", "the length twice", "adapters"):
        assert word in message


def test_value_of_a_variable_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    message = problems(BASE + "seed: ${oc.env:MY_TOKEN}\n")
    assert "hunter2" not in message
    assert "${oc.env:MY_TOKEN}" in message and "oc.decode" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2_135m_lora_dmo", ["no such recipe", "did you mean `smollm2_135m_lora_demo`"]),
        ("_chat", ["a part of recipes", "extend it"]),
        ("data/alpaca", ["a part of recipes", "data=alpaca"]),
        ("nothing.yaml", ["no such file"]),
        ("other.yml", ["other.yaml"]),
    ],
)
def test_wrong_name(name: str, words: list[str]) -> None:
    Path("other.yml").write_text(BASE)
    with pytest.raises(RecipeError) as caught:
        load(name)
    for word in words:
        assert word in str(caught.value)


def test_wrong_recipe_ends_fast_without_torch_or_a_stack_trace() -> None:
    Path("recipes/mine.yaml").write_text(BASE + "sed: 1\nbatch: {seq_len: '5'}\n")
    program = (
        "import sys, time; start = time.perf_counter(); from toolkit.train.main import main;"
        "code = main(['recipe=mine', 'precison=bf16']); seconds = time.perf_counter() - start;"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy'} & set(sys.modules);"
        "print(code, sorted(heavy), seconds < 7.5)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert done.stdout.split("\n")[0] == "2 [] True"
    assert "Traceback" not in done.stderr
    assert "3 problems" in done.stderr


@pytest.mark.parametrize("count", [1, 7, 20, 21, 300])
def test_problems_fit_a_screen_and_twenty_are_named(count: int) -> None:
    long = "word " * 40
    problems = [Problem(f"key{n}", "is wrong", "file:1", long, long, long) for n in range(count)]
    lines = str(RecipeError("mine", problems)).splitlines()
    assert len(lines) <= 40 and sum("is wrong" in line for line in lines) == min(count, 20)
    assert any("change" in line for line in lines) and (lines[-1] == f"… and {count - 20} more") == (count > 20)
