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
from toolkit.recipe.parallel import Strategy
from toolkit.recipe.rules import RULES
from toolkit.recipe.rules.expert import EXPERT_RULES
from toolkit.recipe.rules.parallel import PARALLEL_RULES
from toolkit.recipe.rules.pipeline import PIPELINE_RULES
from toolkit.recipe.rules.strategy import KEYS, STRATEGY_RULES

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

`strategy` in a recipe says how training is spread over devices. The recipe decides it: `accelerate launch` only starts
the processes. Losses do not depend on it, so choose by memory and speed:

| when | take |
| --- | --- |
| you want it chosen | `auto`: the fastest that fits these devices, by the [plan](plan.md); the manifest says why |
| model, gradients and optimizer state fit on one device | `ddp` (also on one device); adapters nearly always do |
| they nearly fit | `zero1`, then `zero2`: the same traffic as `ddp`, fewer copies |
| they do not fit | `fsdp` or `zero3`: each layer is gathered when it computes |
| several machines with slow links between them | `fsdp_hybrid`: shards in the node, replicas across nodes |
| too few devices for any of these | `zero2_offload`, `zero3_offload`, `fsdp_offload`: host memory, over PCIe |
| host memory is not enough either | `zero3_nvme` |

`strategy=zero3_offload` on the command line takes that file of `recipes/strategy/`; `strategy.name=zero3` changes only
that key.

## Memory

Bytes that a device holds per trained parameter between two steps, for `precision: bf16`, AdamW and N processes.
Activations, buckets and the layers gathered at the moment are extra: [plan](plan.md).

| strategy | weights | gradients | masters and moments |
| --- | --- | --- | --- |
| `ddp` | (they are the masters) | 4 | 12 |
| `zero1` | 2 | 4 | 12 / N |
| `zero2` | 2 | 4 / N | 12 / N |
| `zero3` | 2 / N | 4 / N | 12 / N |
| `fsdp` | (they are the masters) | 4 / N | 12 / N |

Offloading moves the last column to the host (under ZeRO also the gradients that it waits for);
`offload_param` moves the weights. FSDP moves its whole row. A frozen base costs only its weights: 2 bytes per
parameter, 1 with int8 and fp8, about 0.5 with nf4 and int4. `zero3` and `fsdp` divide them by N, but with a quantized
base every process reads the whole base before it keeps its part.

## Long rows

If the activations of one row do not fit, N devices can share each row with `parallel.sequence=N`, under every
strategy:

```sh
toolkit plan recipe=llama_3_1_8b_128k_lora hardware=h100x8
```

Each device computes a part of the tokens. There are two ways to compute attention; a run uses one of them:

- `parallel.sequence=N`: devices exchange parts of rows for attention heads and back (Ulysses, Jacobs et al. 2023). N
  must divide the model's heads, and the attention backend must accept document boundaries, which
  `model.attention=auto` ensures.
- `parallel.context=N`: each device keeps the queries of its tokens and gathers the keys and values of the whole row
  (Llama Team 2024, arXiv:2407.21783, section 3.3.2), once more in the backward pass, so that no layer keeps them. N
  need not divide the heads. Each device has a piece from the front of the row and one equally far from its end, so
  that all attend to equally many keys.

With h heads and k key heads, gathering sends less than exchanging if 3kN < 2(h + k), or if kN < h + k where layers are
recomputed. The keys and values of the whole row, and their gradients, exist for one layer at a time, and grow with N;
the plan counts them. If nothing fits, `toolkit plan` names the smallest N that does, for `parallel.sequence` if it
divides the heads.

The largest part is then inside the MLPs, which are several times as wide as their input.
`activation_checkpointing.mlp_tiles=8` computes a layer's MLP in eight tiles of a row's tokens, one after the other,
and each once more in the backward pass (tiled MLP, Bekman et al. 2025, arXiv:2506.13996), with or without shared rows.
`activation_checkpointing=auto` tries it for rows from 32,768 tokens on if nothing faster fits. By the plan, one GPU of
48 GB can then train LoRA on an 8B model with rows of 131,072 tokens, which does not fit without it.

Either way a device has an Nth of the activations, logits and batches. What `strategy` divides is divided over all
devices as before, because to the engine parts of rows are rows like any others. Losses stay those of one process,
packed or not. The balance loss of a mixture's routers is that of whole rows. Neighbouring ranks share rows, so the
exchange stays within a node as long as N does not exceed its devices. Before the first step the run checks on the
model whether parts get the logits of the whole row. A model whose layers look beyond their tokens elsewhere than in
attention does not train.

