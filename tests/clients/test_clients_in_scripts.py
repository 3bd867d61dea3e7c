"""Clients that run in a process of their own, each by a script of `tests/clients/scripts`: those for JavaScript, and
those whose requirements exclude the suite's. `make test-optional` installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.scripted import RESULT
from tests.server.conftest import PATIENCE_SECONDS, Running

SCRIPTS = Path(__file__).parent / "scripts"
PACKAGES = Path(os.environ.get("SMOE_NPM", "/nonexistent")) / "node_modules"
LLAMA_INDEX = os.environ.get("SMOE_LLAMA_INDEX", "")


def check(running: Running, line: Sequence[str], folder: Path) -> None:
    """Run a script in a folder; it asserts what the client promises."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "URL": running.url,
        "KEY": "a-key",
        "RESULT": RESULT,
    }
    ran = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS
    )
    assert ran.returncode == 0 and ran.stdout == "all right\n", ran.stdout + ran.stderr


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="SMOE_NPM names no packages of npm")
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.mjs")), ids=lambda path: path.stem)
def test_clients_for_javascript_are_served(running: Running, script: Path, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    shutil.copy(script, tmp_path)
    check(running, ["node", script.name], tmp_path)


@pytest.mark.skipif(not LLAMA_INDEX, reason="SMOE_LLAMA_INDEX names no Python with LlamaIndex")
def test_llama_index_is_served(running: Running, tmp_path: Path) -> None:
    check(running, [LLAMA_INDEX, str(SCRIPTS / "llama_index_client.py")], tmp_path)
