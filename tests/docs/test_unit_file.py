"""The unit file for systemd in the documentation. Would catch an option that systemd does not know, one with which no
kernel runs, and a server that counts as failed after a hang-up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def unit() -> str:
    found = re.search(r"```ini\n(.*?)```", PAGE.read_text(encoding="utf8"), re.DOTALL)
    assert found is not None
    return found[1]


def values() -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit().splitlines() if "=" in line)


def test_generated_machine_code_may_run() -> None:
    assert "MemoryDenyWriteExecute" not in values()
    assert "AF_NETLINK" in values()["RestrictAddressFamilies"].split(), "the addresses of --host 0.0.0.0 need it"


def test_every_signal_ends_it_well_and_in_time() -> None:
    assert values()["SuccessExitStatus"].split() == ["129", "130", "143"]
    drain = re.search(r"--drain (\d+)", values()["ExecStart"])
    assert drain is not None and int(values()["TimeoutStopSec"]) > int(drain[1])


def test_systemd_knows_every_option(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    file = tmp_path / "smoe.service"
    file.write_text(unit().replace("/usr/local/bin/smoe", sys.executable))
    ran = subprocess.run([program, "verify", str(file)], capture_output=True, text=True, timeout=60)
    assert str(file) not in ran.stderr, ran.stderr
