"""What a person looks at: the live line of a terminal, the pages of runs and plans, the model card."""
