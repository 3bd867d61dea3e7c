"""Would catch: an estimate that is not remembered, or not used by generate and replay; held-out traces that are learned
from; a learned eviction without anything learned."""

from __future__ import annotations

from smoe.eval import tune_eviction as module
from tests.cli.conftest import SIZE


def test_it_is_learned_remembered_and_used(run, checkpoint, traces, monkeypatch):
    first, second = traces
    monkeypatch.setattr("smoe.eval.train_eviction.LEAST_TOKENS", 20)
    heard = []

    def listening(traces, shape, tick):
        heard.append([len(trace) for trace in traces])
        return train(traces, shape, tick)

    train = module.train
    monkeypatch.setattr(module, "train", listening)
    asked = ("--eviction", "learned", "--cache", first, "--held-out", second)
    refused = run("generate", checkpoint, *SIZE, "--eviction", "learned", "-p", "once", "--max-new-tokens", 2)
    assert refused.code == 2 and "smoe tune" in refused.err and "no tuned values are stored" in refused.err
    assert run("replay", first, "--resident", "50%", "--eviction", "learned").code == 2
    ran = run("tune", checkpoint, *SIZE, *asked, "--json")
    assert ran.code == 0, ran.err
    said = ran.json
    assert heard == [[24 * 4]], "24 passes of four layers, and nothing of the other trace"
    assert said["decode_steps"] == 23 and said["misses"].keys() == set(module.RIVALS)
    assert said["held_out_misses"]["belady"] <= min(said["held_out_misses"].values())
    used = run("generate", checkpoint, *SIZE, "--eviction", "learned", "-p", "once", "--max-new-tokens", 2)
    assert used.code == 0 and "--eviction learned is used: as trained on 23 recorded steps" in used.err
    replayed = run("replay", second, "--slots", said["slots"], "--eviction", "learned", "--json")
    assert replayed.json["misses"] == said["held_out_misses"]["learned"]
    table = run("tune", checkpoint, *SIZE, *asked[:4], "--tokens", 20)
    assert "learned" in table.out and "held out" not in table.out and "--held-out" in table.err
    assert heard[1:] == [[20 * 4]]


def test_what_cannot_be(run, checkpoint, traces):
    asked = ("tune", checkpoint, "--context", 128, "--eviction", "learned", "--cache", traces[0])
    few = run(*asked, "--memory", "2700KiB")
    assert few.code == 2 and "are too few to train an eviction policy" in few.err
    all_fit = run(*asked, "--memory", "1GiB")
    assert all_fit.code == 2 and "no expert is ever evicted" in all_fit.err
    other = run("tune", "demo", "--resident", "40%", "--eviction", "learned", "--cache", traces[0])
    assert other.code == 2 and "differ from this model's" in other.err
