"""A model's experts without the rest of the model: files, slots in host memory, and arithmetic.

Workers of a cluster use this, and the coordinator uses it when its workers fail. The code of the experts is the
engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from smoe.compute.host_experts import HostExperts
from smoe.compute.unit import Arithmetic, ExpertTask, Hidden
from smoe.expert import EXACT, ExpertKey
from smoe.kernels.isa import widest
from smoe.kernels.spinning_pool import SpinningPool, is_supported
from smoe.memory.disk import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore

if TYPE_CHECKING:
    import torch

LEAST_SLOTS = 2
"""The least number of slots with which reading and computing run concurrently. With one slot they alternate."""


class ExpertsAlone:
    """A service that computes experts by key. `close` frees slots, files and threads."""

    def __init__(
        self,
        store: ExpertStore,
        math: Mapping[int, Arithmetic],
        sizes: Sequence[tuple[int, int]],
        size_of: Callable[[ExpertKey], int],
        is_direct: bool,
        threads: int,
        has_library: bool = True,
    ) -> None:
        """`sizes`: (number of slots, bytes per slot); `size_of`: the index of an expert's size.

        `is_direct`: read past the page cache; `has_library`: torch computes what our kernels do not.
        """
        self.slots = sum(slots for slots, _ in sizes)
        self.store = store
        self.math = math
        self._reader = DiskReader(is_direct)
        self._expected = set[ExpertKey]()
        self._host = HostTier(sizes, size_of, lambda key: key not in self._expected, huge_pages=is_direct)
        self.threads = threads
        self._has_library = has_library
        filler = Filler({EXACT: store}, self._reader)
        self.experts = HostExperts(self._host, filler, store, math, threads, Pacing(), True, has_library)

    @property
    def nbytes(self) -> int:
        """The size in bytes of all slots."""
        return self._host.arena.nbytes

    @property
    def hidden(self) -> int:
        """The number of elements in a row (H)."""
        return next(iter(self.math.values())).hidden

    def compute_by(self, arithmetic: str) -> bool:
        """Multiply few rows by the one of `KERNELS` that the coordinator chose; return False if it is not available
        here.

        Nothing may be running. The former kernel's threads end.
        """
        if arithmetic == "torch":
            return self._has_library and self.experts.multiply_by(None)
        is_ours = arithmetic == "own-order"
        if (widest() is None) if is_ours else not is_supported():
            return False
        return self.experts.multiply_by(SpinningPool(self.threads, not self._has_library, in_own_order=is_ours))

    def expect(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Set the experts that will be requested next; all others are evicted first. Return those that must be read."""
        self._expected = set(keys)
        return [key for key in keys if not self._host.has(key)]

    def bring(self, key: ExpertKey) -> None:
        """Read an expert if it is still expected; called by a reading thread."""
        if key in self._expected:
            self.experts.bring(key)

    def submit(self, wanted: Sequence[ExpertTask], hidden: Hidden) -> list[Future[torch.Tensor]]:
        """Compute experts as in `ComputeUnit`; they are no longer expected afterwards."""
        futures = self.experts.submit(wanted, hidden)
        for each, future in zip(wanted, futures, strict=True):
            future.add_done_callback(partial(self._used, each.key))
        return futures

    def _used(self, key: ExpertKey, _: object) -> None:
        self._expected.discard(key)

    def close(self) -> None:
        self.experts.drain()
        self.experts.close()
        self._host.close()
        self._reader.close()
