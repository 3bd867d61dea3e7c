"""Measure once, at the start, how one token's experts are computed fastest on this CPU, and keep that way.

Several experts at a time on one thread each, or one expert on all threads: which wins depends on the machine and on how
its OpenMP runtime waits (`OMP_WAIT_POLICY`). One row or two equal rows in each product: on some CPUs oneDNN's bf16
kernel for two rows is a sixth faster than that for one (docs/log.md). A way whose bits differ is not used.
"""

from __future__ import annotations

from time import perf_counter

import torch

from smoe.runtime.execute import LayerExecutor, Way
from smoe.runtime.team import Team

MIN_EXPERT_BYTES = 1 << 20
"""Below this an expert computes in less time than waking a thread takes."""
_ROUNDS = 7
_EXPERTS = 8
_COMPARED = 32


def choose_way(executor: LayerExecutor, layer: int, dtype: torch.dtype) -> Way:
    """The fastest way with the plain way's bits. Takes some tens of milliseconds; slots 0 and 1 should hold experts."""
    threads = torch.get_num_threads()
    if executor.device.type != "cpu" or executor.expert_bytes < MIN_EXPERT_BYTES:
        return Way()
    team = Team(threads) if threads > 1 else None
    ways = [Way(members, twin) for members in ([None, team] if team else [None]) for twin in (False, True)]
    ways = [way for way in ways if _has_plain_bits(executor, layer, dtype, way)]
    seconds = dict.fromkeys(range(len(ways)), float("inf"))
    for _ in range(_ROUNDS):
        for number, way in enumerate(ways):
            seconds[number] = min(seconds[number], _seconds(executor, layer, dtype, way))
    best = ways[min(seconds, key=seconds.__getitem__)]
    if team is not None and best.team is None:
        team.close()
    return best


def _has_plain_bits(executor: LayerExecutor, layer: int, dtype: torch.dtype, way: Way) -> bool:
    generator = torch.Generator().manual_seed(0)
    for _ in range(_COMPARED):
        hidden = torch.randn(1, executor.hidden_size(layer), generator=generator).to(dtype)
        plain = executor.try_way(layer, hidden, 2, Way())
        if not torch.equal(plain, executor.try_way(layer, hidden, 2, way)):
            return False
    return True


def _seconds(executor: LayerExecutor, layer: int, dtype: torch.dtype, way: Way) -> float:
    """One layer of decoding on whatever the slots hold: a dense product on all threads first, as in a real layer."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    hidden = torch.zeros(1, executor.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    executor.try_way(layer, hidden, _EXPERTS, way)
    return perf_counter() - started
