"""Measures a model's `Trace`: its real code runs on fake tensors, at two depths and in a few shapes.

Nothing is computed and no weights are read. Imports torch, so `toolkit plan` calls it only for a setting whose trace is
neither shipped nor cached.
"""

from toolkit.tracing.measure import trace

__all__ = ["trace"]
