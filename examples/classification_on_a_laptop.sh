#!/usr/bin/env bash
# Teaches a small model to classify texts: no GPU, no download from a model hub, a few minutes.
# For rows of your own set `data=ROWS.jsonl`, rows of {"text": …, "label": …}; for an encoder `model.path=FOLDER`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_classification_demo "$@"
