"""Decides which workers a running coordinator admits: those with known keys, and those with a valid invitation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from smoe.cluster.stored_identity import MOST_NAME, Coordinator, is_name, read_coordinator, store_coordinator
from smoe.errors import ClusterError


class Admission:
    """The coordinator's current record of its cluster. The thread of the connections and ZeroMQ's authenticator thread
    both call this class."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._lock = threading.Lock()

    def may_connect(self, key: str) -> bool:
        """Return whether a machine with this key may connect: a known worker, or any machine while an invitation is
        valid."""
        if key not in self.coordinator.workers.values():
            self._read_again()  # there may be a new invitation
        return key in self.coordinator.workers.values() or self.coordinator.expects_someone()

    def admitted(self, key: str, fields: dict[str, Any]) -> str:
        """Admit a worker. Return the reason why it is not admitted, or an empty text if it is."""
        name = fields.get("name")
        if self.name_of(key) is not None:
            return ""
        if not isinstance(name, str) or not is_name(name):
            return "its first message is incomplete"
        return self._let_in(name, key, fields.get("code"))

    def note_role(self, key: str, is_draft: bool) -> None:
        """Record in the cluster's file whether the machine with this key runs a draft model. Later runs of the
        coordinator read this."""
        name = self.name_of(key)
        if name is None or (name in self.coordinator.drafts) == is_draft:
            return
        self._read_again()
        with self._lock, suppress(OSError):
            self.coordinator = self.coordinator.with_role(name, is_draft)
            store_coordinator(self.coordinator)

    def exclude(self, key: str) -> None:
        """Exclude the worker with this key permanently."""
        with self._lock:
            with suppress(ClusterError):
                self.coordinator = replace(read_coordinator(self.coordinator.name), address=self.coordinator.address)
            self.coordinator = self.coordinator.without_worker(key)
            with suppress(OSError):
                store_coordinator(self.coordinator)

    def name_of(self, key: str) -> str | None:
        """Return the name of the worker with this key; None for an unknown key."""
        return next((name for name, its_key in self.coordinator.workers.items() if its_key == key), None)

    def _read_again(self) -> None:
        with self._lock, suppress(ClusterError):
            self.coordinator = replace(read_coordinator(self.coordinator.name), address=self.coordinator.address)

    def _let_in(self, name: str, key: str, code: object) -> str:
        """Admit a worker by its invitation's `code`, which is then used up. Return the reason why the invitation is not
        valid, or an empty text if the worker is admitted.

        If another worker already has this name, a number is appended to the name, because two machines may have the
        same host name.
        """
        self._read_again()
        found = self.coordinator.invited(code) if isinstance(code, str) else None
        if found is None:
            return "its invitation is unknown, used or expired; make another (smoe cluster invite, on the coordinator)"
        with self._lock:
            self.coordinator = found.with_worker(numbered(name, found.workers), key)
            store_coordinator(self.coordinator)
        return ""


def numbered(name: str, taken: Collection[str]) -> str:
    """Return `name` if no worker has this name, else the first of name-2, name-3, ... that no worker has."""
    for number in itertools.count(2):
        if name not in taken:
            return name
        ending = f"-{number}"
        name = f"{name.removesuffix(f'-{number - 1}')[: MOST_NAME - len(ending)]}{ending}"
    raise AssertionError("there are numbers enough")
