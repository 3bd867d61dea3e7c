"""The interface of compute units. A compute unit computes experts in parallel with the device: the CPU, or another
machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from smoe.expert import ExpertKey
from smoe.policy.load_or_compute import Sharing
from smoe.policy.prediction import Prediction
from smoe.routing import Routing

if TYPE_CHECKING:
    import torch

    from smoe.kernels.spinning_pool import SpinningPool
    from smoe.memory.arena import Arena
    from smoe.memory.streams import Fetched


class ExpertTask(NamedTuple):
    """An expert to compute, and the indices of the rows of the hidden states that are routed to the expert."""

    key: ExpertKey
    tokens: Sequence[int]


class Arithmetic(Protocol):
    """The arithmetic of a layer's experts on the host: by torch and our kernels (`expert_math.py`), where rows are
    tensors, or by our kernels alone (`kernel_math.py`), where rows are `Bits`."""

    hidden: int
    """The number of elements in a row (H)."""

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for two layers if their experts are computed in the same way."""

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Any:
        """Return the weights of the expert in `slot`. `offsets`: for each weight tensor, its offset in the slot in
        bytes."""

    def agrees(self, pool: SpinningPool, weights: Any) -> bool:
        """Return whether a test allows the kernels of `pool` to multiply weights of this shape and format."""

    def by_pool(self, pool: SpinningPool | None) -> Self:
        """Return this arithmetic with the kernels of `pool`; None: with torch."""

    def forward(self, x: Any, weights: Any) -> Any:
        """Return the expert's output [n, H] for rows x [n, H], not yet multiplied by the routing weight."""


class Hidden(Protocol):
    """The rows of hidden states that experts take as input. The copy of the rows to the host may still be running."""

    @property
    def is_from_device(self) -> bool:
        """Whether the rows are copied from a device with its own memory, such as a GPU."""

    def wait(self) -> Any:
        """Wait until the rows are on the host, and return them [T, H]."""


class ComputeUnit(Protocol):
    """A CPU or another machine that computes the experts that a plan assigns to it (`Serve.unit`). Only the computing
    thread calls its methods."""

    busy_seconds: float
    """The total time spent computing, in seconds."""

    def submit(self, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Start to compute experts for some rows of `hidden` [T, H]. Return for each expert a future of its output [n,
        H], on the CPU.

        The call never blocks. `Future.result()` raises errors of the computation.
        """

    def measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, rows) for every expert computed since the last call."""

    def drain(self) -> None:
        """Cancel the computations that have not begun, and wait for the running ones."""

    def reset(self) -> None:
        """Wait until no computation is running, and reset the measurements."""

    def close(self) -> None:
        """Stop the unit's threads. Repeated calls have no effect."""


class Others(Protocol):
    """The other machines (workers) that compute experts for this one, as a whole."""

    @property
    def doubts(self) -> Sequence[str]:
        """Messages for the user about signs that results of the other machines are wrong; empty if there is no such
        sign."""

    def described(self) -> list[dict[str, Any]]:
        """Return one record per machine with the work that it has done, for display and for programs."""

    def lost(self) -> list[dict[str, Any]]:
        """Return the machines to which the connection was lost. The entries are: name, why, at (seconds since 1970)."""

    @property
    def draft(self) -> dict[str, Any] | None:
        """A description of the machine that runs the draft model; None if no machine runs one."""

    def close(self) -> None:
        """Disconnect from the other machines. Repeated calls have no effect."""


class Sharer(Protocol):
    """Divides a layer's missing experts between loads to the device and compute units (the CPU, other machines). Only
    the computing thread calls its methods."""

    def begin_pass(self, position: int) -> None:
        """Note that a forward pass begins at this position of a text. The set of available compute units may change
        now, and stays the same until the next pass."""

    def balance(self, routing: Routing, under_way: float) -> Sharing | None:
        """Return the division of one layer's missing experts between loads and compute units, while `under_way` loads
        are in flight. Return None if the device computes all missing experts."""

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Pass predicted experts to the compute units that prefetch them. Return the predictions that this machine
        should prefetch."""
