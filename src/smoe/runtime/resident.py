"""Computes the experts of one token without a plan, while all experts of the model are in cache slots. Then no expert
can be missing, loaded or evicted.

A layer's router is then part of the attention's kernel call and fills in the addresses of the experts that it chooses
(`kernels/token_router.py`), so Python only starts the computation. Steps that something observes or changes (observers,
substitution, other units) are executed by plans (`execute.py`). Predictors observe nothing here, because nothing is
prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from smoe.expert import EXACT
from smoe.fastpath.fast_layer import FastLayer
from smoe.kernels.experts import PreparedToken, TokenExperts
from smoe.kernels.token_router import TokenRouter
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor


def resident_experts(engine: Engine, layers: Sequence[FastLayer]) -> ResidentExperts | None:
    """Return the experts of all layers, for decode steps of one token that compute experts without a plan. Return None
    if a router of the decoder `layers` is not part of its layer's kernel call."""
    routed = {layer.index: layer.routed for layer in layers if layer.routed is not None}
    if len(routed) < len(layers) or engine.store.layers.keys() != routed.keys():
        return None
    return ResidentExperts(engine, [(layer, of.router) for layer, of in sorted(routed.items())])


class ResidentExperts:
    """The experts of all layers, for computing them without plans while all of them are resident."""

    def __init__(self, engine: Engine, routers: list[tuple[int, TokenRouter]]) -> None:
        self._engine, self._routers = engine, routers
        self._experts = len(engine.store.keys())
        self._layers: list[_ResidentLayer] = []
        self._arrived = -1
        """The number of loads that had ended when `_layers` was made."""

    def layers(self) -> list[_ResidentLayer] | None:
        """Return the layers in their order. Return None while an expert is missing, or while an observer or a lossy
        option is active."""
        executor = self._engine.executor
        table = executor.table
        is_complete = len(table.ready) == self._experts and not table.inflight and not table.staged
        if not is_complete or self._engine.passes.is_changing_steps or not _is_plain(executor):
            return None
        if table.arrived != self._arrived:
            self._layers, self._arrived = self._made(executor), table.arrived
        if len(self._layers) != len(self._routers):
            return None
        executor.compute.experts.adapt(False, False)
        return self._layers

    def _made(self, executor: LayerExecutor) -> list[_ResidentLayer]:
        """Return the layers whose experts the CPU kernels can compute directly; others are left out."""
        made = []
        for layer, router in self._routers:
            kernel = executor.compute.experts.token_kernels[layer]
            if kernel is not None:
                made.append(_ResidentLayer(executor, layer, router, kernel))
        return made


class _ResidentLayer:
    """The resident experts of one layer, and the prepared kernel call that computes the experts that the router has
    chosen."""

    def __init__(self, executor: LayerExecutor, layer: int, router: TokenRouter, kernel: TokenExperts) -> None:
        ready, experts = executor.arrivals.ready, executor.arrivals.stores[EXACT].layers[layer].experts
        self._matrices = [ready((layer, expert, EXACT)).matrices for expert in range(experts)]
        self._addresses = np.array([[each.address for each in some] for some in self._matrices], np.int64)
        self._executor, self._kernel, self._router = executor, kernel, router
        self._prepare()

    def _prepare(self) -> None:
        chosen = self._matrices[: self._router.top_k]  # any experts: the router writes the addresses
        self._prepared = PreparedToken(self._kernel, chosen, self._router.gains_at)
        each = self._addresses.shape[1]
        places = [(at, *divmod(n, each)) for at, n in self._prepared.places()]
        self._router.complete(self._addresses, np.array(places, np.int64), self._prepared)

    def __call__(self, after: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return after + experts(normed) for the experts that the router has just chosen; all tensors are [1, 1, H]."""
        executor = self._executor
        counters, began = executor.counters, executor.now()
        out = torch.empty_like(after)
        if not self._prepared.is_current:  # a longer prompt has moved the scratch memory
            self._prepare()
            self._router.choose()
        self._prepared.run_completed(normed.data_ptr(), out.data_ptr())
        counters.compute_seconds += executor.now() - began
        counters.decode_uses += self._router.top_k
        counters.decode_hits += self._router.top_k
        return after + out


def _is_plain(executor: LayerExecutor) -> bool:
    """Return whether a step only computes the chosen experts on this device, without a lossy option, an observer or
    another compute unit."""
    switches = executor.substitution.switches
    return (
        not executor.observers
        and executor.answerer is None
        and not switches.alpha
        and not switches.needs_weights
        and not executor.table.has_low
        and not executor.compute.units
    )
