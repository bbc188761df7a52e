"""Rules on strategies: each refused combination is run and shows the failure that it is refused for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_failures import OPTIMIZERS
from filelock import FileLock
from harness import SUPPORT
from harness import environment as of_children
from ranks import Ranks
from strategies_doc import strategies_markdown
from tiny import tiny_model

from recipes import recipe
from toolkit.common import UserError
from toolkit.distributed.engines import dtypes, training_arguments
from toolkit.distributed.environment import environment
from toolkit.distributed.layout import World, batch_layout, run_length
from toolkit.recipe.optimizers import OPTIMIZERS as TABLE
from toolkit.recipe.parallel import STRATEGIES, Strategy
from toolkit.recipe.rules.strategy import KEYS, STRATEGY_RULES

OTHER: dict[str, Any] = {
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    "nvme_path": "/scratch",
    "pin_memory": False,
    "reduce_dtype": "bf16",
    "sharding": "shard_grad_op",
    "reshard_after_forward": False,
    "sync_each_batch": True,
    "wrap_classes": ["LlamaDecoderLayer"],
    "state_dict_type": "full",
}
"""A value of each key that is not its default; numbers and switches are changed by themselves."""
OFFLOADED = {"zero3": {"offload_optimizer": "nvme", "offload_param": "nvme"}}


def translated(strategy: dict[str, Any]) -> Any:
    """All that an engine is given of a strategy."""
    made = recipe(strategy=strategy)
    layout = batch_layout(made, 2)
    arguments = training_arguments(made, layout, run_length(made, 64, layout))
    if strategy["name"] in ("zero1", "zero2"):
        # DeepSpeed reads it at stage 3 only.
        arguments["deepspeed"]["zero_optimization"].pop("offload_param", None)
    types = dtypes(made) if strategy["name"] == "fsdp" else None
    return types, environment(made, World(0, 0, 2, 2), {}), arguments


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_key_is_read_by_exactly_the_strategies_that_the_rules_say(name: str) -> None:
    base = {"name": name, **OFFLOADED.get(name, {"offload_optimizer": "cpu"} if name in ("zero1", "zero2") else {})}
    for key, field in Strategy.model_fields.items():
        # FSDP's own offloading policy is built where torch is at hand.
        if key == "name" or (name, key) == ("fsdp", "pin_memory"):
            continue
        # `none` takes the engine's offloading away again.
        other = OTHER.get(key, not field.default if isinstance(field.default, bool) else 7)
        other = "none" if base.get(key) == other else other
        changed = translated({**base, key: other}) != translated(base)
        assert changed == (name in KEYS[key]), key


def test_what_engines_do_by_themselves_is_stated() -> None:
    """Clipping at 1.0, 16-bit sums, another optimizer, no readable weights, hidden NaNs, twice the checkpointing."""
    for name in STRATEGIES[2:]:
        layout = batch_layout(made := recipe(strategy={"name": name}, activation_checkpointing={"mode": "full"}), 2)
        arguments = training_arguments(made, layout, run_length(made, 64, layout))
        assert arguments["logging_nan_inf_filter"] is False
        assert arguments["activation_checkpointing"]
        assert not arguments.get("fsdp_config", {}).get("activation_checkpointing", False)
        if made.strategy.zero_stage:
            config = arguments["deepspeed"]
            assert config["gradient_clipping"] == "auto" and config["zero_force_ds_cpu_optimizer"] is False
            assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"
            assert not {"optimizer", "scheduler"} & set(config)
            gathers = config["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save")
            assert gathers or made.strategy.zero_stage < 3


@pytest.mark.parametrize("name", ["lomo", "galore_adamw_layerwise"])
def test_replicas_that_update_in_the_backward_pass_are_refused(name: str) -> None:
    """Two LOMO replicas part ways: after four steps their losses are 1e-4 off one process's."""
    from toolkit.train.optimizer import check_arguments

    made = recipe(optimizer={"name": name, "max_grad_norm": 0.0})
    arguments = SimpleNamespace(gradient_accumulation_steps=1, world_size=2)
    with pytest.raises(UserError, match="averaged"):
        check_arguments(made, arguments, run_length(made, 16, batch_layout(made, 2)))


