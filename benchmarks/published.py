"""Planned against published: plans each measurement of `published.yaml`, and prints how far off the plan is, by source.

`python benchmarks/published.py` needs no GPU, weights or network; a model that was never planned before takes some
seconds. `--rows` prints every row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from toolkit.planner.build import estimate  # noqa: E402
from toolkit.planner.hardware import find  # noqa: E402
from toolkit.planner.plan import Plan  # noqa: E402
from toolkit.recipe import Recipe  # noqa: E402
from toolkit.recipe.model_configs import bundled  # noqa: E402

FILE = Path(__file__).with_suffix(".yaml")
_UNITS = {"gib": 2**30, "gb": 10**9}


@dataclass(frozen=True)
class Row:
    """One published measurement beside its plan.

    Args:
        source: Key of the file.
        name: Where it stands in the source.
        memory: Planned and published bytes, if memory was published.
        rate: The same for tokens per second.
        ends: Of the planned range of the rate.
        devices: How many worked.
    """

    source: str
    name: str
    devices: int
    memory: tuple[float, float] | None
    rate: tuple[float, float] | None
    ends: tuple[float, float]

    @property
    def within(self) -> bool | None:
        """Whether the published rate lies in the planned range."""
        return None if self.rate is None else self.ends[0] <= self.rate[1] <= self.ends[1]

    @property
    def width(self) -> float:
        """Of the planned range, as a share of the planned rate."""
        return (self.ends[1] - self.ends[0]) / self.rate[0] if self.rate else 0.0


def rows(only: str = "") -> Iterator[Row]:
    """Plans the measurements of the sources whose name holds `only`."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, source in content["sources"].items():
        if only.lower() not in name.lower():
            continue
        for title, words, memory, rate in source["rows"]:
            plan, shape = planned(source, words, content["models"])
            speed, step = plan.work.tokens_per_second, plan.work.step_seconds
            yield Row(
                name,
                title,
                plan.devices,
                (held(source, plan, shape), memory * _UNITS[source["unit"]]) if memory else None,
                (speed, float(rate)) if rate else None,
                (speed * step.value / step.high, speed * step.value / step.low),
            )


def planned(
    source: Mapping[str, Any], words: Sequence[Any], models: Mapping[str, Any]
) -> tuple[Plan, Mapping[str, Any]]:
    """The plan of a row and its model's config: the source's settings, then those that the row names.

    A number is the micro-batch, and two are the micro-batch and how many of them a step has.
    """
    settings: dict[str, Any] = {"model.path": source["model"], "hardware": source["hardware"], "compile": "off"}
    named = [text for word in words if isinstance(word, str) for text in source["also"][word]]
    for text in [*source["set"], *named]:
        key, _, value = text.partition("=")
        settings[key] = yaml.safe_load(value)
    hardware = find(settings.pop("hardware"), FILE.parent)
    (batch,) = (word for word in words if not isinstance(word, str))
    micro_batch, passes = batch if isinstance(batch, list) else (batch, 1)
    settings["batch.micro_batch_size"] = micro_batch
    settings.setdefault("batch.global_batch_size", micro_batch * passes * hardware.devices)
    path = settings["model.path"]
    base = Recipe.model_validate({"model": {"path": path}, "data": {"sources": ["published"]}})
    recipe = base.with_values({"objective": "language_modelling", **settings})
    plan = estimate(recipe, "published", hardware, advice=False, config=models.get(path))
    return plan, models[path] if path in models else bundled()[path].config


def held(source: Mapping[str, Any], plan: Plan, shape: Mapping[str, Any]) -> float:
    """The planned bytes, where the measured program held more: what it held.

    A loss that is not fused holds all logits at the end of the forward pass, when no layer is being recomputed. FSDP1
    keeps its root unit, embeddings and head, gathered from the first layer to the last, beside one layer. Of a unit
    that is not trained it keeps the gradient of its input until the backward pass is over: the hook that frees the unit
    (`_register_post_backward_reshard_only_hook`) holds the node of that input, which reentrant checkpointing makes a
    leaf. Two of these are there anyhow.
    """
    peak, tokens = plan.memory[0], plan.seq_len * plan.micro_batch_size
    phases = {phase: float(sum(parts.values())) for phase, parts in peak.phases.items()}
    logits = source.get("logit_bytes", 0) * shape["vocab_size"] * tokens
    frozen = peak.phases["backward"].get("adapters", 0) > 0
    if source.get("engine") == "fsdp1" and plan.strategy == "fsdp" and frozen:
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        root = 2 * hidden * shape["vocab_size"] * (1 if shape["tie_word_embeddings"] else 2)
        # As many bytes as the layers have on all devices together.
        unit = (peak.phases["load"]["parameters"] * plan.devices - root) / layers
        for phase in ("forward", "backward"):
            phases[phase] += root + unit - peak.phases[phase].get("engine", 0)
        phases["backward"] += (layers - 2) * 2 * hidden * tokens
    phases["forward"] += logits
    share = 1.0 if source["measured"] == "allocated" else peak.reserved.value / peak.allocated
    return share * max(phases.values())


def _off(pairs: Sequence[tuple[float, float]]) -> str:
    if not pairs:
        return f"{'':>7} {'':>7}"
    errors = [ours / theirs - 1 for ours, theirs in pairs]
    return f"{statistics.median(map(abs, errors)):>7.1%} {max(errors, key=abs):>+7.1%}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="sources whose name holds this")
    parser.add_argument("--rows", action="store_true", help="every row, too")
    options = parser.parse_args()
    found = list(rows(options.only))
    if not found:
        names = yaml.safe_load(FILE.read_text(encoding="utf-8"))["sources"]
        parser.error(f"--only {options.only}: no source's name holds this; there are: {', '.join(names)}")
    if options.rows:
        for each in found:
            memory = f"{each.memory[0] / 1e9:7.1f} {each.memory[1] / 1e9:7.1f} GB" if each.memory else " " * 18
            rate = f"{each.rate[0]:8.0f} {each.rate[1]:8.0f} tokens/s" if each.rate else ""
            print(f"{each.source:<27} {each.name:<26} {memory}  {rate}")
        print()
    print(f"{'':<27} rows  memory: median, worst   tokens/s: median, worst   in the range    width")
    for name in dict.fromkeys(each.source for each in found):
        _print(name, [each for each in found if each.source == name])
    for name, low, high in (("one device", 1, 1), ("2 to 4", 2, 4), ("8", 8, 8), ("more", 9, 10**6), ("all", 1, 10**6)):
        _print(name, [each for each in found if low <= each.devices <= high])


def _print(name: str, group: Sequence[Row]) -> None:
    timed = [each for each in group if each.rate]
    memory = _off([each.memory for each in group if each.memory])
    rate = _off([each.rate for each in timed if each.rate])
    inside = f"{sum(bool(each.within) for each in timed)} of {len(timed)}"
    width = f"{statistics.median(each.width for each in timed):.0%}" if timed else ""
    print(f"{name:<27} {len(group):>4} {memory:>24} {rate:>25} {inside:>14} {width:>8}")


if __name__ == "__main__":
    main()
