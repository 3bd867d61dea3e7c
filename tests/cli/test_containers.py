"""Commands in a container that limits memory and CPU time, by files such as the kernel shows there.

Would catch a budget beyond the container's limit that is accepted in silence, threads that share one CPU's quota.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from smoe import from_pretrained
from smoe.cli.options import EngineOptions, in_container
from smoe.machine import cgroup

LIMIT, USED, CACHE = 900 << 20, 850 << 20, 350 << 20
"""400 MiB are left."""


@pytest.fixture(autouse=True)
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, process = tmp_path / "sys/fs/cgroup", tmp_path / "proc/self"
    limits.mkdir(parents=True)
    process.mkdir(parents=True)
    (process / "cgroup").write_text("0::/docker/4f\n")
    (limits / "memory.max").write_text(f"{LIMIT}\n")
    (limits / "memory.current").write_text(f"{USED}\n")
    (limits / "memory.stat").write_text(f"anon 5\ninactive_file {CACHE}\n")
    (limits / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(cgroup, "_SYSTEM", tmp_path)


def test_a_budget_above_what_is_left_is_printed_with_both_numbers(run, checkpoint):
    ran = run("generate", checkpoint, "-p", "x", "--max-new-tokens", 2, "--memory", "3GiB", "--context", 64)
    assert ran.code == 0
    lines = [line for line in ran.err.splitlines() if "3.00 GiB" in line and "400 MiB" in line.replace("400.0", "400")]
    assert len(lines) == 1 and "memory limit of this container" in lines[0]
    fitting = run("generate", checkpoint, "-p", "x", "--max-new-tokens", 2, "--memory", "4MiB", "--context", 64)
    assert "memory limit" not in fitting.err


def test_a_plan_has_the_same_line(run, checkpoint):
    remarks = run("plan", checkpoint, "--memory", "3GiB", "--json").json["remarks"]
    assert any("3.00 GiB" in line and "400" in line for line in remarks)


def test_the_host_tier_counts_beside_an_emulated_device(run, checkpoint):
    sizes = ["--memory", "200MiB", "--host-memory", "300MiB", "--device", "emulated"]
    assert "500 MiB is above" in run("generate", checkpoint, "-p", "x", "--max-new-tokens", 1, *sizes).err


def test_pages_of_files_are_no_reason_to_refuse(run, checkpoint):
    """The rest of the limit is in use by 50 MiB only: a margin of 256 MiB would leave nothing of it."""
    ran = run("generate", checkpoint, "-p", "x", "--max-new-tokens", 2, "--context", 64)
    assert ran.code == 0, ran.err


def test_a_library_call_logs_it(checkpoint, caplog):
    with from_pretrained(checkpoint, memory="3GiB", context_tokens=64).offload:
        assert "3.00 GiB" in caplog.text


def test_a_quota_bounds_the_computing_threads_and_the_readers(checkpoint):
    torch.set_num_threads(4)
    with from_pretrained(checkpoint, memory="4MiB", context_tokens=64).offload as engine:
        assert torch.get_num_threads() == 1
        assert len(engine._transfers._threads) == 1
    torch.set_num_threads(4)
    with from_pretrained(checkpoint, memory="4MiB", context_tokens=64, threads=3).offload:
        assert torch.get_num_threads() == 3, "as asked"


def test_what_serves_takes_the_container_for_itself():
    """What is left, and what this process holds; less is taken where less is asked for, and other commands share."""
    held = psutil.Process().memory_info().rss
    config = in_container(EngineOptions().config(4))
    assert config.count == "process" and config.memory_bytes == pytest.approx(held + (400 << 20) - (48 << 20), rel=0.05)
    assert in_container(EngineOptions(memory="4MiB").config()).memory_bytes == 4 << 20
    assert in_container(EngineOptions(resident="40%").config()).memory_bytes is None
    assert in_container(EngineOptions(device="emulated").config()).memory_bytes is None


@pytest.mark.parametrize("command", [["serve", "--port", 0], ["chat"]], ids=lambda command: command[0])
def test_these_take_it(command, run, checkpoint, monkeypatch):
    """Would catch one that leaves it out: with a process of 1 MiB no model can be held."""
    monkeypatch.setattr("smoe.machine.available_memory.container_bytes", lambda: 1 << 20)
    ran = run(*command, checkpoint, "--context", 64)
    assert ran.code == 2 and "a process of 1.00 MiB cannot hold" in ran.err


def test_a_process_is_given_its_size(run, checkpoint):
    """The budget is what the rest leaves, and a process that cannot be is refused with what it takes."""
    asked = ["-p", "x", "--max-new-tokens", 2, "--context", 64]
    given = run("generate", checkpoint, *asked, "--process-memory", "1500MiB", "--json").json
    assert 0 < given["memory_budget_bytes"] < 1500 << 20
    refused = run("generate", checkpoint, *asked, "--process-memory", "100MiB")
    assert refused.code == 2 and "interpreter and libraries" in refused.err and "a process of 100 MiB" in refused.err
    both = run("generate", checkpoint, *asked, "--process-memory", "1500MiB", "--memory", "4MiB")
    assert both.code == 2 and "give one of them" in both.err