def test_accelerate_replaces_an_offloaded_optimizer_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed
    from bitsandbytes.optim import AdamW8bit
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    # Its constructor compiles for two minutes.
    monkeypatch.setattr(DeepSpeedCPUAdam, "__init__", lambda self, *args, **kwargs: None)
    parameters = [torch.nn.Parameter(torch.ones(8))]
    for optimizer in (torch.optim.SGD(parameters, lr=0.1), AdamW8bit(parameters)):
        assert type(map_pytorch_optim_to_deepspeed(optimizer)) is DeepSpeedCPUAdam


def test_embeddings_tied_by_peft_cannot_leave_for_the_meta_device(tmp_path: Path) -> None:
    """As accelerate moves a model there when one process alone reads the weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path))
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], ensure_weight_tying=True)
    adapted = get_peft_model(base, config).to("meta")
    with pytest.raises(KeyError, match="already exists"):
        adapted.tie_weights()


class Ran:
    """What every case of `engine_failures.py` came to on two ranks of an engine."""

    def __init__(self, engine: str, folder: Path, ranks: Ranks) -> None:
        file = folder / f"{engine}_failures.json"
        with FileLock(folder / f"{engine}_failures.lock"):
            if not file.is_file():
                llama = tiny_model("meta-llama/Llama-3.2-1B", folder / f"{engine}_llama")
                own = {"TINY_LLAMA": str(llama), "entry": "engine_failures"}
                # DeepSpeed compiles its operations when they are used first.
                done = ranks.run(folder, engine, str(file), processes=2, timeout=840, **own)
                assert file.is_file(), done.stderr[-3000:]
        self._results = json.loads(file.read_text(encoding="utf-8"))

    def __getitem__(self, case: str) -> Any:
        found = self._results[case]
        if isinstance(found, str) and found.startswith("not installed"):
            pytest.skip(found)
        return found


@pytest.fixture(scope="session")
def zero(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ranks: Ranks) -> Ran:
    return Ran("zero", shared(tmp_path_factory, worker_id), ranks)


@pytest.fixture(scope="session")
def nvme(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ranks: Ranks) -> Ran:
    return Ran("nvme", shared(tmp_path_factory, worker_id), ranks)


@pytest.fixture(scope="session")
def fsdp(tmp_path_factory: pytest.TempPathFactory, worker_id: str, ranks: Ranks) -> Ran:
    return Ran("fsdp", shared(tmp_path_factory, worker_id), ranks)


def shared(factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all of pytest-xdist's workers see."""
    base = factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_optimizer(zero: Ran, name: str, stage: int) -> None:
    found = zero[f"optimizer {name} zero{stage}"]
    if "8bit" in name:
        # Blocks of the flattened parameters are rounded, not blocks of each: as far off as rounding itself is.
        assert found < 2e-3
    elif not TABLE[name].zero_alternative:
        assert found < 1e-6
    elif (name, stage) != ("schedule_free_adamw", 2):  # It trains there, see below.
        assert isinstance(found, str) or found > 5e-5


@pytest.mark.slow
def test_zero_never_evaluates_what_schedule_free_optimizers_average(zero: Ran) -> None:
    alone, under_zero = zero["schedule-free"]
    assert alone > 1e-4 and under_zero == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "case", "expected"),
    [
        ("", "8-bit state", ["torch.uint8"]),
        ("nvme-needs-zero3", "nvme zero2", [True, 0]),
        ("zero-pure-bf16-offload", "pure offload", "AssertionError: Master weights feature requires ZeRO-2 Offload"),
        ("zero1-pure-bf16-reduce", "pure reduce zero1", ["torch.float32"]),
        ("", "pure reduce zero2", ["torch.bfloat16"]),
        ("zero-stored-dtype", "stored", ["torch.bfloat16"]),
        ("reduce-overflows", "reduce fp16", False),
        ("", "clipping left out", 1.0),
        ("", "gather", ["weights.bin"]),
        ("", "no gather", []),
        ("zero3-nf4-dora", "nf4 dora", "AttributeError: 'Params4bit' object has no attribute 'ds_status'"),
        ("zero3-selective", "selective", "RuntimeError: c10d._allgather_base_.default encountered during backward"),
    ],
)
def test_zero_case(zero: Ran, rule: str, case: str, expected: Any) -> None:
    """The failure that a rule prevents; without a rule, what it leaves allowed."""
    assert rule in ("", *STRATEGY_RULES)
    found = zero[case]
    assert found[: len(expected)] == expected if isinstance(expected, str) else found == expected


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rule", "case"),
    [
        ("quantized-param-nvme", "nf4 nvme"),
        ("quantized-param-nvme", "fp8 nvme"),
        ("quantized-param-nvme", "int4 nvme"),
    ],
)
def test_zero3_does_not_move_bytes_to_a_drive(nvme: Ran, rule: str, case: str) -> None:
    assert rule in STRATEGY_RULES and nvme[case].startswith("RuntimeError: shape")


