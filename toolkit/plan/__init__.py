"""What a recipe will cost: memory by part, time, traffic and money, and what to change. Imports no torch."""
