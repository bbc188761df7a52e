"""Planned memory against real trainings of tiny models on one process, and what must hold on any machine."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import models_doc
import pytest
import torch
from harness import write_jsonl, write_recipe
from ranks import ON_CPU
from small import FP8, INT4, INT8, LORA, MODELS, NF4, SEQ2SEQ
from tiny import text_rows, tiny_model, tiny_tokenizer
from tracker import measured, planned
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from toolkit.distributed.layout import batch_layout
from toolkit.models.tiny import shrink
from toolkit.planner.hardware import find
from toolkit.planner.memory.device import memory
from toolkit.planner.memory.host import disk, host, run_folder_bytes
from toolkit.planner.plan import PARTS, PHASES
from toolkit.planner.trace.types import Amount, Moment, Tensors, Trace
from toolkit.planner.workload import Workload
from toolkit.recipe import Recipe

_RECIPE = """
description: Full rows
model: {path: llama}
data: {sources: [text.jsonl], over_long: truncate}
objective: language_modelling
precision: fp32
strategy: {name: single}
schedule: {max_steps: 3}
batch: {seq_len: 128, global_batch_size: 2, micro_batch_size: 2}
evaluation: {num_prompts: 0}
checkpoint: {resume: never}
"""
_BF16 = ["precision=bf16"]
_SENTENCE = "Return a copy of the string with its first character capitalized and the rest lowercased."
_PAIRS = [*SEQ2SEQ, f"batch.seq_len={len(tiny_tokenizer(encoder_decoder=True)(_SENTENCE)['input_ids'])}"]
_LONG = " ".join([_SENTENCE] * 4)
# Rows are full and have their stop token, without which none is trained on.
_TAUGHT = [
    *("objective=distillation", "distillation.teacher.path=qwen", "data.sources=[alike.jsonl]"),
    f"batch.seq_len={len(tiny_tokenizer()(_LONG)['input_ids']) + 1}",
]
_CASES = {
    # Nothing is padded, so there is no mask.
    "llama_one_long_row": ["batch.micro_batch_size=1", "batch.global_batch_size=1", "batch.seq_len=192"],
    "llama_qlora": NF4,
    "qwen_selective": ["model.path=qwen", "activation_checkpointing=selective", *_BF16],
    "gemma_lora": ["model.path=gemma", *LORA],
    "gpt2": ["model.path=gpt2"],
    "moe": ["model.path=moe"],
    "llama_taught": _TAUGHT,
    "blenderbot": _PAIRS,
    # What all conversations begin with is computed once.
    "llama_conversations": [
        *("objective=sft", "data.sources=[conversations.jsonl]", "batch.seq_len=512"),
        *("batch.global_batch_size=8", "batch.micro_batch_size=4"),
    ],
    # Questions are short and their passages long: end to end nothing is padded.
    "llama_embedding": ["objective=embedding", "data.sources=[related.jsonl]"],
}
_MORE_CASES = {
    "gemma_lora_checkpointing": ["model.path=gemma", "activation_checkpointing=full", *LORA],
    "llama": [],
    "llama_pure_bf16": ["precision=pure_bf16"],
    "llama_muon": ["optimizer.name=muon"],
    "llama_bf16": _BF16,
    "llama_checkpointing": ["activation_checkpointing=full"],
    "llama_selective": ["activation_checkpointing=selective", *_BF16],
    "llama_copies_dropped": ["activation_checkpointing=full", *_BF16],
    "llama_lora": [*LORA, *_BF16],
    "llama_lora_cast_once": [
        *(*LORA, *_BF16, "method.r=64"),
        *("activation_checkpointing=full", "batch.global_batch_size=4"),
    ],
    "qwen": ["model.path=qwen", *_BF16],
    "llama_accumulating": ["batch.global_batch_size=4"],
    "llama_every_second_layer": ["activation_checkpointing=full", "activation_checkpointing.every_n_layers=2"],
    "llama_8bit_optimizer": ["optimizer.name=adamw_8bit"],
    "llama_qdora": [*NF4, "method.use_dora=true"],
    "llama_int8": INT8,
    "llama_fp8": FP8,
    "moe_nf4": ["model.path=moe", *NF4],
    "moe_fp8": ["model.path=moe", *FP8],
    "llama_int4": INT4,
    "gemma_taught_in_nf4": [
        *("model.path=gemma", *_TAUGHT, *LORA, *_BF16),
        *("distillation.teacher.quantization=nf4", "distillation.beta=0.5", "distillation.ce_share=0.5"),
    ],
    "moe_int4": ["model.path=moe", *INT4],
    "qwen_fp8_checkpointing": ["model.path=qwen", "activation_checkpointing=full", *FP8],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for name, config in MODELS.items():
        tiny_model(config, folder / name)
    rows = [row["text"] for row in text_rows(320)]
    texts = [{"text": " ".join(rows[start : start + 8])} for start in range(0, len(rows), 8)]
    # All of one length, because the ends of targets cannot be cut off.
    pairs = [{"source": _SENTENCE, "target": _SENTENCE}] * 40
    # Every other row is a little shorter, so that most batches have a mask.
    tokenizer, limit = tiny_tokenizer(), 96
    mixed = [
        {"text": tokenizer.decode(tokenizer(row["text"])["input_ids"][: limit - 4 * (index % 2)])}
        for index, row in enumerate(texts)
    ]
    related = [{"anchor": f"{index:02d} what?", "positive": f"{index:02d} {_LONG}"} for index in range(40)]
    alike = [{"text": _LONG}] * 40
    begin = {"role": "system", "content": _LONG}
    talks = [
        [begin, {"role": "user", "content": f"{index:02d}?"}, {"role": "assistant", "content": _LONG}]
        for index in range(40)
    ]
    conversations = [{"messages": talk} for talk in talks]
    named = (
        ("conversations", conversations),
        ("text", texts),
        ("pairs", pairs),
        ("mixed", mixed),
        ("alike", alike),
        ("related", related),
    )
    for name, each in named:
        write_jsonl(folder / f"{name}.jsonl", each)
    write_recipe(folder, "full_rows", _RECIPE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_CASES, *(pytest.param(each, marks=pytest.mark.matrix) for each in _MORE_CASES)])
def test_planned_peak_is_that_of_the_training(case, folder, ranks, monkeypatch):
    arguments = ["recipe=full_rows", f"output.name={case}", *(_CASES | _MORE_CASES)[case]]
    done = ranks.run(folder, *arguments, entry="tracker")
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.chdir(folder)
    plan, real = planned(*arguments), measured(folder, 1)
    peak = max(real[phase] for phase in ("forward", "backward", "step"))
    assert max(sum(plan.phases[phase].values()) for phase in ("forward", "backward", "step")) == pytest.approx(
        peak, rel=0.03
    )
    # Between steps and while the optimizer updates there are states alone, which are exact but for the batch.
    assert sum(plan.phases["step"].values()) == pytest.approx(real["step"], rel=0.01)


_KINDS = ["mixtral", "granitemoe", "deepseek_v3", "qwen3_next", "gpt_neox", "bloom", "falcon", "bart", "t5", "mamba2"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", _KINDS)
def test_planned_peak_holds_for_other_kinds_of_layers(kind, folder, ranks, monkeypatch):
    """Mixtures, latent and linear attention, biases in place of positions, parallel branches, encoder and decoder; rows
    shorter than the 256 tokens of a block."""
    pairs = kind in models_doc.ENCODER_DECODERS
    tokenizer = tiny_tokenizer(encoder_decoder=pairs)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = models_doc.configuration(kind)
    small = shrink(config.to_dict()) | ids | {"vocab_size": len(tokenizer)}
    if pairs:
        small["decoder_start_token_id"] = ids["bos_token_id"]
    auto = AutoModelForSeq2SeqLM if pairs else AutoModelForCausalLM
    auto.from_config(type(config)(**small), dtype=torch.float32).save_pretrained(folder / kind)
    tokenizer.save_pretrained(folder / kind)
    rows = _PAIRS if pairs else ["batch.seq_len=96", "data.sources=[mixed.jsonl]"]
    arguments = ["recipe=full_rows", *rows, f"model.path={kind}"]
    done = ranks.run(folder, *arguments, f"output.name={kind}", entry="tracker")
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.chdir(folder)
    plan, real = planned(*arguments), measured(folder, 1)
    phases = ("forward", "backward", "step")
    peak = max(sum(plan.phases[phase].values()) for phase in phases)
    assert peak == pytest.approx(max(real[phase] for phase in phases), rel=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("formulas")  # A checkpoint holds parameters and states, of which a trace says the same.
@pytest.mark.parametrize("strategy", ["single", "zero2", "zero3", "fsdp"])
def test_a_checkpoint_has_the_planned_size(strategy, folder, ranks, monkeypatch):
    processes = 1 if strategy == "single" else 2
    arguments = [
        "recipe=full_rows", f"output.name=saves_{strategy}", f"strategy.name={strategy}", "model.path=qwen",
        "checkpoint.save_steps=2", "batch.global_batch_size=4", *_BF16,
    ]  # fmt: skip
    done = ranks.run(folder, *arguments, processes=processes, entry=ON_CPU)
    assert done.returncode == 0, done.stderr[-2000:]
    monkeypatch.chdir(folder)
    (checkpoint,) = (folder / "runs" / f"saves_{strategy}").glob("checkpoints/checkpoint-2")
    saved = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    beside = sum(
        file.stat().st_size
        for file in checkpoint.rglob("*")
        if file.suffix in (".json", ".jinja") or file.name.startswith("rng")
    )
    # torch's distributed format has a header of a kilobyte for each tensor of each process, which are small here.
    within = 0.08 if strategy == "fsdp" else 0.03
    assert _plan_of(arguments, processes).disk.checkpoint == pytest.approx(saved - beside, rel=within)


def _plan_of(arguments, processes):
    from toolkit.planner.build import estimate
    from toolkit.recipe.rules import load_checked

    loaded = load_checked("full_rows", arguments[1:])
    return estimate(loaded.recipe, "full_rows", find(f"cpux{processes}" if processes > 1 else "cpu"), advice=False)


def _trace():
    """Four layers of a million weights, which keep 1 kB per token each."""
    activations = Amount((0.0, 2000.0), (0.0, 1000.0))
    moments = [
        Moment(phase, place, accumulating, activations, Amount(), Amount((0.0, 500.0)), Amount((2e6,)))
        for accumulating in (False, True)
        for phase, place in (
            ("forward", "head"), ("backward", "last_layer"), ("backward", "first_layer"), ("evaluation", "head"),
        )
    ]  # fmt: skip
    tensors = (
        Tensors("embeddings", (500, 1000), 1, True, "base"),
        Tensors("layer", (1000, 1000), 4, True, "base"),
    )
    return Trace(4, tensors, tuple(moments), {}, Amount((0.0, 2000.0)), 0, None)


def _recipe(**sections):
    strategy = sections.pop("strategy", {})
    return Recipe.model_validate(
        {
            "model": {"path": "somewhere"},
            "data": {"sources": ["rows.jsonl"]},
            "batch": {"seq_len": 1024, "global_batch_size": 8, "micro_batch_size": 1},
            "strategy": {"reduce_bucket_size": 100_000, "prefetch_bucket_size": 100_000, **strategy},
            **sections,
        }
    )


def _planned(hardware="h100x8", trace=None, evaluation_len=None, **sections):
    recipe, machine = _recipe(**sections), find(hardware)
    layout = batch_layout(recipe, machine.devices)
    workload = Workload(recipe, layout, machine, trace or _trace(), evaluation_len=evaluation_len)
    return SimpleNamespace(
        memory=memory(workload),
        host=host(workload),
        disk=disk(workload),
        states=sum(_states(memory(workload)[0])),
    )


def _states(found):
    parts = found.phases["step"]
    return [parts.get(part, 0) for part in ("parameters", "masters", "gradients", "optimizer")]


def test_each_stage_divides_more_of_the_states():
    sums = [_planned(strategy={"name": name}).states for name in ("ddp", "zero1", "zero2", "zero3", "fsdp")]
    assert sums[0] > sums[1] > sums[2] > sums[3] > sums[4]
    # 4.5 million parameters: weights, gradients and moments in fp32; a step of FSDP holds an eighth of these.
    assert sums[0] == 4_500_000 * 16
    assert sums[4] == pytest.approx(4_500_000 * 16 / 8, rel=0.01)


def test_phases_and_parts_are_those_of_the_result_and_add_up():
    (rank,) = _planned(strategy={"name": "zero2"}).memory
    assert set(rank.phases) == set(PHASES) - {"generation", "teacher"}, "no answers are generated, and nobody teaches"
    assert all(set(parts) <= set(PARTS) for parts in rank.phases.values())
    assert rank.allocated == max(sum(parts.values()) for parts in rank.phases.values())
    assert rank.allocated < rank.reserved.low < rank.reserved.value < rank.reserved.high < rank.total.high


def test_offloading_moves_states_from_the_device_to_the_host():
    stays = _planned(strategy={"name": "zero3"})
    leaves = _planned(strategy={"name": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"})
    gone = [stays.memory[0].phases["step"][part] for part in ("parameters", "masters", "optimizer")]
    assert not any(leaves.memory[0].phases["step"].get(part) for part in ("parameters", "masters", "optimizer"))
    assert leaves.host.peak - stays.host.peak >= 8 * sum(gone)
    # On NVMe the host keeps buffers only, and the drive gets the rest.
    nvme = _planned(
        strategy={"name": "zero3", "offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/scratch"}
    )
    assert nvme.disk.nvme >= 8 * sum(gone) and leaves.disk.nvme == 0


def test_accumulation_under_fsdp_keeps_whole_gradients():
    """accelerate divides gradients at the last micro-batch only."""
    once = _planned(strategy={"name": "fsdp"})
    twice = _planned(strategy={"name": "fsdp"}, batch={"seq_len": 1024, "global_batch_size": 16, "micro_batch_size": 1})
    more = twice.memory[0].allocated - once.memory[0].allocated
    assert more == pytest.approx(4 * 4_500_000, rel=0.3)
    batch = {"seq_len": 1024, "global_batch_size": 16, "micro_batch_size": 1}
    each = _planned(strategy={"name": "fsdp", "sync_each_batch": True}, batch=batch)
    # Each rank keeps its eighth of the sum, and adds to it an eighth of a layer.
    assert 0 < each.memory[0].allocated - once.memory[0].allocated < 4 * 4_500_000 / 4


def test_a_layerwise_optimizer_holds_one_gradient_at_a_time():
    usual, layerwise = (
        _planned("h100", optimizer={"name": name}) for name in ("galore_adamw", "galore_adamw_layerwise")
    )
    assert "gradients" in usual.memory[0].phases["step"] and "gradients" not in layerwise.memory[0].phases["step"]


def test_longer_rows_cost_activations_and_nothing_else():
    short, long = (
        _planned("h100", batch={"seq_len": length, "global_batch_size": 1, "micro_batch_size": 1}).memory[0]
        for length in (1024, 4096)
    )
    assert long.phases["forward"]["activations"] == 4 * short.phases["forward"]["activations"]
    assert long.phases["step"]["optimizer"] == short.phases["step"]["optimizer"]


_TWICE, _NVME = {"global_batch_size": 16}, {"offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/x"}
_CPU = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@pytest.mark.parametrize(
    ("strategy", "batch", "held"),
    [
        # In thousands of bytes: gradients and what the engine has beside, by `PHASES` but generation and teacher.
        ("ddp", {}, "0+18000 2000+18000 2000+18000 18000+18000 0+18000 0+20000 0+18000"),
        ("ddp", _TWICE, "0+18000 20000+18000 20000+18000 18000+18000 0+18000 0+20000 0+18000"),
        ("zero1", {}, "18000+0 18000+0 27000+18000 27000+0 18000+0 18000+9000 18000+0"),
        ("zero1", _TWICE, "18000+0 27000+0 27000+18000 27000+0 18000+0 18000+9000 18000+0"),
        ("zero2", {}, "0+6750 0+0 3375+6400 3375+4500 0+0 0+9000 0+0"),
        ("zero2", _TWICE, "0+6750 2250+0 3375+6400 3375+4500 0+0 0+9000 0+0"),
        ({"name": "zero2", "overlap_comm": False}, _TWICE, "0+6750 2250+0 3375+6200 3375+4500 0+0 0+9000 0+0"),
        (
            {"name": "zero2", "offload_optimizer": "cpu"},
            *(_TWICE, "0+8750 2250+2000 2250+8400 2250+2000 0+2000 0+11000 0+2000"),
        ),
        (
            {"name": "zero3", "param_persistence_threshold": 0},
            *(_TWICE, "2250+2400 2250+9400 2250+11400 2250+2650 2250+9400 2250+2400 2250+400"),
        ),
        (
            {"name": "zero3", "param_persistence_threshold": 600_000},  # Embeddings stay whole.
            *({}, "2250+3400 2250+9400 2250+11400 2250+2650 2250+9400 2250+3400 2250+1400"),
        ),
        (
            {"name": "zero3", "param_persistence_threshold": 0, "prefetch_bucket_size": 0},  # All when it is needed.
            *({}, "2250+2400 2250+9400 2250+11400 2250+2650 2250+2400 2250+2400 2250+400"),
        ),
        (
            {"name": "zero3", "param_persistence_threshold": 0, **_CPU},
            *({}, "0+2400 0+9400 0+11400 0+400 0+9400 0+2400 0+400"),
        ),
        ("fsdp", {}, "0+4000 0+3000 1500+7000 2252+0 0+3000 0+4000 0+0"),
        ("fsdp", _TWICE, "0+4000 18000+3000 20000+5000 2252+0 0+3000 0+4000 0+0"),
        (
            {"name": "fsdp", "sync_each_batch": True},
            *(_TWICE, "0+4000 2252+3000 4252+5000 2252+0 0+3000 0+4000 0+0"),
        ),
        ({"name": "fsdp", "sharding": "shard_grad_op"}, {}, "0+4000 0+11000 2000+9000 2252+0 0+11000 0+4000 0+0"),
        ({"name": "fsdp", "offload_param": "cpu"}, {}, "0+4000 0+3000 0+7000 0+0 0+3000 0+4000 0+0"),
    ],
    ids=str,
)
def test_what_each_engine_holds_of_four_layers_in_each_phase(strategy, batch, held):
    """Embeddings of half a million weights, four layers of a million, eight GPUs: each figure can be added up."""
    strategy = {"name": strategy} if isinstance(strategy, str) else strategy
    sizes = {"seq_len": 1024, "global_batch_size": 8, "micro_batch_size": 1, **batch}
    phases = _planned(strategy=strategy, batch=sizes).memory[0].phases
    there = [phases[phase] for phase in PHASES if phase not in ("generation", "teacher")]
    parts = [[round(each.get(part, 0) / 1000) for part in ("gradients", "engine")] for each in there]
    assert " ".join(f"{gradients}+{engine}" for gradients, engine in parts) == held


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize(("precision", "plain"), [("fp8", "bf16"), ("fp8_rowwise", "bf16"), ("pure_fp8", "pure_bf16")])
def test_products_in_fp8_take_the_memory_of_those_in_bf16(precision, plain, strategy):
    """By the same trace."""
    in_fp8, in_bf16 = (_planned(strategy={"name": strategy}, precision=each) for each in (precision, plain))
    assert (in_fp8.memory, in_fp8.host, in_fp8.disk) == (in_bf16.memory, in_bf16.host, in_bf16.disk)


@pytest.mark.parametrize(
    ("sections", "checkpoint", "model"),
    [
        ({}, 4 + 8, 2),
        ({"precision": "fp32"}, 4 + 8, 4),
        ({"precision": "pure_bf16"}, 2 + 4, 2),
        ({"optimizer": {"name": "sgd", "momentum": 0.0}}, 4, 2),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}}, 4 + 4, 2),
        ({"strategy": {"name": "zero1"}}, 2 + 4 + 8, 2),
        ({"strategy": {"name": "zero2", "offload_optimizer": "cpu"}}, 2 + 4 + 8, 2),
        ({"strategy": {"name": "zero3"}}, 4 + 8, 2),
        # The embeddings are the head too, and FSDP writes them under both names.
        ({"strategy": {"name": "fsdp"}}, 4 + 8 + 4 / 9, 2),
        ({"strategy": {"name": "fsdp", "offload_param": "cpu"}}, 4 + 8 + 4 / 9, 2),
    ],
    ids=str,
)
def test_disk_that_a_run_needs(sections, checkpoint, model):
    """Bytes for each of 4.5 million parameters."""
    found = _planned(**sections).disk
    assert found.checkpoint == pytest.approx(checkpoint * 4_500_000, abs=1)
    assert found.model == model * 4_500_000 and found.nvme == found.kept == 0
    # The one of an interruption, and 32 MiB of small files with each.
    assert run_folder_bytes(_recipe(**sections), found) == found.model + found.checkpoint + 2**25
    for every in ({"save_steps": 5}, {"save_epochs": 0.5}):
        saving = {**sections, "checkpoint": {**every, "save_total_limit": 3}}
        kept = _planned(**saving).disk
        assert kept.kept == 4 * found.checkpoint, "while rotating one more than the limit"
        assert run_folder_bytes(_recipe(**saving), kept) == found.model + 4 * (found.checkpoint + 2**25)


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, 0),
        ({"keep_best": "eval_loss"}, 2),
        ({"keep_best": "eval_loss", "save_steps": 5, "save_total_limit": 3}, 6),
        ({"average_last": 4, "save_steps": 5, "save_total_limit": 3}, 8),
    ],
    ids=str,
)
def test_disk_for_models_to_choose_from(settings, models):
    """The best one, or the last four, by now and by each of four checkpoints; and the one that is written."""
    found = _planned(checkpoint=settings).disk
    assert found.snapshots == models * found.model
    checkpoints = max(1, round(found.kept / found.checkpoint)) * (found.checkpoint + 2**25)
    assert run_folder_bytes(_recipe(checkpoint=settings), found) == (1 + models) * found.model + checkpoints


_PROCESS = 1200 * 2**20


@pytest.mark.parametrize(
    ("hardware", "sections", "parts"),
    [
        ("h100", {}, {"processes": _PROCESS, "loading": 9e6, "saving": 9e6}),
        ("h100", {"precision": "pure_bf16"}, {"processes": _PROCESS, "loading": 2 * 4.5e6, "saving": 9e6}),
        ("h100", {"strategy": {"name": "zero2"}}, {"processes": 2 * _PROCESS, "loading": 9e6, "saving": 9e6}),
        ("h100", {"strategy": {"name": "fsdp"}}, {"processes": 2 * _PROCESS, "loading": 27e6, "saving": 27e6}),
        # Each of the eight reads the same files straight to its GPU.
        ("h100x8", {}, {"processes": 16 * _PROCESS, "loading": 9e6, "saving": 9e6}),
        ("h100x8", {"strategy": {"name": "fsdp"}}, {"processes": 16 * _PROCESS, "loading": 27e6, "saving": 27e6}),
        # Only the first node's first process reads; the hosts of both nodes hold the same.
        ("h100x8x2", {"strategy": {"name": "zero3"}}, {"processes": 16 * _PROCESS, "loading": 9e6, "saving": 9e6}),
        (
            "h100",
            {"activation_checkpointing": {"mode": "offload", "every_n_layers": 3}},
            {"processes": _PROCESS, "activations": 2 * 2000 * 1024, "loading": 9e6, "saving": 9e6},
        ),
        (
            "h100x8",
            {"strategy": {"name": "zero2", "offload_optimizer": "cpu"}},
            {"processes": 16 * _PROCESS, "optimizer": 36e6, "masters": 18e6, "gradients": 18e6}
            | {"staging": 8 * 2 * (4.5e6 / 8 + 1e6), "loading": 9e6, "saving": 9e6},
        ),
        (
            "h100x8",
            {"strategy": {"name": "zero3", **_CPU}},
            {"processes": 16 * _PROCESS, "optimizer": 36e6, "masters": 18e6, "gradients": 36e6, "parameters": 9e6}
            | {"loading": 9e6, "saving": 9e6},
        ),
        (
            "h100x8",
            {"strategy": {"name": "zero3", **_NVME}},
            {"processes": 16 * _PROCESS, "gradients": 18e6, "loading": 9e6, "saving": 9e6}
            | {"staging": 8 * (4 * 4 * 4.5e6 / 8 + 5 * 1e6 / 8 * 2), "parameters": 2 * 4.5e6},
        ),
        (
            "h100x8",
            {"strategy": {"name": "fsdp", "offload_param": "cpu"}},
            # A row of 500 is an eighth of 4,000 rows rounded up.
            {"processes": 16 * _PROCESS, "parameters": 18.016e6, "optimizer": 36.032e6, "gradients": 18.016e6}
            | {"loading": 27e6, "saving": 27e6},
        ),
    ],
    ids=str,
)
def test_what_a_host_holds_by_parts(hardware, sections, parts):
    sections = {"batch": {"seq_len": 1024, "global_batch_size": 16, "micro_batch_size": 1}, **sections}
    found = _planned(hardware, **sections)
    assert found.host.parts == parts
    training = sum(value for part, value in parts.items() if part != "loading")
    assert found.host.peak == max(parts["processes"] + parts["loading"], training)
    nvme = {"nvme_path": "/x"}.items() <= sections.get("strategy", {}).items()
    assert found.disk.nvme == (4 + 8 + 4 + 2) * 4_500_000 * nvme


def test_batches_of_a_step_and_the_one_after_are_on_the_device():
    """Ids, labels and positions of 8 bytes for each of 1,024 tokens."""
    for passes in (1, 2, 7):
        batch = {"seq_len": 1024, "global_batch_size": 8 * passes, "micro_batch_size": 1}
        phases = _planned(batch=batch).memory[0].phases
        assert phases["step"]["batch"] == phases["forward"]["batch"] == (passes + 1) * 1024 * 3 * 8
        assert "batch" not in phases["load"] and "batch" not in phases["save"]


@pytest.mark.parametrize(
    ("hardware", "context", "workspace", "held"),
    [
        ("h100", (520, 350, 800), 64 * 2**20, (1.04, 1.01, 1.15)),
        ("h100x8", (920, 500, 1800), 64 * 2**20, (1.04, 1.01, 1.15)),
        ("a100x8", (920, 500, 1800), 2 * (4096 * 2 + 16 * 8) * 1024, (1.04, 1.01, 1.15)),
        ("mi300x", (600, 400, 1000), 0, (1.04, 1.01, 1.15)),
        ("mi300xx8", (1000, 550, 2000), 0, (1.04, 1.01, 1.15)),
    ],
)
def test_a_process_takes_more_than_its_tensors(hardware, context, workspace, held, monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    (rank,) = _planned(hardware).memory
    assert rank.phases["forward"].get("workspace", 0) == workspace
    assert rank.context == context[0] * 2**20
    ranges = zip((rank.total.value, rank.total.low, rank.total.high), context, held, strict=True)
    for total, mebibytes, share in ranges:
        assert total == pytest.approx(rank.allocated * share + mebibytes * 2**20)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    fixed = _planned(hardware).memory[0].reserved
    assert [fixed.value, fixed.low, fixed.high] == pytest.approx([rank.allocated * x for x in (1.17, 1.08, 1.4)])


_OFFLOAD = {"name": "zero2", "offload_optimizer": "cpu"}


@pytest.mark.parametrize(
    ("hardware", "optimizer", "strategy", "allocated"),
    [
        # Of embeddings of half a million weights and four layers of a million, in fp32.
        ("h100", "adamw", {}, 0),
        ("h100", "adamw_torch", {}, 4 * 4_500_000),  # All tensors together.
        ("h100", "adafactor", {}, 4 * (2 + 1) * 1_000_000),  # Two copies of a layer, and one of the layer before.
        ("h100", "adamw_torch_8bit", {}, 4 * (4 + 1) * 1_000_000),
        ("h100", "galore_adamw", {}, 4 * (3 + 1) * 1_000_000),
        ("h100", "muon", {}, 4 * (2 * 1_000_000 + 1000**2)),
        # ZeRO updates one vector, which on eight devices is an eighth.
        ("h100x8", "adamw_torch_8bit", {"name": "zero2"}, 4 * 4 * 4_500_000 / 8),
        ("h100x8", "rmsprop", {"name": "zero2"}, 4 * 4_500_000 / 8),
        ("h100x8", "adamw_torch_8bit", _OFFLOAD, 0),
        ("h100x8", "adamw_torch_8bit", {"name": "fsdp"}, 4 * (4 + 1) * 1_000_000 / 8),
        # A CPU takes no tensors together, and what is offloaded is updated there all the same.
        ("cpu", "adamw_torch", {}, 4 * (2 + 1) * 1_000_000),
        ("cpu", "adamw_torch", _OFFLOAD, 4 * 2 * 4_500_000),
    ],
)
def test_what_an_optimizer_allocates_while_it_updates(hardware, optimizer, strategy, allocated):
    phases = _planned(hardware, optimizer={"name": optimizer}, strategy=strategy).memory[0].phases
    assert phases["step"].get("workspace", 0) - phases["forward"].get("workspace", 0) == allocated


def test_weights_are_quantized_one_by_one_while_they_load():
    """The largest is a frozen one, here and where ZeRO-3 and FSDP put them in place one by one."""
    tensors = (
        Tensors("embeddings", (2000, 1000), 1, False, "base"),
        Tensors("layer", (1000, 1000), 4, False, "base"),
        Tensors("layer", (16, 1000), 4, True, "adapter"),
    )
    trace = Trace(4, tensors, _trace().moments, {}, Amount((0.0, 2000.0)), 0, None)

    def loading(part, **sections):
        phases = _planned(trace=trace, precision="bf16", **sections).memory[0].phases
        return phases["load"].get(part, 0) - phases["resume"].get(part, 0)

    quantized, plain = ({"name": "lora", "quantization": kind} for kind in ("nf4", "none"))
    assert loading("parameters", method=quantized) == 2 * 2_000_000
    assert loading("parameters", method=plain) == loading("engine", method=plain) == 0
    assert loading("engine", method=plain, strategy={"name": "fsdp"}) == 2 * 2_000_000


def test_on_a_cpu_the_process_that_reads_and_writes_has_all_weights():
    def phases(rank, **sections):
        return _planned("cpux2", **sections).memory[rank].phases

    resumes = phases(0, strategy={"name": "fsdp"})["resume"].get("engine", 0)
    # The largest in fp32 beside the whole model.
    assert phases(0, strategy={"name": "fsdp"})["load"]["engine"] - resumes == 4 * 1_000_000 + 4 * 4_500_000
    # Under ZeRO-3 the first alone reads them whole, also where neither ever holds more.
    frozen = (Tensors("layer", (1000, 1000), 4, False, "base"), Tensors("layer", (16, 1000), 4, True, "adapter"))
    little = {"max_live_parameters": 1, "max_reuse_distance": 0, "prefetch_bucket_size": 0}
    first, other = _planned(
        "cpux2", trace=dataclasses.replace(_trace(), tensors=frozen, moments=()), precision="bf16",
        method={"name": "lora"}, strategy={"name": "zero3", **little},
    ).memory  # fmt: skip
    assert (first.ranks, first.peak_phase, other.ranks) == ("rank 0", "load", "other ranks")
    assert first.allocated - other.allocated > 4_000_000
    # Written, it is gathered in fp32 and converted to bf16, on the first process alone.
    saving = 4 * 1_000_000 + (4 + 2) * 4_500_000
    assert phases(0, strategy={"name": "fsdp"}, precision="bf16")["save"]["engine"] - resumes == saving
    assert phases(0, strategy={"name": "fsdp"}, precision="fp32")["save"]["engine"] - resumes == 4 * 5_500_000


@pytest.mark.parametrize(
    ("sections", "copied"),
    [
        # The largest parameter is converted to what is published.
        ({"precision": "bf16"}, 2 * 1_000_000),
        ({"precision": "fp32"}, 0),
        ({"precision": "bf16", "method": {"name": "lora"}}, 0),
        # ZeRO's share one vector, out of which each is copied; all of them are on every device.
        ({"precision": "bf16", "strategy": {"name": "zero2"}}, 2 * 4_500_000),
        ({"precision": "bf16", "strategy": {"name": "zero2"}, "method": {"name": "lora"}}, 0),
        ({"precision": "bf16", "strategy": {"name": "zero3"}}, 2 * 1_000_000),
        ({"precision": "bf16", "strategy": {"name": "fsdp"}}, 4 * 1_000_000),
    ],
    ids=str,
)
def test_copies_of_weights_that_are_written(sections, copied):
    phases = _planned(**sections).memory[0].phases
    assert phases["save"].get("engine", 0) - phases["resume"].get("engine", 0) == copied


def test_of_frozen_parameters_nothing_is_converted_or_flattened():
    """Neither for publishing nor on the way to an offloaded optimizer, though the embeddings are the largest."""
    tensors = (Tensors("embeddings", (3000, 1000), 1, False, "base"), Tensors("layer", (1000, 1000), 4, True, "base"))
    trace = Trace(4, tensors, _trace().moments, {}, Amount((0.0, 2000.0)), 0, None)
    phases = _planned(trace=trace, precision="bf16").memory[0].phases
    assert phases["save"]["engine"] - phases["resume"]["engine"] == 2 * 1_000_000
    offloaded = _planned(trace=trace, precision="bf16", strategy=_OFFLOAD).memory[0].phases
    assert offloaded["resume"]["engine"] == 2 * 1_000_000


def test_a_compiled_layer_that_is_recomputed_holds_its_widest_tensor_and_two_hidden_states():
    def held(mode, **sections):
        sections["activation_checkpointing"] = {"mode": mode}
        return _planned("h100", precision="bf16", **sections).memory[0].phases["backward"]["activations"]

    assert held("full", compile="layers") - held("full") == 1024 * 1000 * 2 + 2 * 1024 * 2000
    assert held("none", compile="layers") == held("none")


def test_an_evaluation_has_batches_and_lengths_of_its_own():
    def held(**sections):
        return _planned("h100", **sections).memory[0].phases["evaluation"]["activations"]

    own = held()
    assert held(evaluation={"batch_size": 4}) == 4 * own
    assert held(evaluation_len=512) == own / 2
    assert held(evaluation={"batch_size": 3}, evaluation_len=2048) == 6 * own
    assert _planned("h100", evaluation_len=512).memory[0].phases["forward"]["activations"] == own


def test_paged_state_is_on_the_host_as_far_as_it_is_large():
    usual, paged = (_planned("h100", optimizer={"name": name}) for name in ("adamw", "paged_adamw_32bit"))
    state = 8 * 4_500_000
    assert usual.memory[0].phases["step"]["optimizer"] == state
    # Embeddings stay on the device.
    assert paged.memory[0].phases["step"]["optimizer"] == 8 * 500_000
    assert paged.host.parts["optimizer"] == 8 * 4_000_000 and "optimizer" not in usual.host.parts


def test_memory_that_a_cpu_keeps_and_may_keep():
    """What comes and goes in a step, up to a GiB of it; context as for a process of Python with its libraries."""
    (rank,) = _planned("cpu").memory
    goes = rank.allocated - sum(rank.phases["resume"].values())
    ends = ((rank.total.value, 700, 1.0), (rank.total.low, 450, 0.1), (rank.total.high, 1100, 1.6))
    for total, mebibytes, share in ends:
        assert total == pytest.approx(rank.allocated + share * goes + mebibytes * 2**20)
    long = {"seq_len": 2**21, "global_batch_size": 1, "micro_batch_size": 1}
    (rank,) = _planned("cpu", batch=long).memory
    assert rank.reserved.value == rank.allocated + 2**30
