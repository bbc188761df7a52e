"""A finished run's folder with something in every file, for tests of what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages import eval_line, step_line, write_metrics

MANIFEST: dict[str, Any] = {
    "name": "demo <b>run</b>",
    "command": "accelerate launch toolkit/run.py recipe=demo data.sources='[\"<i>.jsonl\"]'",
    "started": "2025-01-31T10:00:00+00:00",
    "finished": "2025-01-31T10:04:28+00:00",
    "status": "finished",
    "versions": {"torch": "2.13.0"},
    "git": {"commit": "0123abc", "dirty": True},
    "hardware": {"device": "cpu", "cpu": "x86_64", "cpu_cores": 2, "ram_bytes": 16 * 2**30, "gpus": []},
    "batch": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "world_size": 1,
        "sequence": 1,
        "context": 1,
        "tensor": 1,
        "expert": 1,
        "pipeline": 1,
        "answers": 1,
        "seq_len": 512,
        "tokens_per_step": 4096,
    },
    "parameters": {"total": 139_400_000, "trainable": 4_884_480},
    "total_steps": 100,
    "start_up": {"imports": 5.1, "data": 0.5, "plan": 0.1, "model": 1.5, "evaluation": 6.3, "first_step": 2.0},
    "train_seconds": 268.4,
}
_SIDE = {
    "rows": 3084,
    "tokens": 301_234,
    "trained_tokens": 201_234,
    "untrained_rows": 4,
    "first_untrained": "rows.jsonl:7",
    "prompt_lost_rows": 0,
    "pairs": None,
    "verdicts": None,
    "prompts": None,
    "classes": None,
    "texts": None,
    "over_long": {"rows": 3, "action": "drop", "seq_len": 512},
    "longest": "rows.jsonl:17",
    "stop_trained_rows": 3084,
    "boundary_merged_rows": 0,
    "lengths": {"percentiles": {"p50": 96}, "histogram": [{"from": 64, "to": 127, "rows": 1520}]},
}
AUDIT: dict[str, Any] = {
    "objective": "sft",
    "classes": [],
    "scope": "",
    "sources": [
        {
            "path": "rows.jsonl",
            "split": "train",
            "format": "chat",
            "classes": [],
            "rows": 3246,
            "empty_rows": 1,
            "first_empty": "rows.jsonl:7",
            "set_aside": [],
            "unused_columns": ["<u>kind</u>"],
            "verdicts": {},
            "worse": {},
            "placeholders": 0,
            "empty_turns": 0,
            "missing_values": 0,
            "unused_fields": ["<i>id</i>"],
            "ignored": {"images": True},
            "role": "train",
            "used_rows": 3084,
            "repeats": 1.0,
            "share": 1.0,
        }
    ],
    "train": _SIDE,
    "eval": {**_SIDE, "rows": 64},
    "deduplicate": False,
    "duplicates": 41,
    "in_train_and_eval": 0,
    "chat_template": {"source": "the tokenizer's", "needed": True, "given": False, "stops": []},
    "kinds": ["Chat"],
    "packing": None,
    "problems": [
        {"level": "fatal", "what": "no <em>row</em>", "change": "set `data.columns`"},
        {"level": "warning", "what": "41 rows repeat", "change": "set `data.deduplicate: true`"},
    ],
}
SAMPLES: list[dict[str, Any]] = [
    {
        "prompt": "<script>alert(1)</script>",
        "input_ids": [1],
        "reference": "R & D",
        "before": "",
        "after": "</p><img src=x onerror=1>",
    }
]


_FIGURE = {"value": 0.5, "low": 0.25, "high": 0.75}
ASKED: dict[str, Any] = {
    "held_out": {
        "rows": 64,
        "held_out": 64,
        "data": "0123",
        "batch_size": 8,
        "max_new_tokens": 64,
        "cut": [3, 0],
        "scores": [
            {"name": "exact <i>match</i>", "before": _FIGURE, "after": _FIGURE, "change": _FIGURE},
        ],
    },
    "tasks": [
        {
            "name": "<b>gsm8k",
            "samples": 20,
            "of_samples": 1319,
            "num_fewshot": 5,
            "chat_template": True,
            "scores": [{"name": "exact_match", "after": _FIGURE}],
        }
    ],
}


ROWS: dict[str, Any] = {
    "measured": "0123",
    "joined": 1,
    "counts": [40.0, 60.0],
    "sums": {"0": [160.0, 236.0], "100": [110.0, 164.0]},
}


def example_run(folder: Path, **manifest: Any) -> Path:
    """Writes a run folder; `manifest` replaces keys of its manifest."""
    write_metrics(folder, eval_line(0, 3.96), *(step_line(step) for step in range(1, 101)), eval_line(100, 2.74))
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | manifest))
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    (folder / "samples.json").write_text(json.dumps(SAMPLES))
    (folder / "evaluation.json").write_text(json.dumps(ASKED))
    (folder / "held_out_rows.json").write_text(json.dumps(ROWS))
    (folder / "recipe.yaml").write_text("model:\n  path: ${oc.env:BASE}  # <s>\ndata:\n- split: train\n")
    return folder
