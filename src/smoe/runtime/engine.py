"""The engine of one model: its budget, slots and threads. Users access it as `model.offload`.

One thread generates at a time; others wait for their turn (`turns.py`). A forked child cannot use the engine (threads
and, on a GPU, the context do not survive a fork) and gets an error. The memory and threads of an engine without
`close()` are freed when Python collects it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from smoe.config import EngineConfig
from smoe.errors import ConfigError, EngineStateError
from smoe.fastpath.rows_of_pass import RowsOfPass
from smoe.kernels.threads import threads
from smoe.memory.arena import Arena
from smoe.memory.pacing import Pacing
from smoe.memory.reading_threads import Transfers
from smoe.memory.store import ExpertStore
from smoe.metrics import Counters
from smoe.models.guards import not_copied
from smoe.models.kv_cache import RowCache
from smoe.models.outline import Anatomy
from smoe.models.rotary_lengths import RotaryLengths
from smoe.models.scoring import ScoringRule
from smoe.policy.budget import Ledger
from smoe.policy.eviction.base import Eviction, EvictionSettings
from smoe.policy.registry import make_eviction_for
from smoe.routing import Phase, Routing
from smoe.runtime.caches import Caches
from smoe.runtime.cancellation import Cancellation
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.lifetime import Held
from smoe.runtime.observer import RoutingList, StepObserver
from smoe.runtime.rerouting import Scored
from smoe.runtime.reserve import Reserve
from smoe.runtime.step import Step
from smoe.runtime.substitution import substitution_of
from smoe.runtime.turns import Turns
from smoe.units import format_bytes, identifier


class Engine:
    """The offloading runtime of one model: budget, slots, threads. `close()`, or a `with` statement, frees them."""

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
        reasons: Mapping[str, str],
        eviction: EvictionSettings,
        leaves_little: bool,
        leaves_little_of_prompts: bool = False,
    ) -> None:
        """`leaves_little`: our kernels compute almost all products of one token, so the library needs one thread
        only; `leaves_little_of_prompts`: the same for several tokens."""
        self.config = config
        self.anatomy = anatomy
        self.ledger = ledger
        self.store = store
        self.budget_reason = budget_reason
        self.reasons = reasons
        """The origin of each setting that the user left out, by setting name."""
        self.context_tokens = context_tokens
        """The number of positions reserved for every sequence."""
        self._turns, self.eviction_settings = Turns(), eviction
        self._threads = torch.get_num_threads()
        """The number of computing threads, on which our kernels have been compared."""
        self.executor = executor
        self.rows_of_pass: RowsOfPass | None = None
        """Gives attention the texts of a batch with their own lengths; None where the model's attention does not
        support it."""
        self.rotary: RotaryLengths  # set with the seam
        self.rules = rules
        self._logits: dict[int, torch.Tensor] = {}
        """The routers' logits in this pass, until their experts run."""
        self._leaves_little, self._leaves_little_of_prompts = leaves_little, leaves_little_of_prompts
        self._arena = arena
        self._transfers = transfers
        self._process = os.getpid()
        self._is_closing = False
        self._is_closed = False
        self._is_in_pass = False
        self._phase = Phase.PREFILL
        self._sequences = 1
        self.answer: Callable[[Step], torch.Tensor] = executor.run
        """Computes the experts' output [T, H] of a layer; measurements replace it (`stand_in.py`)."""
        self._silent: torch.Tensor | None = None
        """[T] of this pass, True at positions that need no expert; None where all do."""
        positions = context_tokens * config.max_sequences
        self._caches = Caches(model_config, context_tokens, config.max_sequences, ledger.demand.kv_cache_bytes)
        self._reserve = Reserve(ledger, executor, arena, self._caches, anatomy.kv_bytes_per_token, positions)
        self._caches.note_growth = self._reserve.note_growth
        self._dense_bytes = dense_bytes
        self._held = Held(self, transfers, arena, executor.helpers)

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
        with self.turn():
            return self._caches.new(sequences)

    def new_caches(self) -> list[RowCache]:
        """Return `max_sequences` caches of one sequence each, of `context_tokens` positions; see `new_cache`."""
        with self.turn():
            return self._caches.new_ones()

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
        with self.turn():
            self._refuse_in_pass("use_alpha")
            self.config = replace(self.config, alpha=alpha)
            self.executor.substitute_by(substitution_of(self.config))
            self.executor.reset(self.fresh_eviction())

    def fresh_eviction(self) -> Eviction:
        """Return a new eviction policy according to `eviction_settings`, without history."""
        experts = {layer: held.experts for layer, held in self.store.layers.items()}
        return make_eviction_for(self.eviction_settings, self.ledger.pools, experts)

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
    def is_changing_steps(self) -> bool:
        """Whether some positions of the pass need no expert, or something else stands in the place of the experts."""
        return self._silent is not None or self.answer != self.executor.run

    @property
    def pacing(self) -> Pacing:
        """The clock of the computation: real time, or that of an emulated device."""
        return self.executor.compute.pacing

    @property
    def arithmetic(self) -> str:
        """The kernels that multiply few rows, one of `KERNELS`: torch, native (our kernels with torch's bits) or
        own-order (E1); or, on a GPU, slots (our kernels for experts, E2)."""
        compute = self.executor.compute
        return "slots" if compute.is_in_slots else compute.arithmetic

    def cancel(self) -> bool:
        """End the running request at its next layer, or its next token if all experts are resident: it raises
        `GenerationCancelledError` there. Any thread may call this. Waiting requests continue (a `Cancellation` ends one
        call). Return False where none was running."""
        return self._turns.cancel("this request was cancelled by model.offload.cancel()")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Cancel the running request, stop the threads and free the memory. Repeated calls have no effect; other
        methods fail afterwards.

        A request of another thread ends at its next layer. If that takes longer than `timeout_seconds`,
        `EngineBusyError` is raised, and the engine is closed when the request ends. Within a request of the same thread
        (a hook, a stopping criterion, a signal handler) closing takes effect at its end.
        """
        if self._is_closed:
            return
        self._is_closing = True
        if self._process != os.getpid():
            self._shut_down()  # the thread that has the turn is in another process
            return
        self._turns.cancel("this request was cancelled because its model was closed")
        if not self._turns.is_mine:
            with self._turns.taken(timeout_seconds, "close(timeout_seconds=...)"):
                self._shut_down()

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
        state = "closed" if self._is_closing else "running" if self._turns.is_running else "ready"
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

    # -- for the seam -------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, cancellations: Sequence[Cancellation] = ()) -> Iterator[None]:
        """Take the turn for a computation or a new cache: one thread at a time, with the engine's number of threads.

        Raises `EngineBusyError` after waiting for `turn_timeout_seconds`, `EngineStateError` for a closed engine, and
        `GenerationCancelledError` where one of `cancellations` ends the request while it waits.
        """
        if self._turns.is_mine and self._process == os.getpid():
            yield  # also while it is closing: the pass says so
            return
        self._check_usable()
        with self._turns.taken(self.config.turn_timeout_seconds, "turn_timeout_seconds", cancellations):
            try:
                self._check_usable()
                self._is_in_pass = False
                with threads(self._threads):
                    yield
            finally:
                if self._is_closing:
                    self._shut_down()

    @contextmanager
    def forward_pass(self, given: torch.Tensor, padding: torch.Tensor | None, cache: RowCache | None) -> Iterator[None]:
        """Prepare and finish one forward pass of the model, within a turn. `given`: token ids [rows, new positions], or
        their embeddings [rows, new positions, H].

        `padding`: [rows, tokens], True at padding positions, which no expert computes. Raises
        `GenerationCancelledError` where the turn was cancelled, here or in `run_experts`.
        """
        self._refuse_in_pass("the model")
        self._is_in_pass = True
        rows, tokens = given.shape[:2]
        try:
            if cache is not None:
                cache.begin(tokens, rows)
            self._phase = Phase.DECODE if tokens == 1 else Phase.PREFILL
            self._sequences = rows
            self._reserve.begin(tokens * rows)
            self._note_silent(tokens, padding, cache)
            self.executor.begin_pass(given if given.dim() == 2 else None, cache)
            started = self.now()
            try:
                self._turns.check()
                with torch.no_grad(), self._apart(cache, tokens) as alone, self._threads_for(tokens * rows, alone):
                    yield
            except BaseException:
                self.executor.recover()  # no read stays in flight
                raise
            if cache is not None:
                cache.commit()
                self._caches.check()
            self._count_pass(tokens * rows, self.now() - started)
        finally:
            self._is_in_pass = False

    def _note_silent(self, tokens: int, padding: torch.Tensor | None, cache: RowCache | None) -> None:
        """Determine the positions of the pass that need no expert: padding, and finished rows."""
        silent = cache.padding(tokens) if padding is None and cache is not None else padding
        if cache is not None and cache.ended is not None:
            ended = cache.ended.unsqueeze(1).expand(-1, tokens)
            silent = ended if padding is None else ended | padding
        self._silent = None if silent is None else silent.reshape(-1)

    def _count_pass(self, positions: int, seconds: float) -> None:
        counters, trial = self.executor.counters, self.executor.trial
        counters.forward_passes += 1
        counters.tokens += positions - (int(self._silent.sum()) if self._silent is not None else 0)
        counters.forward_seconds += seconds
        if self.executor.answerer is not None and self._phase is Phase.DECODE:
            self.executor.answerer.answering.note_step(seconds)
        if trial is not None:
            guesses = counters.prefetches, counters.prefetches_used
            if self._phase is Phase.DECODE:
                trial.note(seconds, *guesses)
            else:
                trial.pass_over(*guesses)

    def run_experts(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts of one layer -> [T, H]. Shapes are the library's: hidden [T, H], top_k_index and
        top_k_weights [T, K]."""
        self._turns.check()
        if self._silent is not None:
            top_k_index = top_k_index.masked_fill(self._silent.unsqueeze(1), self.store.layers[layer].experts)
        logits, rule = self._logits.pop(layer, None), self.rules.get(layer)
        scored = Scored(rule, rule.scores(logits)) if rule is not None and logits is not None else None
        step = Step(layer, self._phase, hidden, top_k_index, top_k_weights, self._sequences, logits, scored)
        for observer in self.executor.observers:
            observer.routed(step)
        output = self.answer(step)
        for observer in self.executor.observers:
            observer.computed(step, output)
        return output

    def note_logits(self, layer: int, logits: torch.Tensor) -> None:
        """Store a router's logits [T, E] until the experts of its layer run."""
        self._logits[layer] = logits

    def _apart(self, cache: RowCache | None, tokens: int) -> AbstractContextManager[bool]:
        """Compute rows of separate texts separately during a pass. Yield whether each row is computed as it would be
        alone."""
        if cache is None or cache.row_lengths is None or self.rows_of_pass is None:
            return nullcontext(False)
        return self.rows_of_pass.apart(cache.row_keys(tokens), tokens)

    def _threads_for(self, positions: int, alone: bool) -> AbstractContextManager[None]:
        """Limit the library to one thread where our kernels compute the large products.

        Dividing such short work takes longer than doing it, and the library's threads, once awake, delay ours: on a
        busy machine each of a layer's small operations waits for a core, which makes a prompt of 16 tokens three times
        as slow. Our kernels' bits for one token have been compared with the library's on one thread and on all; a
        remaining product that depends on it uses all threads (`fastpath/linear.py`).
        """
        is_several = positions > 1 and not alone
        return threads(1) if (self._leaves_little_of_prompts if is_several else self._leaves_little) else nullcontext()

    def _check_usable(self) -> None:
        """Raise `EngineStateError` where the engine is closed or belongs to the parent of a forked process."""
        if self._is_closing:
            raise EngineStateError("this model was closed; load it again with smoe.from_pretrained")
        if self._process != os.getpid():
            raise EngineStateError("this model was loaded before a fork; load it in the child process instead")

    def _refuse_in_pass(self, what: str) -> None:
        if self._is_in_pass:
            raise EngineStateError(f"{what} cannot be called inside a forward pass (a hook?) of the same model")

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
        return fixed + self._arena.nbytes + demand.step_bytes(demand.step_tokens) + self._caches.peak_bytes

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
