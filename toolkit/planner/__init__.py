"""What a recipe will cost: memory by part, time, traffic and money, and what to change. `build` is the entry point."""
