#!/usr/bin/env bash
# Tunes a small model with LoRA on the built-in data: no GPU, no download from a model hub, a few minutes.
# Add `key=value` to change the recipe, e.g. `schedule.max_steps=100` for a longer run.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_lora_demo "$@"
