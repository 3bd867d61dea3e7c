"""What computes experts in parallel with the device: the CPU, or another machine."""

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
    """An expert, and the rows of hidden that go through it."""

    key: ExpertKey
    tokens: Sequence[int]


class Arithmetic(Protocol):
    """How the experts of a layer compute on the host: by the library and our kernels (`expert_math.py`), or by our
    kernels alone (`kernel_math.py`). Rows are tensors there, and `Bits` here."""

    hidden: int
    """Numbers in a row."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers whose experts are computed alike."""

    def bind(self, arena: Arena, slot: int, offsets: Mapping[str, int]) -> Any:
        """The weights of the expert in `slot`; `offsets` are the parts' slot offsets in bytes."""

    def agrees(self, pool: SpinningPool, weights: Any) -> bool:
        """Whether `pool` may multiply such weights."""

    def compute_by(self, pool: SpinningPool | None, kernel: TokenExperts | None) -> None:
        """Compute by these kernels from now on."""

    def forward(self, x: Any, weights: Any) -> Any:
        """[n, H] -> [n, H], before the routing weight."""


class Hidden(Protocol):
    """Rows that experts are to compute, once they are on the host."""

    @property
    def is_from_device(self) -> bool:
        """Whether they come from a memory of the device's own."""

    def wait(self) -> Any:
        """The rows [T, H]."""


class ComputeUnit(Protocol):
    """Computes the experts that a plan gives it (`Serve.unit`). Belongs to the computing thread."""

    busy_seconds: float
    """Time spent computing."""

    def submit(self, wanted: Sequence[ExpertTask], hidden: Fetched) -> list[Future[torch.Tensor]]:
        """Compute experts for some rows of hidden [T, H]; the result of each [n, H] is on the CPU.

        Never blocks; what fails raises at `Future.result()`.
        """

    def measured(self) -> Iterator[tuple[float, int]]:
        """(seconds, rows) of every expert computed since the last call."""

    def drain(self) -> None:
        """Forget what has not begun and wait for what has."""

    def reset(self) -> None:
        """Nothing under way, nothing counted."""

    def close(self) -> None:
        """Stop its threads; any number of times."""


class Others(Protocol):
    """The machines that units are on."""

    @property
    def doubts(self) -> Sequence[str]:
        """Why what they have computed may be wrong, in words for the user; empty: nothing speaks against it."""

    def described(self) -> list[dict[str, Any]]:
        """What each has done, for people and programs."""

    def lost(self) -> list[dict[str, Any]]:
        """Who was there, and was not any more: name, why, at (seconds since 1970)."""

    @property
    def shadow(self) -> dict[str, Any] | None:
        """The same of the one that runs ahead; None where none came."""

    def close(self) -> None:
        """Let them go; any number of times."""


class Sharer(Protocol):
    """Says how a layer's misses are shared out between loads and units. Belongs to the computing thread."""

    def begin_pass(self, position: int) -> None:
        """A forward pass begins at this position of a text: which units there are may change now, and not before the
        next one."""

    def balance(self, routing: Routing, under_way: float) -> Sharing | None:
        """A balance for one layer, with so many loads under way; None where the device computes everything."""

    def guess(self, predictions: Iterable[Prediction]) -> Iterable[Prediction]:
        """What later layers are expected to want: of it what is to be brought in here. The rest, if any, units have
        been told of."""
