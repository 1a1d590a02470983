# SPDX-License-Identifier: Apache-2.0
# make demo, make test: everything from a fresh checkout, on Debian or Ubuntu
# with GCC >= 12 or clang >= 14 and Python >= 3.10. What is there is not done again.
# Each ends with the seconds that its parts took.
# make help lists the rest.
PYTHON ?= python3
# Elsewhere the PyPI torch brings CUDA along; for the small one:
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
ARGS ?=
# Instruction sets whose kernels are compiled to test them: those of this machine, or all.
ISAS ?= here
# Of fuzzing each target; soak has a default of its own.
SECONDS ?= 30
# The newest clang++ that is installed.
CLANG = $(shell ls /usr/bin/clang++ /usr/bin/clang++-[0-9]* 2>/dev/null | sort -V | tail -1)

BIN := $(CURDIR)/.venv/bin
export PATH := $(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)/build/release/python
CPP_SOURCES = $(shell find cpp tests_cpp -name '*.h' -o -name '*.cc')

# Tests and demo start hundreds of processes: each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# Processes of the tests.
JOBS ?= $(shell nproc)
# Python compiles what is imported, which is a tenth of what is installed.
PIP_INSTALL = pip install -q --no-compile --disable-pip-version-check
PYTEST = python -m pytest -q -n $(JOBS) --dist worksteal
# Where the parts of this command write down their seconds.
export MAKE_TIMES ?= $(CURDIR)/build/times-$(shell echo $$PPID)
TIMED = scripts/timed.sh

.PHONY: demo extension test-cpp test test-all coverage test-asan test-engines test-in-engines test-outside fuzz soak families false-alarms-plans false-alarms-programs false-alarms-operators mutation system build bench bench-env wheel sdist docs test-site lint tidy format clean help

demo: .venv/.build  ## the main job: replays serving traffic over two processes; options in ARGS
	@$(MAKE) --no-print-directory -j 2 extension .venv/.demo
	@$(TIMED) replay python -m cpattn replay --guide $(ARGS)
	@$(TIMED) --table

# The extension has kernels for this machine alone. ninja cannot share the jobs of make.
extension: .venv/.build
	@echo "Building the extension for this machine, without tests ..."
	@test -e build/release/.configured || \
	  cmake --preset release -DCPATTN_TESTS=OFF -DCPATTN_AMX_TWIN=OFF -DCPATTN_ISAS=best >/dev/null
	@MAKEFLAGS= $(TIMED) "building the extension" cmake --build --preset release --target _core

# Packages are installed beside the build.
test-cpp: .venv/.build
	@$(MAKE) --no-print-directory -j 2 build .venv/.ready
	@$(TIMED) "tests in C++" ctest --preset release -j $(JOBS)

test: test-cpp  ## the tests of every day, in C++ and Python; options of pytest in ARGS
	@$(PYTEST) -m "not slow" --hypothesis-profile=quick --file-seconds=10 $(ARGS)

test-all: test-cpp  ## all tests: also long property tests, whole products, pages, notebooks, faults
	@$(PYTEST) $(ARGS)

system:  ## installs by apt what building and testing need, as root or through sudo
	@scripts/system_packages.sh --install test $(PYTHON)

# What takes arguments of users, and the plans made of them; not what explains them on pages. The
# libraries are loaded first, as python itself is not linked with them; that of C++ is for its
# exceptions. Leaks are those of the interpreter: test_repeated_calls.py looks for ours.
ASAN_TESTS := $(filter-out %_page.py,$(wildcard $(foreach name,context_parallel* dsa_metadata* fia_errors \
  halo hostile_* index_tensors* index_k kv_* local_engine nested_calls overlaps paged_attention_errors plan_kv_* \
  send_* topk* transfer_[cenprt]*, \
  tests_py/*/test_$(name).py tests_py/*/*/test_$(name).py)))
test-asan: build .venv/.ready  ## Python tests of the interface, on an extension with AddressSanitizer
	@cmake --preset asan && cmake --build --preset asan --target _core
	@LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(CURDIR)/build/asan/python \
	  python -m pytest -q $(ARGS) $(ASAN_TESTS)

test-engines: test-in-engines  ## tests with engines and libraries, and a table of what ran; four environments
	@$(PYTEST) --records=build/engines $(ARGS) tests_py/integrations \
	  --ignore=tests_py/integrations/sglang --ignore=tests_py/integrations/vllm
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py python -m audit.table build/engines

