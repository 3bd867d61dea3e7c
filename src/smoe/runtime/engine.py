"""The engine of one model: it owns the memory budget, the slots and the threads. Users access it as `model.offload`.

One thread generates at a time; others wait for their turn (`passes.py`). A forked child process gets an error when it
uses the engine, because threads and a GPU's context do not survive a fork. If an engine is never closed, Python's
garbage collection frees its memory and ends its threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from smoe.config import SETTINGS, EngineConfig
from smoe.errors import ConfigError
from smoe.expert import EXACT
from smoe.memory.arena import GIVES_BACK, Arena
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.reading_threads import Transfers
from smoe.memory.store import ExpertStore
from smoe.metrics import Counters
from smoe.models.guards import not_copied
from smoe.models.kv_cache import RowCache
from smoe.models.outline import Anatomy
from smoe.models.rotary import RotaryLengths
from smoe.policy.budget import Ledger
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.registry import make_eviction_for
from smoe.routing import Routing
from smoe.runtime.arrivals import across_layers
from smoe.runtime.lifetime import Held
from smoe.runtime.observer import RoutingList, StepObserver
from smoe.runtime.passes import Passes
from smoe.runtime.reserve import Reserve
from smoe.runtime.substitution import substitution_of
from smoe.setting_declaration import Number
from smoe.units import format_bytes, identifier

_SECONDS = Number("a number of seconds of at least 0", lambda value: 0 <= value < math.inf)


class Engine:
    """The offloading runtime of one model: memory budget, slots and threads. `close()` or the end of a `with` block
    frees them."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        anatomy: Anatomy,
        ledger: Ledger,
        store: ExpertStore,
        arena: Arena,
        transfers: Transfers,
        filler: Filler,
        passes: Passes,
        reserve: Reserve,
        rotary: RotaryLengths,
        budget_reason: str,
        dense_bytes: int,
        context_tokens: int,
        position_limit: int | None,
        reasons: Mapping[str, str],
        eviction: EvictionSettings,
        self_test: str,
    ) -> None:
        """`budget_reason`: a text that says where the memory budget's size comes from. `dense_bytes`: the size of the
        non-expert weights. `reasons`: for each setting that the user left out, a text that says where its value comes
        from. `self_test`: see the attribute."""
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
        self.position_limit = position_limit
        """The largest number of positions that the model allows; None: unknown."""
        self.eviction_settings = eviction
        self.self_test = self_test
        """When the model's kernels and experts were tested: "now", when it was loaded, or "earlier", when the same
        files were first loaded in the same way (`EngineConfig.self_test`)."""
        self._threads = torch.get_num_threads()
        self._arena, self._transfers, self._filler, self._reserve = arena, transfers, filler, reserve
        self._process = os.getpid()
        self._is_closed = False
        self._dense_bytes = dense_bytes
        self._filling: list[tuple[int, int]] = []
        """(layer, expert) in the order in which free slots are filled while no text is computed."""
        self._held = Held(self, transfers, arena, self.executor.helpers)

    # -- for users ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return seconds on the clock of all reported times: real time, except with an emulated device."""
        return self.executor.now()

    def stats(self) -> Counters:
        """Return counters of all work since the engine was made. The difference of two results describes the interval
        between them."""
        counters = self.executor.counters.copy()
        counters.bytes_read, counters.bytes_cached = self._transfers.bytes_read, self._filler.cached_bytes
        counters.read_busy_seconds = self._transfers.busy_seconds
        compute = self.executor.compute
        counters.host_seconds = sum(unit.busy_seconds for unit in compute.units.values())
        counters.late_seconds = compute.pacing.late_seconds
        return counters

    def new_cache(self, sequences: int = 1) -> RowCache:
        """Return a KV cache of `sequences` rows within the memory budget. The rows share `context_tokens *
        max_sequences` positions, so `sequences` is at most this product; other values raise `ConfigError`. Only this
        engine's model can use the cache.

        If the budget has no room for the cache, the oldest caches are invalidated. The call waits while another request
        is running.
        """
        with self.passes.turn():
            return self._reserve.caches.new(sequences)

    def new_caches(self) -> list[RowCache]:
        """Return `max_sequences` caches of one sequence each, of `context_tokens` positions; see `new_cache`."""
        with self.passes.turn():
            return self._reserve.caches.new_ones()

    def use_alpha(self, alpha: float) -> None:
        """Set the substitution threshold `alpha`, empty the expert cache and set counters to zero. Raise `ConfigError`
        unless alpha is a number from 0 to 1, and if alpha is above 0 and the model was loaded without router scores:
        with alpha 0 and an eviction policy that needs none."""
        allowed = SETTINGS["alpha"].allowed
        if not allowed.admits(alpha):
            raise allowed.refusal("alpha", alpha)
        if alpha > 0 and not self.rules:
            raise ConfigError(
                "substituting experts needs the routers' scores: load the model with an alpha above 0, or with "
                "`eviction=score`",
                setting="alpha",
                given=alpha,
                allowed="0 for a model loaded with alpha 0 and an eviction other than score",
            )
        with self.passes.turn():
            self.passes.refuse_in_pass("use_alpha")
            self.config = replace(self.config, alpha=alpha)
            self.executor.substitute_by(substitution_of(self.config))
            self.executor.reset(self.fresh_eviction())

    def use_eviction(self, settings: EvictionSettings) -> None:
        """Evict by another policy, empty the expert cache and set counters to zero."""
        with self.passes.turn():
            self.passes.refuse_in_pass("use_eviction")
            self.config, self.eviction_settings = replace(self.config, eviction=settings.name), settings
            self.executor.reset(self.fresh_eviction())

    def fresh_eviction(self) -> Eviction:
        """Return a new eviction policy of the kind in `eviction_settings`. It has no record of earlier uses."""
        return fresh_eviction(self.eviction_settings, self.ledger, self.store)

    @property
    def is_on_this_cpu(self) -> bool:
        """Whether this machine's CPU computes everything: not a GPU, an emulated device, or a cluster."""
        return self._arena.device.type == "cpu" and not self.pacing.is_emulated and self.config.cluster is None

    @contextmanager
    def without_reads(self) -> Iterator[None]:
        """Compute with experts whose weights are all zero during the `with` block: a load reads nothing. Afterwards no
        expert is resident, and what the policies have observed is forgotten.

        For passes whose results are not used. Has no effect if experts are loaded before their first use, because a
        pass then reads only what is read anyway. Has no effect on a GPU, on a cluster, and on other systems than Linux.
        """
        arrivals = self.executor.arrivals
        if arrivals.preloads or not (GIVES_BACK and self.is_on_this_cpu):
            yield
            return
        self.executor.reset(self.fresh_eviction())
        self._arena.clear()  # with the bytes of other layers' experts, a pass may compute NaN
        try:
            with arrivals.transfers.without_reads():
                try:
                    yield
                finally:
                    self.executor.recover()
        finally:
            self.executor.reset(self.fresh_eviction())
            # memory that was only read is one shared page of zeros, and replacing it costs more than a first write
            self._arena.clear()

    def residents(self) -> list[tuple[int, int]]:
        """Return (layer, expert) of all experts in cache slots, in an order in which every part of the list has experts
        of all layers, those of a layer in the order of their loads. Waits until no text is computed."""
        with self.passes.turn():
            self.executor.arrivals.collect()
            return across_layers([key[:2] for key in self.executor.table.cached() if key[2] == EXACT])

    def fill_when_idle(self, first: Sequence[tuple[int, int]]) -> None:
        """Load experts into free slots in the background, from now on until a prompt comes, and again whenever `fill`
        is called: first the experts `first`, as (layer, expert), then the others.

        If most of the experts' files is in the page cache, the first pass leaves free slots to this background work.
        When memory is used for the first time, the system has to allocate it, for which the first token would wait.

        Has no effect on a GPU and on a cluster, with a value for `preload`, if the slots hold all experts, which are
        loaded anyway, and if a text must be reproducible although it depends on which experts are resident.
        """
        config, depends = self.config, bool(self.config.lossy) and self.config.reproducible
        if not self.is_on_this_cpu or config.preload is not None or depends or self.executor.arrivals.preloads:
            return
        known = set(keys := self.store.keys())
        self._filling = list(dict.fromkeys([*(each for each in first if each in known), *across_layers(keys)]))
        self.executor.leave_filling(self._filler.is_cached)
        with self.passes.turn():
            self.fill()

    def pause_filling(self) -> None:
        """Cancel the queued loads into free slots, because a text will be computed. The caller has the turn."""
        if self._filling:
            self.executor.arrivals.pause_fill()

    def fill(self) -> None:
        """Queue loads into free slots if `fill_when_idle` was called. The caller has the turn, and no text is
        computed."""
        if self._filling:
            self.executor.arrivals.collect()
            self.executor.arrivals.fill(self._filling)

    def wait_ready(self) -> None:
        """Wait until the experts that are loaded before their first use have arrived, and until the operating system
        has allocated the memory of all slots. Otherwise this happens while the first texts are computed. No pass may
        run. Only measurements need this."""
        self._arena.touch(slots=self.ledger.slots_in_use)
        self._arena.wait_touched(None)
        for ticket in list(self.executor.arrivals.tickets.values()):
            ticket.join()

    @contextmanager
    def recording(self) -> Iterator[list[Routing]]:
        """Record the routing of every layer and step during the `with` block. Yield the growing list, which
        `smoe.simulator` can replay."""
        routing = RoutingList()
        with self.observed_by(routing):
            yield routing.trace

    @contextmanager
    def observed_by(self, observer: StepObserver) -> Iterator[None]:
        """Call the methods of `observer` for every step of every layer during the `with` block."""
        self.executor.add_observer(observer)
        try:
            yield
        finally:
            self.executor.remove_observer(observer)

    @contextmanager
    def loading_all(self) -> Iterator[None]:
        """Load every missing expert during the `with` block, including experts that `balance` would give to the CPU.
        The experts in the slots stay there afterwards, as in Fiddler's profiling."""
        with self.executor.unbalanced():
            yield

    @property
    def pacing(self) -> Pacing:
        """The clock of the computation: real time, or the time of an emulated device."""
        return self.executor.compute.pacing

    @property
    def arithmetic(self) -> str:
        """The kernels that multiply few rows. One of `KERNELS`: torch, native (our kernels with torch's bits),
        own-order (our kernels, grade E1), or slots (our GPU kernels for experts, E2)."""
        experts = self.executor.compute.experts
        return "slots" if experts.is_in_slots else experts.arithmetic

    def cancel(self) -> bool:
        """End the running request: it raises `GenerationCancelledError` at its next layer or, if all experts are
        resident, at its next token. Return False if no request was running. Any thread may call this. Waiting requests
        continue; use a `Cancellation` to end one particular call."""
        return self.passes.turns.cancel("this request was cancelled by model.offload.cancel()")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Cancel the running request, stop the threads and free the memory. Repeated calls have no effect.

        Afterwards a `with` statement on the engine, calls of the model and its `generate`, and `new_cache`,
        `new_caches`, `use_alpha` and `use_eviction` raise `EngineStateError`. The other methods work: `stats` and
        `describe` return what they returned last, and `cancel` returns False.

        `timeout_seconds`: a number of at least 0, or None to wait without a limit; other values raise `ConfigError`. A
        request of another thread ends at its next layer. If that takes longer than `timeout_seconds`,
        `EngineBusyError` is raised, and the engine is closed when the request ends. If a request's own thread calls
        this (from a hook, a stopping criterion or a signal handler), the engine is closed when the request ends.
        """
        if not (timeout_seconds is None or _SECONDS.admits(timeout_seconds)):
            raise ConfigError.out_of_bounds("timeout_seconds", timeout_seconds, f"{_SECONDS.words}, or None")
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
        self.passes.check_usable()
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
        tested = f"exact, arithmetic {self.arithmetic} (tested {self.self_test})"
        exact = f"{', '.join(config.lossy)} (lossy)" if config.lossy else tested
        return (
            f"smoe engine, {state}: {format_bytes(ledger.budget_bytes)} ({self.budget_reason}), "
            f"{ledger.residents if config.keeps_experts else ledger.spare}\n"
            f"eviction {config.eviction}, prefetch {config.prefetch}, {exact}; context {self.context_tokens} tokens x "
            f"{config.max_sequences}; {self._threads} threads on {self._arena.device}\n"
            f"so far {served}, {format_bytes(counters.bytes_read)} read"
        )

    def peak_memory_bytes(self) -> int:
        """Return the largest number of bytes of the memory budget that were in use at once.

        On a GPU this is the allocator's peak since a model was last loaded there (`memory/arena.py`). On a CPU it is
        the sum of the memory for slots, weights and caches and the reserve for activations; `bench/limits.py` checks
        the sum with a cgroup.
        """
        if self._arena.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._arena.device))
        demand = self.ledger.demand
        of_predictors = demand.predictor_bytes + demand.learned_bytes + demand.draft_bytes
        fixed = self._dense_bytes + demand.latent_bytes + demand.workspace_bytes + of_predictors
        if self._reserve.is_lent:
            return fixed + self._reserve.peak_bytes
        return fixed + self._arena.nbytes + demand.step_bytes(demand.step_tokens) + self._reserve.caches.peak_bytes

    @property
    def slot_memory(self) -> torch.Tensor:
        """The memory of all slots, as a uint8 tensor. The read rate of RAM is measured on this tensor, because
        additional memory would exceed the budget."""
        return self._arena.bytes

    def describe(self) -> dict[str, Any]:
        """Return the entries of the memory budget, the numbers of slots and the eviction rule as a dictionary, for
        programs.

        `eviction_rule` is the name of the policy by which experts are evicted at present. With `eviction` auto it is
        lru, lfu, window or fading-counts (`policy/eviction/auto.py`), and lru if every expert fits. Several names,
        separated by commas, are those of slots with different sizes or formats.
        """
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
    """Return a new eviction policy for the slots in `ledger` and the experts in `store`. It has no record of earlier
    uses."""
    experts = {layer: held.experts for layer, held in store.layers.items()}
    return make_eviction_for(settings, ledger.pools, experts)
