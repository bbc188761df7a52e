"""A row becomes tokens and labels: chat templates, turns, and which characters are trained."""
