"""What a type checker makes of a user's program. Would catch a package that counts as untyped (everything is Any)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENTS = Path(__file__).parents[1]
(README,) = re.findall(r"^```python\n(.*?)^```", (DOCUMENTS / "README.md").read_text(encoding="utf8"), re.S | re.M)
PROGRAM = """\
import smoe
from smoe import Cancellation, from_pretrained

model = from_pretrained("demo", memory="24MiB", context_tokens=512)
stop = Cancellation()
tokens = model.generate(max_new_tokens=5, stopping_criteria=[stop])
logits = model(tokens, past_key_values=model.offload.new_cache()).logits
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
    "model.generate(stopping_criteria=stop)": 'Argument "stopping_criteria" to "generate" of "OffloadedModel" has inc',
    "from_pretrained(memory=[1])": 'Argument "memory" to "from_pretrained" has incompatible type "list[int]"',
}
HEAVY = ("torch", "numpy")
"""Following these takes mypy minutes. It follows transformers, whose own declaration of `generate` accepts no model."""


@pytest.mark.slow
def test_a_program_is_checked_against_our_types(tmp_path: Path) -> None:
    """As installed, with nothing but the marker to tell mypy of our types."""
    (tmp_path / "right.py").write_text(PROGRAM)
    (tmp_path / "readme.py").write_text(README)
    (tmp_path / "wrong.py").write_text(PROGRAM + "\n".join(WRONG) + "\n")
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in HEAVY)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n" + skipped)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        str(tmp_path / "cache"),
        "readme.py",
        "right.py",
        "wrong.py",
    ]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    errors = [line for line in said.splitlines() if ": error: " in line]
    first = PROGRAM.count("\n") + 1
    assert len(errors) == len(WRONG), said
    for line, (number, expected) in zip(errors, enumerate(WRONG.values(), first), strict=True):
        assert line.startswith(f"wrong.py:{number}: error: {expected}"), said
