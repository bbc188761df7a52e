"""What preparing rows costs: tokens a processor second beside `Dataset.map`, and memory as rows grow.

`python benchmarks/data_path.py`: some minutes on any machine, without a network. The rows are the chats of the demo,
over and over with a number in each. `Dataset.map` applies the same chat template with marks of what the assistant says,
for which the template gets `{% generation %}`, and TRL packs, as its trainer does; the toolkit reads, checks, audits,
tokenises, marks by the template as it is, and packs. Both in processor time of processes of their own, without caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RECIPE = "smollm2_135m_lora_demo"
MANY = 10_000_000
"""Rows whose preparation must fit in `LIMIT` bytes."""
LIMIT = 2 * 2**30
MARKED = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}\
{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"""
"""The template of the demo's model with marks."""


def write_rows(file: Path, count: int, short: bool) -> None:
    """Chats as JSON lines: those of the demo, or of a few words each."""
    from toolkit.data.reading.builtin import docstring_rows

    rows = list(docstring_rows())
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            question, answer = ({**turn} for turn in rows[number % len(rows)]["messages"][-2:])
            if short:
                question["content"], answer["content"] = "And?", "Yes."
            question["content"] = f"{number}: {question['content']}"
            out.write(json.dumps({"messages": [question, answer]}) + "\n")


def toolkit(rows: str) -> int:
    """Prepares the rows as a run of the demo would, packed; returns how many tokens they have."""
    from toolkit.data.prepare import prepare
    from toolkit.models.load import ModelSource
    from toolkit.recipe.rules import load_checked

    recipe = load_checked(
        RECIPE, [f"data.sources=[{rows}]", "data.packing=true", "data.eval_split=null", "data.num_proc=1"]
    ).recipe
    source = ModelSource.open(recipe)
    tokenizer = source.tokenizer()
    audit = prepare(source.recipe, tokenizer, source.stop_tokens(tokenizer)).audit
    return sum(part.tokens for part in (audit.train, audit.eval) if part)


def datasets_map(rows: str) -> int:
    """The same rows by `Dataset.map` and TRL's packing; returns how many tokens they have."""
    from datasets import disable_progress_bars, load_dataset
    from trl import pack_dataset

    from toolkit.models.load import ModelSource
    from toolkit.recipe.rules import load_checked

    disable_progress_bars()
    recipe = load_checked(RECIPE).recipe
    tokenizer = ModelSource.open(recipe).tokenizer()

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        settings = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": MARKED}
        made = tokenizer.apply_chat_template(row["messages"], **settings)
        return {name: made[name] for name in ("input_ids", "assistant_masks")}

    table = load_dataset("json", data_files=rows, split="train")
    mapped = table.map(encode, remove_columns=table.column_names)
    return sum(map(len, pack_dataset(mapped, recipe.batch.seq_len, "bfd")["input_ids"]))


WHO: dict[str, Callable[[str], int]] = {"toolkit": toolkit, "Dataset.map": datasets_map}


def measured(who: str, rows: Path) -> dict[str, float]:
    """Processor seconds, bytes at the peak and tokens of one contestant, without what its imports take."""
    with tempfile.TemporaryDirectory() as cache:
        places = {"TOOLKIT_CACHE": cache, "HF_HOME": cache, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        line = [sys.executable, __file__, "--as", who, str(rows)]
        done = subprocess.run(line, env=os.environ | places, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{who}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def contest(who: str, rows: str) -> None:
    """Prints the figures of one contestant, after a warm-up with a few rows."""
    WHO[who](str(Path(rows).with_suffix(".few.jsonl")))
    # As the toolkit's own commands do with what imports leave.
    gc.collect()
    gc.freeze()
    begun, began = time.process_time(), time.monotonic()
    tokens = WHO[who](rows)
    figures = {"tokens": tokens, "processor": time.process_time() - begun, "seconds": time.monotonic() - began}
    print(json.dumps(figures | {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def main() -> int:
    """Prints both figures. Returns 1 if one of them misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, metavar="N", help="of the first contest (20,000)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument("--as", dest="who", choices=WHO, help=argparse.SUPPRESS)
    parser.add_argument("file", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who:
        contest(options.who, options.file)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return report(Path(folder), options.rows, options.repeat)


def report(folder: Path, count: int, repeat: int) -> int:
    """See `main`."""
    file = folder / "rows.jsonl"
    write_rows(folder / "rows.few.jsonl", 100, short=False)
    write_rows(file, count, short=False)
    rates: dict[str, list[float]] = {who: [] for who in WHO}
    for _ in range(repeat):
        for who in WHO:
            each = measured(who, file)
            rates[who].append(each["tokens"] / each["processor"])
    for who, each in rates.items():
        spread = f"{min(each):,.0f} to {max(each):,.0f}"
        print(f"{who:12} {statistics.median(each):>9,.0f} tokens a processor second ({spread})")
    share = statistics.median(rates["toolkit"]) / statistics.median(rates["Dataset.map"])
    print(f"the toolkit's share: {share:.2f}, goal 1")

    points = []
    for rows in (50_000, 200_000):
        short = folder / f"{rows}.jsonl"
        write_rows(short.with_suffix(".few.jsonl"), 100, short=True)
        write_rows(short, rows, short=True)
        points.append((rows, measured("toolkit", short)["bytes"]))
        short.unlink()
        print(f"{rows:>10,} short rows: {points[-1][1] / 2**30:.2f} GiB at the peak")
    (few, little), (many, much) = points
    each = (much - little) / (many - few)
    whole = little + each * (MANY - few)
    print(f"{MANY:>10,} rows, {each:.0f} bytes each: {whole / 2**30:.2f} GiB, goal {LIMIT / 2**30:.0f}")
    return 0 if share >= 1 and whole <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
