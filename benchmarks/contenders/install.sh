#!/bin/bash
# Installs the peers of benchmarks/train_step.py into a virtual environment of their own, since their pins differ from ours:
#   benchmarks/contenders/install.sh [FOLDER]        (default: benchmarks/contenders/.venv; PYTHON and TORCH may be set)
# Everybody runs on the same torch. SpecForge pins torch 2.11 and an inference server that its EAGLE-3 core does not need,
# so it is installed without its dependencies; those that the core imports are listed here.
set -euo pipefail
folder=${1:-"$(dirname "$0")/.venv"}
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet "$@"; }
pip "${TORCH:-torch==2.13.0}" triton
pip "transformers==5.8.1" numpy loguru pydantic pydantic-settings safetensors psutil accelerate "datasets<=5.1" rich click \
  typer tqdm protobuf huggingface-hub setuptools aiohttp httpx openai
pip --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0 yunchang
echo "peers installed: give train_step.py --peers $folder/bin/python"
