# plumb: `make demo` sets up what it needs, builds and runs the main job; `make test` runs every test.
#
#   make demo TEXT=file-or-folder    train on this text instead of Python's own sources
#   make test-cpp | test-python      a part of it; make test-device: on the test device, or on DEVICE=cuda
#   make test-cpus                   suites that compare bits, under settings that choose other kernels and numbers of threads
#   make test-arm                    C++ suites for 64-bit ARM, cross-built in build-arm, under emulation; SUITES="graph scaling"
#   make wheel                       dist/plumb-VERSION+torchX.Y-....whl, for this torch's minor version; PLATFORM=aarch64
#   make install PREFIX=/usr/local   headers, library, command and CMake package
#   make bench | sanitize | fuzz     measurements; address + undefined sanitizers; fuzzers, FUZZ_SECONDS a reader, and long tests
#   make sanitize SANITIZER=thread   modules, checkpoints, trainings, pipelines in several threads, under ThreadSanitizer
#   make gpu                         on a machine with a GPU: all suites, kernels' speed, steps of a GPT, docs/gpu.md
#   make docs                        the site of docs/, in build-docs/
#   make format | lint | clean       lint looks at what differs from BASE (main); ALL=1 at every file
#
#   TORCH_PYTHON=/path/to/python     use an installed torch (2.11 or newer)
#   JOBS=n                           jobs at once, compiling; one more in tests (default: one a core)
#   CXX=clang++                      another compiler, in a build folder of its own; WARNINGS=errors: a warning stops the build
#   JOINED=OFF                       compile every file by itself: a fresh build takes three times as long, a change of
#                                    one file less (the build folder remembers)

SHELL := /bin/bash
JOBS ?= $(shell nproc)
# A compiler that was asked for has a build folder of its own.
COMPILER := $(if $(filter command line,$(origin CXX)),$(CXX))
BUILD ?= build$(addprefix -,$(notdir $(COMPILER)))
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 30
export OMP_WAIT_POLICY ?= PASSIVE
export TORCH_PYTHON
export NINJA_STATUS ?= [%f of %t, %es] # a space follows
PY := .venv/bin/python
CMAKE := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/cmake
JOIN := $(if $(JOINED),-DPLUMB_JOINED=$(JOINED),$(if $(wildcard $(BUILD)/CMakeCache.txt),,-DPLUMB_JOINED=ON))
OPTIONS := $(JOIN) $(addprefix -DCMAKE_CXX_COMPILER=,$(COMPILER)) \
	$(if $(filter errors,$(WARNINGS)),-DCMAKE_COMPILE_WARNING_AS_ERROR=ON)
CONFIGURE := $(CMAKE) -S . -G Ninja -DPLUMB_PYTHON=$(CURDIR)/$(PY) $(OPTIONS)
SAY := printf 'plumb: %s\n'

.PHONY: all setup setup-dev configure demo test test-cpp test-python test-device test-cpus test-arm wheel bench gpu sanitize fuzz docs format lint rooms install clean

all: configure
	@$(SAY) "compiling library, command, Python package and tests ($(JOBS) at once)"
	@$(CMAKE) --build $(BUILD) -j $(JOBS)
	@[ ! -x $(BUILD)/bin/plumb ] || ln -sf ../../$(BUILD)/bin/plumb .venv/bin/plumb

setup:
	@tools/bootstrap.sh test

setup-dev:
	@tools/bootstrap.sh dev

# A build folder is configured for a part or for everything, and again when .venv was made anew: it may stand on another
# torch.
configured = [ $(BUILD)/$(1) -nt .venv/.plumb-base ] || { $(SAY) "configuring $(BUILD)" && \
	$(CONFIGURE) -B $(BUILD) --log-level=WARNING $(foreach part,TESTS COMMAND PYTHON_PACKAGE,-DPLUMB_$(part)=$(if $(filter $(part),$(2)),ON,OFF)) \
	&& touch $(foreach stamp,$(1) $(3),$(BUILD)/$(stamp)); }

configure: setup
	@$(call configured,.configured,TESTS COMMAND PYTHON_PACKAGE,.configured-demo .configured-wheel)

demo:
	@tools/announce.sh demo $(BUILD) $(JOBS)
	@tools/bootstrap.sh demo
	@$(call configured,.configured-demo,,)
	@$(SAY) "compiling the demo and what it needs of the library ($(JOBS) at once)"
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target plumb_demo
	@$(SAY) "training a small GPT five times"
	@$(BUILD)/bin/plumb_demo $(if $(TEXT),--text "$(TEXT)") --out demo

# One more than cores: two at once on two cores waited a third of their time for processes and time-outs.
RUN_TESTS = $(PY) tools/run_tests.py --build $(BUILD) --jobs $$(($(JOBS) + 1))

test:
	@tools/announce.sh test $(BUILD) $(JOBS)
	@$(MAKE) --no-print-directory all
	@$(RUN_TESTS)

test-cpp: all
	@$(RUN_TESTS) cpp

test-python: all
	@$(RUN_TESTS) python device-python

# The suites that a device matters to, on one that is not the CPU: DEVICE=cuda on a machine with a GPU.
DEVICE ?= testdevice
test-device: all
	@$(RUN_TESTS) --device $(DEVICE) device-cpp device-python

# The suites that compare bits, on a CPU that plays others: SETTING=AVX2 for the settings with that text.
test-cpus: all
	@$(RUN_TESTS) cpus $(if $(SETTING),--setting "$(SETTING)")

# 64-bit ARM, on a machine that is none (docs/howto/arm.md).
test-arm:
	@JOBS=$(JOBS) tools/arm.sh test $(SUITES)

ifeq ($(PLATFORM),aarch64)
wheel:
	@JOBS=$(JOBS) tools/arm.sh wheel
else
wheel:
	@tools/bootstrap.sh wheel
	@$(call configured,.configured-wheel,COMMAND PYTHON_PACKAGE,.configured-demo)
	@$(SAY) "compiling library, command and Python package ($(JOBS) at once)"
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target plumb plumb_cli plumb_python
	@tools/wheel.sh $(BUILD)
endif

bench: setup-dev configure
	@$(CONFIGURE) -B $(BUILD) -DPLUMB_BENCHMARKS=ON
	@JOBS=$(JOBS) tools/bench.sh $(BUILD) docs/benchmarks.md

gpu:
	@tools/gpu_machine.sh

sanitize: setup
	@JOBS=$(JOBS) SANITIZER=$(SANITIZER) tools/sanitize.sh build-sanitize$(addprefix -,$(SANITIZER))

fuzz: all
	@JOBS=$(JOBS) tools/fuzz.sh build-fuzz $(FUZZ_SECONDS)
	@PLUMB_LONG_TESTS=1 $(PY) -m pytest -q python/tests/test_hostile_arguments.py python/tests/test_hf_elsewhere.py

docs: setup-dev configure
	@$(CMAKE) --build $(BUILD) -j $(JOBS) --target plumb_cli
	@PATH="$(abspath $(BUILD))/bin:$$PATH" NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q && echo "open build-docs/index.html"

format: setup-dev
	@git ls-files -co --exclude-standard '*.h' '*.cpp' | xargs -r .venv/bin/clang-format -i
	@$(PY) -m ruff check -q --fix .

lint: setup-dev configure rooms
	@JOBS=$(JOBS) tools/lint.sh $(BUILD)

rooms:
	@python3 tools/check_rooms.py

install: all
	@$(CMAKE) --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf build build-* demo dist
