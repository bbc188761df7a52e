"""Fine-tuning on Hugging Face Accelerate: a recipe says what to train, pure code turns it into engine settings."""

__version__ = "0.1.0"
