"""Processes that hang, end or are slow, and numbers that are none any more: noticed, blamed and said."""
