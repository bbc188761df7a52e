"""Where data is stored, and how files become rows."""
