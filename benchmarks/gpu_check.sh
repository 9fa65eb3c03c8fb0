#!/bin/bash
# What this project could not try where it was made: a GPU. One short run that prints JSON lines; nothing is changed.
#   benchmarks/gpu_check.sh            (PYTHON may be set)
# 1. attention: merge and flex against the explicit mask in float64, forward and backward, 16 and 32 bit
# 2. head: loss and gradients of the whole EAGLE-3 head in bf16, by attention, compiled or not, against fp32 on the CPU
# 3. the training step's speed, memory and MFU in bf16
# Exit code 3: there is no GPU here, nothing was checked. 1: a check failed.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
"$python" benchmarks/gpu_check.py
"$python" benchmarks/train_step.py --device cuda --dtype bf16 --who ours_flex ours_merge ours_compiled --rounds 20
"$python" benchmarks/train_step.py --device cuda --dtype bf16 --who ours_flex ours_merge ours_compiled --rounds 20 \
  --dims 8b --sequences 4 --length 2048
