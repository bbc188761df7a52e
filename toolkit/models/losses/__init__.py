"""Losses of objectives beyond language modelling, as their papers give them."""
