"""A model's experts without the model: files, slots in host memory and arithmetic, and nothing else.

What a worker of a cluster has, and what the main machine falls back to where its workers fail. The same expert code as
the engine's, on whatever the slots hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from smoe.compute.expert_math import ExpertMath
from smoe.compute.host_experts import HostExperts
from smoe.config import EngineConfig
from smoe.expert import EXACT
from smoe.kernels.spinning_pool import SpinningPool
from smoe.load.tiers import host_sizes, reads_directly, size_of
from smoe.machine.available_memory import free_device_bytes
from smoe.memory.disk import DiskReader
from smoe.memory.host import HostTier
from smoe.memory.movers import Filler
from smoe.memory.pacing import Pacing
from smoe.memory.store import ExpertStore
from smoe.policy.budget import SlotClass

_CPU = torch.device("cpu")


class ExpertsAlone:
    """Experts that can be asked for by name. `close` frees slots, files and threads."""

    def __init__(
        self,
        store: ExpertStore,
        math: Mapping[int, ExpertMath],
        classes: Sequence[SlotClass],
        memory_bytes: int,
        config: EngineConfig,
        threads: int,
    ) -> None:
        """`classes`: of the experts' own copies; `memory_bytes` for slots, of which there are a few at least."""
        sizes = host_sizes(classes, memory_bytes, config.io_threads)
        self.slots = sum(slots for slots, _ in sizes)
        nbytes = sum(slots * each for slots, each in sizes)
        free, _ = free_device_bytes(_CPU)
        is_direct = reads_directly(config, store.total_bytes, free - nbytes)
        self._reader = DiskReader(is_direct)
        self._host = HostTier(sizes, size_of(classes), lambda _: False, huge_pages=is_direct)
        self._threads = threads
        self.store = store
        self.math = math
        self.experts = HostExperts(
            self._host, Filler({EXACT: store}, self._reader), store, math, threads, Pacing()
        )

    def compute_by(self, arithmetic: str) -> bool:
        """From now on few rows are multiplied by one of `KERNELS` that the main machine has found best; False where
        that is not to be had here. Before anything is asked for."""
        if arithmetic == "torch":
            return True
        return self.experts.multiply_by(SpinningPool(self._threads, in_own_order=arithmetic == "own-order"))

    def close(self) -> None:
        self.experts.drain()
        self.experts.close()
        self._host.close()
        self._reader.close()
