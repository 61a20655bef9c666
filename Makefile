# Everything runs in a virtual environment of its own, .venv, made on first use from nothing but Python >= 3.11.
# A target's stamp file lets the second call skip pip; it is redone when pyproject.toml changes.

.DEFAULT_GOAL := help
.PHONY: help serve chat install dev test test-fast test-gpu lint format docs bench clean

VENV ?= .venv
BIN := $(VENV)/bin
SERVE_STAMP := $(VENV)/.installed-serve
DEV_STAMP := $(VENV)/.installed-dev

# Overridable: make serve MODEL=path-or-name PORT=8001 ARGS="--threads 4"
MODEL ?=
PORT ?=
ARGS ?=
PYTHON ?=
# Where pip looks for torch first. Empty: pip's own settings decide (pip.conf, PIP_INDEX_URL, ...). On Linux without a
# GPU, PyTorch's index of CPU builds gives 200 MB instead of the CUDA build's several GB.
TORCH_INDEX ?=
TORCH := torch>=2.11,<2.14

# An environment whose Python was removed or replaced is of no use: it is made anew, and filled anew.
$(shell test -x '$(BIN)/python' || rm -f '$(SERVE_STAMP)' '$(DEV_STAMP)')

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Variables: MODEL=name-or-path PORT=8000 ARGS="more flags" PYTHON=python3.12 TORCH_INDEX=url'

serve: $(SERVE_STAMP) ## Install if needed, then serve a model (default: smollm2-135m, about 90 MB, fetched once)
	@exec $(BIN)/megakernel serve $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port '$(PORT)') $(ARGS)

chat: $(SERVE_STAMP) ## Install if needed, then chat in the terminal
	@exec $(BIN)/megakernel chat $(ARGS)

install: $(SERVE_STAMP) ## Install what serving needs
dev: $(DEV_STAMP) ## Install what developing needs too

test: $(DEV_STAMP) ## Run all tests that this machine can run, with coverage
	$(BIN)/pytest --cov --cov-report=term $(ARGS)

test-fast: $(DEV_STAMP) ## Run the quick tests only, without coverage
	$(BIN)/pytest -q -m "not slow and not real_model and not gpu" $(ARGS)

test-gpu: $(DEV_STAMP) ## Run the tests that need an NVIDIA GPU, and write a page about the run
	$(BIN)/pytest -q -m gpu tests/kernel --gpu-report benchmarks/results/$(shell date +%F)-gpu-tests.json $(ARGS)

lint: $(DEV_STAMP) ## Check style, formatting, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## Rewrite the code in house style
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DEV_STAMP) ## Regenerate the parts of docs/ that are made from the code
	$(BIN)/python docs/generate.py

bench: $(DEV_STAMP) ## Measure this machine: tables, and one JSON line each
	$(BIN)/megakernel bench cpu $(ARGS)
	$(BIN)/megakernel bench http

clean: ## Remove what was built: environment, caches, coverage
	rm -rf '$(VENV)' build dist *.egg-info .coverage .coverage.* htmlcov .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@PYTHON='$(PYTHON)' VENV='$(VENV)' sh .ci/make-venv

$(SERVE_STAMP): pyproject.toml | $(BIN)/python
	@echo 'Installing PyTorch into $(VENV): the first time it is fetched, which can take minutes'
	@$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@echo 'Installing the server into $(VENV)'
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(DEV_STAMP): pyproject.toml $(SERVE_STAMP)
	@echo 'Installing what development needs into $(VENV)'
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@
