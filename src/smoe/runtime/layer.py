"""Computes the experts of one layer according to its plan: resident ones first, then others as they arrive, summed in
fixed order.

Few tokens pass through all resident experts at once, a prompt through one expert after the other. Experts that the CPU
computes in parallel with the device are started first and fetched last.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import torch

from smoe.bounds import BF16, INT8
from smoe.compute.decode_experts import DecodeExperts, decode_experts, proven_kernel, routes_on_device
from smoe.compute.expert_math import ExpertMath, empty_sum
from smoe.compute.row_groups import Filling, MatrixShape
from smoe.compute.thread_pool import ThreadPool
from smoe.compute.unit import ComputeUnit, ExpertTask, Others
from smoe.expert import EXACT, ExpertKey
from smoe.gpu_kernels.slot_experts import SlotExperts
from smoe.kernels.experts import MOST_EXPERTS, TokenExperts
from smoe.kernels.prompt_experts import Chosen, PromptExperts
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.arena import Arena
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore
from smoe.memory.streams import Fetched
from smoe.policy.plan import DEVICE, LayerPlan, Serve
from smoe.runtime.arrivals import Arrivals
from smoe.runtime.lifetime import Helpers

_SHORT_PROMPT = 64
"""The maximum number of tokens of a prompt that may pass through a layer's experts at once: all outputs are separate
until the end."""
_HANDED_OVER = 4
"""The maximum number of experts of a prompt that another unit computes at a time."""
OnResidentsDone: TypeAlias = Callable[[Callable[[], torch.Tensor]], None]
"""A function that is called when the resident experts are done and others are not; its argument returns their output so
far [T, H]."""
OnLook: TypeAlias = Callable[[int], None]
"""A function that is called with the number of finished experts when there is time for other work: after the first,
after the other residents, and after each expert that was waited for."""


class LayerCompute:
    """The arithmetic of all layers' experts on one device. Only the computing thread may use it."""

    def __init__(
        self,
        store: ExpertStore,
        arrivals: Arrivals,
        arena: Arena,
        experts: Mapping[tuple[int, int], ExpertMath],
        units: Mapping[int, ComputeUnit],
        pacing: Pacing,
    ) -> None:
        """`store`: the full copies. `experts`: the arithmetic of each layer and format. `units`: the units that compute
        in parallel with the device, by their number in plans (`Serve.unit`)."""
        self.thread_pool: ThreadPool | None = None
        """Distributes resident experts over several threads (`compute_by`)."""
        self.spinning_pool: SpinningPool | None = None
        """Multiplies single rows with our kernel (`compute_by`)."""
        self.units = units
        self.others: Others | None = None
        """The owner of the units on other machines."""
        self.pacing = pacing
        self.store = store
        self.arrivals = arrivals
        self._arena = arena
        self._experts = experts
        self._now = pacing.now
        self._kernels: dict[tuple[int, int], TokenExperts] = {}
        """Layers and formats in which the pool may compute all experts of one token at once."""

    @property
    def device(self) -> torch.device:
        return self._arena.device

    @property
    def multiplies_codes(self) -> bool:
        """Whether our kernels multiply all quantized experts directly from their codes."""
        return self.spinning_pool is not None and all(math.is_movable for math in self._experts.values())

    def sum_as_weights(self) -> None:
        """From now on, sum outputs in the data type of the routing weights."""
        for math in self._experts.values():
            math.sums_as_weights = True

    def reset(self) -> None:
        """Reset the units and the counters; nothing may be in flight."""
        for unit in self.units.values():
            unit.reset()
        self.pacing.late_seconds = 0.0

    def recover(self) -> None:
        """Wait for the units after an error in a pass, so that nothing is in flight."""
        for unit in self.units.values():
            unit.drain()

    @property
    def arithmetic(self) -> str:
        """The kernels that multiply few rows, one of `KERNELS`: torch, native (our kernels with torch's bits) or
        own-order (E1)."""
        pool = self.spinning_pool
        return "torch" if pool is None else "native" if pool.own_order is None else "own-order"

    @property
    def activations(self) -> str:
        """The type to which rows are rounded before quantized experts multiply them: `INT8` or `BF16`."""
        return INT8 if any(math.rounds_rows for math in self._experts.values()) else BF16

    @property
    def helpers(self) -> list[Helpers]:
        """The objects that have threads, except units."""
        return [each for each in (self.thread_pool, self.spinning_pool, self.others) if each is not None]

    def close(self) -> None:
        """End all threads and units."""
        for each in (*self.helpers, *self.units.values()):
            each.close()

    def math_of(self, key: ExpertKey) -> ExpertMath:
        """Return the arithmetic of a copy."""
        return self._experts[key[0], key[2]]

    def kind(self, layer: int) -> tuple[object, ...]:
        """Return a value that is equal for layers whose experts are computed alike."""
        return self._experts[layer, EXACT].kind

    def hidden_size(self, layer: int) -> int:
        return self._experts[layer, EXACT].hidden

    def agrees(self, pool: SpinningPool) -> bool:
        """Return whether our kernel gives the library's bits on the resident experts, one of every shape.

        Also determines the layers in which the kernel may compute all experts of one token at once.
        """
        found: dict[tuple[object, ...], TokenExperts | None] = {}
        for key in sorted(self.arrivals.table.ready):
            math, weights = self.math_of(key), self.arrivals.ready(key)
            if math.kind not in found:
                if not math.agrees(pool, weights):
                    return False
                found[math.kind] = proven_kernel(math, pool, weights)
        for place, math in self._experts.items():
            kernel = found.get(math.kind)
            if kernel is not None and math.has_activation(kernel.table):
                self._kernels[place] = kernel
        return bool(found)

    def compute_by(self, helpers: SpinningPool | ThreadPool | None) -> None:
        """Choose how single rows are multiplied: by our kernel (`SpinningPool`), by the library with one thread for
        each expert (`ThreadPool`), or by the library alone (None).

        `agrees` must have returned True for a pool.
        """
        self.thread_pool = helpers if isinstance(helpers, ThreadPool) else None
        self.spinning_pool = helpers if isinstance(helpers, SpinningPool) else None
        for place, math in self._experts.items():
            math.compute_by(self.spinning_pool, None if self.spinning_pool is None else self._kernels.get(place))

    @property
    def maths(self) -> Mapping[tuple[int, int], ExpertMath]:
        """The arithmetic of experts, by layer and format."""
        return self._experts

    @property
    def is_in_slots(self) -> bool:
        """Whether few tokens use the GPU kernels."""
        return bool(self._experts) and all(math.slots is not None for math in self._experts.values())

    def compute_in_slots(self, kernels: Mapping[tuple[int, int], SlotExperts] | None) -> None:
        """Use these GPU kernels, by layer and format, for few tokens from now on; None: use torch."""
        for place, math in self._experts.items():
            math.slots = None if kernels is None else kernels[place]

    def fill_up_rows(self, dtype: torch.dtype) -> None:
        """Pad groups of rows to a few fixed sizes from now on, where that changes no bit."""
        found: dict[tuple[MatrixShape, MatrixShape], Filling] = {}
        for math in self._experts.values():
            if math.shapes not in found:
                found[math.shapes] = Filling(math.shapes, dtype)
            math.filling = found[math.shapes]

    def compute_slots(self, layer: int, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """Compute one token [1, H] with the content of `count` slots -> [1, H]; for measurements."""
        math, order, pool = self._experts[layer, EXACT], range(count), self.arrivals.table.pool(layer)
        placement = self.store.placement(layer, 0)
        slots = range(pool.first, pool.end)
        weights = [math.bind(self._arena, slots[n % len(slots)], placement.parts) for n in order]
        token = decode_experts(
            [math] * count, self.thread_pool, hidden, hidden.new_ones(1, count), [[n] for n in order], order
        )
        token.compute(0, weights)
        return token.total()

    def decode(
        self,
        plan: LayerPlan,
        hidden: torch.Tensor,
        top_k_weights: torch.Tensor,
        on_residents_done: OnResidentsDone,
        on_look: OnLook | None = None,
    ) -> torch.Tensor:
        """Compute few tokens: experts in the plan's order, with separate outputs, summed at the end in ascending order
        -> [T, H]."""
        if not plan.serves:
            return torch.zeros_like(hidden)
        counters = self.arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        from_unit = self._start_elsewhere(plan, hidden, top_k_weights.shape[1])
        total = self._few_tokens(plan, hidden, top_k_weights, from_unit, on_residents_done, on_look)
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total

    def _start_elsewhere(
        self, plan: LayerPlan, hidden: torch.Tensor, width: int
    ) -> dict[ExpertKey, Future[torch.Tensor]]:
        """Start the experts of other units."""
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
        on_residents_done: OnResidentsDone,
        on_look: OnLook | None,
    ) -> torch.Tensor:
        """Compute all experts of few tokens [T, H] -> [T, H]."""
        serves = plan.serves
        kernel = self._kernel_of_token(plan, hidden) if on_look is None else None
        if kernel is not None:
            return self._one_token(kernel, serves, hidden, top_k_weights)
        tokens = decode_experts(
            [self.math_of(serve.key) for serve in serves],
            self.thread_pool,
            hidden,
            top_k_weights,
            [serve.routes for serve in serves],
            sorted(range(len(serves)), key=lambda n: serves[n].key),
        )
        here = next((n for n, serve in enumerate(serves) if serve.waits), len(serves))
        if any(load.after for load in plan.loads):
            here = min(here, 1)  # a load waits for the slot of an expert of this plan
        alone = here if on_look is None else min(here, 1)
        for begin, end in ((0, alone), (alone, here)):
            if begin < end:
                self._residents(tokens, serves, begin, end)
                if on_look is not None:
                    on_look(end)
        if here < len(serves):
            on_residents_done(lambda: tokens.partial(here))
        for n, serve in enumerate(serves[here:], start=here):
            if serve.unit != DEVICE:
                tokens.put(n, self._from_unit(from_unit, serve))
                continue
            weights = [self.arrivals.weights_of(serve)]
            if on_look is not None:
                on_look(n)
            began = time.perf_counter()
            tokens.compute(n, weights)
            self.pacing.compute_experts(began, [len(serve.routes)])
            self.arrivals.served(serve, n + 1)
            if on_look is not None:
                on_look(n + 1)
        return tokens.total()

    def _kernel_of_token(self, plan: LayerPlan, hidden: torch.Tensor) -> TokenExperts | None:
        """Return the kernel that computes all experts of one token at once; None unless all are resident and it
        supports them."""
        serves = plan.serves
        if hidden.shape[0] != 1 or plan.loads or len(serves) > MOST_EXPERTS or not hidden.is_contiguous():
            return None
        if any(serve.waits or serve.unit != DEVICE or len(serve.routes) != 1 for serve in serves):
            return None
        maths = [self.math_of(serve.key) for serve in serves]
        if maths[0].sums_as_weights or any(math.kernel is None or math.slots is not None for math in maths):
            return None
        return maths[0].kernel

    def _one_token(
        self, kernel: TokenExperts, serves: Sequence[Serve], hidden: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute resident experts of one token [1, H] -> [1, H]; top_k_weights [1, K]."""
        gains, out, ascending = top_k_weights.flatten().tolist(), torch.empty_like(hidden), sorted(serves, key=_key_of)
        matrices = [self.arrivals.ready(serve.key).matrices for serve in ascending]
        began = time.perf_counter()
        kernel.one_token(hidden, matrices, [gains[serve.routes[0]] for serve in ascending], out)
        self.pacing.compute_experts(began, [1] * len(serves))
        self._note_served(serves, 0)
        return out

    def _note_served(self, serves: Sequence[Serve], first: int) -> None:
        """Record that these serves are computed; `first`: the number of serves before them."""
        planning = self.pacing.begin_planning()
        for computed, serve in enumerate(serves, start=first + 1):
            self.arrivals.served(serve, computed)
        self.pacing.end_planning(planning)

    def _residents(self, tokens: DecodeExperts, serves: Sequence[Serve], begin: int, end: int) -> None:
        """Compute the plan's serves `begin` to `end`, which are resident, at once."""
        weights = [self.arrivals.ready(serve.key) for serve in serves[begin:end]]
        began = time.perf_counter()
        tokens.compute(begin, weights)
        self.pacing.compute_experts(began, [len(serve.routes) for serve in serves[begin:end]])
        self._note_served(serves[begin:end], begin)

    def _is_short(self, plan: LayerPlan, hidden: torch.Tensor) -> bool:
        """Return whether a prompt is so short that its tokens pass through all experts at once, and all are
        resident."""
        if self._experts[plan.layer, EXACT].kernel is None or hidden.shape[0] > _SHORT_PROMPT:
            return False
        return not plan.loads and not any(serve.waits or serve.unit != DEVICE for serve in plan.serves)

    def _from_unit(self, from_unit: dict[ExpertKey, Future[torch.Tensor]], serve: Serve) -> torch.Tensor:
        started = self._now()
        result = from_unit.pop(serve.key).result()
        self.arrivals.counters.host_wait_seconds += self._now() - started
        return result.to(self._arena.device, non_blocking=True)

    def prefill(self, plan: LayerPlan, hidden: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute many tokens: experts in ascending order, each read once, while loads of this and the next layer run
        -> [T, H]."""
        kernel = self._prompt_kernel(plan)
        if kernel is not None:
            return self._prompt_in_bytes(plan, kernel, hidden, top_k_weights)
        if self._is_short(plan, hidden):
            return self.decode(plan, hidden, top_k_weights, lambda _: None)
        total = empty_sum(self.math_of(plan.serves[0].key), hidden, top_k_weights)
        flat_weights, width = top_k_weights.reshape(-1, 1), top_k_weights.shape[1]
        given = routes_on_device([serve.routes for serve in plan.serves], width, self._arena.device)
        counters = self.arrivals.counters
        started, before = self._now(), counters.elsewhere_seconds
        elsewhere = [serve for serve in plan.serves if serve.unit != DEVICE]
        handed_over = _HandedOver(elsewhere, self.units, Fetched(hidden), width) if elsewhere else None
        for computed, serve in enumerate(plan.serves, start=1):
            weights = None if serve.unit != DEVICE else self.arrivals.weights_of(serve)
            route, tokens = given[computed - 1]
            began = time.perf_counter()
            if weights is not None:
                y = self.math_of(serve.key).forward(hidden[tokens], weights)
            else:
                assert handed_over is not None
                y = self._from_unit(handed_over.under_way, serve)
                handed_over.go_on(serve.unit)
            total.index_add_(0, tokens, (y * flat_weights[route]).to(total.dtype))
            if weights is not None:
                self.pacing.compute_experts(began, [len(serve.routes)])
            self.arrivals.served(serve, computed)
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return total.to(hidden.dtype)

    def _prompt_kernel(self, plan: LayerPlan) -> TokenExperts | None:
        """Return the kernel that multiplies all experts of a prompt in 8 bits; None unless all are computed here in
        this way."""
        kernels = [self.math_of(serve.key).byte_kernel for serve in plan.serves if serve.unit == DEVICE]
        return kernels[0] if kernels and all(kernels) and len(kernels) == len(plan.serves) else None

    def _prompt_in_bytes(
        self, plan: LayerPlan, kernel: TokenExperts, hidden: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute many tokens in 8 bits, experts in ascending order, as many at once as are resident -> [T, H]."""
        counters, width = self.arrivals.counters, top_k_weights.shape[1]
        started, before = self._now(), counters.elsewhere_seconds
        gains, prompt, computed = top_k_weights.flatten().tolist(), PromptExperts(kernel, hidden), 0

        def finish(done: int) -> int:
            """Release the slots of the next `done` experts. Return the number of computed experts."""
            for n in range(computed, computed + done):
                self.arrivals.served(plan.serves[n], n + 1)
            return computed + done

        for serve in plan.serves:
            if serve.waits or not prompt.has_room(len(serve.routes)):
                computed = finish(prompt.flush())
            matrices = self.arrivals.weights_of(serve).matrices
            prompt.add(
                Chosen(matrices, [route // width for route in serve.routes], [gains[route] for route in serve.routes])
            )
        finish(prompt.flush())
        counters.compute_seconds += self._now() - started - (counters.elsewhere_seconds - before)
        return prompt.total.to(hidden.dtype)


class _HandedOver:
    """A prompt's experts on other units: each unit gets a few at a time, because the workspace has no room for their
    results."""

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

    def go_on(self, unit: int) -> None:
        """Give the unit its next expert."""
        if self._waiting[unit]:
            serve = self._waiting[unit].popleft()
            (self.under_way[serve.key],) = self._units[unit].submit([_wanted(serve, self._width)], self._hidden)


def _key_of(serve: Serve) -> ExpertKey:
    return serve.key


def _wanted(serve: Serve, width: int) -> ExpertTask:
    return ExpertTask(serve.key, [route // width for route in serve.routes])
