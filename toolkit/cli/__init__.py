"""The console script `toolkit`."""
