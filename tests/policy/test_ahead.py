"""What workers are told to have, and when. Would catch: more than they have slots for, something wanted soon given up
for what is wanted later, loads begun far too early, by the wrong one, or never; what was said of another text kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.ahead import AheadSchedule, Here, TokenLayer
from smoe.policy.placement import WorkerView
from smoe.policy.plan import DEVICE

LAYERS = 6
LOAD = 2.0


class Clock:
    """Layers take a second."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Machines:
    """Workers that have at once what they are told to have, and nothing else."""

    def __init__(
        self, units: Iterable[int], slots: int, method: str = "finish", spares: int = 0, room: int = 0
    ) -> None:
        self.clock = Clock()
        self.holds: dict[int, set[ExpertKey]] = {unit: set() for unit in units}
        self.slots = dict.fromkeys(units, slots)
        self.loads: list[tuple[float, int, ExpertKey]] = []
        self.here: set[ExpertKey] = set()
        self.later = 0.0
        here = Here(lambda: LOAD if method == "finish" else inf, lambda: 0.0, self.here.__contains__, room)
        turns = {layer: layer for layer in range(LAYERS)}
        self.ahead = AheadSchedule(
            method, turns, spares, here, lambda: self.later, self.told, self.clock, nullcontext()
        )

    def told(self, unit: int, keys: list[ExpertKey]) -> None:
        assert len(keys) == len(set(keys)) <= self.slots[unit]
        assert set(keys) - self.holds[unit], "nobody is told what he has already"
        self.loads += [(self.clock.now, unit, key) for key in keys if key not in self.holds[unit]]
        kept = set(keys)
        others = sorted(self.holds[unit] - kept)[: self.slots[unit] - len(kept)]
        self.holds[unit] = kept | set(others)

    def views(self) -> list[WorkerView]:
        return [WorkerView(unit, held, LOAD, 0.1, 0.1, 0.01) for unit, held in self.holds.items()]

    def begin(self, position: int) -> None:
        self.ahead.begin(position, self.views, self.slots)

    def decode(self, position: int, chosen: list[list[int]]) -> None:
        """A token of which a layer takes a second."""
        self.begin(position)
        for layer, experts in enumerate(chosen):
            self.ahead.asked(layer, experts)
            for unit in self.slots:
                self.ahead.answered(unit, keys(layer, *experts))
            self.clock.now += 1.0

    @property
    def brought(self) -> list[ExpertKey]:
        return [key for _, _, key in self.loads]


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [(layer, expert, EXACT) for expert in experts]


def expected(position: int, chosen: list[list[int]]) -> dict[TokenLayer, list[int]]:
    return {TokenLayer(position, layer): experts for layer, experts in enumerate(chosen)}


PACE = [[9]] * LAYERS
"""A token that teaches how long layers take."""


def test_the_group_whose_turn_it_is_is_told_at_once_and_no_more_than_fits() -> None:
    found = Machines(range(2, 6), 1, "round-robin")
    found.begin(0)
    chosen = [[1, 2], [3, 4], [5, 6], [7, 8], [1, 2], [3, 4]]
    for place, experts in expected(0, chosen).items():
        found.ahead.expect({place: experts})
    assert [(unit, key) for _, unit, key in found.loads] == [
        (2, (0, 1, EXACT)),
        (3, (0, 2, EXACT)),
        (4, (1, 3, EXACT)),
        (5, (1, 4, EXACT)),
    ]
    found.ahead.asked(0, [1, 2])
    assert len(found.loads) == 4, "they compute what they have"
    found.ahead.answered(2, keys(0, 1))
    assert [(unit, key) for _, unit, key in found.loads[4:]] == [(2, (2, 5, EXACT))]
    found.ahead.asked(1, [0, 4])
    assert [(unit, key) for _, unit, key in found.loads[5:]] == [(3, (2, 6, EXACT)), (4, (3, 7, EXACT))], (
        "who has not been asked has room, and so has who was told in vain"
    )


def test_turns_run_on_from_token_to_token() -> None:
    """Four groups and six layers: the next token begins with the third."""
    found = Machines(range(2, 6), 9, "round-robin")
    found.begin(1)
    found.ahead.expect({TokenLayer(1, 0): [1]})
    assert [unit for _, unit, _ in found.loads] == [4]


def test_spares_are_nobody_else_s() -> None:
    found = Machines(range(2, 7), 1, "round-robin", spares=1)
    found.begin(0)
    found.ahead.expect({TokenLayer(0, 0): [1, 2, 3]})
    assert [(unit, key[1]) for _, unit, key in found.loads] == [(2, 1), (3, 2), (6, 3)]


