# Targets are explained by `make help`.
#
# Settings:  make serve ARGS="--model Qwen/Qwen2.5-0.5B-Instruct --port 8080"
#            make test  ARGS="tests/server -x"
#            make serve PYTHON=python3.12 VENV=/tmp/venv

VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
SOURCES := engine server tests
NODE_CLIENT := tests/clients/node

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: serve
serve: $(VENV)/.installed ## Install what is missing and serve on http://127.0.0.1:8000 (settings in ARGS)
	$(BIN)/outrider serve $(ARGS)

.PHONY: test
test: $(VENV)/.installed-dev ## Install what is missing and run the tests (pytest arguments in ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

.PHONY: test-clients
test-clients: $(VENV)/.installed-clients ## Install real clients, for Python and for Node, and test with them
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile tests/clients $(ARGS)

.PHONY: check
check: $(VENV)/.installed-dev ## Check format, lint and types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

.PHONY: format
format: $(VENV)/.installed-dev ## Format the code and fix what the linter can fix
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

.PHONY: bench
bench: $(VENV)/.installed ## Measure latencies and throughput, and what speculation gains (flags in ARGS)
	$(BIN)/outrider bench $(or $(ARGS),--paired)

.PHONY: clean
clean: ## Remove the environment, builds and caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache $(NODE_CLIENT)/node_modules

# The stamps keep the installation from being repeated until the dependencies change.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.installed $@

# Node comes as a package of Python, since the one that the system has may be too old, or none.
$(VENV)/.installed-clients: pyproject.toml constraints.txt $(NODE_CLIENT)/package-lock.json | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev,clients]'
	$(BIN)/npm ci --prefix $(NODE_CLIENT) --no-audit --no-fund
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Outrider needs Python 3.11 or newer; name it with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
