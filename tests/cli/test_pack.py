from __future__ import annotations

import pytest

from smoe.models import packed
from tests.toy import save_toy


@pytest.fixture
def mixtral(tmp_path):
    """A family whose experts are scattered: gate and up are not neighbours."""
    return save_toy(tmp_path / "model", "mixtral")


def _packed(folder):
    return [path for path in folder.iterdir() if path.name.startswith("experts.")]


def test_packed_model_says_the_same(run, mixtral):
    asked = ("generate", mixtral, "--memory", "64MiB", "-p", "Hello", "--max-new-tokens", 12, "--json")
    before = run(*asked).json["token_ids"]
    ran = run("pack", mixtral)
    assert ran.code == 0 and ran.out.strip() == str(_packed(mixtral)[0])
    assert run(*asked).json["token_ids"] == before
    assert run("verify", mixtral, "--memory", "64MiB").code == 0


def test_a_good_pack_is_left_alone(run, mixtral):
    run("pack", mixtral)
    written = _packed(mixtral)[0].stat().st_mtime_ns
    assert "packed already" in run("pack", mixtral).err
    assert _packed(mixtral)[0].stat().st_mtime_ns == written
    run("pack", mixtral, "--force")
    assert _packed(mixtral)[0].stat().st_mtime_ns != written


def test_for_programs_one_object_says_what_was_packed(run, mixtral):
    """All there is on stdout; a pack that is there already is said in a key."""
    asked = ("pack", mixtral, "--dtype", "bfloat16", "--json")
    found = run(*asked).json
    (path,) = _packed(mixtral)
    assert found == {
        "file": str(path),
        "model": str(mixtral),
        "dtype": "bfloat16",
        "experts": 4 * 8,
        "bytes": path.stat().st_size,
        "was_packed_before": False,
    }
    again = run(*asked)
    assert again.json == found | {"was_packed_before": True} and "packed already" not in again.out
    assert run(*asked, "--force").json == found


def test_for_programs_an_interrupt_is_an_object(run, mixtral, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(packed, "_expert_bytes", interrupted)
    ran = run("pack", mixtral, "--json")
    assert ran.code == 130 and ran.json["error"]["type"] == "Interrupted"


def test_a_truncated_pack_is_refused_and_packed_again(run, mixtral):
    run("pack", mixtral)
    path = _packed(mixtral)[0]
    path.write_bytes(path.read_bytes()[:-4096])
    ran = run("generate", mixtral, "--memory", "64MiB", "-p", "x")
    assert ran.code == 2 and "truncated" in ran.err
    assert run("pack", mixtral).code == 0
    assert run("generate", mixtral, "--memory", "64MiB", "-p", "x", "--max-new-tokens", 1).code == 0


def test_interrupt_leaves_nothing(run, mixtral, monkeypatch):
    whole = packed._expert_bytes
    calls = []

    def third_is_interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            assert any("partial" in path.name for path in _packed(mixtral))
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(packed, "_expert_bytes", third_is_interrupted)
    ran = run("pack", mixtral)
    assert ran.code == 130 and _packed(mixtral) == []


def test_too_little_disk_is_refused_before_writing(run, mixtral, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda where: type("Usage", (), {"free": 1000})())
    ran = run("pack", mixtral)
    assert ran.code == 2 and "needs" in ran.err and "free" in ran.err and _packed(mixtral) == []
