"""Writes `docs/strategies.md`: what goes with what, from the rules and the engines' settings themselves.

`python scripts/strategies_doc.py` writes it, `--check` fails when it is stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from toolkit.distributed.engines import dtypes
from toolkit.recipe import Recipe, shipped_recipes
from toolkit.recipe.errors import as_text
from toolkit.recipe.files import locate, options
from toolkit.recipe.optimizers import OPTIMIZERS
from toolkit.recipe.rules import RULES
from toolkit.recipe.rules.expert import EXPERT_RULES
from toolkit.recipe.rules.parallel import PARALLEL_RULES
from toolkit.recipe.rules.strategy import KEYS, STRATEGY_RULES
from toolkit.recipe.sections import Strategy

PAGE = Path(__file__).resolve().parent.parent / "docs" / "strategies.md"

_TIED = {"tie_word_embeddings": True}
"""The part of a model's config that these rules read: the harder case."""
_LORA = {"name": "lora"}
_METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, some frozen": {"freeze": ["*.embed_tokens.*"]},
    "LoRA": _LORA,
    "DoRA": {**_LORA, "use_dora": True},
    "LoRA and tied embeddings": {**_LORA, "modules_to_save": ["lm_head"]},
    "QLoRA (nf4)": {**_LORA, "quantization": "nf4"},
    "QDoRA (nf4)": {**_LORA, "quantization": "nf4", "use_dora": True},
    "LoRA on int8": {**_LORA, "quantization": "int8"},
    "LoRA on fp8": {**_LORA, "quantization": "fp8"},
    "LoRA on int4": {**_LORA, "quantization": "int4"},
}
_PRECISIONS = ("fp32", "fp16", "bf16", "pure_bf16")
_CHECKPOINTING = ("elementwise", "full", "selective", "offload")
_EITHER = {"{r.in_bf16}": "bf16 or pure_bf16", "{with_masters}": "bf16 or fp8"}
"""Figures of rules that are one of two, by whether there are fp32 masters or products in fp8."""
_ENGINES = {"`single`, `ddp`": "ddp", "`zero1`, `zero2`, `zero3`": "zero2", "`fsdp`": "fsdp"}

