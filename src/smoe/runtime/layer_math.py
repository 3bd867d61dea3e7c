"""The experts of one layer, computed as its plan says: what is here first, then what comes, summed in fixed order.

One token goes through all experts that are here at once; several go through one expert after the other. What the CPU
computes beside the device is started first and fetched last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from smoe.expert import Copy
from smoe.kernels.crew import Crew
from smoe.memory.device import Arena
from smoe.memory.emulation import Emulation
from smoe.memory.store import ExpertStore
from smoe.policy.plan import LayerPlan, Serve
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.expert_math import ExpertMath, Weights, library_products
from smoe.runtime.host_experts import HostExperts
from smoe.runtime.team import Team

_FromHost: TypeAlias = Mapping[Copy, "Future[torch.Tensor]"]
LookAhead: TypeAlias = Callable[[Callable[[], torch.Tensor]], None]
"""Called when the resident experts are done and others are not, with what gives their output so far [T, H]."""


class LayerMath:
    """The arithmetic of all layers' experts on one device. Used by the computing thread only."""

    def __init__(
        self,
        store: ExpertStore,
        arrivals: Arrivals,
        arena: Arena,
        experts: Mapping[int, ExpertMath],
        clock: Callable[[], float],
    ) -> None:
        self.team: Team | None = None
        """Where set, resident experts are shared out over several threads."""
        self.crew: Crew | None = None
        """Where set, our kernel multiplies single rows."""
        self.host_experts: HostExperts | None = None
        """Where set, the CPU beside the device, which can compute experts too."""
        self.emulation: Emulation | None = None
        """Where set, the device is acted."""
        self._store = store
        self._arrivals = arrivals
        self._arena = arena
        self._experts = experts
        self._now = clock

    def close(self) -> None:
        """End the helpers."""
        for helpers in (self.team, self.crew, self.host_experts):
            if helpers is not None:
                helpers.close()

    def hidden_size(self, layer: int) -> int:
        return self._experts[layer].hidden

    def agrees(self, crew: Crew) -> bool:
        """Whether our kernel gives the library's bits on the experts that are resident, one of every layout."""
        seen = {(self._experts[c[0]].hidden, self._experts[c[0]].inner): c for c in sorted(self._arrivals.table.ready)}
        return bool(seen) and all(self._experts[c[0]].agrees(crew, self._arrivals.ready(c)) for c in seen.values())

    def compute_by(self, helpers: Crew | Team | None) -> None:
        """From now on single rows are multiplied by our kernel, or by the library on a team of threads, or on one."""
        self.team = helpers if isinstance(helpers, Team) else None
        self.crew = helpers if isinstance(helpers, Crew) else None
        for math in self._experts.values():
            math.multiply = library_products if self.crew is None else self.crew.multiply

    def compute_slots(self, layer: int, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """One token [1, H] through `count` slots, whatever they hold -> [count, H]: for measuring."""
        placement = self._store.placement(layer, 0)
        slots = [n % self._arrivals.slots for n in range(count)]
        weights = [self._experts[layer].bind(self._arena, slot, placement.parts) for slot in slots]
        out = hidden.new_empty(count, hidden.shape[1])
        self._compute_each(self._experts[layer], hidden, weights, out)
        return out

    def decode(
        self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor, look_ahead: LookAhead
    ) -> torch.Tensor:
        """Few tokens: in the plan's order, outputs kept apart, summed at the end in ascending expert order."""
        counters = self._arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        from_host = self._start_host(plan, hidden, top_k_weights.shape[1])
        compute = self._one_token if hidden.shape[0] == 1 else self._some_tokens
        outputs = compute(plan, hidden, top_k_weights, from_host, look_ahead) if plan.serves else []
        total = self._sum(plan.serves, outputs, hidden, top_k_weights.shape[1])
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total

    def _start_host(self, plan: LayerPlan, hidden: torch.Tensor, width: int) -> dict[Copy, Future[torch.Tensor]]:
        """What the CPU computes beside the device begins now."""
        if self.host_experts is None:
            return {}
        given = (serve for serve in plan.serves if serve.on_host)
        return {
            serve.copy: self.host_experts.submit(serve.copy, self._rows(serve, hidden, width)[0]) for serve in given
        }

    def _one_token(
        self,
        plan: LayerPlan,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        from_host: _FromHost,
        look_ahead: LookAhead,
    ) -> list[torch.Tensor]:
        """One token through all its experts: [1, H] each, in the plan's order, routing weights applied."""
        math, serves = self._experts[plan.layer], plan.serves
        stacked = hidden.new_empty(len(serves), hidden.shape[1])
        gains = top_k_weights[0, [serve.routes[0] for serve in serves]].unsqueeze(1)
        here = sum(1 for serve in serves if not serve.loads)
        if any(load.after for load in plan.loads):
            here = min(here, 1)  # slots are so few that a load waits for the first expert computed
        weights = [self._arrivals.ready(serve.copy) for serve in serves[:here]]
        began = time.perf_counter()
        self._compute_each(math, hidden, weights, stacked[:here])
        self._act([1] * here, began)
        for computed, serve in enumerate(serves[:here], start=1):
            self._arrivals.served(serve, computed)
        if here < len(serves):
            look_ahead(lambda: (stacked[:here] * gains[:here]).to(hidden.dtype).sum(0, keepdim=True))
        for computed, serve in enumerate(serves[here:], start=here + 1):
            row = stacked[computed - 1 : computed]
            if serve.on_host:
                row.copy_(self._from_host(from_host, serve))
                continue
            weights = [self._arrivals.weights_of(serve)]
            began = time.perf_counter()
            math.forward_each(hidden, weights, row)
            self._act([1], began)
            self._arrivals.served(serve, computed)
        return list((stacked * gains).to(hidden.dtype).split(1))

    def _some_tokens(
        self,
        plan: LayerPlan,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        from_host: _FromHost,
        look_ahead: LookAhead,
    ) -> list[torch.Tensor]:
        """Several tokens through their experts: [n, H] each, in the plan's order, routing weights applied."""
        math, serves, width = self._experts[plan.layer], plan.serves, top_k_weights.shape[1]
        flat_weights = top_k_weights.reshape(-1, 1)
        outputs: list[torch.Tensor] = []
        for computed, serve in enumerate(serves, start=1):
            if serve.loads and not (outputs and serves[computed - 2].loads):
                look_ahead(lambda: self._sum(serves[: len(outputs)], outputs, hidden, width))
            x, route = self._rows(serve, hidden, width)
            if serve.on_host:
                y = self._from_host(from_host, serve)
            else:
                weights = self._arrivals.weights_of(serve)
                began = time.perf_counter()
                y = math.forward(x, weights)
                self._act([x.shape[0]], began)
            outputs.append((y * flat_weights[route]).to(hidden.dtype))
            if not serve.on_host:
                self._arrivals.served(serve, computed)
        return outputs

    def _from_host(self, from_host: _FromHost, serve: Serve) -> torch.Tensor:
        started = self._now()
        result = from_host[serve.copy].result()
        self._arrivals.counters.host_wait_seconds += self._now() - started
        return result.to(self._arena.device)

    def _sum(
        self, serves: Sequence[Serve], outputs: Sequence[torch.Tensor], hidden: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The experts' outputs added up in ascending expert order."""
        total = torch.zeros_like(hidden)
        for n in sorted(range(len(outputs)), key=lambda n: serves[n].copy):
            if hidden.shape[0] == 1:
                total += outputs[n]
            else:
                total.index_add_(0, self._tokens(serves[n], width), outputs[n])
        return total

    def _compute_each(
        self, math: ExpertMath, hidden: torch.Tensor, weights: Sequence[Weights], out: torch.Tensor
    ) -> None:
        """One token [1, H] through several experts -> out [n, H], shared out over the team where there is one."""
        if self.team is not None and len(weights) > 1:
            self.team.run(lambda member, of: math.forward_each(hidden, weights[member::of], out[member::of]))
        elif weights:
            math.forward_each(hidden, weights, out)

    def prefill(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Many tokens: experts in ascending order, each read once, loads of this and the next layer running ahead."""
        math, total = self._experts[plan.layer], torch.zeros_like(hidden)
        flat_weights = top_k_weights.reshape(-1, 1)
        counters = self._arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        for computed, serve in enumerate(plan.serves, start=1):
            weights = self._arrivals.weights_of(serve)
            x, route = self._rows(serve, hidden, top_k_weights.shape[1])
            began = time.perf_counter()
            y = (math.forward(x, weights) * flat_weights[route]).to(hidden.dtype)
            total.index_add_(0, self._tokens(serve, top_k_weights.shape[1]), y)
            self._act([x.shape[0]], began)
            self._arrivals.served(serve, computed)
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total

    def _act(self, rows: list[int], began: float) -> None:
        """On an emulated device: experts computed since `began` take the device's time."""
        if self.emulation is not None:
            self.emulation.compute_experts(began, rows)

    def _tokens(self, serve: Serve, width: int) -> torch.Tensor:
        return torch.tensor([route // width for route in serve.routes], device=self._arena.device)

    def _rows(self, serve: Serve, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of one expert [n, H] and its flat routes [n]."""
        return hidden[self._tokens(serve, width)], torch.tensor(serve.routes, device=self._arena.device)
