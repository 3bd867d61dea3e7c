"""What the process grows by outside the ledger: in a process of its own, from the first short request on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MOST_MIB = 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system does not say what it holds"),
]


def measured(case: str, **options: object) -> dict:
    command = [sys.executable, "-m", "bench.process_memory", "--here", "--case", case]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    own = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, env=own)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("case", "dtype"), [("demo-soak", "float32"), ("demo-lending-soak", "bfloat16")])
def test_long_prompts_and_random_requests_grow_the_process_by_little(case, dtype):
    """Would catch a library that keeps a kernel for every number of rows (245 MiB and 316 MiB), and memory that is lent
    to experts and taken back without being freed."""
    found = measured(case, soak=4, dtype=dtype)
    assert found["lent_mib"] > 0 or case == "demo-soak"
    assert found["grown_since_first_request_mib"] <= MOST_MIB
    assert found["grown_in_the_second_half_mib"] <= 16 + found["lent_mib"]


def test_a_run_stays_inside_what_its_plan_says():
    """Line by line, each in a new process: a forked one does not count the pages of program files that it shares."""
    asked = ["--memory", "20MiB", "--context", "512", "--json"]
    plan = by_command("plan", "demo", *asked)
    run = ["generate", "demo", *asked, "-p", "Once upon a time " * 60, "--max-new-tokens", "8"]
    by_command(*run)  # compiles modules, which takes memory of its own
    ran = by_command(*run)["process"]
    libraries, tokenizer, code, scratch = plan["beside_budget_bytes"].values()
    assert ran["libraries_bytes"] <= libraries + tokenizer + code
    assert ran["budget_bytes"] <= 20 << 20
    assert ran["scratch_bytes"] <= scratch


def by_command(*words: str) -> dict:
    line = [sys.executable, "-m", "smoe", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
