"""The slot table against a plain dict under generated operations.

Would catch: a slot in two states or in none, a staging slot that becomes a cache slot for ever, a victim that is still
found.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smoe.expert import EXACT, Copy
from smoe.policy.plan import Load, Promotion, Reason
from smoe.policy.residency import SlotTable

COPIES = [(layer, expert, EXACT) for layer in range(3) for expert in range(4)]


class Model(RuleBasedStateMachine):
    """Oracle: `state[copy] = (ready or inflight, cache or staging, slot)`."""

    @initialize(cache=st.integers(1, 5), staging=st.integers(0, 3))
    def start(self, cache: int, staging: int) -> None:
        self.table = SlotTable(cache, staging)
        self.state: dict[Copy, tuple[str, str, int]] = {}
        self.sizes = {"cache": cache, "staging": staging}

    def those(self, *where: str) -> list[Copy]:
        return sorted(copy for copy, state in self.state.items() if set(where) <= set(state[:2]))

    def room(self, kind: str) -> int:
        return self.sizes[kind] - len(self.those(kind))

    def absent(self) -> list[Copy]:
        return [copy for copy in COPIES if copy not in self.state]

    def begin(self, copy: Copy, slot: int, victim: Copy | None, kind: str) -> None:
        self.table.begin(Load(copy, slot, victim, kind == "cache", Reason.DEMAND, 0))
        if victim is not None:
            assert self.state.pop(victim) == ("ready", "cache", slot)
        self.state[copy] = ("inflight", kind, slot)

    @precondition(lambda self: self.absent() and self.room("cache"))
    @rule(data=st.data())
    def load_into_free_cache(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(list(self.table.free_cache)))
        self.begin(data.draw(st.sampled_from(self.absent())), slot, None, "cache")

    @precondition(lambda self: self.absent() and self.room("staging"))
    @rule(data=st.data())
    def load_into_free_staging(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(list(self.table.free_staging)))
        self.begin(data.draw(st.sampled_from(self.absent())), slot, None, "staging")

    @precondition(lambda self: self.absent() and self.those("ready", "cache"))
    @rule(data=st.data())
    def load_over_a_victim(self, data: Any) -> None:
        victim = data.draw(st.sampled_from(self.those("ready", "cache")))
        self.begin(data.draw(st.sampled_from(self.absent())), self.state[victim][2], victim, "cache")

    @precondition(lambda self: self.those("inflight"))
    @rule(data=st.data())
    def arrive(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.those("inflight")))
        self.table.arrive(copy)
        self.state[copy] = ("ready", *self.state[copy][1:])

    @precondition(lambda self: self.those("inflight"))
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.those("inflight")))
        self.table.fail(copy)
        del self.state[copy]

    @precondition(lambda self: self.those("ready", "staging"))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.those("ready", "staging")))
        self.table.release(copy)
        del self.state[copy]

    @precondition(lambda self: self.those("staging") and self.room("cache"))
    @rule(data=st.data())
    def promote_into_a_free_slot(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.those("staging")))
        self.table.promote(Promotion(copy, None))
        self.state[copy] = (self.state[copy][0], "cache", self.state[copy][2])

    @precondition(lambda self: self.those("staging") and self.those("ready", "cache"))
    @rule(data=st.data())
    def promote_over_a_victim(self, data: Any) -> None:
        copy = data.draw(st.sampled_from(self.those("staging")))
        victim = data.draw(st.sampled_from(self.those("ready", "cache")))
        freed = self.state.pop(victim)[2]
        self.table.promote(Promotion(copy, victim))
        self.state[copy] = (self.state[copy][0], "cache", self.state[copy][2])
        assert freed in self.table.free_staging

    @rule()
    def settle(self) -> None:
        """As after an interrupt: ready cache residents stay where they are, everything else is gone."""
        self.table.settle()
        kept = self.those("ready", "cache")
        self.state = {copy: self.state[copy] for copy in kept}

    @invariant()
    def agrees(self) -> None:
        table, state = self.table, self.state
        table.check()
        assert table.ready == {copy: s[2] for copy, s in state.items() if s[0] == "ready"}
        assert table.inflight == {copy: s[2] for copy, s in state.items() if s[0] == "inflight"}
        assert table.staged == {copy for copy, s in state.items() if s[1] == "staging"}
        assert sorted(table.cached()) == self.those("ready", "cache")
        assert all((copy in table) == (copy in table.ready) for copy in COPIES)
        assert len(table.free_cache) == self.room("cache")
        assert len(table.free_staging) == self.room("staging")


TestSlotTable = Model.TestCase


def load(copy: Copy, slot: int, victim: Copy | None = None, keep: bool = True) -> Load:
    return Load(copy, slot, victim, keep, Reason.DEMAND, 0)


def test_misuse_is_an_assertion() -> None:
    """Our own invariants: a copy twice, a victim in another slot, a release of a resident, a table without slots."""
    table = SlotTable(2, 1)
    table.begin(load(COPIES[0], 0))
    with pytest.raises(AssertionError):
        table.begin(load(COPIES[0], 1))
    table.arrive(COPIES[0])
    with pytest.raises(AssertionError):
        table.begin(load(COPIES[1], 1, victim=COPIES[0]))
    with pytest.raises(AssertionError):
        table.release(COPIES[0])
    with pytest.raises(AssertionError):
        table.promote(Promotion(COPIES[0], None))
    with pytest.raises(AssertionError):
        SlotTable(0, 2)


@pytest.mark.parametrize("damage", ["lost slot", "slot twice", "staged but absent", "promoted by hand"])
def test_check_sees_damage(damage: str) -> None:
    """The checker itself: would catch a check that is always content."""
    table = SlotTable(2, 2)
    table.begin(load(COPIES[0], 2, keep=False))
    table.arrive(COPIES[0])
    if damage == "lost slot":
        table.free_cache.pop()
    elif damage == "slot twice":
        table.inflight[COPIES[1]] = 0
    elif damage == "staged but absent":
        table.staged.add(COPIES[2])
    else:
        table.staged.clear()
    with pytest.raises(AssertionError):
        table.check()


def test_clear_is_like_new() -> None:
    table, new = SlotTable(3, 2), SlotTable(3, 2)
    table.begin(load(COPIES[0], 1))
    table.arrive(COPIES[0])
    table.begin(load(COPIES[1], 4, keep=False))
    table.clear()
    assert vars(table) == vars(new)
