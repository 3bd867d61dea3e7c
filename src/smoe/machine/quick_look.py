"""Measures this machine in half a second, for use until `smoe doctor` has measured it. The result is stored for a day.

Another process measures. It writes to the memory before it reads it. It is large, because caches would falsify the rate
of less memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from smoe.machine.disk_rates import measure_small_disk
from smoe.machine.measure import (
    describe_machine,
    measure_experts,
    measure_memory,
    measure_products,
    written_memory,
)
from smoe.machine.processor import BUSY_SHARE, waited_share
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line
from smoe.user_cache import cache_folder, keep, read_stored

_FORMAT = 2
_SECONDS = 0.1
"""The time for measuring each rate except the disk's, in seconds."""
_VALID_SECONDS, _DISTURBED_SECONDS = 24 * 3600.0, 600.0
"""How many seconds rates are used, and how many if other programs used the cores while they were measured."""
_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Environment variables with which NumPy uses one thread for a product."""
_MOST_SECONDS = 60.0
"""The timeout for the process that measures."""


@dataclass(frozen=True)
class QuickLook:
    """The rates of this machine, in bytes or operations per second."""

    memory: float
    experts: float
    """The bytes of weights per second when one token passes through experts of the requested size."""
    products: float
    """The operations per second in products of many rows."""
    disk: float | None
    """The disk's rate; None if the user's cache folder is not writable."""


@cache
def quick_look(expert_bytes: int) -> QuickLook:
    """Return the rates for experts of this size: stored ones if they are recent, else measured ones."""
    stored = _stored()
    found = _fresh(stored.get(str(expert_bytes)))
    if found is not None:
        return found
    look, is_disturbed = _looked_apart(expert_bytes)
    valid = _DISTURBED_SECONDS if is_disturbed else _VALID_SECONDS
    entry = {"rates": asdict(look), "at": time.time(), "valid_seconds": valid}
    with suppress(OSError):
        keep(_path(), {"format": _FORMAT, **stored, "machine": describe_machine(), str(expert_bytes): entry})
    return look


@cache
def memory_rate() -> float:
    """Return the rate of reading memory: a stored one if it is recent, else one that another process measures."""
    looks = (_fresh(entry) for size, entry in _stored().items() if size.isdecimal())
    found = next((look.memory for look in looks if look is not None), None)
    return float(_answered("memory")) if found is None else found


def _path() -> Path:
    return cache_folder() / "quick-look.json"


def _stored() -> dict[str, Any]:
    """Return the rates that are stored for this machine, by expert size."""
    stored = read_stored(_path(), _FORMAT) or {}
    return stored if stored.get("machine") == describe_machine() else {}


def _fresh(entry: Any) -> QuickLook | None:
    """Return the rates in a stored entry of the cache file; None if the entry is too old or damaged."""
    try:
        look = QuickLook(**entry["rates"])
        return look if 0 <= time.time() - entry["at"] < entry["valid_seconds"] else None
    except (TypeError, KeyError, AttributeError):
        return None


def _looked_apart(expert_bytes: int) -> tuple[QuickLook, bool]:
    """Measure the rates in another process. Return the rates, and whether other programs used the cores meanwhile."""
    answer = json.loads(_answered(str(expert_bytes)))
    return QuickLook(**answer["rates"]), answer["is_disturbed"]


def _answered(word: str) -> bytes:
    """Return the output of another process that measures. `word`: an expert size, for all rates, or `memory`, for the
    memory's rate."""
    done = subprocess.run(
        [*module_line("smoe.machine.quick_look"), word],
        capture_output=True,
        timeout=_MOST_SECONDS,
        cwd=WORKING_FOLDER,
        env=child_environment() | _ONE_THREAD,
    )
    if done.returncode:
        raise RuntimeError(f"the machine could not be measured: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return done.stdout


def look(expert_bytes: int) -> QuickLook:
    """Return the rates for experts of this size, measured in this process."""
    memory = written_memory()
    rate, experts = measure_memory(_SECONDS, memory.buffer(0)), measure_experts(expert_bytes, _SECONDS, memory)
    memory.close()
    return QuickLook(rate, experts, measure_products(_SECONDS), measure_small_disk(expert_bytes))


def main() -> None:
    """Measure in this process and print the result. The command's argument is an expert size in bytes, to measure all
    rates, or the word `memory`."""
    word = sys.argv[1]
    if word == "memory":
        print(measure_memory(_SECONDS))
        return
    rates = look(int(word))
    waited = waited_share()
    print(json.dumps({"rates": asdict(rates), "is_disturbed": waited is not None and waited >= BUSY_SHARE}))


if __name__ == "__main__":
    main()
