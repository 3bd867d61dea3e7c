"""Computes several experts at a time on a CPU, each on one thread, instead of one expert on all threads.

A product of a matrix and a vector is too short to divide well: with experts of 9.4 MB, two threads on two experts are
1.4 times as fast as two threads on one (docs/log/kernels.md). The rows are the same, and so are the bits. Which method
is faster depends on how the OpenMP runtime waits between parallel regions, so the engine measures both at start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class ThreadPool:
    """A pool of the calling thread and `threads - 1` helper threads; each of them uses one thread for torch's
    operations."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = self._hire()

    def run(self, job: Callable[[int, int], None]) -> None:
        """Call `job(member, members)` on all threads at once, where `member` is the index of the thread and `members`
        their number. Return when all calls have ended, or raise the first error.

        After an interrupt no thread keeps running, because it could write into the rows of the next request.
        """
        members, before = self.threads, torch.get_num_threads()
        try:
            for member, helper in enumerate(self._helpers, start=1):
                helper.start_job(job, member, members)
            torch.set_num_threads(1)  # takes 0.1 us; a setting of the calling thread
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
            self._job = job = None  # its closure refers to the model
            self._done.release()
