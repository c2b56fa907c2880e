# verl-otb: `make env` makes the environment, `make demo` trains, `make test` tests. No sudo; all stays in this folder.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3.11
# uv from the PATH, else one of our own in .uv/
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
PY := .venv/bin/python
# Where a CPU build of torch is taken from: a local folder if PIP_FIND_LINKS names one, else PyTorch's own CPU index,
# through uv's --torch-backend.
TORCH_SOURCE := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)" 'torch==2.13.0+cpu',--torch-backend cpu 'torch==2.13.0')
# CUDA builds, or builds against another torch: not wanted on a machine without accelerators.
NOT_CPU := torch torchvision torchaudio torchcodec

.PHONY: help env lock demo test test-fast lint evidence-quick evidence-gradient evidence-training clean
help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/'

env: .venv/.ready   ## the locked CPU environment in .venv (about a minute)

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/python -m pip install -q 'uv>=0.9'

.venv/.ready: uv.lock pyproject.toml tests/contract/verl-0.9.0.txt | $(UV)
	@echo "==> environment: .venv (Python 3.11, verl 0.9.1, vLLM for CPU, torch 2.13.0)"
	$(UV) venv --quiet --clear --python 3.11 .venv
	$(UV) export --quiet --frozen --no-emit-project --group cpu --group test $(addprefix --no-emit-package ,$(NOT_CPU)) -o .venv/requirements.txt
	$(UV) pip install --python $(PY) --no-deps --compile-bytecode $(TORCH_SOURCE)
	$(UV) pip install --python $(PY) --no-deps --compile-bytecode --require-hashes -r .venv/requirements.txt
	$(UV) pip install --python $(PY) --no-deps --editable .
	@echo "==> the older verl that the contract tests read: .venv/verl-0.9.0"
	$(UV) pip install --quiet --python $(PY) --no-deps --require-hashes --target .venv/verl-0.9.0 -r tests/contract/verl-0.9.0.txt
	touch $@

lock:            ## write uv.lock: both environments, hashes, no host
	uv lock
	sed -i -E 's#registry = "[a-z]+://[^"]*"#registry = ".pypi/simple"#; s#url = "[a-z]+://[^/"]+/packages/#path = "../packages/#' uv.lock
	uv lock --check
	! grep -n '://' uv.lock

demo: env        ## train a tiny model with OTB on this machine (minutes)
	env -u PYTHON bash examples/run_tiny_cpu.sh

# Two at once: a whole run of verl is mostly imports, one after the other, on one core.
test: env        ## everything, end to end included
	$(PY) -m pytest -n 2 --dist loadfile

test-fast: env   ## without the end-to-end runs
	$(PY) -m pytest -m 'not e2e'

lint: env        ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check -q .
	$(PY) -m mypy

evidence-quick: env   ## docs/evidence.md: exact variance, finite groups, cost of a step (minutes; a quiet machine)
	OMP_NUM_THREADS=1 $(PY) benchmarks/variance/exact.py
	OMP_NUM_THREADS=1 $(PY) benchmarks/variance/finite_groups.py
	$(PY) benchmarks/variance/cost.py

evidence-gradient: env   ## docs/evidence.md: variance of a real model's gradient (minutes)
	$(PY) benchmarks/variance/gradient.py

evidence-training: env   ## docs/evidence.md: the training runs that are missing, then their report (hours; resumable)
	$(PY) benchmarks/variance/training.py
	$(PY) benchmarks/variance/training_report.py --page docs/evidence.md

clean:           ## remove the environment and what runs left
	rm -rf .venv .uv .cache outputs runs
