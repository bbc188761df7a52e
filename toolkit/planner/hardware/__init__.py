"""Hardware: what GPUs can do, what this machine has, and what was measured."""

from toolkit.planner.hardware.calibration import once_measured
from toolkit.planner.hardware.detect import answering, driver_version, visible_gpus
from toolkit.planner.hardware.lookup import find, this_machine
from toolkit.planner.hardware.specs import DOCUMENTS, End, Hardware, Rate, between

__all__ = [
    "DOCUMENTS",
    "End",
    "Hardware",
    "Rate",
    "answering",
    "between",
    "driver_version",
    "find",
    "once_measured",
    "this_machine",
    "visible_gpus",
]
