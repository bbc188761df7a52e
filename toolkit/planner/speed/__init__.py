"""Seconds, FLOPs, traffic and money of a training step; arithmetic only."""
