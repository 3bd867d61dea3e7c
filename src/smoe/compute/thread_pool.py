"""Several experts at a time on a CPU: one thread an expert instead of all threads on one.

A matrix-vector product is too short to share well: at 9.4 MB an expert two threads on two experts reach 1.4 times the
rate of two threads on one (docs/log/kernels.md). The rows are the same, so the bits are. Whether it pays depends on how
the OpenMP runtime waits between its parallel regions, so the engine measures both ways when it starts and keeps the
faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class ThreadPool:
    """The calling thread and `threads - 1` helpers; each computes with one thread of its own."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = self._hire()

    def run(self, job: Callable[[int, int], None]) -> None:
        """`job(member, members)` on every member at once; returns when all have ended, raises the first error.

        After an interrupt, too, no helper is left running: it could write into the next request's rows.
        """
        members, before = self.threads, torch.get_num_threads()
        try:
            for member, helper in enumerate(self._helpers, start=1):
                helper.start_job(job, member, members)
            torch.set_num_threads(1)  # 0.1 us; the calling thread's own setting
            job(0, members)
            errors = [helper.wait() for helper in self._helpers]
        except BaseException:
            self.close()
            self._helpers = self._hire()
            raise
        finally:
            torch.set_num_threads(before)
        for error in errors:
            if error is not None:
                raise error

    def _hire(self) -> list[_Helper]:
        return [_Helper(n) for n in range(self.threads - 1)]

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


class _Helper:
    def __init__(self, number: int) -> None:
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"smoe-compute-{number}", daemon=True)
        self._thread.start()

    def start_job(self, job: Callable[[int, int], None], member: int, members: int) -> None:
        self._job = lambda: job(member, members)
        self._go.release()

    def wait(self) -> BaseException | None:
        self._done.acquire()
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        self._job = None
        self._go.release()
        self._thread.join()

    def _work(self) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        while True:
            self._go.acquire()
            job = self._job
            if job is None:
                return
            try:
                job()
            except BaseException as error:
                self._error = error
            self._job = job = None  # it holds the model
            self._done.release()
