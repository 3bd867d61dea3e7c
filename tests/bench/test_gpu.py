"""`make gpu` without a GPU: every part runs small, and a run that was cut off goes on where it was.

Would catch: a script that fails on its first day with a GPU for a reason that any machine would have shown.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import link, parts
from bench.gpu.parts import PARTS, Bench
from smoe.models.files import fetch
from tests.memory.fake_streams import PumpedStreams

SMALL = ("environment", "tests", "link", "slot_kernels", "wide_model")


@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in PARTS]
)
def test_every_part_runs_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "tests":
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("SMOE_MAX_CPU_ISA", "none")  # on some CPUs our kernels would add bf16 in their own order
    figures = PARTS[name].run(Bench(tmp_path, is_dry=True))
    gpu.save(tmp_path, name, figures)
    assert json.loads(gpu.file_of(tmp_path, name).read_text())["part"] == name
    if name == "exactness":
        assert all(row["relative_error"]["cpu"] <= 1e-5 for row in figures["rows"])
    if name == "slot_kernels" and "skipped" not in figures:
        assert all(row["relative_error"] <= 1e-5 for row in figures["errors"])
        assert all(row["eager_seconds"] > 0 and row["torch_seconds"] > 0 for row in figures["rows"])
    if name.startswith("decode"):
        assert all(row["tpot_seconds"] > 0 and row["ttft_seconds"] > 0 for row in figures["rows"])


def test_the_wide_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((fetch("demo", None) / "config.json").read_text())
    monkeypatch.setattr(parts, "WIDE_HIDDEN", config["hidden_size"])
    monkeypatch.setattr(parts, "WIDE_EXPERT", config["moe_intermediate_size"])
    folder = Bench(tmp_path, is_dry=False).wide()
    written = (folder / "config.json").stat().st_mtime_ns
    assert Bench(tmp_path, is_dry=False).wide() == folder
    assert (folder / "config.json").stat().st_mtime_ns == written


def test_the_link_is_measured_through_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CudaStreams", lambda _: PumpedStreams(bytes_per_ms=2**24))
    monkeypatch.setattr(link.torch.cuda, "synchronize", lambda _: None)
    source = torch.randint(0, 255, (5 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    rates = link._our_rates(torch.device("cpu"), source, target)
    assert len(rates) == 8 and all(rate > 0 for rate in rates.values())
    assert torch.equal(source, target)
    target.zero_()
    assert link._rate(torch.device("cpu"), link._copies(source, target, 1 << 20), source.numel()) > 0
    assert torch.equal(source, target)


def test_the_parts_fit_into_their_time() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= gpu.TOTAL_SECONDS == 35 * 60
    assert all(part.seconds < 9 * 60 for part in PARTS.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--out", str(tmp_path)])
    assert gpu.main() == gpu.NO_GPU
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "no CUDA device" in lines[0]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "psutil" else object())
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    assert gpu.main() == 2
    assert "lacks psutil" in capsys.readouterr().err


WORKER = """
import json, pathlib, sys, time
name, out = sys.argv[sys.argv.index("--only") + 1], pathlib.Path(sys.argv[1])
with (out / "began").open("a") as began:
    began.write(name + " ")
time.sleep(60 if name == "slow" else 0)
if name == "bad":
    sys.exit("no")
(out / f"{name}.json").write_text(json.dumps({"part": name}))
"""


def run(tmp_path: Path, limits: dict[str, int], total: float = 100) -> int:
    return gpu.run_missing(limits, tmp_path, [sys.executable, "-c", WORKER, str(tmp_path)], total)


def test_a_part_with_a_file_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {"first": 30, "bad": 30, "last": 30}
    assert run(tmp_path, limits) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["bad"]
    assert run(tmp_path, limits) == 1
    assert (tmp_path / "began").read_text().split() == ["first", "bad", "last", "bad"]
    (tmp_path / "bad.json").write_text("{}")
    assert run(tmp_path, limits) == 0


def test_a_part_ends_with_its_time_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run(tmp_path, {"slow": 2, "last": 30}) == 1
    assert time.monotonic() - began < 50, "it was not waited for"
    assert json.loads(capsys.readouterr().out) == {"parts": ["last"], "failed": ["slow"], "out": str(tmp_path)}


def test_no_part_begins_when_all_time_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, {"first": 30}, total=0) == 1
    assert "no time left" in capsys.readouterr().err
    assert not (tmp_path / "began").exists()
