"""Commands on a checkpoint whose experts are in MXFP4: what they count is what is stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import mxfp4_toy, zoo
from tests.models.test_mxfp4_experts import EXPERT_BYTES
from tests.toy import ascii_tokenizer

SMALL = ("--memory", "8MiB", "--context", "96")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    tokenizer = ascii_tokenizer()
    mxfp4_toy.save(folder, vocab_size=len(tokenizer), eos_token_id=len(tokenizer) - 1)
    tokenizer.save_pretrained(folder)
    return folder


def test_generate_writes_text(run, folder):
    ran = run("generate", folder, *SMALL, "-p", "Hello", "--max-new-tokens", "8")
    assert ran.code == 0 and ran.out.strip()


def test_plan_counts_stored_bytes(run, folder):
    found = run("plan", folder, "--json", *SMALL).json
    assert found["expert_bytes"] == EXPERT_BYTES and found["experts_bytes"] == 4 * zoo.EXPERTS * EXPERT_BYTES
    assert found["expert_bytes_per_token"] == 4 * 2 * EXPERT_BYTES
    ran = run("plan", folder, *SMALL)
    assert ran.code == 0 and "its quantised formats, computed in bfloat16" in " ".join(ran.out.split())


def test_the_least_budget_works_and_less_is_refused(run, folder):
    least = run("plan", folder, "--json", *SMALL).json["minimum_memory_bytes"]
    asked = ("--context", "96", "-p", "Hello", "--max-new-tokens", "2")
    assert run("generate", folder, "--memory", least + 2**16, *asked).code == 0
    ran = run("generate", folder, "--memory", least // 2, *asked)
    assert ran.code == 2 and "expert" in ran.err


def test_verify_compares_with_the_dequantised_numbers(run, folder):
    ran = run("verify", folder, *SMALL)
    assert ran.code == 0 and "differs" not in ran.out, ran.out
    found = run("verify", folder, *SMALL, "--json").json
    assert found["not_compared"] == [] and {entry["part"] for entry in found["layers"]} >= {"experts", "mlp"}


def test_verify_needs_room_for_the_numbers_of_a_layer(run, folder, monkeypatch):
    """As the library has them: four times what is stored."""
    plain = 2 * zoo.EXPERTS * (64 * 64 + 64 * 32 + 64 + 64)
    for free in (plain, 10 * plain):
        monkeypatch.setattr("smoe.report.verify.free_device_bytes", lambda device, free=free: (free, "available RAM"))
        ran = run("verify", folder, *SMALL)
        assert (ran.code == 0) is (free > plain) and ("one layer's experts" in ran.err) is (free == plain)


def test_packed_as_it_is_it_says_the_same(run, folder, tmp_path):
    """Codes, scales and biases in one piece; the type that is computed in has no part in it."""
    model = shutil.copytree(folder, tmp_path / "model")
    asked = ("generate", model, *SMALL, "-p", "Hello", "--max-new-tokens", "8", "--json")
    before = run(*asked).json
    ran = run("pack", model, "--dtype", "float32")
    assert ran.code == 2 and "leave out --dtype" in ran.err and not list(model.glob("*.smoe"))
    ran = run("pack", model)
    assert ran.code == 0 and "as they are stored" in ran.err, ran.err
    assert "relative" not in ran.err, "nothing was quantised"
    assert run(*asked).json["token_ids"] == before["token_ids"]
    assert run("verify", model, *SMALL).code == 0
    assert "already packed" in run("pack", model).err


def test_a_lower_copy_is_verified(run, folder):
    assert run("pack", folder, "--precision", "int2").code == 0
    ran = run("verify", folder, *SMALL, "--precision", "int2")
    assert ran.code == 0 and "equal up to rounding:" in ran.out, ran.out
