# Needs python3.11 or newer and nothing else; everything is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test oldest lint fuzz docs dist clean

TORCH ?=
PYTHON ?= $(shell command -v python3.11 || command -v python3)
WORKERS ?= 2
GRAPHS ?= 2000
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

help:
	@echo "make demo   compress the embedded models and measure the result"
	echo "make test   lint and run the tests: several minutes on 2 cores, without torch"
	echo "make test TORCH=1   the same with torch installed, so that no test is skipped for it"
	echo "make oldest the tests with the oldest releases that pyproject.toml allows, in a venv of its own"
	echo "make lint   only ruff, mypy and import-linter"
	echo "make fuzz   narrow 2000 random graphs, others in every run"
	echo "make docs   build the pages of docs/ as a site, into build/site"
	echo "make dist   build wheels and sdists into dist/, and run the demo from the wheels (docs/releasing.md)"
	echo "make clean  remove .venv and everything built"

demo: .venv/demo.stamp
	@$(BIN)/onnxgrail demo
	echo "Next, a model of your own: $(BIN)/onnxgrail inspect model.onnx (docs/quickstart.md)"

# One thread per test process: the workers would otherwise fight for the cores, and sums would differ between machines.
# Hundreds of tests start a process, and without bytecode each would compile every module again.
TESTING := export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1; unset PYTHONDONTWRITEBYTECODE

test: lint $(if $(TORCH),.venv/torch.stamp)
	@$(TESTING)
	echo "running the tests: several minutes on 2 cores; tests that need torch are skipped where it is not installed" >&2
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations=10

oldest:
	@rm -rf build/oldest
	"$(PYTHON)" -m venv build/oldest
	"$(PYTHON)" .ci/oldest.py > build/oldest/constraints.txt
	build/oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint build/oldest/constraints.txt \
	  --editable '.[cpu,simplify,test]'
	$(TESTING)
	build/oldest/bin/python -m pytest -q -n $(WORKERS) --dist worksteal

fuzz: .venv/test.stamp
	@export OMP_NUM_THREADS=1 ONNXGRAIL_FUZZ=$(GRAPHS)
	$(BIN)/python -m pytest -q -s tests/property/test_graphs.py

lint: .venv/test.stamp
	@$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo

# Generated pages are written first; --strict fails on broken links and on pages that are missing in the navigation.
docs: .venv/docs.stamp
	@for page in api choosing cli loss ops options real_models; do $(BIN)/python docs/$${page}_page.py; done
	$(BIN)/python docs/before_after.py
	$(BIN)/python docs/narrowing_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	echo "build/site/index.html"

# From the sdists' files alone, then from the wheels alone: what the repository has and they lack shows here.
dist: .venv/dist.stamp
	@rm -rf dist build/wheel
	for source in . models; do $(BIN)/python -m build --outdir dist $$source; done
	$(BIN)/python -m twine check --strict dist/*
	"$(PYTHON)" -m venv build/wheel
	build/wheel/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --find-links dist \
	  "$$(ls dist/onnxgrail-*.whl)[cpu,demo]"
	cd build && wheel/bin/onnxgrail demo

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Stamps, not folders: a venv whose installation was interrupted is made again.
.venv/made.stamp:
	@rm -rf .venv
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "onnxgrail needs Python 3.11 or newer")'
	"$(PYTHON)" -m venv .venv
	touch $@

# Editable, because cli/ and models/ stand beside the package here and inside it once installed.
.venv/demo.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "installing into .venv ..." >&2
	$(INSTALL) --editable '.[cpu]'
	touch $@

.venv/docs.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "installing into .venv ..." >&2
	$(INSTALL) --editable '.[cpu,docs]'
	touch .venv/demo.stamp $@

.venv/dist.stamp: .venv/made.stamp
	@$(INSTALL) build twine
	touch $@

.venv/test.stamp: .venv/made.stamp pyproject.toml constraints.txt
	@echo "installing into .venv ..." >&2
	$(INSTALL) --editable '.[cpu,simplify,test,dev]'
	touch .venv/demo.stamp $@

# torch first and pinned: another package would otherwise bring a build with CUDA.
.venv/torch.stamp: .venv/test.stamp
	@echo "installing torch into .venv ..." >&2
	$(INSTALL) torch
	$(INSTALL) --editable '.[cpu,torch]' transformers scikit-learn
	touch $@
