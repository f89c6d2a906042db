# make train     set up .venv and train the language model that fits this machine
# make test      lint, types and tests; what CI runs
# make lint      the first two of these
# make bench     the layer against its peers (an H200 or H100)
# make clean     remove the environment and caches; runs/ stays
#
# Variables: PYTHON (the interpreter that makes the environment), VENV (where; empty to use PYTHON as it is, with
# nothing installed), ARGS (options of scripts/train_lm.py), JOBS (test processes).

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

# The CUDA version that the driver supports chooses the extra; without a GPU, cu12 serves to compile kernels and simulate.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA),$(shell test $(CUDA) -ge 13 && echo cu13 || echo cu12),cu12)
# Torch comes first, so that the rest adapts to it: a fixed version without a GPU; with one, the build for its driver.
TORCH := $(if $(CUDA),$(if $(filter cu13,$(EXTRA)),'torch>=2.11$(comma)<2.14','torch>=2.11$(comma)<2.14' --index-url https://download.pytorch.org/whl/cu126),'torch==2.13.0')
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

.PHONY: train test lint bench clean

train: $(READY)
	$(PY) scripts/train_lm.py $(ARGS)

# One thread a test process, so that two of them share two cores without waiting for each other.
test: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --durations=15

lint: $(READY_FOR_TESTS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(READY)
	$(PY) scripts/bench_layer.py

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
