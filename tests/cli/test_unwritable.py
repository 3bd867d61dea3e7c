"""A home that cannot be written to. Would catch a minute of measuring whose result nobody sees."""

from __future__ import annotations

import shutil

import pytest

from smoe.machine.measure import profile_path


@pytest.fixture(autouse=True)
def no_place(tmp_path, monkeypatch):
    """A file where the cache's folder should be: fails for root too."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def test_doctor_says_so_first_and_shows_what_it_finds(run, tmp_path, quick, monkeypatch):
    said = []
    monkeypatch.setattr("smoe.machine.measure.measure_memory", lambda *_: said.append(1) or 20e9)
    ran = run("doctor", "--folder", tmp_path)
    assert ran.code == 0 and "20 GB/s" in ran.out and said
    assert "XDG_CACHE_HOME" in ran.err and "profile stored" not in ran.err
    value = run("doctor", "--folder", tmp_path, "--json").json
    assert value["memory_bytes_per_second"] == 20e9 and value["profile_path"] is None


def test_doctor_warns_before_it_measures(run, tmp_path, quick, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("smoe.machine.measure.measure_memory", fail)
    ran = run("doctor", "--folder", tmp_path)
    assert ran.code == 130 and "XDG_CACHE_HOME" in ran.err


@pytest.mark.parametrize("asked", [("--tpot", "10s"), ("--max-perplexity-increase", "50%", "--tokens", 60)])
def test_tune_shows_what_it_finds(run, checkpoint, quick, asked):
    common = ("tune", checkpoint, "--memory", "2700KiB", "--context", 128, "--text", quick)
    ran = run(*common, *asked)
    assert ran.code == 0 and "alpha" in ran.out and "XDG_CACHE_HOME" in ran.err and "stored for" not in ran.err
    assert run(*common, *asked, "--json").json["alpha"] is not None


def test_a_place_lost_meanwhile_is_survived(run, tmp_path, quick, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def measure(*_):
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("")
        return 20e9

    monkeypatch.setattr("smoe.machine.measure.measure_memory", measure)
    ran = run("doctor", "--folder", tmp_path)
    assert ran.code == 0 and "20 GB/s" in ran.out and "XDG_CACHE_HOME" in ran.err


def test_nowhere_to_measure_a_disk(run, tmp_path, quick, monkeypatch):
    """As in a container whose file systems are all read-only, but for the one of temporary files."""
    monkeypatch.setattr("smoe.machine.findings.os.access", lambda path, mode: False)
    monkeypatch.setattr("smoe.machine.findings.gettempdir", lambda: str(tmp_path), raising=False)
    ran = run("doctor")
    assert ran.code == 0 and "20 GB/s" in ran.out


@pytest.mark.parametrize("more", [(), ("--quiet",)])
def test_other_commands_do_without_and_warn_once(run, checkpoint, more):
    ran = run("generate", checkpoint, "--memory", "64MiB", "-p", "x", "--max-new-tokens", 2, *more)
    assert ran.code == 0 and not profile_path().exists()
    assert ran.err.count("warning:") == ran.err.count("compiled kernels and measurements are not stored") == 1
    assert "XDG_CACHE_HOME" in ran.err


def test_a_command_that_stores_a_result_warns_once(run, checkpoint, quick):
    ran = run("tune", checkpoint, "--memory", "2700KiB", "--context", 128, "--text", quick, "--tpot", "10s")
    assert ran.code == 0 and ran.err.count("XDG_CACHE_HOME") == 1, ran.err
