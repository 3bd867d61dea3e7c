"""Computes the experts of one text without a plan, while all experts of the model are in cache slots. Then no expert
can be missing, loaded or evicted.

For one token, a layer's router is then part of the attention's kernel call and fills in the addresses of the experts
that it chooses (`kernels/token_router.py`), so Python only starts the computation. For the tokens of a prompt, the
experts' addresses are in a table (`kernels/resident_prompt.py`). Steps that something observes or changes (observers,
substitution, other units) are executed by plans (`execute.py`). Predictors observe nothing here, because nothing is
prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from smoe.expert import EXACT
from smoe.fastpath.fast_layer import FastLayer, ResidentMlp, RoutedBlock
from smoe.kernels import residual
from smoe.kernels.byte_experts import addresses_of
from smoe.kernels.experts import PreparedToken, TokenExperts
from smoe.kernels.resident_prompt import ResidentPrompt
from smoe.runtime.engine import Engine
from smoe.runtime.execute import LayerExecutor


def resident_experts(engine: Engine, layers: Sequence[FastLayer]) -> ResidentExperts | None:
    """Return the experts of all layers, for passes over one text that compute experts without a plan. Return None if a
    router of the decoder `layers` is not part of its layer's kernel call."""
    routed = {layer.index: layer.routed for layer in layers if layer.routed is not None}
    if len(routed) < len(layers) or engine.store.layers.keys() != routed.keys():
        return None
    return ResidentExperts(engine, sorted(routed.items()))


class ResidentExperts:
    """The experts of all layers, for computing them without plans while all of them are resident."""

    def __init__(self, engine: Engine, blocks: Sequence[tuple[int, RoutedBlock]]) -> None:
        self._engine, self._blocks = engine, blocks
        self._experts = len(engine.store.keys())
        self._place = {layer: n for n, (layer, _) in enumerate(blocks)}
        self._layers: list[_ResidentLayer] = []
        self._arrived = -1
        """The number of loads that had ended when `_layers` was made."""

    def of_prompt(self, layer: int) -> ResidentMlp | None:
        """Return the function that computes several tokens of one text through a layer's router and experts. Return
        None in the cases in which `layers` does, or if the experts of the layer are not multiplied with rows in 8
        bits."""
        layers = self.layers(is_prompt=True)
        return None if layers is None else layers[self._place[layer]].of_prompt

    def layers(self, is_prompt: bool = False) -> list[_ResidentLayer] | None:
        """Return the layers in their order. Return None while an expert is missing, or while an observer or a lossy
        option is active. `is_prompt`: whether they will compute several tokens."""
        executor = self._engine.executor
        table = executor.table
        is_complete = len(table.ready) == self._experts and not table.inflight and not table.staged
        if not is_complete or self._engine.passes.is_changing_steps or not _is_plain(executor):
            return None
        if table.arrived != self._arrived:
            self._layers, self._arrived = self._made(executor), table.arrived
        if len(self._layers) != len(self._blocks):
            return None
        executor.compute.experts.adapt(False, is_prompt)
        return self._layers

    def _made(self, executor: LayerExecutor) -> list[_ResidentLayer]:
        """Return the layers whose experts the CPU kernels can compute directly; others are left out."""
        made = []
        for layer, block in self._blocks:
            kernel = executor.compute.experts.token_kernels[layer]
            if kernel is not None:
                made.append(_ResidentLayer(self._engine, layer, block, kernel))
        return made


class _ResidentLayer:
    """The resident experts of one layer, and the prepared kernel call that computes the experts that the router has
    chosen for one token."""

    def __init__(self, engine: Engine, layer: int, block: RoutedBlock, kernel: TokenExperts) -> None:
        executor = engine.executor
        ready, experts = executor.arrivals.ready, executor.arrivals.stores[EXACT].layers[layer].experts
        self._matrices = [ready((layer, expert, EXACT)).matrices for expert in range(experts)]
        self._addresses = addresses_of(self._matrices)
        self._engine, self._executor, self._kernel = engine, executor, kernel
        self._gate, self._router = block.gate, block.router
        self._prompt = ResidentPrompt.of(kernel, self._matrices)
        self._prepare()

    def _prepare(self) -> None:
        self._is_prepared = False  # if an interrupt comes before the end, all of this is done again
        chosen = self._matrices[: self._router.top_k]  # any experts: the router writes the addresses
        prepared = PreparedToken(self._kernel, chosen, self._router.gains_at)
        each = self._addresses.shape[1]
        places = [(at, *divmod(n, each)) for at, n in prepared.places()]
        self._router.complete(self._addresses, np.array(places, np.int64), prepared)
        self._prepared, self._is_prepared = prepared, True

    def __call__(self, after: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return after + experts(normed) for the experts that the router has just chosen; all tensors are [1, 1, H]."""
        executor = self._executor
        counters, began = executor.counters, executor.now()
        out = torch.empty_like(after)
        if not self._is_prepared or not self._prepared.is_current:  # a longer prompt has moved the scratch memory
            self._prepare()
            self._router.choose()
        self._prepared.run_completed(normed.data_ptr(), out.data_ptr())
        counters.compute_seconds += executor.now() - began
        counters.decode_uses += self._router.top_k
        counters.decode_hits += self._router.top_k
        return after + out

    @property
    def of_prompt(self) -> ResidentMlp | None:
        """The function for several tokens; None if the experts are not multiplied with rows in 8 bits."""
        return None if self._prompt is None else self._several

    def _several(self, after: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return after + experts(normed) for the experts that the router chooses; all tensors are [1, T, H]."""
        assert self._prompt is not None
        executor = self._executor
        self._engine.passes.turns.check()  # a long prompt can be cancelled between two layers
        hidden = normed.view(-1, normed.shape[-1])
        _, weights, chosen = self._gate.forward(hidden)
        counters, began = executor.counters, executor.now()
        total, computed = self._prompt(hidden, chosen, weights)
        counters.compute_seconds += executor.now() - began
        counters.prefill_uses += computed
        counters.prefill_hits += computed
        return residual.added(self._kernel.pool, after, total)


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
