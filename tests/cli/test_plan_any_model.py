"""`smoe plan` for models that smoe cannot run: a reason, and rough figures.

Would catch a plan that ends with an error, one that looks as if the model could be run, and a command that cannot work.
"""

from __future__ import annotations

import re

import pytest

from tests.rough_toys import new_folder, new_gguf


@pytest.fixture(params=["config.json", "gguf"])
def unknown(request, tmp_path):
    if request.param == "gguf":
        return new_gguf(tmp_path / "new.gguf"), "40MiB", "which smoe does not read"
    return new_folder(tmp_path / "new"), "8GiB", "neither the family 'newmoe'"


def test_the_reason_comes_first_and_a_plain_sentence_last(run, unknown):
    model, memory, words = unknown
    ran = run("plan", model, "--memory", memory)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith("smoe cannot run this model: ") and words in lines[0]
    assert lines[1] == "If it could, about:"
    assert re.fullmatch(r"Expect [\d,.]+ - [\d,.]+ tokens/s\. A 200-word answer takes .*\.", lines[-1])
    assert "experts in memory" in ran.out and "The least budget that works is " in ran.out
    assert "smoe generate" not in ran.out + ran.err and "other budgets" not in ran.out


def test_json_has_the_reason_and_the_figures(run, unknown):
    model, memory, words = unknown
    ran = run("plan", model, "--memory", memory, "--json")
    assert ran.code == 0 and ran.json["can_run"] is False and words in ran.json["cannot_run_because"]
    assert ran.json["command"] is None and ran.json["expert_bytes"] > 0 and ran.json["slots"] > 0
    low, high = ran.json["forecast"]["tokens_per_second_range"]
    assert 0 < low < high and "200-word answer" in ran.json["forecast"]["plainly"]


def test_a_profile_does_not_make_a_rough_forecast_exact(run, unknown):
    model, _, _ = unknown
    low, high = run("plan", model, "--profile", "rtx-4060-ti", "--json").json["forecast"]["tokens_per_second_range"]
    assert low < high / 2


def test_a_model_that_runs_is_called_so(run, checkpoint):
    found = run("plan", checkpoint, "--memory", "4MiB", "--json").json
    assert found["can_run"] is True and found["cannot_run_because"] is None


def test_other_commands_refuse_it(run, unknown):
    model, memory, words = unknown
    ran = run("generate", model, "--memory", memory, "-p", "x")
    assert ran.code == 2 and words in ran.err and "If it could" not in ran.err


def test_a_missing_field_is_an_error(run, tmp_path):
    ran = run("plan", new_folder(tmp_path, hidden_size=None), "--json")
    assert ran.code == 2 and "lacks the field 'hidden_size'" in ran.json["error"]["message"]
