#!/usr/bin/env bash
# Trains a small reward model on pairs of answers: no GPU, no download from a model hub, a few minutes.
# For pairs of your own set `data=PAIRS.jsonl`, rows of {"prompt": …, "chosen": …, "rejected": …}.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_reward_demo "$@"
