"""Importing transformers without torch's compiler. Would catch a command that imports it again, which takes a
second, and a process in which the compiler no longer works."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "sympy")
COMMAND = """
import sys
from smoe.__main__ import main
sys.argv = ["smoe", "generate", "demo", "--memory", "20MiB", "--max-new-tokens", "3", "--prompt", "Once", "--quiet"]
main()
print("\nimported:", [name for name in {left_out} if name in sys.modules])
"""
AFTERWARDS = """
import sys
from smoe.light_imports import without_compiler
with without_compiler():
    import transformers.generation.utils
assert "torch._dynamo" not in sys.modules
import torch
from transformers.masking_utils import TransformGetItemToIndex
assert torch.distributed.is_available()
with TransformGetItemToIndex():
    pass
compiled = torch.compile(lambda x: x + 1, backend="eager")
print(compiled(torch.ones(1)).item(), torch._dynamo.__name__)
"""


def ran(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.slow
def test_a_command_runs_without_the_compiler() -> None:
    assert ran(COMMAND.format(left_out=LEFT_OUT)).splitlines()[-1] == "imported: []"


@pytest.mark.slow
def test_the_compiler_works_afterwards() -> None:
    assert ran(AFTERWARDS).splitlines()[-1] == "2.0 torch._dynamo"


def test_a_package_that_needs_the_compiler_gets_it() -> None:
    from smoe.light_imports import import_lightly

    tried: list[bool] = []

    def load() -> None:
        tried.append(True)
        if len(tried) == 1:
            raise ImportError("No module named 'torch._dynamo.eval_frame'; 'torch._dynamo' is not a package")

    import_lightly(load)
    assert len(tried) == 2


def test_nothing_changes_where_transformers_is_imported_already() -> None:
    import torch
    import transformers  # noqa: F401

    from smoe.light_imports import without_compiler

    before = torch.distributed.is_available
    with without_compiler():
        assert torch.distributed.is_available is before
