# Two commands for a new user: `make demo` and `make test`. Both make their own environment first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# On machines without an NVIDIA GPU the CPU build of torch is a tenth of the size; set TORCH to another requirement if you like.
TORCH  ?= torch==2.13.0
MEMORY ?= 20MiB
PROMPT ?= Once upon a time there was a little girl named Lily.

# `make gpu` installs nothing: it takes a Python that has torch for CUDA, transformers and the like.
GPU_PYTHON ?= python3
GPU_OUT    ?= runs/gpu

.PHONY: demo test lint env clean help gpu

help:
	@echo "make demo   install into $(VENV) and generate text with the embedded model in $(MEMORY)"
	@echo "make test   run the test suite"
	@echo "make lint   ruff and mypy"
	@echo "make gpu    everything that needs a GPU, by $(GPU_PYTHON), into $(GPU_OUT); goes on where it was cut off"

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

gpu:
	PYTHONPATH=src HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m bench.gpu --out $(GPU_OUT)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
