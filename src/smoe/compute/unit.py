"""The interface of compute units. A compute unit computes experts in parallel with the device: the CPU, or another
machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from smoe.expert import ExpertKey
from smoe.policy.balance import Sharing
from smoe.policy.prediction import Prediction
from smoe.routing import Routing

if TYPE_CHECKING:
    import torch

    from smoe.kernels.spinning_pool import SpinningPool
    from smoe.memory.arena import Arena
    from smoe.memory.streams import Fetched


class ExpertTask(NamedTuple):
    """An expert to compute, and the rows of the hidden states that are routed to it."""

    key: ExpertKey
    tokens: Sequence[int]


class Arithmetic(Protocol):
    """The arithmetic of a layer's experts on the host: by torch and our kernels (`expert_math.py`), where rows are
    tensors, or by our kernels alone (`kernel_math.py`), where rows are `Bits`."""

    hidden: int
    """The number of elements in a row (H)."""

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for layers whose experts are computed in the same way."""

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Any:
        """Return the weights of the expert in `slot`. `offsets`: the offset of each part in the slot, in bytes."""

    def agrees(self, pool: SpinningPool, weights: Any) -> bool:
        """Return whether `pool` may multiply weights like these."""

    def by_pool(self, pool: SpinningPool | None) -> Self:
        """Return the same arithmetic with the kernels of `pool`; None: with torch."""

    def forward(self, x: Any, weights: Any) -> Any:
        """Return the expert's output [n, H] for rows x [n, H], not yet multiplied by the routing weight."""


class Hidden(Protocol):
    """Rows that experts take as input. They may still be being copied to the host."""

    @property
    def is_from_device(self) -> bool:
        """Whether the rows come from a device with its own memory."""

    def wait(self) -> Any:
        """Wait until the rows are on the host, and return them [T, H]."""


class ComputeUnit(Protocol):
    """Computes the experts that a plan assigns to it (`Serve.unit`). Only the computing thread calls it."""

    busy_seconds: float
    """The total time spent computing, in seconds."""

    def submit(self, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Start to compute experts for some rows of `hidden` [T, H]. Return for each expert a future of its output [n,
        H], on the CPU.

        The call never blocks. Errors are raised by `Future.result()`.
        """

    def measured(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds, rows) for every expert computed since the last call."""

    def drain(self) -> None:
        """Cancel tasks that have not begun, and wait for the others."""

    def reset(self) -> None:
        """Wait until nothing is running, and reset the measurements."""

    def close(self) -> None:
        """Stop the unit's threads. Repeated calls have no effect."""


class Others(Protocol):
    """The other machines on which compute units run."""

    @property
    def doubts(self) -> Sequence[str]:
        """Messages for the user about signs that results of these machines are wrong; empty if there is no such
        sign."""

    def described(self) -> list[dict[str, Any]]:
        """Return what each machine has done, for display and for programs."""

    def lost(self) -> list[dict[str, Any]]:
        """Return the machines to which the connection was lost. The entries are: name, why, at (seconds since 1970)."""

    @property
    def draft(self) -> dict[str, Any] | None:
        """A description of the machine that runs the draft model; None without such a machine."""

    def close(self) -> None:
        """Disconnect from the machines. Repeated calls have no effect."""


class Sharer(Protocol):
    """Decides how a layer's missing experts are divided between loads and compute units. Only the computing thread
    calls it."""

    def begin_pass(self, position: int) -> None:
        """Note that a forward pass begins at this position of a text. The set of available units may change now, and
        then not until the next pass."""

    def balance(self, routing: Routing, under_way: float) -> Sharing | None:
        """Return how to divide one layer's missing experts while `under_way` loads are in flight. None if the device
        computes all of them."""

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """Pass predicted experts to the units that prefetch them. Return the predictions that this machine should
        prefetch."""
