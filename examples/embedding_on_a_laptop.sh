#!/usr/bin/env bash
# Teaches a small model which texts belong together: no GPU, no download from a model hub, a few minutes.
# For rows of your own set `data=ROWS.jsonl`, rows of {"anchor": …, "positive": …}; for an encoder `model.path=FOLDER`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=smollm2_135m_embedding_demo "$@"
