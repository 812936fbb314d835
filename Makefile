# `make` prints the targets; `make check` is what CI runs, cheapest first.
# Needs make and a python3 that has venv, nothing else: every target first sees to the environment in .venv.

PYTHON ?= python3
# Torch goes in first and by itself: what comes after is then satisfied by the build that is there.
TORCH  ?= torch==2.13.0

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
CLEAN := .venvs/clean
PIP   := -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo fmt lint layers types surface test fast golden interop faults soak bench wheel fuzz cov check clean docs

help: ## prints these lines
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(READY) ## virtual environment in .venv with an editable install
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) install '$(TORCH)'
	$(BIN)/python $(PIP) install --editable '.[dev]'
	touch $@

demo: $(READY) ## the main job on the embedded server: store, retrieve, edit, store again
	$(BIN)/python examples/demo.py

fmt: $(READY) ## ruff format and ruff check --fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY) ## ruff format --check, ruff check, codespell
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

layers: $(READY) ## lint-imports: who may import whom
	$(BIN)/lint-imports

types: $(READY) ## mypy --strict on src and tests, then the typing tests
	$(BIN)/mypy src tests examples docs benchmarks
	$(BIN)/pytest tests/typing

surface: $(READY) ## every public name completely typed, as a user's checker sees it
	# with --verifytypes it finds packages by the python of PATH, whatever --pythonpath says
	PATH="$(CURDIR)/$(BIN):$$PATH" basedpyright --verifytypes lmcache_sdk --ignoreexternal

test: $(READY) ## everything that needs no real server and no GPU, in random order
	$(BIN)/pytest

fast: $(READY) ## the same without the slow mark; for every save
	$(BIN)/pytest -m 'not slow'

golden: $(READY) ## the recorded bytes: intact, complete, and what the codec makes of them
	$(BIN)/pytest tests/golden tests/protocol tests/layout -k golden

interop: $(READY) ## against eight real servers, both data planes (makes their environment once: minutes, 4 GB)
	$(BIN)/python tests/integration/make_env.py
	LMCACHE_SDK_REQUIRE_INTEROP=1 $(BIN)/pytest tests/integration -m interop

faults: $(READY) ## 86 faults on real and scripted servers; prints the table of outcomes and verdicts (about 20 minutes)
	$(BIN)/python tests/integration/make_env.py
	LMCACHE_SDK_REQUIRE_INTEROP=1 $(BIN)/pytest tests/faults -m faults -p no:randomly

SECONDS  ?= 600
RELEASES ?= 0.5.6 0.5.7rc2
soak: $(READY) ## ten minutes of load on real servers that are frozen and killed; SECONDS=60 SEED=... RELEASES=...
	$(BIN)/python tests/integration/make_env.py
	$(BIN)/python -m tests.soak --seconds $(SECONDS) --releases $(RELEASES) $(if $(SEED),--seed $(SEED))

# `make bench BENCH=--quick` is a look in two minutes; benchmarks/README.md has the other options.
bench: $(READY) ## speed and memory against the official SDK and the floors, on real servers; prints the table (12 minutes)
	$(BIN)/python tests/integration/make_env.py
	$(BIN)/python -m benchmarks $(BENCH)

wheel: $(READY) ## builds the wheel, installs it in a clean environment, checks it there as a user would
	rm -rf dist/wheel
	$(BIN)/python -m build --wheel --outdir dist/wheel .
	test -x $(CLEAN)/bin/python || { $(PYTHON) -m venv $(CLEAN) && $(CLEAN)/bin/python $(PIP) install '$(TORCH)'; }
	$(CLEAN)/bin/python $(PIP) uninstall --yes lmcache-sdk
	$(CLEAN)/bin/python $(PIP) install dist/wheel/lmcache_sdk-*.whl
	$(CLEAN)/bin/python -I tests/downstream/check_install.py dist/wheel/lmcache_sdk-*.whl
	$(BIN)/python tests/downstream/check_types.py $(CLEAN)/bin/python

# A finding ends it with an error and a file; `make fuzz RUNS=10000000` counts executions instead of seconds.
fuzz: $(READY) ## fuzzes payloads, frames and documents for 60 seconds each, or RUNS=... executions each
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/python $(PIP) install --editable '.[fuzz]'
	for target in payloads frames documents; do \
	  nice -n 10 $(BIN)/python -m fuzz.run $$target $(if $(RUNS),-runs=$(RUNS),-max_total_time=60) || exit 1; \
	done

docs: $(READY) ## writes the generated parts of docs/ from the code (tests/docs fails when they are stale)
	$(BIN)/python docs/generate.py

cov: $(READY) ## branch coverage; the protocol and the state tables at 100 %
	$(BIN)/pytest --cov --cov-report=
	$(BIN)/coverage report
	$(BIN)/coverage report --include='*/protocol/*,*/session/states.py' --fail-under=100

check: lint layers types surface test golden wheel ## all of the above that CI runs without real servers

clean: ## removes what builds and tools leave; the environments stay
	rm -rf build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
