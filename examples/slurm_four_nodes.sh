#!/usr/bin/env bash
# Writes an sbatch file for four nodes of eight GPUs each: model sharded in the node, replicated across nodes.
# The job saves and queues itself again before its time limit, until the run is finished.
set -euo pipefail
cd "$(dirname "$0")/.."

toolkit launch --slurm --nodes 4 --gpus 8 --time 4:00:00 recipe=qwen3_8b_full_8bit strategy=fsdp_hybrid optimizer.name=adamw global_batch_size=128 "$@"
