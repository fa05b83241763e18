# One command per verb. `make run` and `make test` each set up what they need; neither needs the other first.
#
#   VENV       the project's environment                        (default .venv)
#   VLLM_VENV  the environment of the real engine in the tests  (default .venv-vllm)
#   PYTHON     the interpreter the environments are made with   (default python3; 3.11 or newer)
#   ONCE=1     `make run` stops after the table
#   PYTEST     further arguments for pytest, e.g. PYTEST="-k ledger -x"
#   ARGS       further arguments for the bench, e.g. ARGS="--quick"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
PY := $(VENV)/bin/python

# A stamp lies inside the environment it speaks of, so deleting either deletes both. Its name covers the
# requirements and the tree the editable install points to; it is written only after a full success.
KEY := $(shell { cat pyproject.toml; pwd -P; } | cksum | tr -d ' ')
RUN_STAMP := $(VENV)/.ready-run-$(KEY)
TEST_STAMP := $(VENV)/.ready-test-$(KEY)

export PYTHON
export VLLM_VENV := $(abspath $(VLLM_VENV))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PYTHONUNBUFFERED := 1
# pyright: Node comes from its wheel, pyright itself lies in its package; nothing is looked up or fetched.
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help
help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

# ---- set-up ------------------------------------------------------------------------------------------

$(RUN_STAMP): pyproject.toml scripts/make_venv.sh
	@scripts/make_venv.sh "$(VENV)"
	@echo "make: installing ctxgate into $(VENV)"
	@$(PY) -m pip install -qq -e '.[twin]'
	@touch "$@"

$(TEST_STAMP): $(RUN_STAMP)
	@echo "make: installing the tools of the tests and checks into $(VENV)"
	@$(PY) -m pip install -qq -e '.[twin,test]'
	@touch "$@"

# The real engine is several gigabytes. Where it cannot be installed, its tests skip with a reason; in CI
# (CI=true) that is a failure. It waits for $(RUN_STAMP) so that two installs never compete for apt's lock.
.PHONY: vllm
vllm: $(RUN_STAMP) ## install the real engine that the end-to-end tests talk to
	@scripts/install_vllm.sh "$(VLLM_VENV)"

# The bench's mock upstream and load generator are C; without a compiler slower Python ones take their place.
.PHONY: cc
cc:
	@command -v cc >/dev/null || scripts/apt_install.sh gcc libc6-dev || true

# ---- the verbs ---------------------------------------------------------------------------------------

.PHONY: run test unit check bench bench-peers docs clean
run: $(RUN_STAMP) ## two twins, the gateway and a working agent, then what it saved (ONCE=1: stop after the table)
	@$(PY) -m ctxgate.gateway.cli demo $(if $(filter-out 0,$(ONCE)),--once)

test: $(TEST_STAMP) vllm ## every test, those against real vLLM servers included
	@$(PY) -m pytest $(PYTEST)

SLOW := e2e contract property
unit: $(TEST_STAMP) ## the fast tests only: no servers, processes or databases, no long properties
	@HYPOTHESIS_PROFILE=quick $(PY) -m pytest $(addprefix --ignore tests/,$(SLOW)) -m "not e2e and not integration" $(PYTEST)

check: lint types imports sizes words links wheel ## lint, types, import contracts, sizes, words, links, wheel

bench: $(TEST_STAMP) cc ## what the gateway adds, against a direct call and the smallest possible proxy
	@$(PY) -m tests.bench.bench $(ARGS)

bench-peers: $(TEST_STAMP) cc ## the same against other gateways, each in an environment of its own
	@$(PY) -m tests.bench.peers $(ARGS)

docs: $(TEST_STAMP) ## regenerate what is generated in the documentation, then check its links
	@$(PY) -m ctxgate.gateway.config_docs .
	@$(PY) scripts/check_docs.py

clean: ## remove the environments and everything that was generated
	rm -rf .venv .venv-vllm .make build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the parts of `make check` -----------------------------------------------------------------------

.PHONY: lint types mypy pyright imports sizes words links wheel
lint: $(TEST_STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: mypy pyright

mypy: $(TEST_STAMP)
	@$(PY) -m mypy

pyright: $(TEST_STAMP)
	@$(PY) -m pyright

imports: $(TEST_STAMP)
	@$(VENV)/bin/lint-imports --no-logo

sizes: $(TEST_STAMP)
	@$(PY) scripts/check_sizes.py

words: $(TEST_STAMP)
	@$(PY) scripts/check_words.py

links: $(TEST_STAMP)
	@$(PY) scripts/check_docs.py

wheel: $(TEST_STAMP)
	@$(PY) -m pytest -q tests/house/test_wheel.py