test-in-engines: build .venv/.ready .venv-sglang/.ready .venv-vllm/.ready .venv-kernels/.ready
	@rm -rf build/engines
	@.venv-sglang/bin/python -m pytest -q --records=build/engines $(ARGS) tests_py/integrations/sglang
	@.venv-vllm/bin/python -m pytest -q --records=build/engines $(ARGS) tests_py/integrations/vllm
	@.venv-kernels/bin/python -m pytest -q --records=build/engines $(ARGS) tests_py/integrations/kernels

test-outside: build .venv/.outside build/outside/.fetched  ## other people's suites of attention on our kernels, and a table; names of suites in ARGS
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py python -m outside $(ARGS)

fuzz: build build/fuzz/.configured .venv/.fuzz  ## fuzzes each target for SECONDS; names of targets in ARGS
	@cmake --build --preset fuzz
	@python scripts/fuzz.py --seconds $(SECONDS) $(ARGS)

soak: build .venv/.ready  ## random faults of ranks for SECONDS, an hour by default; options in ARGS (--seed 7, --only 7)
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py python -m support.distributed.random_faults \
	  --seconds $(if $(filter file,$(origin SECONDS)),3600,$(SECONDS)) $(ARGS)

families: build .venv/.ready  ## tries every text model of transformers, and writes docs/how_to/transformers_models.md
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py nice python scripts/family_table.py

false-alarms-plans: build .venv/.ready  ## lints random right plans, 10,000 by default; options in ARGS (--plans 500, --seed 7, --only 7)
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py nice python -m support.proof.random_plans $(ARGS)

false-alarms-programs: build .venv/.ready  ## random right programs on simulated ranks, 10,000 by default; options in ARGS (--programs 500, --seed 7, --only 7)
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py nice python -m support.proof.random_programs $(ARGS)

build/fuzz/.configured: .venv/.ready CMakePresets.json
	@test -n "$(CLANG)" || scripts/system_packages.sh test $(PYTHON) clang-19 libclang-rt-19-dev
	@cmake --preset fuzz -DCMAKE_CXX_COMPILER=$(or $(CLANG),clang++-19)
	@touch $@

# Atheris has wheels for some Pythons; without it the targets in C++ remain.
.venv/.fuzz: .venv/.ready
	@python scripts/requirements.py fuzz | xargs -d '\n' pip install -q
	@touch $@

.venv/.outside: .venv/.ready
	@python scripts/requirements.py outside | xargs -d '\n' $(PIP_INSTALL)
	@touch $@

# What cannot be had is named, and asked for again the next time; tests of it are skipped.
build/outside/.fetched: .venv/.ready tests_py/outside/expected.toml
	@if PYTHONPATH=$(CURDIR)/tests_py python -m outside.archive; then touch $@; fi

.venv-%/.ready: scripts/engine_environment.sh .venv/.ready
	@echo "Installing $* into .venv-$* ..."
	@scripts/engine_environment.sh $* .venv .venv-$*
	@touch $@

false-alarms-operators: build .venv/.ready  ## operators that are right, on 600 cases of `cpattn conform` each; options in ARGS (--help tells them)
	@PYTHONPATH=$(PYTHONPATH):$(CURDIR)/tests_py python -m support.proof.conformance.false_alarms $(ARGS)

# A process that is killed writes down nothing. CPython 3.11 spins where lines are counted while an
# error for a thread that is in C has not been raised, which one test would wait for without end.
UNCOUNTED := tests_py/proof/simulation/test_bad_programs.py::test_a_rank_that_cannot_be_ended_leaves_nothing_in_place
coverage: .venv/.ready  ## lines and branches of cpp and python that tests reach, an hour; options of pytest in ARGS
	@python scripts/requirements.py coverage | xargs -d '\n' $(PIP_INSTALL)
	@cmake --preset coverage >/dev/null && cmake --build --preset coverage
	@find build/coverage -name '*.gcda' -delete; rm -rf build/coverage/python-data && mkdir build/coverage/python-data
	@ctest --preset coverage -j $(JOBS)
	@PYTHONPATH=$(CURDIR)/build/coverage/python COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml \
	  $(PYTEST) --cov --cov-report= --deselect $(UNCOUNTED) $(ARGS) || \
	  echo "Some tests fail where lines are counted."
	@coverage report --format=total | sed 's/^/python, lines and branches: /;s/$$/ %/'
	@gcovr --root . --filter cpp/ --exclude-unreachable-branches --exclude-throw-branches \
	  --gcov-ignore-errors=all --gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file --print-summary --json-summary build/coverage/cpp.json build/coverage | grep -E '^(lines|branches)' | sed 's/^/cpp, /'

mutation: build .venv/.ready  ## which changes of cpp/meta and its Python no test notices; options in ARGS
	@PYTHONPATH=scripts python -m mutate $(ARGS)

