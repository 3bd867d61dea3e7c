"""Ctrl-C while the program is being imported, at every module that it imports: one line and exit code 130.

Would catch an import that comes before the handler, a traceback, a library whose user loses Ctrl-C.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoe

SOURCE = Path(smoe.__file__).parents[1]
INTERRUPTED = """
import sys, _signal
sys.argv[:] = [{script!r}, "--help"]
sys.path.insert(0, {source!r})
for name in [name for name in sys.modules if name.split(".")[0] == {module!r}]:
    del sys.modules[name]  # what this Python's own start has loaded
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            _signal.raise_signal(_signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from smoe.__main__ import main
main()
"""


def run(script: str, module: str) -> subprocess.CompletedProcess[str]:
    code = INTERRUPTED.format(script=script, source=str(SOURCE), module=module)
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["logging", "smoe.__main__", "smoe.cli"])
@pytest.mark.parametrize("script", ["/usr/bin/smoe", "smoe.exe"])
def test_the_program_ends_with_one_line(script: str, module: str) -> None:
    done = run(script, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_program_that_imports_us_answers_itself() -> None:
    assert "KeyboardInterrupt" in run("theirs.py", "logging").stderr


def test_what_is_ignored_or_answered_stays_so() -> None:
    code = (
        "import signal\n"
        "from smoe.early_interrupt import leave_on_interrupt\n"
        "for handler in (signal.SIG_IGN, print):\n"
        " signal.signal(signal.SIGINT, handler)\n"
        " leave_on_interrupt()\n"
        " assert signal.getsignal(signal.SIGINT) is handler\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
