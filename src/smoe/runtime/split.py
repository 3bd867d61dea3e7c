"""Measure once, at the start, how one token's experts are computed fastest on this CPU, and keep that way.

One expert on all threads, or several experts at a time on one thread each; by the library's product, or by our kernel
where its bits are the library's. Which wins depends on the machine and on how its OpenMP runtime waits
(`OMP_WAIT_POLICY`); the bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from smoe.kernels.row_product import RowProduct
from smoe.runtime.execute import LayerExecutor
from smoe.runtime.team import Team

MIN_EXPERT_BYTES = 1 << 20
"""Below this an expert computes in less time than waking a thread takes."""
_ROUNDS = 9
_EXPERTS = 8


def choose_way(executor: LayerExecutor, layer: int, dtype: torch.dtype, products: Sequence[RowProduct | None]) -> None:
    """Give the executor the kernel and the team that serve it best, if any. Takes some tens of milliseconds.

    Kernels among `products` must have been found to agree with the library on this model's experts; None is the
    library's own product.
    """
    executor.compute_by(products[0], None)
    threads = torch.get_num_threads()
    if executor.device.type != "cpu" or executor.expert_bytes < MIN_EXPERT_BYTES:
        return
    team = Team(threads) if threads > 1 else None
    ways = [(kernel, crew) for kernel in products for crew in {None, team}]
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(_ROUNDS):
        for kernel, crew in ways:
            executor.compute_by(kernel, crew)
            best[kernel, crew] = min(best[kernel, crew], _seconds(executor, layer, dtype))
    kernel, crew = min(best, key=best.__getitem__)
    executor.compute_by(kernel, crew)
    if team is not None and crew is None:
        team.close()


def _seconds(executor: LayerExecutor, layer: int, dtype: torch.dtype) -> float:
    """One layer of decoding on whatever the slots hold: a dense product on all threads first, as in a real layer."""
    dense = torch.ones(1, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
    hidden = torch.zeros(1, executor.hidden_size(layer), dtype=dtype)
    torch.mm(*dense)
    started = perf_counter()
    torch.mm(*dense)
    executor.compute_slots(layer, hidden, _EXPERTS)
    return perf_counter() - started
