# Every target sets up what it needs: a .venv from the pinned requirements, then weft itself.
# The stamp makes a second run cost nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep '^torch==' requirements.txt)

export OMP_NUM_THREADS ?= 1

# Tests start some hundred processes, each of which would compile all of weft without bytecode.
export PYTHONDONTWRITEBYTECODE :=

# Processes that run tests. Those over gloo run beside them, in one, which starts the world once:
# half of their time is waiting. What it says comes last.
WORKERS ?= auto
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4
DIST := out/dist.txt

.PHONY: test demo check bench docs notebooks sweep soundness setup

test: $(STAMP)
ifdef ARGS
	$(TESTS) -n 0 $(ARGS)
else
	mkdir -p $(dir $(DIST))
	$(BIN)/python -m pytest tests/dist > $(DIST) 2>&1 & dist=$$!; trap "kill $$dist" INT TERM; \
	$(TESTS) --ignore tests/dist; status=$$?; \
	wait $$dist || status=1; cat $(DIST); exit $$status
endif

demo: $(STAMP)
	$(BIN)/weft demo $(ARGS)

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pyright
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m bench $(or $(ARGS),--targets)

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build

notebooks: $(STAMP)
	$(BIN)/python -m tests.docs.notebooks --execute $(or $(ARGS),$(wildcard docs/tutorial/*.md))

soundness: $(STAMP)
	$(BIN)/python -m tests.soundness $(ARGS)

sweep: $(STAMP)
	$(BIN)/python -m tests.sweep $(ARGS)

setup: $(STAMP)

# Bytecode of the requirements is written where a module is first used: they have some ten thousand.
$(STAMP): requirements.txt pyproject.toml setup.py $(wildcard src/weft/*/*.c)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("weft needs Python 3.11 or later: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install --no-compile -r requirements.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.docs: $(STAMP) requirements-docs.txt
	$(BIN)/python -m pip install -r requirements-docs.txt
	touch $@
