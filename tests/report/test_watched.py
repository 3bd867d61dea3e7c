"""What somebody who watches is told, beside plain dicts of the engine's own events.

Would catch an expert under another's number, a guess that is right and wrong, a look that tells something twice or
never, tiers that are not the table's, an engine that is watched while nobody looks.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from smoe.expert import EXACT, LOW
from smoe.policy.plan import DEVICE, Load, LoadReason
from smoe.policy.step import Decision
from smoe.report.watched import CURVE_SECONDS, EVENTS, TIERS, Watched
from smoe.routing import Phase, Routing
from smoe.runtime.observer import StepObserver
from smoe.simulator.stack_distances import misses_by_size
from tests import oracle
from tests.packs import pack_folder

Open = Callable[..., PreTrainedModel]
CASES: dict[str, dict[str, Any]] = {
    "exact": {},
    "guessing": {"prefetch": "stacked-gates"},
    "ahead": {"prefetch": "next-gate", "max_sequences": 3},
    "substituting": {"alpha": 0.9},
    "dropping": {"alpha": 0.9, "substitutes": "drop"},
    "low": {"preset": "hobbit"},
    "beside": {"device": "emulated", "profile": "rtx-4060-ti", "dilation": 1.0, "balance": "host"},
}


class Plain(StepObserver):
    """Counts by (layer, expert)."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[tuple[int, int]]] = {name: Counter() for name in EVENTS}
        self.tokens: Counter[Phase] = Counter()
        self.uses: list[tuple[int, int]] = []

    def planned(self, routing: Routing, decision: Decision) -> None:
        used = sorted(serve.key[:2] for serve in decision.plan.serves)
        self.found["used"].update(used)
        if routing.phase is Phase.DECODE:
            self.uses += used
        self.found["by_cpu"].update(serve.key[:2] for serve in decision.plan.serves if serve.unit != DEVICE)
        for row, chosen in enumerate(routing.top_k_index):
            for place, expert in enumerate(chosen):
                if decision.routing.top_k_index[row][place] != expert:
                    self.found["replaced"][routing.layer, expert] += 1
        if routing.layer == 0:
            self.tokens[routing.phase] += len(routing.top_k_index)

    def submitted(self, load: Load) -> None:
        if load.reason is not LoadReason.UPGRADE:
            self.found["read"][load.key[:2]] += 1


def folder_for(case: str, toy: Callable[..., Path], tmp_path: Path) -> Path:
    if case != "low":
        return toy("qwen3_moe")
    place = Path(shutil.copytree(toy("qwen2_moe"), tmp_path / "packed"))
    pack_folder(place, precision="int4")
    return place


def merged(looks: list[dict[str, Any]], watched: Watched) -> dict[str, Counter[tuple[int, int]]]:
    """All looks together, by (layer, expert)."""
    places = [(layer, expert) for layer, experts in watched.described()["layers"] for expert in range(experts)]
    found: dict[str, Counter[tuple[int, int]]] = {name: Counter() for name in EVENTS}
    for look in looks:
        for name in EVENTS:
            pairs = look.get(name, [])
            for number, count in zip(pairs[::2], pairs[1::2], strict=True):
                found[name][places[number]] += count
    return found


