"""The host tier: leases, slots being filled, and pages locked piece by piece.

Would catch: a slot given away while another thread still reads it, bytes read before they are there, a registration
that is refused without a word.
"""

from __future__ import annotations

import logging
import threading

import pytest

from smoe.expert import EXACT, LOW, ExpertKey
from smoe.memory import page_lock
from smoe.memory.host import HostTier, Lease
from smoe.memory.store import PAGE


def copy(expert: int) -> ExpertKey:
    return (0, expert, EXACT)


def fill(host: HostTier, expert: int) -> Lease:
    lease = host.lease(copy(expert))
    assert not lease.is_hit
    host.note_filled(lease)
    return lease


@pytest.fixture
def host() -> HostTier:
    return HostTier([(2, PAGE)], lambda key: 0, lambda _: False)


def test_what_is_filled_is_found_again(host: HostTier) -> None:
    lease = fill(host, 1)
    host.give_back(lease)
    again = host.lease(copy(1))
    assert again.is_hit and again.slot == lease.slot


def test_a_size_gives_up_its_own() -> None:
    """Experts of layer 1 are larger: would catch a small slot for one of them, or a large one that is lost."""
    host = HostTier([(1, PAGE), (1, 3 * PAGE)], lambda key: key[0], lambda _: False)
    small, large = copy(1), (1, 1, EXACT)
    for key in (small, large):
        lease = host.lease(key)
        host.note_filled(lease)
        host.give_back(lease)
    again = host.lease((1, 2, EXACT))
    assert len(host.arena.buffer(again.slot)) == 3 * PAGE
    host.give_back(again)
    assert host.lease(small).is_hit


def test_low_copies_have_slots_of_their_own() -> None:
    """Would catch a low copy that is taken for the expert itself, or that lies in one of its slots."""
    host = HostTier([(1, 3 * PAGE), (1, PAGE)], lambda key: 0 if key[2] == EXACT else 1, lambda _: False)
    leases = [host.lease((0, 1, form)) for form in (EXACT, LOW)]
    assert not any(lease.is_hit for lease in leases)
    assert [len(host.arena.buffer(lease.slot)) for lease in leases] == [3 * PAGE, PAGE]
    for lease in leases:
        host.note_filled(lease)
        host.give_back(lease)
    host.give_back(host.lease((0, 2, LOW)))
    assert host.lease((0, 1, EXACT)).is_hit and not host.lease((0, 1, LOW)).is_hit, "a low copy has replaced its like"


@pytest.mark.parametrize("first_back", [0, 1])
def test_two_leases_of_one_copy_end_one_by_one(first_back: int, host: HostTier) -> None:
    """A link that is copying an expert, and the CPU that computes it: whoever ends first must not free the slot."""
    leases = [fill(host, 1), host.lease(copy(1))]
    host.give_back(leases[first_back])
    host.give_back(fill(host, 2))
    third = fill(host, 3)
    assert third.slot != leases[0].slot, "2 goes, not 1: it is still being read"
    assert host.lease(copy(1)).is_hit


def test_a_slot_that_is_being_filled_is_nobody_s_hit(host: HostTier) -> None:
    filling, found = host.lease(copy(1)), []
    second = threading.Thread(target=lambda: found.append(host.lease(copy(1))))
    second.start()
    second.join(0.1)
    assert not found, "the bytes are not there yet"
    host.note_filled(filling)
    second.join(10)
    assert found[0].is_hit and found[0].slot == filling.slot


def test_a_slot_that_could_not_be_filled_is_tried_again(host: HostTier) -> None:
    host.give_back(host.lease(copy(1)))
    again = host.lease(copy(1))
    assert not again.is_hit
    host.give_back(again)
    assert not host._leased and host._free == [[0, 1]]


def test_an_error_after_filling_costs_nobody_the_bytes(host: HostTier) -> None:
    """The device's copy fails while the CPU computes from the same slot."""
    failed, computing = fill(host, 1), host.lease(copy(1))
    host.give_back(failed)
    host.give_back(fill(host, 2))
    assert fill(host, 3).slot != computing.slot


class FakeRegistry:
    """Refuses from the call number `refuses` on."""

    def __init__(self, refuses: int = 100) -> None:
        self.locked: dict[int, int] = {}
        self.backed: list[bool] = []
        self.forgotten = 0
        self._refuses = refuses

    def register(self, address: int, nbytes: int) -> int:
        if len(self.locked) >= self._refuses:
            return 2
        self.locked[address] = nbytes
        return 0

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def forget_error(self) -> None:
        self.forgotten += 1


def test_pages_are_locked_in_whole_slots_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "_PIECE_BYTES", 7 * PAGE)
    registry = FakeRegistry()
    host = HostTier([(8, 3 * PAGE)], lambda key: 0, lambda _: False, registry)
    begin = host.arena.bytes.data_ptr()
    assert registry.locked == {begin + n * 6 * PAGE: 6 * PAGE for n in range(4)}
    host.close()
    assert registry.locked == {} and registry.forgotten == 0


def test_a_refusal_is_said_and_forgotten(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(page_lock, "_PIECE_BYTES", PAGE)
    registry = FakeRegistry(refuses=3)
    with caplog.at_level(logging.WARNING, "smoe"):
        host = HostTier([(8, PAGE)], lambda key: 0, lambda _: False, registry)
    assert len(registry.locked) == 3 and registry.forgotten == 1
    assert "12.0 KiB of 32.0 KiB" in caplog.text and "`host_memory`" in caplog.text
    host.close()
    assert registry.locked == {}


def test_pages_are_backed_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    touch, wait = page_lock.Arena.touch, page_lock.Arena.wait_touched
    monkeypatch.setattr(page_lock.Arena, "touch", lambda a, n=1: (happened.append(f"touch {n > 0}"), touch(a, n))[0])
    monkeypatch.setattr(page_lock.Arena, "wait_touched", lambda a, s: (happened.append("wait"), wait(a, s))[0])
    registry = FakeRegistry()
    monkeypatch.setattr(registry, "register", lambda *_: happened.append("lock") or 0)
    HostTier([(4, PAGE)], lambda key: 0, lambda _: False, registry)
    assert happened == ["touch True", "wait", "lock"]


def test_backing_pages_leaves_contents_and_other_threads_alone() -> None:
    arena = page_lock.Arena([(64, 2**20)], page_lock.torch.device("cpu"))
    arena.tensor(5)[:] = 9
    arena.touch(3)
    arena.wait_touched(None)
    assert bool((arena.tensor(5) == 9).all()) and not arena.tensor(6).any()
    arena.close()
