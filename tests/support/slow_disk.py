"""Trainings whose run folder lies on a disk that is measured to be slow, with the faults of `faults`."""

from __future__ import annotations

from collections.abc import Sequence

import faults


def main(arguments: Sequence[str]) -> int:
    """Trains, as `faults` does."""
    from toolkit.train import slow_disk

    slow_disk._PROBE, slow_disk._rate = 1, lambda folder: 1000.0
    return faults.main(arguments)
