"""The engine of one model: its budget, slots and threads. Users access it as `model.offload`.

One thread generates at a time; others wait for their turn (`passes.py`). A forked child cannot use the engine (threads
and, on a GPU, the context do not survive a fork) and gets an error. The memory and threads of an engine without
`close()` are freed when Python collects it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from smoe.config import EngineConfig
from smoe.errors import ConfigError
from smoe.memory.arena import Arena
from smoe.memory.pacing import Pacing
from smoe.memory.reading_threads import Transfers
from smoe.memory.store import ExpertStore
from smoe.metrics import Counters
from smoe.models.guards import not_copied
from smoe.models.kv_cache import RowCache
from smoe.models.outline import Anatomy
from smoe.models.rotary_lengths import RotaryLengths
from smoe.policy.budget import Ledger
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.registry import make_eviction_for
from smoe.routing import Routing
from smoe.runtime.lifetime import Held
from smoe.runtime.observer import RoutingList, StepObserver
from smoe.runtime.passes import Passes
from smoe.runtime.reserve import Reserve
from smoe.runtime.substitution import substitution_of
from smoe.units import format_bytes, identifier


class Engine:
    """The offloading runtime of one model: budget, slots, threads. `close()`, or a `with` statement, frees them."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        anatomy: Anatomy,
        ledger: Ledger,
        store: ExpertStore,
        arena: Arena,
        transfers: Transfers,
        passes: Passes,
        reserve: Reserve,
        rotary: RotaryLengths,
        budget_reason: str,
        dense_bytes: int,
        context_tokens: int,
        reasons: Mapping[str, str],
        eviction: EvictionSettings,
    ) -> None:
        self.config = config
        self.anatomy = anatomy
        self.ledger = ledger
        self.store = store
        self.passes = passes
        """The model's forward passes: what its modules call."""
        self.executor = passes.executor
        self.rotary = rotary
        self.rules = passes.rules
        self.budget_reason = budget_reason
        self.reasons = reasons
        """The origin of each setting that the user left out, by setting name."""
        self.context_tokens = context_tokens
        """The number of positions reserved for every sequence."""
        self.eviction_settings = eviction
        self._threads = torch.get_num_threads()
        self._arena, self._transfers, self._reserve = arena, transfers, reserve
        self._process = os.getpid()
        self._is_closed = False
        self._dense_bytes = dense_bytes
        self._held = Held(self, transfers, arena, self.executor.helpers)

    # -- for users ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return seconds on the clock of all reported times: real time, except with an emulated device."""
        return self.executor.now()

    def stats(self) -> Counters:
        """Return counters since the start; subtract two results for an interval."""
        counters = self.executor.counters.copy()
        counters.bytes_read = self._transfers.bytes_read
        counters.read_busy_seconds = self._transfers.busy_seconds
        compute = self.executor.compute
        counters.host_seconds = sum(unit.busy_seconds for unit in compute.units.values())
        counters.late_seconds = compute.pacing.late_seconds
        return counters

    def new_cache(self, sequences: int = 1) -> RowCache:
        """Return a KV cache within the budget: `context_tokens * max_sequences` positions shared by `sequences` rows.

        Where there is no room, the oldest caches are invalidated. Waits while another request is running.
        """
        with self.passes.turn():
            return self._reserve.caches.new(sequences)

    def new_caches(self) -> list[RowCache]:
        """Return `max_sequences` caches of one sequence each, of `context_tokens` positions; see `new_cache`."""
        with self.passes.turn():
            return self._reserve.caches.new_ones()

    def use_alpha(self, alpha: float) -> None:
        """Change the substitution threshold, with a cold cache and counters at zero. Raises `ConfigError` where the
        model was loaded without scores (no `alpha`, and an eviction policy that needs none)."""
        if alpha > 0 and not self.rules:
            raise ConfigError(
                "load the model with an alpha above 0, or with `eviction` score, to substitute experts",
                setting="alpha",
                given=alpha,
                allowed="0 for a model loaded with alpha 0 and an eviction other than score",
            )
        with self.passes.turn():
            self.passes.refuse_in_pass("use_alpha")
            self.config = replace(self.config, alpha=alpha)
            self.executor.substitute_by(substitution_of(self.config))
            self.executor.reset(self.fresh_eviction())

    def fresh_eviction(self) -> Eviction:
        """Return a new eviction policy according to `eviction_settings`, without history."""
        return fresh_eviction(self.eviction_settings, self.ledger, self.store)

    def wait_ready(self) -> None:
        """Wait until the operating system has allocated all slots; only measurements need this."""
        self._arena.wait_touched(None)

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Record every routing for the duration of the `with` block. Yield the list of them: input for
        `smoe.simulator`."""
        routing = RoutingList()
        with self.observed_by(routing):
            yield routing.trace

    @contextmanager
    def observed_by(self, observer: StepObserver) -> Iterator[None]:
        """Register `observer` for every step of every layer, for the duration of the `with` block."""
        self.executor.observers.append(observer)
        try:
            yield
        finally:
            self.executor.observers.remove(observer)

    @contextmanager
    def loading_all(self) -> Iterator[None]:
        """Load all missing experts for the duration of the `with` block, also those that `balance` would assign to the
        CPU. The resulting placement stays afterwards, as in Fiddler's profiling."""
        with self.executor.unbalanced():
            yield

    @property
    def pacing(self) -> Pacing:
        """The clock of the computation: real time, or that of an emulated device."""
        return self.executor.compute.pacing

    @property
    def arithmetic(self) -> str:
        """The kernels that multiply few rows, one of `KERNELS`: torch, native (our kernels with torch's bits) or
        own-order (E1); or, on a GPU, slots (our kernels for experts, E2)."""
        experts = self.executor.compute.experts
        return "slots" if experts.is_in_slots else experts.arithmetic

    def cancel(self) -> bool:
        """End the running request at its next layer, or its next token if all experts are resident: it raises
        `GenerationCancelledError` there. Any thread may call this. Waiting requests continue (a `Cancellation` ends one
        call). Return False where none was running."""
        return self.passes.turns.cancel("this request was cancelled by model.offload.cancel()")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Cancel the running request, stop the threads and free the memory. Repeated calls have no effect; other
        methods fail afterwards.

        A request of another thread ends at its next layer. If that takes longer than `timeout_seconds`,
        `EngineBusyError` is raised, and the engine is closed when the request ends. Within a request of the same thread
        (a hook, a stopping criterion, a signal handler) closing takes effect at its end.
        """
        if not self._is_closed:
            self.passes.close(self._shut_down, timeout_seconds)

    def _shut_down(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._process == os.getpid():
            self.executor.close()
        self._held.release()
        self.executor.arrivals.forget()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    __reduce__ = not_copied

    def __repr__(self) -> str:
        ledger, config, counters = self.ledger, self.config, self.stats()
        state = "closed" if self.passes.is_closing else "running" if self.passes.turns.is_running else "ready"
        served = f"{counters.tokens} tokens in {counters.forward_passes} passes"
        if counters.decode_uses:
            served += f", hit ratio {counters.hit_ratio:.0%}"
        exact = f"{', '.join(config.lossy)} (lossy)" if config.lossy else f"exact, arithmetic {self.arithmetic}"
        return (
            f"smoe engine, {state}: {format_bytes(ledger.budget_bytes)} ({self.budget_reason}), "
            f"{ledger.residents if config.keeps_experts else ledger.spare}\n"
            f"eviction {config.eviction}, prefetch {config.prefetch}, {exact}; context {self.context_tokens} tokens x "
            f"{config.max_sequences}; {self._threads} threads on {self._arena.device}\n"
            f"so far {served}, {format_bytes(counters.bytes_read)} read"
        )

    def peak_memory_bytes(self) -> int:
        """Return the highest number of budget bytes that were in use at once.

        On a GPU this is the allocator's peak since a model was last loaded there (`memory/arena.py`). On a CPU it is
        what is allocated for slots, weights and caches, and the reserve for activations; `bench/limits.py` checks the
        sum with a cgroup.
        """
        if self._arena.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._arena.device))
        demand = self.ledger.demand
        of_predictors = demand.predictor_bytes + demand.learned_bytes + demand.draft_bytes
        fixed = self._dense_bytes + demand.workspace_bytes + of_predictors
        if self._reserve.is_lent:
            return fixed + self._reserve.peak_bytes
        return fixed + self._arena.nbytes + demand.step_bytes(demand.step_tokens) + self._reserve.caches.peak_bytes

    @property
    def slot_memory(self) -> torch.Tensor:
        """The slots' bytes (uint8). The memory rate is measured on them, because other memory would exceed the
        budget."""
        return self._arena.bytes

    def describe(self) -> dict[str, Any]:
        """Return the entries of the budget and the numbers of slots, for programs."""
        return {
            "bytes": {identifier(name): count for name, count in self.ledger.entries().items()},
            "memory_budget_bytes": self.ledger.budget_bytes,
            "slots": self.ledger.cache_slots,
            "most_slots": self.ledger.most_slots,
            "low_slots": self.ledger.low_slots,
            "staging_slots": self.ledger.staging_slots,
            "resident_share": self.ledger.resident_share,
            "eviction_rule": self.executor.arrivals.eviction.rule,
        }


def fresh_eviction(settings: EvictionSettings, ledger: Ledger, store: ExpertStore) -> Eviction:
    """Return a new eviction policy for these slots and experts."""
    experts = {layer: held.experts for layer, held in store.layers.items()}
    return make_eviction_for(settings, ledger.pools, experts)
