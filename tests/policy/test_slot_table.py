"""The slot table against a plain dict under generated operations.

Would catch: a slot in two states or in none, a staging slot that becomes a cache slot for ever, a victim that is still
found.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smoe.expert import EXACT, ExpertKey
from smoe.policy.plan import Load, LoadReason, Promotion
from smoe.policy.residency import PoolSize, SlotTable

COPIES = [(layer, expert, EXACT) for layer in range(3) for expert in range(4)]


class Model(RuleBasedStateMachine):
    """Oracle: `state[copy] = (ready or inflight, cache or staging, slot)`."""

    @initialize(cache=st.integers(1, 5), staging=st.integers(0, 3), spare=st.integers(0, 3))
    def start(self, cache: int, staging: int, spare: int) -> None:
        self.table = SlotTable(PoolSize(cache, staging, spare=spare))
        self.state: dict[ExpertKey, tuple[str, str, int]] = {}
        self.sizes = {"cache": cache, "staging": staging}

    def those(self, *where: str) -> list[ExpertKey]:
        return sorted(key for key, state in self.state.items() if set(where) <= set(state[:2]))

    def room(self, kind: str) -> int:
        return self.sizes[kind] - len(self.those(kind))

    def absent(self) -> list[ExpertKey]:
        return [key for key in COPIES if key not in self.state]

    def begin(self, key: ExpertKey, slot: int, victim: ExpertKey | None, kind: str) -> None:
        self.table.begin(Load(key, slot, victim, kind == "cache", LoadReason.DEMAND, 0))
        if victim is not None:
            assert self.state.pop(victim) == ("ready", "cache", slot)
        self.state[key] = ("inflight", kind, slot)

    @precondition(lambda self: self.table.pools[0].withdrawn)
    @rule()
    def give(self) -> None:
        self.table.pools[0].give(1)
        self.sizes["cache"] += 1

    @precondition(lambda self: self.sizes["cache"] > 1 and self.room("cache"))
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        self.table.pools[0].withdraw(data.draw(st.sampled_from(list(self.table.pools[0].free_cache))))
        self.sizes["cache"] -= 1

    @precondition(lambda self: self.those("ready", "cache"))
    @rule(data=st.data())
    def discard(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("ready", "cache")))
        assert self.table.discard(key) == self.state.pop(key)[2]

    @precondition(lambda self: self.absent() and self.room("cache"))
    @rule(data=st.data())
    def load_into_free_cache(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(list(self.table.pools[0].free_cache)))
        self.begin(data.draw(st.sampled_from(self.absent())), slot, None, "cache")

    @precondition(lambda self: self.absent() and self.room("staging"))
    @rule(data=st.data())
    def load_into_free_staging(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(list(self.table.pools[0].free_staging)))
        self.begin(data.draw(st.sampled_from(self.absent())), slot, None, "staging")

    @precondition(lambda self: self.absent() and self.those("ready", "cache"))
    @rule(data=st.data())
    def load_over_a_victim(self, data: Any) -> None:
        victim = data.draw(st.sampled_from(self.those("ready", "cache")))
        self.begin(data.draw(st.sampled_from(self.absent())), self.state[victim][2], victim, "cache")

    @precondition(lambda self: self.those("inflight"))
    @rule(data=st.data())
    def arrive(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("inflight")))
        self.table.arrive(key)
        self.state[key] = ("ready", *self.state[key][1:])

    @precondition(lambda self: self.those("inflight"))
    @rule(data=st.data())
    def fail(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("inflight")))
        self.table.fail(key)
        del self.state[key]

    @precondition(lambda self: self.those("ready", "staging"))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("ready", "staging")))
        self.table.release(key)
        del self.state[key]

    @precondition(lambda self: self.those("staging") and self.room("cache"))
    @rule(data=st.data())
    def promote_into_a_free_slot(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("staging")))
        self.table.promote(Promotion(key, None))
        self.state[key] = (self.state[key][0], "cache", self.state[key][2])

    @precondition(lambda self: self.those("staging") and self.those("ready", "cache"))
    @rule(data=st.data())
    def promote_over_a_victim(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.those("staging")))
        victim = data.draw(st.sampled_from(self.those("ready", "cache")))
        freed = self.state.pop(victim)[2]
        self.table.promote(Promotion(key, victim))
        self.state[key] = (self.state[key][0], "cache", self.state[key][2])
        assert freed in self.table.pools[0].free_staging

    @rule()
    def settle(self) -> None:
        """As after an interrupt: ready cache residents stay where they are, everything else is gone."""
        self.table.settle()
        kept = self.those("ready", "cache")
        self.state = {key: self.state[key] for key in kept}

    @invariant()
    def agrees(self) -> None:
        table, state = self.table, self.state
        table.check()
        assert table.ready == {key: s[2] for key, s in state.items() if s[0] == "ready"}
        assert table.inflight == {key: s[2] for key, s in state.items() if s[0] == "inflight"}
        assert table.staged == {key for key, s in state.items() if s[1] == "staging"}
        assert sorted(table.cached()) == self.those("ready", "cache")
        assert all((key in table) == (key in table.ready) for key in COPIES)
        assert len(table.pools[0].free_cache) == self.room("cache")
        assert len(table.pools[0].free_staging) == self.room("staging")


TestSlotTable = Model.TestCase


def load(key: ExpertKey, slot: int, victim: ExpertKey | None = None, keep: bool = True) -> Load:
    return Load(key, slot, victim, keep, LoadReason.DEMAND, 0)


def test_misuse_is_an_assertion() -> None:
    """Our own invariants: a copy twice, a victim in another slot, a release of a resident, a table without slots."""
    table = SlotTable(PoolSize(2, 1))
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
        SlotTable(PoolSize(0, 2))


@pytest.mark.parametrize("damage", ["lost slot", "slot twice", "staged but absent", "promoted by hand"])
def test_check_sees_damage(damage: str) -> None:
    """The checker itself: would catch a check that is always content."""
    table = SlotTable(PoolSize(2, 2))
    table.begin(load(COPIES[0], 2, keep=False))
    table.arrive(COPIES[0])
    if damage == "lost slot":
        table.pools[0].free_cache.pop()
    elif damage == "slot twice":
        table.inflight[COPIES[1]] = 0
    elif damage == "staged but absent":
        table.staged.add(COPIES[2])
    else:
        table.staged.clear()
    with pytest.raises(AssertionError):
        table.check()


def test_clear_is_like_new() -> None:
    table, new = SlotTable(PoolSize(3, 2)), SlotTable(PoolSize(3, 2))
    table.begin(load(COPIES[0], 1))
    table.arrive(COPIES[0])
    table.begin(load(COPIES[1], 4, keep=False))
    table.clear()
    new.arrived = table.arrived  # it only grows: addresses of experts that were loaded before are no longer valid
    assert table.arrived == 1 and pickle.dumps(table) == pickle.dumps(new)
