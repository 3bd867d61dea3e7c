"""Computes experts on the CPU, from the host tier, while the device and the link do other work.

One thread computes. If experts are read at the same time (`experts_alone.py`), another thread reads. With experts a, b,
c, d and time to the right:

    reading      | a ........ | b ........ |    wait for a slot    | d ........ |
    computing                 | a ............. | b ............. | c ...

The bits are those of a CPU, so a layer computed on both CPU and GPU has grade E2. An emulated device is this CPU, so
there E0 and E1 remain.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from smoe.compute.unit import Arithmetic, ComputeUnit, ExpertTask, Hidden
from smoe.expert import EXACT, ExpertKey
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.host import HostTier, Lease
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore
from smoe.policy.load_or_compute import FLAT, Balance, Costs, RecentCosts
from smoe.policy.prediction import Prediction
from smoe.routing import Phase, Routing

if TYPE_CHECKING:
    import torch

    from smoe.memory.link import Link


class _There(NamedTuple):
    """An expert in the host tier. It cannot be evicted until its lease ends."""

    lease: Lease
    seconds: float | None
    """The time that reading it took, in seconds; None if it was in the host tier already."""


class HostExperts:
    """A compute unit that computes experts on the CPU, in parallel with the device. Only the computing thread calls
    `submit`."""

    def __init__(
        self,
        host: HostTier,
        filler: Filler,
        store: ExpertStore,
        math: Mapping[int, Arithmetic],
        threads: int,
        pacing: Pacing,
        reads_concurrently: bool = False,
        has_library: bool = True,
    ) -> None:
        """`math`: the arithmetic by layer. `threads`: the number of torch's threads. `has_library`: whether torch is
        available.

        `reads_concurrently`: whether another thread reads missing experts, in the order of requests, while earlier
        experts are computed. A read expert keeps its slot until it is computed, so the number of slots limits reading
        ahead.
        """
        self._host = host
        self._filler = filler
        self._store = store
        self._math = math
        self._pacing = pacing
        self._timed: deque[tuple[float, int]] = deque(maxlen=64)
        self._read: deque[float] = deque(maxlen=64)
        self.busy_seconds = 0.0
        """The time spent computing."""
        self._pool: SpinningPool | None = None
        """The pool that multiplies single rows; None: torch."""
        self._under_way: set[Future[torch.Tensor]] = set()
        # a method would let the threads keep this object alive
        begin = (_begin, (threads,)) if has_library else (None, ())
        self._worker = ThreadPoolExecutor(1, "smoe-host-experts", *begin)
        self._reader = ThreadPoolExecutor(1, "smoe-host-reads") if reads_concurrently else None

    def multiply_by(self, pool: SpinningPool | None) -> bool:
        """Multiply single rows by our kernel on `pool`. If the kernel's bits differ from torch's, use torch and return
        False. If `pool` is None, use torch.

        One expert of every shape is compared; no other computation may be running. This object closes the pool when
        another replaces it, or at the end, whether the pool is used or not.
        """
        former, self._pool = self._pool, pool
        self._math = _by_pool(self._math, None)
        if former is not None:
            former.close()
        if pool is None:
            return True
        shapes = {math.kind: layer for layer, math in self._math.items()}
        for layer in shapes.values():
            with self._held((layer, 0, EXACT)) as weights:
                if not self._math[layer].agrees(pool, weights):
                    return False
        self._math = _by_pool(self._math, pool)
        return True

    def submit(self, wanted: Sequence[ExpertTask], hidden: Hidden) -> list[Future[torch.Tensor]]:
        """Start to compute experts for some rows of `hidden` [T, H]. Return for each expert a future of its output [n,
        H], on the CPU.

        The call never blocks: the computing thread waits for rows from the device. Missing experts are read from disk
        first. `Future.result()` raises errors of the computation.
        """
        if self._reader is None:
            return [self._submit(each, None, hidden) for each in wanted]
        futures: dict[int, Future[torch.Tensor]] = {}
        here_first = sorted(range(len(wanted)), key=lambda n: not self._host.has(wanted[n].key))
        for n in here_first:
            coming = self._reader.submit(self._bring, wanted[n].key)
            futures[n] = self._submit(wanted[n], coming, hidden)
            futures[n].add_done_callback(partial(self._forget, coming))
        return [futures[n] for n in range(len(wanted))]

    def bring(self, key: ExpertKey) -> None:
        """Load an expert into the host tier if it is missing. A reading thread calls this method."""
        self._host.give_back(self._bring(key).lease)

    def measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, rows) for every expert computed since the last call."""
        while self._timed:
            yield self._timed.popleft()

    def reads(self) -> Iterator[float]:
        """Yield the seconds of every read whose expert was computed since the last call."""
        while self._read:
            yield self._read.popleft()

    def drain(self) -> None:
        """Cancel the computations that have not begun, and wait for the running ones."""
        pending = list(self._under_way)
        for future in pending:
            future.cancel()
        wait(pending)

    def reset(self) -> None:
        """Wait until no computation is running, and reset the measurements."""
        self.drain()
        self._timed.clear()
        self._read.clear()
        self.busy_seconds = 0.0

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def _submit(self, wanted: ExpertTask, coming: Future[_There] | None, hidden: Hidden) -> Future[torch.Tensor]:
        future = self._worker.submit(self._compute, wanted.key, coming, hidden, wanted.tokens)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def _compute(
        self, key: ExpertKey, coming: Future[_There] | None, hidden: Hidden, tokens: Sequence[int]
    ) -> torch.Tensor:
        with self._held(key, coming) as weights:
            x = hidden.wait()[list(tokens)]
            began = time.perf_counter()
            with self._pacing.computing_on_host(x.shape[0]):
                out: torch.Tensor = self._math[key[0]].forward(x, weights)
            seconds = (time.perf_counter() - began) / self._pacing.dilation
            self.busy_seconds += seconds
            self._timed.append((seconds, x.shape[0]))
            return out.pin_memory() if hidden.is_from_device else out

    @contextmanager
    def _held(self, key: ExpertKey, coming: Future[_There] | None = None) -> Iterator[Any]:
        """Provide the weights of an expert in the host tier during the `with` block. Read the expert if it is missing.
        If `coming` is given, another thread reads the expert; wait for that thread."""
        there = self._bring(key) if coming is None else coming.result()
        if coming is not None and there.seconds is not None:
            self._read.append(there.seconds)
        try:
            layer, expert, _ = key
            parts = self._store.placement(layer, expert).parts
            yield self._math[layer].bind(self._host.arena, there.lease.slot, parts)
        finally:
            self._host.give_back(there.lease)

    def _bring(self, key: ExpertKey) -> _There:
        """Load an expert's full-precision copy into the host tier if it is missing. Return the expert with a lease,
        which the caller must end.

        The CPU never computes low-precision copies; these are loaded to the device.
        """
        lease = self._host.lease(key)
        if lease.is_hit:
            return _There(lease, None)
        try:
            began = time.perf_counter()
            self._filler.fill(key, self._host.arena.buffer(lease.slot), None)
            self._host.note_filled(lease)
            return _There(lease, time.perf_counter() - began)
        except BaseException:
            self._host.give_back(lease)
            raise

    def _forget(self, coming: Future[_There], computed: Future[torch.Tensor]) -> None:
        """End the lease of an expert whose computation was cancelled, as soon as it has been read."""
        if computed.cancelled() and not coming.cancel():
            coming.add_done_callback(self._give_back)

    def _give_back(self, came: Future[_There]) -> None:
        if came.exception() is None:
            self._host.give_back(came.result().lease)


