"""What is done with a finished run: talk with it, score it, merge, export and publish it."""
