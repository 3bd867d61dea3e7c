"""The interface of compute units, which compute experts in parallel with the device: the CPU or another machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from smoe.expert import ExpertKey
from smoe.policy.balance import Sharing
from smoe.policy.prediction import Prediction
from smoe.routing import Routing

if TYPE_CHECKING:
    import torch

    from smoe.kernels.experts import TokenExperts
    from smoe.kernels.spinning_pool import SpinningPool
    from smoe.memory.arena import Arena
    from smoe.memory.streams import Fetched


class ExpertTask(NamedTuple):
    """An expert, and the rows of the hidden states routed to it."""

    key: ExpertKey
    tokens: Sequence[int]


class Arithmetic(Protocol):
    """The arithmetic of a layer's experts on the host, by torch and our kernels (`expert_math.py`) or by our kernels
    alone (`kernel_math.py`). Rows are tensors in the former and `Bits` in the latter."""

    hidden: int
    """The number of elements in a row (H)."""

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for layers whose experts are computed alike."""

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Any:
        """Return the weights of the expert in `slot`; `offsets` are the parts' slot offsets in bytes."""

    def agrees(self, pool: SpinningPool, weights: Any) -> bool:
        """Return whether `pool` may multiply such weights."""

    def compute_by(self, pool: SpinningPool | None, kernel: TokenExperts | None) -> None:
        """Compute with these kernels from now on."""

    def forward(self, x: Any, weights: Any) -> Any:
        """Compute [n, H] -> [n, H], before the routing weight."""


class Hidden(Protocol):
    """Rows for experts to compute, possibly still being copied to the host."""

    @property
    def is_from_device(self) -> bool:
        """Whether the rows come from a device with its own memory."""

    def wait(self) -> Any:
        """Wait for the rows and return them: [T, H]."""


class ComputeUnit(Protocol):
    """A unit that computes experts assigned by a plan (`Serve.unit`). Only the computing thread calls it."""

    busy_seconds: float
    """The time spent computing."""

    def submit(self, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Compute experts for some rows of hidden [T, H]; each result [n, H] is on the CPU.

        Never blocks; errors are raised by `Future.result()`.
        """

    def measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, rows) of every expert computed since the last call."""

    def drain(self) -> None:
        """Cancel tasks that have not begun and wait for the others."""

    def reset(self) -> None:
        """Drain the tasks and reset the measurements."""

    def close(self) -> None:
        """Stop the unit's threads; may be called repeatedly."""


class Others(Protocol):
    """The machines that compute units run on."""

    @property
    def doubts(self) -> Sequence[str]:
        """Messages for the user about why their results may be wrong; empty if there is no sign of that."""

    def described(self) -> list[dict[str, Any]]:
        """Return what each machine has done, for display and for programs."""

    def lost(self) -> list[dict[str, Any]]:
        """Return the machines that were lost: name, why, at (seconds since 1970)."""

    @property
    def draft(self) -> dict[str, Any] | None:
        """The description of the machine that runs the draft model; None without one."""

    def close(self) -> None:
        """Disconnect from the machines; may be called repeatedly."""


class Sharer(Protocol):
    """Decides how a layer's missing experts are divided between loads and units. Only the computing thread calls it."""

    def begin_pass(self, position: int) -> None:
        """Note that a forward pass begins at this position of a text: available units may change now, and not before
        the next pass."""

    def balance(self, routing: Routing, under_way: float) -> Sharing | None:
        """Return the balance of one layer with `under_way` loads in flight, or None if the device computes
        everything."""

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Announce predicted experts to the units, if they use them, and return the predictions to prefetch on this
        machine."""
