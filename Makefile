# plumb: `make demo` sets everything up, builds and runs the main job; `make test` runs every test.
#
#   make demo TEXT=file-or-folder    train on this text instead of Python's own sources
#   make install PREFIX=/usr/local   headers, library, command and CMake package
#   make bench | sanitize | fuzz     measurements; address + undefined sanitizers; fuzzers for FUZZ_SECONDS each
#   make docs                        the site of docs/, in build-docs/
#   make format | lint | clean       lint looks at what differs from BASE (main); ALL=1 at every file
#
#   TORCH_PYTHON=/path/to/python     use an installed torch (2.11 or newer)
#   JOBS=n                           compile jobs (default: one a core)

SHELL := /bin/bash
JOBS ?= $(shell nproc)
BUILD ?= build
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 30
export OMP_WAIT_POLICY ?= PASSIVE
export TORCH_PYTHON
PY := .venv/bin/python
CMAKE := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/cmake
CONFIGURE := $(CMAKE) -S . -G Ninja -DPLUMB_PYTHON=$(CURDIR)/$(PY)

.PHONY: all setup configure demo test test-cpp test-python bench sanitize fuzz docs format lint rooms install clean

all: configure
	@$(CMAKE) --build $(BUILD) -j $(JOBS)
	@[ ! -x $(BUILD)/bin/plumb ] || ln -sf ../../$(BUILD)/bin/plumb .venv/bin/plumb

setup:
	@tools/bootstrap.sh

# Again when .venv was made anew: it may stand on another torch.
configure: setup
	@[ $(BUILD)/build.ninja -nt .venv/.plumb-stamp ] || $(CONFIGURE) -B $(BUILD)

demo: all
	@$(BUILD)/bin/plumb_demo $(if $(TEXT),--text "$(TEXT)") --out demo

test: test-cpp test-python

test-cpp: all
	@.venv/bin/ctest --test-dir $(BUILD) --output-on-failure

test-python: all
	@PLUMB_BUILD_DIR=$(abspath $(BUILD)) $(PY) -m pytest -q python/tests

bench: configure
	@$(CONFIGURE) -B $(BUILD) -DPLUMB_BENCHMARKS=ON
	@JOBS=$(JOBS) tools/bench.sh $(BUILD) docs/benchmarks.md

sanitize: setup
	@JOBS=$(JOBS) tools/sanitize.sh build-sanitize

fuzz: setup
	@JOBS=$(JOBS) tools/fuzz.sh build-fuzz $(FUZZ_SECONDS)

docs: setup
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q && echo "open build-docs/index.html, or with search: python3 -m http.server -d build-docs"

format: setup
	@git ls-files -co --exclude-standard '*.h' '*.cpp' | xargs -r .venv/bin/clang-format -i
	@$(PY) -m ruff check -q --fix .

lint: configure rooms
	@JOBS=$(JOBS) tools/lint.sh $(BUILD)

rooms:
	@python3 tools/check_rooms.py

install: all
	@$(CMAKE) --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf build build-* demo
