"""Which precisions `auto` chooses from, which multiply in fp8, and which keep no fp32 masters."""

PRECISIONS = ("bf16", "fp16", "fp32")
"""What `precision: auto` chooses from; bf16 comes before fp16, whose losses must be scaled."""
FP8_SCALING = {"fp8": "tensorwise", "fp8_rowwise": "rowwise", "pure_fp8": "tensorwise"}
"""Precisions that are in bf16 but for products of linear layers in fp8, and what has a scale there."""
PURE = {"bf16": "pure_bf16", "fp8": "pure_fp8"}
"""Precisions with fp32 masters, and what is the same without."""
