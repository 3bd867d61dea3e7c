# Two commands for a new user: `make demo` and `make test`. Both make their own environment first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# On machines without an NVIDIA GPU the CPU build of torch is a tenth of the size; set TORCH to another requirement if you like.
TORCH  ?= torch==2.13.0
MEMORY ?= 20MiB
PROMPT ?= Once upon a time there was a little girl named Lily.

.PHONY: demo test lint env clean help

help:
	@echo "make demo   install into $(VENV) and generate text with the embedded model in $(MEMORY)"
	@echo "make test   run the test suite"
	@echo "make lint   ruff and mypy"

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: env
	$(BIN)/smoe generate demo --memory $(MEMORY) --context 512 --max-new-tokens 120 --prompt "$(PROMPT)"

test: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
