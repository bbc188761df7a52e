"""One training, from a checked recipe to a finished run folder."""
