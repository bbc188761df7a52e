"""Every rule at its edges: what just breaks it, and neighbours that do not. Nothing is composed or loaded."""

from __future__ import annotations

import pytest

from recipes import each, recipe_of
from toolkit.common import UserError
from toolkit.distributed.layout import batch_layout
from toolkit.recipe import Recipe
from toolkit.recipe.distillation import Teacher
from toolkit.recipe.rules import RULES
from toolkit.recipe.rules.parallel import nearest_heads
from toolkit.recipe.rules.unusual import UNUSUAL_RULES
from toolkit.recipe.schema import leaf_paths, sections

LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "max_position_embeddings": 64, "tie_word_embeddings": True}
LORA, FULL, FP32, SEQ2SEQ = "method.name=lora ", "method.name=full ", "precision=fp32 ", "objective=seq2seq "
PURE, PURE_FP8, ADAPTER = "precision=pure_bf16 ", "precision=pure_fp8 ", "model.adapter=a "
IN_FP8 = each("precision", "fp8 fp8_rowwise pure_fp8")
DDP, ZERO1, ZERO2, ZERO3, FSDP = (f"strategy.name={name} " for name in ("ddp", "zero1", "zero2", "zero3", "fsdp"))
STAGES, SHARDED, WHOLE = [ZERO1, ZERO2, ZERO3], [ZERO3, FSDP], [DDP, ZERO1, ZERO2]
VARLEN = each("model.attention", "torch_varlen flash_attention_2 flash_attention_3 flash_attention_4")
MASKED = each("model.attention", "auto eager sdpa flex")
NF4, INT8, FP8, INT4 = (LORA + f"method.quantization={kind} " for kind in ("nf4", "int8", "fp8", "int4"))
OFFLOAD, NVME = "strategy.offload_optimizer=cpu ", "strategy.offload_param=nvme "
STREAM = "data.streaming=true schedule.max_steps=5 "
MIN_LR, STABLE = "schedule.name=cosine_with_min_lr ", "schedule.name=warmup_stable_decay "
ENDED = "schedule.args='{num_stable_steps: 5, num_decay_steps: 2}' " + STABLE
PARTS, PIPED = "parallel.tensor=2 ", "parallel.pipeline=2 "
EXPERTS = "parallel.expert=2 "
SHARED, GATHERED = "parallel.sequence=2 ", "parallel.context=2 "
NOISE = "extra.training_arguments='{neftune_noise_alpha: 5}' "
GRPO, SERVER = "objective=grpo rewards.numeric=true ", "rollout.server=http://localhost:8000 "
SERVED = GRPO + SERVER
NOT_SERVED = {
    "batch": "rollout.batch_size=4",
    "quantized": "method.quantization=nf4",
    "new-tokens": "model.new_tokens=[a]",
    "dora": "method.use_dora=true",
    "modules": "method.modules_to_save=[lm_head]",
    "parameters": "method.target_parameters=[w]",
}
LOCAL = each("model.path", "builtin:x x.gguf .")

