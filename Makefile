# Two commands do everything on a fresh machine: `make quickstart` and `make test`. `make check` is for those who edit.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# A CPU build is enough here and gigabytes smaller; set TORCH= to keep an installed one, or another version for a GPU.
TORCH ?= torch==2.13.0
# pip compiles what it installs on one core and one file after another; this takes all cores
INSTALL := $(BIN)/python -m pip install -q --no-compile
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # packages hold templates that are no Python

.PHONY: quickstart test check lint types unit fast docs peft-suite clean

quickstart: $(VENV)/.user
	$(BIN)/monkeyjump train quickstart

# mypy uses one core: it runs beside the tests
test: lint
	$(MAKE) --no-print-directory -j 2 types unit

# what is left without the tests marked slow: two minutes, as mypy has looked at most files before
check: lint
	$(MAKE) --no-print-directory -j 2 types fast

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# One thread a worker: two workers on two cores are faster than one with two threads on models this small.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist worksteal

unit: $(VENV)/.dev
	$(PYTEST)

fast: $(VENV)/.dev
	$(PYTEST) -m "not slow"

# the documentation as a site, in build/docs; what Sphinx warns of is an error
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# PEFT's own tests on our methods, a quarter of an hour on two cores; a part: make peft-suite METHODS=mjlora,lora FILES=decoder ARGS=-x
peft-suite: ARGS ?= -n 2
peft-suite: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.peft_suite.run --methods="$(METHODS)" --files="$(FILES)" -- $(ARGS)

$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(INSTALL) $(TORCH))
	touch $@

$(VENV)/.user: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[cli]"
	$(COMPILE)
	touch $@

# all that users have, and the tools: one resolution instead of two
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(INSTALL) -e ".[dev]"
	$(COMPILE)
	touch $(VENV)/.user $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
