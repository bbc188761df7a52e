#!/usr/bin/env bash
# Tunes Blenderbot, an encoder-decoder chatbot, and scores generated replies (BLEU, chrF, exact match).
# fp16 needs a GPU; on a CPU add `precision=fp32`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=blenderbot_400m_seq2seq evaluation.num_beams=4 "$@"