_INTRODUCTION = """\
# Strategies

`strategy` in a recipe says how training is spread over devices. The recipe owns it: `accelerate launch` only starts the
processes. Losses do not depend on it, so choose by memory and speed:

| when | take |
| --- | --- |
| you want it chosen | `auto`: the fastest that fits these devices, by the [plan](plan.md); the manifest says why |
| model, gradients and optimizer state fit on one device | `ddp` (also on one device); adapters nearly always do |
| they nearly fit | `zero1`, then `zero2`: the same traffic as `ddp`, less held twice |
| they do not | `fsdp` or `zero3`: each layer is gathered when it is computed with |
| several machines with slow links between them | `fsdp_hybrid`: shards in the node, replicas across nodes |
| too few devices for any of these | `zero2_offload`, `zero3_offload`, `fsdp_offload`: host memory, over PCIe |
| host memory is not enough either | `zero3_nvme` |

`strategy=zero3_offload` on the command line takes that file of `recipes/strategy/`; `strategy.name=zero3` changes the
one key.

## Memory

Bytes that a device holds per trained parameter between two steps, for `precision: bf16`, AdamW and N processes.
Activations, buckets and the layers that are gathered at the moment come on top:
[plan](plan.md).

| strategy | weights | gradients | masters and moments |
| --- | --- | --- | --- |
| `ddp` | (they are the masters) | 4 | 12 |
| `zero1` | 2 | 4 | 12 / N |
| `zero2` | 2 | 4 / N | 12 / N |
| `zero3` | 2 / N | 4 / N | 12 / N |
| `fsdp` | (they are the masters) | 4 / N | 12 / N |

Offloading moves the last column to the host (ZeRO: the gradients it waits for too), `offload_param` the weights; FSDP
moves all of its row. A frozen base costs its weights alone: 2 bytes per parameter, 1 with int8 and fp8, about 0.5 with
nf4 and int4; `zero3` and `fsdp` divide them by N, but with a quantized base every process reads the whole before it
keeps its part.

## Long rows

Where the activations of one row do not fit, `parallel.sequence=N` has N devices share each row, under every strategy:

```sh
toolkit plan recipe=llama_3_1_8b_128k_lora hardware=h100x8
```

Each computes a part of the tokens. For attention they exchange parts of rows for attention heads and back (Ulysses,
Jacobs et al. 2023), so N must divide the model's heads, and the backend must take boundaries of documents, which
`model.attention=auto` then sees to. With `parallel.context=N` instead, each keeps the queries of its tokens and gathers
the keys and values of the whole row (Llama Team 2024, arXiv:2407.21783, section 3.3.2), in the backward pass once more,
so that no layer keeps them. N need not divide the heads. Each has a piece from the front of the row and one as far from
its end, so that all attend to equally many keys. With h heads and k of keys, gathering sends less than exchanging
where 3kN < 2(h + k), and where kN < h + k if layers are recomputed; in one run it is one of the two. The keys and
values of the whole row, and their gradients, are there for one layer at a time, and grow with N; the plan counts them.
Where nothing fits, `toolkit plan` names the smallest N that does, with `parallel.sequence` where it divides the heads.

What is largest then is inside the MLPs, which are several times as wide as what enters them.
`activation_checkpointing.mlp_tiles=8` computes a layer's MLP in eight tiles of a row's tokens, one after the other, and
each once more in the backward pass (tiled MLP, Bekman et al. 2025, arXiv:2506.13996), with or without shared rows.
`activation_checkpointing=auto` tries it for rows from 32,768 tokens on where nothing faster fits: by the plan one GPU
of 48 GB then trains LoRA on rows of 131,072 tokens of an 8B, which without it takes more than it has.

Either way activations, logits and batches of a device are an Nth; what `strategy` divides is
divided over all devices as before, because to the engine parts of rows are rows like any others. Losses stay those of
one process, packed or not. Neighbouring ranks share rows, so that with N up to the devices of a node the exchange stays
within it. The balance loss of a mixture's routers is that of whole rows. Before the first step the model is asked
whether parts get the logits of the whole row, so that a model whose layers look beyond their tokens elsewhere than in
attention does not train.

## Layers that several devices divide

Where the weights of a layer do not fit, or a step must not wait for gathering them, `parallel.tensor=N` has N devices
divide each layer (tensor parallelism, Shoeybi et al. 2019), under `strategy.name=ddp`, `zero1`, `zero2`
and `fsdp`:

```sh
toolkit plan recipe=llama_3_1_8b_lora hardware=h100x8 strategy.name=ddp parallel.tensor=4
```

Each has a part of the attention heads and of the inner width of the MLPs, with their weights, adapters, gradients and
optimizer state, and of embeddings and output head a part of the vocabulary, where N divides it and no adapter trains
them; norms are whole on all. They read the same rows, and sum hidden states twice in each direction of a layer, which
nothing hides: neighbouring ranks divide, so that with N up to the devices of a node the sums stay within it. Logits are
not gathered for the loss: of each token the largest, the sum of exponentials and the label's are reduced. What is left
of the devices is data-parallel: `fsdp` shards each part over those that have the same one, ZeRO-1 and 2 divide its
gradients and optimizer state over them; with `parallel.sequence` or `parallel.context` groups of them share rows
besides. Layers are divided as Transformers' own plan for the architecture says, on every engine alike; DeepSpeed's own
way (AutoTP), which knows no adapters of PEFT, is not used. N must divide the heads of keys and values, all heads and
the inner width; architectures whose plan needs more than columns and rows (mixtures of experts) are refused, and so is
what has not been tried with it: ZeRO-3, of which `fsdp` does the same, parameters that are offloaded, quantization,
streams, compiled layers, and under `fsdp` projections that are several in one (Phi-3, GLM), of which each process has a
part of every one of the several. Losses stay those of one process. Final
models and adapters are plain files as ever, and any number of processes and any strategy goes on from a checkpoint.
Every process reads the whole model into host memory before it keeps its part.

## Layers that follow each other on several devices

Where links are slow, or a model does not fit however it is divided, `parallel.pipeline=N` spreads the layers over N
devices, one run of them after the other (pipeline parallelism, Huang et al. 2019), under `strategy.name=ddp`:

```sh
toolkit plan recipe=llama_3_1_70b_pipeline hardware=h100x8x2
```

The micro-batches of a step are those of the pipeline: hidden states go from stage to stage and their gradients back,
and nothing else is sent but sums of gradients when the pipeline has run empty. What is left of the devices is
data-parallel. Devices that have the same stage are of neighbouring ranks: of 2 nodes of 8 GPUs and `pipeline: 2`, ranks
0 to 7 have the first half of the layers, 8 to 15 the second, rank 0 hands on to rank 8, and gradients are averaged
within nodes. Stages are cut so that the slowest takes as little as can be by the plan's times, with embeddings and
output head counted; the plan shows them, the memory of each process and the bubble, the share of a step in which
devices wait for the pipeline to fill and to run empty: (N - 1) / (m + N - 1) of m micro-batches for GPipe and 1F1B. So
it wants many micro-batches, and a small `batch.micro_batch_size`.

| `parallel.schedule` | torch's | stages of a device | waits, of what N - 1 micro-batches take | micro-batches held |
| --- | --- | --- | --- | --- |
| `gpipe` | `ScheduleGPipe` | 1 | all | all |
| `1f1b` | `Schedule1F1B` | 1 | all | as many as devices from this one on |
| `interleaved_1f1b` | `ScheduleInterleaved1F1B` | 2 | half | up to 1.5 times as many |
| `zero_bubble` | `ScheduleZBVZeroBubble` | 2 | a sixth in full fine-tuning; a half with adapters | as many as devices |

All train alike, on torch's `torch.distributed.pipelining`. `interleaved_1f1b` takes micro-batches in equal rounds of at
least N; with fewer than N micro-batches `1f1b` runs as `gpipe`, which it would be. `zero_bubble` leaves gradients of
weights for later, so adapters, which have next to none, gain little by it. Each process keeps the embeddings, layers,
final norm and output head of its own stages; what others have is left out as the files are read. Micro-batches have
lengths of their own, packed or padded; every process reads the rows of its pipeline, so labels, positions and
boundaries of documents need not be sent. Embeddings that are the output head too lie on the first and the last process,
which add up their gradients. In 16 bits over fp32 weights, micro-batches share one 16-bit copy of each weight, unless
layers are computed again. Of mixtures the scores of all routers go along to the last stage, where their balance is
computed. The model's own forward computes a stage, given hidden states instead of tokens: it is asked whether it leaves
these as they are without layers, and an architecture that does not (Granite) or has more beside its layers than
embeddings and a norm (GPT-2) is refused.

Losses stay those of one process; with dropout they are as good, with other masks. Final models and adapters are plain
files, checkpoints are whole, and any number of processes and any strategy goes on from them. What has not been tried
with it is refused: other strategies, `parallel.sequence`, `context`, `tensor` and `expert`, quantization, streams,
and compiled layers.

## Experts that several devices divide

Most of a mixture are its experts, of which each token meets a few. `parallel.expert=N` has N devices divide them
(expert parallelism, Lepikhin et al. 2020), under `strategy.name=ddp`:

```sh
toolkit plan recipe=qwen3_30b_a3b_full_expert hardware=h200x8
```

Each has an Nth of the experts of every layer, with their weights, adapters, gradients and optimizer state; the rest is
whole on all, and averaged as ever. Every device reads rows of its own. In each layer with experts it sends a token to
the devices that have experts for it, once to each, with the weights that the router gave these experts; there their
results are added up, and one row comes back. Between N devices, of whose E experts a token meets k, that is
(N - 1)(1 - C(E - E/N, k) / C(E, k)) rows each way if all are chosen equally often: 4.7 for 128 experts on 8 devices of
which a token meets 8. A copy for each expert, as Transformers' own exchange sends it, would be 7; what FSDP gathers
instead, all weights of a layer, depends on no token. Nothing hides the exchange, and the host waits once in a layer for
how many rows will come: neighbouring ranks divide, so that with N up to the devices of a node it stays within it.

The experts are divided as Transformers' own plan for the architecture says; they compute all their tokens in grouped
products, as without it. No expert has a capacity, so no token is dropped. What the devices of a group have to do
differs with the routing: `metrics.jsonl` says how evenly tokens were spread, for every mixture (`expert_load`, how many
times the mean of a layer its fullest expert got, on average over the layers, and `expert_load_worst`; `idle_experts`,
the share that got none; `process_load`, as the first, of devices), and the plan takes them to be spread evenly. The
balance loss is that of each micro-batch, as without it.

N must divide the experts. Losses stay those of one process that takes micro-batches of the same size. Final models and
adapters are plain files as ever, and checkpoints are whole: any number of processes and any strategy goes on from them.
It goes together with `parallel.sequence` and `parallel.context`. Every process reads the whole model into host memory
before it keeps its part.

## NVMe

`offload_optimizer: nvme` and `offload_param: nvme` write to `strategy.nvme_path`, a folder on a local drive, through
DeepSpeed's `async_io`. It is compiled at first use and needs libaio's headers and a compiler:

```
apt install libaio-dev g++
```

Before training, the run checks that the folder can be written, that the drive has room for this node's share, and that
`async_io` is built. Each process has a folder of its own below it; the launch's folder is removed at the end.

## What goes with what

Everything below is made from the rules that `toolkit validate` applies, by trying each combination. A cell that does
not say yes names the rules that refuse it. Each rule has a test that runs what it refuses and shows the failure, or a
reference where that needs other hardware.
"""
_NUMERICS = """\
## What is held in which type

The same on every engine, which differ by default: DeepSpeed would upcast or round, FSDP follow the weights as they were
read. *Loaded* is how weights are read, for adapters the frozen base; *local* how trained parameters lie in the model
between steps; *reduced* in what gradients are summed over micro-batches and processes (without an engine: in the type
of the parameters); *masters* what the optimizer updates, and AdamW's moments with them. 8-bit and 4-bit optimizers
round their moments: under ZeRO in blocks of the flattened parameters, elsewhere in blocks of each parameter, so that
their losses agree to about 0.1 %, not exactly. Under ZeRO fp32 masters start from weights rounded to the compute
precision.
"""


