from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoe
from smoe.eval import tune
from smoe.load.priced_answers import prices_of
from smoe.metrics import Counters
from tests.cli.conftest import SIZE


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "_WARM_TOKENS", 4)
    monkeypatch.setattr(tune, "_TIMED_TOKENS", 6)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "once upon a time there was a cat " * 8}) + "\n")
    return path


def test_tune_measures_remembers_and_generate_uses_it(run, checkpoint, text):
    ran = run("tune", checkpoint, *SIZE, "--text", text, "--tpot", "10s", "--json")
    assert ran.code == 0, ran.err
    assert [alpha for alpha, _ in ran.json["points"]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert all(seconds > 0 for _, seconds in ran.json["points"])
    assert ran.json["alpha"] == 0, "ten seconds are met without any substitution"
    used = run("generate", checkpoint, *SIZE, "--tpot", "10s", "-p", "once upon", "--max-new-tokens", 4, "--json")
    assert used.code == 0 and used.json["alpha"] == 0
    assert (
        "by the measurements of smoe tune, the smallest alpha that meets 10 s a token, with experts read at "
        in used.err
    )
    assert " just now\n" in used.err
    asked = ("--tpot", "10s", "--preset", "smoe", "-p", "once", "--max-new-tokens", 1)
    assert " just now, instead of the preset's 0.3\n" in run("generate", checkpoint, *SIZE, *asked).err


@pytest.fixture
def measured(monkeypatch):
    """Takes a formula for the seconds of (alpha, round) instead of the clock; gives what was asked: (alpha, text)."""
    asked = []

    def replace(seconds_of):
        def forced(model, ids, cache):
            asked.append((model.offload.config.alpha, ids))
            turn = (len(asked) - 1) // 7
            return ((None, seconds_of(asked[-1][0], turn)) for _ in ids)

        monkeypatch.setattr(tune, "forced", forced)
        return asked

    return replace


def test_rounds_alternate_and_the_choice_is_measured_once_more(run, checkpoint, text, measured):
    asked = measured(lambda alpha, turn: 0.1 - 0.1 * alpha + 0.001 * turn)
    ran = run("tune", checkpoint, *SIZE, "--text", text, "--tpot", "81ms", "--json")
    value = ran.json
    assert [alpha for alpha, _ in asked] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6] * 3 + [value["alpha"]]
    parts = [tuple(asked[first][1]) for first in (0, 7, 14, 21)]
    assert len(set(parts)) == 4 and {len(part) for part in parts} == {10}, (
        "every round and the check on text of its own"
    )
    assert value["points"][2] == [0.2, pytest.approx(0.081)], "the median of three rounds"
    assert value["half_range_seconds"] == pytest.approx([0.001] * 7) and value["noise_seconds"] == pytest.approx(0.001)
    assert value["alpha"] == pytest.approx(0.2, abs=0.011) and not value["is_flat"] and not value["is_within_noise"]
    assert value["lowest_alpha"] < value["alpha"] < value["highest_alpha"]
    assert value["predicted_seconds"] == pytest.approx(0.081, abs=0.001)
    assert value["measured_seconds"] == pytest.approx(0.103 - 0.1 * value["alpha"]) and value["is_met"]
    assert "noise" not in ran.err


def test_the_table_has_the_spread_and_a_miss_is_said(run, checkpoint, text, measured):
    measured(lambda alpha, turn: 0.1 - 0.1 * alpha + 0.001 * turn + 0.05 * (turn == 3))
    ran = run("tune", checkpoint, *SIZE, "--text", text, "--tpot", "81ms")
    assert ran.code == 0 and ran.out.splitlines()[0].split() == ["alpha", "a", "token", "+/-"]
    assert ran.out.splitlines()[1].split() == ["0", "101", "ms", "1", "ms"]
    assert "misses 81 ms a token by more than 10 %: predicted 8" in ran.out and ", measured 13" in ran.out


def zigzag(slope, height):
    """Falls with alpha, and by `height` in every second turn."""
    return lambda alpha, turn: 0.1 - slope * alpha + (height if (turn + round(10 * alpha)) % 2 else 0.0)


@pytest.mark.parametrize(
    ("budget", "said"), [("90ms", "a token may be anything from 0."), ("77ms", " or higher, or no alpha may meet it")]
)
def test_a_budget_within_the_noise_is_said(run, checkpoint, text, measured, budget, said):
    measured(zigzag(0.05, 0.012))
    ran = run("tune", checkpoint, *SIZE, "--text", text, "--json", "--tpot", budget)
    assert ran.json["is_within_noise"] and not ran.json["is_flat"] and ran.json["alpha"] > 0
    assert f"noise of +/- 6 ms, so the smallest alpha that meets {budget[:2]} ms" in ran.err
    assert said in ran.err and "changes nothing" not in ran.err


