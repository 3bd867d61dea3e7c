from __future__ import annotations

import shutil

import pytest

from smoe.memory.emulation import read_profile

FIELDS = {
    "bytes",
    "slots",
    "resident_share",
    "floor_seconds_per_token",
    "expert_bytes",
    "bytes_per_token",
    "minimum_memory_bytes",
    "full_memory_bytes",
}


@pytest.fixture
def config_only(checkpoint, tmp_path):
    shutil.copy(checkpoint / "config.json", tmp_path)
    return tmp_path


def test_config_alone_is_enough(run, config_only, checkpoint):
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    assert value.keys() >= FIELDS
    assert sum(value["bytes"].values()) <= value["memory_budget_bytes"] == 4 << 20
    assert value["bytes"] == run("plan", checkpoint, "--memory", "4MiB", "--json").json["bytes"]


def test_floor_is_the_arithmetic_of_uniform_routing(run, config_only):
    """hidden 64, inner 32, fp32: an expert is 3 * 64 * 32 * 4 bytes; 4 of 8 a token in each of 4 layers."""
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    assert value["expert_bytes"] == 3 * 64 * 32 * 4 and value["expert_bytes_per_token"] == 16 * value["expert_bytes"]
    assert value["bytes_per_token"] == pytest.approx((1 - value["resident_share"]) * value["expert_bytes_per_token"])
    assert value["floor_seconds_per_token"] == pytest.approx(value["bytes_per_token"] / 1e8)
    assert value["floor_bound_by"] == "disk" and "uniform" in value["assumption"]


def test_the_ledger_promises_what_the_engine_then_does(run, checkpoint):
    """Planned from the config, the slots may only be fewer: the alignment of a slot is not known yet."""
    planned = run("plan", checkpoint, "--memory", "4MiB", "--json").json
    ran = run("generate", checkpoint, "--memory", "4MiB", "-p", "x", "--max-new-tokens", 2, "--json").json
    assert ran["memory_budget_bytes"] == planned["memory_budget_bytes"]
    assert planned["minimum_memory_bytes"] < planned["full_memory_bytes"]


def test_everything_fits_in_the_full_budget_and_nothing_below_the_minimum(run, config_only):
    value = run("plan", config_only, "--memory", "4MiB", "--json").json
    full = run("plan", config_only, "--memory", value["full_memory_bytes"], "--json").json
    assert full["resident_share"] == 1 and full["bytes_per_token"] == 0 and full["floor_bound_by"] == "memory"
    assert run("plan", config_only, "--memory", value["minimum_memory_bytes"], "--json").code == 0
    refused = run("plan", config_only, "--memory", value["minimum_memory_bytes"] - 1, "--json")
    assert (refused.code, refused.json["error"]["type"]) == (2, "BudgetError") and "KV cache" in refused.err


def test_the_table_names_every_part(run, config_only):
    ran = run("plan", config_only, "--memory", "4MiB")
    assert ran.code == 0
    for words in ("non-expert weights", "expert slots", "what other budgets buy", "this budget", "4 a token"):
        assert words in ran.out
    assert "equally likely" in ran.err
    assert any(line.split()[-2:] == ["this", "budget"] for line in ran.out.splitlines())
    assert not any(line.split() == ["tokens/s"] for line in ran.out.splitlines()), "a row is one line"


def test_no_config(run, tmp_path):
    ran = run("plan", tmp_path)
    assert ran.code == 2 and "config.json" in ran.err


def test_an_emulated_device_is_planned_by_its_profile(run, config_only):
    """Would catch this machine's rates (1e8 from disk) under a device that is acted."""
    asked = ("plan", config_only, "--memory", "2700KiB", "--context", 128, "--device", "emulated")
    asked += ("--profile", "rtx-4060-ti")
    value, profile = run(*asked, "--json").json, read_profile("rtx-4060-ti")
    rates = value["rates"]
    assert rates["memory_bytes_per_second"] == profile.device_bytes_per_second
    assert rates["link_bytes_per_second"] == profile.link_bytes_per_second and rates["disk_bytes_per_second"] is None
    assert "4060" in rates["source"] and rates["source"].endswith("acted")
    missed = (1 - value["resident_share"]) * value["expert_bytes_per_token"]
    assert value["bytes_per_token"] == pytest.approx(missed)
    assert value["floor_seconds_per_token"] == pytest.approx(missed / profile.link_bytes_per_second)
    assert value["floor_bound_by"] == "link"
    ran = run(*asked)
    assert "loaded" in ran.out and "read per token" not in ran.out
    assert ", acted: the floor is that machine's, with every expert in its RAM" in ran.err and "doctor" not in ran.err
    refused = run(*asked[:-1], "no-such-card")
    assert refused.code == 2 and "no device profile 'no-such-card'" in refused.err
