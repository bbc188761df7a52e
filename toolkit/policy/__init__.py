"""The recipe translated for the engines: batch layout, dtypes, engine settings, TrainingArguments, environment.

Pure: no torch, so that what will run can be shown, checked and planned at once.
"""

from toolkit.policy.arguments import training_arguments
from toolkit.policy.engines import deepspeed_config, fsdp_config, fsdp_dtypes, fsdp_mesh
from toolkit.policy.expected import expected_state
from toolkit.policy.launcher import check_launch
from toolkit.policy.layout import BatchLayout, Length, World, batch_layout, run_length
from toolkit.policy.precision import Dtypes, dtypes
from toolkit.policy.variables import environment

__all__ = [
    "BatchLayout",
    "Dtypes",
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
