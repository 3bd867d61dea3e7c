"""OD-MoE's settings: what must come out of them whatever is drawn.

Would catch: a case that does not do what its name says, recalls that are drawn too high, loads that nobody pays for, a
claim taken from other rows.
"""

from __future__ import annotations

import pytest

from bench.papers import od_moe
from bench.papers.claims import Reproduction, Setting
from bench.papers.geometry import MIXTRAL
from bench.papers.od_moe import CASES, SETTINGS, knee
from bench.papers.od_moe_recall import EMBEDDED, PRINTED, WITNESS, DraftRecall, as_printed, named_tokens, recall_of
from bench.papers.od_moe_testbed import ALL_RESIDENT, memory_bytes, ten_machines
from smoe.simulator.cluster import DecodedToken
from tests.bench.papers.shorter import reproduced


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduced(od_moe, len(SETTINGS), NEW_TOKENS=4)


def rows(found: Reproduction) -> dict[tuple[str, str], Setting]:
    return {(setting.name, setting.system): setting for setting in found.settings}


def test_every_setting_has_a_name_of_its_own(found: Reproduction) -> None:
    assert len(rows(found)) == len(found.settings) == len(SETTINGS)


def test_nothing_is_faster_than_its_loads(found: Reproduction) -> None:
    base, by_name = ten_machines(), {(case.name, case.system): case for case in SETTINGS}
    for each in found.settings:
        case = by_name[each.name, each.system]
        if "no loads" not in each.system and not case.changed:
            bound = MIXTRAL.layers * (base.load + base.expert) / case.groups
            assert each.seconds_per_token >= 0.95 * bound, "four tokens begin with slots that are free"


def test_the_first_token_is_serial_where_the_paper_is_asked(found: Reproduction) -> None:
    """32 times a load, main's part, and two rows of a token there and back: by its own figures, messages apart."""
    base = ten_machines()
    for length in (16, 128):
        row = 2 * length * 16384 / 125e6
        least = MIXTRAL.layers * (base.load + base.layer + 2 * row + base.expert)
        ttft = rows(found)["table 2", f"od-moe ({length}, 64)"].ttft_seconds
        assert least < ttft < 1.07 * least


def test_without_loads_the_cluster_is_about_all_resident(found: Reproduction) -> None:
    free = rows(found)["table 2", "the cluster, no loads"]
    assert 1 / free.seconds_per_token == pytest.approx(ALL_RESIDENT, rel=0.02)


def test_nobody_named_is_a_load_in_every_layer(found: Reproduction) -> None:
    base = ten_machines()
    on_demand = rows(found)["figure 8", "case 6"].seconds_per_token
    free = rows(found)["table 2", "the cluster, no loads"].seconds_per_token
    assert on_demand == pytest.approx(free + MIXTRAL.layers * base.load, rel=0.01)


def test_memory_is_the_papers() -> None:
    assert memory_bytes(8) == 60e9 and memory_bytes(8, None) == 15e9
    assert memory_bytes(15, 4.5) <= 0.27 * 180e9 < memory_bytes(15, 4.5, slots=2)


def test_the_knee_is_where_the_number_of_groups_has_it() -> None:
    measured, printed, by_groups = knee(ten_machines())
    assert measured == pytest.approx(by_groups, rel=0.001) and printed < 0.6 * measured


def test_misses_between_the_printed_ones_keep_their_order() -> None:
    for source in (EMBEDDED, WITNESS):
        told, alone = (1 - recall_of(source, *at).experts[0] for at in ((1, 1), (0, 0)))
        assert as_printed(told, source) == pytest.approx(1 - 0.9734)
        assert as_printed(alone, source) == pytest.approx(1 - 0.45)
    assert recall_of(PRINTED, 1, 1).experts == pytest.approx((0.9734,))
    unaligned = recall_of(PRINTED, 0, 0).experts
    assert sum(unaligned) / len(unaligned) == pytest.approx(0.45, abs=0.01), "the curve's mean is the printed one"
    for t, kv in CASES.values():
        ours, theirs = (sum(each) / len(each) for each in (recall_of(EMBEDDED, t, kv)[0], recall_of(PRINTED, t, kv)[0]))
        assert theirs < ours


def shares(tokens: list[DecodedToken]) -> tuple[float, float]:
    """(experts named, whole layers)."""
    right = [
        len({*chosen} & {*named})
        for token in tokens
        for chosen, named in zip(token.chosen, token.named or (), strict=True)
    ]
    return sum(right) / 2 / len(right), right.count(2) / len(right)


def test_experts_are_named_as_often_as_the_recall_says() -> None:
    assert shares(named_tokens(DraftRecall((0.9,)), 200)) == pytest.approx((0.9, 0.81), abs=0.015)
    assert shares(named_tokens(DraftRecall((0.9,), 0.85), 200)) == pytest.approx((0.9, 0.85), abs=0.015)
    with_spares = named_tokens(DraftRecall((0.9,), 0.85, 0.95), 200, spares=1)
    assert shares(with_spares)[1] == pytest.approx(0.95, abs=0.01)
    assert all(len({*named}) == 3 for token in with_spares for named in token.named or ())
    assert shares(named_tokens(None, 200, is_random=True))[0] == pytest.approx(0.25, abs=0.015)
    falling = named_tokens(DraftRecall((1.0, 0.5)), 200)
    assert shares(falling[:100])[0] == 1.0 and shares(falling[100:])[0] == pytest.approx(0.5, abs=0.02)


def test_a_better_recall_is_right_wherever_a_worse_one_was() -> None:
    worse, better = (named_tokens(DraftRecall((share,)), 50) for share in (0.8, 0.9))
    for one, other in zip(worse, better, strict=True):
        assert one.chosen == other.chosen
        for chosen, less, more in zip(one.chosen, one.named or (), other.named or (), strict=True):
            assert {*chosen} & {*less} <= {*chosen} & {*more}


def test_claims_are_taken_from_their_rows(found: Reproduction) -> None:
    by_what = {(claim.where, claim.what, claim.case): claim for claim in found.claims}
    assert len(by_what) == len(found.claims)
    assert {claim.where for claim in found.claims} == {
        "table 2", "equation 1", "figure 8", "figure 9", "figure 10", "our bar"
    }  # fmt: skip
    of = rows(found)
    name = "figure 8, recall as printed"
    ratio = of[name, "case 4"].seconds_per_token / of[name, "case 3"].seconds_per_token
    assert by_what["figure 8", "case 3 over case 4", "recall as printed"].ours == pytest.approx((ratio, ratio))
    ours = [1 / of["table 2", f"od-moe ({old}, {new})"].seconds_per_token for old in (16, 128) for new in (64, 256)]
    assert by_what["table 2", "tokens a second", "recall as printed"].ours == (min(ours), max(ours))
    assert any("synthetic" in remark for remark in found.remarks)