## Layers that several devices divide

If the weights of a layer do not fit, or a step must not wait for gathering them, `parallel.tensor=N` divides each
layer over N devices (tensor parallelism, Shoeybi et al. 2019), under `strategy.name=ddp`, `zero1`, `zero2` and `fsdp`:

```sh
toolkit plan recipe=llama_3_1_8b_lora hardware=h100x8 strategy.name=ddp parallel.tensor=4
```

Each device has a part of the attention heads and of the inner width of the MLPs, with their weights, adapters,
gradients and optimizer state. It has a part of the vocabulary in embeddings and output head, if N divides it and no
adapter trains them. Norms are whole on all devices.

The devices read the same rows, and sum hidden states twice in each direction of a layer. Nothing hides these sums.
Neighbouring ranks divide layers, so the sums stay within a node as long as N does not exceed its devices. Logits are
not gathered for the loss: for each token the largest logit, the sum of exponentials and the label's logit are reduced.

The remaining dimension of the devices is data-parallel: `fsdp` shards each part over the devices that have the same
part, and ZeRO-1 and 2 divide its gradients and optimizer state over them. With `parallel.sequence` or
`parallel.context`, groups of them also share rows. Layers are divided as Transformers' own plan for the architecture
says, in the same way on every engine. DeepSpeed's own way (AutoTP) does not know PEFT's adapters and is not used. N
must divide the key and value heads, all heads and the inner width. These are refused:

- architectures whose plan needs more than columns and rows (mixtures of experts), and MLPs that keep only their largest
  inner activations (Gemma 3n);
- what has not been tried: ZeRO-3 (`fsdp` does the same), offloaded parameters, quantization, streams, compiled layers;
- under `fsdp`, projections that are several in one (Phi-3, GLM), of which each process has a part of every one.

Losses stay those of one process. Final models and adapters are plain files as always, and a checkpoint can be
continued on any number of processes and with any strategy. Every process reads the whole model into host memory before
it keeps its part.

## Layers that follow each other on several devices

If links are slow, or a model does not fit however it is divided, `parallel.pipeline=N` spreads the layers over N
devices, each with a consecutive run of layers (pipeline parallelism, Huang et al. 2019), under `strategy.name=ddp`:

```sh
toolkit plan recipe=llama_3_1_70b_pipeline hardware=h100x8x2
```

The micro-batches of a step are those of the pipeline. Hidden states go from stage to stage and their gradients go
back; nothing else is sent except sums of gradients once the pipeline is empty. The remaining dimension of the devices
is data-parallel. Devices with the same stage have neighbouring ranks. For example, with 2 nodes of 8 GPUs and
`pipeline: 2`, ranks 0 to 7 have the first half of the layers and 8 to 15 the second; rank 0 hands on to rank 8, and
gradients are averaged within nodes.

Stages are cut so that the slowest one takes as little time as possible by the plan, with embeddings and output head
counted. The plan shows the stages, the memory of each process and the bubble: the share of a step in which devices
wait for the pipeline to fill and to empty. For GPipe and 1F1B with m micro-batches it is (N - 1) / (m + N - 1), so a
pipeline needs many micro-batches, and a small `batch.micro_batch_size`.

| `parallel.schedule` | torch's | stages of a device | idle time, relative to N - 1 micro-batches | micro-batches held |
| --- | --- | --- | --- | --- |
| `gpipe` | `ScheduleGPipe` | 1 | all | all |
| `1f1b` | `Schedule1F1B` | 1 | all | as many as devices from this one on |
| `interleaved_1f1b` | `ScheduleInterleaved1F1B` | 2 | half | up to 1.5 times as many |
| `zero_bubble` | `ScheduleZBVZeroBubble` | 2 | a sixth in full fine-tuning; a half with adapters | as many as devices |

All schedules train alike, on torch's `torch.distributed.pipelining`. `interleaved_1f1b` takes micro-batches in equal
rounds of at least N. With fewer than N micro-batches `1f1b` is the same as `gpipe`, and runs as it. `zero_bubble`
postpones the gradients of weights, so it gains little with adapters, which have next to none.

- Each process keeps the embeddings, layers, final norm and output head of its own stages; the rest is left out as the
  files are read.
- Micro-batches have lengths of their own, packed or padded. Every process reads the rows of its pipeline, so labels,
  positions and document boundaries need not be sent.