@pytest.mark.parametrize("case", CASES)
def test_counts_are_those_of_the_engines_own_events(
    case: str, toy: Callable[..., Path], open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(folder_for(case, toy, tmp_path), "fifth", **CASES[case])
    engine, plain = model.offload, Plain()
    transfers = engine.executor.arrivals.transfers
    submit = transfers.submit
    monkeypatch.setattr(transfers, "submit", lambda load: (plain.submitted(load), submit(load))[1])
    watched, looks = Watched(engine), []
    watched.begin()
    rows = 3 if "max_sequences" in CASES[case] else 1
    prompt = oracle.PROMPT.reshape(rows, -1)
    with engine.observed_by(plain):
        for _ in range(2):
            model.generate(prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False)
            looks.append(watched.look())
    watched.end()
    found, counters = merged(looks, watched), engine.stats()
    for name in ("used", "by_cpu", "replaced"):
        assert found[name] == plain.found[name], name
    assert found["right"].total() == counters.prefetches_used
    missed = plain.found["read"] - found["read"]
    assert not found["read"] - plain.found["read"] and missed.total() <= len(engine.executor.table.staged)
    begun = plain.found["read"].total() - counters.loads
    left = len(engine.executor.table.staged)
    assert begun - left <= found["right"].total() + found["wrong"].total() <= begun
    assert sum(look.get("prompt", 0) for look in looks) == plain.tokens[Phase.PREFILL]
    happened = {"guessing": "right", "substituting": "replaced", "dropping": "replaced", "beside": "by_cpu"}
    assert case not in happened or found[happened[case]], "the case shows what it is for"
    assert_tiers(watched, model)


def assert_tiers(watched: Watched, model: PreTrainedModel) -> None:
    """Of every expert, the best that there is of it."""
    table = model.offload.executor.table
    for number, (layer, expert) in enumerate(
        (layer, expert) for layer, experts in watched.described()["layers"] for expert in range(experts)
    ):
        own, low = (layer, expert, EXACT), (layer, expert, LOW)
        if own in table.ready:
            expected = "passing" if own in table.staged else "here"
        else:
            expected = "low" if low in table.ready else "coming" if own in table.inflight else "absent"
        assert TIERS[watched.tiers[number]] == expected, (layer, expert)


def test_looks_add_up(toy: Callable[..., Path], open_model: Open) -> None:
    """Ten small looks tell what one large one does, and tiers go from one to the next."""
    model = open_model(toy("qwen3_moe"), "half")
    engine, prompt = model.offload, oracle.PROMPT
    watched, other = Watched(engine), Watched(engine)
    watched.begin()
    other.begin()
    cache, looks = engine.new_cache(), []
    tiers = dict[int, int]()
    for step in range(10):
        ids = prompt[:, :6] if not step else prompt[:, 6 + step : 7 + step]
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        looks.append(watched.look())
        changed = looks[-1].get("tiers", [])
        tiers |= dict(zip(changed[::2], changed[1::2], strict=True))
    whole = other.look()
    assert merged(looks, watched) == merged([whole], other)
    assert bytes(tiers.get(number, 0) for number in range(len(watched.tiers))) == other.tiers
    for name in ("tokens", "uses", "hits", "bytes"):
        assert sum(look.get("decode", {}).get(name, 0) for look in looks) == whole["decode"][name]
    watched.end()
    other.end()


def test_time_is_that_of_decode_steps(toy: Callable[..., Path], open_model: Open) -> None:
    """Each belongs to the step that it began; a prompt, and what lies between two texts, to none."""
    model = open_model(toy("qwen3_moe"), "half")
    engine, watched = model.offload, Watched(model.offload)
    watched.begin()
    for _ in range(2):
        model.generate(oracle.PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    look = watched.look()
    watched.end()
    decode, layers = look["decode"], len(watched.described()["layers"])
    assert decode["tokens"] == 2 * (8 - 2), "eight tokens are seven steps, of which six are followed by another"
    assert look["prompt"] == 2 * oracle.PROMPT_TOKENS
    assert decode["uses"] == decode["tokens"] * layers * engine.ledger.demand.top_k
    assert 0 <= decode["hits"] <= decode["uses"] and decode["bytes"] >= 0
    assert sum(decode["parts"].values()) == pytest.approx(decode["seconds"], rel=0.2)
    assert watched.look() == {} or set(watched.look()) <= {"tiers"}


def test_the_curve_is_that_of_the_last_uses(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(toy("qwen3_moe"), "half")
    engine, plain, watched = model.offload, Plain(), Watched(model.offload)
    watched.begin()
    with engine.observed_by(plain):
        model.generate(oracle.PROMPT, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    curve = watched.look()["curve"]
    keys = np.array([layer * 1000 + expert for layer, expert in plain.uses])
    half = len(keys) // 2
    expected = misses_by_size(keys, half) / (len(keys) - half)
    assert curve["slots"][0] == 0 and curve["slots"][-1] == len(expected) - 1
    assert curve["misses"] == pytest.approx([expected[slots] for slots in curve["slots"]], abs=1e-4)
    model.generate(oracle.PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    moment = engine.now() + CURVE_SECONDS
    assert "curve" not in watched.look() or engine.now() > moment - 0.5, "not with every look"
    monkeypatch.setattr(engine.executor, "now", lambda: moment + 1)
    assert "curve" in watched.look()
    assert "curve" not in watched.look(), "nothing has been used since"
    watched.end()


def test_nobody_is_heard_while_nobody_looks(toy: Callable[..., Path], open_model: Open) -> None:
    model = open_model(toy("qwen3_moe"), "half")
    engine, watched = model.offload, Watched(model.offload)
    assert engine.executor.observers == []
    watched.begin()
    with torch.no_grad():
        expected = model(oracle.PROMPT).logits
    watched.end()
    assert engine.executor.observers == []
    watched.look()
    assert torch.equal(model(oracle.PROMPT).logits, expected)
    look = watched.look()
    assert not set(look) & {*EVENTS, "prompt", "decode"}


def test_an_error_leaves_what_is_told_in_order(
    toy: Callable[..., Path], open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that ends in the middle: the tiers are the table's, and the next pass is told."""
    model = open_model(toy("qwen3_moe"), "fifth", prefetch="stacked-gates")
    watched = Watched(model.offload)
    watched.begin()
    model.generate(oracle.PROMPT, max_new_tokens=6, do_sample=False)

    class Failing(StepObserver):
        def planned(self, routing: Routing, decision: Decision) -> None:
            if routing.layer:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), model.offload.observed_by(Failing()):
        model.generate(oracle.PROMPT, max_new_tokens=6, do_sample=False)
    watched.look()
    watched.look()
    assert_tiers(watched, model)
    model.generate(oracle.PROMPT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert watched.look()["used"]
    watched.end()
