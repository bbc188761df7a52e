#!/usr/bin/env bash
# Tunes Llama 3.1 8B on one 24 GB GPU: adapters on a base stored in 4 bits.
# The model is gated: accept its license on the hub and run `hf auth login` first, or pass `model=qwen3_8b`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch --num_processes 1 toolkit/run.py recipe=llama_3_1_8b_qlora batch.seq_len=2048 "$@"
