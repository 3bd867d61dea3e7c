"""Commands on quantised releases: what they count is what is stored, and what cannot be served can be packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import released_toy, zoo
from tests.models.test_released import REORDERED
from tests.toy import ascii_tokenizer

SMALL = ("--memory", "48MiB", "--context", "96")
MATRICES = 3 * 128
"""Rows of an expert, of 128 numbers each."""


def saved(folder: Path, name: str) -> Path:
    tokenizer = ascii_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": len(tokenizer) - 1}
    released_toy.save(folder, released_toy.SCHEMES[name], **sizes)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "row_bytes"), [("fp8", 132), ("compressed int4", 4 * 21), ("awq", 4 * 21)])
def test_they_are_planned_served_and_verified(name, row_bytes, run, tmp_path):
    folder = saved(tmp_path, name)
    found = run("plan", folder, "--json", *SMALL).json
    assert found["expert_bytes"] == MATRICES * row_bytes
    assert found["experts_bytes"] == 4 * zoo.EXPERTS * MATRICES * row_bytes
    ran = run("generate", folder, *SMALL, "-p", "Hello", "--max-new-tokens", "8")
    assert ran.code == 0 and ran.out.strip()
    ran = run("verify", folder, *SMALL)
    assert ran.code == 0 and "differs" not in ran.out, ran.out
    assert run("pack", folder).code == 0
    packed = run("verify", folder, *SMALL)
    assert packed.code == 0 and "differs" not in packed.out, packed.out


def test_what_cannot_be_served_is_packed(run, tmp_path):
    folder = saved(tmp_path, REORDERED[0])
    asked = ("generate", folder, *SMALL, "-p", "Hello", "--max-new-tokens", "4")
    ran = run(*asked)
    assert ran.code == 2 and "smoe pack" in ran.err and "act-order" in ran.err
    ran = run("pack", folder)
    assert ran.code == 2 and "another order" in ran.err and "--precision" in ran.err
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((folder / "config.json").read_bytes())
    planned = run("plan", bare, *SMALL)
    assert planned.code == 2 and "smoe pack" in planned.err, "as soon as the configuration is known"
    assert run("plan", bare, *SMALL, "--precision", "int8").code == 0
    assert run("pack", folder, "--precision", "int8").code == 0
    ran = run(*asked, "--precision", "int8")
    assert ran.code == 0 and ran.out.strip()


def test_activations_in_8_bits_are_refused_where_nothing_is_multiplied_so(run, tmp_path):
    folder = saved(tmp_path, "fp8")
    ran = run("generate", folder, *SMALL, "--activations", "int8", "-p", "Hello")
    assert ran.code == 2 and "7 bits" in ran.err