def test_where_alpha_changes_nothing_none_is_chosen(run, checkpoint, text, measured):
    """A fit through noise has a smallest alpha too (0.27 here); it means nothing."""
    asked_for = measured(zigzag(0.001, 0.01))
    asked = ("tune", checkpoint, *SIZE, "--text", text)
    ran = run(*asked, "--json", "--tpot", "103ms")
    assert ran.json["is_flat"] and "alpha changes nothing here: from 0 to 0.6" in ran.err
    assert asked_for[-1][0] == 0 == ran.json["alpha"] == ran.json["lowest_alpha"] == ran.json["highest_alpha"]
    assert not ran.json["is_within_noise"] and "within the noise of" not in ran.err
    assert ran.json["predicted_seconds"] == pytest.approx(0.1, abs=0.001) and ran.json["is_met"]
    asked_for.clear()
    alone = run(*asked, "--json")
    assert alone.json["is_flat"] and alone.json["alpha"] is None is alone.json["measured_seconds"]
    assert ran.json.keys() == alone.json.keys()
    asked_for.clear()
    near = run(*asked, "--tpot", "92ms")
    assert near.code == 0 and near.out.splitlines()[-1].startswith("alpha 0 m"), "within 10 %"
    asked_for.clear()
    refused = run(*asked, "--tpot", "85ms")
    assert (
        refused.code == 2
        and "85 ms a token is out of reach: the fastest that was measured is 100 ms (+/- 5 ms), at every alpha"
        in refused.err
    )
    assert "at every alpha; give more --memory" in refused.err


@pytest.fixture
def paced(monkeypatch):
    """A machine that computes 50 ms and then waits for (1 - alpha) * 400 MB, at the rate of the turn."""

    def at(rates):
        turns = iter(rates)

        def tokens(model, ids, tick):
            rate = next(turns)
            seconds = 0.4e9 * (1 - model.offload.config.alpha) / rate
            counts = Counters(bytes_read=round(seconds * rate), read_busy_seconds=seconds, wait_seconds=seconds)
            return [(0.05 + seconds, counts) for _ in ids]

        monkeypatch.setattr(tune, "_tokens", tokens)

    return at


def test_times_are_told_for_one_rate_of_reading(run, checkpoint, text, paced):
    """Rounds at 2, 1 and 4 GB/s, the check at 1: only the rescaled figures say what alpha does."""
    asked = ("tune", checkpoint, *SIZE, "--text", text, "--tpot", "190ms")
    drifting = [2e9] * 7 + [1e9] * 7 + [4e9] * 7 + [1e9]
    paced(drifting)
    value = run(*asked, "--json").json
    assert value["bytes_per_second"] == pytest.approx(2e9)
    assert [seconds for _, seconds in value["points"]] == pytest.approx([0.25, 0.23, 0.21, 0.19, 0.17, 0.15, 0.13])
    assert value["noise_seconds"] == pytest.approx(0, abs=1e-9) and not value["is_flat"]
    assert value["measured_by_round"][1][0]["seconds"] == pytest.approx(0.45)
    assert value["alpha"] == pytest.approx(0.3, abs=0.011)
    bytes_read = 0.4e9 * (1 - value["alpha"])
    assert value["measured_seconds"] == pytest.approx(0.05 + bytes_read / 1e9)
    assert value["rescaled_seconds"] == pytest.approx(0.05 + bytes_read / 2e9)
    assert value["measured_bytes_per_second"] == pytest.approx(1e9) and value["is_met"]
    paced(drifting)
    ran = run(*asked)
    assert ran.out.splitlines()[1].split() == ["0", "250", "ms", "0", "us", "250", "ms"]
    assert "experts were read at 1 GB/s to 4 GB/s; the times per token are converted to 2 GB/s" in ran.err
    assert " while experts were read at 1 GB/s, which is 1" in ran.out and " ms at 2 GB/s" in ran.out


