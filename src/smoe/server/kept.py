"""Responses that were given, so that later ones can go on with them: the newest, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from smoe.server.problem import ApiError

MOST_RESPONSES = 1000
_MOST_CHARACTERS = 32 << 20


@dataclass(frozen=True)
class KeptResponse:
    """One, and the conversation up to and with it."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    characters: int


class Kept:
    """In memory: gone when the server ends."""

    def __init__(self, most: int = MOST_RESPONSES, most_characters: int = _MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._responses: OrderedDict[str, KeptResponse] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep one; the oldest are forgotten for it."""
        size = sum(len(str(message)) for message in messages) + len(str(response))
        self._responses[response["id"]] = KeptResponse(response, messages, size)
        self._characters += size
        while len(self._responses) > self._most or self._characters > self._most_characters:
            _, oldest = self._responses.popitem(last=False)
            self._characters -= oldest.characters

    def get(self, name: str, param: str | None = None) -> KeptResponse:
        """Raises an `ApiError` for one that is not here, or not any more."""
        if name not in self._responses:
            message = f"there is no response {name[:100]!r} here; it was not stored, is forgotten, or of another server"
            raise ApiError(404, message, param=param, code="response_not_found")
        return self._responses[name]

    def delete(self, name: str) -> None:
        """Forget one. Raises an `ApiError` for one that is not here."""
        self._characters -= self.get(name).characters
        del self._responses[name]
