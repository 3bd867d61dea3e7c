# Two commands for a new user: `make demo` and `make test`. Both make their own environment first.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.0
# Where torch is taken from, if not from the usual index, whose build for Linux is that for CUDA (5.9 GB). Without an NVIDIA GPU:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
MEMORY ?= 20MiB
PROMPT ?= Once upon a time there was a little girl named Lily.

# `make gpu` installs nothing: it takes a Python that has torch for CUDA, transformers and the like.
GPU_PYTHON ?= python3
GPU_OUT    ?= runs/gpu

# The suite runs on all cores, four at most: a process of it takes up to a gigabyte. Each begins with tests that follow
# each other, and so share what they have made, and helps the others out when it is done.
JOBS   ?= -n auto --maxprocesses 4 --dist worksteal
# What one run has compiled of our kernels, the next one takes. With a space, pytest would take the folder for one of tests.
CODE   := --object-code=build/kernels

# Where the environment says that Python shall not keep what it has compiled, every start of a process would compile the
# libraries anew: seven seconds of ten.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-optional test-real test-limited limited-avx2 limited-core limited-one-thread limited-disagreeing lint docs wheel dist wheel-test locked \
        env clean help gpu

help:
	@echo "make demo   install into $(VENV) and generate text with the embedded model in $(MEMORY);"
	@echo "            without an NVIDIA GPU: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@echo "make test   run the test suite, but for what takes seconds: make test-all runs that, too"
	@echo "make test-optional  what needs Ray, lm_eval, qemu-aarch64, a Chromium, aider and other clients"
	@echo "make test-real      tokenizers, templates and configurations of published models, fetched by pip and npm"
	@echo "make test-limited   once more what hangs on the CPU, as on machines with less than this one"
	@echo "make lint   ruff and mypy"
	@echo "make docs   the documentation as a site, into build/site; fails where a link leads nowhere"
	@echo "make wheel  compare wheel and source distribution with the repository; make dist stores them in dist/, too"
	@echo "make wheel-test  install the wheel by pip, pipx and uvx in bare environments, and run it; downloads 0.5 GB or more"
	@echo "make locked requirements with hashes, for the container image"
	@echo "make gpu    everything that needs a GPU, by $(GPU_PYTHON), into $(GPU_OUT); goes on where it was cut off"

env: $(VENV)/.installed

# Most of the libraries' modules are never imported; those that are, Python compiles then.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "making an environment in $(VENV), once, which takes minutes; step 1 of 3: pip"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "step 2 of 3: $(TORCH) from $(or $(TORCH_INDEX),the usual index)"
	@$(BIN)/python -m pip install --no-compile -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	@echo "step 3 of 3: the other libraries, 0.5 GB to download, and smoe itself (no further lines until it is done)"
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

demo: env
	$(BIN)/smoe generate demo --memory $(MEMORY) --max-new-tokens 120 --prompt "$(PROMPT)"

# What is slow, another test covers in less time; CI runs it, too.
test: env
	$(BIN)/python -m pytest $(JOBS) -m "not slow"

test-all: env
	$(BIN)/python -m pytest $(JOBS) $(CODE)

# Tests of what is not installed for development. They need qemu-aarch64, a Chromium, systemd and npm (Debian: qemu-user, chromium,
# systemd, npm), for vocabularies and chat templates parts of llama.cpp's sources, which are fetched unless SMOE_LLAMA_CPP names a folder with
# them; a test that is skipped for want of them fails.
SMOE_LLAMA_CPP ?= build/llama.cpp
test-optional:
	$(PYTHON) -m venv $(VENV)-optional
	$(VENV)-optional/bin/python -m pip install --quiet --no-compile -c constraints.txt "$(TORCH)"
	$(VENV)-optional/bin/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev,ray,lm-eval]"
	$(VENV)-optional/bin/python -m pip install --quiet --no-compile -e ".[clients]"    # some exclude what the constraints have
	$(VENV)-optional/bin/python -m tests.llama_cpp_source $(SMOE_LLAMA_CPP)
	$(PYTHON) -m venv $(VENV)-aider
	$(VENV)-aider/bin/python -m pip install --quiet --no-compile aider-chat
	$(PYTHON) -m venv $(VENV)-llama-index
	$(VENV)-llama-index/bin/python -m pip install --quiet --no-compile llama-index-llms-openai-like
	$(PYTHON) -m venv $(VENV)-open-webui
	$(PYTHON) -m tests.clients.open_webui_packages $(VENV)-open-webui/bin/python
	mkdir -p $(VENV)-npm && cp tests/clients/scripts/package.json $(VENV)-npm/ && npm install --no-audit --no-fund --prefix $(VENV)-npm
	SMOE_LLAMA_CPP=$(SMOE_LLAMA_CPP) SMOE_AIDER=$(abspath $(VENV)-aider/bin/aider) SMOE_NPM=$(abspath $(VENV)-npm) \
	    SMOE_LLAMA_INDEX=$(abspath $(VENV)-llama-index/bin/python) SMOE_OPEN_WEBUI=$(abspath $(VENV)-open-webui/bin/open-webui) $(VENV)-optional/bin/python -m pytest --none-needs emulated --none-needs Chromium \
	    --none-needs Ray --none-needs llama.cpp --none-needs client --none-needs aider --none-needs systemd --none-needs npm tests/kernels/test_on_aarch64.py tests/server/test_page.py \
	    tests/cluster/test_on_ray.py tests/eval/test_questions.py tests/conversation/test_published_templates.py \
	    tests/models/test_gguf_tokenizer.py tests/models/test_llama_cpp_converter.py tests/server/test_published_outputs.py tests/server/test_format_matrix.py tests/server/test_messages.py \
	    tests/server/test_ollama.py tests/server/test_unknown_fields.py tests/clients tests/cli/test_launch.py tests/docs/test_unit_file.py

