#!/usr/bin/env bash
# Tunes every parameter of Qwen3 8B on all GPUs of this machine, sharded by FSDP2.
# `strategy=zero3` is DeepSpeed's way to the same; `--print` only shows what would be started.
set -euo pipefail
cd "$(dirname "$0")/.."

toolkit launch recipe=qwen3_8b_full_8bit strategy=fsdp optimizer.name=adamw "$@"
