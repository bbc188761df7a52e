"""The recipe translated for the engines: batch layout, dtypes, engine settings, TrainingArguments, environment.

Pure: no torch, so that what will run can be shown, checked and planned at once.
"""

from toolkit.policy.arguments import training_arguments
from toolkit.policy.engines import checkpoints_in_fsdp, deepspeed_config, fsdp_config, fsdp_dtypes, fsdp_mesh
from toolkit.policy.launcher import check_launch, environment
from toolkit.policy.layout import BatchLayout, Length, World, batch_layout, run_length
from toolkit.policy.precision import Dtypes, dtypes

__all__ = [
    "BatchLayout",
    "Dtypes",
    "Length",
    "World",
    "batch_layout",
    "check_launch",
    "checkpoints_in_fsdp",
    "deepspeed_config",
    "dtypes",
    "environment",
    "fsdp_config",
    "fsdp_dtypes",
    "fsdp_mesh",
    "run_length",
    "training_arguments",
]
