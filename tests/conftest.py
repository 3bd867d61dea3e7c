"""The suite's options and signals. What tests are given is in `fixtures.py`, which imports the libraries: that takes as
long as a hundred tests, and a process that only hands tests out to others goes without."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported: no test may reach the network
# As `smoe` sets it, which here is imported after torch: threads of torch that wait for each other leave the core to
# whoever works. Where there are fewer cores than threads they would spin for nearly all of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

HANDS_OUT = "PYTEST_XDIST_WORKER" not in os.environ and any(word.startswith(("-n", "--numproc")) for word in sys.argv)
"""Whether this process runs no tests itself."""
if not HANDS_OUT:
    import tests.fixtures  # noqa: F401 - before the conftest of any folder, which may import Triton
DISAGREEING = ("experts", "rows", "linears", "attention", "norms")
"""What `--disagree` takes: the names in `promised.PROOFS`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--disagree",
        action="append",
        default=[],
        choices=DISAGREEING,
        help="as on a machine on which this kernel of ours gives other bits than torch (may be given several times)",
    )
    parser.addoption(
        "--object-code",
        type=Path,
        metavar="FOLDER",
        help="where compiled kernels are stored for later runs; they are found by what they are made of",
    )


pytest_plugins = ["tests.skips", "tests.slow", "pytester"]


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts the suite in the background has it ignore Ctrl-C, nohup a hangup, and so whatever the suite
    starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not HANDS_OUT or not config.getoption("numprocesses", None):  # it is 0
        config.pluginmanager.register(importlib.import_module("tests.fixtures"), "tests.fixtures")
