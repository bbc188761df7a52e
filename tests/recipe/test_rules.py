"""Every rule: a recipe that breaks it, and that the stated change makes it valid."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
from pathlib import Path

import pytest

from toolkit.recipe import Recipe, RecipeError
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.rules import RULES, check, load_checked
from toolkit.recipe.rules.ignored import IGNORED_RULES
from toolkit.recipe.rules.inputs import INPUT_RULES
from toolkit.recipe.rules.strategy import STRATEGY_RULES
from toolkit.recipe.rules.training import TRAINING_RULES
from toolkit.recipe.rules.unusual import UNUSUAL_RULES
from toolkit.recipe.sections import SCHEDULES

BASE = "defaults: [{model: smollm2_135m_builtin}, {data: stdlib_docstrings}, _self_]\n"
LORA = "method.name=lora"
TOKENS = "model.new_tokens=[a]"
PARAMETERS = "method.target_parameters=[experts.down_proj]"
STREAM = ["data.streaming=true", "schedule.max_steps=10", "data.eval_split=validation"]
SEQ2SEQ = ["model=blenderbot_400m", "objective=seq2seq", "batch.seq_len=128"]
ZERO1, ZERO2, ZERO3, FSDP = (["strategy.name=" + name] for name in ("zero1", "zero2", "zero3", "fsdp"))
ZERO2_OFFLOAD = [*ZERO2, "strategy.offload_optimizer=cpu"]
PURE = ["precision=pure_bf16"]
NF4_DORA = ["method=qlora", "method.use_dora=true", "model=a/b"]
SELECTIVE = ["activation_checkpointing.mode=selective"]

# Rule, what breaks it, and the fix: what its message says to change, as overrides that replace those of the same key.
CASES = [
    ("model-no-folder", ["model.path=./nowhere"], ["model.path=existing"]),
    ("model-no-folder", ["model.path=m/x.gguf"], ["model.path=a/b"]),
    ("tokenizer-no-folder", ["model.tokenizer=/no/where"], ["model.tokenizer=existing"]),
    ("tokenizer-vocabulary", ["model.tokenizer=larger"], ["~model.tokenizer"]),
    ("tokenizer-larger", ["model.tokenizer=grown"], ["model.path=resized"]),
    ("gguf-twice", ["model=m.gguf", "model.gguf_file=a.gguf"], ["model.gguf_file=null"]),
    ("gguf-twice", ["model=m.gguf", "model.gguf_file=a.gguf"], ["model=someone/folder"]),
    ("revision-local", ["model.revision=main"], ["model.revision=null"]),
    ("remote-code-unpinned", ["model=a/b", "model.trust_remote_code=true"], ["model.revision=0123abc"]),
    ("remote-code-unpinned", ["model=a/b", "model.trust_remote_code=true"], ["model.trust_remote_code=false"]),
    ("attention-fp32", ["model.attention=torch_varlen", "precision=fp32"], ["model.attention=sdpa"]),
    ("attention-fp32", ["model.attention=flash_attention_2", "precision=fp32"], ["precision=bf16"]),
    ("attention-seq2seq", [*SEQ2SEQ, "model.attention=flash_attention_3"], ["model.attention=sdpa"]),
    ("architecture-causal", ["objective=seq2seq"], ["objective=sft"]),
    ("architecture-causal", ["objective=seq2seq"], ["objective=language_modelling"]),
    ("architecture-seq2seq", ["model=blenderbot_400m", "batch.seq_len=128"], ["objective=seq2seq"]),
    ("architecture-encoder", ["model.path=encoder"], ["model.path=decoder"]),
    ("positions", ["batch.seq_len=9000"], ["batch.seq_len=8192"]),
    ("streaming-length", ["data.streaming=true", "data.eval_split=null"], ["schedule.max_steps=10"]),
    ("streaming-epochs", [*STREAM, "checkpoint.save_epochs=1"], ["~checkpoint.save_epochs", "save_steps=5"]),
    ("streaming-fraction", [*STREAM, "data.eval_split=0.1"], ["data.eval_split=validation"]),
    ("streaming-fraction", [*STREAM, "data.eval_split=0.1"], ["~data.eval_split", "data.eval_sources=[held.jsonl]"]),
    ("streaming-whole-data", [*STREAM, "data.deduplicate=true"], ["data.streaming=false"]),
    ("streaming-whole-data", [*STREAM, "data.max_samples=5"], ["~data.max_samples"]),
    ("eval-split-number", ["data.eval_split='0.1'"], ["data.eval_split=0.1"]),
    ("eval-split-is-train", ["data.eval_split=train"], ["data.eval_split=validation"]),
    ("eval-split-is-train", ["data.eval_split=train"], ["data.eval_split=0.05"]),
    ("split-needs-text", ["data.over_long=split"], ["data.over_long=drop"]),
    ("split-needs-text", ["data.over_long=split"], ["data.over_long=truncate"]),
    (
        "template-kwargs-reserved",
        ["data.chat_template_kwargs={tokenize: true, enable_thinking: false}"],
        ["~data.chat_template_kwargs.tokenize"],
    ),
    ("lm-trains-all", ["objective=language_modelling", "data.train_on=assistant"], ["~data.train_on"]),
    ("lm-trains-all", ["objective=language_modelling", "data.train_on=assistant"], ["objective=sft"]),
    ("seq2seq-packing", [*SEQ2SEQ, "data.packing=true"], ["data.packing=false"]),
    ("seq2seq-train-on", [*SEQ2SEQ, "data.train_on=all"], ["~data.train_on"]),
    ("full-adapter-keys", ["method.use_dora=true"], [LORA]),
    ("full-adapter-keys", ["method.r=64", "method.quantization=nf4"], ["~method"]),
    ("lora-freeze", [LORA, "method.freeze=['*norm*']"], ["~method.freeze"]),
    ("lora-freeze", [LORA, "method.freeze=['*norm*']"], ["method.name=full"]),
    ("target-modules", [LORA, "method.target_modules=q_proj"], ["method.target_modules=all-linear"]),
    ("target-modules", [LORA, "method.target_modules=all_linear"], ["method.target_modules=[q_proj,v_proj]"]),
    ("target-modules-empty", [LORA, "method.target_modules=[]"], ["method.target_modules=[q_proj,v_proj]"]),
    ("init-whole-base", ["method=qlora", "method.init_lora_weights=pissa"], ["method.init_lora_weights=default"]),
    ("init-whole-base", ["method=lora_int8", "method.init_lora_weights=olora"], ["method.init_lora_weights=default"]),
    ("init-sharded", [LORA, *FSDP, "method.init_lora_weights=olora"], ["strategy.name=zero2"]),
    ("init-sharded", ["method=qlora", *ZERO3, "method.init_lora_weights=loftq"], ["strategy.name=zero2"]),
    ("init-sharded", [LORA, *ZERO3, "method.init_lora_weights=eva"], ["method.init_lora_weights=default"]),
    ("init-parameters", [LORA, "model=a/b", PARAMETERS, "method.init_lora_weights=eva"], ["~method.target_parameters"]),
    ("init-eva-seq2seq", [*SEQ2SEQ, LORA, "method.init_lora_weights=eva"], ["method.init_lora_weights=default"]),
    ("init-loftq-nf4", [LORA, "method.init_lora_weights=loftq"], ["method.quantization=nf4"]),
    ("init-loftq-nf4", ["method=lora_int8", "method.init_lora_weights=loftq"], ["method.init_lora_weights=default"]),
    ("init-loftq-dora", [*NF4_DORA, "method.init_lora_weights=loftq"], ["method.use_dora=false"]),
    (
        "init-loftq-experts",
        ["method=qlora", "model=qwen3_30b_a3b", "method.init_lora_weights=loftq"],
        ["method.init_lora_weights=eva"],
    ),
    ("init-odd", [LORA, "method.init_lora_weights=orthogonal", "method.r=5"], ["method.r=6"]),
    ("init-adapter", [LORA, "model.adapter=existing", "method.init_lora_weights=pissa"], ["~method.init_lora_weights"]),
    ("loraplus-optimizer", [LORA, "optimizer=muon", "method.loraplus_lr_ratio=4"], ["optimizer.name=adamw"]),
    ("token-rows-sharded", [LORA, *FSDP, TOKENS], ["strategy.name=zero2"]),
    ("token-rows-sharded", [LORA, *ZERO3, TOKENS], ["method.modules_to_save=[embed_tokens,lm_head]"]),
    ("new-tokens-twice", ["model.new_tokens=[a,b,a]"], ["model.new_tokens=[a,b]"]),
    ("adapter-zero3", [LORA, *ZERO3, "model.adapter=existing"], ["strategy.name=zero2"]),
    ("target-parameters", [LORA, "model=a/b", "target_parameters=[w]", "lora_dropout=0.1"], ["~method.lora_dropout"]),
    ("target-parameters", [LORA, "model=a/b", "target_parameters=[w]", "use_dora=true"], ["method.use_dora=false"]),
    ("layers-to-transform", [LORA, "method.layers_to_transform=[29, 30]"], ["method.layers_to_transform=[29]"]),
    (
        "module-both-ways",
        [LORA, "method.target_modules=[q_proj,o_proj]", "method.modules_to_save=[q_proj]"],
        ["method.target_modules=[o_proj]"],
    ),
    ("quantized-dtype", ["method=qlora", "model.dtype=bf16"], ["~model.dtype"]),
    ("quantized-gguf", ["method=qlora", "model=m.gguf"], ["method.quantization=none"]),
    ("quantized-gguf", ["method=lora_int8", "model=a/b", "model.gguf_file=m.gguf"], ["method.quantization=none"]),
    ("quantized-experts", ["method=lora_int8", "model=qwen3_30b_a3b"], ["method.quantization=nf4"]),
    ("quantized-weights-read", ["method=qlora", "model=mamba", "target_modules=[x_proj]"], ["quantization=none"]),
    ("double-quantization", [LORA, "method.double_quantization=false"], ["~method.double_quantization"]),
    ("double-quantization", [LORA, "method.double_quantization=false"], ["method.quantization=nf4"]),
    ("int8-dora", ["method=lora_int8", "method.use_dora=true"], ["method.quantization=nf4"]),
    ("int8-dora", ["method=lora_int8", "method.use_dora=true"], ["method.use_dora=false"]),
    ("full-low-masters", ["model.dtype=bf16"], ["~model.dtype"]),
    ("full-low-masters", ["model.dtype=bf16"], ["precision=pure_bf16"]),
    ("pure-bf16-dtype", [LORA, "precision=pure_bf16", "model.dtype=fp32"], ["~model.dtype"]),
    ("pure-bf16-dtype", [LORA, "precision=pure_bf16", "model.dtype=fp32"], ["precision=bf16"]),
    ("fp32-stored-low", [LORA, "precision=fp32", "model.dtype=bf16"], ["~model.dtype"]),
    ("fp32-stored-low", [LORA, "precision=fp32", "model.dtype=fp16"], ["precision=fp16"]),
    ("mixed-16-bit", [LORA, "precision=bf16", "model.dtype=fp16"], ["precision=fp16"]),
    ("mixed-16-bit", [LORA, "precision=fp16", "model.dtype=bf16"], ["~model.dtype"]),
    ("optimizer-no-decay", ["optimizer=galore_adamw", "optimizer.weight_decay=0.1"], ["optimizer.weight_decay=0"]),
    ("optimizer-no-clipping", ["optimizer=lomo"], ["optimizer.max_grad_norm=0"]),
    ("optimizer-no-clipping", ["optimizer=galore_adamw_layerwise"], ["optimizer.max_grad_norm=0"]),
    ("checkpointing-interval", ["activation_checkpointing.every_n_layers=2"], ["activation_checkpointing.mode=full"]),
    (
        "checkpointing-interval",
        ["activation_checkpointing={mode: selective, every_n_layers: 2}"],
        ["~activation_checkpointing.every_n_layers"],
    ),
    (
        "batch-micro-division",
        ["batch={global_batch_size: 12, micro_batch_size: 8}"],
        ["batch.micro_batch_size=4"],
    ),
    ("schedule-both-lengths", ["max_steps=5", "num_epochs=1"], ["schedule.num_epochs=null"]),
    ("schedule-both-warmups", ["warmup_ratio=0.1", "warmup_steps=1"], ["schedule.warmup_ratio=null"]),
    ("schedule-constant-warmup", ["schedule=constant", "warmup_steps=2"], ["schedule=constant_with_warmup"]),
    ("schedule-unknown-args", ["schedule.args.min_lr=0.1"], ["~schedule.args"]),
    ("schedule-unknown-args", ["schedule=linear", "schedule.args.num_cycles=1"], ["~schedule.args"]),
    ("schedule-min-lr", ["schedule=cosine_with_min_lr"], ["schedule.args.min_lr_rate=0.1"]),
    ("schedule-min-lr", ["schedule=cosine_warmup_with_min_lr"], ["schedule.args.min_lr=1e-6"]),
    (
        "schedule-min-lr",
        ["schedule=cosine_with_min_lr", "schedule.args={min_lr: 1e-6, min_lr_rate: 0.1}"],
        ["~schedule.args.min_lr"],
    ),
    ("schedule-decay-steps", ["schedule=warmup_stable_decay"], ["schedule.args.num_decay_steps=10"]),
    ("schedule-free", ["optimizer=schedule_free_adamw"], ["schedule.name=constant", "warmup_steps=5"]),
    (
        "batch-both-sizes",
        ["batch={tokens_per_step: 4096, global_batch_size: 2}"],
        ["batch.global_batch_size=null"],
    ),
    ("batch-tokens-division", ["batch.tokens_per_step=5000"], ["batch.tokens_per_step=4096"]),
    ("batch-tokens-division", ["batch.tokens_per_step=100"], ["batch.tokens_per_step=2048"]),
    ("batch-micro-over-global", ["batch.micro_batch_size=17"], ["batch.micro_batch_size=16"]),
    (
        "batch-micro-over-global",
        ["batch={tokens_per_step: 8192, micro_batch_size: 5}"],
        ["batch.micro_batch_size=4"],
    ),
    ("checkpoint-both-intervals", ["save_steps=5", "save_epochs=1"], ["checkpoint.save_steps=null"]),
    ("resume-path", ["checkpoint.resume=nowhere"], ["checkpoint.resume=existing"]),
    ("evaluation-without-data", ["data.eval_split=null", "evaluation.every_steps=5"], ["data.eval_split=0.05"]),
    ("evaluation-without-data", ["~data.eval_split", "evaluation.batch_size=5"], ["data.eval_sources=[held.jsonl]"]),
    ("evaluation-without-data", ["data.eval_split=null", "evaluation.every_steps=5"], ["~evaluation.every_steps"]),
    ("metrics-need-seq2seq", ["evaluation.generation_metrics=true"], ["evaluation.generation_metrics=false"]),
    ("beams-without-metrics", [*SEQ2SEQ, "num_beams=4"], ["evaluation.generation_metrics=true"]),
    ("beams-without-metrics", ["num_beams=4"], ["~evaluation.num_beams"]),
    ("prompts-left-out", ["prompts=[a,b,c,d]"], ["evaluation.num_prompts=4"]),
    ("output-name", ["output.name=../elsewhere"], ["output={dir: ../elsewhere, name: run}"]),
    ("output-name", ["output.name=/tmp/run"], ["output.name=run"]),
    ("strategy-keys", ["strategy.reduce_bucket_size=5"], ["~strategy.reduce_bucket_size"]),
    ("strategy-keys", ["strategy.offload_optimizer=cpu"], ["strategy.name=zero2"]),
    ("strategy-keys", ["strategy.name=single", "strategy.offload_param=cpu"], ["strategy.name=fsdp"]),
    ("strategy-keys", ["strategy.name=zero3", "strategy.sharding=shard_grad_op"], ["strategy.name=fsdp"]),
    ("strategy-keys", ["strategy.name=zero3", "strategy.allgather_bucket_size=5"], ["strategy.name=zero1"]),
    ("strategy-keys", ["strategy.name=zero2", "strategy.offload_param=cpu"], ["strategy.name=zero3"]),
    (
        "strategy-keys",
        ["strategy={name: zero2, wrap_classes: [LlamaDecoderLayer], prefetch_bucket_size: 5}"],
        ["~strategy.wrap_classes", "~strategy.prefetch_bucket_size"],
    ),
    ("fsdp-offload-optimizer", [*FSDP, "strategy.offload_optimizer=cpu"], ["strategy.name=zero2"]),
    (
        "fsdp-offload-optimizer",
        [*FSDP, "strategy.offload_optimizer=cpu"],
        ["~strategy.offload_optimizer", "strategy.offload_param=cpu"],
    ),
    ("fsdp-offload-nvme", [*FSDP, "strategy.offload_param=nvme"], ["strategy.offload_param=cpu"]),
    (
        "nvme-needs-zero3",
        ["strategy={name: zero2, offload_optimizer: nvme}"],
        ["strategy.offload_optimizer=cpu"],
    ),
    (
        "nvme-needs-zero3",
        ["strategy={name: zero1, offload_optimizer: nvme}"],
        ["strategy.name=zero3", "strategy.nvme_path=/scratch"],
    ),
    ("nvme-needs-path", [*ZERO3, "strategy.offload_param=nvme"], ["strategy.nvme_path=/scratch"]),
    ("nvme-path-unused", [*ZERO3, "strategy.nvme_path=/scratch"], ["strategy.offload_optimizer=nvme"]),
    ("nvme-path-unused", [*ZERO3, "strategy.nvme_path=/scratch"], ["~strategy.nvme_path"]),
    ("pin-memory-unused", [*FSDP, "strategy.pin_memory=false"], ["strategy.offload_param=cpu"]),
    ("pin-memory-unused", [*ZERO2, "strategy.pin_memory=false"], ["~strategy.pin_memory"]),
    ("reshard-contradicts", [*FSDP, "strategy.reshard_after_forward=false"], ["strategy.sharding=shard_grad_op"]),
    (
        "reshard-contradicts",
        [*FSDP, "strategy.sharding=shard_grad_op", "strategy.reshard_after_forward=true"],
        ["strategy.sharding=full_shard"],
    ),
    ("reduce-overflows", [*ZERO2, "strategy.reduce_dtype=fp16"], ["strategy.reduce_dtype=bf16"]),
    ("reduce-overflows", [*FSDP, "strategy.reduce_dtype=fp16"], ["~strategy.reduce_dtype"]),
    ("zero1-pure-bf16-reduce", [*ZERO1, *PURE, "strategy.reduce_dtype=fp32"], ["~strategy.reduce_dtype"]),
    ("zero1-pure-bf16-reduce", [*ZERO1, *PURE, "strategy.reduce_dtype=fp32"], ["strategy.name=zero2"]),
    ("zero-pure-bf16-offload", [*ZERO2, *PURE, "strategy.offload_optimizer=cpu"], ["precision=bf16"]),
    (
        "zero-pure-bf16-offload",
        [*ZERO2, *PURE, "strategy.offload_optimizer=cpu"],
        ["strategy.offload_optimizer=none"],
    ),
    ("zero-stored-dtype", [*ZERO2, "model.dtype=fp32"], ["~model.dtype"]),
    ("zero-stored-dtype", [*ZERO3, LORA, "precision=fp16", "model.dtype=fp32"], ["precision=fp32"]),
    ("int8-sharded", [*ZERO3, "method=lora_int8", "model=a/b"], ["method.quantization=nf4"]),
    ("int8-sharded", [*FSDP, "method=lora_int8", "model=a/b"], ["strategy.name=zero2"]),
    (
        "nf4-param-nvme",
        [*ZERO3, "method=qlora", "model=a/b", "strategy.nvme_path=/scratch", "strategy.offload_param=nvme"],
        ["strategy.offload_param=cpu", "~strategy.nvme_path"],
    ),
    ("zero3-nf4-dora", [*ZERO3, *NF4_DORA], ["strategy.name=fsdp"]),
    ("zero3-nf4-dora", [*ZERO3, *NF4_DORA], ["method.use_dora=false"]),
    (
        "fsdp-tied-embeddings",
        [*FSDP, LORA, "method.modules_to_save=[embed_tokens,lm_head]"],
        ["strategy.cpu_ram_efficient_loading=false"],
    ),
    ("fsdp-encoder-decoder", [*SEQ2SEQ, *FSDP], ["strategy.name=zero2"]),
    ("zero3-selective", [*ZERO3, *SELECTIVE], ["activation_checkpointing.mode=full"]),
    ("zero3-selective", [*ZERO3, LORA, *SELECTIVE], ["strategy.name=fsdp"]),
    ("zero-optimizer", [*ZERO2, "optimizer=adafactor"], ["optimizer.name=adamw_8bit"]),
    ("zero-optimizer", [*ZERO3, "optimizer=adagrad"], ["optimizer.name=rmsprop"]),
    ("zero-optimizer", [*ZERO3, "optimizer=schedule_free_sgd", "schedule=constant"], ["optimizer.name=sgd"]),
    ("zero-optimizer", [*ZERO2, "optimizer=grokadamw"], ["optimizer.name=adamw"]),
    ("zero-offload-paged", [*ZERO2_OFFLOAD, "optimizer=paged_adamw_8bit"], ["optimizer.name=adamw_8bit"]),
    ("zero-offload-paged", [*ZERO2_OFFLOAD, "optimizer=paged_adamw_32bit"], ["optimizer.name=adamw"]),
    ("fsdp-optimizer", [*FSDP, "optimizer=paged_adamw_8bit"], ["optimizer.name=adamw_torch_8bit"]),
    ("fsdp-optimizer", [*FSDP, "optimizer=lion"], ["optimizer.name=adamw"]),
    ("fsdp-optimizer", [*FSDP, "optimizer=rmsprop_bnb_32bit"], ["optimizer.name=rmsprop"]),
    ("fsdp-optimizer", [*FSDP, "optimizer=adafactor"], ["optimizer.name=adamw_torch_8bit"]),
    ("fsdp-muon", [*FSDP, "optimizer=muon"], ["optimizer.name=adamw", "strategy.name=ddp"]),
    ("zero-optimizer", [*ZERO2, "optimizer=muon"], ["optimizer.name=adamw"]),
    ("columns-twice", ["data.columns={prompt: a, completion: a}"], ["data.columns={prompt: a, completion: b}"]),
    (
        "source-columns-twice",
        ["data=[{path: a.jsonl, columns: {prompt: a, completion: a}}]"],
        ["data=[{path: a.jsonl, columns: {prompt: a, completion: b}}]"],
    ),
    ("optimizer-own-keys", ["optimizer.args={lr: 0.1}"], ["~optimizer.args", "optimizer.learning_rate=1e-3"]),
    ("optimizer-own-keys", ["optimizer=sgd", "optimizer.args={momentum: 0.1}"], ["~optimizer.args", "momentum=0.1"]),
    ("optimizer-args", ["optimizer.args={nesterov: true}"], ["optimizer.args={amsgrad: true}"]),
    ("optimizer-momentum", ["optimizer.momentum=0.8"], ["~optimizer.momentum"]),
    ("optimizer-momentum", ["optimizer.momentum=0.8"], ["optimizer.name=sgd"]),
    ("optimizer-beta1", ["optimizer=sgd", "optimizer.beta1=0.8"], ["~optimizer.beta1"]),
    ("optimizer-beta2", ["optimizer=adafactor", "optimizer.beta2=0.8"], ["optimizer.name=adamw"]),
    ("optimizer-eps", ["optimizer=lion", "optimizer.eps=1e-6"], ["~optimizer.eps"]),
    ("lone-weight", ["data=[{path: a.jsonl, weight: 2.0}]"], ["data.sources=[a.jsonl]"]),
    ("evaluation-weight", ["data.eval_sources=[{path: a.jsonl, weight: 2.0}]"], ["data.eval_sources=[a.jsonl]"]),
    (
        "micro-batch-tokens",
        ["batch={micro_batch_size: 2, micro_batch_tokens: 4096}"],
        ["batch.micro_batch_size=auto"],
    ),
    ("eval-max-samples", ["~data.eval_split", "data.eval_max_samples=5"], ["~data.eval_max_samples"]),
    ("evaluation-at-start", ["~data.eval_split", "at_start=false"], ["data.eval_split=0.05"]),
    ("max-new-tokens", ["num_prompts=0", "max_new_tokens=5"], ["evaluation.num_prompts=3"]),
    ("data-format", ["data=[{path: a.jsonl, format: text}]", "data.format=alpaca"], ["~data.format"]),
    ("data-columns", ["data=[{path: a, columns: {text: b}}]", "data.columns={text: c}"], ["~data.columns"]),
    ("data-ignore", ["data=[{path: a, ignore: [b]}]", "data.ignore=[c]"], ["~data.ignore"]),
    ("compile-unfit", ["compile=layers", *SELECTIVE], ["compile=auto"]),
    ("compile-unfit", ["compile=layers", "method=qlora"], ["compile=auto"]),
    ("compile-unfit", ["compile=layers", "model=mamba"], ["compile=auto"]),
    ("learning-rate-high", ["learning_rate=2"], ["optimizer.learning_rate=3e-5"]),
    ("learning-rate-low", ["learning_rate=1e-12"], ["optimizer.learning_rate=3e-5"]),
    ("learning-rate-high", ["optimizer=sgd", "learning_rate=20"], ["optimizer.learning_rate=1e-3"]),
    ("epsilon-high", ["optimizer.eps=0.1"], ["optimizer.eps=1e-8"]),
    ("weight-decay-high", ["optimizer.weight_decay=1e4"], ["optimizer.weight_decay=0.1"]),
    ("warmup-too-long", ["max_steps=5", "warmup_steps=5"], ["schedule.warmup_steps=1"]),
    ("warmup-all", ["schedule.warmup_ratio=1"], ["schedule.warmup_ratio=0.03"]),
    (
        "decay-too-long",
        ["schedule=warmup_stable_decay", "schedule.args.num_decay_steps=9", "warmup_steps=2", "max_steps=10"],
        ["schedule.args.num_decay_steps=8"],
    ),
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("existing").mkdir()
    Path("existing", "adapter_config.json").write_text('{"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}')
    Path("m.gguf").touch()
    vocabulary = {str(number): number for number in range(49_160)}
    for name, model, added in (
        ("larger", {"vocab": vocabulary}, []),
        ("grown", {"vocab": [["a", 0.5]]}, [{"id": 49_152, "content": "<tool>"}]),
    ):
        Path(name).mkdir()
        Path(name, "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    Path("mamba").mkdir()
    Path("mamba", "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    Path("resized").mkdir()
    Path("resized", "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 49_153}))
    for name in ("encoder", "decoder"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"model_type": "roberta", "is_decoder": name == "decoder"}))
    Path("recipes/mine.yaml").write_text(BASE)


@functools.cache
def broken_by(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Paths and reasons of the rules that a recipe breaks, or of those that warn of one that breaks none."""
    try:
        return tuple(map(str, load_checked("mine", overrides).warnings))
    except RecipeError as error:
        return tuple(map(str, error.problems))


