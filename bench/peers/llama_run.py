"""Worker: llama.cpp through the C interface that the llama-cpp-python package exposes.

Runs in the Python that has the package, which needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from llama_cpp import llama_cpp as api  # type: ignore[import-not-found]

from bench.peers.worker import Stopwatch, measure, report, workload_from, workload_parser

LOAD_MODES = {"ram": 0, "mmap": 1, "mapped-only": 1, "direct": 4}  # newer llama.cpp: `load_mode`; older: `use_mmap`
MAPPED_ONLY = "mapped-only"
"""Weights stay where they are mapped: no second copy in the layout that is fastest on this CPU."""
CONTEXT_SLACK = 64


_drop_log = api.llama_log_callback(lambda *_: None)  # kept here: the library only points to it


class LlamaSession:
    """One sequence on a llama.cpp context."""

    def __init__(self, model: Path, mode: str, threads: int, context_tokens: int) -> None:
        api.llama_log_set(_drop_log, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(model).encode(), self._model_parameters(mode))
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {model.name}")
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = context_tokens
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = api.llama_init_from_model(self._model, parameters)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))

    def prefill(self, tokens: Sequence[int], every_position: bool = False) -> np.ndarray:
        """See `Session`. llama.cpp keeps the logits of the last position only: all positions means one by one."""
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        if every_position:
            return np.stack([self._forward([token]) for token in tokens])
        return self._forward(tokens)

    def decode(self, token: int) -> np.ndarray:
        """See `Session`."""
        return self._forward([token])

    def resident_expert_bytes(self) -> int | None:
        """See `Session`. The kernel decides what stays of a mapped file."""
        return None

    def notes(self) -> dict[str, object]:
        """See `Session`."""
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "llama_system": api.llama_print_system_info().decode().strip(),
        }

    def _forward(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [V] of the last of `tokens`, appended to the sequence."""
        ids = (api.llama_token * len(tokens))(*tokens)  # the batch only points to it: must outlive the call
        status = api.llama_decode(self._context, api.llama_batch_get_one(ids, len(tokens)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).copy()

    @staticmethod
    def _model_parameters(mode: str) -> object:
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        if hasattr(parameters, "load_mode"):
            parameters.load_mode = LOAD_MODES[mode]
        else:
            parameters.use_mmap = mode in ("mmap", MAPPED_ONLY)
        if mode == MAPPED_ONLY:
            parameters.use_extra_bufts = False
        return parameters


def main() -> None:
    """Load, measure, report."""
    parser = workload_parser("Measure llama.cpp.")
    parser.add_argument("--mode", choices=LOAD_MODES, default="mmap", help="how the weights reach memory")
    options = parser.parse_args()
    workload = workload_from(options)
    context_tokens = max(workload.prompts) + workload.new_tokens + CONTEXT_SLACK
    watch = Stopwatch()
    session = LlamaSession(workload.model, options.mode, workload.threads, context_tokens)
    report(measure(workload, session, watch))


if __name__ == "__main__":
    main()
