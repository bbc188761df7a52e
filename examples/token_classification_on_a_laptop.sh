#!/usr/bin/env bash
# Teaches a small model to find names in texts: no GPU, no download from a model hub, a few minutes.
# For rows of your own set `data=ROWS.jsonl`, rows of {"tokens": […], "ner_tags": […]}.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_token_classification_demo "$@"