@pytest.mark.parametrize(("rule", "breaks", "fix"), CASES, ids=[case[0] for case in CASES])
def test_rule_refuses_and_its_fix_is_valid(rule: str, breaks: list[str], fix: list[str]) -> None:
    found = RULES[rule]
    problems = broken_by(tuple(breaks))
    # The fixed words before the first figure are enough to know the rule by.
    reason = " ".join(found.why.partition("{")[0].split())
    matching = [text for text in problems if text.startswith(f"{found.path}: ") and reason in " ".join(text.split())]
    assert len(matching) == 1, problems
    assert len(problems) == 1, "the case should break this rule alone"
    assert not re.search(r"\{[\w.]+\}|None", matching[0]), "an unfilled figure"
    assert broken_by((*breaks, *fix)) == ()
    # The fix stands in the message: at least the last part of one of the keys.
    keys = [override.lstrip("~").partition("=")[0].rpartition(".")[2] for override in fix]
    assert any(key in matching[0] for key in keys)


def test_every_rule_has_a_case_and_names_are_unique() -> None:
    rooms = (INPUT_RULES, TRAINING_RULES, STRATEGY_RULES, IGNORED_RULES, UNUSUAL_RULES)
    assert len(RULES) == sum(map(len, rooms))
    assert set(RULES) == {rule for rule, _, _ in CASES}


