"""Who computes which missing expert. Would catch experts that nobody, or two, compute; a holder passed over; a layer
whose loads all go to one worker.
"""

from __future__ import annotations

import itertools
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from smoe.expert import EXACT, ExpertKey
from smoe.policy.placement import Placement, WorkerView, by_turns, group
from smoe.policy.plan import Serve
from smoe.routing import Phase, Routing


def serves(*experts: int, rows: int = 1) -> list[Serve]:
    return [Serve((0, expert, EXACT), tuple(range(rows)), True) for expert in experts]


def view(unit: int, *holds: int, load: float = 10.0, expert: float = 1.0, hop: float = 0.1) -> WorkerView:
    keys: set[ExpertKey] = {(0, each, EXACT) for each in holds}
    return WorkerView(unit, keys, load, expert, 0.1, hop)


def placement(*workers: WorkerView, method: str = "finish", here: float = inf, turn: int = 0) -> Placement:
    return Placement(method, "tokens", workers, here, 0.0, turn)


ROUTING = Routing(0, Phase.DECODE, 64, [list(range(8))], None)


@given(
    experts=st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True),
    holds=st.lists(st.sets(st.integers(0, 63)), min_size=1, max_size=5),
    method=st.sampled_from(["finish", "round-robin"]),
    here=st.sampled_from([inf, 0.5, 20.0]),
    turn=st.integers(0, 40),
)
def test_every_expert_is_computed_once(
    experts: list[int], holds: list[set[int]], method: str, here: float, turn: int
) -> None:
    workers = [view(2 + n, *held) for n, held in enumerate(holds)]
    loaded, given_away = placement(*workers, method=method, here=here, turn=turn).split(serves(*experts), ROUTING)
    assert sorted(serve.key[1] for serve in loaded + given_away) == sorted(experts)
    assert {serve.unit for serve in given_away} <= {each.unit for each in workers}
    assert not loaded or (method == "finish" and here < inf)


def test_whoever_holds_it_computes_it() -> None:
    units = placement(view(2, 5), view(3, 7), view(4)).units(serves(5, 7, 9))
    assert units == {(0, 5, EXACT): 2, (0, 7, EXACT): 3, (0, 9, EXACT): 4}


def test_nobody_is_given_more_rows_than_it_computes() -> None:
    """The holder is passed over, and where all are, main loads it."""
    few, many = view(2, 5)._replace(most_rows=8), view(3)
    assert placement(few, many).units(serves(5, rows=8)) == {(0, 5, EXACT): 2}
    assert placement(few, many).units(serves(5, rows=9)) == {(0, 5, EXACT): 3}
    assert placement(few, here=1e6).units(serves(5, 6, rows=9)) == {}
    assert placement(few).units(serves(5, 6, rows=9)) == {}, "also where main takes nothing by itself"


def test_the_rule_is_as_good_as_the_best_where_all_are_alike() -> None:
    """Brute force over all assignments of four loads to three workers."""
    workers = [view(2 + n, load=10.0 + n) for n in range(3)]
    wanted = serves(1, 2, 3, 4)

    def ends(units: tuple[int, ...]) -> float:
        return max(w.hop + units.count(w.unit) * w.load + w.expert for w in workers)

    best = min(ends(units) for units in itertools.product((2, 3, 4), repeat=4))
    found = placement(*workers).units(wanted)
    assert ends(tuple(found[serve.key] for serve in wanted)) == best


def test_a_worker_reads_while_it_computes() -> None:
    """Two of 10 to read and 8 to compute take 28, and not 36: less than who reads in 30."""
    ahead, slow = view(2, load=10.0, expert=8.0, hop=0.0), view(3, load=30.0, expert=0.0, hop=0.0)
    assert placement(ahead, slow).units(serves(1, 2)) == {(0, 1, EXACT): 2, (0, 2, EXACT): 2}


def test_main_loads_what_workers_would_bring_later() -> None:
    units = placement(view(2, load=10.0), here=4.0).units(serves(1, 2, 3, 4))
    assert len(units) == 1, "three loads here take as long as one there"


