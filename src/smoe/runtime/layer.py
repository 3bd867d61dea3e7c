"""Computes the experts of one layer according to its plan: resident experts first, then others as they arrive. Their
outputs are summed in a fixed order.

Few tokens pass through all resident experts in one call, a long prompt through one expert after the other. Experts that
take less time than a call are computed together, after the last of them has arrived. Experts that the CPU computes in
parallel with the device are started first, and their results are fetched last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt
import torch

from smoe.compute.decode_experts import DecodeExperts, routes_on_device
from smoe.compute.expert_math import Weights, add_rows, empty_sum
from smoe.compute.experts import Experts
from smoe.compute.unit import ComputeUnit, ExpertTask, Others
from smoe.expert import EXACT, ExpertKey
from smoe.kernels.experts import MOST_EXPERTS, TokenExperts
from smoe.kernels.matrix import Matrix
from smoe.kernels.prompt_experts import Chosen, PromptExperts
from smoe.memory.pacing import Pacing
from smoe.memory.streams import Fetched
from smoe.policy.plan import DEVICE, LayerPlan, Serve
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.lifetime import Helpers

_SHORT_PROMPT = 64
"""The maximum number of tokens of a prompt that may pass through all experts of a layer at once, which stores each
expert's output separately until the end."""
_SMALL_EXPERT_BYTES = 256 * 2**10
"""The size of an expert up to which computing it takes less time than a call of the kernel, so that a token's experts
are computed in one call, after the last of them has arrived."""
_HANDED_OVER = 4
"""The maximum number of experts of a prompt that another unit computes at a time."""


class Meanwhile:
    """Work that the computing thread does between the experts of a layer. This base class does nothing."""

    may_start_loads = False
    """Whether `finished` may start loads. If so, the first expert is computed alone, so that loads can start soon."""

    def residents_done(self, output: Callable[[], torch.Tensor]) -> None:
        """Called when the resident experts of a layer are computed and others are still missing. `output` returns the
        sum of the resident experts' outputs, [T, H]."""

    def finished(self, experts: int) -> None:
        """Called, if `may_start_loads`, with the number of experts of the layer that have been computed. The calls come
        after the first expert, after the other resident experts, and before and after each expert that must be waited
        for."""

    def end(self) -> None:
        """Called when all experts of the layer are computed."""


NOTHING = Meanwhile()


