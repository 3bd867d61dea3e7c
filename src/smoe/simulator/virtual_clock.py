"""Replays a trace on a virtual clock. The result is the time of each step on a machine that is described by its times.

The engine's own plans, including prefetches, are executed without hardware, in the engine's order. One layer in decode
(time goes to the right; a, b and c are missing experts):

    link      | load a ....... | load b ....... | prefetch ....
    the CPU   | compute c .... |
    device    | layer | decide | residents | look ahead | wait | a | wait | b | c |

The link performs one load after the other: the prefetch for which a thread waits, then loads of the layer, then other
prefetches. A load that has begun is not interrupted. Link and CPU do not slow each other down. The trace's later
routing stays as recorded, even if experts are substituted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.answering import Answered, Answering
from smoe.policy.answers import AnswerCosts
from smoe.policy.eviction.base import Eviction
from smoe.policy.load_or_compute import Balance, Costs
from smoe.policy.plan import DEVICE, LayerPlan, Load, LoadReason
from smoe.policy.plan_prefetch import has_prefetch_slots, plan_prefetch
from smoe.policy.plan_progress import Progress
from smoe.policy.prediction import ON_A_THREAD, Moment, Prediction, Predictor, Sight
from smoe.policy.residency import PoolSize, SlotTable
from smoe.policy.step import EXACT_SWITCHES, Switches, decide, layer_share
from smoe.routing import Phase, Routing


@dataclass(frozen=True)
class StepTimes:
    """The seconds of the operations in a step: loads, experts, layers and decisions."""

    load: float
    """Seconds to load the full copy of one expert."""
    expert: Callable[[int], float]
    """Takes a number of tokens; returns the seconds of one expert on the device."""
    layer: Callable[[int], float]
    """Takes a number of tokens; returns the seconds of a layer without its routed experts."""
    host: Callable[[int], float] | None = None
    """Takes a number of tokens; returns the seconds of one expert on the CPU of a machine with a device. None: the CPU
    computes no experts."""
    deciding: float = 0.0
    """Seconds of our Python code in every layer."""
    asking: float = 0.0
    """Seconds that one prediction takes."""
    low_load: float = 0.0
    """Seconds to load a low-precision copy, if there are low-precision copies."""
    in_chunks: float = 1.0
    """The factor by which a load is slower if no thread waits for it when it starts. Such a load is divided into
    chunks, between which other loads may run."""
    alone: float = 1.0
    """The factor by which an expert of a decode step takes longer if the engine had to wait for it. Resident experts
    are computed together, the other experts one by one."""
    first_load: float | None = None
    """Seconds to load the full copy of one expert into memory that the process uses for the first time; None: as any
    other load."""


@dataclass
class Timed:
    """The times and counts of a replay. All values except `prefill_seconds` and `link_seconds` are of decode steps."""

    step_seconds: list[float] = field(default_factory=list)
    """The seconds of every step."""
    prefill_seconds: float = 0.0
    uses: int = 0
    loads: int = 0
    computed_by_host: int = 0
    prefetches: int = 0
    """The number of prefetches that began."""
    prefetches_used: int = 0
    computed_alone: int = 0
    """The number of experts that the device computed after its residents, one by one."""
    link_seconds: float = 0.0
    """The seconds in which the link was busy, including prompts: the sum of all loads that have begun."""

    @property
    def seconds_per_step(self) -> float:
        return sum(self.step_seconds) / len(self.step_seconds) if self.step_seconds else 0.0


class _Link:
    """The way from disk or host memory to the device, which performs one load after the other. Times of successive
    calls must not fall."""

    def __init__(self, seconds: float, low_seconds: float, in_chunks: float) -> None:
        self.seconds = {EXACT: seconds, LOW: low_seconds}
        """{format: seconds of a load that begins from now on}."""
        self._in_chunks = in_chunks
        self._chunked: set[ExpertKey] = set()
        self._free = 0.0
        self.busy_seconds = 0.0
        self._waiting: deque[tuple[ExpertKey, float]] = deque()
        self._expected: dict[ExpertKey, float] = {}
        self._ends: dict[ExpertKey, float] = {}

    def submit(self, key: ExpertKey, now: float, is_waited_for: bool) -> None:
        self._run(now)
        if is_waited_for:
            self._chunked.discard(key)
            self._waiting.append((key, now))
        else:
            self._chunked.add(key)
            self._expected[key] = now

    def ended(self, now: float) -> list[ExpertKey]:
        """Return the loads that have ended by the time `now` and were not returned before."""
        self._run(now)
        found = [key for key, end in self._ends.items() if end <= now]
        for key in found:
            del self._ends[key]
        return found

    def wait(self, key: ExpertKey, now: float) -> float:
        """Return the time at which the load of `key` ends. A thread waits for this load, so if no thread has waited for
        it before, it is the next one to begin, as in `memory/reading_threads.py`."""
        self._run(now)
        since = self._expected.pop(key, None)
        if since is not None:
            self._waiting.appendleft((key, since))
        while key not in self._ends:
            self._begin_next(inf)
        return self._ends.pop(key)

    def cancel(self, key: ExpertKey, now: float) -> bool:
        """Cancel a load. Return False if it has already begun."""
        self._run(now)
        for entry in self._waiting:
            if entry[0] == key:
                self._waiting.remove(entry)
                return True
        return self._expected.pop(key, None) is not None

    @property
    def has_queued(self) -> bool:
        """Whether a load has not begun."""
        return bool(self._waiting or self._expected)

    def is_busy(self, now: float) -> bool:
        self._run(now)
        return self._free > now

    def _run(self, now: float) -> None:
        while self._free < now and (self._waiting or self._expected) and self._begin_next(now):
            pass

    def _begin_next(self, before: float) -> bool:
        """Begin one load if it can begin before the time `before`. Return whether one has begun."""
        found = self._waiting[0] if self._waiting else next(iter(self._expected.items()), None)
        if found is None:
            return False
        key, since = found
        begins = max(self._free, since)
        if begins >= before:
            return False
        if self._waiting:
            self._waiting.popleft()
        else:
            del self._expected[key]
        seconds = self.seconds[key[2]] * (self._in_chunks if key in self._chunked else 1.0)
        self.busy_seconds += seconds
        self._free = self._ends[key] = begins + seconds
        return True


class VirtualClock:
    """Executes the engine's plans without hardware and adds up times. `serve` must receive the routings of a trace in
    their order."""

    def __init__(
        self,
        cache_slots: int,
        staging_slots: int,
        layers: int,
        eviction: Eviction,
        times: StepTimes,
        switches: Switches = EXACT_SWITCHES,
        balance: str | None = None,
        predictor: Predictor | None = None,
        low_slots: int = 0,
        answering: Answering | None = None,
        waits_for_all: bool = False,
    ) -> None:
        """`low_slots`: cache slots for low-precision copies; `eviction` must then rank both formats. `balance`: one of
        `policy.balance.BALANCERS`, which needs `times.host`; None: all missing experts are loaded. `answering`:
        resolves the misses of decode steps by quality cost, with the costs in `times`; settings for misses are then
        ignored. `waits_for_all`: a layer begins when every load has ended, as in systems that load whole layers."""
        assert balance is None or times.host is not None
        self.result = Timed()
        low = [PoolSize(low_slots, staging_slots, form=LOW)] if low_slots else []
        self._table = SlotTable(PoolSize(cache_slots, staging_slots), *low)
        self._share = layer_share(cache_slots, layers)
        self._eviction = eviction
        self._times = times
        self._switches = switches
        self._balance = balance
        self._predictor = predictor
        self._answering = answering
        self._waits_for_all = waits_for_all
        self._link = _Link(times.load, times.low_load, times.in_chunks)
        self._now = 0.0
        self._answer_at: tuple[Iterable[Prediction], float] | None = None
        """The predictions of a concurrent predictor, and the time at which they are ready."""
        self._progress = Progress(self._table, eviction, self._begin)
        self._last_layer: float = inf
        """The layer of the last decode step's routing; infinity if the next routing begins a new step."""

    def fork(self, predictor: Predictor | None) -> VirtualClock:
        """Return another clock in the same state, which uses `predictor` from now on. This clock has had none. The
        state of either clock no longer changes with the other's."""
        assert self._predictor is None
        flat = self._table.ready, self._table.inflight  # without this, copying their keys would take longest
        other = deepcopy(self, {id(self._times): self._times} | {id(each): each.copy() for each in flat})
        other._predictor = predictor
        return other

    def change_times(self, times: StepTimes) -> None:
        """Use other times from now on, also for loads that have not begun."""
        self._times = times
        self._link.seconds = {EXACT: times.load, LOW: times.low_load}

    def fill(self, experts: Iterable[tuple[int, int]]) -> None:
        """Queue loads of those of the experts (layer, expert) that are missing, in their order, into free cache slots,
        as `runtime/arrivals.py` does. Loads that a layer waits for are executed before these loads."""
        table = self._table
        here = table.ready.keys() | table.inflight.keys()
        missing = [key for key in ((*at, EXACT) for at in experts) if key not in here]
        slots = iter([*table.pools[0].free_cache])
        loads = (Load(key, slot, None, True, LoadReason.PREFETCH, 0) for key, slot in zip(missing, slots, strict=False))
        self._progress.prefetch(list(loads))

    @property
    def is_loading(self) -> bool:
        """Whether a load is running or queued."""
        return self._link.is_busy(self._now) or self._link.has_queued

    def serve(self, routing: Routing, ahead: Iterable[Prediction] = ()) -> None:
        """Execute one layer of one step, and advance the clock by its time. `ahead`: for a layer of a prompt, the
        experts of its next layer. Free staging slots receive them after this layer's own loads."""
        began, result = self._now, self.result
        is_decode = routing.phase is Phase.DECODE
        goes_on = is_decode and routing.layer > self._last_layer
        if self._answering is not None and not goes_on and self._last_layer < inf:
            self._answering.note_step(result.step_seconds[-1])
        self._now += self._times.layer(len(routing.top_k_index))
        if self._predictor is not None:
            self._predictor.observe(routing)
        if self._waits_for_all:
            for key in list(self._table.inflight):
                self._now = max(self._now, self._link.wait(key, self._now))
                self._progress.arrive(key)
        for key in self._link.ended(self._now):
            self._progress.arrive(key)
        plan = decide(
            routing,
            self._table,
            self._eviction,
            self._share,
            self._switches,
            self._balancing,
            self._drop_stale,
            None if self._answering is None else self._answer,
        ).plan
        self._now += self._times.deciding
        self._progress.adopt(plan)
        if is_decode:
            result.uses += len(plan.serves)
            result.loads += len(plan.loads)
            result.computed_by_host += sum(serve.unit != DEVICE for serve in plan.serves)
            self._ask(Moment.ROUTED, plan)
            for moment in ON_A_THREAD:
                self._ask(moment, plan)
        else:
            self._progress.prefetch(plan_prefetch(ahead, self._table, plan))
        self._compute(plan, is_decode)
        self._take_answer(plan, waits=True)
        if not is_decode:
            result.prefill_seconds += self._now - began
        elif goes_on:
            result.step_seconds[-1] += self._now - began
        else:
            result.step_seconds.append(self._now - began)
        self._last_layer = routing.layer if is_decode else inf
        result.link_seconds = self._link.busy_seconds

    # -- as `runtime/arrivals.py` does on hardware ---------------------------------------------------------------------

    def _begin(self, load: Load) -> None:
        self._link.submit(load.key, self._now, load.reason is LoadReason.DEMAND)

    def _drop_stale(self, routing: Routing) -> None:
        wanted, stale = self._progress.look_through(routing)
        self.result.prefetches_used += len(wanted) if routing.phase is Phase.DECODE else 0
        for key in stale:
            if key in self._table.ready:
                self._table.release(key)
            elif self._link.cancel(key, self._now):
                self._progress.fail(key)

    # -- as `runtime/execute.py` and `layer.py` do ---------------------------------------------------------------------

    def _balancing(self) -> Balance | None:
        if self._balance is None:
            return None
        assert self._times.host is not None
        under_way = 0.5 * self._times.load * self._link.is_busy(self._now)
        return Balance(self._balance, "score", Costs(self._times.load, self._times.host(1), under_way))

    def _answer(self, routing: Routing, table: SlotTable) -> Answered:
        assert self._answering is not None
        times = self._times
        low = times.low_load if table.has_low else None
        host = None if times.host is None else times.host(1)
        under_way = 0.5 * times.load * self._link.is_busy(self._now)
        return self._answering.answer(routing, table, AnswerCosts(times.load, low, host, under_way))

    def _ask(self, moment: Moment, plan: LayerPlan) -> None:
        if self._predictor is None or self._predictor.asked is not moment or not has_prefetch_slots(self._table, plan):
            return
        predictions = self._predictor.predict(Sight(plan.layer, None))
        if moment in ON_A_THREAD:
            self._answer_at = predictions, self._now + self._times.asking
            return
        self._now += self._times.asking
        self._bring(predictions, plan)

    def _look_for_answer(self, plan: LayerPlan, computed: int) -> None:
        assert self._predictor is not None or self._answer_at is None
        if self._predictor is not None and (computed or self._predictor.asked is Moment.CONCURRENT):
            self._take_answer(plan, waits=False)

    def _take_answer(self, plan: LayerPlan, waits: bool) -> None:
        """Start the loads that a concurrent predictor has predicted, if the prediction is ready. If `waits`, wait until
        it is ready."""
        if self._answer_at is None or not (waits or self._answer_at[1] <= self._now):
            return
        (predictions, there), self._answer_at = self._answer_at, None
        self._now = max(self._now, there)
        self._bring(predictions, plan)

    def _bring(self, predictions: Iterable[Prediction], plan: LayerPlan) -> None:
        loads = plan_prefetch(predictions, self._table, plan)
        self.result.prefetches += len(loads)
        self._progress.prefetch(loads)

    def _compute(self, plan: LayerPlan, is_decode: bool) -> None:
        """Compute resident experts first. Then wait for each missing expert and compute it, in the order of the
        plan."""
        times, serves, ready, progress = self._times, plan.serves, self._table.ready, self._progress
        expert, guesses = times.expert, self._predictor is not None
        by_host, host_free = {}, self._now
        for serve in serves:
            if serve.unit != DEVICE:
                assert times.host is not None
                host_free += times.host(len(serve.routes))
                by_host[serve.key] = host_free
        here = next((n for n, serve in enumerate(serves) if serve.waits), len(serves)) if is_decode else 0
        for computed, serve in enumerate(serves, start=1):
            if computed == here + 1 and is_decode:
                self._ask(Moment.RESIDENTS_DONE, plan)
            if by_host and serve.key in by_host:
                self._now = max(self._now, by_host[serve.key])
                continue
            if serve.key not in ready:
                self._now = max(self._now, self._link.wait(serve.key, self._now))
                progress.arrive(serve.key)
            if guesses and computed > here:
                self._look_for_answer(plan, computed - 1)
            if is_decode and computed > here:
                self._now += expert(len(serve.routes)) * times.alone
                self.result.computed_alone += 1
            else:
                self._now += expert(len(serve.routes))
            progress.served(serve, computed)
            if guesses and (computed == 1 or computed >= here):  # residents after the first are computed together
                self._look_for_answer(plan, computed)


def replay_on_clock(
    trace: Sequence[Routing],
    cache_slots: int,
    staging_slots: int,
    eviction: Eviction,
    times: StepTimes,
    switches: Switches = EXACT_SWITCHES,
    balance: str | None = None,
    predictor: Predictor | None = None,
    low_slots: int = 0,
    answering: Answering | None = None,
) -> Timed:
    """Replay `trace` from an empty cache, with the arguments of `VirtualClock`. O(steps x experts used)."""
    layers = len({routing.layer for routing in trace}) or 1
    clock = VirtualClock(
        cache_slots, staging_slots, layers, eviction, times, switches, balance, predictor, low_slots, answering
    )
    for routing in trace:
        clock.serve(routing)
    return clock.result
