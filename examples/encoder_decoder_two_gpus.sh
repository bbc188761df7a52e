#!/usr/bin/env bash
# Tunes Blenderbot on two GPUs with ZeRO-2 in fp16, 200 pairs per GPU and step, and scores generated replies.
# fp16 needs GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch --multi_gpu --num_processes 2 toolkit/run.py recipe=blenderbot_400m_seq2seq_zero2 "$@"
