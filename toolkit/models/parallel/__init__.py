"""Models that several processes compute together: parts of layers, rows and experts, and layers in turn."""
