"""Measure once, at the start, how one token's experts are computed fastest on this CPU, and keep that way.

One expert on all threads, or several experts at a time on one thread each; by the library's product, or by our kernel
where its bits are the library's. Which wins depends on the machine and on how its OpenMP runtime waits
(`OMP_WAIT_POLICY`); the bits are the same.
"""

from __future__ import annotations

from time import perf_counter

import torch

from smoe.compute.thread_pool import ThreadPool
from smoe.kernels.spinning_pool import SpinningPool
from smoe.runtime.layer import LayerCompute

MIN_EXPERT_BYTES = 1 << 20
"""Smaller experts go without measuring: by our kernel where it agrees, which wakes nobody for them, else by the
library."""
_ROUNDS = 9
_EXPERTS = 8


def choose_way(compute: LayerCompute, layer: int, dtype: torch.dtype, pool: SpinningPool | None, always: bool) -> None:
    """Give `compute` the helpers that serve it best, and close the others. Takes some tens of milliseconds.

    `pool` must have been found to agree with the library on this model's experts; `always`: use it without measuring.
    """
    compute.compute_by(pool)  # small experts: the kernel saves dispatch, threads cost more than they give
    threads = torch.get_num_threads()
    if always or compute.device.type != "cpu" or compute.store.expert_bytes < MIN_EXPERT_BYTES:
        return
    ways = [None, ThreadPool(threads) if threads > 1 else None, pool]
    seconds = [float("inf")] * len(ways)
    best = None
    try:
        for _ in range(_ROUNDS):
            for n, helpers in enumerate(ways):
                compute.compute_by(helpers)
                seconds[n] = min(seconds[n], _seconds(compute, layer, dtype))
        best = ways[seconds.index(min(seconds))]
    finally:
        compute.compute_by(best)
        for helpers in ways:
            if helpers is not None and helpers is not best:
                helpers.close()


def _seconds(compute: LayerCompute, layer: int, dtype: torch.dtype) -> float:
    """One layer of decoding on whatever the slots hold: a dense product on all threads first, as in a real layer."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    hidden = torch.zeros(1, compute.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    compute.compute_slots(layer, hidden, _EXPERTS)
    return perf_counter() - started
