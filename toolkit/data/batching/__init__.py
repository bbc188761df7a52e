"""Which rows make a step and a micro-batch, and the tensors of a batch."""
