#!/usr/bin/env bash
# Tunes Qwen3 0.6B on your own conversations, one JSON object per line:
#   {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
# A tenth of the rows is held out to watch the loss.
# Usage: examples/own_chat_data.sh PATH_TO.jsonl [key=value ...]
set -euo pipefail
data=$(realpath "${1:?usage: $0 PATH_TO.jsonl [key=value ...]}")
shift
cd "$(dirname "$0")/.."

accelerate launch toolkit/run.py recipe=qwen3_0_6b_lora data="$data" data.eval_split=0.1 "$@"
