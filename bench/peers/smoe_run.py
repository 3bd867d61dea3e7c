"""Worker: smoe, inside a memory budget.

python -m bench.peers.smoe_run --baseline      # bytes the interpreter and its libraries hold before any model
"""

from __future__ import annotations

# First, as it sets how the OpenMP threads wait before torch starts them; a program of a user would do so too.
import smoe  # isort: split

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from bench.peers.transformers_run import TransformersSession
from bench.peers.worker import Stopwatch, measure, memory_bytes, report, workload_from, workload_parser


class SmoeSession(TransformersSession):
    """A model whose experts are offloaded, with the KV cache smoe budgets for."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._counters_after_prefill = model.offload.stats()

    def prefill(self, tokens: Sequence[int], every_position: bool = False) -> np.ndarray:
        """See `Session`; starts the interval that `notes` reports."""
        logits = super().prefill(tokens, every_position)
        self._counters_after_prefill = self._model.offload.stats()
        return logits

    def resident_expert_bytes(self) -> int | None:
        """See `Session`."""
        return int(self._model.offload.ledger.entries()["expert slots"])

    def notes(self) -> dict[str, object]:
        """Versions, and the counters of the tokens decoded after the last prompt."""
        decode = self._model.offload.stats() - self._counters_after_prefill
        return super().notes() | {"smoe": smoe.__version__, "decode_counters": vars(decode)}

    def new_cache(self) -> object:
        """An empty KV cache from the memory budget."""
        cache: object = self._model.offload.new_cache()
        return cache


def parse() -> argparse.Namespace:
    """Command line of this worker."""
    parser = workload_parser("Measure smoe.")
    parser.add_argument("--memory", type=int, help="budget in bytes; default: what smoe chooses")
    parser.add_argument("--ready", action="store_true", help="begin when the slots hold all experts that fit")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting")
    return parser.parse_args()


def main() -> None:
    """Load, measure, report; or print what a process holds that has only imported its libraries."""
    load = smoe.from_pretrained
    if "--baseline" in sys.argv[1:]:
        print(memory_bytes()["VmHWM"])
        return
    options = parse()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    watch = Stopwatch()
    given = dict(entry.split("=", 1) for entry in options.set)
    switches: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in given.items()}
    model = load(options.model, memory=options.memory, **switches)
    if options.ready:
        model.offload.wait_ready()
    session = SmoeSession(model)
    report(measure(workload_from(options), session, watch))


if __name__ == "__main__":
    main()