# Rule, what all its recipes have, what breaks it beside that, and what does not.
EDGES: list[tuple[str, str, list[str], list[str]]] = [
    (
        "gguf-part-gguf_file",
        "model.path=a/b",
        each("model.gguf_file", "m-00002-of-00003.gguf q4/m-00001-of-00010.gguf"),
        each("model.gguf_file", "m-00001-of-00001.gguf m-1-of-2.gguf m-00001-of-00003.gguf.gguf"),
    ),
    ("model-no-folder", "", each("model.path", "./m ../m /m a/b/c m.gguf a/m.gguf"), each("model.path", "m a/b .")),
    ("model-no-folder", "", [r"model.path='a\\b'"], ["model.path=builtin:a/b/c"]),
    ("model-no-folder", "", ["model.path=nope/", "model.path='a b'", "model.path=a/b/"], ["model.path=a-b/c.d_1"]),
    ("tokenizer-no-folder", "", ["model.tokenizer=nope/", "model.tokenizer=../t"], ["", "model.tokenizer=a/b"]),
    ("model-other-file", "", [f"model.path={__file__}"], ["model.path=a/b", "model.path=.", "model.path=a.gguf"]),
    ("revision-local", "model.revision=main ", LOCAL, ["model.path=a/b"]),
    (
        "remote-code-unpinned",
        "model.trust_remote_code=true ",
        ["", "model.revision=main"],
        ["model.revision=" + "0a" * 20, *LOCAL],
    ),
    ("gguf-twice", "model.gguf_file=b.gguf ", ["model.path=a.gguf"], ["model.path=a/b"]),
    ("attention-fp32", FP32, VARLEN[1:], [*MASKED, VARLEN[0]]),
    ("attention-fp32", VARLEN[1], [FP32], each(" precision", "fp16 bf16 pure_bf16 pure_fp8")),
    ("attention-seq2seq", SEQ2SEQ, VARLEN, MASKED),
    ("positions", "", ["batch.seq_len=65"], ["batch.seq_len=64", "batch.seq_len=1"]),
    ("streaming-length", "data.streaming=true ", ["", "schedule.num_epochs=1.0"], ["schedule.max_steps=5"]),
    ("streaming-epochs", "checkpoint.save_epochs=1.0 ", [STREAM], [""]),
    ("streaming-fraction", "data.eval_split=0.1 ", [STREAM], [""]),
    ("streaming-fraction", STREAM, ["data.eval_split=0.1"], ["data.eval_split=test", ""]),
    ("streaming-whole-data", STREAM, ["data.deduplicate=true", "data.max_samples=5"], [""]),
    ("eval-split-number", "", each("data.eval_split", "\"'0.1'\" 10% 1e-2"), each("data.eval_split", "0.1 test v2 e")),
    ("eval-split-is-train", "", ["data.eval_split=train"], ["data.eval_split=test", "data.eval_split=0.1", ""]),
    ("split-needs-text", "data.over_long=split ", ["", SEQ2SEQ], ["objective=language_modelling"]),
    ("split-needs-text", "", ["data.over_long=split"], each("data.over_long", "error drop truncate")),
    (
        *("lm-trains-all", "objective=language_modelling "),
        *(each("data.train_on", "assistant completion last_assistant [user]"), each("data.train_on", "auto all")),
    ),
    (
        *("template-kwargs-reserved", ""),
        [
            f"data.chat_template_kwargs='{{{name}: true}}'"
            for name in ("messages", "conversation", "tools", "tokenize", "add_generation_prompt")
        ],
        ["data.chat_template_kwargs='{enable_thinking: true}'", ""],
    ),
    ("template-kwargs-reserved", "", ["data.chat_template_kwargs='{continue_final_message: true}'"], [""]),
    ("seq2seq-train-on", SEQ2SEQ, each("data.train_on", "all completion"), ["data.train_on=auto"]),
    ("target-modules", LORA, ["method.target_modules=q_proj"], each("method.target_modules", "all-linear [q] []")),
    ("target-modules-empty", LORA + "method.target_modules=[] ", [""], ["method.target_parameters=[w]"]),
    (
        *("init-whole-base", NF4),
        *(each("method.init_lora_weights", x) for x in ("orthogonal pissa olora", "default gaussian")),
    ),
    ("init-parameters", LORA + "method.init_lora_weights=olora ", ["method.target_parameters=[w]"], [""]),
    *(
        (
            "init-sharded",
            LORA + engine,
            each("method.init_lora_weights", "pissa olora"),
            [*each("method.init_lora_weights", "default gaussian orthogonal")],
        )
        for engine in SHARDED
    ),
    ("init-sharded", LORA + "method.init_lora_weights=pissa ", SHARDED, WHOLE),
    ("init-sharded", NF4 + "method.init_lora_weights=loftq ", SHARDED, [*WHOLE, FSDP + ADAPTER]),
    ("init-sharded", LORA + "method.init_lora_weights=eva ", SHARDED, WHOLE),
    ("init-whole-base", "method.init_lora_weights=eva ", [], [NF4, INT8, FP8, INT4]),
    (
        *("init-parameters", LORA + "method.target_parameters=[w] "),
        *(each("method.init_lora_weights", x) for x in ("eva loftq orthogonal pissa", "default gaussian")),
    ),
    ("init-parameters", LORA + "method.init_lora_weights=eva ", [], [""]),
    ("init-eva-seq2seq", LORA + "method.init_lora_weights=eva ", [SEQ2SEQ], ["", "objective=language_modelling"]),
    ("init-eva-seq2seq", SEQ2SEQ + LORA, [], each("method.init_lora_weights", "default loftq")),
    ("init-loftq-nf4", "method.init_lora_weights=loftq ", [LORA, INT8, FP8, INT4], [NF4]),
    ("init-loftq-nf4", LORA, [], each("method.init_lora_weights", "default eva")),
    ("init-loftq-dora", NF4 + "method.use_dora=true ", ["method.init_lora_weights=loftq"], [""]),
    ("init-loftq-dora", NF4 + "method.init_lora_weights=loftq ", [], [""]),
    ("init-loftq-experts", NF4, [], ["method.init_lora_weights=loftq"]),
    ("init-adapter", ADAPTER, ["method.init_lora_weights=eva"], ["method.init_lora_weights=loftq"]),
    ("init-odd", LORA + "method.init_lora_weights=orthogonal ", each("method.r", "1 5"), each("method.r", "2 16")),
    ("init-odd", LORA + "method.r=5 ", [], ["", *each("method.init_lora_weights", "gaussian pissa")]),
    ("init-adapter", "method.init_lora_weights=gaussian ", [ADAPTER], [""]),
    (
        *("loraplus-optimizer", LORA + "method.loraplus_lr_ratio=16.0 "),
        each("optimizer.name", "muon galore_adamw apollo_adamw lomo adalomo galore_adamw_layerwise"),
        each("optimizer.name", "adamw sgd lion adafactor schedule_free_adamw"),
    ),
    ("adapter-zero3", ADAPTER, [ZERO3], [DDP, ZERO1, ZERO2, FSDP]),
    ("token-rows-sharded", LORA + "model.new_tokens=[a] ", SHARDED, [*WHOLE, ZERO3 + "method.modules_to_save=[h]"]),
    ("token-rows-sharded", "model.new_tokens=[a] ", [], SHARDED),
    ("layers-to-transform", LORA, each("method.layers_to_transform", "[4] [0,4]"), ["method.layers_to_transform=[3]"]),
    (
        "module-both-ways",
        LORA + "method.modules_to_save=[a,b] ",
        ["method.target_modules=[b]"],
        ["", "method.target_modules=[c]"],
    ),
    *(
        ("quantized-dtype", LORA + quantized, each("model.dtype", "fp32 bf16 fp16"), ["model.dtype=auto"])
        for quantized in (NF4, INT8, FP8, INT4)
    ),
    ("double-quantization", "method.double_quantization=false ", [LORA, INT8, FP8, INT4], [NF4]),
    ("quantized-dora", "method.use_dora=true ", [INT8, FP8, INT4], [LORA, NF4]),
    (
        "full-low-masters",
        FULL,
        each("model.dtype", "bf16 fp16"),
        [*each("model.dtype", "fp32 auto"), PURE + "model.dtype=bf16", PURE_FP8 + "model.dtype=bf16"],
    ),
    ("fp8-adapters", LORA, IN_FP8, each("precision", "bf16 fp16 fp32 pure_bf16")),
    ("fp8-adapters", FULL, [], IN_FP8),
    *(
        ("pure-bf16-dtype", pure, each("model.dtype", "fp32 fp16"), each("model.dtype", "bf16 auto"))
        for pure in (PURE, PURE_FP8)
    ),
    ("fp32-stored-low", LORA + FP32, each("model.dtype", "bf16 fp16"), each("model.dtype", "fp32 auto")),
    (
        "mixed-16-bit",
        LORA,
        ["precision=fp16 model.dtype=bf16", "precision=bf16 model.dtype=fp16"],
        [*("precision=fp16 model.dtype=fp16", "precision=bf16 model.dtype=bf16", "model.dtype=fp32")],
    ),
    (
        "optimizer-no-decay",
        "optimizer.weight_decay=0.1 ",
        each("optimizer.name", "lomo adalomo galore_adamw apollo_adamw"),
        [*each("optimizer.name", "adamw sgd lion adafactor muon")],
    ),
    (
        "optimizer-no-clipping",
        "",
        each("optimizer.name", "lomo adalomo galore_adamw_layerwise apollo_adamw_layerwise"),
        [*("optimizer.name=galore_adamw", "optimizer.name=lomo optimizer.max_grad_norm=0.0")],
    ),
    (
        "fp16-in-backward",
        "optimizer.max_grad_norm=0 precision=fp16 ",
        each("optimizer.name", "lomo adalomo galore_adamw_layerwise apollo_adamw_layerwise"),
        [*each("optimizer.name", "galore_adamw adamw"), "optimizer.name=lomo precision=bf16"],
    ),
    (
        *("checkpointing-interval", "activation_checkpointing.every_n_layers=2 "),
        each("activation_checkpointing.mode", "none elementwise selective"),
        each("activation_checkpointing.mode", "full offload"),
    ),
    (
        *("elementwise-off", "activation_checkpointing.mode=elementwise "),
        ["compile='off'"],
        each("compile", "auto layers"),
    ),
    ("elementwise-off", "compile='off' ", [], each("activation_checkpointing.mode", "none full selective offload")),
    (
        *("elementwise-unfit", "activation_checkpointing.mode=elementwise "),
        [*STAGES[2:], FSDP, "activation_checkpointing.mlp_tiles=2"],
        ["", *STAGES[:2], DDP],
    ),
    ("checkpointing-interval", "activation_checkpointing.every_n_layers=1 ", [], [""]),
    (
        "schedule-both-lengths",
        "",
        ["schedule.max_steps=5 schedule.num_epochs=1.0"],
        [*("", "schedule.max_steps=5", "schedule.num_epochs=1.0")],
    ),
    (
        "checkpoint-both-intervals",
        "",
        ["checkpoint.save_steps=5 checkpoint.save_epochs=1.0"],
        [*("", "checkpoint.save_steps=5", "checkpoint.save_epochs=1.0")],
    ),
    (
        "batch-both-sizes",
        "",
        ["batch.tokens_per_step=2048 batch.global_batch_size=1"],
        [*("", "batch.tokens_per_step=2048", "batch.global_batch_size=1")],
    ),
    ("target-parameters", LORA + "method.target_parameters=[w] ", ["method.use_dora=true"], [""]),
    ("target-parameters", LORA, [], ["method.use_dora=true", "method.lora_dropout=0.5"]),
    ("full-adapter-keys", "", [FULL + "method.r=5"], [LORA + "method.r=5", "", "method.freeze=[a]"]),
    ("lora-freeze", "", [LORA + "method.freeze=[a]"], [LORA, FULL + "method.freeze=[a]"]),
    ("metrics-need-seq2seq", "evaluation.generation_metrics=true ", [""], [SEQ2SEQ]),
    ("seq2seq-packing", "", [SEQ2SEQ + "data.packing=true"], [SEQ2SEQ, "data.packing=true"]),
    ("architecture-causal", "", [SEQ2SEQ], [""]),
    ("fsdp-muon", "optimizer.name=muon ", [FSDP], [*WHOLE, ZERO3]),
    ("schedule-both-warmups", "schedule.warmup_ratio=0.0 ", each("schedule.warmup_steps", "0 5"), [""]),
    (
        "schedule-constant-warmup",
        "schedule.name=constant ",
        ["schedule.warmup_steps=1", "schedule.warmup_ratio=0.1"],
        [*("", "schedule.warmup_steps=0", "optimizer.name=schedule_free_adamw schedule.warmup_steps=1")],
    ),
    ("schedule-constant-warmup", "schedule.warmup_steps=1 ", [], each("schedule.name", "constant_with_warmup cosine")),
    *(
        (
            rule,
            f"schedule.name={name} ",
            breaks,
            ["schedule.args='{min_lr: 0.1}'", "schedule.args='{min_lr_rate: 0.1}'"],
        )
        for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
        for rule, breaks in (
            ("schedule-min-lr", [""]),
            ("schedule-min-lr-twice", ["schedule.args='{min_lr: 0.1, min_lr_rate: 0.1}'"]),
        )
    ),
    ("schedule-min-lr", "", [], each("schedule.name", "cosine linear warmup_stable_decay")),
    ("schedule-decay-steps", STABLE, [""], ["schedule.args='{num_decay_steps: 5}'"]),
    ("schedule-free", "schedule.name=linear ", each("optimizer.name", "schedule_free_adamw schedule_free_sgd"), [""]),
    ("schedule-free", "schedule.name=constant ", [], ["optimizer.name=schedule_free_radam"]),
    (
        "batch-tokens-division",
        "batch.seq_len=8 ",
        each("batch.tokens_per_step", "7 9 12"),
        each("batch.tokens_per_step", "8 16"),
    ),
    (
        "batch-micro-over-global",
        "batch.micro_batch_size=4 ",
        ["batch.global_batch_size=3"],
        [*("batch.global_batch_size=4", "")],
    ),
    (
        "batch-micro-division",
        "batch.global_batch_size=12 ",
        each("batch.micro_batch_size", "5 8"),
        [*each("batch.micro_batch_size", "1 3 4 12 13 auto")],
    ),
    (
        "evaluation-without-data",
        "evaluation.batch_size=2 ",
        [""],
        ["data.eval_split=0.1", "data.eval_sources='[{path: a}]'"],
    ),
    ("beams-without-metrics", "", ["evaluation.num_beams=2"], ["evaluation.num_beams=1", ""]),
    (
        "prompts-left-out",
        "evaluation.prompts=[a,b] ",
        each("evaluation.num_prompts", "0 1"),
        each("evaluation.num_prompts", "2 3"),
    ),
    ("output-name", "", each("output.name", "/a ../a a/../../b"), each("output.name", "a a/b ..a")),
    ("fsdp-offload-optimizer", OFFLOAD, [FSDP], STAGES),
    ("fsdp-offload-nvme", NVME, [FSDP], STAGES),
    ("nvme-needs-zero3", "strategy.offload_optimizer=nvme ", [ZERO1, ZERO2], [ZERO3, FSDP]),
    (
        "nvme-needs-path",
        ZERO3,
        [NVME, "strategy.offload_optimizer=nvme"],
        [NVME + "strategy.nvme_path=/a", OFFLOAD, ""],
    ),
    ("nvme-path-unused", ZERO3 + "strategy.nvme_path=/a ", ["", OFFLOAD], [NVME, "strategy.offload_optimizer=nvme"]),
    (
        "pin-memory-unused",
        "strategy.pin_memory=false ",
        [*STAGES, FSDP],
        [DDP, ZERO1 + OFFLOAD, FSDP + "strategy.offload_param=cpu"],
    ),
    (
        "reshard-contradicts",
        FSDP + "strategy.reshard_after_forward=true ",
        ["strategy.sharding=shard_grad_op"],
        [*each("strategy.sharding", "full_shard hybrid_shard")],
    ),
    (
        "reshard-contradicts",
        FSDP + "strategy.reshard_after_forward=false ",
        ["strategy.sharding=full_shard"],
        [*each("strategy.sharding", "shard_grad_op hybrid_shard")],
    ),
    ("reduce-overflows", "strategy.reduce_dtype=fp16 ", [*STAGES, FSDP, FSDP + PURE], [DDP, ZERO2 + "precision=fp16"]),
    ("reduce-overflows", ZERO2, [], each("strategy.reduce_dtype", "bf16 fp32 auto")),
    ("zero1-pure-bf16-reduce", "strategy.reduce_dtype=fp32 ", [ZERO1 + PURE], [ZERO1, ZERO2 + PURE, ZERO3 + PURE]),
    ("zero1-pure-bf16-reduce", "strategy.reduce_dtype=fp32 " + PURE_FP8, [ZERO1], [ZERO2, ZERO3]),
    *(("zero-pure-bf16-offload", pure + OFFLOAD, STAGES, [FSDP, DDP]) for pure in (PURE, PURE_FP8)),
    ("zero-pure-bf16-offload", OFFLOAD, [], [engine + "precision=fp8" for engine in STAGES]),
    ("zero-pure-bf16-offload", OFFLOAD, [], STAGES),
    *(
        ("zero-stored-dtype", "model.dtype=fp32 " + engine, each("precision", "bf16 fp16 fp8"), [FP32, PURE, PURE_FP8])
        for engine in STAGES
    ),
    ("zero-stored-dtype", "model.dtype=fp32 ", [], [DDP, FSDP]),
    ("int8-sharded", INT8, SHARDED, WHOLE),
    ("int8-sharded", FP8, [], SHARDED),
    ("int8-sharded", INT4, [], SHARDED),
    ("int8-sharded", ZERO3, [], [NF4, LORA]),
    ("quantized-param-nvme", NVME + ZERO3, [NF4, FP8, INT4], [LORA, INT8]),
    ("zero3-nf4-dora", "method.use_dora=true " + NF4, [ZERO3], [*WHOLE, FSDP]),
    *(
        ("fsdp-tied-embeddings", FSDP + f"method.modules_to_save=[{module}] ", [LORA], [FULL])
        for module in ("embed_tokens", "lm_head")
    ),
    ("fsdp-tied-embeddings", LORA + "method.modules_to_save=[lm_head] ", [FSDP], [*WHOLE, ZERO3]),
    ("fsdp-tied-embeddings", FSDP + "method.modules_to_save=[lm_head] ", [LORA], [NF4, FP8, INT4]),
    ("fsdp-encoder-decoder", SEQ2SEQ, [FSDP], [*WHOLE, ZERO3]),
    ("sequence-heads", "", [], each("parallel.sequence", "1 2 5")),
    ("sequence-seq2seq", SEQ2SEQ, [SHARED], ["", "parallel.sequence=1"]),
    ("sequence-attention", SHARED, each("model.attention", "eager sdpa flex"), ["", *VARLEN]),
    ("sequence-streaming", SHARED, [STREAM], [""]),
    ("sequence-streaming", STREAM, [SHARED], ["", "parallel.sequence=1"]),
    ("sequence-eva", LORA + "method.init_lora_weights=eva ", [SHARED], ["", "parallel.sequence=1"]),
    ("sequence-eva", SHARED, [], [LORA, LORA + "method.init_lora_weights=pissa", "method.init_lora_weights=eva"]),
    ("sequence-neftune", NOISE, [SHARED], ["", "parallel.sequence=1"]),
    ("context-sequence", SHARED, [GATHERED], ["", "parallel.context=1"]),
    ("context-sequence", GATHERED, [], ["", "parallel.sequence=1"]),
    ("context-seq2seq", SEQ2SEQ, [GATHERED], ["", "parallel.context=1"]),
    ("context-attention", GATHERED, each("model.attention", "eager sdpa flex"), ["", *VARLEN]),
    ("context-streaming", STREAM, [GATHERED], ["", "parallel.context=1"]),
    ("context-eva", LORA + "method.init_lora_weights=eva ", [GATHERED], ["", "parallel.context=1"]),
    ("context-neftune", NOISE, [GATHERED], ["", "parallel.context=1"]),
    ("tensor-widths", DDP, [], each("parallel.tensor", "1 2 5")),
    ("tensor-strategy", PARTS, [ZERO3], [DDP, ZERO1, ZERO2, FSDP]),
    ("tensor-hybrid", FSDP + PARTS, ["strategy.sharding=hybrid_shard"], ["", "strategy.sharding=shard_grad_op"]),
    ("tensor-offload", FSDP + PARTS, ["strategy.offload_param=cpu"], [""]),
    ("tensor-seq2seq", SEQ2SEQ + DDP, [PARTS], ["", "parallel.tensor=1"]),
    ("tensor-streaming", STREAM + DDP, [PARTS], ["", "parallel.tensor=1"]),
    ("tensor-quantization", DDP + PARTS, [NF4, INT8, FP8, INT4], [LORA, FULL]),
    ("tensor-dora", DDP + PARTS + LORA, ["method.use_dora=true"], [""]),
    ("tensor-init", DDP + PARTS, [LORA + "method.init_lora_weights=eva "], [LORA, "method.init_lora_weights=eva"]),
    ("tensor-extra-lora", DDP + PARTS + LORA, ["extra.lora='{lora_bias: true}'"], [""]),
    (
        "tensor-optimizer",
        DDP + PARTS,
        each("optimizer.name", "adafactor muon adamw_8bit"),
        each("optimizer.name", "adamw sgd lion"),
    ),
    ("tensor-precision", DDP + PARTS, ["precision=fp16", *IN_FP8], each("precision", "fp32 bf16 pure_bf16")),
    ("tensor-compile", DDP + PARTS, ["compile=layers"], each("compile", "auto off")),
    ("expert-dense", DDP, [EXPERTS], ["", "parallel.expert=1"]),
    ("expert-count", DDP, [], each("parallel.expert", "1 2 5")),
    ("expert-strategy", EXPERTS, [*STAGES, FSDP], [DDP]),
    ("expert-tensor", DDP + EXPERTS, [PARTS], ["", "parallel.tensor=1", SHARED, GATHERED]),
    ("expert-seq2seq", SEQ2SEQ + DDP, [EXPERTS], ["", "parallel.expert=1"]),
    ("expert-quantization", DDP + EXPERTS, [NF4, INT8, FP8, INT4], [LORA, FULL]),
    ("expert-init", DDP + EXPERTS, [LORA + "method.init_lora_weights=eva "], [LORA, "method.init_lora_weights=eva"]),
    ("expert-extra-lora", DDP + EXPERTS + LORA, ["extra.lora='{lora_bias: true}'"], [""]),
    (
        "expert-optimizer",
        DDP + EXPERTS,
        each("optimizer.name", "adafactor muon adamw_8bit"),
        each("optimizer.name", "adamw sgd lion"),
    ),
    ("expert-precision", DDP + EXPERTS, ["precision=fp16", *IN_FP8], each("precision", "fp32 bf16 pure_bf16")),
    ("expert-compile", DDP + EXPERTS, ["compile=layers"], each("compile", "auto off")),
    ("pipeline-layers", DDP, each("parallel.pipeline", "5 9"), each("parallel.pipeline", "1 2 4")),
    (
        "pipeline-layers",
        DDP + "parallel.pipeline=3 ",
        each("parallel.schedule", "zero_bubble interleaved_1f1b"),
        each("parallel.schedule", "gpipe 1f1b"),
    ),
    ("pipeline-strategy", PIPED, [*STAGES, FSDP], [DDP]),
    ("pipeline-sequence", DDP + PIPED, [SHARED], ["", GATHERED]),
    ("pipeline-context", DDP + PIPED, [GATHERED], ["", SHARED]),
    ("pipeline-tensor", DDP + PIPED, [PARTS], [""]),
    ("pipeline-expert", DDP + PIPED, [EXPERTS], [""]),
    ("pipeline-seq2seq", SEQ2SEQ + DDP, [PIPED], ["", "parallel.pipeline=1"]),
    ("pipeline-streaming", STREAM + DDP, [PIPED], ["", "parallel.pipeline=1"]),
    ("pipeline-quantization", DDP + PIPED, [NF4, INT8, FP8, INT4], [LORA, FULL]),
    ("pipeline-modules", DDP + PIPED, [LORA + "method.modules_to_save=[a]"], [LORA, "method.modules_to_save=[a]"]),
    ("pipeline-new-tokens", DDP + PIPED, ["model.new_tokens=[a]"], [""]),
    ("pipeline-init", DDP + PIPED, [LORA + "method.init_lora_weights=eva "], [LORA, "method.init_lora_weights=eva"]),
    ("pipeline-adapter", DDP + PIPED + LORA, [ADAPTER], [""]),
    (
        "pipeline-optimizer",
        DDP + PIPED,
        each("optimizer.name", "adafactor muon adamw_8bit"),
        each("optimizer.name", "adamw sgd lion"),
    ),
    ("pipeline-precision", DDP + PIPED, ["precision=fp16", *IN_FP8], each("precision", "fp32 bf16 pure_bf16")),
    ("pipeline-compile", DDP + PIPED, ["compile=layers"], each("compile", "auto off")),
    (
        "pipeline-selective",
        DDP + PIPED + "activation_checkpointing.mode=selective ",
        ["parallel.schedule=zero_bubble"],
        each("parallel.schedule", "gpipe 1f1b interleaved_1f1b"),
    ),
    (
        "pipeline-offload",
        DDP + PIPED,
        ["activation_checkpointing.mode=offload"],
        each("activation_checkpointing.mode", "none full selective"),
    ),
    ("pipeline-neftune", NOISE + DDP, [PIPED], ["", "parallel.pipeline=1"]),
    ("parallel-schedule", "parallel.schedule=gpipe ", [""], [PIPED]),
    ("zero3-selective", "activation_checkpointing.mode=selective ", [ZERO3], [*WHOLE, FSDP]),
    ("zero-offload-paged", OFFLOAD + "optimizer.name=paged_lion_8bit ", STAGES, [DDP]),
    ("zero-offload-paged", "optimizer.name=paged_lion_8bit ", [], STAGES),
    (
        "lone-weight",
        "",
        ["data.sources='[{path: a, weight: 2.0}]'"],
        ["", "data.sources='[{path: a, weight: 2.0}, {path: b, weight: 1.0}]'"],
    ),
    (
        "evaluation-weight",
        "",
        ["data.eval_sources='[{path: a}, {path: b, weight: 1.0}]'"],
        ["data.eval_sources='[{path: a}]'"],
    ),
    ("micro-batch-tokens", "batch.micro_batch_tokens=64 ", ["batch.micro_batch_size=2"], [""]),
    *(
        (
            f"data-{key}",
            f"data.{key}={value} ",
            [f"data.sources='[{{path: a, {key}: {own}}}]'"],
            [
                *("", f"data.sources='[{{path: a, {key}: {own}}}, {{path: b}}]'"),
                f"data.sources='[{{path: a, {key}: {own}}}]' data.eval_sources='[{{path: b}}]'",
            ],
        )
        for key, value, own in (
            ("format", "text", "alpaca"),
            ("columns", "'{a: b}'", "{a: c}"),
            ("ignore", "[a]", "[b]"),
        )
    ),
    *(
        ("max-new-tokens", "evaluation.max_new_tokens=5 evaluation.num_prompts=0 ", [""], [f"evaluation.{key}"])
        for key in ("num_prompts=1", "generation_metrics=true")
    ),
    ("epsilon-high", "optimizer.eps=0.0011 ", [""], ["optimizer.name=lion", "optimizer.name=sgd"]),
    ("epsilon-high", "optimizer.eps=0.001 ", [], [""]),
    (
        "weight-decay-high",
        "optimizer.learning_rate=0.01 ",
        ["optimizer.weight_decay=1.1"],
        ["optimizer.weight_decay=1.0"],
    ),
    ("clipping-low", "", ["optimizer.max_grad_norm=0.0009"], each("optimizer.max_grad_norm", "0.001 0.0")),
    ("beta2-low", "", ["optimizer.beta2=0.49"], ["optimizer.beta2=0.5"]),
    ("dropout-high", LORA, ["method.lora_dropout=0.51"], ["method.lora_dropout=0.5", "method.lora_dropout=0.0"]),
    ("loraplus-low", LORA, ["method.loraplus_lr_ratio=0.99"], ["method.loraplus_lr_ratio=1.0", ""]),
    ("adapter-scale", LORA, each("method.lora_alpha", "1601 0.15"), each("method.lora_alpha", "1600 0.16")),
    ("adapter-scale", LORA + "method.use_rslora=true ", ["method.lora_alpha=401"], ["method.lora_alpha=400"]),
    ("warmup-too-long", "schedule.max_steps=5 ", each("schedule.warmup_steps", "5 6"), ["schedule.warmup_steps=4", ""]),
    ("warmup-too-long", "schedule.warmup_steps=500 ", [], [""]),
    ("warmup-all", "", ["schedule.warmup_ratio=1.0"], ["schedule.warmup_ratio=0.99", ""]),
    (
        "save-epochs-beyond",
        "checkpoint.save_epochs=1.5 ",
        ["", "schedule.num_epochs=1.4"],
        ["schedule.num_epochs=1.5", "schedule.max_steps=1"],
    ),
    (
        "decay-too-long",
        "schedule.max_steps=10 " + STABLE,
        ["schedule.args='{num_decay_steps: 11}'"],
        ["schedule.args='{num_decay_steps: 10}'"],
    ),
    (
        "decay-too-long",
        "schedule.max_steps=10 schedule.warmup_steps=3 " + STABLE,
        ["schedule.args='{num_decay_steps: 8}'"],
        ["schedule.args='{num_decay_steps: 7}'"],
    ),
    ("decay-too-long", "schedule.args='{num_decay_steps: 8}' " + STABLE, [], ["", "schedule.warmup_steps=3"]),
    *(
        (
            rule,
            ENDED + "schedule.max_steps=10 ",
            each("schedule.warmup_steps", breaks),
            each("schedule.warmup_steps", fit),
        )
        for rule, breaks, fit in (("decay-over-early", "2", "3 4"), ("decay-cut-off", "4", "2 3"))
    ),
    ("decay-over-early", ENDED + "schedule.max_steps=10 ", [""], ["schedule.warmup_ratio=0.3"]),
    ("decay-over-early", "schedule.max_steps=10 schedule.args='{num_decay_steps: 2}' " + STABLE, [], [""]),
    ("decay-over-early", ENDED, ["schedule.max_steps=8"], ["", "schedule.max_steps=7"]),
    ("decay-cut-off", ENDED, ["schedule.max_steps=6"], ["", "schedule.max_steps=7"]),
    ("served-rank", SERVED + LORA, ["method.r=513", "method.rank_pattern='{q_proj: 513}'"], ["method.r=512", ""]),
    ("served-rank", SERVED + LORA + "method.init_lora_weights=pissa ", ["method.r=257"], ["method.r=256"]),
    ("served-rank", SERVED + FULL, [], ["method.r=513"]),
    ("served-extra", SERVED + LORA, ["extra.lora='{bias: all}'"], ["extra.lora='{exclude_modules: [lm_head]}'", ""]),
    ("served-gguf", SERVED, ["model.path=m.gguf", "model.path=builtin:x", "model.gguf_file=m.gguf"], ["", LORA]),
    *((f"served-{rule}", SERVED + LORA, [broken], [""]) for rule, broken in NOT_SERVED.items()),
    *((f"served-{rule}", GRPO + LORA, [], [broken]) for rule, broken in NOT_SERVED.items()),
    ("policy-no-server", GRPO, ["policy.server_cap=2.0"], ["", SERVER + "policy.server_cap=2.0", "policy.beta=0.1"]),
]