def test_every_refused_optimizer_names_an_allowed_one() -> None:
    def problems(strategy: str, name: str) -> list[str]:
        schedule = {"name": "constant"} if name.startswith("schedule_free") else {}
        sections = {"strategy": {"name": strategy}, "optimizer": {"name": name, "max_grad_norm": 0.0}}
        model, data = {"path": "a/b"}, {"sources": ["rows.jsonl"]}
        recipe = Recipe.model_validate({"model": model, "data": data, "schedule": schedule, **sections})
        return [problem.hint for problem in check(recipe)]

    refused = 0
    for strategy, name in itertools.product(("zero1", "zero2", "zero3", "fsdp"), OPTIMIZERS):
        for hint in problems(strategy, name):
            refused += 1
            (nearest,) = re.findall(r"optimizer\.name=(\w+)", hint)
            assert problems(strategy, nearest) == [], (strategy, name, nearest)
    assert refused > 50


def test_broken_rule_names_the_line_of_the_file() -> None:
    Path("recipes/mine.yaml").write_text(BASE + "schedule:\n  max_steps: 5\n  num_epochs: 2\n")
    (problem,) = broken_by(())
    assert "recipes/mine.yaml:3" in problem and "given    5" in problem


def test_broken_rule_names_no_line_for_a_default_whatever_else_its_section_says() -> None:
    Path("recipes/mine.yaml").write_text(BASE + "strategy:\n  name: zero3\n  offload_param: nvme\n")
    (problem,) = broken_by(("seed=1",))
    assert problem.startswith("strategy.nvme_path: ") and "mine.yaml" not in problem
    Path("recipes/mine.yaml").write_text(BASE + "method:\n  name: full\n  r: 5\n")
    (problem,) = broken_by(("seed=2",))
    assert problem.startswith("method: ") and "recipes/mine.yaml:4" in problem


def test_schedule_arguments_are_those_of_transformers() -> None:
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    supplied = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    functions = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    for name, known in SCHEDULES.items():
        assert known == set(inspect.signature(functions[name]).parameters) - supplied, name
