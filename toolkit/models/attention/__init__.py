"""Attention backends: when each is used, and how it computes."""
