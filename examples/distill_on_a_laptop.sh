#!/usr/bin/env bash
# A model in 4 bits learns from the same model in full precision what rounding has lost: no GPU, no download from a hub.
# For models of your own set `model.path` and `distillation.teacher.path`, two with the same tokenizer, and `data`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_distillation_demo "$@"
