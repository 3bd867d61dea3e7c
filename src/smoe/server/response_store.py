"""Responses that were given, so that later ones can go on with them: the newest, within a bound."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from smoe.server.events import to_json
from smoe.server.problem import ApiError

MOST_RESPONSES = 1000
_MOST_BYTES = 32 << 20


class StoredResponse(NamedTuple):
    """One, and the conversation up to and with it, as JSON: what it was parsed into takes ten times the memory."""

    response: bytes
    messages: bytes

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Stored responses, in memory: gone when the server ends."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep one; the oldest are forgotten for it."""
        stored = StoredResponse(to_json(response), to_json(messages))
        self._responses[response["id"]] = stored
        self._bytes += stored.nbytes
        while len(self._responses) > self._most or self._bytes > self._most_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._bytes -= oldest.nbytes

    def get(self, name: str) -> bytes:
        """One as JSON. Raises an `ApiError` for one that is not here, or not any more."""
        return self._found(name).response

    def messages(self, name: str, param: str) -> list[dict[str, Any]]:
        """The conversation up to and with one. Raises an `ApiError` that names `param` for one that is not here."""
        found: list[dict[str, Any]] = json.loads(self._found(name, param).messages)
        return found

    def _found(self, name: str, param: str | None = None) -> StoredResponse:
        found = self._responses.get(name)  # once: prompts are made on another thread
        if found is None:
            message = (
                f"there is no response {name[:100]!r} here; it was not stored, was deleted, or belongs to another "
                "server"
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    def delete(self, name: str) -> None:
        """Forget one. Raises an `ApiError` for one that is not here."""
        self._bytes -= self._found(name).nbytes
        del self._responses[name]
