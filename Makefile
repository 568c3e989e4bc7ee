# Every command of the project; `make` alone lists them. The logic of set-up is in scripts/setup.py.
# Arguments of the command underneath go in ARGS: make grpo ARGS="steps=5 seed=1", make test ARGS="-k ledger".

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The interpreter that set-up starts from; empty: the first of python3.11, 3.12, 3.13 and python3 that suits.
PYTHON ?=
# Where the environment is made, for the CPU stack and for the CUDA stack.
VENV ?= .venv
VENV_CUDA ?= .venv-cuda
# PyTorch's public index of CPU builds. It is asked for torch alone, and only where pip does not find torch's CPU build.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Arguments for the command underneath.
ARGS ?=

IN_VENV = $(VENV)/bin/python
export PYTHON TORCH_CPU_INDEX

.PHONY: help
help:  ## List these commands
	@awk -F ':|## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$NF }' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup:  ## Make .venv with the locked CPU stack; does nothing when it is complete
	@scripts/setup.sh --stack cpu --venv $(VENV)

.PHONY: grpo
grpo: setup  ## Train the default configuration to its end and print where the report is
	@$(IN_VENV) -m forge_async.apps.grpo $(ARGS)

.PHONY: test
test: setup  ## Run all tests that fit a machine without a GPU, less those marked long
	@OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -m "not long and not gpu" $(ARGS)

.PHONY: test-long
test-long: setup  ## Run the tests marked long
	@OMP_NUM_THREADS=1 $(IN_VENV) -m pytest -m "long and not gpu" $(ARGS)

.PHONY: gpu
gpu:  ## Make .venv-cuda with the locked CUDA stack and run the tests marked gpu
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make gpu: no NVIDIA GPU found (nvidia-smi lists none)." >&2; exit 1; }
	@scripts/setup.sh --stack cuda --venv $(VENV_CUDA)
	@OMP_NUM_THREADS=1 $(VENV_CUDA)/bin/python -m pytest -m gpu $(ARGS)

.PHONY: check
check: setup  ## Check style, formatting, types and import contracts; changes nothing
	@$(IN_VENV) -m ruff check .
	@$(IN_VENV) -m ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(IN_VENV) -m pyright
	@$(IN_VENV) -c 'from importlinter.cli import lint_imports_command as check; check()' --no-cache --no-logo

.PHONY: format
format: setup  ## Format the code and mend what ruff can mend
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

.PHONY: lock
lock:  ## Regenerate requirements/cpu.lock and cuda.lock, keeping pins that still fit (ARGS=--upgrade for the newest)
	@$(if $(wildcard $(IN_VENV)),$(IN_VENV),python3) scripts/lock.py $(ARGS)

.PHONY: clean
clean:  ## Remove caches and build products; keeps .venv and runs
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean  ## Remove the environments too
	@rm -rf $(VENV) $(VENV_CUDA)
