"""Logits and their losses, of trained tokens only and without a tensor of all of them."""
