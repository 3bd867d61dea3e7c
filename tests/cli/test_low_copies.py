"""Low copies of experts as people meet them: in options, summaries, forecasts, prices, checks and profiles."""

from __future__ import annotations

import json

import pytest

from smoe.cli.options import EngineOptions
from smoe.errors import ConfigError
from tests.packs import pack_folder
from tests.toy import save_toy

HOBBIT = ("--preset", "hobbit", "--prefetch", "none", "--context", 128)
FEW = ("--memory", "2700KiB")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A toy with low copies beside it."""
    folder = save_toy(tmp_path_factory.mktemp("packed"))
    pack_folder(folder, precision="int4")
    pack_folder(folder, precision="int2")
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": "once upon a time there was a cat " * 12}) + "\n")
    return path


def test_options_are_settings():
    given = EngineOptions(low_precision="int4", low_share="25%", low_threshold=0.5, low_meanwhile=True, upgrade=True)
    config = given.config()
    assert (config.low_precision, config.low_share, config.low_threshold) == ("int4", 0.25, 0.5)
    assert config.low_meanwhile and config.upgrade and config.eviction == "multidimensional", "the hobbit preset's"
    shares = EngineOptions(preset="hobbit", precision_shares="50, 45,5").config()
    assert shares.precision_shares == (50, 45, 5)


@pytest.mark.parametrize(
    ("given", "setting", "says"),
    [
        ({"low_threshold": 0.5}, "low_threshold", "has an effect only with `low_precision=int4`"),
        ({"upgrade": True}, "upgrade", "has an effect only with `low_precision=int4`"),
        ({"precision_shares": "67,30,3"}, "precision_shares", "has an effect only with `low_precision=int4`"),
        ({"preset": "hobbit", "precision_shares": "67,30"}, "precision_shares", "three numbers whose sum is 100"),
        ({"preset": "hobbit", "precision_shares": "a,b,c"}, "precision_shares", "`precision_shares` is 'a,b,c'"),
        ({"preset": "smoe", "low_precision": "int4"}, "low_threshold", "int4` would have no effect"),
        ({"preset": "hobbit", "low_threshold": 0.9}, "low_threshold", "give a lower `low_threshold` such as 0.6"),
        ({"preset": "hobbit", "low_share": "0"}, "low_share", "`low_share` is '0'"),
        ({"precision": "int3", "low_precision": "int4"}, "low_precision", "not lower .* choose one of: none, int2$"),
    ],
)
def test_what_would_have_no_effect_is_refused(given, setting, says):
    with pytest.raises(ConfigError, match=says) as error:
        EngineOptions(**given).config()
    assert error.value.setting == setting


def test_a_run_says_what_low_copies_did(run, packed):
    asked = ("generate", packed, *HOBBIT, *FEW, "--low-threshold", 0.3, "-p", "hello there", "--max-new-tokens", 12)
    value = run(*asked, "--json").json
    found = value["low_copies"]
    assert 0 < found["served"] < 1 and 0 <= found["left_out"] < 1 and found["bytes_per_token"] > 0
    assert found["served"] + found["left_out"] < 1 and found["bytes_per_token"] < value["bytes_read_per_token"]
    assert value["lossy"] == ["missing experts in int4 beyond 0.3", "none beyond 0.9"]
    said = " ".join(run(*asked).err.split())
    assert (
        "of the experts used were low-precision copies" in said
        and "of such copies read per token" in said
        and "smoe eval measures" in said
    )
    assert run("generate", packed, *FEW, "--context", 128, "-p", "x", "--json").json["low_copies"] == {}


def test_a_run_says_where_its_thresholds_come_from(run, packed):
    ran = run("generate", packed, *HOBBIT, *FEW, "-p", "hello", "--max-new-tokens", 2)
    words = " ".join(ran.err.split())
    assert (
        "--low-threshold 0.6 is used: dropped beyond 0.9: HOBBIT's own for Mixtral" in words
        and "smoe tune --shares" in words
    )


def test_a_missing_pack_says_how_to_make_one(run, checkpoint):
    ran = run("generate", checkpoint, *HOBBIT, "-p", "x")
    words = " ".join(ran.err.split())
    assert ran.code == 2 and "--low-precision int4:" in words and "run smoe pack on" in words
    assert "with --precision int4 first" in words


def test_plan_has_their_slots(run, packed):
    value = run("plan", packed, *HOBBIT, *FEW, "--json").json
    assert value["low_slots"] > 0 and 0 < value["low_copy_bytes"] < value["expert_bytes"]
    assert value["bytes"]["slots_of_low_copies"] >= value["low_slots"] * value["low_copy_bytes"]
    assert "speeds are without low copies" in str(value["remarks"])
    said = " ".join(run("plan", packed, *HOBBIT, *FEW).out.split())
    assert f"+ {value['low_slots']} low" in said and "in int4" in said and "slots of low copies" in said
    assert run("plan", packed, *FEW, "--context", 128, "--json").json["low_slots"] == 0


def test_eval_compares_them_with_the_model_itself(run, packed, text, tmp_path):
    asked = ("eval", packed, *HOBBIT, *FEW, "--low-threshold", 0.3, "--text", text, "--tokens", 60)
    ran = run(*asked, "--out", tmp_path / "out")
    exact, low = ran.json["prices"]
    assert (exact["low"], low["low"]) == ("", "int4 above 0.3, share 0.15, none above 0.9")
    assert exact["perplexity_change"] is None and low["perplexity_change"] is not None
    assert exact["kl_nats"] == 0 < low["kl_nats"] and exact["low_served_share"] == 0 < low["low_served_share"]
    assert ran.json["low"] == low["low"] and "+int4 " in ran.err
    other = run(*asked, "--low-share", "30%", "--out", tmp_path / "out").json["prices"]
    assert other[0] == exact and other[1]["low"] == "int4 above 0.3, share 0.3, none above 0.9", "measured anew"


def test_eval_says_what_each_choice_of_fewer_bits_adds(run, packed, text):
    pair = ("--precision", "int4", "--low-precision", "int2", "--low-threshold", 0.3)
    prices = run("eval", packed, *HOBBIT, *FEW, *pair, "--text", text, "--tokens", 40).json["prices"]
    assert [(price["precision"], price["low"].split(",")[0]) for price in prices] == [
        ("auto", ""),
        ("int4", ""),
        ("int4", "int2 above 0.3"),
    ]


def test_verify_checks_the_model_and_its_low_copies(run, packed):
    """The exact experts once more, or other numbers than the pack's, would differ by a tenth."""
    ran = run("verify", packed, *HOBBIT, "--memory", "64MiB", "--json")
    parts = {entry["part"] for entry in ran.json["layers"]}
    assert ran.code == 0 and {"experts", "low copies"} <= parts and ran.json["is_good"]
    own = [entry for entry in ran.json["layers"] if entry["part"] == "experts"]
    low = [entry for entry in ran.json["layers"] if entry["part"] == "low copies"]
    assert len(own) == len(low) and all(entry["is_equal"] for entry in own), "T1 and T2 are not asked"