def test_what_is_wanted_later_is_brought_in_later() -> None:
    """One and a half loads' time ahead, and what a layer takes."""
    found = Machines((2, 3), 9)
    found.decode(0, PACE)
    found.ahead.expect(expected(1, [[0], [1], [2], [3], [4], [5]]))
    found.loads.clear()
    found.decode(1, [[0], [1], [2], [3], [4], [5]])
    when = {key[0]: int(found.clock.now - LAYERS - at) for at, _, key in found.loads}
    assert when, "something is brought in ahead"
    for at, _, (layer, _, _) in found.loads:
        assert found.clock.now - LAYERS + layer - at <= 1.5 * LOAD + 1.1, "not before that"


def test_who_has_it_keeps_it_and_nobody_loads_it_again() -> None:
    found = Machines((2, 3), 3)
    found.holds[3] = set(keys(0, 1) + keys(1, 1) + keys(2, 1))
    found.decode(0, PACE)
    found.ahead.expect(expected(1, [[1], [1], [1], [2], [2]]))
    found.decode(1, [[1], [1], [1], [2], [2]])
    assert sorted(found.brought) == keys(3, 2) + keys(4, 2)


def test_what_is_wanted_last_goes_first() -> None:
    found = Machines((2,), 2)
    found.holds[2] = set(keys(3, 1) + keys(5, 1))
    found.decode(0, PACE)
    found.begin(1)
    found.ahead.expect({TokenLayer(1, 1): [7], TokenLayer(1, 3): [1], TokenLayer(1, 5): [1]})
    assert found.holds[2] == set(keys(1, 7) + keys(3, 1))
    found.ahead.expect({TokenLayer(1, 4): [7]})
    assert found.holds[2] == set(keys(1, 7) + keys(3, 1)), "nothing goes for what is wanted later than that"


def test_main_takes_what_it_would_have_sooner_unless_it_forgets_it_sooner() -> None:
    for later, here in ((0.0, [7]), (1.0, [])):
        found = Machines((2,), 2, room=1)
        found.decode(0, PACE)
        found.later = later
        found.begin(1)
        found.ahead.expect({TokenLayer(1, 0): [7], TokenLayer(2, 0): [8]})
        assert found.ahead.here(0) == here
        assert found.brought == ([] if here else keys(0, 7))


def test_what_main_has_nobody_else_brings_in() -> None:
    found = Machines((2,), 2)
    found.here.update(keys(0, 7))
    found.begin(0)
    found.ahead.expect({TokenLayer(0, 0): [7, 8]})
    assert found.brought == keys(0, 8)


def test_another_text_is_not_waited_for() -> None:
    found = Machines(range(2, 4), 1, "round-robin")
    found.begin(3)
    found.ahead.expect({TokenLayer(4, 0): [1, 2]})
    found.ahead.expect({TokenLayer(4, 1): [3, 4]})
    found.begin(4)
    found.ahead.withdraw(4)
    found.ahead.expect({TokenLayer(4, 1): [5, 6]})
    assert found.brought == keys(0, 1, 2) + keys(1, 5, 6)


def test_a_machine_that_has_gone_is_told_nothing() -> None:
    for method in ("finish", "round-robin"):
        found = Machines(range(2, 4), 2, method)
        found.begin(0)
        found.ahead.expect({TokenLayer(0, 0): [1, 2], TokenLayer(0, 1): [3]})
        del found.holds[3], found.slots[3]
        found.ahead.expect({TokenLayer(0, 2): [5], TokenLayer(1, 0): [6]})  # noticed before the pass is over
        found.loads.clear()
        found.clock.now += 100.0
        found.begin(1)
        found.ahead.expect({TokenLayer(1, 0): [8, 9]})
        assert {unit for _, unit, _ in found.loads} == {2}


chosen_layers = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=LAYERS, max_size=LAYERS
)


@given(
    tokens=st.lists(chosen_layers, min_size=2, max_size=5),
    method=st.sampled_from(["finish", "round-robin"]),
    slots=st.integers(1, 4),
    workers=st.integers(1, 5),
)
def test_nobody_is_told_of_more_than_fits(tokens: list[list[list[int]]], method: str, slots: int, workers: int) -> None:
    """Whatever is expected, rightly or wrongly; `Machines.told` checks every message."""
    found = Machines(range(2, 2 + workers), slots, method, room=1)
    for position, (now, after) in enumerate(zip(tokens, [*tokens[1:], tokens[0]], strict=True)):
        found.begin(position)
        found.ahead.expect(expected(position, [[(each + 1) % 6 for each in layer] for layer in now]))
        found.ahead.expect(expected(position + 1, after))
        found.decode(position, now)
    assert all(unit != DEVICE for _, unit, _ in found.loads)
