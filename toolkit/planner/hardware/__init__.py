"""Hardware: what GPUs can do, what this machine has, and what was measured."""

from toolkit.planner.hardware.detect import driver_version, visible_gpus
from toolkit.planner.hardware.lookup import find, this_machine
from toolkit.planner.hardware.specs import Hardware, Rate

__all__ = [
    "Hardware",
    "Rate",
    "driver_version",
    "find",
    "this_machine",
    "visible_gpus",
]
