# make train     set up .venv and train the language model that fits this machine
# make test      lint, types and tests; what CI runs
# make test-all  the same, then the tests marked `full`, which take longer; results/cpu/test-all.log keeps what it prints
# make newest    the integrations' tests, `full` ones too, on the newest releases, in an environment of their own (NEWEST)
# make pins      what that environment has becomes constraints.txt, which every other environment follows
# make families  the tests of every family of transformers; results/cpu/families.log keeps a line of each
# make lint      ruff, mypy on the packages and the scripts, and sentences that are hard to read
# make site      the documentation, built strictly into site/; what CI runs after the tests
# make bench     the layer against its peers (an H200 or H100)
# make clean     remove the environments (VENV and NEWEST, if they are some) and caches; runs/ stays
#
# Variables: PYTHON (the interpreter that makes the environment), VENV (where; empty to use PYTHON as it is, with
# nothing installed), NEWEST, ARGS (options of scripts.train_lm), JOBS (test processes). Paths may have spaces: recipes read them from
# their shell's environment, and no target is named by one, since make would take it for two.

# A pipe fails where any part of it does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
JOBS ?= 2
ARGS ?=
export PYTHON VENV NEWEST

# The CUDA version that the driver supports chooses the extra; without a GPU, cu12 serves to compile kernels and simulate.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
EXTRA := $(if $(CUDA),$(shell test $(CUDA) -ge 13 && echo cu13 || echo cu12),cu12)
# Torch comes first, so that the rest adapts to it: a fixed version without a GPU; with one, the build for its driver. Of CUDA 12's
# builds Blackwell GPUs run the one for 12.8, which ends with torch 2.11; the others have newer versions in the one for 12.6.
comma := ,
BLACKWELL := $(shell nvidia-smi --query-gpu=compute_cap --format=csv$(comma)noheader 2>/dev/null | grep '^1[0-9][.]')
INDEX := https://download.pytorch.org/whl/$(if $(BLACKWELL),cu128,cu126)
TORCH_FOR_GPU := 'torch>=2.11$(comma)<2.16' $(if $(filter cu12,$(EXTRA)),--index-url $(INDEX))
TORCH := $(if $(CUDA),$(TORCH_FOR_GPU),'torch==2.13.0')

# The versions that the tests ran with; with a GPU, whatever goes with its driver's CUDA.
CONSTRAINTS := $(if $(CUDA),,-c constraints.txt)

PY := $(if $(VENV),"$$VENV/bin/python",PYTHONPATH="$$PWD" "$$PYTHON")
PIP := $(PY) -m pip install --disable-pip-version-check -q $(CONSTRAINTS)

.PHONY: train test test-all newest pins families lint site bench clean
.PHONY: ready ready-for-tests ready-for-site environment tools site-tools

train: ready
	$(PY) -m scripts.train_lm $(ARGS)

# One thread a test process, so that two of them share two cores without waiting for each other.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) --durations=15

test: lint
	$(PYTEST)

test-all: lint
	@mkdir -p results/cpu
	{ $(PYTEST) && $(PYTEST) -m full; } | sed -u "s|$$PWD/||g" | tee results/cpu/test-all.log

newest:
	@[[ ! -e $$NEWEST || -f $$NEWEST/pyvenv.cfg ]] || { echo "NEWEST: expected a virtual environment, or no folder yet, got $$NEWEST"; exit 1; }
	"$$PYTHON" -m venv --clear "$$NEWEST"
	$(MAKE) --no-print-directory VENV="$$NEWEST" CONSTRAINTS= environment tools
	OMP_NUM_THREADS=1 "$$NEWEST/bin/python" -m pytest -q -n $(JOBS) -m "" tests/integrations

pins:
	{ echo "# Made by \`make newest pins\`. torch's version is the Makefile's, pip's the environment's."; \
	"$$NEWEST/bin/python" -m pip freeze --all --exclude-editable --exclude torch --exclude pip; } > constraints.txt

families: ready-for-tests
	@mkdir -p results/cpu
	{ $(PY) -m pip list --format=freeze | grep -E '^(torch|transformers)=='; \
	OMP_NUM_THREADS=1 $(PY) -m pytest -v --no-header -W ignore -m "" tests/integrations/test_transformers.py; } \
		| sed -u "s|$$PWD/||g" | tee results/cpu/families.log

lint: ready-for-tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m scripts.checks.style

site: ready-for-site
	$(PY) -m scripts.site

bench: ready
	$(PY) -m scripts.bench.layer

# The environment is made again where what it is made of is newer.
ready:
	@test -z "$$VENV" || test "$$VENV/.ready" -nt pyproject.toml -a "$$VENV/.ready" -nt ptxsim/pyproject.toml \
		-a "$$VENV/.ready" -nt constraints.txt || $(MAKE) --no-print-directory environment

ready-for-tests: ready
	@test -z "$$VENV" || test "$$VENV/.ready-for-tests" -nt "$$VENV/.ready" || $(MAKE) --no-print-directory tools

ready-for-site: ready
	@test -z "$$VENV" || test "$$VENV/.ready-for-site" -nt "$$VENV/.ready" || $(MAKE) --no-print-directory site-tools

environment:
	@"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	"$$PYTHON" -m venv "$$VENV"
	$(PIP) $(TORCH)
	$(PIP) -e ./ptxsim -e '.[$(EXTRA),lab]'
	@touch "$$VENV/.ready"

# torchtitan without its dependencies: its MoE block imports two of them, which the extra dev has.
tools:
	$(PIP) -e '.[$(EXTRA),dev]'
	$(PIP) --no-deps torchtitan
	@touch "$$VENV/.ready-for-tests"

site-tools:
	$(PIP) -e '.[$(EXTRA),docs]'
	@touch "$$VENV/.ready-for-site"

clean:
	@for made in "$$VENV" "$$NEWEST"; do \
	if [[ -z $$made || ! -e $$made ]]; then true; \
	elif [[ ! -f $$made/pyvenv.cfg ]]; then echo "$$made stays: it is no virtual environment"; \
	elif [[ "$$(pwd -P)/" == "$$(cd "$$made" && pwd -P)"/* ]]; then echo "$$made stays: this folder is in it"; \
	else echo "rm -rf '$$made'"; rm -rf -- "$$made"; fi; done
	rm -rf build dist site .cache *.egg-info ptxsim/build ptxsim/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