def test_generate_takes_the_alpha_for_the_disk_as_it_is_now(run, checkpoint, text, paced):
    paced([2e9] * 21)
    assert run("tune", checkpoint, *SIZE, "--text", text).code == 0
    ask = ("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 2, "--json")
    for rate, tpot, alpha in ((2e9, "190ms", 0.3), (1e9, "330ms", 0.3), (4e9, "110ms", 0.4)):
        paced([rate])
        ran = run(*ask, "--tpot", tpot)
        assert ran.json["alpha"] == pytest.approx(alpha, abs=0.011)
        assert f"with experts read at {rate / 1e9:g} GB/s just now" in ran.err
    paced([1e9])
    refused = run(*ask, "--tpot", "190ms")
    assert refused.code == 2 and "at alpha 0.6, where experts are read at 1 GB/s; give more --memory" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "switches", [("--memory", "64MiB"), ("--memory", "2700KiB", "--device", "emulated", "--set", "dilation=1")]
)
def test_what_does_not_hang_on_the_disk_is_not_rescaled(run, checkpoint, text, switches):
    ran = run("tune", checkpoint, *switches, "--context", 128, "--text", text, "--tpot", "10s", "--json")
    assert ran.json["bytes_per_second"] is None and ran.json["measured_bytes_per_second"] is None
    assert ran.json["rescaled_seconds"] == ran.json["measured_seconds"] and "GB/s" not in ran.err
    ask = ("generate", checkpoint, *switches, "--context", 128, "-p", "once", "--max-new-tokens", 2)
    assert "a token, instead" in run(*ask, "--preset", "smoe", "--tpot", "10s").err


def test_what_is_not_known_or_out_of_reach_is_refused(run, checkpoint, text):
    ask = ("generate", checkpoint, *SIZE, "-p", "once", "--max-new-tokens", 2)
    unknown = run(*ask, "--tpot", "10s")
    assert unknown.code == 2 and "smoe tune" in unknown.err
    assert run("tune", checkpoint, *SIZE, "--text", text).code == 0
    fast = run(*ask, "--tpot", "1us")
    assert fast.code == 2 and "out of reach" in fast.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tpot", "fast"), "is not a time"),
        (("--tpot", "0ms"), "is not a time"),
        (("--tpot", "10ms", "--alpha", "0.3"), "either --tpot or --alpha"),
    ],
)
def test_bad_times_are_refused(run, checkpoint, arguments, words):
    ran = run("generate", checkpoint, *SIZE, "-p", "once", *arguments)
    assert ran.code == 2 and words in ran.err


@pytest.mark.parametrize("other", [("--alpha", "0.3"), ("--alpha", "0.3", "--preset", "smoe")])
def test_two_ways_to_choose_alpha_are_refused_at_once(other):
    """In a process of its own, where nothing has been imported yet, and nothing is for this."""
    code = (
        "import sys, smoe.cli\n"
        "try: smoe.cli.main()\n"
        "finally: print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    line = [sys.executable, "-c", code, "generate", "demo", "-p", "x", "--tpot", "40ms", *other]
    environment = {**os.environ, "PYTHONPATH": str(Path(smoe.__file__).parents[1])}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert "--tpot chooses alpha; give either --tpot or --alpha" in done.stderr


def test_a_short_text_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("once upon")
    ran = run("tune", checkpoint, *SIZE, "--text", path)
    assert ran.code == 2 and "--text has" in ran.err and "are needed to measure on" in ran.err
    ran = run("tune", checkpoint, "--memory", "2700KiB", "--context", 32)
    assert ran.code == 2 and "--context 32 is too short" in ran.err


@pytest.fixture
def priced_text(tmp_path, monkeypatch):
    monkeypatch.setattr("smoe.cli.tune._LEAST_PRICED_TOKENS", 40)
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "once upon a time there was a cat " * 8}) + "\n")
    return path


def test_a_price_is_found_remembered_and_used_where_it_holds(run, checkpoint, priced_text, monkeypatch):
    monkeypatch.setattr("smoe.eval.stepwise.median", lambda _: 1.0)
    asked = ("tune", checkpoint, *SIZE, "--text", priced_text, "--tokens", 60)
    ran = run(*asked, "--max-perplexity-increase", "50%", "--json")
    assert ran.code == 0, ran.err
    assert "saves no time on this machine: a token takes 1 s with it, and 1 s without" in ran.err
    within = [p["alpha"] for p in ran.json["prices"] if (p["perplexity_change"] or {"high": 0})["high"] <= 0.5]
    assert ran.json["alpha"] == max(within) > 0.3 and ran.json["tokens"] == ran.json["text_tokens"]
    ask = ("generate", checkpoint, "--context", 128, "--preset", "smoe", "-p", "once", "--max-new-tokens", 2, "--json")
    used = run(*ask, "--memory", "2700KiB")
    assert (
        used.json["alpha"] == ran.json["alpha"]
        and f"--alpha {ran.json['alpha']:g} is used: as you measured it: " in used.err
    )
    given = run(*ask, "--memory", "2700KiB", "--alpha", 0.1)
    assert given.json["alpha"] == 0.1 and "priced" not in given.err
    fewer = run(*ask, "--memory", "2600KiB")
    assert fewer.json["alpha"] == 0.3 and "there are" in fewer.err and "the usual one" in fewer.err


