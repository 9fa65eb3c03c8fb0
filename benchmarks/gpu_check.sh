#!/bin/bash
# What this project could not try where it was made: a GPU. JSON lines, in under nine minutes; nothing is changed. A part
# that fails or hangs says so in a line of its own, and the others follow; the quick and the important ones come first.
#   benchmarks/gpu_check.sh            (PYTHON may be set)
# It needs this project's dependencies and a GPU from Ampere on; of these, beside torch with CUDA, numpy, pyarrow, rich,
# safetensors, xxhash and tqdm, the parity checks import hydra-core, omegaconf and antlr4-python3-runtime alone.
# 1. parity: attention (merge) and the whole EAGLE-3 head against the definition, forward and backward; that a step does
#    not wait for the device; that a checkpoint's state continues as the run it was taken from
# 2. speed, memory and MFU of the training step in bf16, small and of an 8B layer
# 3. parity and speed of what is compiled: FlexAttention, draft.compile (needs Triton and a C compiler)
# Exit code 3: there is no GPU here, nothing was checked. 1: a check failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
status=0

part() { # seconds at most, then what is run
  local left=$((530 - SECONDS)) limit=$1 code
  shift
  if [ "$left" -lt "$limit" ]; then limit=$left; fi
  if [ "$limit" -lt 10 ]; then
    code=124
  else
    timeout --kill-after=10 "$limit" "$python" "$@" && return
    code=$?
    [ $code -ne 3 ] || exit 3
  fi
  status=1
  echo "{\"check\": \"$*\", \"ok\": false, \"exit\": $code, \"timed_out\": $([ $code -eq 124 ] && echo true || echo false)}"
}

step=(benchmarks/train_step.py --device cuda --dtype bf16 --rounds 10)
large=(--dims 8b --sequences 4 --length 2048 --steps 7)
part 180 benchmarks/gpu_check.py eager
part 90 "${step[@]}" --who ours_merge
part 120 "${step[@]}" "${large[@]}" --who ours_merge
part 180 benchmarks/gpu_check.py compiled
part 120 "${step[@]}" "${large[@]}" --who ours_compiled
part 120 "${step[@]}" --steps 3 --who ours_flex
exit $status
