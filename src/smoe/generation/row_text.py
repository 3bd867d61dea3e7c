"""The tokens whose keys and values a row of the KV cache holds, and by which factors their positions were turned."""

from __future__ import annotations

from collections.abc import Sequence

from smoe.models.rotary import Factors


class RowText:
    """The text of one row."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._factors: Factors | None = None
        self._alike = 0
        """How many of the first tokens have the first one's factors, `_factors`."""

    def extend(self, ids: Sequence[int], factors: Factors) -> None:
        """Tokens were read, or decoded, with these factors."""
        if not self.ids:
            self._factors = factors
        if self._alike == len(self.ids) and factors == self._factors:
            self._alike += len(ids)
        self.ids.extend(ids)

    def cut(self, length: int) -> None:
        """Only the first tokens remain."""
        del self.ids[length:]
        self._alike = min(self._alike, length)

    def beginning(self, length: int) -> RowText:
        """A copy of the first tokens."""
        copy = RowText()
        copy.ids, copy._factors, copy._alike = self.ids[:length], self._factors, min(self._alike, length)
        return copy

    def in_common(self, ids: Sequence[int], factors: Factors) -> int:
        """How many tokens are the first ones of a prompt with these factors, too, and were turned by them."""
        return min(common_beginning(self.ids, ids), self._alike if factors == self._factors else 0)


def common_beginning(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike: by comparing slices, which Python does a hundred times as fast."""
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if list(a[same:middle]) == list(b[same:middle]):
            same = middle
        else:
            end = middle - 1
    return same
