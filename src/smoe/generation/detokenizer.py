"""Converts tokens to text one by one. The text never ends within a character, and never contains a stop string.

A token may end within a character (byte-level vocabularies), and its text may depend on the token before (leading
spaces). So a short window of tokens is decoded twice, with and without the newest tokens, and the new text is the
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_INCOMPLETE = "\ufffd"
"""The character that the decoder returns for an incomplete character."""
_CONTEXT_TOKENS = 6
"""The number of prompt tokens at the start of the window of decoded tokens. With them, the first new token is decoded
as a continuation."""

OnText = Callable[[int, str], None]
"""A function of (row, new text), called on the generating thread."""


class TextStream:
    """Converts the tokens of one sequence to text. `push` and `flush` return the new text that may be shown."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self.text = ""
        """All text shown so far."""
        self.found_stop = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._window = 0
        self._decoded = len(self._ids)
        self._held = ""

    def push(self, token: int) -> str:
        """Add a token. Return the new text that may be shown; it may be empty."""
        if self.found_stop:
            return ""
        self._ids.append(token)
        return self._show(self._new_text(is_last=False), is_last=False)

    def flush(self) -> str:
        """Return the text that has not been shown: the possible beginning of a stop string, and incomplete
        characters."""
        if self.found_stop:
            return ""
        return self._show(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool) -> str:
        known = self._decode(self._ids[self._window : self._decoded])
        text = self._decode(self._ids[self._window :])
        if text.endswith(_INCOMPLETE) and not is_last:
            return ""
        self._window, self._decoded = self._decoded, len(self._ids)
        return text[len(known) :]

    def _show(self, new: str, is_last: bool) -> str:
        pending = self._held + new
        cut = min((place for place in map(pending.find, self._stop) if place >= 0), default=-1)
        if cut >= 0:
            self.found_stop, shown, self._held = True, pending[:cut], ""
        else:
            keep = 0 if is_last else max((overlap(pending, stop) for stop in self._stop), default=0)
            shown, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += shown
        return shown

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
