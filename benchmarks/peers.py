"""One job through a library alone, as its documentation has it run fastest; `throughput.py` starts it.

`python benchmarks/peers.py trl|trainer|llamafactory JOB.json` writes a line of `metrics.jsonl` per step, in the
toolkit's words.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
)

CUDA = torch.cuda.is_available()
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "seq2seq": (AutoModelForSeq2SeqLM, {}),
    "reward": (AutoModelForSequenceClassification, {"num_labels": 1}),
    "classification": (AutoModelForSequenceClassification, {"num_labels": 3}),
}
"""Objective to the class of its model, where that has another head."""
KINDS_OF_DOCSTRINGS = ("class", "function", "method")


class Meter(TrainerCallback):
    """Counts the tokens that the collator hands out, and writes them down step by step."""

    def __init__(self, file: Path, collate: Any = None) -> None:
        self.collate, self.file, self.tokens, self.written = collate, file, 0, 0
        self.last = time.monotonic()

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        mask = batch.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        if "decoder_input_ids" in batch:
            self.tokens += int((batch["labels"] != -100).sum())
        return batch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if CUDA:
            torch.cuda.synchronize()
        # A trainer that makes its collator itself counts by itself.
        if self.collate is None:
            self.tokens = int(state.num_input_tokens_seen)
        now, tokens = time.monotonic(), self.tokens - self.written
        row = {"step": state.global_step, "tokens": self.tokens, "step_seconds": now - self.last}
        row["tokens_per_second"] = tokens / row["step_seconds"]
        self.last, self.written = now, self.tokens
        memory = {"device_memory_bytes": torch.cuda.max_memory_allocated()} if CUDA else {}
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row | memory) + "\n")


def load(job: dict[str, Any]) -> tuple[Any, Any]:
    """Model and tokenizer."""
    dtype = torch.bfloat16 if job["precision"] == "pure_bf16" or (job["method"] != "full" and CUDA) else torch.float32
    of_nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_use_double_quant": True}
    quantized = BitsAndBytesConfig(load_in_4bit=True, **of_nf4) if job["method"] == "qlora" else None
    flash = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    kind, heads = KINDS.get(job["objective"], (AutoModelForCausalLM, {}))
    model = kind.from_pretrained(
        job["model"], dtype=dtype, attn_implementation=flash, quantization_config=quantized, **heads
    )
    return model, AutoTokenizer.from_pretrained(job["model"])


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """What both trainers take."""
    passes = job["rows"] // job["micro"]
    return {
        "output_dir": str(Path(job["metrics"]).parent / "out"),
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": passes,
        "max_steps": job["steps"],
        "learning_rate": 1e-4,
        "bf16": job["precision"] == "bf16",
        "gradient_checkpointing": job["checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not CUDA,
        "use_liger_kernel": CUDA and importlib.util.find_spec("liger_kernel") is not None,
    }


def adapter(job: dict[str, Any]) -> Any:
    """As the toolkit's defaults."""
    from peft import LoraConfig

    task = "SEQ_CLS" if job["objective"] in ("reward", "classification") else "CAUSAL_LM"
    dropout = job.get("lora_dropout", 0.0)
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=dropout, target_modules="all-linear", task_type=task)


def trl(job: dict[str, Any]) -> Trainer:
    """TRL's trainer of the objective; packed rows want FlashAttention, without it their documents see each other."""
    import trl
    from datasets import load_dataset

    objective = job["objective"]
    if objective in ("seq2seq", "classification"):
        raise SystemExit(f"error: trains no {objective}")
    model, tokenizer = load(job)
    rows = load_dataset("json", data_files=job["data"], split="train")
    given = arguments(job) | {"max_length": job["seq_len"]}
    if objective == "dpo":
        # What the untrained model says is computed before training, as the toolkit does it.
        kind, config = trl.DPOTrainer, trl.DPOConfig(**given, precompute_ref_log_probs=True)
    elif objective == "reward":
        kind, config = trl.RewardTrainer, trl.RewardConfig(**given)
    elif objective == "grpo":
        return grpo(job, model, tokenizer, rows)
    else:
        kind, config = trl.SFTTrainer, trl.SFTConfig(**given, packing=job["packing"], assistant_only_loss=False)
    adapters = None if job["method"] == "full" else adapter(job)
    return kind(model=model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)


def grpo(job: dict[str, Any], model: Any, tokenizer: Any, rows: Any) -> Trainer:
    """TRL's GRPOTrainer, of which batches are answers: all of a step's are generated at once, as by the toolkit."""
    import trl

    settings = dict(each.split("=") for each in job["settings"])
    answers, longest = (int(settings[f"rollout.{key}"]) for key in ("num_generations", "max_completion_tokens"))
    given = arguments(job) | {"per_device_train_batch_size": job["micro"] * answers}
    config = trl.GRPOConfig(**given, num_generations=answers, max_completion_length=longest)
    adapters = None if job["method"] == "full" else adapter(job)

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(answer[0]["content"])) for answer in completions]

    return trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=rows, processing_class=tokenizer,
        peft_config=adapters,
    )  # fmt: skip