def strategies_markdown() -> str:
    """The whole document."""
    strategies = _strategies()
    parts = [
        _INTRODUCTION,
        "### Methods",
        _matrix(strategies, {name: {"method": method} for name, method in _METHODS.items()}),
        "### Precision",
        "Full fine-tuning; for adapters the same.",
        _matrix(strategies, {name: {"precision": name} for name in _PRECISIONS}),
        "### Activation checkpointing",
        _matrix(strategies, _checkpointing()),
        "### Optimizers",
        "Whether their packages are installed, and whether the device can run them, is checked when a run starts.",
        _optimizers(strategies),
        "## Rules",
        _rules(),
        _NUMERICS,
        _types(),
        "## Keys",
        _keys(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _strategies() -> dict[str, dict[str, Any]]:
    """Name to section of every shipped strategy, lightest first."""
    folders = [shipped_recipes()]
    found = {}
    for name in options("strategy", folders):
        file = locate(f"strategy/{name}", folders)
        assert file is not None
        section = yaml.safe_load(file.read_text(encoding="utf-8"))
        if section["name"] == "auto":
            continue
        found[name] = {key: "/scratch" if value == "???" else value for key, value in section.items()}
    order = [*Strategy.model_fields["name"].annotation.__args__]  # type: ignore[union-attr]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1]["name"]), len(item[1]), item[0])))


def _recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"model": {"path": "m"}, "data": {"sources": ["d"]}, **sections})


