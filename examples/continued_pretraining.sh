#!/usr/bin/env bash
# Goes on pre-training SmolLM2 135M on educational web pages that are read while training.
# For your own text files: `data=FOLDER data.streaming=false`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_pretrain schedule.max_steps=500 "$@"
