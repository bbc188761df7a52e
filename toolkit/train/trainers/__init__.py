"""The steps of a training, by objective: losses, their gradients, and what is said of them and of held-out rows."""
