"""The tokens that a row of the KV cache contains, and the rotary factors with which they were computed."""

from __future__ import annotations

from collections.abc import Sequence

from smoe.models.rotary import Factors


class RowText:
    """The tokens in one row of the KV cache. In place of the tokens of an image there are negative numbers that are
    derived from the image (`prompt_images.py`)."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._factors: Factors | None = None
        self._alike = 0
        """The number of first tokens that were computed with the rotary factors `_factors`."""

    def extend(self, ids: Sequence[int], factors: Factors) -> None:
        """Append tokens that were computed with these rotary factors."""
        if not self.ids:
            self._factors = factors
        if self._alike == len(self.ids) and factors == self._factors:
            self._alike += len(ids)
        self.ids.extend(ids)

    def cut(self, length: int) -> None:
        """Remove all tokens after the first `length`."""
        del self.ids[length:]
        self._alike = min(self._alike, length)

    def beginning(self, length: int) -> RowText:
        """Return a copy of the first `length` tokens."""
        copy = RowText()
        copy.ids, copy._factors, copy._alike = self.ids[:length], self._factors, min(self._alike, length)
        return copy

    def in_common(self, ids: Sequence[int], factors: Factors) -> int:
        """Return how many of the row's first tokens can be reused for a prompt. `ids`: the prompt's tokens; the other
        argument: the rotary factors of the prompt."""
        return min(common_beginning(self.ids, ids), self._alike if factors == self._factors else 0)


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of first tokens that two texts have in common. Whole slices are compared, which is a hundred
    times faster in Python than comparing single tokens."""
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if list(a[same:middle]) == list(b[same:middle]):
            same = middle
        else:
            end = middle - 1
    return same