def test_tune_profiles_a_text_and_presets_use_it(run, packed, text, tmp_path):
    asked = ("tune", packed, "--memory", "64MiB", "--context", 128, "--shares", "60,30,10")
    ran = run(*asked, "--text", text, "--tokens", 120)
    assert ran.code == 0 and ran.out.startswith("T1 0.") and "for shares of 60,30,10, by 120 tokens of" in ran.out
    assert "stored for --precision-shares and --preset hobbit" in ran.err
    said = " ".join(run("generate", packed, *HOBBIT, *FEW, "-p", "x", "--max-new-tokens", 2).err.split())
    assert "shares of 67/30/3 as you profiled it: 120 tokens of text.jsonl" in said
    trace = tmp_path / "run.trace"
    assert run("record", packed, "--memory", "64MiB", "--context", 128, "--text", text, "--out", trace).code == 0
    found = run(*asked, "--trace", trace, "--json").json
    assert 0 < found["low_threshold"] < found["skip_threshold"] < 1 and found["text"] == "run.trace"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("--trace", "run.trace"), "--trace has an effect only with --predictor or --shares"),
        (("--shares", "67,30,3", "--tpot", "80ms"), "are two different measurements"),
        (("--shares", "67,30,3", "--text", "a.txt", "--trace", "run.trace"), "both give the data to profile"),
        (("--shares", "67,30"), "--precision-shares is"),
        (("--shares", "67,30,3", "--tokens", 20), "at least 100 are needed"),
    ],
)
def test_tunings_that_are_refused(run, packed, asked, says):
    ran = run("tune", packed, *asked)
    assert ran.code == 2 and says in " ".join(ran.err.split())
