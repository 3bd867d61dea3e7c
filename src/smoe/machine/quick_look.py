"""Measure this machine briefly for use until `smoe doctor` has measured it: half a second, stored for a day.

A process of its own measures and writes its memory first, because large caches would falsify smaller sizes.
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
from smoe.machine.measure import describe_machine, measure_experts, measure_memory, measure_products
from smoe.machine.processor import BUSY_SHARE, waited_share
from smoe.safe_path import WORKING_FOLDER, child_environment, module_line
from smoe.user_cache import cache_folder, keep, read_stored

_FORMAT = 1
_SECONDS = 0.1
"""The time for measuring each rate in seconds, except the disk's."""
_KEPT_SECONDS = 24 * 3600.0
_MOST_SECONDS = 60.0
"""The timeout for the other process."""


@dataclass(frozen=True)
class QuickLook:
    """Rates in bytes, or operations, per second."""

    memory: float
    experts: float
    """The number of weight bytes per second of experts of the requested size, computed for one token."""
    products: float
    """The number of operations per second in products of many rows."""
    disk: float | None
    """The disk's rate; None if the user's cache is not writable."""


@cache
def quick_look(expert_bytes: int) -> QuickLook:
    """Return the stored rates, else measure them."""
    stored = _stored()
    found = _fresh(stored.get(str(expert_bytes)))
    if found is not None:
        return found
    look, is_disturbed = _looked_apart(expert_bytes)
    if not is_disturbed:
        entry = {"rates": asdict(look), "at": time.time()}
        with suppress(OSError):
            keep(_path(), {"format": _FORMAT, **stored, "machine": describe_machine(), str(expert_bytes): entry})
    return look


@cache
def memory_rate() -> float:
    """Return the memory's rate: from stored rates, else measured by another process."""
    looks = (_fresh(entry) for size, entry in _stored().items() if size.isdecimal())
    found = next((look.memory for look in looks if look is not None), None)
    return float(_answered("memory")) if found is None else found


def _path() -> Path:
    return cache_folder() / "quick-look.json"


def _stored() -> dict[str, Any]:
    """Return the stored rates of this machine by expert size."""
    stored = read_stored(_path(), _FORMAT) or {}
    return stored if stored.get("machine") == describe_machine() else {}


def _fresh(entry: Any) -> QuickLook | None:
    """Return stored rates unless they are too old or damaged."""
    try:
        look = QuickLook(**entry["rates"])
        return look if 0 <= time.time() - entry["at"] < _KEPT_SECONDS else None
    except (TypeError, KeyError):
        return None


def _looked_apart(expert_bytes: int) -> tuple[QuickLook, bool]:
    """Measure in another process; return the rates, and whether other programs used the cores meanwhile."""
    answer = json.loads(_answered(str(expert_bytes)))
    return QuickLook(**answer["rates"]), answer["is_disturbed"]


def _answered(word: str) -> bytes:
    """Return the output of another process: all rates for an expert size, or the memory's rate for `memory`."""
    done = subprocess.run(
        [*module_line("smoe.machine.quick_look"), word],
        capture_output=True,
        timeout=_MOST_SECONDS,
        cwd=WORKING_FOLDER,
        env=child_environment(),
    )
    if done.returncode:
        raise RuntimeError(f"the machine could not be measured: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    return done.stdout


def look(expert_bytes: int) -> QuickLook:
    """Measure the rates in this process."""
    return QuickLook(
        memory=measure_memory(_SECONDS),
        experts=measure_experts(expert_bytes, _SECONDS),
        products=measure_products(_SECONDS),
        disk=measure_small_disk(expert_bytes),
    )


def main() -> None:
    """Measure in this process and print the rates for the argument: an expert size in bytes, or the word `memory`."""
    word = sys.argv[1]
    if word == "memory":
        print(measure_memory(_SECONDS))
        return
    rates = look(int(word))
    waited = waited_share()
    print(json.dumps({"rates": asdict(rates), "is_disturbed": waited is not None and waited >= BUSY_SHARE}))


if __name__ == "__main__":
    main()