class LayerCompute:
    """The computation of all layers' experts on one device. Only the computing thread may use it."""

    def __init__(
        self,
        experts: Experts,
        arrivals: Arrivals,
        device: torch.device,
        units: Mapping[int, ComputeUnit],
        pacing: Pacing,
        others: Others | None = None,
    ) -> None:
        """`units`: the compute units that work in parallel with the device, by their number in plans (`Serve.unit`).
        `others`: the object that manages the units on other machines."""
        self.experts = experts
        self.arrivals = arrivals
        self.device = device
        self.units = units
        self.others = others
        self.pacing = pacing
        self._now = pacing.now
        self._are_small = arrivals.stores[EXACT].expert_bytes <= _SMALL_EXPERT_BYTES

    def reset(self) -> None:
        """Reset the compute units other than the device, and the counter of lateness. Nothing may be in flight."""
        for unit in self.units.values():
            unit.reset()
        self.pacing.reset()

    def recover(self) -> None:
        """Wait, after an error in a pass, until no compute unit other than the device has work in flight."""
        for unit in self.units.values():
            unit.drain()

    @property
    def helpers(self) -> list[Helpers]:
        """The objects that own threads, except the compute units."""
        return [*self.experts.helpers, *([] if self.others is None else [self.others])]

    def close(self) -> None:
        """End all threads and all compute units other than the device."""
        for each in (*self.helpers, *self.units.values()):
            each.close()

    def decode(
        self,
        plan: LayerPlan,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        meanwhile: Meanwhile = NOTHING,
    ) -> torch.Tensor:
        """Return the weighted sum of a plan's experts [T, H] for few tokens `hidden` [T, H]. Experts are computed in
        the plan's order. Their outputs are stored separately and summed at the end, in ascending order of experts."""
        if not plan.serves:
            return torch.zeros_like(hidden)
        counters = self.arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        from_unit = self._start_elsewhere(plan, hidden, top_k_weights.shape[1])
        total = self._few_tokens(plan, hidden, top_k_weights, from_unit, meanwhile)
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total

    def _start_elsewhere(
        self, plan: LayerPlan, hidden: torch.Tensor, width: int
    ) -> dict[ExpertKey, Future[torch.Tensor]]:
        """Start the plan's experts that compute units other than the device compute. Return their results as futures,
        by key."""
        given: dict[int, list[ExpertTask]] = {}
        for serve in plan.serves if self.units else ():
            if serve.unit != DEVICE:
                given.setdefault(serve.unit, []).append(_wanted(serve, width))
        if not given:
            return {}
        rows = Fetched(hidden)  # one copy for all units; no thread waits for it, so the device gets its work next
        found: dict[ExpertKey, Future[torch.Tensor]] = {}
        for unit, wanted in given.items():
            found |= zip((each.key for each in wanted), self.units[unit].submit(wanted, rows), strict=True)
        return found

    def _few_tokens(
        self,
        plan: LayerPlan,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        from_unit: dict[ExpertKey, Future[torch.Tensor]],
        meanwhile: Meanwhile,
    ) -> torch.Tensor:
        """Return the weighted sum of a plan's experts [T, H] for few tokens. `from_unit`: the results of experts that
        other compute units compute."""
        serves = plan.serves
        kernel = self._kernel_of_token(plan, hidden, meanwhile)
        if kernel is not None:
            return self._one_token(kernel, serves, hidden, top_k_weights)
        tokens = self.experts.begin[plan.layer](serves, hidden, top_k_weights)
        here = next((n for n, serve in enumerate(serves) if serve.waits), len(serves))
        if any(load.after for load in plan.loads):
            here = min(here, 1)  # a load waits for the slot of an expert of this plan
        alone = min(here, 1) if meanwhile.may_start_loads else here
        for begin, end in ((0, alone), (alone, here)):
            if begin < end:
                self._residents(tokens, serves, begin, end)
                meanwhile.finished(end)
        if here < len(serves):
            meanwhile.residents_done(lambda: tokens.partial(here))
        n = here
        while n < len(serves):
            if serves[n].unit != DEVICE:
                tokens.put(n, self._from_unit(from_unit, serves[n]))
                n += 1
                continue
            some = self._awaited_together(serves, n) if not meanwhile.may_start_loads else serves[n : n + 1]
            weights = [self.arrivals.weights_of(serve) for serve in some]
            meanwhile.finished(n)
            self._compute(tokens, n, weights, some)
            for serve in some:
                n += 1
                self.arrivals.served(serve, n)
            meanwhile.finished(n)
        return tokens.total()

    def _awaited_together(self, serves: Sequence[Serve], first: int) -> Sequence[Serve]:
        """Return the expert tasks from number `first` on that are computed in one call, after the last of their experts
        has arrived: one, or several whose loads have begun if the experts are small."""
        if not self._are_small:
            return serves[first : first + 1]
        end = first + 1
        while end < len(serves) and serves[end].unit == DEVICE and self.arrivals.is_coming(serves[end].key):
            end += 1
        return serves[first:end]

    def _kernel_of_token(self, plan: LayerPlan, hidden: torch.Tensor, meanwhile: Meanwhile) -> TokenExperts | None:
        """Return the kernel that computes all experts of one token at once, or None. It requires one token, and that
        its experts are supported by the kernel and resident, or so small that they are waited for together."""
        serves, kernel = plan.serves, self.experts.token_kernels[plan.layer]
        if hidden.shape[0] != 1 or len(serves) > MOST_EXPERTS or not hidden.is_contiguous():
            return None
        if any(serve.unit != DEVICE or len(serve.routes) != 1 for serve in serves) or meanwhile.may_start_loads:
            return None
        is_complete = not plan.loads and not any(serve.waits for serve in serves)
        may_wait = self._are_small and meanwhile is NOTHING and not any(load.after for load in plan.loads)
        return kernel if is_complete or may_wait else None

    def _one_token(
        self, kernel: TokenExperts, serves: Sequence[Serve], hidden: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum [1, H] of a plan's experts for one token [1, H]; top_k_weights [1, K]. Experts that
        are not resident are waited for first."""
        gains, out, ascending = top_k_weights.flatten().tolist(), torch.empty_like(hidden), sorted(serves, key=_key_of)
        matrices = [self.arrivals.weights_of(serve).matrices for serve in ascending]
        self._multiply(kernel, hidden, matrices, [gains[serve.routes[0]] for serve in ascending], out)
        self._note_served(serves, 0)
        return out

    def _multiply(
        self,
        kernel: TokenExperts,
        hidden: torch.Tensor,
        matrices: Sequence[Sequence[Matrix]],
        gains: Sequence[float],
        out: torch.Tensor,
    ) -> None:
        """Compute all experts of one token [1, H] by one call of machine code, and write their weighted sum to
        `out`."""
        kernel.one_token(hidden, matrices, gains, out)

    def _note_served(self, serves: Sequence[Serve], first: int) -> None:
        """Record that the expert tasks `serves` are done. `first`: the number of tasks of the plan that were done
        before them."""
        for computed, serve in enumerate(serves, start=first + 1):
            self.arrivals.served(serve, computed)

    def _residents(self, tokens: DecodeExperts, serves: Sequence[Serve], begin: int, end: int) -> None:
        """Compute the expert tasks `begin` to `end` - 1 of the plan in one call. All of their experts are resident."""
        weights = [self.arrivals.ready(serve.key) for serve in serves[begin:end]]
        self._compute(tokens, begin, weights, serves[begin:end])
        self._note_served(serves[begin:end], begin)

    def _compute(self, tokens: DecodeExperts, first: int, weights: Sequence[Weights], serves: Sequence[Serve]) -> None:
        """Compute consecutive expert tasks of the plan. `first`: the number of the first task, whose weights are
        `weights[0]`."""
        del serves  # only their number of rows takes time on another device (`paced.py`)
        tokens.compute(first, weights)

    def _is_short(self, plan: LayerPlan, hidden: torch.Tensor) -> bool:
        """Return whether a prompt can be computed by the method for few tokens: it is short, and a kernel computes its
        experts, all of them on this device."""
        if self.experts.maths[plan.layer, EXACT].kernels.token is None or hidden.shape[0] > _SHORT_PROMPT:
            return False
        return all(serve.unit == DEVICE for serve in plan.serves)

    def _from_unit(self, from_unit: dict[ExpertKey, Future[torch.Tensor]], serve: Serve) -> torch.Tensor:
        """Wait for the output of an expert that another compute unit computes, and return the output on the device."""
        started = self._now()
        result = from_unit.pop(serve.key).result()
        self.arrivals.counters.host_wait_seconds += self._now() - started
        return result.to(self.device, non_blocking=True)

    def prefill(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of a plan's experts [T, H] for many tokens. Experts are computed in ascending order,
        and each is read once. Loads of this layer and the next run at the same time."""
        kernel = self._prompt_kernel(plan)
        if kernel is not None:
            return self._prompt_by_kernel(plan, kernel, hidden, top_k_weights)
        if self._is_short(plan, hidden):
            return self.decode(plan, hidden, top_k_weights)
        total = empty_sum(self.experts.math_of(plan.serves[0].key), hidden, top_k_weights)
        flat_weights, width = top_k_weights.reshape(-1, 1), top_k_weights.shape[1]
        given = routes_on_device([serve.routes for serve in plan.serves], width, self.device)
        counters = self.arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        handed_over = _HandedOver.of(plan, self.units, hidden, width)
        for computed, serve in enumerate(plan.serves, start=1):
            route, tokens = given[computed - 1]
            if handed_over is None or serve.unit == DEVICE:
                self._add(total, serve, self.arrivals.weights_of(serve), hidden, tokens, flat_weights[route])
            else:
                y = self._from_unit(handed_over.under_way, serve)
                handed_over.go_on(serve.unit)
                add_rows(total, tokens, (y * flat_weights[route]).to(total.dtype))
            self.arrivals.served(serve, computed)
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total.to(hidden.dtype)

    def _add(
        self,
        total: torch.Tensor,
        serve: Serve,
        weights: Weights,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        gains: torch.Tensor,
    ) -> None:
        """Add the output of one expert to `total` [T, H]. `tokens`: the tokens of the prompt that chose the expert;
        `gains` [n, 1]: the factors for their outputs."""
        y = self.experts.math_of(serve.key).forward(hidden[tokens], weights)
        add_rows(total, tokens, (y * gains).to(total.dtype))

    def _prompt_kernel(self, plan: LayerPlan) -> TokenExperts | None:
        """Return the kernel that computes a prompt's experts and adds their outputs, or None if one of the experts
        needs another kernel."""
        formats = {serve.key[2] for serve in plan.serves}
        kernels = [self.experts.maths[plan.layer, each].prompt_kernel for each in formats]
        return kernels[0] if kernels and all(kernels) else None

    def _prompt_by_kernel(
        self, plan: LayerPlan, kernel: TokenExperts, hidden: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of a plan's experts [T, H] for many tokens, by our kernels. Experts are
        computed in ascending order; each call computes as many as are in memory. Experts that are to be computed
        occupy at most half of the staging slots; the other half is filled meanwhile. The outputs of other compute units
        are added in the same way, so that the sum does not depend on where an expert is computed."""
        counters, width = self.arrivals.counters, top_k_weights.shape[1]
        started, before = self._now(), counters.elsewhere_seconds
        prompt, computed, staged = PromptExperts(kernel, hidden), 0, 0
        table = self.arrivals.table
        most_staged = table.pool(plan.layer).staging_slots // 2
        handed_over = _HandedOver.of(plan, self.units, hidden, width)

        def finish(done: int) -> int:
            """Release the slots of the next `done` experts. Return the number of all computed experts."""
            for n in range(computed, computed + done):
                self.arrivals.served(plan.serves[n], n + 1)
            return computed + done

        def waits(serve: Serve) -> bool:
            """Return whether the experts added until now are to be computed first."""
            if handed_over is not None and serve.unit != DEVICE:
                return not handed_over.is_done(serve)
            if staged >= most_staged and (serve.waits or serve.key in table.staged):
                return True
            return serve.waits and not self.arrivals.needs_no_wait(serve.key)

        for serve, tokens, factors in zip(plan.serves, *_routed(plan.serves, top_k_weights), strict=True):
            if waits(serve) or not prompt.has_room(len(serve.routes)):
                computed, staged = finish(prompt.flush()), 0
            if handed_over is None or serve.unit == DEVICE:
                staged += serve.key in table.staged
                prompt.add(Chosen(self.arrivals.weights_of(serve).matrices, tokens, factors))
            else:
                prompt.add(Chosen((), tokens, factors, self._from_unit(handed_over.under_way, serve)))
                handed_over.go_on(serve.unit)
        finish(prompt.flush())
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return prompt.total.to(hidden.dtype)


class _HandedOver:
    """A prompt's experts that compute units other than the device compute. Each unit gets a few at a time, because the
    workspace has no room for the results of all experts."""

    def __init__(self, serves: Sequence[Serve], units: Mapping[int, ComputeUnit], hidden: Fetched, width: int) -> None:
        self.under_way: dict[ExpertKey, Future[torch.Tensor]] = {}
        self._units = units
        self._hidden, self._width = hidden, width
        self._waiting: dict[int, deque[Serve]] = {}
        for serve in serves:
            self._waiting.setdefault(serve.unit, deque()).append(serve)
        for _ in range(_HANDED_OVER):
            for unit in self._waiting:
                self.go_on(unit)

    @classmethod
    def of(
        cls, plan: LayerPlan, units: Mapping[int, ComputeUnit], hidden: torch.Tensor, width: int
    ) -> _HandedOver | None:
        """Return those of a plan; None if the device computes all experts."""
        elsewhere = [serve for serve in plan.serves if serve.unit != DEVICE]
        return cls(elsewhere, units, Fetched(hidden), width) if elsewhere else None

    def is_done(self, serve: Serve) -> bool:
        """Return whether the unit has computed this expert, which is under way."""
        return self.under_way[serve.key].done()

    def go_on(self, unit: int) -> None:
        """Submit the next of the prompt's experts to a compute unit, if one is left for it."""
        if self._waiting[unit]:
            serve = self._waiting[unit].popleft()
            (self.under_way[serve.key],) = self._units[unit].submit([_wanted(serve, self._width)], self._hidden)


def _routed(
    serves: Sequence[Serve], top_k_weights: torch.Tensor
) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.float32]]]:
    """Return, for each expert task, the tokens of its n routes [n] and their routing weights [n], for top_k_weights
    [T, K] on the CPU."""
    routes = np.fromiter(chain.from_iterable([serve.routes for serve in serves]), np.int64)
    ends = list(accumulate([len(serve.routes) for serve in serves], initial=0))
    tokens, gains = routes // top_k_weights.shape[1], top_k_weights.detach().float().flatten().numpy()[routes]
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    return [tokens[span] for span in spans], [gains[span] for span in spans]


def _key_of(serve: Serve) -> ExpertKey:
    return serve.key


def _wanted(serve: Serve, width: int) -> ExpertTask:
    return ExpertTask(serve.key, [route // width for route in serve.routes])
