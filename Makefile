# `make help` lists the targets. Whatever needs an environment makes .venv first, once, from pinned versions.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The Python that makes .venv; for test-gpu and bench, the Python whose torch sees the GPU.
PYTHON ?= python3
# Processes that run tests at a time.
WORKERS ?= 2
# More words for pytest or gemmery: make test-host ARGS='-k plan'
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# One thread a worker: torch's own threads only get into each other's way here.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS)
# What `make test` runs of the tests that `make test-all` runs whole.
SAMPLE := -m 'not slow and not exhaustive' --hypothesis-profile=sample
# Tests of one group share what they have compiled, so one worker runs them; other tests go to whichever worker is free.
GROUPED := --dist loadgroup
BALANCED := --dist worksteal
INTERPRETED := env TRITON_INTERPRET=1
COMPILED := env -u TRITON_INTERPRET

.PHONY: help
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environment -----------------------------------------------------------------------------------------------------

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gemmery needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[cli,demo,dev,docs,lab]'
	@touch $@

# Another Triton beside the one of .venv: first on the path, so that torch need not be installed again.
.venv-triton-%/.ready: constraints-%.txt | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install --disable-pip-version-check --no-deps --target $(@D) --requirement $<
	@touch $@

.PHONY: install
install: $(READY) ## the environment alone

# --- what users see --------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(READY) ## a sentence model with every linear layer through gemmery (1.5 minutes and 3 GB the first time)
	@$(VENV)/bin/gemmery demo $(ARGS)

.PHONY: doctor
doctor: $(READY) ## what this machine can do
	@$(VENV)/bin/gemmery doctor $(ARGS)

# Nothing is fetched; the first variable keeps an advertisement for a successor of MkDocs out of the output.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(COMPILED) $(PY) -m mkdocs

.PHONY: docs
docs: $(READY) ## the documentation, into site/: open site/index.html
	@$(MKDOCS) build

.PHONY: serve-docs
serve-docs: $(READY) ## the documentation while it is being written, on localhost:8000
	@$(MKDOCS) serve $(ARGS)

# --- checks ----------------------------------------------------------------------------------------------------------

.PHONY: test
test: static test-host test-interpret test-compile ## a sample of what needs no GPU (6 to 12 minutes on 2 cores)

.PHONY: test-slow
test-slow: SAMPLE := -m 'slow and not exhaustive' --hypothesis-profile=sample
test-slow: test-host test-interpret test-compile ## slower tests, which `make test` leaves out

.PHONY: test-all
test-all: SAMPLE :=
test-all: static test-host test-interpret test-compile ## both, with every kernel, size and example (much longer)

# Each of these has one process, so they run side by side.
.PHONY: static
static: $(READY)
	@$(MAKE) -j$(WORKERS) lint types docs

.PHONY: lint
lint: $(READY) ## check with ruff: rules and format
	$(PY) -m ruff check
	$(PY) -m ruff format --check

.PHONY: types
types: $(READY) ## mypy
	$(PY) -m mypy

.PHONY: format
format: $(READY) ## fix and format with ruff
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# Triton decides when a kernel is defined whether it is interpreted, so each kind of test is a process of its own.

.PHONY: test-host
test-host: $(READY) ## tests that run no kernel
	$(COMPILED) $(PYTEST) $(GROUPED) tests/host $(SAMPLE) $(ARGS)

.PHONY: test-interpret
test-interpret: $(READY) ## kernels through Triton's interpreter
	$(INTERPRETED) $(PYTEST) $(BALANCED) tests/interpret $(SAMPLE) $(ARGS)

.PHONY: test-compile
test-compile: $(READY) ## a sample of kernels compiled for other machines' GPUs
	$(COMPILED) $(PYTEST) $(GROUPED) tests/compile $(SAMPLE) $(ARGS)

.PHONY: test-browser
test-browser: $(READY) ## the lab's page in Chromium, which must be installed: chromium and chromium-driver on Debian
	$(COMPILED) $(PYTEST) -n 0 tests/browser $(ARGS)

.PHONY: check-targets
check-targets: $(READY) ## every kernel and config compiled for every target (long)
	$(COMPILED) $(PY) -m gemmery.lab.targets --all $(ARGS)

# --- packages --------------------------------------------------------------------------------------------------------

.venv-package/.ready: constraints-package.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --requirement $<
	@touch $@

.PHONY: package
package: .venv-package/.ready ## the sdist and the wheel, into dist/
	rm -rf dist
	$(<D)/bin/python -m build --no-isolation
	$(<D)/bin/python -m twine check --strict dist/*

.PHONY: test-package
test-package: package $(READY) .venv-triton-oldest/.ready .venv-triton-newest/.ready ## install both in new environments and test them
	$(PY) tests/package/install.py dist --builder .venv-package --triton .venv-triton-oldest --triton .venv-triton-newest

.PHONY: check-release
check-release: package ## what a release needs besides tests: version, changelog, addresses
	$(PYTHON) .ci/release.py $(ARGS)

# Of tests with parameters, a sixteenth: the kernels of one version of Triton are nearly those of another.
SHORT := -m 'not slow and not exhaustive' --hypothesis-profile=quick --thin 16
.PHONY: test-oldest test-newest
test-oldest: ## a shorter pass with the oldest Triton
test-newest: ## a shorter pass with the newest Triton
test-oldest test-newest: test-%: $(READY) .venv-triton-%/.ready
	PYTHONPATH=$(CURDIR)/.venv-triton-$* $(INTERPRETED) $(PYTEST) $(BALANCED) tests/interpret $(SHORT) $(ARGS)
	PYTHONPATH=$(CURDIR)/.venv-triton-$* $(COMPILED) $(PYTEST) $(GROUPED) tests/compile $(SHORT) $(ARGS)

# --- on a machine with a GPU, with its own torch ---------------------------------------------------------------------

.PHONY: test-gpu
test-gpu: ## tests on the GPU, with the torch of PYTHON
	$(COMPILED) PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

.PHONY: bench
bench: ## every suite on the GPU, with the torch of PYTHON; then the tables and pictures of README and docs
	@failed=0; \
	measure() { $(COMPILED) PYTHONPATH=src $(PYTHON) -m gemmery.cli bench --json benchmarks/results "$$@" $(ARGS) \
	  || { [ $$? -eq 1 ] && failed=1; }; }; \
	measure --suite all; \
	measure --suite square --dtype fp16 --against cublas,seed; \
	$(PYTHON) benchmarks/readme_tables.py; \
	$(PYTHON) benchmarks/plots.py; \
	exit $$failed

# --- the rest --------------------------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove environments, builds and caches
	rm -rf .venv .venv-package .venv-triton-* build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
