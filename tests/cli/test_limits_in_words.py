"""Refusals and lines about memory and context. Would catch advice that is refused in turn, an alarm about memory that
is not used, and figures of one summary that contradict each other."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from smoe.cli.summary import _experts, _limit, _memory, _per_token, _process
from smoe.config import EngineConfig
from smoe.errors import ContextError
from smoe.generation.generate import Answer, Generation
from smoe.load.ledger import shortages_of
from smoe.machine.device import CPU
from smoe.machine.process_memory import ProcessMemory
from smoe.metrics import Counters

LONG = "Once upon a time there was a cat. " * 130


@pytest.fixture
def unloaded(monkeypatch):
    """Fails if weights are read."""

    def load(*args):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("smoe.load.pretrained._open", load)


def test_a_prompt_longer_than_the_model_allows_names_that_limit(run, unloaded):
    ran = run("generate", "--memory", "30MiB", "-p", LONG)
    assert ran.code == 2 and "this model allows 1024 tokens" in ran.err, ran.err
    assert "--context" not in ran.err and "hint" not in ran.err


@pytest.mark.parametrize("command", ["generate", "record"])
def test_a_prompt_longer_than_the_budget_holds_names_a_context_that_works(run, unloaded, tmp_path, command):
    more = ("--out", tmp_path / "x.trace") if command == "record" else ()
    text = LONG[: len(LONG) // 2]
    asked = (command, "demo", "--memory", "30MiB", "-p", text, "--max-new-tokens", 800, *more)
    ran = run(*asked, "--context", 64)
    assert ran.code == 2 and "memory is reserved for a context of 64" in ran.err, ran.err
    context = re.search(r"give --context (\d+)", ran.err)[1]
    assert int(context) == 1024, "no more than the model allows"
    with pytest.raises(AssertionError, match="was loaded"):
        run(*asked, "--context", context)


def test_a_budget_that_is_too_small_names_one_that_works(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "100KiB", "-p", "x", "--max-new-tokens", 2)
    memory, context = re.search(r"give --memory (\S+) or more \(for a context of (\d+) tokens\)", ran.err).groups()
    ran = run("generate", checkpoint, "--memory", memory, "--context", context, "-p", "x", "--max-new-tokens", 2)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("--memory", "0"), "error: --memory is '0'; it must be above 0, for example 8GiB\n"),
        (
            ("--resident", "40"),
            "error: --resident is '40', which has no per cent sign and would be 4,000%; write 40%\n",
        ),
    ],
)
def test_a_mistyped_size_is_refused_with_what_to_write(run, typed, words):
    assert run("generate", *typed, "-p", "x").err == words


def test_an_empty_file_is_called_empty(run, tmp_path):
    (tmp_path / "x.gguf").touch()
    assert "x.gguf is empty" in run("generate", tmp_path / "x.gguf", "-p", "x").err


def test_a_large_budget_for_a_small_model_alarms_nobody(run, checkpoint):
    ran = run("generate", checkpoint, "--memory", "100TiB", "-p", "One", "--max-new-tokens", 2)
    assert ran.code == 0 and "the model uses only" in ran.err and "may stop the process" not in ran.err
    assert re.search(r"the whole model fits in \S+ \S+ \(budget 100 TiB, as requested\)", ran.err), ran.err


def test_memory_that_is_used_and_not_free_is_warned_of():
    ledger = SimpleNamespace(budget_bytes=1 << 60, total_bytes=1 << 60)
    assert len(shortages_of(EngineConfig(memory_bytes=1 << 60), ledger, CPU)) == 1


def test_a_model_that_fits_whole_is_described_so(run, checkpoint):
    ran = run("generate", checkpoint, "-p", "One", "--max-new-tokens", 2)
    assert re.search(r"^budget +the whole model fits in \S+ \S+, all \d+ experts resident$", ran.err, re.M), ran.err


def test_experts_read_in_the_background_are_called_so():
    report = SimpleNamespace(hit_ratio=1.0, bytes_read_per_token=2**20, all_fit=True)
    assert _experts(report).endswith("1.00 MiB read per token in the background until the whole model is in memory")
    report.hit_ratio, report.all_fit = 0.5, False
    assert _experts(report) == "50.0% were in memory, 1.00 MiB read per token"


@pytest.mark.parametrize(("seconds", "is_explained"), [(0.001, True), (0.02, False)])
def test_a_small_share_of_the_limit_is_explained_for_small_models(seconds: float, is_explained: bool) -> None:
    """A newcomer reads 9 % as 91 % that are wasted."""
    floor, rates = SimpleNamespace(overlapped_seconds=seconds, bound_by="disk"), SimpleNamespace(source="measured")
    found = _limit(SimpleNamespace(floor=floor, floor_share=0.09, rates=rates, beats_rates=False))
    assert found.startswith("this run reached 9% of the speed that this hardware allows. At full speed the disk takes")
    assert found.endswith("A model this small spends most of its time on other work.") is is_explained


def test_the_rate_is_that_of_the_mean_time() -> None:
    answer, counters = Answer(token_ids=[1] * 5), Counters()
    times = [1.0, 1.01, 1.02, 1.03, 1.08]
    generation = Generation([answer], 0.0, times, 1.1, counters, counters, was_interrupted=False, notes=[])
    report = SimpleNamespace(generation=generation, tpot_asked_seconds=None)
    assert _per_token(report) == "20 ms = 50 tokens/s (median 10 ms, p95 50 ms)"
    generation.answers.append(answer)
    assert _per_token(report) == "20 ms for 2 at once = 100 tokens/s (median 10 ms, p95 50 ms)"


MIB = 2**20


def _summary(process, peak):
    report = SimpleNamespace(
        process=process, peak_memory_bytes=peak, memory_budget_bytes=2048 * MIB, process_peak_bytes=None
    )
    return _memory(report), _process(report)


def test_memory_in_ram_is_one_account():
    process = ProcessMemory(2500 * MIB, 400 * MIB, 2048 * MIB, 52 * MIB)
    memory, whole = _summary(process, 2048 * MIB)
    assert memory == "2.00 GiB of the budget of 2.00 GiB at most"
    assert whole == (
        "2.44 GiB at most: of the budget 2.00 GiB, outside the budget 452 MiB (interpreter and libraries 400 MiB, "
        "library scratch memory 52.0 MiB)"
    )


def test_memory_that_was_only_reserved_is_called_so():
    """By what the operating system reports, the process took less than the budget and the libraries."""
    process = ProcessMemory(2192 * MIB, 400 * MIB, 1792 * MIB, 0)
    memory, whole = _summary(process, 2048 * MIB)
    assert memory == "2.00 GiB of the budget of 2.00 GiB reserved, at most 1.75 GiB of it used"
    assert whole.endswith("budget and library scratch memory 1.75 GiB") and "0 B" not in whole


def test_a_prompt_above_both_limits_is_refused_with_both():
    assert "allows 1024 tokens" in (both := str(ContextError.of_prompt(3002, 512, 1024)))
    assert "memory is reserved for 512" in both
    assert "memory is reserved" not in str(ContextError.of_prompt(3002, 1024, 1024))
