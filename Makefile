# plumb: `make demo` sets everything up, builds and runs the main job; `make test` runs every test.
#
#   TORCH_PYTHON=/path/to/python   use an installed torch (2.11 or newer)
#   JOBS=n                         compile jobs (default: one a core)

SHELL := /bin/bash
JOBS ?= $(shell nproc)
BUILD ?= build
export OMP_WAIT_POLICY ?= PASSIVE
export TORCH_PYTHON
PY := .venv/bin/python
CMAKE := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/cmake

.PHONY: all setup configure demo test test-cpp test-python bench sanitize fuzz format lint install clean

all: configure
	@$(CMAKE) --build $(BUILD) -j $(JOBS)
	@[ ! -x $(BUILD)/bin/plumb ] || ln -sf ../../$(BUILD)/bin/plumb .venv/bin/plumb

setup:
	@tools/bootstrap.sh

configure: setup
	@[ -f $(BUILD)/build.ninja ] || $(CMAKE) -S . -B $(BUILD) -G Ninja -DPLUMB_PYTHON=$(CURDIR)/$(PY)

test: test-cpp test-python

test-cpp: all
	@$(CMAKE) -E env .venv/bin/ctest --test-dir $(BUILD) --output-on-failure

test-python: all
	@$(PY) -m pytest -q python/tests

clean:
	rm -rf build build-*
