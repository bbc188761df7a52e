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

FILE = Path(__file__).with_suffix(".yaml")
_UNITS = {"gib": 2**30, "gb": 10**9}


@dataclass(frozen=True)
class Row:
    """One published measurement beside its plan.

    Args:
        source: Key of the file.
        name: Where it stands in the source.
        memory: Planned and published bytes, if memory was published.
        rate: The same for tokens per second, with the ends of the planned range.
    """

    source: str
    name: str
    memory: tuple[float, float] | None
    rate: tuple[float, float] | None
    ends: tuple[float, float]

    @property
    def within(self) -> bool | None:
        """Whether the published rate lies in the planned range."""
        return None if self.rate is None else self.ends[0] <= self.rate[1] <= self.ends[1]


def rows(only: str = "") -> Iterator[Row]:
    """Plans the measurements of the sources whose name holds `only`."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, source in content["sources"].items():
        if only.lower() not in name.lower():
            continue
        for title, words, memory, rate in source["rows"]:
            plan = planned(source, words, content["models"])
            speed, step = plan.work.tokens_per_second, plan.work.step_seconds
            peak = plan.memory[0]
            held = peak.allocated if source["measured"] == "allocated" else peak.reserved.value
            vocabulary = content["models"].get(source["model"], {}).get("vocab_size", 0)
            held += source.get("logit_bytes", 0) * vocabulary * plan.seq_len * plan.micro_batch_size
            yield Row(
                name,
                title,
                (held, memory * _UNITS[source["unit"]]) if memory else None,
                (speed, float(rate)) if rate else None,
                (speed * step.value / step.high, speed * step.value / step.low),
            )


def planned(source: Mapping[str, Any], words: Sequence[str | int], models: Mapping[str, Any]) -> Plan:
    """The plan of a row: the source's settings, then those that the row names; a number is the micro-batch."""
    settings: dict[str, Any] = {"model.path": source["model"], "hardware": source["hardware"], "compile": "off"}
    chosen = [[f"batch.micro_batch_size={word}"] if isinstance(word, int) else source["also"][word] for word in words]
    for text in [*source["set"], *(text for group in chosen for text in group)]:
        key, _, value = text.partition("=")
        settings[key] = yaml.safe_load(value)
    hardware = find(settings.pop("hardware"))
    settings.setdefault("batch.global_batch_size", settings["batch.micro_batch_size"] * hardware.devices)
    base = Recipe.model_validate({"model": {"path": settings["model.path"]}, "data": {"sources": ["published"]}})
    recipe = base.with_values({"objective": "language_modelling", **settings})
    return estimate(recipe, "published", hardware, advice=False, config=models.get(settings["model.path"]))


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
    if options.rows:
        for each in found:
            memory = f"{each.memory[0] / 1e9:7.1f} {each.memory[1] / 1e9:7.1f} GB" if each.memory else " " * 18
            rate = f"{each.rate[0]:8.0f} {each.rate[1]:8.0f} tokens/s" if each.rate else ""
            print(f"{each.source:<27} {each.name:<26} {memory}  {rate}")
        print()
    print(f"{'':<27} rows  memory: median, worst   tokens/s: median, worst   in the range")
    for name in [*dict.fromkeys(each.source for each in found), ""]:
        group = [each for each in found if name in ("", each.source)]
        inside = [each.within for each in group if each.within is not None]
        memory = _off([each.memory for each in group if each.memory])
        rate = _off([each.rate for each in group if each.rate])
        print(f"{name or 'all':<27} {len(group):>4} {memory:>24} {rate:>25} {sum(inside):>7} of {len(inside)}")


if __name__ == "__main__":
    main()
