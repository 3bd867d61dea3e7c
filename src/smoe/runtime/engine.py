"""The engine behind one model: its budget, its slots, its threads. Users know it as `model.offload`.

One thread generates at a time; another waits for its turn. A forked child may not use it (threads and, on a GPU, the
context do not survive a fork) and is told so.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from smoe.config import EngineConfig
from smoe.errors import ConfigError, EngineStateError
from smoe.memory.device import Arena
from smoe.memory.store import ExpertStore
from smoe.memory.transfer import Transfers
from smoe.metrics import Counters
from smoe.models.anatomy import Anatomy
from smoe.models.scoring import ScoringRule
from smoe.policy.budget import Ledger
from smoe.policy.eviction.base import Eviction
from smoe.policy.registry import make_pools
from smoe.routing import Phase, Routing
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.kv_cache import RowCache
from smoe.runtime.substitution import Scored


class Listener(Protocol):
    """Hears what the routers decide, before anything is replaced."""

    def __call__(
        self,
        layer: int,
        phase: Phase,
        sequences: int,
        logits: torch.Tensor | None,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> None:
        """One layer of a pass over `sequences` rows of equal length, row after row: logits [T, E] or None where nobody
        listens to the router, top_k_index [T, K] with the index E at padding, top_k_weights [T, K]."""


_closed: list[bool] = []
"""Not empty where an engine was closed since `collect_closed`."""


def collect_closed() -> None:
    """Give the other weights of models back whose engines are closed and that nobody holds any more.

    Models lie in circles with their engines, and Python may look for those much later. Costs nothing where none was
    closed.
    """
    if _closed:
        _closed.clear()
        gc.collect()


class Engine:
    """Everything that moves for one model. Close it, or use it as a context manager, to give memory and threads
    back."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model_config: PretrainedConfig,
        anatomy: Anatomy,
        ledger: Ledger,
        store: ExpertStore,
        arena: Arena,
        transfers: Transfers,
        executor: LayerExecutor,
        budget_reason: str,
        dense_bytes: int,
        context_tokens: int,
        rules: Mapping[int, ScoringRule],
    ) -> None:
        self.config = config
        self.anatomy = anatomy
        self.ledger = ledger
        self.store = store
        self.budget_reason = budget_reason
        self.alpha_reason: str | None = None
        """Where a preset's alpha comes from; None where it was given."""
        self.context_tokens = context_tokens
        """Positions reserved for every sequence."""
        self.lock = threading.RLock()
        self.executor = executor
        self._model_config = model_config
        self.rules = rules
        self._logits: dict[int, torch.Tensor] = {}
        """What the routers said in this pass, until their experts run."""
        self.listener: Listener | None = None
        """Where set, hears every routing: `smoe.trace` writes it down."""
        self._arena = arena
        self._transfers = transfers
        self._process = os.getpid()
        self._is_closed = False
        self._phase = Phase.PREFILL
        self._sequences = 1
        self._padding: torch.Tensor | None = None
        self._caches: list[weakref.ref[RowCache]] = []
        self._dense_bytes = dense_bytes
        self._peak_cache_bytes = 0

    # -- for users ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds on the clock that all reported times are taken from: the real one, but for an emulated device."""
        return self.executor.now()

    def stats(self) -> Counters:
        """Counters since the start; subtract two of them for an interval."""
        counters = self.executor.counters.copy()
        counters.bytes_read = self._transfers.bytes_read
        counters.read_busy_seconds = self._transfers.busy_seconds
        math = self.executor.math
        counters.host_seconds = math.host_experts.busy_seconds if math.host_experts is not None else 0.0
        counters.late_seconds = math.emulation.late_seconds if math.emulation is not None else 0.0
        return counters

    def new_cache(self, sequences: int = 1) -> RowCache:
        """A KV cache inside the budget: `context_tokens * max_sequences` positions shared by `sequences` rows.

        Where older caches leave no room for it, they lose theirs, oldest first.
        """
        reserved = self.context_tokens * self.config.max_sequences
        cache = RowCache(self._model_config, sequences, reserved // sequences)
        live = [c for c in (ref() for ref in self._caches) if c is not None and c.reserved_tokens]
        while live and sum(c.reserved_tokens for c in live) + cache.reserved_tokens > reserved:
            live.pop(0).retire()
        self._caches = [weakref.ref(c) for c in [*live, cache]]
        return cache

    def use_alpha(self, alpha: float) -> None:
        """Substitute by another threshold from now on, from a cold cache and with counters at zero.

        Raises `ConfigError` where the model was loaded without scores (no `alpha`, and an eviction that needs none).
        """
        if alpha > 0 and not self.rules:
            raise ConfigError("load the model with an alpha above 0, or with --eviction score, to substitute experts")
        with self.lock:
            self.check_usable()
            self.config = replace(self.config, alpha=alpha)
            self.executor.substitute_by(self.config)
            self.executor.start_anew(self.fresh_eviction())

    def fresh_eviction(self) -> Eviction:
        """The eviction policy that the configuration asks for, without a memory of anything."""
        config, ledger = self.config, self.ledger
        layers, experts = len(self.store.layers), len(self.store.keys())
        return make_pools(config.eviction, config.pools, ledger.cache_slots, layers, experts)

    def wait_ready(self) -> None:
        """Wait until the operating system has backed all slots; only measurements need to."""
        self._arena.wait_touched(None)

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Inside, every routing decision is appended to the list that this yields: input for `smoe.simulator`."""
        trace: list[Routing] = []
        self.executor.trace = trace
        try:
            yield trace
        finally:
            self.executor.trace = None

    def close(self) -> None:
        """Stop the threads and give the memory back. The model cannot be used afterwards. Idempotent."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._process == os.getpid():
                self.executor.math.close()
                self._transfers.close()
            self.executor.arrivals.forget()
            self._arena.close()
            _closed.append(True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the seam -------------------------------------------------------------------------------------------------

    @contextmanager
    def forward_pass(
        self, tokens: int, rows: int, padding: torch.Tensor | None, cache: RowCache | None
    ) -> Iterator[None]:
        """Around one forward pass of the model: `tokens` new positions in each of `rows` sequences.

        `padding` [rows, tokens] is True where a position is padding; such rows are computed by no expert.
        """
        with self.lock:
            self.check_usable()
            if cache is not None:
                cache.begin(tokens, rows)
            self._phase = Phase.DECODE if tokens == 1 else Phase.PREFILL
            self._sequences = rows
            self._padding = padding.reshape(-1) if padding is not None else None
            if self.executor.math.emulation is not None:
                self.executor.math.emulation.begin_pass()
            counters, started = self.executor.counters, self.now()
            with torch.no_grad(), self._threads(tokens * rows):
                yield
            if cache is not None:
                cache.commit()
                self._check_caches()
            counters.forward_passes += 1
            counters.tokens += tokens * rows - (int(self._padding.sum()) if self._padding is not None else 0)
            seconds = self.now() - started
            counters.forward_seconds += seconds
            if self.executor.trial is not None:
                guesses = counters.prefetches, counters.prefetches_used
                if self._phase is Phase.DECODE:
                    self.executor.trial.note(seconds, *guesses)
                else:
                    self.executor.trial.pass_over(*guesses)

    def run_experts(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts' forward of one layer, in the library's own shapes."""
        if self._padding is not None:
            experts = self.store.layers[layer].experts
            top_k_index = top_k_index.masked_fill(self._padding.unsqueeze(1), experts)
        logits, rule = self._logits.pop(layer, None), self.rules.get(layer)
        if self.listener is not None:
            self.listener(layer, self._phase, self._sequences, logits, top_k_index, top_k_weights)
        scored = Scored(rule, rule.scores(logits)) if rule is not None and logits is not None else None
        return self.executor.run(layer, self._phase, hidden, top_k_index, top_k_weights, scored)

    def note_logits(self, layer: int, logits: torch.Tensor) -> None:
        """A router has spoken: [T, E] of the layer whose experts are asked next."""
        self._logits[layer] = logits

    @contextmanager
    def _threads(self, positions: int) -> Iterator[None]:
        """What is left to the library of one token computes on one thread, where our kernels have the large products.

        Sharing such short work out takes longer than doing it, and the library's threads, once awake, hold up ours.
        Our kernels' bits have been compared with the library's on one thread and on all; a product that is left and
        depends on it stays on all (`runtime/dense.py`).
        """
        if positions > 1 or not self.executor.leaves_little:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def check_usable(self) -> None:
        """Raise where the engine is closed or belongs to the parent of a forked process."""
        if self._is_closed:
            raise EngineStateError("this model was closed; load it again with smoe.from_pretrained")
        if self._process != os.getpid():
            raise EngineStateError("this model was loaded before a fork; load it in the child process instead")

    def peak_memory_bytes(self) -> int:
        """Bytes of the budget in use at most.

        On a GPU the allocator's own peak. On a CPU what is really allocated for slots, weights and caches, and the
        reserve for activations; a cgroup proves the sum from outside (`bench/limits.py`).
        """
        if self._arena.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._arena.device))
        fixed = self._dense_bytes + self._arena.nbytes + self.ledger.demand.workspace_bytes
        return fixed + self._peak_cache_bytes

    @property
    def slot_memory(self) -> torch.Tensor:
        """The slots' bytes (uint8): the memory rate is measured on them; other memory would be outside the budget."""
        return self._arena.bytes

    def _check_caches(self) -> None:
        """The caches in use must stay inside their entry of the ledger."""
        used = sum(cache.nbytes for cache in (ref() for ref in self._caches) if cache is not None)
        self._peak_cache_bytes = max(self._peak_cache_bytes, used)
        promised = self.ledger.demand.kv_cache_bytes
        assert used <= promised, f"the KV caches take {used} bytes, the ledger has {promised}"

    def describe(self) -> dict[str, Any]:
        """The budget's entries and what they buy, for programs."""
        return {
            "bytes": self.ledger.entries(),
            "memory_budget_bytes": self.ledger.budget_bytes,
            "slots": self.ledger.cache_slots,
            "staging_slots": self.ledger.staging_slots,
            "resident_share": self.ledger.resident_share,
            "eviction_rule": self.executor.arrivals.eviction.rule,
        }
