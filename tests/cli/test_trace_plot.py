"""`smoe trace plot` from the recording of a toy model to its pictures."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("matplotlib")

from smoe.policy.registry import EVICTIONS
from smoe.simulator.replay import replay
from smoe.trace.file import Trace, TraceWriter
from smoe.trace.record import TracedLayer, TraceHeader

NAMES = {
    f"{name}.png"
    for name in (
        "activation-by-sequence",
        "affinity",
        "entropy",
        "miss-ratio",
        "reuse-by-rank",
        "score-concentration",
    )
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory, checkpoint):
    """The toy model's: 4 layers of 8 experts, 4 a token; a prompt and 39 decode steps."""
    from smoe import from_pretrained
    from smoe.trace.recorder import recording
    from tests import oracle

    path = tmp_path_factory.mktemp("traces") / "toy.trace"
    model = from_pretrained(checkpoint, memory="4MiB", context_tokens=64)
    with model.offload, recording(model, path, name="toy"):
        model.generate(oracle.PROMPT % 90, max_new_tokens=40, min_new_tokens=40, do_sample=False)
        slot_bytes = dict(model.offload.store.slot_bytes)
    assert dict(enumerate(Trace(path).header.expert_bytes or ())) == slot_bytes
    return path


def test_pictures_and_a_table(run, trace, tmp_path):
    out = tmp_path / "pictures"
    ran = run("trace", "plot", trace, "--out", out)
    assert ran.code == 0 and {path.name for path in out.iterdir()} == NAMES
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in NAMES)
    said = " ".join(ran.out.split())
    assert "toy: 4 layers of 8 experts, 4 chosen" in said and "of experts" in said
    for words in ("chosen within 3 tokens", "share of scores", "entropy", "next layer's experts", "misses a token"):
        assert words in said
    assert "6 pictures" in ran.err and "the curve learned is not drawn" in ran.err and "warning" not in ran.err


def test_numbers_are_the_replays(run, trace, tmp_path):
    said = run("trace", "plot", trace, "--out", tmp_path, "--format", "svg", "--json").json
    assert set(said["files"].values()) == {str(path) for path in tmp_path.glob("*.svg")} and len(said["files"]) == 6
    curves, routings = said["curves"], Trace(trace).routings(with_scores=True)
    assert curves["slots"][0] == 4 and curves["slots"][-1] == said["experts"] == 32
    for name in ("auto", "lru", "score"):
        place = curves["slots"].index(16)
        assert curves["misses"][name][place] == replay(routings, 16, 2, EVICTIONS.find(name)()).misses
        shown = run("replay", trace, "--slots", 16, "--eviction", name, "--json").json
        assert curves["misses"][name][place] == shown["misses"] and curves["steps"] == shown["decode_steps"]
    assert said["experts_bytes"] == 8 * sum(Trace(trace).header.expert_bytes)
    sized = run("trace", "plot", trace, "--out", tmp_path, "--expert-size", "9MiB", "--json").json
    assert sized["experts_bytes"] == 32 * 9 * 2**20


def test_only_its_own_files_are_replaced(run, trace, tmp_path):
    (tmp_path / "entropy.png").write_text("old")
    (tmp_path / "mine.png").write_text("mine")
    run("trace", "plot", trace, "--out", tmp_path, "--quiet")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {*NAMES, "mine.png"}
    assert (tmp_path / "mine.png").read_text() == "mine" and (tmp_path / "entropy.png").read_bytes()[:1] == b"\x89"


def test_a_write_that_fails_leaves_what_was_there(run, trace, tmp_path, monkeypatch):
    (tmp_path / "miss-ratio.png").write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = run("trace", "plot", trace, "--out", tmp_path, "--json")
    refused(ran, "No space left on device", "give another --out")
    assert ran.json["error"]["type"] == "DiskSpaceError" and ran.json["error"]["setting"] == "out"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["miss-ratio.png"]
    assert (tmp_path / "miss-ratio.png").read_text() == "old"


def write(path, experts=8, phase=1, tokens=3):
    header = TraceHeader("other", "toy", 0.0, (TracedLayer(0, experts, 1, None), TracedLayer(1, experts, 1, None)))
    with TraceWriter(path, header) as writer:
        for step in range(tokens):
            for layer in header.layers:
                rows = header.blank_rows(layer, 1)
                rows["step"], rows["phase"], rows["top_k_index"] = step, phase, step % experts
                writer.append(rows)
            writer.keep()
    return path


def test_what_is_not_drawn_is_said(run, tmp_path):
    """A prompt alone has no decode steps; an earlier picture of them is not mistaken for this run's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "miss-ratio.png").write_text("old")
    ran = run("trace", "plot", write(tmp_path / "a.trace", phase=0), "--out", tmp_path / "out")
    assert ran.code == 0 and "the miss-ratio curves omitted: only prompts were recorded" in ran.err
    assert "(smoe record with --text)" in ran.err and "reuse and scores by rank omitted" in ran.err
    assert "still contains miss-ratio.png of an earlier run" in ran.err


def refused(ran, *words):
    said = " ".join(ran.err.split())
    assert ran.code == 2 and "Traceback" not in ran.err, ran
    for part in words:
        assert part in said, said


def test_bad_traces_are_refused(run, trace, tmp_path):
    out = tmp_path / "out"
    refused(run("trace", "plot", tmp_path / "none.trace", "--out", out), "cannot read", "none.trace")
    refused(run("trace", "plot", tmp_path, "--out", out), "it is a folder; give a file that smoe record has written")
    cut = tmp_path / "cut.trace"
    cut.write_bytes(trace.read_bytes()[:-7])
    refused(run("trace", "plot", cut, "--out", out), "truncated or damaged", "record it again")
    other = write(tmp_path / "other.trace")
    refused(run("trace", "plot", trace, other, "--out", out), "other.trace is of another model (other)", "of its own")
    empty = write(tmp_path / "empty.trace", tokens=0)
    refused(run("trace", "plot", empty, "--out", out), "has no tokens")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words", "setting"),
    [
        (("--out", "here", "--format", "gif"), "png, svg, pdf", "format"),
        (("--out", "here", "--tokens", 0), "at least 1", "tokens"),
        (("--out", "here", "--expert-size", "9"), "has no unit", "expert_size"),
        (("--out", "no/where/at-all"), "does not exist; create it", "out"),
    ],
)
def test_bad_options_are_refused_before_the_trace_is_read(run, arguments, words, setting):
    ran = run("trace", "plot", "none.trace", *arguments, "--json")
    refused(ran, words)
    assert ran.json["error"]["setting"] == setting


def test_where_nothing_can_be_written(run, trace, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("a file")
    refused(run("trace", "plot", trace, "--out", file), "it is a file; give a folder")
    monkeypatch.setattr("smoe.cli.plot_file.TemporaryFile", denied)
    refused(run("trace", "plot", trace, "--out", tmp_path), "nothing can be written", "give another folder")


def denied(dir):
    raise PermissionError(13, "Permission denied")


def test_without_matplotlib(run, trace, tmp_path, monkeypatch):
    monkeypatch.setattr("smoe.cli.plot_file.find_spec", lambda name: None)
    refused(run("trace", "plot", trace, "--out", tmp_path), "pip install matplotlib")


def test_a_missing_trace_is_not_taken_for_the_command(run):
    error = run("trace", "plot", "--out", "here", "--json").json["error"]
    assert (error["setting"], error["given"]) == ("trace", None)


def test_the_command_explains_itself(run):
    assert "smoe trace plot demo.trace --out pictures" in run("trace", "plot", "--help").out
    assert "plot" in run("trace").out + run("trace").err
