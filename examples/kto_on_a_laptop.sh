#!/usr/bin/env bash
# Teaches a small model with KTO from answers that are judged one by one: no GPU, no download from a model hub.
# For answers of your own set `data=JUDGED.jsonl`, rows of {"prompt": …, "completion": …, "label": true}.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_kto_demo "$@"