def _cell(sections: Mapping[str, Any]) -> str:
    recipe = _recipe(**sections)
    refused = [f"`{name}`" for name, rule in RULES.items() if rule.broken(recipe, _TIED)]
    return " ".join(refused) or "yes"


def _matrix(strategies: Mapping[str, Any], columns: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [f"`{name}`", *(_cell({"strategy": strategy, **column}) for column in columns.values())]
        for name, strategy in strategies.items()
    ]
    return _table(["strategy", *columns], rows)


def _checkpointing() -> dict[str, dict[str, Any]]:
    return {
        f"`{mode}` with {method}": {"activation_checkpointing": {"mode": mode}, "method": _METHODS[method]}
        for mode in _CHECKPOINTING
        for method in ("full", "LoRA")
    }


def _optimizers(strategies: Mapping[str, Any]) -> str:
    """Optimizers that every strategy treats alike share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, traits in OPTIMIZERS.items():
        schedule = {"name": "constant"} if traits.family == "schedule_free" else {}
        # What updates during the backward pass cannot clip.
        column = {"optimizer": {"name": name, "max_grad_norm": 0.0}, "schedule": schedule}
        cells = tuple(_cell({"strategy": strategy, **column}) for strategy in strategies.values())
        groups.setdefault(cells, []).append(name)
    rows = [[", ".join(f"`{name}`" for name in names), *cells] for cells, names in groups.items()]
    return _table(["optimizer", *(f"`{name}`" for name in strategies)], rows)


def _rules() -> str:
    others = {name: RULES[name] for name in ("elementwise-unfit",)}
    rows = [
        [f"`{name}`", f"`{rule.path}`", " ".join([_words(rule.why), rule.reference]).strip(), _words(rule.change)]
        for name, rule in (others | STRATEGY_RULES | PARALLEL_RULES | EXPERT_RULES).items()
    ]
    return _table(["rule", "at", "why", "change"], rows)


def _words(text: str) -> str:
    """A rule's text with dots for the figures that depend on the recipe."""
    for figure, either in _EITHER.items():
        text = text.replace(figure, either)
    return re.sub(r"\{[\w.]+\}", "…", text)


def _types() -> str:
    rows = []
    for engine, name in _ENGINES.items():
        for precision in _PRECISIONS:
            for method in ("full", "LoRA", "QLoRA (nf4)"):
                recipe = _recipe(strategy={"name": name}, precision=precision, method=_METHODS[method])
                types = dtypes(recipe)
                load = "4 bits" if recipe.method.quantization == "nf4" else types.load
                rows.append([engine, precision, method, load, types.local, types.compute, types.reduce, types.master])
    return _table(["strategy", "precision", "method", "loaded", "local", "computed", "reduced", "masters"], rows)


def _keys() -> str:
    rows = []
    for key, names in KEYS.items():
        field = Strategy.model_fields[key]
        meaning = " ".join((field.description or "").split())
        rows.append([f"`{key}`", ", ".join(f"`{name}`" for name in names), f"`{as_text(field.default)}`", meaning])
    return _table(["key", "read by", "default", "meaning"], rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> int:
    """Writes the page, or with `--check` returns 1 where it says something else."""
    text = strategies_markdown()
    if sys.argv[1:] == ["--check"]:
        current = PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is " + ("current" if current else "stale: run python scripts/strategies_doc.py"))
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
