"""What rows of public data sets mean: formats are recognised and converted."""
