"""A plan with a figure in every field, for tests of how plans are shown."""

from __future__ import annotations

from typing import Any

from toolkit.planner.plan import Plan, Refused

GIB = 2**30
_STATE = {"parameters": 15 * GIB, "adapters": GIB // 6, "optimizer": GIB // 3}
_TRAINING = {**_STATE, "gradients": GIB // 6, "activations": 20 * GIB, "logits": 3 * GIB, "batch": 2**18}


def example_plan(**changes: Any) -> Plan:
    """A plan for a LoRA run on eight devices; `changes` replace top-level keys."""
    allocated = sum(_TRAINING.values())
    values: dict[str, Any] = {
        "recipe": "llama_3_1_8b_lora",
        "overrides": ["seq_len=4096"],
        "hardware": "h200x8",
        "devices": 8,
        "nodes": 1,
        "device_memory": 140 * GIB,
        "strategy": "ddp",
        "attention": "torch_varlen",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "global_batch_size": 16,
        "seq_len": 4096,
        "chosen": {},
        "memory": [
            {
                "ranks": "every rank",
                "phases": {
                    "load": {"parameters": 15 * GIB},
                    "forward": {**_TRAINING, "logits": 0},
                    "backward": _TRAINING,
                    "step": {**_STATE, "gradients": GIB // 6},
                    "evaluation": {**_STATE, "activations": GIB, "logits": 2 * GIB},
                    "save": _STATE,
                    "resume": {**_STATE, "engine": GIB},
                },
                "peak_phase": "backward",
                "allocated": allocated,
                "reserved": {"value": 1.05 * allocated, "low": 1.01 * allocated, "high": 1.2 * allocated},
                "context": GIB,
                "total": {
                    "value": 1.05 * allocated + GIB,
                    "low": 1.01 * allocated + GIB,
                    "high": 1.2 * allocated + GIB,
                },
            }
        ],
        "host": {"parts": {"processes": 24 * GIB, "loading": 15 * GIB}, "peak": 39 * GIB},
        "host_memory": 2048 * GIB,
        "disk": {"checkpoint": GIB // 2, "kept": 3 * GIB // 2, "model": GIB // 6, "nvme": 0},
        "fit": {
            "answer": "yes",
            "where": "device memory",
            "needed": int(1.05 * allocated) + GIB,
            "available": 140 * GIB,
            "margin": 140 * GIB - int(1.05 * allocated) - GIB,
            "decides": "activations",
        },
        "work": {
            "parameters": 8_030_000_000,
            "trained_parameters": 41_900_000,
            "steps": 1000,
            "tokens_per_step": 65_536.0,
            "tokens": 65_536_000.0,
            "tokens_from": "counted",
            "model_flops_per_step": 2.1e15,
            "hardware_flops_per_step": 2.9e15,
            "rule_flops_per_step": 3.2e15,
            "links": [{"name": "NVLink", "bytes": 300_000_000, "seconds": 0.0012}],
            "compute_seconds": {"value": 0.9, "low": 0.8, "high": 1.1},
            "communication_seconds": 0.1,
            "offload_seconds": 0.0,
            "step_seconds": {"value": 1.0, "low": 0.9, "high": 1.2},
            "total_seconds": {"value": 1100.0, "low": 990.0, "high": 1300.0},
            "tokens_per_second": 65_536.0,
            "mfu": 0.265,
            "pflop_days": 0.0243,
            "gpu_hours": 2.44,
            "cost": 6.1,
            "chinchilla_tokens": None,
        },
        "advice": [
            {
                "kind": "as asked",
                "changes": {},
                "buys": "",
                "costs": "",
                "fits": "yes",
                "total": 42 * GIB,
                "step_seconds": 1.0,
                "gpu_seconds_per_token": 1.2e-4,
            },
            {
                "kind": "fastest",
                "changes": {"batch.micro_batch_size": "4", "activation_checkpointing.mode": "none"},
                "buys": "1.3 times as fast",
                "costs": "38 GiB more memory",
                "fits": "yes",
                "total": 80 * GIB,
                "step_seconds": 0.77,
                "gpu_seconds_per_token": 0.9e-4,
            },
        ],
        "origin": "traced",
        "notes": ["Efficiency of attention and links on h200 is estimated, not measured."],
    }
    return Plan.model_validate(values | changes)


def with_memory(plan: Plan, **amounts: int) -> Plan:
    """The plan with other amounts at its peak; everything that follows from them follows."""
    memory = plan.memory[0]
    phases = memory.phases | {memory.peak_phase: memory.phases[memory.peak_phase] | amounts}
    allocated = sum(phases[memory.peak_phase].values())
    figures = {"value": 1.05 * allocated, "low": 1.01 * allocated, "high": 1.2 * allocated}
    total = {key: amount + memory.context for key, amount in figures.items()}
    changed = memory.model_dump() | {"phases": phases, "allocated": allocated, "reserved": figures, "total": total}
    available = plan.device_memory
    answer = "yes" if total["high"] <= available else "tight" if total["value"] <= available else "no"
    needed = int(total["value"])
    fit = plan.fit.model_dump() | {"answer": answer, "needed": needed, "margin": available - needed}
    fit["decides"] = max(phases[memory.peak_phase], key=phases[memory.peak_phase].__getitem__)
    return Plan.model_validate(plan.model_dump() | {"memory": [changed], "fit": fit})


FITS = example_plan()
TIGHT = with_memory(example_plan(overrides=["seq_len=4096", "batch.micro_batch_size=8"]), activations=105 * GIB)
TOO_LARGE = with_memory(example_plan(overrides=["seq_len=4096", "strategy=fsdp"]), activations=150 * GIB)
REFUSED = Refused(
    recipe=FITS.recipe,
    overrides=["seq_len=4096", "strategy=zero3"],
    hardware="h200x8",
    reason="strategy: <b>no</b> such thing, for reasons that take more than a single line of a terminal\nchange it",
)
