"""Stored responses, which later requests can continue: the newest, within limits of number and memory."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from smoe.server.api_errors import ApiError
from smoe.server.events import to_json

MOST_RESPONSES = 1000
_MOST_BYTES = 32 << 20


class StoredResponse(NamedTuple):
    """A response and its conversation, which includes the response. Both are stored as JSON, because parsed objects
    take ten times the memory."""

    response: bytes
    messages: bytes
    items: tuple[str, ...]
    """The ids of the items of the response's output."""

    @property
    def nbytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Stored responses in memory; they are lost when the server ends."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = _MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of: dict[str, str] = {}
        """{id of an item of an output: the id of its response}."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Store a response and its conversation; the oldest responses are deleted to make room."""
        items = tuple(item["id"] for item in response["output"])
        stored = StoredResponse(to_json(response), to_json(messages), items)
        self._responses[response["id"]] = stored
        self._response_of.update(dict.fromkeys(items, response["id"]))
        self._bytes += stored.nbytes
        while len(self._responses) > self._most or self._bytes > self._most_bytes:
            self.delete(next(iter(self._responses)))

    def get(self, name: str) -> bytes:
        """Return a response as JSON. Raises an `ApiError` for an unknown or deleted one."""
        return self._found(name).response

    def messages(self, name: str, param: str) -> list[dict[str, Any]]:
        """Return the messages of a stored response's conversation, including the response. Raises an `ApiError` that
        names the request's field `param` if the response is unknown."""
        found: list[dict[str, Any]] = json.loads(self._found(name, param).messages)
        return found

    def item(self, name: str, param: str) -> dict[str, Any]:
        """Return an item of a stored response's output. Raises an `ApiError` that names the request's field `param` if
        no stored response has it."""
        stored = self._responses.get(self._response_of.get(name, ""))
        if stored is None:
            message = f"there is no item {name[:100]!r} here; its response was not stored, or was deleted"
            raise ApiError(404, message, param=param, code="item_not_found")
        found: dict[str, Any] = json.loads(stored.response)["output"][stored.items.index(name)]
        return found

    def _found(self, name: str, param: str | None = None) -> StoredResponse:
        found = self._responses.get(name)  # one lookup only: prompts are made on another thread
        if found is None:
            message = (
                f"there is no response {name[:100]!r} here; it was not stored, was deleted, or belongs to another "
                "server"
            )
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    def delete(self, name: str) -> None:
        """Delete a response. Raises an `ApiError` for an unknown one."""
        stored = self._found(name)
        self._bytes -= stored.nbytes
        for item in stored.items:
            self._response_of.pop(item, None)
        del self._responses[name]
