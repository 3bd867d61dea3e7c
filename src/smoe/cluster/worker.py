"""A worker: computes the experts that the coordinator requests.

    connected --HELLO until answered--> WELCOME: serves --coordinator silent for a while--> HELLO again
                                        REFUSED: ends with the reason

One thread sends and receives; other threads compute and read, and wake it when they have something to send. A worker is
a pure function of (expert, rows), so a request may be repeated. Each WELCOME resets it: earlier requests are dropped,
and few rows are multiplied with the new coordinator's kernels.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zmq

from smoe import __version__
from smoe.cluster import frames
from smoe.cluster.dial import refusal
from smoe.cluster.frames import Frame, FrameError, FrameKind, RowFormat, Times
from smoe.cluster.stored_identity import Worker
from smoe.cluster.talking import Talking
from smoe.compute.experts_alone import ExpertsAlone
from smoe.config import EngineConfig
from smoe.errors import WorkerRefusedError
from smoe.expert import ExpertKey
from smoe.machine.processor import processor_name

if TYPE_CHECKING:
    import torch

PLANNED_ROWS = EngineConfig.prefill_tokens
"""The maximum number of rows of a request that the worker can receive, unless the coordinator announces a larger
number."""
_MOST_AHEAD = 64
"""The maximum number of announced experts that wait to be loaded; further announcements are dropped."""

_log = logging.getLogger(__name__)


class Served(NamedTuple):
    """The experts that a worker computes, and the properties of the model that must match the coordinator's."""

    alone: ExpertsAlone
    weights: str
    """The checksum of the checkpoint."""
    precision: str
    dtype: Any
    """The data type of rows: torch's dtype, or without torch a numpy dtype that holds the bits."""
    dtype_name: str
    """The dtype's name in torch."""

    @property
    def has_torch(self) -> bool:
        return not isinstance(self.dtype, np.dtype)


class AtHand(NamedTuple):
    """The hidden states of a request, which are already in memory. This class has the interface of `Fetched`, for rows
    that must be waited for."""

    rows: Any
    is_from_device: bool = False

    def wait(self) -> Any:
        return self.rows


class WorkerProcess(Talking):
    """The thread of a worker's connection to the coordinator."""

    def __init__(self, me: Worker, served: Served, on_change: Callable[[str], None] = lambda _: None) -> None:
        """`on_change` is called with a message for the user when the worker is admitted or has lost the coordinator."""
        super().__init__(me, on_change)
        self._served = served
        self._experts = {layer: held.experts for layer, held in served.alone.store.layers.items()}
        self._rows = RowFormat(served.alone.hidden, served.dtype, PLANNED_ROWS).fitting
        self._ahead = ThreadPoolExecutor(1, "smoe-ahead")
        self._coming = set[Future[None]]()
        """Loads of announced experts that have not ended."""
        self._arithmetic: str | None = None
        """The kernels for few rows; None until a coordinator has sent them."""
        self._welcomes = 0
        self._ended = 0.0
        """The time at which the last request was finished. The next request's duration is counted from this time if it
        arrived earlier."""

    @property
    def _part_bytes(self) -> int:
        return self._rows.part_bytes

    def _over(self) -> None:
        self._ahead.shutdown(cancel_futures=True)

    def _greeting(self) -> list[Any]:
        return frames.talk(FrameKind.HELLO, self._hello())

    def _hello(self) -> dict[str, Any]:
        served = self._served
        return {
            "smoe": __version__,
            "name": self._me.name,
            "code": self._me.code,
            "weights": served.weights,
            "precision": served.precision,
            "dtype": served.dtype_name,
            "torch": served.has_torch,
            "slots": served.alone.slots,
            "processor": processor_name(),
            "threads": served.alone.threads,
            "arithmetic": self._arithmetic,
        }

    def _answer(self, dealer: zmq.Socket[bytes], frame: Frame) -> None:
        if frame.kind is FrameKind.WELCOME:
            fields = frames.fields_of(frame)
            if self._must_make_room(fields):
                dealer.disconnect(self._address)
                self._connect(dealer)
                self._sent_at = 0.0
                return
            self._welcomed(fields)
        elif frame.kind is FrameKind.REFUSED:
            raise refusal(self._me, frame)
        elif frame.kind is FrameKind.LEAVE:
            self._received_at = 0.0
        elif frame.kind is FrameKind.WORK:
            try:
                self._work(frame)
            except FrameError as error:
                self._send(dealer, frames.failed(frame.request, f"invalid request: {error}"))
        elif frame.kind is FrameKind.FETCH:
            for key in self._served.alone.expect(frames.parse_fetch(frame, self._experts)):
                self._fetch(key)

    def _must_make_room(self, fields: dict[str, Any]) -> bool:
        """Note the coordinator's maximum number of rows. Return whether its messages may be longer than this connection
        can receive, so that the connection must be opened again."""
        most = fields.get("rows")
        if type(most) is not int or most <= self._rows.most:
            return False
        before, self._rows = self._rows, self._rows._replace(most=most).fitting
        return self._rows.part_bytes > before.part_bytes

    def _welcomed(self, fields: dict[str, Any]) -> None:
        self._forget()
        arithmetic, alone = fields.get("arithmetic"), self._served.alone
        if arithmetic != self._arithmetic:
            if not isinstance(arithmetic, str) or not alone.compute_by(arithmetic):
                raise WorkerRefusedError(
                    f"worker {self._me.name}: the coordinator computes with `kernels={arithmetic}`, which this "
                    "machine does not support; start the coordinator with other `kernels`, or leave this machine "
                    "out of the cluster"
                )
            self._arithmetic = arithmetic
        self._is_in = True
        self._on_change("joined the cluster")

    def _forget(self) -> None:
        """Drop the requests of the previous coordinator."""
        self._welcomes += 1
        for future in list(self._coming):
            future.cancel()
        self._served.alone.experts.reset()

    def _work(self, frame: Frame) -> None:
        began, alone, welcome = time.perf_counter(), self._served.alone, self._welcomes
        asked = frames.parse_work(frame, self._experts, self._rows.numbers, not self._served.has_torch)
        futures = alone.submit(asked.wanted, AtHand(asked.hidden))
        done = itertools.count(1)

        def over(_: Future[torch.Tensor]) -> None:  # one thread computes, request after request
            if next(done) < len(futures) or welcome != self._welcomes:
                return
            whole = time.perf_counter() - max(began, self._ended)
            computing, reads = sum(seconds for seconds, _ in alone.experts.measured()), list(alone.experts.reads())
            times = Times(whole, min(computing, whole), sum(reads), len(reads))
            self._queue.put(_outcome(frame.request, futures, times))
            self._ended = time.perf_counter()

        for future in futures:
            future.add_done_callback(over)

    def _fetch(self, key: ExpertKey) -> None:
        if len(self._coming) >= _MOST_AHEAD:
            return
        future = self._ahead.submit(partial(self._served.alone.bring, key))
        self._coming.add(future)
        future.add_done_callback(self._fetched)

    def _fetched(self, future: Future[None]) -> None:
        self._coming.discard(future)
        if not future.cancelled() and future.exception() is not None:
            _log.warning("an expert could not be prefetched, so it is read when it is needed: %s", future.exception())


def _outcome(request: int, futures: list[Future[torch.Tensor]], times: Times) -> list[Any]:
    """Return the DONE or FAILED message for a request whose experts have all ended."""
    try:
        return frames.done(request, times, [future.result() for future in futures])
    except Exception as error:
        _log.warning("the coordinator's request %d could not be computed: %s", request, error)
        return frames.failed(request, f"{type(error).__name__}: {error}")
