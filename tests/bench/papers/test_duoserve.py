"""DuoServe-MoE's settings: what must come out of them whatever the routing.

Would catch: a system that does not do what its name says, loads that nobody pays for, a claim taken from other rows.
"""

from __future__ import annotations

import pytest

from bench.papers import duoserve
from bench.papers.claims import Reproduction, Setting
from bench.papers.duoserve import AS_IMPLIED, DEVICES, EXPERTS, MODELS, TOP_K, implied_layer_seconds
from smoe.memory.emulation import read_profile
from tests.bench.papers.shorter import reproduced


@pytest.fixture(scope="module")
def found() -> Reproduction:
    return reproduced(duoserve, 16, NEW_TOKENS=8, PROMPT_TOKENS=24)


def rows(found: Reproduction) -> list[dict[str, Setting]]:
    by_name: dict[str, dict[str, Setting]] = {}
    for setting in found.settings:
        by_name.setdefault(setting.name, {})[setting.system] = setting
    return list(by_name.values())


def test_a_token_takes_the_loads_that_its_system_makes(found: Reproduction) -> None:
    """On demand two experts a layer, whole layers eight, and nothing is faster than its loads."""
    for row in rows(found):
        model = next(model for model in MODELS if row["accelerate"].name.startswith(model.name))
        profile = read_profile(next(device for device in DEVICES if device in row["accelerate"].name))
        load = profile.link_seconds(model.expert_bytes(4.25))
        assert row["moesys"].seconds_per_token >= 0.95 * EXPERTS * model.layers * load
        on_demand = row["accelerate"].seconds_per_token
        assert on_demand >= 0.8 * TOP_K * model.layers * load, "a prompt leaves a few of them here"
        assert on_demand <= model.layers * (TOP_K * load + 1.5 * implied_layer_seconds(model, profile) + 2e-3)


def test_a_predictor_pays_where_there_is_work_to_hide_loads_behind(found: Reproduction) -> None:
    for row in rows(found):
        gain = row["accelerate"].seconds_per_token / row["duoserve"].seconds_per_token
        assert (gain > 1.1) == (AS_IMPLIED in row["duoserve"].name)


def test_a_prompt_that_streams_is_no_slower(found: Reproduction) -> None:
    for row in rows(found):
        assert row["duoserve"].ttft_seconds <= row["accelerate"].ttft_seconds
        assert row["ours on demand"].ttft_seconds == pytest.approx(row["duoserve"].ttft_seconds, rel=0.01)
        assert row["accelerate"].memory_bytes < row["duoserve"].memory_bytes < row["moesys"].memory_bytes


def test_claims_are_ratios_of_the_rows(found: Reproduction) -> None:
    (claim,) = [each for each in found.claims if "Orca" in each.what and each.case == AS_IMPLIED]
    ratios = [
        row["accelerate"].end_to_end_seconds / row["duoserve"].end_to_end_seconds
        for row in rows(found)
        if "Orca" in row["duoserve"].name and AS_IMPLIED in row["duoserve"].name
    ]
    assert claim.ours == (min(ratios), max(ratios))
    assert any("synthetic" in remark for remark in found.remarks)