def _begin(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def _by_pool(maths: Mapping[int, Arithmetic], pool: SpinningPool | None) -> dict[int, Arithmetic]:
    """Return the arithmetic of every layer with the kernels of `pool`. Layers that shared an arithmetic object share
    the new one too."""
    made = {id(math): math.by_pool(pool) for math in {id(math): math for math in maths.values()}.values()}
    return {layer: made[id(math)] for layer, math in maths.items()}


class Balancer:
    """Divides a layer's missing experts between loads to the device and the CPU, by the costs measured last or by the
    costs `fixed`."""

    def __init__(
        self,
        method: str,
        order: str,
        link: Link,
        host: ComputeUnit,
        pacing: Pacing,
        fixed: Costs | None,
        shares_prompts: bool,
        recent: int,
        own_bytes: int,
    ) -> None:
        """`own_bytes`: the size in bytes of a slot of a full-precision copy. The measured times of other loads are
        scaled to this size."""
        self.shares_prompts = shares_prompts
        """Whether the CPU also computes experts of prompts."""
        self._pacing = pacing
        self._method = method
        self._order = order
        self._link = link
        self._host = host
        self._fixed = fixed
        self._recent = RecentCosts(recent)
        self._own_bytes = own_bytes

    def begin_pass(self, position: int) -> None:
        """Do nothing, because the CPU is always available. Balancers for other machines use this call to choose the
        available machines."""

    def balance(self, routing: Routing, under_way: float) -> Balance | None:
        """Return the division of one layer's missing experts between loads and the CPU, while `under_way` loads are in
        flight. Return None if the device computes all missing experts."""
        if not self._pacing.is_paced or (routing.phase is Phase.PREFILL and not self.shares_prompts):
            return None
        return Balance(self._method, self._order, self.costs(under_way))

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Return all predictions unchanged, because experts are prefetched only for the device and never for the
        CPU."""
        return predictions

    def costs(self, under_way: float) -> Costs:
        """Return the costs of loading and of computing an expert, as measured last, while `under_way` loads are in
        flight."""
        for seconds, nbytes in self._link.measured():
            self._recent.note_load(seconds * self._own_bytes / nbytes)
        for seconds, rows in self._host.measured():
            if rows > FLAT:
                self._recent.note_token(seconds / rows)
            else:
                self._recent.note_host(seconds / rows if self._order == "tokens" else seconds)
        return self._fixed if self._fixed is not None else self._recent.costs(under_way)
