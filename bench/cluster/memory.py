"""What a worker of the embedded model holds in memory: with torch, and without.

    python -m bench.cluster memory [--python PYTHON] [--slots 1,64] [--tokens 60] [--out FILE.json]

Workers are started as users start them (`smoe cluster join`), on this machine, one at a time; a main writes a text with
every missing expert computed by the worker, which is compared with the text of one process alone. PYTHON is an
interpreter for the workers without torch, best one that has none installed. Linux; needs neither root nor a network.

*Resident at most* is of the worker's process (VmHWM; one without torch begins anew when it has read its options); *with
what it starts* is the most that it and its children held at one moment, looked at every few milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.cluster.child import ChildError
from bench.cluster.results import write
from smoe.cluster.stored_identity import invitation, new_coordinator, store_coordinator
from smoe.models.files import DEMO_FOLDER

IS_NETWORKED = False
_MIB = 2**20
_TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside. One day, she saw a big tree and"
)
_SAMPLE_SECONDS = 0.003
_PATIENCE_SECONDS = 90.0
_STAGES = {
    "python": "pass",
    "what begins a worker: keys, JSON, hashes": "import smoe.light_worker",
    "numpy": "import numpy",
    "messages": "import smoe.cluster.described",
    "the worker": "import smoe.cluster.worker",
    "files and slots": "import smoe.load.light_experts",
    "a connection (CURVE)": "import zmq; _context = zmq.Context(); _socket = _context.socket(zmq.DEALER)\n"
    "_socket.curve_publickey, _socket.curve_secretkey = _keys = zmq.curve_keypair()\n"
    "_socket.curve_serverkey = _keys[0]; _socket.connect('tcp://127.0.0.1:9')",
}
"""In this order, in one process."""
_ALONE = (
    "numpy",
    "zmq",
    "psutil",
    "typer",
    "rich.console",
    "llvmlite.ir",
    "llvmlite.binding",
    "smoe.cli",
    "transformers",
    "torch",
)
"""Each in a process of its own."""


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", default=sys.executable, help="for workers without torch")
    parser.add_argument("--slots", default="1,64", help="rooms to measure")
    parser.add_argument("--tokens", type=int, default=60)


def run(options: argparse.Namespace) -> None:
    slots = [int(each) for each in options.slots.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        alone = _written(Path(folder), options.tokens, None)
        kinds = {"with torch": (sys.executable, "--torch"), "without": (options.python, "--no-torch")}
        cells = [
            {"worker": kind, "slots": count}
            | _measured(Path(folder) / f"{kind}{count}", python, option, count, options.tokens, alone)
            for kind, (python, option) in kinds.items()
            for count in slots
        ]
    found = {
        "model": DEMO_FOLDER.name,
        "workers": cells,
        "stages_without_torch": _stages(options.python),
        "imported_alone": {name: _imported(name) for name in _ALONE},
        "torch_where_without": _has(options.python, "torch"),
    }
    options.python = Path(options.python).name  # where it lies is nobody's business
    write(options, found, _table(found))


def _measured(folder: Path, python: str, option: str, slots: int, tokens: int, alone: str) -> dict[str, Any]:
    """One worker that has written a text for a main, and waits for the next."""
    folder.mkdir()
    main = new_coordinator("bench", f"127.0.0.1:{_a_free_port()}")
    os.environ["XDG_CONFIG_HOME"] = str(folder / "main")
    expecting, line = invitation(main)
    store_coordinator(expecting)
    joined = [python, "-m", "smoe", "cluster", "join", line, "demo", "--slots", str(slots), "--threads", "1", option]
    with (folder / "log").open("wb") as log:
        worker = subprocess.Popen(
            joined, env=os.environ | {"XDG_CONFIG_HOME": str(folder / "worker")}, stdout=log, stderr=log
        )
    peak = _Peak(worker.pid)
    try:
        text = _written(folder, tokens, main.name)
        found = _rollup(worker.pid) | {"resident at most": _status(worker.pid, "VmHWM")}
    except (ChildError, OSError) as error:
        raise ChildError(f"{error}\n{(folder / 'log').read_text(errors='replace')[-2000:]}") from error
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(20)
    return found | {"with what it starts": peak.end(), "same text": text == alone}


def _written(folder: Path, tokens: int, cluster: str | None) -> str:
    """What a main writes, with a worker or alone."""
    given = [] if cluster is None else ["--cluster", cluster, "--set", "cluster_workers=1"]
    given += [] if cluster is None else ["--set", f"cluster_timeout_seconds={_PATIENCE_SECONDS:g}"]
    given += [] if cluster is None else ["--set", "placement=round-robin"]
    line = [sys.executable, "-m", "smoe", "generate", "demo", "--memory", "24MiB", "--context", "512", "--quiet"]
    line += ["-p", _TEXT, "--max-new-tokens", str(tokens), *given]
    done = subprocess.run(line, capture_output=True, text=True, timeout=2 * _PATIENCE_SECONDS)
    if done.returncode:
        raise ChildError(f"main in {folder.name} has failed: {done.stderr[-2000:]}")
    return done.stdout


class _Peak:
    """The most that a process and its children hold together, on a thread of its own until `end`."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._most = 0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._is_ending.set()
        self._thread.join()
        return self._most / _MIB

    def _run(self) -> None:
        while not self._is_ending.wait(_SAMPLE_SECONDS):
            total = 0
            try:
                for each in [self._process, *self._process.children(recursive=True)]:
                    total += each.memory_info().rss
            except psutil.Error:
                continue
            self._most = max(self._most, total)


