# `make` builds .venv; `make demo` shows kvferry at work; `make test` is what CI runs.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPAT_VERSION := 0.29.0
COMPAT_VENV := .venv-$(COMPAT_VERSION)
COMPAT_READY := $(COMPAT_VENV)/.ready
# Tests that show one request end to end on real and on emulated engines; they are what `make compat` runs per
# vLLM version.
END_TO_END := tests/integration/test_end_to_end.py tests/integration/test_emulator.py
WORKERS ?= 2
# Compiled test modules are kept, wherever this runs: rewriting their assertions again costs more than half of a start.
unexport PYTHONDONTWRITEBYTECODE
SETUP_INPUTS := pyproject.toml scripts/setup.sh $(wildcard requirements/*.txt)

.DEFAULT_GOAL := setup
.PHONY: setup compiled demo test test-fast test-simulation test-integration test-engines test-interpreted test-long simulate compat \
	lint format types contracts coverage clean

setup: $(READY) compiled

$(READY): $(SETUP_INPUTS)
	scripts/setup.sh --venv $(VENV)
	@touch $@

$(COMPAT_READY): $(SETUP_INPUTS)
	scripts/setup.sh --venv $(COMPAT_VENV) --vllm $(COMPAT_VERSION)
	@touch $@

# The router's hot path, compiled by mypyc. Where there is no compiler the router runs interpreted, and says so.
compiled: $(READY)
	$(BIN)/python scripts/compile_router.py --optional

demo: $(READY) compiled
	$(BIN)/kvferry demo

# The first four keep to one core each. What follows runs what has been compiled, and fails if that is nothing.
test: export KVFERRY_DEMANDS_COMPILED := 1
test: $(READY)
	$(MAKE) -j $(WORKERS) lint types contracts compiled test-interpreted
	$(MAKE) test-fast
	$(MAKE) test-simulation
	$(MAKE) simulate
	$(MAKE) test-integration
	$(MAKE) test-engines

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-cache

test-fast: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not long" tests/unit tests/property tests/transcripts tests/architecture

# The router's sources as they are, which is how they run while they are being changed.
test-interpreted: $(READY)
	KVFERRY_DEMANDS_COMPILED= KVFERRY_INTERPRETED=1 $(BIN)/python -m pytest -q -m "not long" tests/unit/router

test-simulation: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not long" tests/simulation

# Histories of the protocol that no earlier run has seen are found by other seeds: SEEDS=N FROM=S.
SEEDS ?= 1000
FROM ?= 0

simulate: $(READY)
	$(BIN)/kvferry simulate --seeds $(SEEDS) --from $(FROM) --jobs $(WORKERS)

# What has a process, an agent or a stub to itself; several at a time.
test-integration: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not long and not engines" tests/integration --timeout 300

# vLLM engines fill the machine; one test at a time.
test-engines: $(READY)
	$(BIN)/python -m pytest -q -m "engines and not long" tests/integration --timeout 300

test-long: $(READY)
	$(BIN)/python -m pytest -q -m long --timeout 1800
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q tests/property -m "not integration" --timeout 1800
	$(BIN)/kvferry simulate --mutants --jobs $(WORKERS)

compat: $(READY) $(COMPAT_READY)
	$(COMPAT_VENV)/bin/python -m pytest -q $(END_TO_END) --timeout 300
	$(BIN)/python -m pytest -q $(END_TO_END) --timeout 300

coverage: $(READY)
	$(BIN)/coverage run -m pytest -q -m "not integration and not long"
	$(BIN)/coverage report

clean:
	rm -rf .venv .venv-* src/kvferry/_compiled* build dist demo-output soak-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
