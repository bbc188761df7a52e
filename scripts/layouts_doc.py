"""Writes the table of layouts in `docs/plan.md`: the fastest on clusters of several sizes, for three models.

`python scripts/layouts_doc.py` writes it. Each way to divide each model is traced once, which takes about 20 minutes;
afterwards seconds.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from toolkit.common import compact
from toolkit.planner.build import estimate_layouts
from toolkit.planner.hardware import find
from toolkit.planner.plan import Plan
from toolkit.recipe.rules import load_checked
from toolkit.report.plan_view import bound

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan.md"
BEGIN, END = "<!-- layouts: scripts/layouts_doc.py -->\n", "<!-- end of layouts -->\n"
MODELS = {
    "Llama 3.1 8B": ("llama_3_1_8b_full_8bit", "optimizer=adamw"),
    "Llama 3.1 70B": ("llama_3_1_70b_full_tp_fsdp", "parallel.tensor=1"),
    "Qwen3 30B-A3B": ("qwen3_30b_a3b_full_expert", "parallel.expert=1"),
}
"""Recipes that train all parameters, and what they say otherwise."""
COMMON = ("strategy=auto", "activation_checkpointing=auto", "micro_batch_size=auto", "learning_rate=1e-5")
BATCH = ("batch.global_batch_size=512", "batch.seq_len=8192", "data.packing=true")
CLUSTERS = ("h200x8", "h200x8x8", "h200x8x64")
_HEADS = (
    "model",
    "GPUs",
    "fastest that fits",
    "tokens/s",
    "of a GPU",
    "bound by",
    "GPU-hours per 10⁹ tokens",
    "undivided",
)


def plans(model: str, cluster: str) -> list[Plan]:
    """Every way to divide a model over a cluster, the fastest first."""
    name, changes = MODELS[model]
    loaded = load_checked(name, [changes, *COMMON, *BATCH])
    return estimate_layouts(loaded.recipe, loaded.name, find(cluster))


def row(model: str, found: list[Plan]) -> list[str]:
    """Of the fastest; of what divides nothing the last column says how fast it is, or what it lacks."""
    best = found[0]
    speed = best.work.tokens_per_second
    plain = next(each for each in found if each.sequence * each.tensor * each.expert * each.pipeline == 1)
    share = f"{plain.work.tokens_per_second / speed:.0%}" if plain.fit.answer != "no" else "does not fit"
    hours = 1e9 / speed * best.devices / 3600
    each = compact(speed / best.devices)
    return [model, str(best.devices), _layout(best), compact(speed), each, bound(best), f"{hours:,.0f}", share]


def _layout(plan: Plan) -> str:
    typed = dict(each.split("=", 1) for each in plan.overrides)
    ways = [f"`{key.partition('.')[2]}={value}`" for key, value in typed.items() if key.startswith("parallel.")]
    mode, every = typed.get("activation_checkpointing.mode"), typed.get("activation_checkpointing.every_n_layers", "1")
    recomputed = "nothing recomputed" if mode == "none" else f"`{mode}`" + (f" every {every}" if every != "1" else "")
    return ", ".join([f"`{plan.strategy}`", *ways, recomputed, f"micro-batch {plan.micro_batch_size}"])


def main() -> int:
    """Writes the table; prints each row as it is planned."""
    rows = []
    for model in MODELS:
        for cluster in CLUSTERS:
            rows.append(row(model, plans(model, cluster)))
            print(" | ".join(rows[-1]), flush=True)
    lines = [_HEADS, ["---"] * len(_HEADS), *rows]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    PAGE.write_text(re.sub(pattern, BEGIN + "\n" + table + "\n" + END, text, flags=re.DOTALL), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
