"""The model: tokenizer, weights, quantization, adapters and attention kernels, as the recipe says."""