bench: build bench-env .venv-sglang/.ready .venv-vllm/.ready  ## everything in bench/, plots and README, 45 minutes; idle machine
	@status=0; for bench in $(filter-out %_attention.py,$(wildcard bench/bench_*.py)); do \
	  case $$bench in \
	    *_sglang*.py) python=.venv-sglang/bin/python ;; \
	    *_vllm.py) python=.venv-vllm/bin/python ;; \
	    *) python=python ;; \
	  esac; \
	  $$python $$bench || status=1; done; \
	  python bench/bench_attention.py $(ARGS) || status=1; \
	  python bench/plots.py && python scripts/write_figures.py && exit $$status

bench-env: .venv-bench/.ready  ## the engines that the benchmarks compare with
.venv-bench/.ready: bench/peer_environment.sh
	@echo "Installing the engines to compare with into .venv-bench ..."
	@bench/peer_environment.sh $(PYTHON) .venv-bench $(TORCH)
	@touch $@

# qemu-user runs the one for Arm.
wheel: .venv/.ready  ## wheels in dist/, checked and tried: x86-64 for each Python here, aarch64; options in ARGS
	@python scripts/build_wheels.py $(ARGS)

sdist: .venv/.ready  ## an sdist in dist/, and a wheel compiled out of it to try it
	@python scripts/build_sdist.py $(ARGS)

build: build/release/.configured
	@MAKEFLAGS= $(TIMED) "building" cmake --build --preset release

build/release/.configured: .venv/.build CMakePresets.json
	@cmake --preset release -DCPATTN_TESTS=ON -DCPATTN_AMX_TWIN=ON -DCPATTN_ISAS=$(ISAS)
	@touch $@

# What compiling needs, so that the rest can be installed beside it.
.venv/.build: pyproject.toml $(wildcard python/distributions/*/pyproject.toml) scripts/requirements.py scripts/system_packages.sh
	@scripts/system_packages.sh $(if $(filter demo extension,$(MAKECMDGOALS)),demo,test) $(PYTHON)
	@test -x $(BIN)/pip || { echo "Making .venv ..." && $(PYTHON) -m venv .venv; }
	@$(TIMED) "packages to build with" $(PIP_INSTALL) 'cmake>=3.25' ninja "tomli; python_version < '3.11'"
	@python scripts/requirements.py | xargs -d '\n' $(PIP_INSTALL)
	@touch $@

# torch comes first, so that a requirement of it never chooses another one.
.venv/.demo: .venv/.build
	@echo "Installing $(TORCH), and what the command cpattn needs, into .venv ..."
	@$(TIMED) "torch, beside the build" $(PIP_INSTALL) $(TORCH)
	@python scripts/requirements.py cpattn-lab | xargs -d '\n' $(TIMED) "packages, beside the build" $(PIP_INSTALL)
	@touch $@

.venv/.ready: .venv/.demo
	@scripts/system_packages.sh test $(PYTHON)
	@echo "Installing the packages for testing into .venv ..."
	@python scripts/requirements.py test | xargs -d '\n' $(TIMED) "packages for tests, beside the build" $(PIP_INSTALL)
	@touch $@

.venv/.lint: .venv/.ready
	@python scripts/requirements.py lint | xargs -d '\n' pip install -q
	@touch $@

.venv/.docs: .venv/.ready
	@python scripts/requirements.py docs | xargs -d '\n' $(PIP_INSTALL)
	@touch $@

docs: .venv/.docs extension  ## the site, into build/site
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "The site is in build/site: python -m http.server -d build/site"

test-site: docs  ## tries every page of the site in Chromium
	@CPATTN_SITE=$(CURDIR)/build/site $(PYTEST) $(ARGS) tests_py/site

lint: .venv/.lint build  ## formatting, lint, types
	ruff check .
	ruff format --check .
	@echo clang-format --dry-run -Werror ...
	@clang-format --dry-run -Werror $(CPP_SOURCES)
	mypy
	python -m mypy.stubtest cpattn._core --mypy-config-file pyproject.toml
	python scripts/write_figures.py --check
	python scripts/architecture.py --check
	python scripts/concept_pictures.py --check
	python scripts/kv_8bit_errors.py --check
	python scripts/first_words.py

tidy: .venv/.lint build  ## clang-tidy
	@echo clang-tidy ...
	@run-clang-tidy.py -p build/release -quiet -hide-progress '^$(CURDIR)/(build/release/)?(cpp|tests_cpp)/.*\.c(c|xx)$$'

format: .venv/.lint  ## fixes what it can
	ruff check --fix .
	ruff format .
	@clang-format -i $(CPP_SOURCES)

clean:
	rm -rf build .venv .venv-bench .venv-sglang .venv-vllm .venv-kernels

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 31