def test_what_is_forgotten_sooner_here_is_loaded_there() -> None:
    rule = placement(view(2, load=10.0), here=9.0)
    assert rule.units(serves(1)) == {}
    assert rule._replace(here_costs_later=5.0).units(serves(1)) == {(0, 1, EXACT): 2}
    assert rule._replace(here_costs_later=5.0).units(serves(1, 2, 3, 4)) == {
        (0, 1, EXACT): 2,
        (0, 3, EXACT): 2,
    }, "but not whatever it takes"
    worth = placement(view(2, load=8.0), here=9.0)._replace(here_costs_later=-5.0)
    assert worth.units(serves(1)) == {}, "where main keeps more than workers do"
    assert rule._replace(here_costs_later=50.0).split_prompt(serves(1), 0) == {}, "a prompt wants each but once"


def test_what_is_held_is_computed_before_what_is_read() -> None:
    """Whatever is more important: else somebody would load a second time what the first has."""
    assert placement(view(2, 5), view(3, load=10.5)).units(serves(9, 5)) == {(0, 9, EXACT): 2, (0, 5, EXACT): 2}


def test_equals_bring_in_by_turns() -> None:
    """So that all slots hold what was asked for of late, and not one worker's."""
    found = {2: view(2, load=10.0), 3: view(3, load=10.2), 4: view(4, load=13.0)}
    who = []
    for now in range(4):
        (unit,) = placement(*found.values()).units(serves(now)).values()
        found[unit] = found[unit]._replace(brought_at=float(now))
        who.append(unit)
    assert who == [2, 3, 2, 3], "and who is slower is no equal"


def test_a_worker_that_still_reads_is_behind() -> None:
    busy = view(2, 5)._replace(busy=20.0)
    assert placement(busy, view(3)).units(serves(5, 7)) == {(0, 5, EXACT): 2, (0, 7, EXACT): 3}


def test_many_rows_count() -> None:
    fast, slow = view(2, 1, expert=0.5), view(3, 1, expert=0.5)._replace(row=1.0)
    assert placement(slow, fast).units(serves(1, rows=100)) == {(0, 1, EXACT): 2}


def test_groups_take_turns_and_the_rest_is_spare() -> None:
    units = list(range(2, 10))
    assert [group(turn, 2, units) for turn in range(5)] == [[2, 3], [4, 5], [6, 7], [8, 9], [2, 3]]
    assert [group(turn, 3, units) for turn in range(3)] == [[2, 3, 4], [5, 6, 7], [2, 3, 4]]
    assert group(1, 3, units[:2]) == units[:2], "too few for a group: all"


def test_by_turns_nothing_is_loaded_here() -> None:
    found = placement(*(view(unit) for unit in range(2, 6)), method="round-robin", turn=1)
    assert found.takes_all
    assert found.units(serves(9, 4)) == {(0, 4, EXACT): 4, (0, 9, EXACT): 5}
    assert found.split_prompt(serves(9, 4), 3) == found.units(serves(9, 4))


def test_a_group_keeps_what_its_workers_have_been_told_of() -> None:
    """One expert that was not expected moves nobody else's."""
    keys: list[ExpertKey] = [(0, expert, EXACT) for expert in (1, 6, 9)]
    told = [view(2, 1), view(3, 5), view(4, 9), view(5), view(6), view(7)]
    assert by_turns(keys, 3, 0, told) == {keys[0]: 2, keys[1]: 3, keys[2]: 4}
    shifted = [view(2, 9), view(3, 1), view(4), view(5), view(6), view(7)]
    assert by_turns(keys, 3, 0, shifted) == {keys[0]: 3, keys[1]: 4, keys[2]: 2}
    greedy = [view(2, 1, 6, 9), view(3), view(4)]
    assert sorted(by_turns(keys, 3, 0, greedy).values()) == [2, 3, 4], "no more to anybody than is fair"


def test_spares_are_for_those_that_belong_to_no_group() -> None:
    keys: list[ExpertKey] = [(0, expert, EXACT) for expert in (4, 2, 7)]
    workers = [view(2), view(3), view(4)]
    assert by_turns(keys, 2, 0, workers) == {keys[1]: 2, keys[0]: 3, keys[2]: 4}
    held = [view(2, 4), view(3), view(4, 7)]
    assert by_turns([keys[0], keys[2]], 2, 0, held) == {keys[0]: 2, keys[2]: 4}, "what the spare worker has it keeps"
    assert by_turns(keys, 2, 0, workers[:2]) == {keys[1]: 2, keys[0]: 3, keys[2]: 2}, "nobody is over"