- Embeddings tied to the output head are on both the first and the last process, which add up their gradients.
- In 16 bits over fp32 weights, micro-batches share one 16-bit copy of each weight, unless layers are recomputed.
- In mixtures of experts the scores of all routers travel to the last stage, where their balance is computed.
- The model's own forward computes a stage, given hidden states instead of tokens. The run checks that, without layers,
  this forward leaves them unchanged. An architecture that does not (Granite), or that has more beside its layers than
  embeddings and a norm (GPT-2), is refused.

Losses stay those of one process; with dropout they are as good, with other masks. Final models and adapters are plain
files, checkpoints are whole, and any number of processes and any strategy can continue from them. What has not been
tried is refused: other strategies, `parallel.sequence`, `context`, `tensor` and `expert`, quantization, streams, and
compiled layers.

## Experts that several devices divide

Most of a mixture of experts are its experts, and each token uses only a few of them. `parallel.expert=N` divides them
over N devices (expert parallelism, Lepikhin et al. 2020), under `strategy.name=ddp`:

```sh
toolkit plan recipe=qwen3_30b_a3b_full_expert hardware=h200x8
```

Each device has an Nth of the experts of every layer, with their weights, adapters, gradients and optimizer state. The
rest is whole on all devices, and averaged as usual. Every device reads its own rows. In each layer with experts it
sends a token once to each device that has experts for it, with the weights that the router gave these experts. The
results are added up there, and one row comes back.

With E experts on N devices, of which a token uses k, that is (N - 1)(1 - C(E - E/N, k) / C(E, k)) rows each way if all
are chosen equally often: 4.7 for 128 experts on 8 devices, with 8 per token. A copy for each expert, as Transformers'
own exchange sends it, would be 7. FSDP instead gathers all weights of a layer, whatever the number of tokens.

Nothing hides the exchange, and the host waits once per layer to learn how many rows will come. Neighbouring ranks
divide experts, so the exchange stays within a node as long as N does not exceed its devices.

The experts are divided as Transformers' own plan for the architecture says. They compute all their tokens in grouped
products, as without it. No expert has a capacity, so no token is dropped. The work of a group's devices depends on the
routing, which the plan assumes to be even. `metrics.jsonl` says how evenly tokens were spread, for every mixture:

- `expert_load`: how many times the mean of a layer its fullest expert got, on average over the layers;
  `expert_load_worst`;
- `idle_experts`: the share that got none;
- `process_load`: as `expert_load`, but for devices.

The balance loss is that of each micro-batch, as without it.

N must divide the experts. Losses stay those of one process that takes micro-batches of the same size. Final models and
adapters are plain files as always, and checkpoints are whole: any number of processes and any strategy can continue
from them. It can be combined with `parallel.sequence` and `parallel.context`. Every process reads the whole model into
host memory before it keeps its part.

## NVMe

`offload_optimizer: nvme` and `offload_param: nvme` write to `strategy.nvme_path`, a folder on a local drive, through
DeepSpeed's `async_io`. It is compiled at first use and needs libaio's headers and a compiler:

```
apt install libaio-dev g++
```

Frozen weights are read from there in every pass. Of trained ones each process keeps the first billion in host memory
(DeepSpeed's `max_in_cpu`, which `extra.deepspeed.zero_optimization.offload_param.max_in_cpu` changes). Weights come
through five buffers of host memory, each as large as a process's part of the largest one; the plan counts both.

Before training, the run checks that the folder can be written, that the drive has room for this node's share, and that
`async_io` is built. Each process has its own folder in it; the launch's folder is removed at the end.

## What goes with what

Everything below is generated from the rules that `toolkit validate` applies, by trying each combination. A cell that
does not say yes names the rules that refuse it. Each rule has a test that runs what it refuses and shows the failure,
or a reference if that needs other hardware.
"""
_NUMERICS = """\
## What is held in which type

The types are the same on every engine. By default engines differ: DeepSpeed would upcast or round, FSDP would follow
the weights as they were read.

- *Loaded*: how weights are read; for adapters, how the frozen base is read.
- *Local*: how trained parameters are stored in the model between steps.
- *Reduced*: in what type gradients are summed over micro-batches and processes (without an engine: in the type of the
  parameters).
- *Masters*: what the optimizer updates, and AdamW's moments with them.

8-bit and 4-bit optimizers round their moments: under ZeRO in blocks of the flattened parameters, elsewhere in blocks
of each parameter. Their losses therefore agree to about 0.1 %, not exactly. Under ZeRO fp32 masters start from weights
rounded to the compute precision.
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
        for name, rule in (others | STRATEGY_RULES | PARALLEL_RULES | EXPERT_RULES | PIPELINE_RULES).items()
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
