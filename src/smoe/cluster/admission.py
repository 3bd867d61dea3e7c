"""Which workers a running coordinator admits: those whose keys it knows, and those with a valid invitation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from smoe.cluster.identity import MOST_NAME, Main, is_name, keep_main, read_main
from smoe.errors import ClusterError


class Admission:
    """Its cluster as main knows it now. Called by the link's thread, and by the one that knows connections' keys."""

    def __init__(self, main: Main) -> None:
        self.main = main
        self._lock = threading.Lock()

    def may_connect(self, key: str) -> bool:
        """Known workers, and any worker while an invitation is valid."""
        if key not in self.main.workers.values():
            self._read_again()  # a new invitation may have been written since
        return key in self.main.workers.values() or self.main.expects_someone()

    def admitted(self, key: str, fields: dict[str, Any]) -> str:
        """Why a worker with these fields is not admitted; empty: it is, from now on."""
        name = fields.get("name")
        if self.name_of(key) is not None:
            return ""
        if not isinstance(name, str) or not is_name(name):
            return "its first message is incomplete"
        return self._let_in(name, key, fields.get("code"))

    def note_role(self, key: str, is_shadow: bool) -> None:
        """Remember what who has been admitted with this key is, for the mains that come."""
        name = self.name_of(key)
        if name is None or (name in self.main.shadows) == is_shadow:
            return
        self._read_again()
        with self._lock, suppress(OSError):
            self.main = self.main.with_role(name, is_shadow)
            keep_main(self.main)

    def name_of(self, key: str) -> str | None:
        """What the worker with this key is called; None for a stranger."""
        return next((name for name, its_key in self.main.workers.items() if its_key == key), None)

    def _read_again(self) -> None:
        with self._lock, suppress(ClusterError):
            self.main = replace(read_main(self.main.name), address=self.main.address)

    def _let_in(self, name: str, key: str, code: object) -> str:
        """Take an invitation; why not, where it is not good. A name that another worker has gets a number behind it, as
        two machines may have one host name."""
        self._read_again()
        found = self.main.invited(code) if isinstance(code, str) else None
        if found is None:
            return "its invitation is unknown, used or expired; make another (smoe cluster invite, on the coordinator)"
        with self._lock:
            self.main = found.with_worker(numbered(name, found.workers), key)
            keep_main(self.main)
        return ""


def numbered(name: str, taken: Collection[str]) -> str:
    """The name, or the first of name-2, name-3, ... that no worker has."""
    for number in itertools.count(2):
        if name not in taken:
            return name
        ending = f"-{number}"
        name = f"{name.removesuffix(f'-{number - 1}')[: MOST_NAME - len(ending)]}{ending}"
    raise AssertionError("there are numbers enough")