@pytest.mark.parametrize(("rule", "common", "breaks", "keeps"), EDGES, ids=[edge[0] for edge in EDGES])
def test_a_rule_ends_where_its_reason_ends(rule: str, common: str, breaks: list[str], keeps: list[str]) -> None:
    assert [text for text in breaks if not RULES[rule].broken(recipe_of(common, text), LLAMA)] == []
    assert [text for text in keeps if RULES[rule].broken(recipe_of(common, text), LLAMA)] == []


def test_every_rule_points_at_a_key_or_a_section() -> None:
    known = {*Recipe.model_fields, *(path for paths in leaf_paths().values() for path in paths)}
    known |= {f"distillation.teacher.{key}" for key in Teacher.model_fields}
    for name, rule in RULES.items():
        assert rule.path in known, name
        assert (rule.path in sections()) == (rule.keys is not None), f"{name}: a section's line says nothing"


def test_only_what_can_be_trained_is_warned_of() -> None:
    switched_off = {"micro-batch-tokens", "eval-max-samples", "eval-seed", "evaluation-at-start", "max-new-tokens"}
    switched_off |= {"streaming-num-proc", "save-total-limit", "staging", "seq2seq-template", "parallel-schedule"}
    switched_off |= {
        "seq2seq-template-kwargs",
        "faults-spike_window",
        "faults-spike_sigmas",
        "faults-max_skips",
        "early-stopping-min-delta",
    }
    overridden = {"data-format", "data-columns", "data-ignore"}
    unusual = {*UNUSUAL_RULES, "teacher-itself", "on-policy-cross-entropy"}
    assert {name for name, rule in RULES.items() if rule.warns} == {*unusual, *switched_off, *overridden}


def test_numbers_of_heads_and_processes_without_an_end_are_looked_through_at_once() -> None:
    heads = {**LLAMA, "num_attention_heads": 10**15 + 1, "hidden_size": 10**15 + 1}
    assert RULES["sequence-heads"].broken(recipe_of("parallel.sequence=2"), heads)
    assert nearest_heads(recipe_of("parallel.sequence=2"), heads).startswith("1")
    with pytest.raises(UserError, match="does not divide 4 processes"):
        batch_layout(recipe_of("parallel.sequence=1000000000000000"), 4)