# Tests of artifacts of published models, by pip and npm; a test that is skipped for want of them fails.
SMOE_REAL ?= build/real
test-real: env
	SMOE_REAL=$(SMOE_REAL) $(BIN)/python -m pytest --none-needs artifacts -m real tests/real

# What hangs on the CPU: the kernels, and that whole models are exact with what of them is adopted.
LIMITED := tests/kernels tests/fastpath/test_linear.py tests/fastpath/test_attention.py tests/fastpath/test_norm.py \
           tests/fastpath/test_latent_attention.py tests/fastpath/test_convolution.py tests/compute/test_decode_experts.py
# Quantised weights, and bf16 in our own order, have kernels for AVX2, too.
OTHERS  := tests/compute/test_quantised_math.py tests/models/test_quantised_linear.py tests/load/test_choose_kernel.py tests/cluster/test_without_torch.py tests/models/test_released.py
EXACT   := tests/runtime/test_exactness.py tests/cli/test_verify.py
AVX2    := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 SMOE_MAX_CPU_ISA=avx2
CORE    := ONEDNN_MAX_CPU_ISA=AVX512_CORE

# Kernels that are called directly, on bytes of ours, made for every instruction set that the CPU has: `make test` has run
# them for those that a limit leaves, and no library computes in them, on however many threads.
DIRECT  := $(addprefix --ignore=tests/kernels/test_,byte_products.py interleaving.py on_aarch64.py object_cache.py)
LIMIT    = $(BIN)/python -m pytest $(JOBS) $(CODE) -m "not slow"

# On a CPU without AVX-512 the first two would repeat what `make test` has run; where the system does not say, they run.
LESS   := $(shell grep -qsw avx512f /proc/cpuinfo || ! test -e /proc/cpuinfo && echo limited-avx2 limited-core)

# `make -j2 test-limited JOBS=` runs them side by side, each in one process: it starts, and compiles, once.
test-limited: $(LESS) limited-one-thread limited-disagreeing

limited-avx2: env
	$(AVX2) $(LIMIT) $(LIMITED) $(DIRECT) $(EXACT) $(OTHERS)

limited-core: env
	$(CORE) $(LIMIT) tests/kernels $(DIRECT) tests/compute/test_decode_experts.py tests/compute/test_quantised_math.py

limited-one-thread: env
	OMP_NUM_THREADS=1 $(LIMIT) tests/kernels $(DIRECT) --ignore=tests/kernels/test_quantised.py \
	    tests/fastpath/test_linear.py tests/test_demo.py

limited-disagreeing: env
	$(LIMIT) --disagree attention tests/fastpath/test_linear.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What makes the site has an environment of its own: it needs nothing of ours, which it reads without importing it.
$(VENV)-docs/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --no-compile -r docs/requirements.txt
	@touch $@

docs: $(VENV)-docs/.installed
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

wheel:
	$(PYTHON) .ci/wheel.py

dist:
	$(PYTHON) .ci/wheel.py --out dist

wheel-test:
	$(PYTHON) .ci/wheel.py --install --torch "$(TORCH)"

# The versions and hashes of everything that faces a network, after a change of pyproject.toml or constraints.txt.
locked:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet uv==0.13.9
	$(VENV)-lock/bin/python .ci/lock.py

gpu:
	PYTHONPATH=src HF_HUB_OFFLINE=1 $(GPU_PYTHON) -m bench.gpu --out $(GPU_OUT)

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-lock $(VENV)-optional $(VENV)-aider $(VENV)-llama-index $(VENV)-open-webui $(VENV)-npm build .pytest_cache .mypy_cache .ruff_cache
