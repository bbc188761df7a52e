"""Held-out losses, generated answers and their scores, of a model in training and of a finished one."""
