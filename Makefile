# Everything a developer does here. On a fresh machine each target first makes .venv; all it needs is Python 3.11 to
# 3.13, make and git. Another Python: make demo PYTHON=/path/to/python3

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak lint format bench engines extras wheel release docs constraints clean
.DELETE_ON_ERROR:

# What .venv holds by default; .ci/run adds the frameworks that only some users have.
EXTRAS ?= pipeline,heic,reader,tensorflow,train,test
STAMP := .venv/.installed
BIN := .venv/bin
# Class folders to measure with, drawn pictures without: make bench IMAGES=/path/to/photos
IMAGES ?=
# More for pytest: make test PYTEST="-k listing"
PYTEST ?=
BY_FILE := --dist loadfile --no-loadscope-reorder
export PYTHON

help: ## Show these lines
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 18

# Extras that are named are installed also where others are already.
ifneq ($(origin EXTRAS),file)
.PHONY: $(STAMP)
endif

setup: $(STAMP) ## Make .venv with everything that the others need (they do it too)

$(STAMP): pyproject.toml setup.py beam_pipeline/images/resample.c constraints.txt tools/venv.sh tools/find_python.sh
	@tools/venv.sh $(EXTRAS)
	@touch $@

demo: $(STAMP) ## Draw images, write shards, check them, train, predict: into build/demo
	@tools/demo.sh

# What is compiled is kept: pytest compiles each test's module, and hundreds of processes import ours.
test soak: export PYTHONDONTWRITEBYTECODE :=

# A test that takes half a minute shows where it is.
test: $(STAMP) ## Run the tests, but for the slow ones
	$(BIN)/python -m pytest -n 3 $(BY_FILE) -o faulthandler_timeout=30 $(PYTEST)

soak: $(STAMP) ## Run the slow tests: every framework and backend, many kills, what documents train (20 minutes)
	$(BIN)/python -m pytest -m soak -n 2 $(BY_FILE) $(PYTEST)

lint: $(STAMP) ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/shellcheck tools/*.sh .ci/run

format: $(STAMP) ## Put the code into the one format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure writing and reading (an hour), on drawn pictures or on IMAGES=DIR
	$(BIN)/python benchmarks/scale_write.py --millions 0.1,1
	$(BIN)/python benchmarks/write.py $(IMAGES)
	$(BIN)/python benchmarks/write_peers.py --repeats 3 $(IMAGES)
	$(BIN)/python benchmarks/remote_write.py --repeats 3 $(IMAGES)
	$(BIN)/python benchmarks/codec.py $(IMAGES)
	$(BIN)/python benchmarks/peers_read.py --rows ours $(IMAGES)
	$(BIN)/python benchmarks/many_cores.py $(IMAGES)
	$(BIN)/python benchmarks/remote_read.py $(IMAGES)

engines: $(STAMP) ## Run one job on every engine there is here and compare the bytes
	@$(BIN)/python -m tools.engines

extras: $(STAMP) ## Install the wheel with each set of extras by itself and try what README promises of it (some minutes)
	$(BIN)/python -m tools.extras

wheel: $(STAMP) ## Build the sdist and a wheel for Python 3.11 and later, with the compiled resize: into dist
	@tools/wheel.sh

release: $(STAMP) ## Build what is uploaded, check it, try it in an empty environment, and stop before the upload
	@tools/release.sh

docs: $(STAMP) ## Build the site into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tools.site

constraints: $(STAMP) ## Pin every dependency at its newest version
	@PATH="$(CURDIR)/$(BIN):$$PATH" tools/constraints.sh --upgrade

clean: ## Remove what was built; .venv stays, and the next command compiles again
	rm -rf $(STAMP) beam_pipeline/images/*.so build dist *.egg-info __pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find beam_pipeline reader tests tools benchmarks deploy -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
