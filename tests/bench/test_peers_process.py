"""Processes of engines: what they print and hold, what they are told, how they end."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.peers import rounds
from bench.peers.engines import Engine, Setup, worker_environment
from bench.peers.isa import VARIABLES
from bench.peers.kept_rounds import KeptRounds
from bench.peers.neighbour import other_work
from bench.peers.process import TIMED_OUT, Command, Finished, run_process
from bench.peers.rounds import Case, Round
from bench.peers.shape import ModelShape
from bench.peers.words import as_text, draw_words, vocabulary_words
from bench.peers.worker import Measurement, Workload
from tests.bench.test_peers import QUIET, SOME_CEILINGS


def run(script: str, standard_input: str = "", timeout_seconds: float = 60) -> Finished:
    command = Command(["sh", "-c", script], standard_input)
    return run_process(command, None, Path(), os.environ, nice=0, timeout_seconds=timeout_seconds)


def test_process_is_given_its_input_and_its_streams_are_kept_apart() -> None:
    finished = run("cat; echo problem >&2; exit 3", "one\ntwo\n")
    assert (finished.status, finished.output, finished.errors) == (3, "one\ntwo\n", "problem\n")


def test_last_chunk_is_what_was_counted_at_the_end() -> None:
    finished = run("echo text")
    *_, last = finished.chunks
    assert last.text == ""
    if sys.platform == "linux":
        assert last.disk_bytes is not None
        assert finished.chunks[0].memory_bytes.keys() >= {"VmHWM"} or not finished.chunks[0].memory_bytes


def test_process_whose_time_is_over_is_killed_with_its_children() -> None:
    finished = run("sleep 100 & sleep 100", timeout_seconds=0.05)
    assert finished.status == TIMED_OUT and "stopped after" in finished.errors


def test_child_that_is_left_behind_is_killed() -> None:
    finished = run("sleep 100 & echo done")
    assert (finished.status, finished.output) == (0, "done\n")


def test_process_that_reads_no_input_is_no_error() -> None:
    assert run("exit 0", "x" * 1_000_000).status == 0


def test_only_our_processes_are_limited_by_variables() -> None:
    limited = worker_environment(2, "avx2")
    assert limited.items() >= VARIABLES["avx2"].items() and limited["SMOE_MAX_CPU_ISA"] == "avx2"
    assert not VARIABLES["native"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_neighbour_has_ended_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*words: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(real(*words, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr("bench.peers.neighbour.subprocess.Popen", popen)
    with other_work("yes", 0):
        assert started[0].poll() is None
        assert len(os.sched_getaffinity(started[0].pid)) == 1
    assert started[0].poll() is not None
    with other_work("bursts", 0):
        assert started[1].poll() is None
    assert started[1].poll() is not None
    with other_work("no", 0):
        assert len(started) == 2


# --- rounds in a file -------------------------------------------------------------------------------------------------

GOOD = Round("a", Case(1 << 30, "avx2", "yes"), 1, Measurement(decode_seconds=[0.5]), None, 7, SOME_CEILINGS, QUIET)
BAD = Round("b", Case(), 0, None, "killed", None, SOME_CEILINGS, QUIET)


def test_rounds_are_found_again(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "rounds.jsonl"
    kept = KeptRounds(file, {"model": "m", "prompts": (16, 128)})
    assert kept.get("a", GOOD.case, 1) is None
    kept.add(GOOD)
    kept.add(BAD)
    again = KeptRounds(file, {"model": "m", "prompts": (16, 128)})
    assert again.get("a", GOOD.case, 1) == GOOD and again.get("b", Case(), 0) == BAD
    assert again.get("a", Case(), 1) is None


def test_rounds_from_before_bursts_are_found(tmp_path: Path) -> None:
    """Until then a neighbour was `true` or `false`."""
    for neighbour, kind in (("true", "yes"), ("false", "no")):
        file = tmp_path / neighbour
        good = replace(GOOD, case=replace(GOOD.case, neighbour=kind))
        KeptRounds(file, {}).add(good)
        file.write_text(file.read_text().replace(f'"neighbour": "{kind}"', f'"neighbour": {neighbour}'))
        assert KeptRounds(file, {}).get("a", good.case, 1) == good


def test_rounds_of_another_workload_are_refused(tmp_path: Path) -> None:
    KeptRounds(tmp_path / "rounds.jsonl", {"model": "m"})
    with pytest.raises(SystemExit, match="holds rounds of"):
        KeptRounds(tmp_path / "rounds.jsonl", {"model": "n"})


def test_line_that_was_cut_short_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "rounds.jsonl"
    KeptRounds(file, {}).add(GOOD)
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[1][:50])
    kept = KeptRounds(file, {})
    assert kept.get("a", GOOD.case, 1) == GOOD
    kept.add(BAD)
    assert KeptRounds(file, {}).get("b", Case(), 0) == BAD


def test_case_is_written_for_people() -> None:
    assert str(Case()) == "no limit"
    assert str(GOOD.case) == "limit 1.00 GiB, avx2 only, one core busy"


# --- prompts as text --------------------------------------------------------------------------------------------------


def test_words_are_drawn_by_the_stream() -> None:
    workload = Workload(Path("m"), 10, seed=3, stream="uniform")
    words = draw_words(["red", "green", "blue"], workload, 40)
    assert set(words) == {"red", "green", "blue"}
    assert words[:10] == draw_words(["red", "green", "blue"], workload, 10)
    assert as_text(words[:2]) == f" {words[0]} {words[1]}"


class Vocabulary:
    """A tokenizer of seven entries, one of which is never made."""

    ENTRIES = ("the", "Ġthe", "ĠThe", "Ġa", "Ġtree", "Ġtre9", "Ġunreachable")

    def __len__(self) -> int:
        return len(self.ENTRIES)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.ENTRIES[number] for number in ids]

    def tokenizer(self) -> Vocabulary:
        return self

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0, 1] if text == " unreachable" else [0] for text in texts]}


def test_words_are_one_token_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smoe.models.checkpoint.whole_checkpoint", lambda place, revision: Vocabulary())
    assert vocabulary_words(Path("of-a-test.gguf")) == ["the", "tree"]


def test_program_leaves_its_logs_in_no_folder_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = Engine(lambda *_: [Command(["sh", "-c", "pwd; touch main.log"])], lambda _: [], variable="SOME_PROGRAM")
    setup = Setup(tmp_path, tmp_path, "python", tmp_path)
    workload = Workload(tmp_path, 10)
    arena = rounds.Arena(setup, workload, ModelShape(), None, 60, 0)
    commands = engine.commands(setup, workload, None)
    (finished,) = rounds._run_processes(arena, engine, setup, commands, Case(), None)
    assert finished.status == 0 and not Path(finished.output.strip()).exists()
    assert not (rounds.REPOSITORY / "main.log").exists()
