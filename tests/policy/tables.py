"""Generated situations for planners: routings, and tables in every state that engine and simulator can reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.plan import HOST, LayerPlan, Load, Promotion, Serve
from smoe.policy.prediction import Prediction
from smoe.policy.residency import SlotTable
from smoe.policy.step import observation, plan_layer
from smoe.routing import Phase, Routing

LAYERS, EXPERTS, TOP_K = 3, 6, 2


@st.composite
def routings(draw: st.DrawFn, max_tokens: int = 8) -> Routing:
    """One step of one layer: decode or prefill, 1 to `max_tokens` rows, some of them padding."""
    token = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)
    rows = draw(st.lists(st.one_of(token, st.just([EXPERTS] * TOP_K)), min_size=1, max_size=max_tokens))
    return Routing(draw(st.integers(0, LAYERS - 1)), draw(st.sampled_from(Phase)), EXPERTS, rows)


guesses = st.lists(st.integers(0, EXPERTS - 1), max_size=EXPERTS, unique=True)
"""What a predictor says of a later layer, best first."""
depths = st.lists(guesses, max_size=LAYERS - 1)
"""What it says of the next layer, and of those after it."""


def predictions(layer: int, guessed: Sequence[Sequence[int]]) -> list[Prediction]:
    """The guesses as they are asked for in `layer`, the nearest layer first."""
    return [Prediction((layer + ahead) % LAYERS, experts) for ahead, experts in enumerate(guessed, start=1)]


def used(routing: Routing) -> list[ExpertKey]:
    """Oracle for `used_copies`."""
    return sorted({(routing.layer, e, EXACT) for row in routing.top_k_index for e in row if e != routing.experts})


def wanted(routing: Routing, table: SlotTable) -> set[ExpertKey]:
    """The copies that may serve a step: experts themselves, and low copies where these are asked for and they are not
    at hand."""
    own = set(used(routing))
    low = {(*key[:2], LOW) for key in own if key[1] in routing.low and key not in {*table.ready, *table.inflight}}
    return own | low


class Executor:
    """Carries plans out one event at a time, like the engine, with loads that arrive when the test says so.

    It asserts everything that would be a wrong result or a deadlock on real hardware.
    """

    def __init__(self, table: SlotTable, eviction: Eviction) -> None:
        self.table = table
        self.eviction = eviction
        self.keeps: dict[ExpertKey, bool] = {}
        """Loads under way: whether they go to a cache slot."""
        self.in_slot: dict[int, ExpertKey] = {}
        """What the bytes of a slot are, or are becoming: the slots' real contents."""
        self.loaded: list[ExpertKey] = []
        self.later: dict[ExpertKey, Promotion] = {}
        self.waiting: set[ExpertKey] = set()
        self.queue: list[Load] = []
        """Loads of the plan under way, and those behind them, whose slots others still use."""

    def begin(self, load: Load) -> None:
        self.table.begin(load)
        if load.victim is not None:
            self.eviction.remove(load.victim)
        self.in_slot[load.slot] = load.key
        self.keeps[load.key] = load.keep
        self.loaded.append(load.key)

    def arrive(self, key: ExpertKey) -> None:
        self.table.arrive(key)
        if self.keeps.pop(key):
            self.eviction.insert(key)

    def promote(self, promotions: Sequence[Promotion]) -> None:
        for promotion in promotions:
            self.table.promote(promotion)
            if promotion.victim is not None:
                self.eviction.remove(promotion.victim)
            self.eviction.insert(promotion.key)

    def _exchange(self, key: ExpertKey) -> None:
        """What stays once it has served, in the place of a resident that nobody waits for any more."""
        promotion = self.later.pop(key)
        assert promotion.victim not in self.waiting, f"{promotion.victim} is evicted before it is computed"
        self.promote([promotion])

    def drop_stale(self, routing: Routing) -> None:
        """What was prefetched and is not wanted leaves before the plan is made; what was under way has ended by
        then. In decode what is meant for later layers stays.
        """
        for key in sorted(self.table.staged - wanted(routing, self.table)):
            if routing.phase is Phase.DECODE and key[0] > routing.layer:
                continue
            if key in self.table.inflight:
                self.arrive(key)
            self.table.release(key)

    def carry_out(self, plan: LayerPlan, prefetch: Sequence[Load] = ()) -> None:
        """Serve by serve; every expert that is missing arrives as late as it can."""
        self.adopt(plan)
        self.bring(prefetch)
        self.serve_all(plan)

    def adopt(self, plan: LayerPlan) -> None:
        """What a plan does before its first serve."""
        self.promote([promotion for promotion in plan.promotions if not promotion.after])
        self.later = {promotion.key: promotion for promotion in plan.promotions if promotion.after}
        self.waiting = {serve.key for serve in plan.serves}
        self.queue = list(plan.loads)
        self._issue(0)

    def bring(self, loads: Sequence[Load]) -> None:
        """Behind all that the running plan loads."""
        self.queue += loads
        self._issue(0)

    def serve_all(self, plan: LayerPlan) -> None:
        for computed, serve in enumerate(plan.serves, start=1):
            self._serve(serve)
            self._issue(computed)
            self.table.check()
        assert not self.queue, f"loads never start: {self.queue}"

    def _serve(self, serve: Serve) -> None:
        table, key = self.table, serve.key
        self.waiting.discard(key)
        if serve.unit == HOST:
            assert key not in table.ready and key not in table.inflight, "computed twice"
            return
        assert key in table.ready or key in table.inflight, f"{key} would be waited for for ever"
        assert serve.waits or key in table.ready, f"{key} was said to be ready"
        if key in table.inflight:
            self.arrive(key)
        assert self.in_slot[table.ready[key]] == key, f"slot of {key} was overwritten before it was computed"
        if key in self.later:
            self._exchange(key)
        if key in table.staged:
            table.release(key)

    def _issue(self, computed: int) -> None:
        while self.queue and self.queue[0].after <= computed:
            self.begin(self.queue.pop(0))


