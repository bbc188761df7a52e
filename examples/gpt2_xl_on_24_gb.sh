#!/usr/bin/env bash
# Trains all 1.5 billion parameters of GPT-2 XL on one 24 GB GPU: ZeRO-3 keeps parameters and optimizer in host memory.
# Weights, gradients and AdamW's state alone are 25 GB, so without offloading not even a batch of one fits.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch --num_processes 1 toolkit/run.py recipe=gpt2_xl_clm_zero3_offload "$@"
