"""What one pass of a model really allocates and computes: measured on its own code, kept, or estimated."""