def seq2seq_trainer(job: dict[str, Any]) -> Trainer:
    """Transformers' Seq2SeqTrainer as in its examples: both sides are padded."""
    from datasets import load_dataset
    from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

    model, tokenizer = load(job)
    length = job["seq_len"]
    rows = load_dataset("json", data_files=job["data"], split="train")

    def encode(batch: dict[str, list[Any]]) -> Any:
        return tokenizer(batch["prompt"], text_target=batch["completion"], max_length=length, truncation=True)

    rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
    given = Seq2SeqTrainingArguments(**arguments(job))
    collate = DataCollatorForSeq2Seq(tokenizer, model)
    return Seq2SeqTrainer(model=model, args=given, train_dataset=rows, data_collator=collate)


def trainer(job: dict[str, Any]) -> Trainer:
    """Transformers' Trainer as in its examples: texts run together and are cut into rows, or rows are padded."""
    from datasets import load_dataset
    from peft import get_peft_model, prepare_model_for_kbit_training
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, TrainingArguments

    if job["objective"] == "seq2seq":
        return seq2seq_trainer(job)
    if job["objective"] in ("dpo", "reward", "grpo"):
        raise SystemExit(f"error: trains no {job['objective']}")
    model, tokenizer = load(job)
    if job["method"] == "qlora":
        model = prepare_model_for_kbit_training(model, job["checkpointing"])
    if job["method"] != "full":
        model = get_peft_model(model, adapter(job))
        model.enable_input_require_grads()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    length, classes = job["seq_len"], job["objective"] == "classification"

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        texts = batch["text"] if "text" in batch else [
            tokenizer.apply_chat_template(each, tokenize=False) for each in batch["messages"]
        ]  # fmt: skip
        ids = tokenizer(texts)["input_ids"]
        if job["packing"]:
            joined = [token for each in ids for token in [*each, tokenizer.eos_token_id]]
            ids = [joined[start : start + length] for start in range(0, len(joined) - length + 1, length)]
        labels = {"label": [KINDS_OF_DOCSTRINGS.index(each) for each in batch["label"]]} if classes else {}
        return {"input_ids": [each[:length] for each in ids]} | labels

    rows = load_dataset("json", data_files=job["data"], split="train")
    rows = rows.map(encode, batched=True, remove_columns=rows.column_names)
    collate: Any = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if classes:
        model.config.pad_token_id = tokenizer.pad_token_id
        collate = DataCollatorWithPadding(tokenizer)
    return Trainer(model=model, args=TrainingArguments(**arguments(job)), train_dataset=rows, data_collator=collate)


def llamafactory(job: dict[str, Any], meter: Meter) -> None:
    """LLaMA-Factory by its own entry; of its package, which wants older libraries, in an environment of its own."""
    from llamafactory.train.tuner import run_exp

    if job["objective"] not in ("sft", "language_modelling"):
        raise SystemExit(f"error: not run with {job['objective']}")
    folder = Path(job["metrics"]).parent
    columns = {"prompt": "text"} if job["packing"] else {"messages": "messages"}
    rows: dict[str, Any] = {"file_name": job["data"], "columns": columns}
    if not job["packing"]:
        names = {"role": "role", "content": "content", "user": "user", "assistant": "assistant", "system": "system"}
        rows |= {"formatting": "sharegpt", "tags": {f"{name}_tag": value for name, value in names.items()}}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    adapters = {"lora_rank": 16, "lora_alpha": 32, "lora_target": "all"} if job["method"] != "full" else {}
    quantized = {"quantization_bit": 4, "quantization_method": "bnb"} if job["method"] == "qlora" else {}
    given = {key: value for key, value in arguments(job).items() if not key.startswith("gradient_checkpointing")}
    run_exp(
        given
        | {"stage": "pt" if job["packing"] else "sft", "do_train": True, "model_name_or_path": job["model"]}
        | {"finetuning_type": "full" if job["method"] == "full" else "lora", **adapters, **quantized}
        | {"dataset": "rows", "dataset_dir": str(folder), "template": "chatml", "cutoff_len": job["seq_len"]}
        | {"disable_gradient_checkpointing": not job["checkpointing"], "pure_bf16": job["precision"] == "pure_bf16"}
        | {"enable_liger_kernel": given.pop("use_liger_kernel"), "include_num_input_tokens_seen": "non_padding"},
        callbacks=[meter],
    )


if __name__ == "__main__":
    who, described = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    meter = Meter(Path(described["metrics"]))
    if who == "llamafactory":
        llamafactory(described, meter)
    else:
        run = {"trl": trl, "trainer": trainer}[who](described)
        if described["objective"] != "grpo":  # Which counts the tokens of answers itself.
            meter.collate = run.data_collator
            run.data_collator = meter
        run.add_callback(meter)
        run.train()