def _stages(python: str) -> dict[str, float]:
    """Resident MiB after each."""
    code = "import re, json\nfound = {}\n"
    for name, line in _STAGES.items():
        code += f"{line}\nwith open('/proc/self/smaps_rollup') as _f:\n"
        code += f"    found[{name!r}] = int(re.search(r'^Rss:\\s+(\\d+)', _f.read(), re.M)[1]) / 1024\n"
    heap = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}  # as such a worker begins
    done = subprocess.run(
        [python, "-c", f"{code}print(json.dumps(found))"], capture_output=True, text=True, env=os.environ | heap
    )
    if done.returncode:
        raise ChildError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _imported(name: str) -> float | None:
    """Resident MiB that importing it adds to a bare interpreter."""
    code = (
        "import re\ndef rss():\n    with open('/proc/self/smaps_rollup') as f:\n"
        "        return int(re.search(r'^Rss:\\s+(\\d+)', f.read(), re.M)[1]) / 1024\n"
        f"before = rss()\nimport {name}\nprint(rss() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def _rollup(pid: int) -> dict[str, float]:
    """MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    return {
        "resident": kib["Rss"] / 1024,
        "proportional": kib["Pss"] / 1024,
        "private": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
        "of it written to": kib["Private_Dirty"] / 1024,
    }


def _status(pid: int, what: str) -> float:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None, what
    return int(found[1]) / 1024


def _a_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _table(found: Mapping[str, Any]) -> str:
    columns = ("resident at most", "resident", "proportional", "private", "of it written to", "with what it starts")
    lines = ["MiB".ljust(24) + "".join(f"{name:>22}" for name in columns) + "   same text"]
    for cell in found["workers"]:
        numbers = "".join(f"{cell[name]:22.1f}" for name in columns)
        lines.append(f"{cell['worker'] + ', ' + str(cell['slots']) + ' slots':24}{numbers}   {cell['same text']}")
    lines += ["", "without torch, resident after each stage of its beginning, MiB"]
    lines += [f"  {each:6.1f}  {name}" for name, each in found["stages_without_torch"].items()]
    lines += ["", "importing it alone adds, MiB"]
    lines += [f"  {each:6.1f}  {name}" for name, each in found["imported_alone"].items() if each is not None]
    return "\n".join([*lines, ""])