def assert_plan_serves(plan: LayerPlan, routing: Routing, copies: Iterable[ExpertKey] | None = None) -> None:
    """Every used expert once, by its own copy or as `copies` say, with exactly its routes: nothing computed twice,
    nothing left out."""
    assert sorted(serve.key for serve in plan.serves) == (used(routing) if copies is None else sorted(copies))
    for serve in plan.serves:
        routes = {
            token * TOP_K + choice
            for token, row in enumerate(routing.top_k_index)
            for choice, expert in enumerate(row)
            if expert == serve.key[1]
        }
        assert len(serve.routes) == len(routes) and set(serve.routes) == routes
        by_choice_then_token = sorted(routes, key=lambda route: (route % TOP_K, route // TOP_K))
        assert list(serve.routes) == by_choice_then_token, "the library's eager experts stack rows in this order"


def assert_loads_can_start(plan: LayerPlan) -> None:
    """Loads start in order; each, and all before it, waits only for serves before its own."""
    position = {serve.key: n for n, serve in enumerate(plan.serves)}
    latest = 0
    for load in plan.loads:
        latest = max(latest, load.after)
        assert 0 <= latest <= position[load.key], load
    assert len({load.key for load in plan.loads}) == len(plan.loads)


def decode(layer: int, *experts: int) -> Routing:
    """A step of one token."""
    return Routing(layer, Phase.DECODE, EXPERTS, [list(experts)])


def served(executor: Executor, routing: Routing, share: int = 9) -> LayerPlan:
    """Plan a step and carry it out; `share`: how many experts of a layer a prompt leaves."""
    executor.eviction.observe(observation(routing))
    plan = plan_layer(routing, executor.table, executor.eviction, share)
    executor.carry_out(plan)
    return plan
