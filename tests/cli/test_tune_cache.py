"""Would catch: weights that are not remembered, or not used; held-out traces that are fitted on; idle options."""

from __future__ import annotations

import json

import pytest

from smoe.policy.eviction.policies import are_cache_weights
from smoe.simulator.mixed_cache import best_weights
from tests.cli.conftest import SIZE


def test_weights_are_fitted_remembered_and_used(run, checkpoint, traces):
    first, second = traces
    ran = run("tune", checkpoint, *SIZE, "--cache", first, "--held-out", second, "--json")
    assert ran.code == 0, ran.err
    said = ran.json
    assert are_cache_weights(said["cache_weights"]) and said["decode_steps"] == 23 and said["low_slots"] > 0
    assert (said["low_threshold"], said["skip_threshold"]) == (0.6, 0.9), "HOBBIT's, where no preset is named"
    assert said["penalties"].keys() == said["held_out_penalties"].keys() >= {"lru", "lfu", "belady", "fitted weights"}
    assert said["penalties"]["fitted weights"] <= min(
        said["penalties"][name] for name in ("lhu alone", "fld alone", "usual weights")
    )
    used = run("generate", checkpoint, *SIZE, "--eviction", "multidimensional", "-p", "once", "--max-new-tokens", 2)
    shown = ",".join(f"{weight:.3g}" for weight in said["cache_weights"])
    assert f"--set cache_weights={shown} is used: as fitted on 23 recorded steps" in used.err
    table = run("tune", checkpoint, *SIZE, "--cache", first)
    assert f"cache_weights {shown}" in table.out and "held out" not in table.out and "--held-out" in table.err


def test_records_of_the_model_and_fewer_tokens(run, checkpoint, traces, monkeypatch):
    heard = []

    def listening(traces, cache, records, tick):
        heard.append((len(traces), len(traces[0]), cache.low_slots, records))
        return best_weights(traces, cache, records, tick)

    monkeypatch.setattr("smoe.eval.tune_cache.best_weights", listening)
    asked = ("--preset", "lru", "--eviction", "multidimensional", "--set", "cache_records=model", "--tokens", 5)
    ran = run("tune", checkpoint, *SIZE, *asked, "--cache", traces[0], "--cache", traces[1], "--json")
    assert ran.code == 0, ran.err
    assert heard == [(2, 5 * 4, 0, "model")] and ran.json["cache_records"] == "model"
    assert ran.json["low_cost"] == 1.0, "without low copies a miss is a miss"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--held-out", "x.trace"), "--held-out"),
        (("--cache", "x.trace", "--tpot", "80ms"), "are two different measurements"),
        (("--cache", "x.trace", "--memory", "1GiB"), "no expert is ever evicted"),
        (("--cache", "x.trace", "--memory", "2700KiB"), "cannot read x.trace"),
    ],
)
def test_what_cannot_be(run, checkpoint, asked, says):
    ran = run("tune", checkpoint, "--context", 128, *asked)
    assert ran.code == 2 and says in ran.err


def test_traces_of_another_model_are_refused(run, traces):
    ran = run("tune", "demo", "--resident", "40%", "--cache", traces[0], "--json")
    assert ran.code == 2 and json.loads(ran.out)["error"]["setting"] == "cache"
    assert "differ from this model's" in ran.err
