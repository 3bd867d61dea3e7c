"""The kernels, compiled for GPUs that are not here: Triton's wheel has all that it takes.

In a process of its own, as this one's Triton interprets. Would catch text that the interpreter takes and the compiler
does not, a tile too large for a thread's registers, an address that Triton no longer knows to be aligned: each weight
would be loaded byte by byte.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smoe.gpu_kernels.compiled import is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="Triton is not installed")
ROOT = Path(__file__).parent.parent.parent


def compiled(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench.gpu.compiled", "--hidden", "1024", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_for_one_token(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--formats", "bf16,Q4_K,MXFP4,FP8,IQ4_XS", "--capability", "90")
    assert [row["kernel"] for row in rows] == ["experts_of", "weighted_sum"] * 5
    assert not any(row["spilled_bytes"] for row in rows), rows
    wide = [row for row in rows if row["format"] in ("bf16", "Q4_K") and row["kernel"] != "weighted_sum"]
    assert all("16 bytes" in row["loads"] for row in wide), "what lies aligned is loaded 16 bytes at a time"
