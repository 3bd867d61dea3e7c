"""What every eviction policy promises (`policy/eviction/base.py`), as one class of tests; `test_eviction.py` runs it
for each policy of the registry, so a new policy is tested without editing anything here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.eviction.base import Eviction
from smoe.policy.registry import EVICTIONS
from smoe.routing import Phase, Routing

LAYERS, EXPERTS, TOP_K = 3, 4, 2
COPIES: list[ExpertKey] = [(layer, expert, EXACT) for layer in range(LAYERS) for expert in range(EXPERTS)]

Event = Routing | tuple[str, ExpertKey]
"""A routing to observe, or a copy to insert or remove."""

row = st.lists(st.integers(0, EXPERTS), min_size=TOP_K, max_size=TOP_K, unique=True)
"""One token's choice; the index EXPERTS is padding."""
scores = st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=EXPERTS, max_size=EXPERTS)
"""One token's scores of all experts, with many ties."""


@st.composite
def _routing(draw: st.DrawFn) -> Routing:
    rows = draw(st.lists(row, min_size=1, max_size=3))
    layer, phase = draw(st.integers(0, LAYERS - 1)), draw(st.sampled_from(Phase))
    return Routing(layer, phase, EXPERTS, rows, [draw(scores) for _ in rows])


routing = _routing()
shield = st.sets(st.sampled_from(COPIES))


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Routings between insertions and removals that keep the contract: nothing comes twice or leaves unseen."""
    events: list[Event] = []
    resident: set[ExpertKey] = set()
    for _ in range(draw(st.integers(0, 30))):
        if draw(st.booleans()):
            events.append(draw(routing))
            continue
        key = draw(st.sampled_from(COPIES))
        events.append(("remove" if key in resident else "insert", key))
        resident ^= {key}
    return events


def make(name: str, events: Sequence[Event]) -> tuple[Eviction, set[ExpertKey]]:
    """A policy that has lived through `events`, and its residents."""
    future = [event for event in events if isinstance(event, Routing)]
    eviction = EVICTIONS.find(name)(future) if name == "belady" else EVICTIONS.find(name)()
    return eviction, lived_through(eviction, events)


def lived_through(eviction: Eviction, events: Sequence[Event]) -> set[ExpertKey]:
    """Tell a policy of `events`; its residents afterwards."""
    resident: set[ExpertKey] = set()
    for event in events:
        if isinstance(event, Routing):
            eviction.observe(event)
        elif event[0] == "insert":
            eviction.insert(event[1])
            resident.add(event[1])
        else:
            eviction.remove(event[1])
            resident.remove(event[1])
    return resident


class EvictionContract:
    """Inherit, and parametrise `name`."""

    make = staticmethod(make)

    @given(events=histories(), shield=shield)
    def test_whatever_has_happened(self, name: str, events: list[Event], shield: set[ExpertKey]) -> None:
        """Everything that holds after any history, of one history at a time, as most of the time goes into making them.

        Would catch: a victim that this layer is using, one that is not there, one named twice, too many or too few; a
        rank that depends on how many are asked for; an order that comes from hashing or from the clock; a resident
        that goes first and is worth more than one that stays.
        """
        (eviction, resident), (again, _) = self.make(name, events), self.make(name, events)
        before = pickle.dumps(eviction)
        everyone, allowed = eviction.victims(len(COPIES), ()), eviction.victims(len(COPIES), shield)
        assert eviction.residents() == resident
        assert len(everyone) == len(resident) and set(everyone) == resident
        assert allowed == [key for key in everyone if key not in shield], "the shield leaves the order alone"
        for count in range(len(COPIES) + 3):
            assert eviction.victims(count, shield) == allowed[:count], "fewer victims are a prefix of more"
        assert again.victims(len(COPIES), ()) == everyone, "the same history, another order"
        assert pickle.dumps(eviction) == before, "asking for victims changes something"
        worth = [eviction.worth(key) for key in everyone]
        assert worth == sorted(worth), "a circle of swaps"
        assert [eviction.worth(key) for key in COPIES] == [eviction.worth(key) for key in COPIES]

    @given(used=st.sets(st.integers(0, EXPERTS - 1), min_size=1), seed=st.randoms())
    def test_ties_break_by_layer_and_expert(self, name: str, used: set[int], seed: object) -> None:
        """Copies with the same history come out ascending, in whatever order the step named them; lots never tie."""
        named = sorted(used)
        seed.shuffle(named)  # type: ignore[attr-defined]
        step = Routing(1, Phase.DECODE, EXPERTS, [named])
        eviction, _ = self.make(name, [*(("insert", (1, expert, EXACT)) for expert in sorted(used)), step, step])
        victims = eviction.victims(EXPERTS, ())
        assert (sorted(victims) if name == "random" else victims) == [(1, expert, EXACT) for expert in sorted(used)]

    def test_padding_is_no_use(self, name: str) -> None:
        """The index E means no expert; would catch statistics of an expert that does not exist."""
        step = Routing(0, Phase.DECODE, EXPERTS, [[EXPERTS, 1]])
        events: list[Event] = [("insert", (0, 0, EXACT)), ("insert", (0, 1, EXACT)), step]
        eviction, resident = self.make(name, events)
        assert set(eviction.victims(10, ())) == resident
