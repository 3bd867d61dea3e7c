"""SMoE's settings: what must come out of them whatever the routing.

Would catch: a batch whose scores belong to other rows, a step compared with the wrong one, a cache ratio above 1.
"""

from __future__ import annotations

import pytest

from bench.papers import smoe
from bench.papers.claims import Reproduction
from bench.papers.smoe import MACHINES, SMOE, STEPS
from smoe.routing import Phase, last_rows
from smoe.simulator.synthetic import DrawnShape, synthesise
from tests.bench.papers.shorter import reproduced


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduced(smoe, 2, NEW_TOKENS=12, SETTINGS=[(MACHINES[0], 1), (MACHINES[0], 3)])


def test_sequences_side_by_side_keep_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row's scores rank its own choice highest: of all rows in decode, of the last ones of a prompt."""
    monkeypatch.setattr(smoe, "NEW_TOKENS", 3)
    model = MACHINES[0].model
    alone = synthesise(DrawnShape(model.experts, model.top_k, model.layers, 3, smoe.PROMPT_TOKENS), with_scores=True)
    joined = smoe._trace(model, 3)
    assert len(joined) == len(alone)
    for one, all_three in zip(alone, joined, strict=True):
        length = len(one.top_k_index)
        assert all_three.top_k_index[:length] == one.top_k_index and all_three.sequences == 3
        rows = last_rows(all_three) if all_three.phase is Phase.PREFILL else range(3)
        assert all_three.scores is not None and all_three.weights is not None
        for row, scores in zip(rows, all_three.scores, strict=True):
            best = sorted(range(model.experts), key=lambda expert: -scores[expert])[: model.top_k]
            assert best == list(all_three.top_k_index[row])


def test_what_must_be_faster_is(found: Reproduction) -> None:
    seconds = {(setting.name, setting.system): setting.seconds_per_token for setting in found.settings}
    for where in {name for name, _ in seconds}:
        assert seconds[where, "+ CR"] < seconds[where, "+ CE"], "fewer loads"
        assert seconds[where, SMOE] < seconds[where, "+ Pre"], "the CPU takes its share"


def test_claims_are_named_by_their_figures(found: Reproduction) -> None:
    assert {claim.where for claim in found.claims} == {f"figure {number}" for number in (11, 12, 13, 14)}
    steps = [claim.what for claim in found.claims if claim.where == "figure 14" and "time per token" in claim.what]
    assert [what.rpartition(" over ")[2] for what in steps] == list(STEPS)
    assert all(0 < claim.ours[0] <= claim.ours[1] for claim in found.claims)
