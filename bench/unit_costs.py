"""What one expert costs by the number of its tokens, on each unit: figures 3 and 8 of the SMoE paper.

    python -m bench.unit_costs MODEL [--profile rtx-a6000] [--json FILE]

Measured on this machine: reading one from disk, copying one in RAM, computing one on the CPU, for 1 to 64 tokens, each
time another expert, so that nothing sits in the processor's cache. Beside it what a device profile says of a link, a
device and a CPU (`--device emulated` acts these).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from smoe import from_pretrained
from smoe.memory.emulation import read_profile
from smoe.policy.plan import Load, LoadReason

ROWS = (1, 2, 4, 8, 16, 32, 64)
EXPERTS = 24
"""Different experts a figure is the median of: far more than any processor's cache holds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--profile", default="rtx-a6000")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.model, options.profile)
    size, disk, copy = found["expert_bytes"] / 1e6, found["disk_ms"], found["copy_ms"]
    print(
        f"one expert: {size:.1f} MB; disk {disk:.2f} ms, copy {copy:.2f} ms; ms by tokens, last three {options.profile}"
    )
    print("".join(f"{name:>12}" for name in ("tokens", "CPU here", "device", "link", "its CPU")))
    for row in found["rows"]:
        times = (row[key] for key in ("cpu_ms", "device_ms", "link_ms", "host_ms"))
        print(f"{row['tokens']:>12}" + "".join(f"{time:>12.3f}" for time in times))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


def measure(folder: str, profile_name: str) -> dict[str, Any]:
    """All figures, in milliseconds; no token goes through the model."""
    profile = read_profile(profile_name)
    model = from_pretrained(folder, memory="2GiB", context_tokens=64, prefetch="none")
    with model.offload as engine, torch.no_grad():
        executor, nbytes = engine.executor, engine.store.expert_bytes
        disk = _disk_ms(engine)
        first = min(executor.compute.experts.maths)
        math, layer = executor.compute.experts.maths[first], first[0]
        parts = engine.store.placement(layer, 0).parts
        weights = [math.bind(engine._arena, slot, parts) for slot in range(EXPERTS)]
        rows = []
        for tokens in ROWS:
            x = torch.randn(tokens, math.hidden).to(torch.bfloat16)
            rows.append(
                {
                    "tokens": tokens,
                    "cpu_ms": _median_ms([lambda w=w, x=x: math.forward(x, w) for w in weights]),
                    "device_ms": 1e3 * profile.expert_seconds(nbytes, tokens),
                    "link_ms": 1e3 * profile.link_seconds(nbytes),
                    "host_ms": 1e3 * profile.host_seconds(nbytes, tokens),
                }
            )
        slots = [engine._arena.tensor(slot) for slot in range(2 * EXPERTS)]
        copy = _median_ms([lambda n=n: slots[n].copy_(slots[n + EXPERTS]) for n in range(EXPERTS)])
        return {"expert_bytes": nbytes, "disk_ms": disk, "copy_ms": copy, "rows": rows, "profile": profile_name}


def _disk_ms(engine: Any) -> float:
    """Reading one expert by one thread, nothing else running."""
    layer = min(engine.store.layers)
    mover = engine._transfers._mover
    tickets = [_Ticket(Load((layer, n, 0), n, None, True, LoadReason.DEMAND, 0)) for n in range(EXPERTS)]
    return _median_ms([lambda t=t: mover.move(t, None) for t in tickets])


class _Ticket:
    def __init__(self, load: Load) -> None:
        self.load = load


def _median_ms(jobs: list[Any]) -> float:
    for job in jobs:
        job()
    seconds = []
    for job in jobs:
        began = perf_counter()
        job()
        seconds.append(perf_counter() - began)
    return 1e3 * median(seconds)


if __name__ == "__main__":
    main()
