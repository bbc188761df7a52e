"""Frozen weights in few bits, and products in fp8."""
