#!/usr/bin/env bash
# ZeRO-3 with accelerate's own launcher and a config file. File and recipe must agree, or the run is refused
# before anything is loaded. `toolkit render` writes these files, one for each strategy in recipes/strategy/ but `auto`.
set -euo pipefail
cd "$(dirname "$0")/.."

accelerate launch --config_file accelerate_configs/zero3.yaml toolkit/run.py recipe=llama_3_2_1b_full strategy=zero3 "$@"
