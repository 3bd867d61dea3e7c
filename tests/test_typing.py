"""What a type checker makes of a user's program. Would catch a package that counts as untyped (everything is Any)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import smoe
from smoe import Cancellation, from_pretrained

model = from_pretrained("demo", memory="24MiB", context_tokens=512)
stop = Cancellation()
model.generate(max_new_tokens=5, stopping_criteria=[stop])
with model.offload as engine:
    ratio: float = engine.stats().hit_ratio
    was_running: bool = model.offload.cancel()

def use(model: smoe.OffloadedModel) -> int:
    return model.offload.context_tokens

use(model)
"""
WRONG = {
    "model.offload.stat()": '"Engine" has no attribute "stat"',
    "model.offload.cancel(3)": 'Too many arguments for "cancel" of "Engine"',
    "model.offload.stats().hit_ratio.upper()": '"float" has no attribute "upper"',
    "stop.cancel(3)": 'Too many arguments for "cancel" of "Cancellation"',
    "from_pretrained(memory=[1])": 'Argument "memory" to "from_pretrained" has incompatible type "list[int]"',
}
HEAVY = ("torch", "transformers", "numpy")
"""Following these takes mypy minutes; what they say of themselves is theirs to test."""


@pytest.mark.slow
def test_a_program_is_checked_against_our_types(tmp_path: Path) -> None:
    """As installed, with nothing but the marker to tell mypy of our types."""
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(PROGRAM + "\n".join(WRONG) + "\n")
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in HEAVY)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n" + skipped)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "right.py", "wrong.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    errors = [line for line in said.splitlines() if ": error: " in line]
    first = PROGRAM.count("\n") + 1
    assert len(errors) == len(WRONG), said
    for line, (number, expected) in zip(errors, enumerate(WRONG.values(), first), strict=True):
        assert line.startswith(f"wrong.py:{number}: error: {expected}"), said
