# make train     set up .venv and train the language model that fits this machine
# make test      lint, types and tests; what CI runs
# make test-all  the same with the tests marked `full`, which take longer; results/cpu/test-all.log keeps what it prints
# make lint      ruff, and mypy on the package and the scripts
# make bench     the layer against its peers (an H200 or H100)
# make clean     remove the environment and caches; runs/ stays
#
# Variables: PYTHON (the interpreter that makes the environment), VENV (where; empty to use PYTHON as it is, with
# nothing installed), ARGS (options of scripts.train_lm), JOBS (test processes).

# A pipe fails where any part of it does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

# The CUDA version that the driver supports chooses the extra; without a GPU, cu12 serves to compile kernels and simulate.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA),$(shell test $(CUDA) -ge 13 && echo cu13 || echo cu12),cu12)
# Torch comes first, so that the rest adapts to it: a fixed version without a GPU; with one, the build for its driver.
TORCH := $(if $(CUDA),$(if $(filter cu13,$(EXTRA)),'torch>=2.11$(comma)<2.16','torch>=2.11$(comma)<2.16' --index-url https://download.pytorch.org/whl/cu126),'torch==2.13.0')
comma := ,

ifeq ($(VENV),)
PY := PYTHONPATH=$(CURDIR) $(PYTHON)
READY :=
READY_FOR_TESTS :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
READY_FOR_TESTS := $(VENV)/.ready-for-tests
endif

.PHONY: train test test-all lint bench clean

train: $(READY)
	$(PY) -m scripts.train_lm $(ARGS)

# One thread a test process, so that two of them share two cores without waiting for each other.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --durations=15

test: lint
	$(PYTEST)

test-all: lint
	@mkdir -p results/cpu
	$(PYTEST) -m "" | tee results/cpu/test-all.log

lint: $(READY_FOR_TESTS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(READY)
	$(PY) -m scripts.bench.layer

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -q $(TORCH)
	$(PY) -m pip install --disable-pip-version-check -q -e '.[$(EXTRA)]'
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready
	$(PY) -m pip install --disable-pip-version-check -q -e '.[$(EXTRA),dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
