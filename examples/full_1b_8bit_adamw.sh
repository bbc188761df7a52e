#!/usr/bin/env bash
# Tunes every parameter of Llama 3.2 1B on one 24 GB GPU: AdamW's two moments are stored in 8 bits each,
# a quarter of their usual size, and activations are recomputed.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch --num_processes 1 toolkit/run.py recipe=llama_3_2_1b_full_8bit "$@"
