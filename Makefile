# make test | test-jobs | test-simulation | test-clients | test-nightly | lint | quickstart | bench | first-gpu | docs |
# clean. Each sets up what it needs; set-up is skipped while nothing it reads has changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup test test-jobs test-simulation test-nightly test-clients lint quickstart bench first-gpu docs clean

PYTHON ?= python3
VENV ?= .venv
BENCH_VENV ?= .venv-bench
CLIENTS_VENV ?= .venv-clients
DOCS_VENV ?= .venv-docs
DOCS_TOOLS := mkdocs-material==9.8.1
BIN := $(VENV)/bin
# On a terminal pip shows what it downloads.
PIP_FLAGS := $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check --no-input
SETUP_INPUTS := pyproject.toml constraints.txt

# Two test workers are the most that pay on a small machine; TEST_WORKERS=0 runs all tests in one process.
TEST_WORKERS ?= 2
TESTS ?= tests/unit tests/ranks tests/device
CLIENT_TESTS ?= tests/clients
# Tests of which the others run few rows (tests/helpers/any_two.py).
PRODUCT_TESTS = $$(grep -rl "any_two import" tests/unit tests/ranks tests/simulation)
RANDOM_TESTS ?= tests/ranks/running/test_property.py tests/ranks/offload/test_composition.py
NIGHTLY_SECONDS ?= 7200
SEARCH_MINUTES ?= 60
SEARCH_SEED ?= 1
MINUTES ?= 3
FIRST_GPU ?= --out runs/first-gpu.md

# One thread a process: tests and benchmarks start several processes, which would otherwise fight for the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests start hundreds of processes. Without bytecode files each of them compiles Shoal again, a quarter of its start.
ONE_THREAD += PYTHONDONTWRITEBYTECODE=

RUN_TESTS = $(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

help:
	@echo "make test        set up, run the tests (TESTS='tests/unit/test_x.py' for some of them)"
	@echo "make test-jobs   set up, run the tests that start whole jobs of processes, as a user does"
	@echo "make test-simulation  set up, run the tests on simulated accelerators: the check of streams, dry runs, the planner"
	@echo "make test-nightly  set up, run what is too long for them: any three settings together, all rows of products, the large benchmarks, dry runs of few blocks against all, every causal family of Transformers, the random tests longer, and the random search (SEARCH_MINUTES=60 SEARCH_SEED=1)"
	@echo "make test-clients  set up a third environment with Accelerate, Transformers and the others, run Shoal under them"
	@echo "make lint        set up, run ruff, mypy and the import contract"
	@echo "make quickstart  set up, train a small GPT on 2 local ranks with ZeRO-3 for about $(MINUTES) minutes"
	@echo "make bench       set up a second environment with the peers, run the step benchmark"
	@echo "make first-gpu   check Shoal on a machine with one GPU, in under 20 minutes (VENV= takes PYTHON as it is, and installs nothing)"
	@echo "make docs        set up a fourth environment with MkDocs, build the site into build/site"
	@echo "make clean       remove what the above made"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	    f"Shoal needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12 ...")'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp: $(SETUP_INPUTS) | $(BIN)/python
	@echo "installing Shoal into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-test: $(SETUP_INPUTS) | $(BIN)/python
	@echo "installing Shoal and its tests' tools into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test]'
	@touch $(VENV)/.stamp $@

$(VENV)/.stamp-lint: $(SETUP_INPUTS) | $(BIN)/python
	@echo "installing Shoal, its tests' tools and the linters into $(VENV)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test,lint]'
	@touch $(VENV)/.stamp $(VENV)/.stamp-test $@

# Triton comes with torch for GPUs. Tests of kernels interpret it; the others run without it, as on a machine without GPU.
$(VENV)/.stamp-kernels: Makefile | $(BIN)/python
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --upgrade --target $(VENV)/kernels 'triton>=3.2; platform_system == "Linux"' \
	    || echo "Triton cannot be installed here: the tests of kernels are skipped"
	@touch $@

setup: $(VENV)/.stamp

test: $(VENV)/.stamp-test $(VENV)/.stamp-kernels
	$(RUN_TESTS) $(TESTS)

test-jobs: $(VENV)/.stamp-test
	$(RUN_TESTS) tests/jobs

test-simulation: $(VENV)/.stamp-test
	$(RUN_TESTS) tests/simulation

# The fourth line draws 50 times as many examples as make test does, other ones each time.
test-nightly: $(VENV)/.stamp-test $(CLIENTS_VENV)/.stamp
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_WORKERS) --timeout 300 tests/nightly
	$(ONE_THREAD) $(CLIENTS_VENV)/bin/python -m pytest -n $(TEST_WORKERS) tests/nightly/test_families.py
	$(ONE_THREAD) SHOAL_TESTS_ALL_ROWS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PRODUCT_TESTS)
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --hypothesis-profile thorough \
	    --timeout $(NIGHTLY_SECONDS) $(RANDOM_TESTS)
	$(ONE_THREAD) $(CLIENTS_VENV)/bin/python -m tests.search --minutes $(SEARCH_MINUTES) --seed $(SEARCH_SEED) \
	    --jobs $(TEST_WORKERS)

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

quickstart: $(VENV)/.stamp
	$(ONE_THREAD) $(BIN)/shoal train --ranks 2 --stage 3 --minutes $(MINUTES)

$(BENCH_VENV)/.stamp: $(SETUP_INPUTS)
	@echo "installing Shoal and the peers into $(BENCH_VENV)"
	@test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e .
	@$(BENCH_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[bench]'
	@touch $@

$(CLIENTS_VENV)/.stamp: $(SETUP_INPUTS)
	@echo "installing Shoal, its tests' tools and the clients into $(CLIENTS_VENV)"
	@test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[test,clients]'
	@touch $@

# One test at a time: each starts two ranks.
test-clients: $(CLIENTS_VENV)/.stamp
	$(ONE_THREAD) $(CLIENTS_VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(CLIENT_TESTS)

bench: $(BENCH_VENV)/.stamp
	$(ONE_THREAD) $(BENCH_VENV)/bin/python -m benchmarks.step --ranks 2 --sequences 1 4 --precision bf16 fp32 --out runs/step.json

# With VENV= nothing is installed: PYTHON has torch and what Shoal needs beside it (docs/how-to/first-gpu.md).
first-gpu: $(if $(strip $(VENV)),$(VENV)/.stamp-test)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(if $(strip $(VENV)),$(BIN)/python,$(PYTHON)) -m benchmarks.first_gpu $(FIRST_GPU)

$(DOCS_VENV)/.stamp: $(SETUP_INPUTS)
	@echo "installing the site's tools into $(DOCS_VENV)"
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install $(PIP_FLAGS) $(DOCS_TOOLS)
	@touch $@

# What does not need the site is tested by make test: links between files, code blocks, command lines, the reference.
docs: $(DOCS_VENV)/.stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "built build/site/index.html"

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(CLIENTS_VENV) $(DOCS_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
