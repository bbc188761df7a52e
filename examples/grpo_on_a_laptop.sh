#!/usr/bin/env bash
# Teaches a small model a format with GRPO, from rewards of its own answers: no GPU, no download from a model hub.
# For prompts of your own set `data=PROMPTS.jsonl`, rows of {"prompt": …, "answer": …}, and name `rewards`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_grpo_demo "$@"
