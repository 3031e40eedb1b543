# Everything runs in a virtual environment of its own, made from PYTHON. PIP is how packages are put into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP ?= $(BIN)/python -m pip

# Options of examples/research.py (make demo), of pytest (make test, check, slow).
ARGS ?=
# Processes that run the tests: one of them everything that starts clusters or kills processes, the others the rest.
JOBS ?= 2

RUN_TIME := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test check bench soak slow search interop clean

help:
	@echo 'make demo    research over a folder with sub-agents, offline (ARGS="--help" shows its options)'
	@echo 'make test    all tests but the slow ones (ARGS="tests/unit -k retry" chooses)'
	@echo 'make check   lint, format, types and floors, then make test'
	@echo 'make slow    the tests marked slow'
	@echo 'make search  the property tests with many new random inputs'
	@echo 'make bench   every benchmark, in a small size (ARGS="turn stream" chooses)'
	@echo 'make soak    30 minutes of mixed load on a local cluster, with processes killed (ARGS="--minutes 5")'
	@echo 'make interop providers against a model server that others wrote (needs npm and the network)'
	@echo 'make clean   removes what builds, tests and the demo leave behind'

demo: $(RUN_TIME)
	$(BIN)/python examples/research.py $(ARGS)

test: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m "not slow" $(or $(ARGS),-n $(JOBS) tests)

check: $(DEVELOPMENT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lousho_ray
	$(BIN)/pyright lousho_ray
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

slow: $(DEVELOPMENT)
	$(BIN)/python -m pytest -m slow $(or $(ARGS),tests)

search: $(DEVELOPMENT)
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest --timeout 600 -m hypothesis $(or $(ARGS),tests/unit)

bench: $(RUN_TIME)
	$(BIN)/python benchmarks/run.py $(ARGS)

soak: $(DEVELOPMENT)
	$(BIN)/python benchmarks/soak.py $(ARGS)

interop: $(DEVELOPMENT)
	PYTHON=$(BIN)/python tests/interop/run.sh $(ARGS)

clean:
	rm -rf build dist *.egg-info report.md
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The stamps are older than pyproject.toml as soon as it changes; the set-up is then done again.
$(RUN_TIME): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable .
	touch $@

$(DEVELOPMENT): pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable '.[dev]'
	touch $(RUN_TIME) $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
