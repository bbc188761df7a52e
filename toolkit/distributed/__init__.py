"""The recipe as engines are told it: batch layout, dtypes, engine settings, TrainingArguments, environment, launchers.

Without torch, so that what will run can be shown, checked and planned at once; only `rendezvous` imports it.
"""

from toolkit.distributed.engines import (
    Dtypes,
    EngineState,
    deepspeed_config,
    dtypes,
    expected_state,
    fsdp_config,
    fsdp_dtypes,
    fsdp_mesh,
    training_arguments,
)
from toolkit.distributed.environment import environment
from toolkit.distributed.launcher import check_launch
from toolkit.distributed.layout import BatchLayout, Length, World, batch_layout, run_length

__all__ = [
    "BatchLayout",
    "Dtypes",
    "EngineState",
    "Length",
    "World",
    "batch_layout",
    "check_launch",
    "deepspeed_config",
    "dtypes",
    "environment",
    "expected_state",
    "fsdp_config",
    "fsdp_dtypes",
    "fsdp_mesh",
    "run_length",
    "training_arguments",
]
