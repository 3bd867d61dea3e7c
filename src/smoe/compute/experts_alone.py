"""Computes a model's experts without the rest of the model: from files, with slots in host memory.

Workers of a cluster compute experts by this module, and so does the coordinator when its workers fail. The arithmetic
is the engine's.
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
from smoe.memory.expert_files import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore

if TYPE_CHECKING:
    import torch

LEAST_SLOTS = 2
"""The smallest number of slots with which one expert can be read while another is computed. With one slot, reading and
computing alternate."""


class ExpertsAlone:
    """A service that computes experts by key, without the rest of the model. `close` frees its slots, files and
    threads."""

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
        """`sizes`: pairs of (number of slots, bytes per slot). `size_of`: a function that returns the index in `sizes`
        for an expert. `is_direct`: whether reads bypass the page cache. `has_library`: whether torch is available for
        products that our kernels do not compute."""
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
        """The size of all slots in bytes."""
        return self._host.arena.nbytes

    @property
    def hidden(self) -> int:
        """H, the number of elements in a row of hidden states."""
        return next(iter(self.math.values())).hidden

    def compute_by(self, arithmetic: str) -> bool:
        """Multiply few rows by the kernels `arithmetic`, one of `KERNELS`, which the coordinator chose. Return False if
        this machine does not support them.

        No computation may be running. The threads of the previous kernels end.
        """
        if arithmetic == "torch":
            return self._has_library and self.experts.multiply_by(None)
        is_ours = arithmetic == "own-order"
        if (widest() is None) if is_ours else not is_supported():
            return False
        return self.experts.multiply_by(SpinningPool(self.threads, not self._has_library, in_own_order=is_ours))

    def expect(self, keys: Sequence[ExpertKey]) -> list[ExpertKey]:
        """Set the experts that will be requested next, `keys`; other experts are evicted first. Return the experts in
        `keys` that must be read."""
        self._expected = set(keys)
        return [key for key in keys if not self._host.has(key)]

    def bring(self, key: ExpertKey) -> None:
        """Read an expert into its slot if it is still expected. A reading thread calls this method."""
        if key in self._expected:
            self.experts.bring(key)

    def submit(self, wanted: Sequence[ExpertTask], hidden: Hidden) -> list[Future[torch.Tensor]]:
        """Start to compute experts, as `ComputeUnit.submit` does, and return their results as futures. A computed
        expert is no longer among the expected ones."""
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