def test_what_costs_too_much_is_not_chosen(run, checkpoint, priced_text, monkeypatch):
    from smoe.eval import price

    monkeypatch.setattr(
        price, "bootstrapped", lambda statistic, count: price.Change(0.0, -0.01, statistic(range(count)) and 0.02)
    )
    ran = run("tune", checkpoint, *SIZE, "--text", priced_text, "--tokens", 60, "--max-perplexity-increase", "1%")
    assert ran.code == 0 and ran.out.startswith(
        "alpha 0 is the largest that costs at most 1 %: perplexity -1.00 .. +0.00 %"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-perplexity-increase", "some"), "is not a share"),
        (("--max-perplexity-increase", "1"), "means 100%; give at most 50%, such as 1%"),
        (("--max-perplexity-increase", "1%", "--tpot", "40ms"), "are two different measurements"),
        (("--max-perplexity-increase", "1%", "--tokens", 30), "--tokens is 30; it must be at least 640"),
        (("--max-perplexity-increase", "1%", "--alpha", 0.2), "cannot be combined with --alpha"),
        (("--tokens", 800), "--tokens has an effect only with --prices or --cache"),
        (("--out", "results"), "has an effect only with --max-perplexity-increase"),
    ],
)
def test_bad_prices_are_refused_before_the_model_is_loaded(run, arguments, words):
    ran = run("tune", "demo", *arguments)
    assert ran.code == 2 and words in " ".join(ran.err.split()) and "budget" not in ran.err


def test_a_text_too_short_to_price_on_is_refused(run, checkpoint, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("once upon a time")
    ran = run("tune", checkpoint, *SIZE, "--text", path, "--max-perplexity-increase", "1%")
    assert ran.code == 2 and "needs at least 640; give a longer --text" in ran.err


def test_an_interrupt_is_said(run, checkpoint, text, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "measure_times", interrupt)
    ran = run("tune", checkpoint, *SIZE, "--text", text)
    assert ran.code == 130 and "interrupted; nothing was stored" in ran.err


def test_prices_of_answers_are_measured_and_remembered(run, checkpoint, text, tmp_path):
    ran = run("tune", checkpoint, *SIZE, "--prices", "--text", text, "--json")
    assert ran.code == 0, ran.err
    assert f"stored in {tmp_path / 'cache' / 'smoe' / 'prices'}" in ran.err.replace("\n", "")
    priced = prices_of(checkpoint)
    assert priced is not None and priced.as_json().items() <= ran.json.items()
    assert ran.json["low_precision"] == "none" and len(ran.json["nats"]) == len(ran.json["rounding_nats"]) == 4
    table = run("tune", checkpoint, *SIZE, "--prices", "--text", text)
    assert table.code == 0 and [line.split()[1:3] for line in table.out.splitlines()[1:]] == [["-", "-"]] * 4


def test_a_time_that_prices_cannot_buy_is_said(run, checkpoint, text):
    assert run("tune", checkpoint, *SIZE, "--prices", "--text", text, "-q").code == 0
    balanced = ("--preset", "balanced", "--low-precision", "none", "-p", "Once", "--max-new-tokens", 8)
    fast = run("generate", checkpoint, *SIZE, *balanced, "--tpot", "1us")
    assert fast.code == 0 and "1 us were requested and not met: give more --memory" in " ".join(fast.err.split())
    slow = run("generate", checkpoint, *SIZE, *balanced, "--tpot", "100s")
    assert slow.code == 0 and "not met" not in slow.err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--tpot", "1s"), "--prices and --tpot are two different measurements"),
        (("--max-perplexity-increase", "1%"), "--prices and --max-perplexity-increase are two different measurements"),
        (("--out", "x"), "--out has an effect only with --max-perplexity-increase; add that, or leave out --out"),
        (("--trace", "x"), "--trace has an effect only with --predictor or --shares"),
        (("--held-out", "x"), "--held-out has an effect only with --cache or --predictor"),
        (("--tokens", "0"), "greater than or equal to 1"),
    ],
)
def test_one_measurement_at_a_time_with_what_is_its_own(run, given, says):
    ran = run("tune", "demo", "--prices", *given)
    assert ran.code == 2 and says in " ".join(ran.err.split())
    assert "budget" not in ran.err, "before the model is loaded"


def test_prices_on_the_first_tokens_of_a_text(run, checkpoint, text):
    ran = run("tune", checkpoint, *SIZE, "--prices", "--text", text, "--tokens", 1)
    assert ran.code == 2 and "--text has 1 tokens" in ran.err
