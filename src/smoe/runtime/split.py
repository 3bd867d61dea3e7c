"""Measure once, at the start, how one token's experts are computed faster on this CPU, and keep that way.

Several experts at a time on one thread each, or one expert on all threads: which wins depends on the machine and on
how its OpenMP runtime waits (`OMP_WAIT_POLICY`); the bits are the same.
"""

from __future__ import annotations

from time import perf_counter

import torch

from smoe.runtime.execute import LayerExecutor
from smoe.runtime.team import Team

MIN_EXPERT_BYTES = 1 << 20
"""Below this an expert computes in less time than waking a thread takes."""
_ROUNDS = 9
_EXPERTS = 8


def make_team(executor: LayerExecutor, layer: int, dtype: torch.dtype) -> Team | None:
    """A team where it pays, else None. Takes some tens of milliseconds."""
    threads = torch.get_num_threads()
    if executor.device.type != "cpu" or threads < 2 or executor.expert_bytes < MIN_EXPERT_BYTES:
        return None
    team = Team(threads)
    alone = shared = float("inf")
    for _ in range(_ROUNDS):
        alone = min(alone, _seconds(executor, layer, dtype, None))
        shared = min(shared, _seconds(executor, layer, dtype, team))
    if shared < alone:
        return team
    team.close()
    return None


def _seconds(executor: LayerExecutor, layer: int, dtype: torch.dtype, team: Team | None) -> float:
    """One layer of decoding on whatever the slots hold: a dense product on all threads first, as in a real layer."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    hidden = torch.zeros(1, executor.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    executor.compute_slots(layer, hidden, _EXPERTS, team)
    return perf_counter() - started
