# Every target sets up what it needs: a virtual environment in .venv, made once and brought up to date when
# pyproject.toml or constraints.txt change.
#
#   make demo PYTHON=python3.12     with another interpreter
#   make demo PIP_ARGS="…"          with arguments for pip, such as the index of PyTorch's CPU builds
#   make test JOBS=0                in one process, which a debugger needs

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-real gpu gpu-dry check format docs docs-serve wheel clean

PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell $(name) -c "import sys; sys.version_info >= (3, 11) and print('$(name)')" 2>/dev/null)) python3)
VENV ?= .venv
PIP_ARGS ?=
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.specdec-installed

PACKAGES := specdec drafters verifiers experiments
# Shapes in annotations are checked in these packages while tests run, at the beginning of every test
# (tests/shapes.py). Not in experiments, which has no tensor code of its own on the main path; its tests switch the
# checks off (tests/experiments/conftest.py).
SHAPES := --jaxtyping-packages=specdec,drafters,verifiers,tests.check_types
# In processes that take over each other's tests at the end, each with one thread for its tiny tensors.
PARALLEL := -n $(JOBS) --dist worksteal
# No network in a test, and two runs alike whatever the caller's shell exports. Byte code is kept: without it every
# process spends seconds on compiling what it imports.
TEST := env -u OMP_NUM_THREADS -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 WANDB_MODE=offline $(BIN)/python -m pytest $(SHAPES) $(PARALLEL)

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(STAMP) ## Make the environment in .venv

# torch comes first and alone: its wheel is the one that depends on the machine.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "This project needs Python 3.11 or newer, and '$(PYTHON)' is not: install one, or name it: make PYTHON=…" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV); the first time this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt $(PIP_ARGS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt $(PIP_ARGS)
	@$(BIN)/python -m specdec.doctor > /dev/null || true # compiles the C and measures what is chosen
	@touch $@

demo: $(STAMP) ## Decode with every drafter beside plain decoding, on the bundled models
	$(BIN)/python -m experiments.demo

test: $(STAMP) ## Run one strong case of every claim, with array shapes checked
	$(TEST) $(ARGS)

test-full: $(STAMP) ## Run every case of every claim
	$(TEST) -m "not gpu and not real" $(ARGS)

# One process, one model in memory at a time. Shapes are not checked: these are whole models.
test-real: $(STAMP) ## Run what is promised of real models, those in the folder SPECDEC_MODELS
	@test -n "$(SPECDEC_MODELS)" || { echo "Name a folder of models: make test-real SPECDEC_MODELS=FOLDER" >&2; exit 1; }
	HF_HUB_OFFLINE=1 SPECDEC_MODELS="$(SPECDEC_MODELS)" $(BIN)/python -m pytest -m real tests/real $(ARGS)

# On a machine with a GPU, the Python that has a torch for it is at hand and the network may not be: the environment is
# used where it was made, and is never made for this. A warning of some package in another version fails no test there.
GPU_PYTHON = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(STAMP))),$(BIN)/python,$(PYTHON))
gpu: ## Run the tests that need a GPU, on a machine that has one
	HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m pytest -m gpu -o filterwarnings=default tests/gpu tests/specdec/test_*kernel*.py $(ARGS)

# The machines with GPUs have this Triton. Where it cannot be had, only the installed one compiles the kernels.
gpu-dry: $(STAMP) ## Check what can be checked of the GPU path without a GPU
	@test -d $(VENV)/triton-3.6.0 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(VENV)/triton-3.6.0 triton==3.6.0 $(PIP_ARGS) || echo "Triton 3.6.0 could not be installed" >&2
	env -u OMP_NUM_THREADS HF_HUB_OFFLINE=1 $(BIN)/python -m tests.gpu.dry $(VENV)/triton-3.6.0

check: $(STAMP) ## Lint, check the format and the types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python $(PACKAGES)

format: $(STAMP) ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not --quiet, which hides warnings from --strict, too. The variable silences the theme's notice about its successor.
docs: $(STAMP) ## Build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP) ## Show the documentation on http://127.0.0.1:8000 while you edit it
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

wheel: $(STAMP) ## Build the source distribution and the wheel into dist/
	$(BIN)/python -m build --no-isolation --outdir dist

clean: ## Remove the environment and all that was built
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
