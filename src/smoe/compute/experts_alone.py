"""A model's experts without the model: files, slots in host memory and arithmetic, and nothing else.

What a worker of a cluster has, and what the main machine falls back to where its workers fail. The same expert code as
the engine's, on whatever the slots hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from smoe.compute.expert_math import ExpertMath
from smoe.compute.host_experts import HostExperts
from smoe.expert import EXACT, ExpertKey
from smoe.kernels.spinning_pool import SpinningPool
from smoe.memory.disk import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore

LEAST_SLOTS = 2
"""With which an expert is read while another is computed. One will do: then both take turns."""


class ExpertsAlone:
    """Experts that can be asked for by name. `close` frees slots, files and threads."""

    def __init__(
        self,
        store: ExpertStore,
        math: Mapping[int, ExpertMath],
        sizes: Sequence[tuple[int, int]],
        size_of: Callable[[ExpertKey], int],
        is_direct: bool,
        threads: int,
    ) -> None:
        """`sizes`: (slots, bytes of each); `size_of`: which of them an expert has; `is_direct`: read past the page
        cache."""
        self.slots = sum(slots for slots, _ in sizes)
        self.store = store
        self.math = math
        self._reader = DiskReader(is_direct)
        self._host = HostTier(sizes, size_of, lambda _: False, huge_pages=is_direct)
        self._threads = threads
        filler = Filler({EXACT: store}, self._reader)
        self.experts = HostExperts(self._host, filler, store, math, threads, Pacing(), reads_beside=True)

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return self._host.arena.nbytes

    @property
    def hidden(self) -> int:
        """Numbers in a row."""
        return next(iter(self.math.values())).hidden

    def compute_by(self, arithmetic: str) -> bool:
        """From now on few rows are multiplied by one of `KERNELS` that the main machine has found best; False where
        that is not to be had here. While nothing is under way; what computed before is ended."""
        if arithmetic == "torch":
            return self.experts.multiply_by(None)
        return self.experts.multiply_by(SpinningPool(self._threads, in_own_order=arithmetic == "own-order"))

    def close(self) -> None:
        self.experts.drain()
        self.experts.close()
        self._host.close()
        self._reader.close()