@pytest.mark.slow
def test_zero3_shards_bytes_but_not_the_8_bit_weights_of_bitsandbytes(zero: Ran) -> None:
    for stored in ("nf4", "fp8", "int4"):
        off, share = zero[stored]
        assert off < 1e-6 and share == 0.5, stored
    off, share = zero["int8"]
    assert off < 1e-6 and share == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw_torch_8bit"])
def test_fsdp_optimizer(fsdp: Ran, name: str) -> None:
    found = fsdp[f"optimizer {name}"]
    if name == "muon":
        assert found > 5e-5
    elif name == "adagrad":  # Its state is there before the parameters are sharded, and cannot be saved.
        assert found < 1e-6 and fsdp[f"saved {name}"].startswith("KeyError") and fsdp["saved rmsprop"] is True
    elif TABLE[name].fsdp_alternative:
        assert "DTensor" in found or "sharding strategy" in found
    else:
        assert found < 1e-6


@pytest.mark.slow
def test_fsdp_shards_bytes_in_fp8_and_4_bit_weights_that_are_stored_as_computed(fsdp: Ran) -> None:
    for stored in ("fp8", "int4", "nf4 stored as computed"):
        off, share = fsdp[stored]
        assert off < 1e-6 and share == 0.5, stored
    assert fsdp["nf4 stored otherwise"].startswith("RuntimeError: shape")
    assert "no attribute 'CB'" in fsdp["int8"]


@pytest.mark.slow
def test_fsdp_sums_in_fp16_overflow_and_all_processes_skip_together(fsdp: Ran) -> None:
    assert fsdp["reduce fp16"] is False
    assert fsdp["fp16 overflow"] == [True, True]


@pytest.mark.slow
def test_fsdp_does_not_take_an_embedding_that_encoder_and_decoder_share(fsdp: Ran) -> None:
    assert "already managed by another FSDP group" in fsdp["encoder-decoder"], fsdp["encoder-decoder"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("rule", "kind", "sizes", "expected"),
    [
        (
            *("zero3-architecture", "recurrent_gemma"),
            {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "lru_width": 48}
            | {"block_types": ["recurrent", "attention"]},
            "torch.float32",
        ),
    ],
)
def test_zero3_does_not_train_an_architecture_right(rule: str, kind: str, sizes: dict[str, Any], expected: str) -> None:
    assert rule in STRATEGY_RULES
    command = [sys.executable, str(SUPPORT / "zero3_architecture.py"), kind, json.dumps(sizes)]
    ended = subprocess.run(command, env=of_children(), capture_output=True, text=True, timeout=120)
    assert expected in ended.stdout + ended.stderr


SHOWN = Path(__file__).read_text(encoding="utf-8")
CONSISTENCY = {
    # Nothing to run: two keys of the recipe say opposite things, or one says nothing.
    *("strategy-keys", "fsdp-offload-optimizer", "nvme-needs-path", "nvme-path-unused", "pin-memory-unused"),
    "reshard-contradicts",
}
BY_NAME = {
    "zero-optimizer",
    "fsdp-optimizer",
    "fsdp-muon",
    "fsdp-encoder-decoder",
    "int8-sharded",
    "fsdp-tied-embeddings",
    # Ends, or waits for ever, once processes have chosen other experts.
    "zero-separate-experts",
}


def test_every_strategy_rule_has_its_failure_or_a_reference() -> None:
    missing = [
        name
        for name, rule in STRATEGY_RULES.items()
        if not (rule.reference or name in CONSISTENCY | BY_NAME or f'("{name}", "' in SHOWN)
    ]
    assert missing == []


def test_document_names_every_rule_that_forbids_a_cell() -> None:
    text = strategies_markdown()
    for name in STRATEGY_RULES:
        assert f"`{name}`" in text
    assert not re.search(r"\{[\w.]+\}", text), "an unfilled figure"
